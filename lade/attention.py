"""The attention mask of a block, in the one form that eager and sdpa attention both take. Floor 2."""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(visible: Tensor, lengths: list[int], key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Additive mask over the cache's slots: 0 where a query sees a key, the dtype's minimum elsewhere.

    visible: [B, q, q] bool inside the block. lengths: committed slots of each row; the block lies behind them.
    key_mask: [B, P] bool, False for padding among the first P slots; None when there is none.
    Returns [B, 1, q, max(lengths) + q]. Additive, because eager attention would add a bool mask as 0 and 1.
    """
    batch_size, num_queries, _ = visible.shape
    hidden = torch.finfo(dtype).min
    num_slots = max(lengths) + num_queries
    device = visible.device
    if batch_size == 1 and key_mask is None:
        mask = torch.zeros(1, 1, num_queries, num_slots, dtype=dtype, device=device)
        mask[0, 0, :, lengths[0] :].masked_fill_(~visible[0], hidden)
        return mask

    starts = torch.tensor(lengths, device=device)[:, None]  # [B, 1]
    is_prefix = torch.arange(num_slots, device=device) < starts  # [B, slots]
    if key_mask is not None:
        is_prefix[:, : key_mask.shape[1]] &= key_mask
    mask = is_prefix[:, None].repeat(1, num_queries, 1)  # [B, q, slots]
    slots = starts + torch.arange(num_queries, device=device)  # [B, q]
    mask.scatter_(2, slots[:, None].expand_as(visible), visible)
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, hidden)[:, None]
