"""The packed mask of a block: per query token one row of int32 with all that attention needs besides keys and values.

packed: [B, 1, q, 2 + ceil(q / 32)] int32. The row of block token i is [length, first, word 0, word 1, ...]:

length  committed slots of the batch row (L); the block's keys are in slots L .. L + q - 1
first   first slot of the prefix that the token sees; slots before it are padding or out of its layer's reach
words   bit k % 32 of word k // 32: whether block token k is visible

So slots first .. L - 1 are visible, and the block tokens whose bit is set. As a 4-D tensor it passes through a model's
forward unchanged, like an additive 4-D mask. All values are read from device memory, so one CUDA graph serves all
lengths.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

LENGTH, FIRST, WORDS = 0, 1, 2  # columns; words from WORDS on
WORD_BITS = 32


class BlockMask(NamedTuple):
    """An unpacked mask. lengths: [B]; first_slots: [B, q], both int32; visible: [B, q, q] bool."""

    lengths: Tensor
    first_slots: Tensor
    visible: Tensor


def pack_mask(visible: Tensor, lengths: Tensor, first_slots: Tensor | None = None) -> Tensor:
    """Pack a mask, without a copy to the host. Once per step.

    visible: [B, q, q] bool, query by key. lengths: [B] committed slots. first_slots: [B], or [B, q] if
    tokens differ; None for 0. Returns the packed mask.
    """
    batch_size, num_queries, _ = visible.shape
    num_words = -(-num_queries // WORD_BITS)
    bits = visible.new_zeros((batch_size, num_queries, num_words * WORD_BITS), dtype=torch.int32)
    bits[:, :, :num_queries] = visible
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=visible.device)  # the last is -2**31
    words = (bits.view(batch_size, num_queries, num_words, WORD_BITS) * weights).sum(dim=-1, dtype=torch.int32)

    first_slots = torch.zeros_like(lengths) if first_slots is None else first_slots
    first_slots = first_slots if first_slots.dim() == 2 else first_slots[:, None]
    columns = [lengths[:, None].expand(-1, num_queries), first_slots.expand(-1, num_queries)]
    return torch.cat([torch.stack(columns, dim=-1).to(torch.int32), words], dim=-1)[:, None]


def unpack_mask(packed: Tensor) -> BlockMask:
    """The inverse of `pack_mask`; first_slots always as [B, q]."""
    rows = packed[:, 0]
    num_queries = rows.shape[1]
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=packed.device)
    bits = (rows[:, :, WORDS:, None] >> shifts & 1).bool()  # [B, q, words, 32]
    visible = bits.flatten(2)[:, :, :num_queries]
    return BlockMask(rows[:, 0, LENGTH], rows[:, :, FIRST], visible)


def is_packed(mask: object) -> TypeGuard[Tensor]:
    """Whether this is a packed mask, unlike transformers' bool and floating point masks."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4


def left_padding(key_mask: Tensor) -> Tensor | None:
    """First slot of each row that is not padding; None where a row masks other slots than its first ones.

    key_mask: [B, P] bool, False for padding. Returns [B] int32. Copies to the host, so call it once per prompt.
    """
    seen = key_mask.to(torch.int32).cumsum(dim=1)
    if bool(((seen > 0) != key_mask).any()):
        return None
    return (seen == 0).sum(dim=1, dtype=torch.int32)
