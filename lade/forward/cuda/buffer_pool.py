"""A pool per model of caches and the CUDA graphs that read them at fixed addresses, reused by later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache
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
        return num_bytes_of(self.cache) + sum(getattr(replay, "num_bytes", 0) for replay in self.replays())

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


class CallBuffers:
    """The buffers of one call: pooled ones, or its own, which may be pooled afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._buffers: Buffers | None = None

    def begin(
        self, key: Hashable, least: int, most: float, new_cache: Callable[[int], LookaheadCache]
    ) -> LookaheadCache:
        """An empty cache: the largest pooled one of at least and at most so many slots, or a new one.

        key: everything that the graphs depend on; None to pool nothing.
        """
        self._buffers = self._pooled(key, least, most) or Buffers(key, new_cache(least))
        return self._buffers.cache

    def with_room(self, cache: LookaheadCache, num_slots: int) -> Buffers:
        """The buffers for a call's cache, which then has num_slots slots."""
        if self._buffers is None or self._buffers.cache is not cache:  # the model may have replaced it
            self._buffers = Buffers(None, cache)
        cache.ensure_capacity(num_slots)
        return self._buffers

    def drop(self) -> None:
        """Forget the buffers after a failure: no later call may use them. The call goes on with its cache."""
        self._buffers = None

    def end(self) -> None:
        """Return the buffers to the pool, at the end of a call that succeeded."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            release(self._model, buffers)

    def _pooled(self, key: Hashable, least: int, most: float) -> Buffers | None:
        """Buffers from the pool, emptied; None if none fit, with room for new ones."""
        if key is None:
            return None
        with _lock:
            pool = _pool.of(self._model)
            fitting = [each for each in pool if each.key == key and least <= each.cache.capacity <= most]
            if not fitting:
                # A new cache takes about as many bytes per slot as the pooled ones.
                slot_bytes = max((num_bytes_of(each.cache) // each.cache.capacity for each in pool), default=0)
                _trim(pool, kept_bytes(self._model.device) - least * slot_bytes)
                return None
            found = max(fitting, key=lambda each: each.cache.capacity)
            pool.remove(found)
        if found.released is not None:  # this call may use another stream than the last one
            torch.cuda.current_stream(self._model.device).wait_event(found.released)
        empty(found.cache)
        return found


def num_bytes_of(cache: LookaheadCache) -> int:
    """Bytes of all allocated keys and values."""
    return sum(storage.data.nbytes for storage in cache.storages)


def empty(cache: LookaheadCache) -> None:
    """Remove all tokens but keep the memory, for another call with the same batch size."""
    for storage in cache.storages:
        storage.data.zero_()  # an earlier call may have left non-finite values
    for layer in cache.slot_layers:
        layer.prefilled = 0
    cache.lengths, cache.slots, cache.in_block = [], None, False


def padded_capacity(num_slots: int) -> int:
    """The next power of two, so that calls of similar lengths share what is compiled or captured."""
    return 1 << (num_slots - 1).bit_length()


def release(model: PreTrainedModel, buffers: Buffers) -> None:
    """Put a call's buffers into the model's pool if later calls can use them, unless they take too much memory."""
    buffers.end_call()
    if not buffers.is_kept:
        return
    room = kept_bytes(model.device)
    if buffers.num_bytes > room:
        return
    if model.device.type == "cuda":
        buffers.released = torch.cuda.current_stream(model.device).record_event()
    with _lock:
        pool = _pool.of(model)
        pool.append(buffers)
        _trim(pool, room)


def _trim(pool: list[Buffers], room: int) -> None:
    """Drop the oldest buffers until the rest take at most `room` bytes."""
    while pool and sum(kept.num_bytes for kept in pool) > room:
        del pool[0]


def kept_bytes(device: torch.device) -> int:
    """The most bytes of one model's pool."""
    if device.type != "cuda":
        return KEPT_BYTES
    return int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
