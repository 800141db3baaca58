"""What happens in a few decoding steps: the costliest operators, and every place where the host waits for the device.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --steps 20 --trace trace.json

The trace opens in chrome://tracing or ui.perfetto.dev; its ranges "lade: propose" and so on are the parts of a step. On a GPU
the waits are those that CUDA itself reports (torch.cuda.set_sync_debug_mode). On a CPU nothing waits: the calls that would on a
GPU are counted instead, with the pool in the form it has there. Ends with one JSON line.

Not named profile.py: scripts here would find that one in place of the standard library's, which cProfile and so torch import.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import harness
import parts
import shapes
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import lade
from lade.drafting import lookahead
from lade.drafting.ngram_pool import NGramPool
from lade.transfer import to_device
from lade.verification import logits

SYNC_WARNING = "called a synchronizing CUDA operation"
# Operators that bring a value, or a shape that depends on values, to the host.
READING_OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
# They pass by the dispatcher on a CPU.
READING_METHODS = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu"}
# They take their values from the host: a copy from memory that is not pinned.
MAKING_FUNCTIONS = {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor", torch.from_numpy: "from_numpy"}
SKIPPED_FILES = ("benchmarks", "contextlib.py", "_contextlib.py", "functools.py")


class Waits:
    """Where the host waited, over the steps of the calls under way. The prefill and the step after it do not count."""

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()  # (what, where) -> how often
        self.num_steps = 0
        self.is_counting = False

    def begin(self) -> None:
        """To be called before and after each generate()."""
        self.is_counting = False

    def end_step(self, *_: Any) -> None:
        """For `lade.stats.tracing`."""
        self.num_steps += self.is_counting
        self.is_counting = True

    def add(self, what: str, where: str) -> None:
        if self.is_counting:
            self.places[what, where] += 1

    def take_back(self, what: str, where: str) -> None:
        """It was no wait."""
        if self.places[what, where] > 0:
            self.places[what, where] -= 1

    def per_step(self) -> list[dict[str, Any]]:
        """The places, most frequent first."""
        steps = max(1, self.num_steps)
        return [
            {"what": what, "where": where, "per_step": round(count / steps, 3)}
            for (what, where), count in self.places.most_common()
            if count
        ]


def place(frame: FrameType | None) -> str:
    """The innermost line of lade or transformers, or else of anyone but torch and this benchmark."""
    stack = traceback.extract_stack(frame)
    for part in reversed(stack):
        path = Path(part.filename)
        if "torch" in path.parts or path.name in SKIPPED_FILES or path.parent.name in SKIPPED_FILES:
            continue
        return f"{short_path(path)}:{part.lineno} {part.name}"
    return "?"


def short_path(path: Path) -> str:
    """From the package's name on."""
    names = list(path.parts)
    for package in ("lade", "transformers"):
        if package in names:
            start = len(names) - 1 - names[::-1].index(package)
            return "/".join(names[start:])
    return path.name


class CountReads(TorchDispatchMode):
    """Counts operators that read a value."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in READING_OPERATORS:
            self.waits.add(name.removeprefix("aten::").strip("_"), place(sys._getframe(1)))
        return function(*args, **(kwargs or {}))


class CountCopies(TorchFunctionMode):
    """Counts what passes by the dispatcher: lists made from tensors, and tensors made from lists.

    Of these tensors, those that `lade.transfer.to_device` copies make nobody wait.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self._made: dict[int, tuple[str, str]] = {}  # by the tensor's id, while a step goes on

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in READING_METHODS:
            self.waits.add(READING_METHODS[function], place(sys._getframe(1)))
        elif function in MAKING_FUNCTIONS and str(kwargs.get("device", "")) != "meta":
            found = function(*args, **kwargs)
            self._made[id(found)] = MAKING_FUNCTIONS[function], place(sys._getframe(1))
            self.waits.add(*self._made[id(found)])
            return found
        if function is torch.Tensor.to and sys._getframe(1).f_code is to_device.__code__:
            counted = self._made.pop(id(args[0]), None)
            if counted is not None:
                self.waits.take_back(*counted)
        return function(*args, **kwargs)


def pool_on_device(device: torch.device, *sizes: int) -> NGramPool:
    """In place of `pool_for`: dictionaries are for the CPU alone."""
    return NGramPool(*sizes, device)


@contextmanager
def counted_on_cpu(waits: Waits) -> Iterator[None]:
    on_device = mock.patch.object(lookahead, "pool_for", pool_on_device), mock.patch.object(logits, "ON_HOST", ())
    with on_device[0], on_device[1], CountReads(waits), CountCopies(waits):
        yield


@contextmanager
def reported_by_cuda(waits: Waits) -> Iterator[None]:
    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if SYNC_WARNING in str(message):
            waits.add("synchronize", place(sys._getframe(1)))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with mock.patch.object(warnings, "showwarning", note):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


def count_waits(model: Any, prompts: list[dict[str, torch.Tensor]], common: dict[str, Any]) -> Waits:
    waits = Waits()
    counting = reported_by_cuda if model.device.type == "cuda" else counted_on_cpu
    with harness.use_lade(True):
        for prompt in prompts:  # what is made once has been made by then
            decode(model, prompt, common)
        with lade.stats.tracing(waits.end_step), counting(waits):
            for prompt in prompts:
                waits.begin()
                decode(model, prompt, common)
                waits.begin()
    return waits


