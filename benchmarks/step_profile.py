"""What happens in a few decoding steps: the costliest operators, where the host waits for the device, what it launches.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --steps 20 --trace trace.json
    python benchmarks/step_profile.py --stand_in --mode tree    # on a CPU: captured steps, with stand-ins for graphs

The trace opens in chrome://tracing or ui.perfetto.dev; its ranges "lade: propose" and so on are the parts of a step. On
a GPU the waits are those that CUDA itself reports (torch.cuda.set_sync_debug_mode). On a CPU nothing waits: the calls
that would on a GPU are counted instead, with the pool in the form it has there. Launches are operations on what would
be a GPU's memory, outside of the model's forward, or of the graph that replays it: kernels, copies and further graphs,
each as one. They are counted on a CPU alone: its memory is all one, so what would lie on the GPU is told by where it
comes from (weights, prompts, `lade.transfer`, and what is computed from these). Ends with one JSON line.

Not named profile.py: scripts here would find that one in place of the standard library's, which cProfile and so torch
import.
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import harness
import parts
import shapes
import torch
from gpu import stand_in
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lade
from lade import decoding, transfer
from lade.drafting import lookahead
from lade.drafting.ngram_pool import NGramPool
from lade.forward.static_choice import StaticChoice
from lade.forward.static_shapes import StaticForward
from lade.models.base import ModelAdapter
from lade.transfer import HOST, to_device

SYNC_WARNING = "called a synchronizing CUDA operation"
# Operators that bring a value, or a shape that depends on values, to the host.
READING_OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
# They run nothing, though they are not marked as views.
FREE_OPERATORS = {"aten::empty.memory_format", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::lift_fresh"}
FREE_OPERATORS |= {"aten::_unsafe_view", "aten::_reshape_alias", "aten::_local_scalar_dense"}
# They pass by the dispatcher on a CPU.
READING_METHODS = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu"}
# They take their values from the host: a copy from memory that is not pinned.
MAKING_FUNCTIONS = {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor"}
SKIPPED_FILES = ("benchmarks", "contextlib.py", "_contextlib.py", "functools.py")


class Waits:
    """Where the host waited, and what it launched, over the steps of the calls under way.

    The prefill and the step after it do not count.
    """

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()  # (what, where) -> how often
        self.launches: Counter[tuple[str, str]] = Counter()
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

    def launch(self, what: str, where: str) -> None:
        if self.is_counting:
            self.launches[what, where] += 1

    def take_back(self, what: str, where: str) -> None:
        """It was no wait."""
        if self.places[what, where] > 0:
            self.places[what, where] -= 1

    def per_step(self, counted: Counter[tuple[str, str]] | None = None) -> list[dict[str, Any]]:
        """The places, most frequent first. counted: `launches`, in place of the waits."""
        steps = max(1, self.num_steps)
        return [
            {"what": what, "where": where, "per_step": round(count / steps, 3)}
            for (what, where), count in (self.places if counted is None else counted).most_common()
            if count
        ]

    def figures(self) -> dict[str, Any]:
        steps = max(1, self.num_steps)
        found = {
            "counted_steps": self.num_steps,
            "waits_per_step": round(sum(self.places.values()) / steps, 3),
            "waits": self.per_step(),
        }
        if not self.launches:  # on a GPU
            return found
        launches = round(sum(self.launches.values()) / steps, 3)
        return found | {"launches_per_step": launches, "launches": self.per_step(self.launches)}


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


class DeviceMemory:
    """Which memory would be a GPU's, on a CPU."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # which keep their addresses from being used again

    def add(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and not self.holds(leaf):
                found = StorageWeakRef(leaf.untyped_storage())
                self._storages[found.cdata] = found

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


class CountOperators(TorchDispatchMode):
    """Counts operators that read a value, and those that a GPU would have to run."""

    def __init__(self, waits: Waits, memory: DeviceMemory) -> None:
        super().__init__()
        self.waits, self.memory = waits, memory
        self._num_paused = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._num_paused:
            return function(*args, **kwargs)
        name = function._schema.name
        if name in READING_OPERATORS:
            self.waits.add(name.removeprefix("aten::").strip("_"), place(sys._getframe(1)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = function(*args, **kwargs)
        is_on_device = any(map(self.memory.holds, given))
        if name == "aten::copy_" and is_on_device and not all(map(self.memory.holds, given)):
            where = place(sys._getframe(1))
            if not where.startswith("lade/transfer.py"):  # whose memory on the host is pinned
                self.waits.add("copy", where)
        if name == "aten::copy_" and not self.memory.holds(args[0]):
            if is_on_device:  # to the host
                self._launch(name, args)
        elif is_on_device or not given:  # what makes a tensor from nothing is taken to make it on the device
            self.memory.add(found)
            if not function.is_view and name not in FREE_OPERATORS:
                self._launch(name, args)
        return found

    def _launch(self, name: str, args: Any) -> None:
        self.waits.launch(name.removeprefix("aten::").strip("_"), place(sys._getframe(1)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def aside(self, function: Callable[..., Any], launches: int = 0) -> Callable[..., Any]:
        """A forward, or a graph's replay, whose operations do not count. launches: what counts in their place."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                found = function(*args, **kwargs)
            for _ in range(launches):
                self._launch(f"aten::{function.__name__}", args)
            self.memory.add(dict(found) if isinstance(found, dict) else found)
            return found

        return call


class CountCopies(TorchFunctionMode):
    """Counts what passes by the dispatcher: lists made from tensors, tensors made from lists, copies to the device.

    What is made on `HOST` stays there, and what `lade.transfer` copies makes nobody wait.
    """

    def __init__(self, waits: Waits, operators: CountOperators) -> None:
        super().__init__()
        self.waits, self.operators, self.memory = waits, operators, operators.memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on_host = kwargs.get("device") is HOST or kwargs.get("device") == "cpu"
        if is_on_host and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
            with self.operators.paused():
                return function(*args, **kwargs)
        if function in READING_METHODS:
            self.waits.add(READING_METHODS[function], place(sys._getframe(1)))
        elif function in MAKING_FUNCTIONS and str(kwargs.get("device", "")) != "meta":
            self.waits.add(MAKING_FUNCTIONS[function], place(sys._getframe(1)))
        elif function is torch.Tensor.to and not self.memory.holds(args[0]) and names_device(args[1:], kwargs):
            caller = sys._getframe(1)
            if caller.f_code is not to_device.__code__:
                self.waits.add("to", place(caller))
            self.waits.launch("copy to the device", place(sys._getframe(2)))
            self.memory.add(args[0])
        return function(*args, **kwargs)


def names_device(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` asks for a device other than `HOST`."""
    found = [kwargs.get("device"), *args]
    return any(isinstance(device, torch.device) and device is not HOST for device in found)


def pool_on_device(device: torch.device, *sizes: int) -> NGramPool:
    """In place of `pool_for`: dictionaries are for the CPU alone."""
    return NGramPool(*sizes, device)


def counted_wait(waits: Waits) -> AbstractContextManager:
    """The loop's own wait for the forward, which is no operator."""
    original = decoding.wait_for

    def wait_for(device: torch.device) -> None:
        waits.add("wait_for", place(sys._getframe(1)))
        original(device)

    return mock.patch.object(decoding, "wait_for", wait_for)


@contextmanager
def counted_on_cpu(waits: Waits, *on_device: Any) -> Iterator[None]:
    """on_device: tensors that would be on a GPU, such as the model's weights."""
    memory = DeviceMemory()
    memory.add(on_device)
    operators = CountOperators(waits, memory)

    forwards: list[tuple[Any, str]] = [(StaticForward, "replay"), (StaticForward, "call")]
    forwards += [(ModelAdapter, "ordinary_forward")]
    patches = [mock.patch.object(owner, name, operators.aside(getattr(owner, name))) for owner, name in forwards]
    # A graph beside that of the forward.
    patches.append(mock.patch.object(StaticChoice, "replay", operators.aside(StaticChoice.replay, launches=1)))
    patches.append(mock.patch.object(lookahead, "pool_for", pool_on_device))
    patches.append(mock.patch.object(transfer, "ON_HOST", ()))
    patches.append(counted_wait(waits))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(operators)
        stack.enter_context(CountCopies(waits, operators))
        yield


@contextmanager
def reported_by_cuda(waits: Waits) -> Iterator[None]:
    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if SYNC_WARNING in str(message):
            waits.add("synchronize", place(sys._getframe(1)))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with mock.patch.object(warnings, "showwarning", note), counted_wait(waits):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


def count_waits(model: Any, prompts: list[dict[str, torch.Tensor]], common: dict[str, Any]) -> Waits:
    waits = Waits()
    counting = reported_by_cuda(waits)
    if model.device.type != "cuda":
        counting = counted_on_cpu(waits, *model.parameters(), *model.buffers(), prompts)
    with harness.use_lade(True), counting:
        # What is made or checked once has been by then: the counted steps are the same, and graphs are checked twice.
        for prompt in [*prompts, *prompts]:
            torch.manual_seed(0)
            decode(model, prompt, common)
        with lade.stats.tracing(waits.end_step):
            for prompt in prompts:
                waits.begin()
                torch.manual_seed(0)  # with sampling, the steps depend on it
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
    if not on_gpu:
        total = sum(waits.launches.values()) / max(1, waits.num_steps)
        print(f"\non a GPU it would launch {total:.1f} operations a step beside the forward")
        for launch in waits.per_step(waits.launches):
            print(f"{launch['per_step']:>8.2f}  {launch['what']:<20} {launch['where']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parts.add_forward_arguments(parser)
    shapes.add_shape_argument(parser, "the steps are then those of a text that nobody wrote")
    parser.set_defaults(limit=2)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt with --shape")
    parser.add_argument("--steps", type=int, default=8, help="how many steps to profile, at most")
    parser.add_argument("--do_sample", action="store_true", help="sample, with temperature 0.8 and top_k 50")
    parser.add_argument("--stand_in", action="store_true", help="on a CPU: stand-ins for CUDA graphs")
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
    if args.stand_in:
        stand_in.install()
        lade.config_lade(CUDA_GRAPH=1)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50} if args.do_sample else {"do_sample": False}
    common = {"max_new_tokens": args.max_new_tokens} | sampling

    figures: dict[str, Any] = {
        "benchmark": "step_profile",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common | parts.forward_settings(args),
        "model": args.shape or Path(args.model_path).name,
        "waits_are_real": on_gpu,
    }
    with harness.reporting(figures, args.out):
        waits = count_waits(model, prompts, common)
        figures |= waits.figures()
        found = profile_steps(model, prompts[0], args.steps, common)
        rows = operators(found, on_gpu)
        figures |= {"profiled_steps": found.num_profiled, "operators": rows}
        if args.trace:
            found.profile.export_chrome_trace(str(args.trace))
            print(f"trace of {found.num_profiled} steps: {args.trace}")
        show(rows, waits, on_gpu)


if __name__ == "__main__":
    main()
