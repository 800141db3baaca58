"""A pool per model of caches and the CUDA graphs that read them at fixed addresses, reused by later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache, least_capacity
from lade.common.state import PerModel
from lade.forward.cuda.static_inputs import StaticInputs

KEPT_SHARE = 1 / 8  # share of device memory for one model's pool
KEPT_BYTES = 2**28  # the same on devices without CUDA graphs (tests)
KEPT_SHAPES = 8  # the most recently used graphs of one cache that are kept


@dataclass(slots=True, eq=False)
class Buffers:
    """A cache with the inputs and graphs of the blocks that run on it, used by one call at a time.

    key: everything that the graphs depend on; None if not to be pooled. inputs: by shape, most recently used last, for
    the cache at `capacity`. released: when the device has finished the last call's work.
    """

    key: Hashable
    cache: LookaheadCache
    capacity: int = 0
    inputs: dict[Hashable, StaticInputs] = field(default_factory=dict)
    released: torch.cuda.Event | None = None

    def replays(self) -> list[Any]:
        """The captured graphs."""
        return [inputs.replay for inputs in self.inputs.values() if inputs.replay is not None]

    @property
    def is_kept(self) -> bool:
        """Whether later calls can use them."""
        return self.key is not None and bool(self.replays())

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache and of the memory reserved by capturing the graphs."""
        return self.cache.num_bytes + sum(getattr(replay, "num_bytes", 0) for replay in self.replays())

    def end_call(self) -> None:
        """Keep the shapes used last, of those that are captured."""
        self.drop_stale()
        captured = [(shape, inputs) for shape, inputs in self.inputs.items() if inputs.replay is not None]
        self.inputs = dict(captured[-KEPT_SHAPES:])
        for inputs in self.inputs.values():
            inputs.end_call()

    def drop_stale(self) -> None:
        """Drop inputs and graphs that refer to the storage of the cache before it grew."""
        if self.capacity != self.cache.capacity:
            self.inputs.clear()
            self.capacity = self.cache.capacity


_lock = threading.Lock()
_pool: PerModel[list[Buffers]] = PerModel(list)  # oldest first
_captured_rows: PerModel[set[int]] = PerModel(set)


class CallBuffers:
    """The buffers of one call: pooled ones, or its own, which may be pooled afterwards."""

    def __init__(self, model: PreTrainedModel, uses_kernel: bool) -> None:
        """uses_kernel: then the cost of a step does not depend on the capacity of the cache."""
        self._model, self._uses_kernel = model, uses_kernel
        self._most: float = inf  # slots of the largest cache to take from the pool
        self._buffers: Buffers | None = None

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

    def with_room(self, cache: LookaheadCache, num_slots: int) -> Buffers:
        """The buffers for a call's cache, which then has num_slots slots.

        Where a graph reads the present memory, the cache goes on in that of larger buffers, and the present ones go to
        the pool for shorter calls. Elsewhere it grows.
        """
        buffers = self._buffers
        if buffers is None or buffers.cache is not cache:  # the model may have replaced it
            buffers = self._buffers = Buffers(None, cache)
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

    def _acquire(self, key: Hashable, least: int, new_cache: Callable[[int], LookaheadCache]) -> Buffers:
        """Pooled buffers with a cache of at least so many slots, emptied, or new ones."""
        if key is None:
            return Buffers(None, new_cache(least))
        with _lock:
            pool = _pool.of(self._model)
            fitting = [each for each in pool if each.key == key and least <= each.cache.capacity <= self._most]
            found = min(fitting, key=lambda each: each.cache.capacity, default=None)
            if found is None:
                # Make room for a new cache, which takes about as many bytes per slot as the pooled ones.
                slot_bytes = max((buffers.cache.num_bytes // buffers.cache.capacity for buffers in pool), default=0)
                _trim(pool, kept_bytes(self._model.device) - least * slot_bytes)
            else:
                pool.remove(found)
        if found is None:
            return Buffers(key, new_cache(least))
        if found.released is not None:  # this call may use another stream than the last one
            torch.cuda.current_stream(self._model.device).wait_event(found.released)
        found.cache.clear()
        return found


def padded_capacity(num_slots: int) -> int:
    """The next power of two, so that calls of similar lengths share what is compiled or captured."""
    return 1 << (num_slots - 1).bit_length()


def release(model: PreTrainedModel, buffers: Buffers) -> None:
    """Put a call's buffers into the model's pool if later calls can use them, unless they take too much memory."""
    buffers.end_call()
    if not buffers.is_kept:
        return
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
    """Whether an earlier call of num_rows rows has captured graphs. Depends on the calls so far, not on time."""
    return num_rows in _captured_rows.of(model)


def _trim(pool: list[Buffers], room: int) -> None:
    """Drop the oldest buffers until the rest take at most `room` bytes."""
    while pool and sum(kept.num_bytes for kept in pool) > room:
        del pool[0]


def kept_bytes(device: torch.device) -> int:
    """The most bytes of one model's pool."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