def decode(model: Any, prompt: dict[str, torch.Tensor], common: dict[str, Any]) -> None:
    model.generate(**prompt, **common)
    stats = lade.last_stats()
    if stats is None or stats.fallback_reason is not None or parts.broken_wishes(stats):
        raise RuntimeError(f"lookahead did not run, or not as asked for: {stats}")


class StepProfile:
    """A profile of a number of steps, from the end of one to the end of another."""

    def __init__(self, first: int, count: int, on_gpu: bool) -> None:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
        self.profile = torch.profiler.profile(activities=activities)
        self.first, self.last = first, first + count
        self.num_steps = 0  # that ended
        self.is_running = False

    def end_step(self, *_: Any) -> None:
        self.num_steps += 1
        if self.num_steps == self.first:
            self.profile.start()
            self.is_running = True
        elif self.num_steps == self.last:
            self.stop()

    def stop(self) -> None:
        if self.is_running:
            self.profile.stop()
        self.is_running = False

    @property
    def num_profiled(self) -> int:
        return max(0, min(self.num_steps, self.last) - self.first)


def labelled(part: str) -> AbstractContextManager:
    return record_function(f"lade: {part}")


def profile_steps(model: Any, prompt: dict[str, torch.Tensor], steps: int, common: dict[str, Any]) -> StepProfile:
    """Profile `steps` steps behind the first two of one call, fewer where the text ends before."""
    found = StepProfile(2, steps, model.device.type == "cuda")
    with harness.use_lade(True):
        decode(model, prompt, common)
        with parts.watched(labelled), lade.stats.tracing(found.end_step):
            decode(model, prompt, common)
    found.stop()
    if not found.num_profiled:
        raise SystemExit(
            f"the text ended after {found.num_steps} steps: a larger --max_new_tokens or another prompt is needed"
        )
    return found


def operators(found: StepProfile, on_gpu: bool, count: int = 12) -> list[dict[str, Any]]:
    """The operators that took the most time by themselves. Times in microseconds per step."""
    own_time: Callable[[Any], float] = lambda event: event.self_cpu_time_total  # noqa: E731
    if on_gpu:
        own_time = lambda event: event.self_device_time_total  # noqa: E731
    events = [event for event in found.profile.key_averages() if not event.key.startswith("lade: ")]
    return [
        {
            "name": event.key,
            "calls_per_step": round(event.count / found.num_profiled, 2),
            "microseconds_per_step": round(own_time(event) / found.num_profiled, 2),
        }
        for event in sorted(events, key=own_time, reverse=True)[:count]
    ]


def show(rows: list[dict[str, Any]], waits: Waits, on_gpu: bool) -> None:
    print(f"{'operator':<48} {'calls/step':>11} {'us/step':>10}")
    for row in rows:
        print(f"{row['name'][:48]:<48} {row['calls_per_step']:>11.1f} {row['microseconds_per_step']:>10.1f}")
    verb = "waits" if on_gpu else "would wait on a GPU"
    total = sum(waits.places.values()) / max(1, waits.num_steps)
    print(f"\nthe host {verb} {total:.1f} times a step ({waits.num_steps} steps)")
    for wait in waits.per_step():
        print(f"{wait['per_step']:>8.2f}  {wait['what']:<20} {wait['where']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parts.add_forward_arguments(parser)
    shapes.add_shape_argument(parser, "the steps are then those of a text that nobody wrote")
    parser.set_defaults(limit=2)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt with --shape")
    parser.add_argument("--steps", type=int, default=8, help="how many steps to profile, at most")
    parser.add_argument("--trace", type=Path, help="write a chrome trace of these steps there")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    for name in ("steps", "limit", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main() -> None:
    args = parse()
    if args.shape:
        longest = args.context + args.max_new_tokens + 256  # and a block behind it
        model = shapes.random_model(args.shape, args.device, getattr(torch, args.dtype), longest)
        prompts = shapes.random_prompts(model, args.limit, 1, args.context)
    else:
        model, tokenizer = harness.load_model(args)
        prompts = harness.load_prompts(args, tokenizer)
    harness.set_up_lade(args)
    parts.set_up_forward(args)
    on_gpu = model.device.type == "cuda"
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    figures: dict[str, Any] = {
        "benchmark": "step_profile",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common | parts.forward_settings(args),
        "model": args.shape or Path(args.model_path).name,
        "waits_are_real": on_gpu,
    }
    with harness.reporting(figures, args.out):
        waits = count_waits(model, prompts, common)
        figures |= {
            "counted_steps": waits.num_steps,
            "waits_per_step": round(sum(waits.places.values()) / max(1, waits.num_steps), 3),
            "waits": waits.per_step(),
        }
        found = profile_steps(model, prompts[0], args.steps, common)
        rows = operators(found, on_gpu)
        figures |= {"profiled_steps": found.num_profiled, "operators": rows}
        if args.trace:
            found.profile.export_chrome_trace(str(args.trace))
            print(f"trace of {found.num_profiled} steps: {args.trace}")
        show(rows, waits, on_gpu)


if __name__ == "__main__":
    main()
