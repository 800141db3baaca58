"""CUDA graphs: the capture, and the cleanup after a failed one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from lade.common.trial import NotUsed
from lade.verification.draws import drawing

LEAST_FREE = 1 / 32  # share of device memory below which torch's cached memory is freed before a capture


class CapturedGraph:
    """A CUDA graph. A call replays it on the current stream and returns always the same tensors."""

    def __init__(self, graph: Any, output: Any, num_bytes: int) -> None:
        """num_bytes: device memory reserved by the capture until the graph is deleted."""
        self._graph, self._output, self.num_bytes = graph, output, num_bytes

    def __call__(self) -> Any:
        # Some torch versions advance the generator in a replay, which fails while another thread captures.
        with drawing:
            self._graph.replay()
        return self._output


def capture(forward: Callable[[], Any]) -> CapturedGraph:
    """Capture `forward`, which returns a tensor or several, in a CUDA graph on the current device.

    The `drawing` lock keeps other lade threads from drawing random numbers, which torch's generator refuses during a
    capture. Otherwise they continue: unlike `torch.cuda.graph`, this does not synchronise the device, and it frees
    torch's cached memory only if little is left. Raises NotUsed under autocast, and whatever the capture raises.
    """
    if torch.is_autocast_enabled("cuda"):
        raise NotUsed("autocast drops its casts of the weights when it ends, and a CUDA graph would go on reading them")
    device, current = torch.cuda.current_device(), torch.cuda.current_stream()
    graph, stream, pool = torch.cuda.CUDAGraph(), capture_stream(device), torch.cuda.graph_pool_handle()
    try:
        with drawing, torch.cuda.stream(stream), repaired(pool):
            stream.wait_stream(current)
            for _ in range(2):  # libraries initialise in their first calls, which cannot be captured
                forward()
            make_room(device)
            reserved = torch.cuda.memory_reserved(device)
            with own_workspaces(), without_garbage_collection():
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                except BaseException:
                    with suppress(Exception):  # only repeats that the capture failed
                        graph.capture_end()
                    raise
                graph.capture_end()
    finally:
        current.wait_stream(stream)  # after a failure, too: the warm-ups write to the cache that the call goes on with
    return CapturedGraph(graph, output, max(0, torch.cuda.memory_reserved(device) - reserved))


@cache
def capture_stream(device: int) -> Any:
    """The stream for all captures on a device, since cuBLAS allocates a workspace per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Make a capture allocate cuBLAS workspaces in the graph's own memory pool.

    A workspace of the warm-up lies outside the pool. Clearing workspaces later, as torch's own graph capture does,
    would free memory that the graph still writes to. They are cleared again afterwards, so that no other forward uses
    the pool's.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: finalizers may make CUDA calls that invalidate a capture in this thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_room(device: int) -> None:
    """Free torch's cached memory if little is left, which a capture cannot do. This synchronises the device."""
    free, total = torch.cuda.mem_get_info(device)
    if free < LEAST_FREE * total:
        torch.cuda.empty_cache()


@contextmanager
def repaired(pool: Any) -> Iterator[None]:
    """Clean up torch's allocator and generator if a capture fails inside. pool: the memory pool of the capture."""
    try:
        yield
    except Exception:
        device = torch.cuda.current_device()
        with suppress(Exception):  # fails if the allocator has ended the capture itself
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        free_generator(torch.cuda.default_generators[device])
        raise


def free_generator(generator: torch.Generator) -> None:
    """Reset a generator that still considers a capture in progress.

    A working one keeps the state shared with graphs.
    """
    state = generator.get_state()
    try:
        torch.empty(1, device=generator.device).exponential_(generator=generator)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
    generator.set_state(state)
