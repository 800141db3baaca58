"""A preallocated key/value cache. Blocks are written after the committed tokens, then accepted tokens are compacted.

`update` writes in place and returns views: no concatenation, no copy of the prefix.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lade.common.compat import CACHE_NAME, CacheLayer
from lade.common.transfer import to_device
from lade.common.trial import is_out_of_memory

MIN_CAPACITY = 256  # slots
MAX_WAITING = 8  # committed tokens that wait; with more the next step has no guesses, after which none waits


def least_capacity(num_slots: int) -> int:
    """Initial capacity of a cache that must hold `num_slots`."""
    return max(num_slots, MIN_CAPACITY)


class SlotLayer(CacheLayer):
    """One layer's keys and values: views [B, H, C, D] into the cache's storage, where C is the capacity in slots."""

    is_sliding = False
    is_compileable = False

    keys: Tensor
    values: Tensor

    def __init__(self, cache: LookaheadCache) -> None:
        super().__init__()
        self._cache: LookaheadCache = weakref.proxy(cache)  # no cycle: the memory is freed as soon as the call ends
        self.prefilled = 0  # slots written by prompt forwards

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._cache.allocate(self, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values after the existing ones.

        key_states, value_states: [B, H, q, D]. Returns views of all slots up to the last one written.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, num_tokens = self._cache, key_states.shape[2]
        start = SlotLayer.get_seq_length(self)  # a subclass may count its index
        end = start + num_tokens
        if not cache.in_block:
            cache.ensure_capacity(end)
            cache.promote(key_states.dtype)
            self.prefilled = end
        if cache.slots is None:  # all rows have the same length
            self.keys.narrow(2, start, num_tokens).copy_(key_states)
            self.values.narrow(2, start, num_tokens).copy_(value_states)
        else:
            index = cache.slots[:, None, :, None].to(key_states.device)  # [B, 1, q, 1]
            # One storage has one dtype; under autocast keys are float32 and values are not.
            self.keys.scatter_(2, index.expand_as(key_states), key_states.to(self.keys.dtype))
            self.values.scatter_(2, index.expand_as(value_states), value_states.to(self.values.dtype))
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        cache = self._cache
        return cache.block_start if cache.in_block else self.prefilled

    def get_max_length(self) -> int:
        return -1


class LookaheadCache(Cache):
    """Key/value slots of B rows: prompt forwards append, then blocks are written at `lengths` and committed.

    lengths: committed slots of each row (L), on the host.
    """

    def __init__(self, num_layers: int, capacity: int, uniform: bool = True) -> None:
        """capacity: initial slots; doubled as needed. uniform: all layers have the same shape."""
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))
        self.capacity = least_capacity(capacity)
        self.lengths: list[int] = []
        self.slots: Tensor | None = None  # [B, q] of the current block, if row lengths differ
        self.in_block = False
        self._uniform = uniform
        self.storages: list[Storage] = []

    @property
    def num_waiting(self) -> int:
        """Committed tokens that run again in front of the next block."""
        return 0

    def unwait(self) -> list[int]:
        """Make the last of these the root again, for a block without guesses. Returns the rows' roots."""
        raise NotImplementedError

    @property
    def block_start(self) -> int:
        """Slots before the longest row's block, and before tokens that run again in front of it."""
        return max(self.lengths) - self.num_waiting

    def end_prefill(self, batch_size: int) -> None:
        """Switch from prompts to blocks: `update` writes at `lengths`."""
        # Without attention nothing counts slots.
        self.lengths = [self.slot_layers[0].prefilled if self.slot_layers else 0] * batch_size
        self.in_block = True

    def adopt(self, cache: Any) -> None:
        """Copy the tokens of another cache, as if they had been prefilled here. `cache` is not changed."""
        length = int(cache.get_seq_length())
        if length:
            for index, layer in enumerate(cache.layers):
                # The model may have fewer layers than its configuration says.
                if getattr(layer, "keys", None) is not None:
                    self.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)

    def hand_over(self, cache: Cache) -> None:
        """Append to `cache` the committed tokens that it lacks. All rows must have the same length."""
        start, end = int(cache.get_seq_length()), self.lengths[0]
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SlotLayer) and layer.is_initialized:
                cache.update(layer.keys[:, :, start:end], layer.values[:, :, start:end], index)

    def begin_block(self, num_tokens: int, device: torch.device) -> None:
        """Make room for a block of q tokens after each row's committed slots, where `update` writes them."""
        self.ensure_capacity(max(self.lengths) + num_tokens)
        self.slots = None
        if min(self.lengths) != max(self.lengths):
            starts = to_device(torch.tensor(self.lengths, device="cpu"), device)
            self.slots = starts[:, None] + torch.arange(num_tokens, device=device)

    def commit(self, accepted: list[list[int] | None]) -> None:
        """Keep each row's root and accepted block tokens, in order; drop the rest of the block.

        accepted: per row, increasing block indices without the root's 0; None keeps nothing, not even the root.
        """
        for row, (path, start) in enumerate(zip(accepted, self.lengths, strict=True)):
            if path and path != list(range(1, len(path) + 1)):
                self.write(row, start + 1, self.read(row, path))
        num_kept = [0 if path is None else 1 + len(path) for path in accepted]
        self.lengths = [length + count for length, count in zip(self.lengths, num_kept, strict=True)]

    def read(self, row: int, block_indices: list[int]) -> list[Tensor]:
        """Copy the keys/values of one row's block tokens, before `commit`. Returns [S, H, k, D] per storage."""
        # On the host, whatever the default device is.
        slots = torch.tensor([self.lengths[row] + index for index in block_indices], device="cpu")
        # index_select, because gather on a CPU takes a hundred times as long in half precision.
        return [data[:, row].index_select(2, to_device(slots, data.device)) for data in self._used()]

    def write(self, row: int, start: int, parts: list[Tensor]) -> None:
        """Store keys/values from `read`, of this cache or another one, in the slots from `start` on."""
        for data, part in zip(self._used(), parts, strict=True):
            data[:, row, :, start : start + part.shape[2]] = part

    def _used(self) -> list[Tensor]:
        """The parts of the storages that layers use, [S, B, H, C, D] each."""
        return [storage.data[: len(storage.owners)] for storage in self.storages]

    def allocate(self, layer: SlotLayer, key_states: Tensor, value_states: Tensor) -> None:
        """Set a layer's `keys` and `values`, [B, H, C, D] each, all zero."""
        for name, states in (("keys", key_states), ("values", value_states)):
            storage = next((s for s in self.storages if s.has_room_for(states)), None)
            if storage is None:
                size = len(self.slot_layers) * (2 if key_states.shape == value_states.shape else 1)
                storage = Storage(states, size if self._uniform else 1, self.capacity)
                self.storages.append(storage)
            storage.give(layer, name)

    def ensure_capacity(self, num_slots: int) -> None:
        """Double the capacity until `num_slots` fit; committed tokens are kept."""
        if num_slots <= self.capacity:
            return
        while self.capacity < num_slots:
            self.capacity *= 2
        for storage in self.storages:
            storage.grow(self.capacity)

    def promote(self, dtype: torch.dtype) -> None:
        """Keep all keys and values in a dtype that holds another one, too, as torch.cat does."""
        for storage in self.storages:
            if (wider := torch.promote_types(storage.data.dtype, dtype)) != storage.data.dtype:
                storage.data = storage.data.to(wider)
                storage.place_owners()


