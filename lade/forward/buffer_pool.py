"""A pool per model of caches and the CUDA graphs that read them at fixed addresses, reused by later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache, least_capacity
from lade.state import PerModel

KEPT_SHARE = 1 / 8  # share of device memory for one model's pool
KEPT_BYTES = 2**28  # the same on devices without CUDA graphs (tests)


@dataclass(slots=True, eq=False)
class PooledBuffers:
    """Buffers of one call at a time. key: everything that the graphs depend on; None if not to be pooled."""

    key: Hashable
    cache: LookaheadCache
    most: float = inf  # slots of the largest pooled cache for the present call
    released: torch.cuda.Event | None = None  # when the device has finished the last call's work

    def replays(self) -> list[Any]:
        """The captured graphs."""
        raise NotImplementedError

    @property
    def is_kept(self) -> bool:
        """Whether later calls can use them."""
        return self.key is not None and bool(self.replays())

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache and of the memory reserved by capturing the graphs."""
        return self.cache.num_bytes + sum(getattr(replay, "num_bytes", 0) for replay in self.replays())

    def lighten(self) -> None:
        """Drop what later calls can do without: asked before the buffers themselves are dropped."""

    def end_call(self) -> None:
        """Drop what only the present call uses."""


B = TypeVar("B", bound=PooledBuffers)
_lock = threading.Lock()
_pool: PerModel[list[PooledBuffers]] = PerModel(list)  # oldest first
_captured_rows: PerModel[set[int]] = PerModel(set)


def acquire(
    kind: type[B],
    model: PreTrainedModel,
    key: Hashable,
    least: int,
    most: float,
    new_cache: Callable[[int], LookaheadCache],
) -> B:
    """The smallest pooled buffers with a cache of `least` to `most` slots, emptied; new ones of `least` if none fit."""
    with _lock:
        pool = _pool.of(model)
        fitting = [
            buffers
            for buffers in pool
            if isinstance(buffers, kind) and buffers.key == key and least <= buffers.cache.capacity <= most
        ]
        found = min(fitting, key=lambda buffers: buffers.cache.capacity, default=None)
        if found is None:
            # Make room for a new cache, which takes about as many bytes per slot as the pooled ones.
            expected = least * max((buffers.cache.num_bytes // buffers.cache.capacity for buffers in pool), default=0)
            _trim(pool, kept_bytes(model.device) - expected)
        else:
            pool.remove(found)
    if found is None:
        return kind(key, new_cache(least), most)
    if found.released is not None:  # this call may use another stream than the last one
        torch.cuda.current_stream(model.device).wait_event(found.released)
    found.cache.clear()
    found.most = most
    return found


def make_room(buffers: B, model: PreTrainedModel, num_slots: int) -> B:
    """Buffers with `num_slots` slots for a call to go on in, with the same cache object.

    Where a graph reads the present memory, that goes to the pool for shorter calls. Elsewhere the cache grows.
    """
    cache = buffers.cache
    if num_slots <= cache.capacity or not buffers.is_kept:
        cache.ensure_capacity(num_slots)
        return buffers
    larger = acquire(type(buffers), model, buffers.key, padded_capacity(num_slots), buffers.most, cache.like)
    cache.exchange(larger.cache)
    buffers.cache, larger.cache = larger.cache, cache
    release(model, buffers)
    return larger


def padded_capacity(num_slots: int) -> int:
    """The next power of two, so that calls of similar lengths share what is compiled or captured."""
    return 1 << (num_slots - 1).bit_length()


def capacities(num_slots: int, most_slots: int, uses_kernel: bool) -> tuple[int, float]:
    """The least and the most slots of the cache for a call that starts with num_slots and may need most_slots.

    uses_kernel: then the cost of a step does not depend on the capacity.
    """
    least, most = (padded_capacity(least_capacity(count)) for count in (num_slots, max(num_slots, most_slots)))
    return least, inf if uses_kernel else most


def release(model: PreTrainedModel, buffers: PooledBuffers) -> None:
    """Put a call's buffers into the model's pool if later calls can use them, unless they take too much memory."""
    buffers.end_call()
    if not buffers.is_kept:
        return
    _captured_rows.of(model).add(buffers.cache.num_rows)
    room = kept_bytes(model.device)
    if buffers.num_bytes > room:
        buffers.lighten()
    if buffers.num_bytes > room:
        return
    if model.device.type == "cuda":
        buffers.released = torch.cuda.current_stream(model.device).record_event()
    with _lock:
        pool = _pool.of(model)
        pool.append(buffers)
        _trim(pool, room)


def has_captured(model: PreTrainedModel, num_rows: int) -> bool:
    """Whether an earlier call of num_rows rows has captured graphs. Depends on the calls so far, not on time."""
    return num_rows in _captured_rows.of(model)


def _trim(pool: list[PooledBuffers], room: int) -> None:
    """Lighten the oldest buffers, then drop the oldest, until the rest take at most `room` bytes."""
    for buffers in pool:
        if sum(kept.num_bytes for kept in pool) > room:
            buffers.lighten()
    while pool and sum(kept.num_bytes for kept in pool) > room:
        del pool[0]


def kept_bytes(device: torch.device) -> int:
    """The most bytes of one model's pool."""
    memory = device_memory(device)
    return KEPT_BYTES if memory is None else int(KEPT_SHARE * memory)


def device_memory(device: torch.device) -> int | None:
    """Bytes of the device's memory; None if it is not a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
