"""Counts where a step would wait for a GPU, and what it would launch there, on a CPU.

Calls that would wait on a GPU are counted: values read, and tensors made from Python's lists, which are copied from
memory that is not pinned. Launches are operations on what would be a GPU's memory, outside of the model's forward or
of the graph that replays it. That memory is told by where it comes from: weights, prompts, `lade.common.transfer`, and
what is computed from these.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lade import decoding
from lade.common import transfer
from lade.common.transfer import HOST, to_device
from lade.forward.cuda.static_shapes import StaticPath
from lade.models.base import ModelAdapter

# Operators that bring a value, or a shape that depends on values, to the host.
READING_OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
# They run nothing, though they are not marked as views.
FREE_OPERATORS = {"aten::empty.memory_format", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::lift_fresh"}
FREE_OPERATORS |= {"aten::_unsafe_view", "aten::_reshape_alias", "aten::_local_scalar_dense"}
# They pass by the dispatcher on a CPU.
READING_METHODS = {torch.Tensor.tolist, torch.Tensor.cpu}
# They take their values from the host: a copy from memory that is not pinned.
MAKING_FUNCTIONS = {torch.tensor, torch.as_tensor}
PINNING_FILES = ("lade/common/transfer.py", "lade/forward/cuda/transfer.py")
SKIPPED_FILES = ("waits.py", "contextlib.py", "_contextlib.py", "functools.py")


class Waits:
    """Where the host waited, and what it launched, over the steps of the calls under way: (what, where) -> how often.

    The prefill and the step after it do not count.
    """

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()
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

    def note(self, counts: Counter[tuple[str, str]], what: str, frame: FrameType | None = None) -> None:
        """counts: `places` or `launches`."""
        if self.is_counting:
            counts[what.removeprefix("aten::").strip("_"), place(frame)] += 1


def place(frame: FrameType | None = None) -> str:
    """The innermost line of lade or transformers, or else of anyone but torch and this file."""
    for part in reversed(traceback.extract_stack(frame)):
        path = Path(part.filename)
        if "torch" not in path.parts and path.name not in SKIPPED_FILES:
            # From the package on, also in a checkout whose folder has the package's name.
            found = re.match(r".*/((lade|transformers)/.*)", path.as_posix())
            return f"{found[1] if found else path.name}:{part.lineno} {part.name}"
    return "?"


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
            self.waits.note(self.waits.places, name)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        found = function(*args, **kwargs)
        is_on_device = any(map(self.memory.holds, given))
        is_between = name == "aten::copy_" and is_on_device and not all(map(self.memory.holds, given))
        if is_between and not place().startswith(PINNING_FILES):
            self.waits.note(self.waits.places, name)
        if name == "aten::copy_" and not self.memory.holds(args[0]):
            is_launched = is_on_device  # to the host
        elif is_on_device or not given:  # what makes a tensor from nothing is taken to make it on the device
            self.memory.add(found)
            is_launched = not function.is_view and name not in FREE_OPERATORS
        else:
            is_launched = False
        if is_launched:
            self.waits.note(self.waits.launches, name)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A forward, or a graph's replay, whose operations do not count."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                found = function(*args, **kwargs)
            self.memory.add(dict(found) if isinstance(found, dict) else found)
            return found

        return call


class CountCopies(TorchFunctionMode):
    """Counts what passes by the dispatcher: lists made from tensors, tensors made from lists, copies to the device.

    What is made on `HOST` stays there, and what `lade.common.transfer` copies makes nobody wait.
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
        is_made = function in MAKING_FUNCTIONS and str(kwargs.get("device", "")) != "meta"
        if function in READING_METHODS or is_made:
            self.waits.note(self.waits.places, function.__name__)
        elif function is torch.Tensor.to and not self.memory.holds(args[0]) and names_device(args[1:], kwargs):
            caller = sys._getframe(1)
            if caller.f_code is not to_device.__code__:
                self.waits.note(self.waits.places, "to", caller)
            self.waits.note(self.waits.launches, "copy to the device", caller.f_back)
            self.memory.add(args[0])
        return function(*args, **kwargs)


def names_device(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` asks for a device other than `HOST`."""
    found = [kwargs.get("device"), *args]
    return any(isinstance(device, torch.device) and device is not HOST for device in found)


@contextmanager
def counted_on_cpu(waits: Waits, *on_device: Any) -> Iterator[None]:
    """on_device: tensors that would be on a GPU, such as the model's weights."""
    memory, original = DeviceMemory(), decoding.wait_for
    memory.add(on_device)
    operators = CountOperators(waits, memory)

    def wait_for(device: torch.device) -> None:  # the loop's own wait for the forward, which is no operator
        waits.note(waits.places, "wait_for")
        original(device)

    forwards = [(StaticPath, "replay"), (StaticPath, "run"), (ModelAdapter, "ordinary_forward")]
    patches = [mock.patch.object(owner, name, operators.aside(getattr(owner, name))) for owner, name in forwards]
    patches.append(mock.patch.object(transfer, "ON_HOST", ()))
    patches.append(mock.patch.object(decoding, "wait_for", wait_for))
    with ExitStack() as stack:
        for context in (*patches, operators, CountCopies(waits, operators)):
            stack.enter_context(context)
        yield