class Storage:
    """One tensor behind several layers of the same shape, so that a row is compacted in all of them at once."""

    def __init__(self, states: Tensor, size: int, capacity: int) -> None:
        """states: [B, H, q, D], an example. size: S, the number of such tensors to hold."""
        batch_size, num_heads, _, head_dim = states.shape
        # Zeros: an unwritten slot may be multiplied by an attention weight of 0, and 0 * NaN is NaN.
        self.data = _zeros(states, size, batch_size, num_heads, capacity, head_dim)  # [S, B, H, C, D]
        self.owners: list[tuple[SlotLayer, str]] = []

    def has_room_for(self, states: Tensor) -> bool:
        same_shape = self.data[0, :, :, :0].shape == states[:, :, :0].shape
        same_kind = (states.dtype, states.device) == (self.data.dtype, self.data.device)
        return same_shape and same_kind and len(self.owners) < len(self.data)

    def give(self, layer: SlotLayer, name: str) -> None:
        setattr(layer, name, self.data[len(self.owners)])
        self.owners.append((layer, name))

    def grow(self, capacity: int) -> None:
        size, batch_size, num_heads, old, head_dim = self.data.shape
        data = _zeros(self.data, size, batch_size, num_heads, capacity, head_dim)
        data[:, :, :, :old] = self.data
        self.data = data
        self.place_owners()

    def place_owners(self) -> None:
        """Let the layers know where `data` lies now."""
        for index, (layer, name) in enumerate(self.owners):
            setattr(layer, name, self.data[index])


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of shape [S, B, H, C, D]. Raises OutOfMemoryError with the size that was asked for."""
    try:
        return like.new_zeros(shape)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"lade: no room for a key/value cache of {shape[3]} tokens, "
            f"{math.prod(shape) * like.element_size() / 2**20:,.0f} MiB; a smaller max_new_tokens or batch needs less"
        ) from error


def cache_arguments(cache: Cache, name: str = CACHE_NAME) -> dict[str, Any]:
    """Arguments that make a model's forward use this cache, and return its output by name. name: of the argument."""
    return {name: cache, "use_cache": True, "return_dict": True}
