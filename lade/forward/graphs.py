"""CUDA graphs: what can be captured, how, and what is put right where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


def capture(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of `forward`, on the current device. Returns what replays it, always with the same tensor as its result.

    Nobody in lade draws random numbers meanwhile: torch's generator refuses to while a capture is under way.
    """
    if torch.is_autocast_enabled("cuda"):
        raise NotCompiled(
            "autocast drops its casts of the weights when it ends, and a CUDA graph would go on reading them"
        )
    graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    # The stream is ours, and set once more around the capture: torch leaves its own one set where a capture fails.
    with drawing, torch.cuda.stream(stream), repaired(pool):
        for _ in range(2):  # libraries set themselves up in the first calls, which cannot be captured
            forward()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = forward()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        with drawing:
            graph.replay()
        return output

    return replay


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
