"""Block attention in plain torch: the prefix and the block separately, merged by log-sum-exp.

The reference for testing the Triton kernel, and the implementation where there is no kernel. Query heads that share a
key/value head are rows of one matrix product, without `repeat_kv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lade.kernels.packed_mask import unpack_mask


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
    """As `lade.kernels.block_attention`; computes in float64 for float64 inputs, else in float32.

    Reads all C slots of the cache, so pass a view that ends with the longest row.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch_size, num_heads, num_queries, _ = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    group = num_heads // num_kv_heads
    lengths, first_slots, visible = unpack_mask(packed)

    slots = torch.arange(capacity, dtype=torch.int32, device=query.device)
    prefix_visible = (slots >= first_slots[:, :, None]) & (slots < lengths[:, None, None])  # [B, q, C]
    block_slots = lengths[:, None] + torch.arange(num_queries, device=query.device)  # [B, q]

    rows = query.reshape(batch_size, num_kv_heads, group * num_queries, -1)

    def attend(keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """visible: [B, q, keys]. Returns the normalised sum [B, H_kv, group * q, D_v] and its log-sum-exp [..., 1]."""
        scores = rows.to(dtype) @ keys.to(dtype).transpose(2, 3) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~visible.repeat(1, group, 1)[:, None], -torch.inf)
        log_sum = scores.logsumexp(dim=-1, keepdim=True)
        return (scores - _finite(log_sum)).exp() @ values.to(dtype), log_sum

    from_prefix, prefix_sum = attend(keys, values, prefix_visible)
    from_block, block_sum = attend(_gather(keys, block_slots), _gather(values, block_slots), visible)

    log_sum = torch.logaddexp(prefix_sum, block_sum)
    if sinks is not None:  # a sink adds to the denominator only
        log_sum = torch.logaddexp(
            log_sum, sinks.to(dtype).view(num_kv_heads, group, 1).repeat(1, 1, num_queries).flatten(1)[..., None]
        )
    log_sum = _finite(log_sum)
    output = from_prefix * (prefix_sum - log_sum).exp() + from_block * (block_sum - log_sum).exp()
    output = output.view(batch_size, num_heads, num_queries, -1).transpose(1, 2)
    return output.to(query.dtype).contiguous()  # as a custom operation must return it


def _gather(states: Tensor, slots: Tensor) -> Tensor:
    """states: [B, H, C, D]. slots: [B, k]. Returns [B, H, k, D]."""
    return states.take_along_dim(slots[:, None, :, None].long(), dim=2)


def _finite(log_sum: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp of no keys, by the smallest finite number, which can be subtracted."""
    return log_sum.clamp(min=torch.finfo(log_sum.dtype).min)
