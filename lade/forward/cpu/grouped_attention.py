"""Attention of blocks on a CPU, where several query heads share a key/value head, without repeated keys and values.

If there is a mask, as for each block, transformers' sdpa attention copies the keys and values for each query head.
torch's kernel for CPUs can read them without copies and computes the same bits. It is registered in transformers'
attention interface as "lade_grouped", which a shadow model uses. Prompts use the model's own attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from lade.common.compat import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_attention_forward
from lade.models import needs_self_check
from lade.models.base import ModelAdapter

NAME = "lade_grouped"
OTHER_ATTENTION = ("softcap", "position_bias", "cache")  # arguments that change the computation, or make it raise


def grouped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer; it passes all other cases on to transformers' own for sdpa.

    query: [B, H, q, D]. key, value: [B, H_kv, K, D]. attention_mask: [B or 1, 1, q, K]. Returns [B, q, H, D] and None.
    """
    num_groups = getattr(module, "num_key_value_groups", 1)
    if (
        num_groups == 1
        or query.shape[1] != key.shape[1] * num_groups
        or query.shape[2] == 1  # transformers computes one token's heads as rows of one product, which is even faster
        or attention_mask is None
        or dropout
        or any(arguments.get(name) is not None for name in OTHER_ATTENTION)
    ):
        inputs = (query, key, value, attention_mask)
        return sdpa_attention_forward(module, *inputs, dropout=dropout, scaling=scaling, **arguments)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention_forward)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def can_group(adapter: ModelAdapter) -> bool:
    """Whether blocks of this model can use grouped attention, and gain from it."""
    model, config = adapter.model, adapter.config
    try:
        num_heads, num_shared = config.num_attention_heads, config.num_key_value_heads
    except (AttributeError, RuntimeError):  # it has none, or another number in each layer
        return False
    if not (isinstance(num_heads, int) and isinstance(num_shared, int) and num_shared < num_heads):
        return False
    if model.device.type != "cpu" or not adapter.code.is_as_made:
        return False
    # A self-check would have run with the model's own attention.
    if needs_self_check(adapter) or not model._can_set_attn_implementation():
        return False
    is_sdpa = adapter.block_model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    return is_sdpa and has_same_bits(adapter.dtype)


@functools.cache
def has_same_bits(dtype: torch.dtype) -> bool:
    """Whether this torch computes the same with shared keys and values as with repeated ones, on a CPU.

    Older versions have no such kernel: they repeat them too, and use a slower one that rounds differently.
    """
    numbers = torch.Generator().manual_seed(0)  # not the one that the user's sampling draws from
    attention = functools.partial(
        functional.scaled_dot_product_attention, attn_mask=torch.zeros(1, 1, 8, 100, dtype=dtype, device="cpu")
    )
    with torch.inference_mode():
        query, key, value = (
            torch.randn(1, num_heads, count, 64, generator=numbers, device="cpu").to(dtype)
            for num_heads, count in ((4, 8), (2, 100), (2, 100))
        )
        repeated = attention(query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1))
        return torch.equal(attention(query, key, value, enable_gqa=True), repeated)
