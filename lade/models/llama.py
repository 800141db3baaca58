"""Llama, and the families whose layers compute what Llama's do.

Their blocks can run inlined: `InlinedLlama` computes what the modules of transformers compute, with the same bits, but
calls few of them. In a small model on a CPU, calling modules costs as much as the products inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.compat import ALL_ATTENTION_FUNCTIONS
from lade.models.base import ModelAdapter

# What the code below uses of the decoder and of its attention.
DECODER = ("config", "embed_tokens", "layers", "norm", "rotary_emb")
SETTINGS = ("head_dim", "layer_idx", "scaling")
# The modules that a layer and its attention consist of. Others would be left out.
LAYER = {"input_layernorm", "mlp", "post_attention_layernorm", "self_attn"}
ATTENTION = {"k_proj", "o_proj", "q_proj", "v_proj"}
HEAD_NORMS = {"k_norm", "q_norm"}


class LlamaAdapter(ModelAdapter):
    """Llama 1 to 3, and Mistral, Qwen 2 and 3, which add biases, norms of queries and keys, or windows."""

    def inlined(self, model: Any) -> InlinedLlama | None:
        """`InlinedLlama` of the model or of a shadow model of it; None if its modules are not those of Llama."""
        decoder = model.get_decoder()
        has_all = all(hasattr(decoder, name) for name in DECODER) and model.get_output_embeddings() is not None
        return InlinedLlama(model) if has_all and all(map(is_of_llama, decoder.layers)) else None


def is_of_llama(layer: nn.Module) -> bool:
    """Whether a decoder layer consists of the modules of a Llama layer."""
    attention: Any = layer._modules.get("self_attn")
    if layer._modules.keys() != LAYER or attention is None:
        return False
    projections = [part for name, part in attention._modules.items() if name in ATTENTION]
    return (
        attention._modules.keys() in (ATTENTION, ATTENTION | HEAD_NORMS)
        and all(isinstance(projection, nn.Linear) for projection in projections)
        and all(hasattr(attention, name) for name in SETTINGS)
    )


@dataclass(slots=True)
class _Layer:
    """What a layer's forward calls: looking modules up costs, too."""

    attention: Any  # the module
    attention_function: Any  # of transformers' attention interface
    input_norm: Any
    projections: tuple[Any, ...]  # of queries, keys and values
    product: Any  # of all three at once, where packed weights have it
    head_norms: tuple[Any, Any] | None  # of queries and keys
    output: Any
    mlp_norm: Any
    mlp: Any
    num_heads: int
    num_key_heads: int
    head_dim: int
    scaling: float
    place: int  # in the cache
    type: str | None

    @classmethod
    def of(cls, layer: Any, layer_type: str | None, attention_function: Any) -> _Layer:
        attention = layer.self_attn
        head_dim = attention.head_dim
        has_norms = "q_norm" in attention._modules
        return cls(
            attention=attention,
            attention_function=attention_function,
            input_norm=layer.input_layernorm.forward,
            projections=(attention.q_proj, attention.k_proj, attention.v_proj),
            product=getattr(attention.q_proj, "whole", None),
            head_norms=(attention.q_norm.forward, attention.k_norm.forward) if has_norms else None,
            output=attention.o_proj,
            mlp_norm=layer.post_attention_layernorm.forward,
            mlp=layer.mlp.forward,
            num_heads=attention.q_proj.out_features // head_dim,
            num_key_heads=attention.k_proj.out_features // head_dim,
            head_dim=head_dim,
            scaling=attention.scaling,
            place=attention.layer_idx,
            type=layer_type,
        )

    def attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Any, mask: Tensor) -> Tensor:
        """The layer's attention. hidden: [B, q, d], normed. cos, sin: [B, 1, q, D]. Returns [B, q, d]."""
        batch_size, num_tokens, _ = hidden.shape
        product = None if self.product is None else self.product(hidden)
        if product is None:
            product = torch.cat([projection(hidden) for projection in self.projections], -1)
        heads = product.view(batch_size, num_tokens, -1, self.head_dim)
        num_rotated = self.num_heads + self.num_key_heads
        rotated, values = heads[:, :, :num_rotated], heads[:, :, num_rotated:].transpose(1, 2)
        if self.head_norms is not None:
            parts = rotated.split((self.num_heads, self.num_key_heads), 2)
            rotated = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], 2)
        rotated = rotated.transpose(1, 2)
        left, right = rotated.chunk(2, -1)
        rotated = rotated * cos + torch.cat((right, left), -1) * sin
        keys, values = slots.update(rotated[:, self.num_heads :], values)
        queries = rotated[:, : self.num_heads]
        attended, _ = self.attention_function(self.attention, queries, keys, values, mask, scaling=self.scaling)
        output: Tensor = self.output(attended.reshape(batch_size, num_tokens, -1))
        return output


class InlinedLlama:
    """A block's forward through a model of Llama's layers, as one function.

    It is `LlamaForCausalLM.forward` of transformers operation by operation, but that queries and keys are rotated
    together, which changes no bit.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        config = decoder.config  # which is not the model's if that was replaced
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm.forward
        self._head = model.get_output_embeddings()
        layers = decoder.layers[: config.num_hidden_layers]
        types: list[Any] = getattr(config, "layer_types", None) or [None] * len(layers)
        attention = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
        self._layers = [_Layer.of(layer, types[place], attention) for place, layer in enumerate(layers)]

    def __call__(self, block: Block, cache: LookaheadCache, masks: Tensor | dict[str, Tensor]) -> Tensor:
        """Run a block that `cache` has room for. masks: of `ModelAdapter.masks`. Returns the logits, [B, R, V]."""
        hidden = self._embed(block.tokens)
        cos, sin = self._rotary(hidden, position_ids=block.positions)
        left, right = sin.chunk(2, -1)
        cos, sin = cos.unsqueeze(1), torch.cat((-left, right), -1).unsqueeze(1)
        for layer in self._layers:
            mask = masks[str(layer.type)] if isinstance(masks, dict) else masks
            slots = cache.layers[layer.place]
            hidden = hidden + layer.attend(layer.input_norm(hidden), cos, sin, slots, mask)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        hidden = self._norm(hidden)
        logits: Tensor = self._head(hidden if block.needs_all_rows else hidden[:, block.logit_rows])
        return logits
