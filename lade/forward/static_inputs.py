"""The inputs of a forward of one static shape, and its view of the cache, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.compat import CacheLayer

Forward = Callable[..., Tensor]
Masks = Tensor | dict[str, Tensor]
NUM_CHECKS = 2  # replays compared: with the inputs of the capture, and with different ones


class StaticSlotLayer(CacheLayer):
    """One layer of a `LookaheadCache` for static shapes: it writes to the slots given in a tensor."""

    is_sliding = False
    is_compileable = True

    keys: Any
    values: Any

    def __init__(self, keys: Tensor | None, values: Tensor | None, slots: Tensor) -> None:
        """keys, values: the cache's own [B, H, C, D], None for a layer without any. slots: [B, q]."""
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The storage exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [B, H, q, D]. Returns keys and values of all slots, [B, H, C, D]."""
        if len(self.slots) == 1:
            self.keys.index_copy_(2, self.slots[0], key_states)
            self.values.index_copy_(2, self.slots[0], value_states)
        else:
            index = self.slots[:, None, :, None]  # [B, 1, q, 1]
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are passed, so the changing length must not be used

    def get_max_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


def plain_forward(
    model: Any, keeps_rows: bool, tokens: Tensor, positions: Tensor, masks: Masks, logit_rows: Tensor, cache: Cache
) -> Tensor:
    """The forward that is compiled or captured. tokens, positions: [B, q]. Returns logits [B, R, V]."""
    arguments = {"logits_to_keep": logit_rows} if keeps_rows else {}
    logits = model(
        input_ids=tokens,
        attention_mask=masks,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **arguments,
    ).logits
    return logits if keeps_rows else logits[:, logit_rows]


class StaticInputs:
    """The inputs of one shape at fixed addresses, and the matching view of the cache."""

    def __init__(self, block: Block, masks: Masks, slots: Tensor, cache: LookaheadCache) -> None:
        self.tokens, self.positions, self.logit_rows = (
            x.clone(memory_format=torch.contiguous_format) for x in (block.tokens, block.positions, block.logit_rows)
        )
        # A model takes one mask, or a dict of them.
        self.masks: Any = (
            {name: mask.clone() for name, mask in masks.items()} if isinstance(masks, dict) else masks.clone()
        )
        self.slots = slots.clone()
        layers: list[Any] = [
            StaticSlotLayer(getattr(layer, "keys", None), getattr(layer, "values", None), self.slots)
            for layer in cache.layers
        ]
        self.cache = Cache(layers=layers)
        self.replay: Callable[[], Tensor] | None = None  # replays the CUDA graph that reads these inputs
        self.checks_left = NUM_CHECKS  # replays of that graph still to be compared

    def fill(self, block: Block, masks: Masks, slots: Tensor) -> None:
        self.tokens.copy_(block.tokens)
        self.positions.copy_(block.positions)
        self.logit_rows.copy_(block.logit_rows)
        self.slots.copy_(slots)
        if isinstance(masks, dict):
            for name, mask in masks.items():
                self.masks[name].copy_(mask)
        else:
            self.masks.copy_(masks)

    def call(self, forward: Forward, model: Any, keeps_rows: bool) -> Tensor:
        return forward(model, keeps_rows, self.tokens, self.positions, self.masks, self.logit_rows, self.cache)


def mask_shapes(masks: Masks) -> Hashable:
    if isinstance(masks, dict):
        return tuple((name, mask.shape) for name, mask in masks.items())
    return masks.shape
