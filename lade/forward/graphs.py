"""CUDA graphs: what can be captured, how, and what is put right where that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lade.compat import TorchDispatchMode, tree_leaves
from lade.kernels.self_check import is_checking
from lade.verification.draws import drawing

ATEN = torch.ops.aten
# Operations whose result the host needs at once, and those that do where they have certain arguments.
WAITING = frozenset(
    getattr(ATEN, name)
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "masked_select",
        "multinomial",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    )
)
LEAST_FREE = 1 / 32  # of a device's memory, below which what torch keeps is given back before a capture
COPYING, INDEXING = (ATEN._to_copy, ATEN.copy_), (ATEN.index, ATEN.index_put, ATEN.index_put_)


class NotCompiled(RuntimeError):
    """A forward that lade itself found unfit; its text is a sentence for the user."""


def refuse_waiting(forward: Callable[[], Tensor], device: torch.device) -> None:
    """Run a forward once. Raises NotCompiled where the host waits for the device in it, as some mixtures of experts make it.

    A capture finds that out as well, but one that fails leaves torch's allocator and generator unusable up to version 2.11.
    """
    with _Watch(device.type):
        forward()


class _Watch(TorchDispatchMode):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_checking():  # the attention kernel, once
            return function(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # there, operations that are made of others come as they are
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if waits(function.overloadpacket, args, kwargs, self._device_type):
            raise NotCompiled(f"the model's forward makes the host wait for the device ({function})")
        return function(*args, **kwargs)


def waits(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], device_type: str) -> bool:
    """Whether an operation makes the host wait for the device, as far as its arguments tell."""
    places = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if kwargs.get("device") is not None:
        places.append(torch.device(kwargs["device"]))
    found = {place.type for place in places}
    if device_type not in found:
        return False
    if operation in COPYING:
        return len(found) > 1
    if operation in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if operation is ATEN.lift_fresh:  # torch.tensor() on a device: copied from the host
        return device_type != "cpu"
    if operation is ATEN.repeat_interleave:
        return kwargs.get("output_size") is None
    return operation in WAITING


class CapturedGraph:
    """A CUDA graph. Called, it runs on the current stream and returns always the same tensor."""

    def __init__(self, graph: Any, output: Tensor, num_bytes: int) -> None:
        """num_bytes: what the capture took from the device, for as long as the graph lives."""
        self._graph, self._output, self.num_bytes = graph, output, num_bytes

    def __call__(self) -> Tensor:
        # Some versions of torch advance the generator in a replay, which they refuse while another thread captures.
        with drawing:
            self._graph.replay()
        return self._output


def capture(forward: Callable[[], Tensor]) -> CapturedGraph:
    """A CUDA graph of `forward`, on the current device.

    Nobody in lade draws random numbers meanwhile: torch's generator refuses to while a capture is under way. Other threads decode on:
    unlike `torch.cuda.graph`, this does not wait for the whole device, and gives memory back to it only where little is left.
    """
    if torch.is_autocast_enabled("cuda"):
        raise NotCompiled(
            "autocast drops its casts of the weights when it ends, and a CUDA graph would go on reading them"
        )
    device, current = torch.cuda.current_device(), torch.cuda.current_stream()
    graph, stream, pool = torch.cuda.CUDAGraph(), capture_stream(device), torch.cuda.graph_pool_handle()
    with drawing, torch.cuda.stream(stream), repaired(pool):
        stream.wait_stream(current)
        for _ in range(2):  # libraries set themselves up in the first calls, which cannot be captured
            forward()
        make_room(device)
        reserved = torch.cuda.memory_reserved(device)
        with own_workspaces(), without_garbage_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = forward()
            except BaseException:
                with suppress(Exception):  # it says only that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
    current.wait_stream(stream)
    return CapturedGraph(graph, output, max(0, torch.cuda.memory_reserved(device) - reserved))


@cache
def capture_stream(device: int) -> Any:
    """The one stream on which a device's graphs are captured: for each stream cuBLAS would set up a workspace of its own."""
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let a capture take cuBLAS's workspaces from the graph's own pool.

    One that the warm-up has set up lies outside of it: whoever clears the workspaces later, as torch's own graphs do when they record,
    would free memory that the graph goes on writing to. Afterwards no forward outside of the graph may find the pool's.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """What a collection frees may call CUDA in ways that end a capture in this thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_room(device: int) -> None:
    """Where little memory is left, give back what torch keeps for later: a capture cannot. All of the device waits for that."""
    free, total = torch.cuda.mem_get_info(device)
    if free < LEAST_FREE * total:
        torch.cuda.empty_cache()


@contextmanager
def repaired(pool: Any) -> Iterator[None]:
    """Where a capture fails inside, put right what torch then leaves behind. pool: what it was to allocate from."""
    try:
        yield
    except Exception:
        device = torch.cuda.current_device()
        with suppress(Exception):  # the allocator, unless it knows that the capture is over
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        free_generator(torch.cuda.default_generators[device])
        raise


def free_generator(generator: torch.Generator) -> None:
    """Let a generator draw that takes a capture for being under way. Others keep the state that they share with graphs."""
    state = generator.get_state()
    try:
        torch.empty(1, device=generator.device).exponential_(generator=generator)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
    generator.set_state(state)
