"""What a call leaves with its model for later ones: a cache, and the CUDA graphs that read it at fixed addresses."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache
from lade.state import PerModel

KEPT = 2  # sets of buffers per model, caches included, that wait for another call
KEPT_SHARE = 1 / 16  # of the device's memory: nothing is kept whose cache takes more


@dataclass(slots=True, eq=False)
class PooledBuffers:
    """What one call at a time works on. key: all by which the graphs of another call would be others; None: not to be kept."""

    key: Hashable
    cache: LookaheadCache
    released: torch.cuda.Event | None = None  # when the device is done with what the last call asked of it


B = TypeVar("B", bound=PooledBuffers)
_lock = threading.Lock()
_pool: PerModel[list[PooledBuffers]] = PerModel(list)  # the oldest come first


def acquire(kind: type[B], model: PreTrainedModel, key: Hashable, least: int, most: int) -> B | None:
    """An earlier call's buffers with an empty cache of `least` to `most` slots, now the caller's alone; None where none fit."""
    with _lock:
        pool = _pool.of(model)
        fitting = [
            buffers
            for buffers in pool
            if isinstance(buffers, kind) and buffers.key == key and least <= buffers.cache.capacity <= most
        ]
        if not fitting:
            del pool[: max(0, len(pool) + 1 - KEPT)]  # make room first: the oldest goes
            return None
        found = min(fitting, key=lambda buffers: buffers.cache.capacity)
        pool.remove(found)
    if found.released is not None:  # this call may run on another stream than the last one
        torch.cuda.current_stream(model.device).wait_event(found.released)
    found.cache.clear()
    return found


def release(model: PreTrainedModel, buffers: PooledBuffers) -> None:
    """Let a later call of the model have what this one worked on, and no longer does, unless it takes too much memory."""
    memory = device_memory(model.device)
    if memory is not None and buffers.cache.num_bytes > KEPT_SHARE * memory:
        return
    if model.device.type == "cuda":
        buffers.released = torch.cuda.current_stream(model.device).record_event()
    with _lock:
        pool = _pool.of(model)
        pool.append(buffers)
        del pool[:-KEPT]


def device_memory(device: torch.device) -> int | None:
    """Bytes that the device has, None where keeping a cache is no matter of its memory."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
