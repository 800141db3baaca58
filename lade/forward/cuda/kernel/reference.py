"""Block attention in plain torch: one softmax over all slots of the cache.

The reference for testing the Triton kernel, and the implementation where there is no kernel. Query heads that share a
key/value head are rows of one matrix product, without `repeat_kv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lade.forward.cuda.kernel.packed_mask import unpack_mask


def reference_block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `lade.forward.cuda.kernel.block_attention`; computes in float64 for float64 inputs, else in float32.

    Reads all C slots of the cache, so pass a view that ends with the longest row.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch_size, num_heads, num_queries, _ = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    group = num_heads // num_kv_heads
    lengths, first_slots, visible_block = unpack_mask(packed)

    slots = torch.arange(capacity, device=query.device)
    visible = (slots >= first_slots[:, :, None]) & (slots < lengths[:, None, None])  # [B, q, C]
    block_slots = lengths[:, None, None] + torch.arange(num_queries, device=query.device)  # [B, 1, q]
    visible.scatter_(2, block_slots.expand_as(visible_block), visible_block)

    rows = query.reshape(batch_size, num_kv_heads, group * num_queries, -1).to(dtype)
    scores = rows @ keys.to(dtype).transpose(2, 3) * scale  # [B, H_kv, group * q, C]
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~visible.repeat(1, group, 1)[:, None], -torch.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:  # a sink adds to the denominator only
        of_rows = sinks.to(dtype).view(num_kv_heads, group, 1).repeat(1, 1, num_queries)
        log_sum = torch.logaddexp(log_sum, of_rows.flatten(1)[..., None])
    log_sum = log_sum.clamp(min=torch.finfo(dtype).min)  # -inf where nothing is visible, which cannot be subtracted
    output = (scores - log_sum).exp() @ values.to(dtype)
    output = output.view(batch_size, num_heads, num_queries, -1).transpose(1, 2)
    return output.to(query.dtype).contiguous()  # as a custom operation must return it
