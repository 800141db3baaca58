"""What a call leaves with its model for later ones: a cache, and the CUDA graphs that read it at fixed addresses."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache
from lade.state import PerModel

KEPT_SHARE = 1 / 8  # of the device's memory, for all that waits for later calls of one model
KEPT_BYTES = 2**28  # the same where graphs are stood in for


@dataclass(slots=True, eq=False)
class PooledBuffers:
    """What one call at a time works on. key: all by which the graphs of another call would be others; None: not to be kept."""

    key: Hashable
    cache: LookaheadCache
    released: torch.cuda.Event | None = None  # when the device is done with what the last call asked of it

    def replays(self) -> Iterable[Any]:
        """The captured graphs."""
        return ()

    @property
    def num_bytes(self) -> int:
        """Of the cache and of what the graphs took when they were captured."""
        return self.cache.num_bytes + sum(getattr(replay, "num_bytes", 0) for replay in self.replays())


B = TypeVar("B", bound=PooledBuffers)
_lock = threading.Lock()
_pool: PerModel[list[PooledBuffers]] = PerModel(list)  # the oldest come first
_captured_rows: PerModel[set[int]] = PerModel(set)


def acquire(kind: type[B], model: PreTrainedModel, key: Hashable, least: int, most: int | None) -> B | None:
    """An earlier call's buffers with an empty cache of `least` to `most` slots, now the caller's alone; None where none fit.

    most: None where the cost of a step does not follow the capacity. The smallest that fit are chosen.
    """
    with _lock:
        pool = _pool.of(model)
        fitting = [
            buffers
            for buffers in pool
            if isinstance(buffers, kind)
            and buffers.key == key
            and least <= buffers.cache.capacity
            and (most is None or buffers.cache.capacity <= most)
        ]
        if not fitting:
            # Make room first. A new cache takes about as many bytes a slot as those that are there.
            expected = least * max((buffers.cache.num_bytes // buffers.cache.capacity for buffers in pool), default=0)
            _trim(pool, kept_bytes(model.device) - expected)
            return None
        found = min(fitting, key=lambda buffers: buffers.cache.capacity)
        pool.remove(found)
    if found.released is not None:  # this call may run on another stream than the last one
        torch.cuda.current_stream(model.device).wait_event(found.released)
    found.cache.clear()
    return found


def release(model: PreTrainedModel, buffers: PooledBuffers) -> None:
    """Let a later call of the model have what this one worked on, and no longer does, unless it takes too much memory."""
    _captured_rows.of(model).add(buffers.cache.num_rows)
    room = kept_bytes(model.device)
    if buffers.num_bytes > room:
        return
    if model.device.type == "cuda":
        buffers.released = torch.cuda.current_stream(model.device).record_event()
    with _lock:
        pool = _pool.of(model)
        pool.append(buffers)
        _trim(pool, room)


def has_captured(model: PreTrainedModel, num_rows: int) -> bool:
    """Whether a call of so many rows has captured graphs before. Follows from the calls so far, and from no clock."""
    return num_rows in _captured_rows.of(model)


def _trim(pool: list[PooledBuffers], room: int) -> None:
    """Drop the oldest until what is left takes `room` bytes at most."""
    while pool and sum(buffers.num_bytes for buffers in pool) > room:
        del pool[0]


def kept_bytes(device: torch.device) -> int:
    """What may wait for later calls of one model."""
    memory = device_memory(device)
    return KEPT_BYTES if memory is None else int(KEPT_SHARE * memory)


def device_memory(device: torch.device) -> int | None:
    """Bytes that the device has, None where graphs are stood in for."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
