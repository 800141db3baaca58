"""LFM2: short causal convolutions between the attention layers, which in a tree must follow each guess's ancestors.

The inputs of each convolution are stored per token in cache slots, like keys, so rejected guesses are removed in the
same way. Prompt and blocks run on a shadow model whose convolutions read these slots.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lade.block.mask import AttentionSpan, Block
from lade.common.compat import CACHE_NAME
from lade.models.attention_spans import LAYER_SPANS
from lade.models.base import ModelAdapter
from lade.models.shadow import take_hooks


class Lfm2Adapter(ModelAdapter):
    def unsupported_layers(self) -> str | None:
        others = set(self.config.layer_types) - {"conv", *LAYER_SPANS}
        return f"layers of type {min(others)!r} cannot take a tree of guesses" if others else self.shared_place()

    @cached_property
    def attention_spans(self) -> dict[str, AttentionSpan]:
        types = set(self.config.layer_types) - {"conv"}
        return {layer_type: LAYER_SPANS[layer_type](self.config) for layer_type in types}

    @property
    def prompt_model(self) -> Any:
        return self.block_model

    def change_shadow(self, shadow: Any) -> None:
        self.ancestors: Tensor | None = None
        layers = [layer for layer in shadow.modules() if hasattr(layer, "is_attention_layer")]
        for layer, layer_type in zip(layers, self.config.layer_types, strict=True):
            if layer_type == "conv":
                layer.conv = TreeConvolution(layer.conv, self)
            else:
                layer.register_forward_pre_hook(partial(self._with_mask, layer_type), with_kwargs=True)

    def masks(self, block: Block) -> Any:
        self.ancestors = ancestor_slots(block, self.config.conv_L_cache)
        self._masks = super().masks(block)
        return None  # older versions take no dict: `_with_mask` passes the masks to the attention layers

    def _with_mask(self, layer_type: str, _: Any, args: Any, arguments: dict[str, Any]) -> Any:
        if self.ancestors is None:  # the prompt
            return None
        return args, arguments | {"attention_mask": self._masks[layer_type]}  # type: ignore[index]


class TreeConvolution(nn.Module):
    """A short convolution over each token and its k-1 nearest ancestors."""

    def __init__(self, stock: Any, adapter: Lfm2Adapter) -> None:
        super().__init__()
        self.stock, self.adapter = stock, adapter
        take_hooks(self, stock)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any) -> Tensor:
        """hidden_states: [B, q, D]. attention_mask: [B, q], 0 for the prompt's padding, or None. Returns [B, q, D].

        arguments: the cache and others.
        """
        stock = self.stock
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        gate_in, gate_out, inputs = stock.in_proj(hidden_states).chunk(3, dim=-1)
        inputs = gate_in * inputs  # [B, q, D]
        num_tokens = inputs.shape[1]
        kept, _ = arguments[CACHE_NAME].update(inputs[:, None], inputs[:, None, :, :0], stock.layer_idx)
        kept = kept[:, 0]  # [B, K, D]
        weights = stock.conv.weight[:, 0]  # [D, k]; the last column weights the token itself

        slots = self.adapter.ancestors
        if slots is None:  # the prompt: a token's ancestors precede it
            places = torch.arange(kept.shape[1] - num_tokens, kept.shape[1], device=kept.device)
            steps = torch.arange(weights.shape[1], device=kept.device)
            slots = (places[:, None] - steps).expand(len(kept), -1, -1)  # [B, q, k]
        slots = slots.to(kept.device)
        found = kept.gather(1, slots.clamp(min=0).flatten(1)[..., None].expand(-1, -1, kept.shape[2]))
        found = found.unflatten(1, slots.shape[1:]) * (slots >= 0)[..., None]  # [B, q, k, D]
        output = torch.einsum("bqkd,dk->bqd", found, weights.flip(1))
        if stock.conv.bias is not None:
            output = output + stock.conv.bias
        return stock.out_proj(gate_out * output)


def ancestor_slots(block: Block, count: int) -> Tensor:
    """Slots of each block token and its count - 1 nearest ancestors.

    Returns [B, q, count]; negative before the text.
    """
    targets = block.offsets[:, :, None] - torch.arange(count, device=block.offsets.device)  # [B, q, k] offsets
    # A token sees exactly one token at each offset from the root on.
    is_ancestor = block.visible[:, :, None] & (block.offsets[:, None, None] == targets[..., None])  # [B, q, k, q]
    inside = is_ancestor.to(torch.uint8).argmax(dim=-1)
    return block.starts()[:, :, None] + torch.where(targets < 0, targets, inside)
