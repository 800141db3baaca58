"""Which part of a decoding step the time goes to: lade's own functions, watched where the loop calls them.

propose   the drafter's guesses
lay out   tokens, positions, masks, slots
forward   the model's own forward
verify    the walk along the token tree; processors, sampling, stop rules, streamer
commit    keys and values of accepted guesses move up
learn     n-grams into the pool, the window rolls
other     the loop itself
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import lade
from lade import decoding, stats
from lade.block import kv_cache, layout
from lade.drafting.lookahead import LookaheadDrafter
from lade.drafting.tree import TreeDrafter
from lade.forward import base as forward
from lade.forward.cuda import static_shapes as fixed
from lade.models import base
from lade.switch import current_config
from lade.verification import selection as rules

PARTS = ("propose", "lay out", "forward", "verify", "commit", "learn", "other")
Enter = Callable[[str], AbstractContextManager]


def functions_of_parts() -> Iterator[tuple[Any, str, str]]:
    """Where each part is found: an object, the name of its function, the part."""
    for cls in (LookaheadDrafter, TreeDrafter):
        yield cls, "propose", "propose"
        yield cls, "learn", "learn"
    yield decoding, "block_layout", "lay out"
    yield decoding, "Block", "lay out"
    for name in ("tokens", "offsets_and_visibility"):
        yield layout.BlockLayout, name, "lay out"
    # What it does around the model's own forward: masks, slots.
    yield forward.ForwardPath, "forward", "lay out"
    yield base.ModelAdapter, "ordinary_forward", "forward"
    yield fixed.StaticPath, "run", "forward"
    yield fixed.StaticPath, "replay", "forward"
    for cls in classes("lade", "verify"):
        if issubclass(cls, rules.Selection):
            yield cls, "verify", "verify"
    yield kv_cache.LookaheadCache, "commit", "commit"


def classes(package: str, method: str) -> list[type]:
    """Classes of a package of lade that define a method themselves."""
    modules = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    found = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return [cls for cls in found if cls.__module__.startswith(package) and method in vars(cls)]


@contextmanager
def watched(enter: Enter, which: tuple[str, ...] = PARTS) -> Iterator[None]:
    """Run each part's functions inside of `enter(part)`; the functions themselves are put back afterwards."""
    with ExitStack() as stack:
        for owner, name, part in functions_of_parts():
            if part in which and name in vars(owner):
                stack.enter_context(mock.patch.object(owner, name, inside(enter, part, vars(owner)[name])))
        yield


def inside(enter: Enter, part: str, function: Callable) -> Callable:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with enter(part):
            return function(*args, **kwargs)

    return call


class PartTimer:
    """Seconds of each part in each step after the prefill's. A part inside of another one is counted by itself.

    synchronize: called before each clock read, so that on a GPU a part has done what it launched.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.steps: list[dict[str, float]] = []
        self._synchronize = synchronize
        self._open: list[str] = []
        self.begin()

    def begin(self) -> None:
        """To be called before each generate(): the prefill's step, and what comes before it, does not count."""
        self._is_prefill = True
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._tick()
        self._open.append(name)
        try:
            yield
        finally:
            self._tick()
            self._open.pop()

    def end_step(self, *_: Any) -> None:
        """For `lade.stats.tracing`."""
        self._tick()
        if not self._is_prefill:
            self.steps.append(self._seconds)
        self._is_prefill = False
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def _tick(self) -> None:
        self._synchronize()
        now = time.perf_counter()
        self._seconds[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now

    @contextmanager
    def running(self) -> Iterator[PartTimer]:
        with watched(self.part), stats.tracing(self.end_step):
            yield self


def add_forward_arguments(parser: argparse.ArgumentParser) -> None:
    """How blocks go through the model."""
    choice = {"choices": ("auto", "0", "1"), "default": "auto"}
    parser.add_argument("--use_flash", **choice, help="through lade's own attention (USE_FLASH)")
    parser.add_argument("--compile", action="store_true", help="compiled, in fixed shapes (COMPILE=1)")
    parser.add_argument("--cuda_graph", **choice, help="captured in CUDA graphs (CUDA_GRAPH)")
    parser.add_argument("--pack", **choice, help="with packed weights, on a CPU (PACK)")


def forward_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of config_lade."""
    given = {"USE_FLASH": args.use_flash, "CUDA_GRAPH": args.cuda_graph, "PACK": args.pack}
    return {name: "auto" if value == "auto" else int(value) for name, value in given.items()} | {
        "COMPILE": int(args.compile)
    }


def set_up_forward(args: argparse.Namespace) -> None:
    # Prompts come up again in every trial: no call may learn from another.
    lade.config_lade(SHARE=0, **forward_settings(args))


def reasons(found: stats.GenerationStats) -> set[str]:
    """Why blocks did not go through the forward that was asked for, or that lade would have chosen."""
    return set(found.reasons.values())


def broken_wishes(found: stats.GenerationStats) -> set[str]:
    """The same without what was left to lade, and without single products of packed weights that were torch's own."""
    config = current_config()
    left = {found.reasons.get("kernel")} if config.use_flash is None else set()
    left |= {found.reasons.get("graph")} if config.cuda_graph is None else set()
    left |= {found.reasons.get("packed")} if config.pack is None or found.packed_weights else set()
    return reasons(found) - left


def show_reasons(found: set[str]) -> list[str]:
    for reason in sorted(found):
        print(f"blocks went another way: {reason}")
    return sorted(found)
