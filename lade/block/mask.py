"""Attention masks of a block, in the additive form that both eager and sdpa attention accept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lade.common.transfer import to_device


@dataclass(frozen=True, slots=True)
class Block:
    """The query tokens of one forward pass, which follow the committed tokens of each row.

    Without a window it is laid out on the host.

    tokens:      [B, q] ids.
    offsets:     [B, q] positions relative to the row's root.
    positions:   the model's `position_ids`, [B, q] or [k, B, q].
    visible:     [B, q, q] bool inside the block, query by key.
    logit_rows:  [R] increasing rows of the block whose logits are needed.
    lengths:     committed slots of each row (L).
    key_mask:    [B, P] bool, False for padding among the first P slots.
    capacity:    slots that masks cover; None for the slots in use.
    start_slots: [B, 1] the same as `lengths`, for a step whose host does not know them. Then `lengths` is empty, and
                 key_mask and capacity are set.
    """

    tokens: Tensor
    offsets: Tensor
    positions: Tensor
    visible: Tensor
    logit_rows: Tensor
    lengths: list[int]
    key_mask: Tensor | None
    capacity: int | None = None
    start_slots: Tensor | None = None

    @property
    def num_slots(self) -> int:
        """K: slots that masks cover, the block's own included."""
        return max(self.lengths) + self.tokens.shape[1] if self.capacity is None else self.capacity

    @property
    def needs_all_rows(self) -> bool:
        """Whether the logits of the whole block are needed."""
        return self.logit_rows.shape[0] == self.tokens.shape[1]

    def starts(self) -> Tensor:
        """Slot of each row's root. Returns [B, 1]."""
        if self.start_slots is not None:
            return self.start_slots
        return to_device(torch.tensor(self.lengths, device="cpu"), self.offsets.device)[:, None]

    def key_positions(self) -> Tensor:
        """Position of the token in each slot, counted from the row's first slot. Returns [B, K].

        It equals the slot, except inside the block, where it is the root's slot plus the offset.
        """
        starts = self.starts()
        places = torch.arange(self.num_slots, device=starts.device).repeat(len(self.tokens), 1)
        slots = starts + torch.arange(self.offsets.shape[1], device=starts.device)
        return places.scatter_(1, slots, starts + self.offsets)

    def to(self, device: torch.device) -> Block:
        """The same block with its tensors on another device."""
        if self.tokens.device == device:
            return self
        names = ("tokens", "offsets", "positions", "visible", "logit_rows", "key_mask")
        tensors = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        moved: dict[str, Any] = {name: to_device(tensor, device) for name, tensor in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """The positions a layer attends to: all, or the last `window` positions."""

    window: int | None = None

    def first_places(self, block: Block) -> Tensor | None:
        """The first position that each block token attends to, counted from the row's first slot.

        Returns [B, q], or None where nothing is out of reach.
        """
        # No query's position exceeds the number of slots.
        if self.window is None or block.num_slots <= self.window:
            return None
        return block.starts() + block.offsets - self.window + 1

    def hides(self, block: Block) -> Tensor | None:
        """Slots outside the span. Returns [B, q, K] bool, or None where there are none."""
        first = self.first_places(block)
        return None if first is None else block.key_positions()[:, None] < first[:, :, None]


EVERYWHERE = AttentionSpan()


def block_mask(block: Block, dtype: torch.dtype, span: AttentionSpan = EVERYWHERE) -> Tensor:
    """Additive mask over the cache's slots: 0 where a query attends to a key, the dtype's minimum elsewhere.

    Returns [B, 1, q, K]. Additive, because eager attention would add a bool mask as 0 and 1.
    """
    hidden = torch.finfo(dtype).min
    num_queries, device = block.tokens.shape[1], block.visible.device
    too_far = span.hides(block)
    starts = block.starts()
    is_prefix = torch.arange(block.num_slots, device=device) < starts  # [B, K]
    if block.key_mask is not None:
        is_prefix[:, : block.key_mask.shape[1]] &= block.key_mask
    mask = is_prefix[:, None].repeat(1, num_queries, 1)  # [B, q, K]
    slots = starts + torch.arange(num_queries, device=device)  # [B, q]
    mask.scatter_(2, slots[:, None].expand_as(block.visible), block.visible)
    if too_far is not None:
        mask &= ~too_far
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, hidden)[:, None]


def masks_by_layer(
    make: Callable[[AttentionSpan], Tensor], spans: AttentionSpan | dict[str, AttentionSpan]
) -> Tensor | dict[str, Tensor]:
    """One mask for all layers, or a dict by layer type, in which equal spans share a mask."""
    if isinstance(spans, AttentionSpan):
        return make(spans)
    masks = {span: make(span) for span in dict.fromkeys(spans.values())}
    return {layer_type: masks[span] for layer_type, span in spans.items()}
