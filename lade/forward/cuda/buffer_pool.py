"""A pool per model of caches and the CUDA graphs that read them at fixed addresses, reused by later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache, least_capacity
from lade.common.state import PerModel

KEPT_SHARE = 1 / 8  # share of device memory for one model's pool
KEPT_BYTES = 2**28  # the same on devices without CUDA graphs (tests)


@dataclass(slots=True, eq=False)
class PooledBuffers:
    """Buffers of one call at a time. key: everything that the graphs depend on; None if not to be pooled."""

    key: Hashable
    cache: LookaheadCache
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


class Lease(Generic[B]):
    """The buffers of one call: pooled ones, or its own, which may be pooled afterwards."""

    def __init__(self, kind: type[B], model: PreTrainedModel, uses_kernel: bool) -> None:
        """uses_kernel: then the cost of a step does not depend on the capacity of the cache."""
        self._kind, self._model, self._uses_kernel = kind, model, uses_kernel
        self._most: float = inf  # slots of the largest cache to take from the pool
        self._buffers: B | None = None

    def begin(
        self, key: Hashable, num_slots: int, most_slots: int, new_cache: Callable[[int], LookaheadCache]
    ) -> LookaheadCache:
        """An empty cache: the smallest pooled one that fits, or a new one.

        key: everything that the graphs depend on; None to pool nothing. num_slots: the slots that the call starts with.
        most_slots: the most that it may need.
        """
        least, most = (padded_capacity(least_capacity(count)) for count in (num_slots, max(num_slots, most_slots)))
        self._most = inf if self._uses_kernel else most
        self._buffers = self._acquire(key, least, new_cache)
        return self._buffers.cache

    def holds(self, cache: LookaheadCache) -> bool:
        """Whether a call's cache is the one that these buffers came with: the model may have replaced it."""
        return self._buffers is not None and self._buffers.cache is cache

    def with_room(self, cache: LookaheadCache, num_slots: int) -> B:
        """The buffers for a call's cache, which then has num_slots slots.

        Where a graph reads the present memory, the cache goes on in that of larger buffers, and the present ones go to
        the pool for shorter calls. Elsewhere it grows.
        """
        buffers = self._buffers
        if buffers is None or not self.holds(cache):
            buffers = self._buffers = self._kind(None, cache)
        if num_slots <= cache.capacity or not buffers.is_kept:
            cache.ensure_capacity(num_slots)
            return buffers
        larger = self._buffers = self._acquire(buffers.key, padded_capacity(num_slots), cache.like)
        cache.exchange(larger.cache)
        buffers.cache, larger.cache = larger.cache, cache
        release(self._model, buffers)
        return larger

    def drop(self) -> None:
        """Forget the buffers after a failure: no later call may use them. The call goes on with its cache."""
        self._buffers = None

    def end(self) -> None:
        """Return the buffers to the pool, at the end of a call that succeeded."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            release(self._model, buffers)

    def _acquire(self, key: Hashable, least: int, new_cache: Callable[[int], LookaheadCache]) -> B:
        """Pooled buffers with a cache of at least so many slots, emptied, or new ones."""
        if key is None:
            return self._kind(None, new_cache(least))
        with _lock:
            pool = _pool.of(self._model)
            fitting = [
                buffers
                for buffers in pool
                if isinstance(buffers, self._kind)
                and buffers.key == key
                and least <= buffers.cache.capacity <= self._most
            ]
            found = min(fitting, key=lambda buffers: buffers.cache.capacity, default=None)
            if found is None:
                # Make room for a new cache, which takes about as many bytes per slot as the pooled ones.
                slot_bytes = max((buffers.cache.num_bytes // buffers.cache.capacity for buffers in pool), default=0)
                _trim(pool, kept_bytes(self._model.device) - least * slot_bytes)
            else:
                pool.remove(found)
        if found is None:
            return self._kind(key, new_cache(least))
        if found.released is not None:  # this call may use another stream than the last one
            torch.cuda.current_stream(self._model.device).wait_event(found.released)
        found.cache.clear()
        return found


def padded_capacity(num_slots: int) -> int:
    """The next power of two, so that calls of similar lengths share what is compiled or captured."""
    return 1 << (num_slots - 1).bit_length()


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
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
