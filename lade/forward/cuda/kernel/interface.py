"""Block attention as an implementation in transformers' attention interface, named "lade_block".

A shadow model is set to it for blocks. Their `attention_mask` is a packed mask (`pack_mask`) that includes
the layer's window, since not all families pass these to attention. Soft cap and sinks come from the layer.
Prompts use the model's own attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lade.forward.cuda.kernel import block_attention, is_packed

NAME = "lade_block"
# Arguments of some families' layers that change the scores and are not supported.
REFUSED_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


def lade_block_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer.

    query: [B, H, q, D]. key, value: [B, H_kv, C, D] of the whole cache. Returns [B, q, H, D_v] and None: attention
    weights are never materialised. Raises NotImplementedError for masks and arguments that block attention does not
    support.
    """
    if not is_packed(attention_mask):
        raise NotImplementedError(
            f"{type(module).__name__} makes a mask of its own, and the block attention takes none"
        )
    refused = [name for name in REFUSED_ARGUMENTS if arguments.get(name) is not None]
    if refused:
        raise NotImplementedError(
            f"the block attention knows nothing of {refused[0]}, passed by {type(module).__name__}"
        )
    scale = arguments.get("scaling")
    output = block_attention(
        query,
        key,
        value,
        attention_mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    return output, None


AttentionInterface.register(NAME, lade_block_forward)


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why blocks of this model cannot use block attention, as a sentence; None when they can."""
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not use transformers' attention interface"
    return None
