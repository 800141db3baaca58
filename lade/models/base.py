"""What lade needs to know about a model: whether it can take a block of guesses, and how to run one. Floor 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lade.attention import block_mask
from lade.kv_cache import LookaheadCache

# Their attention takes the 4-D mask that a block needs.
MASKED_ATTENTION = ("eager", "sdpa")


class ModelAdapter:
    """Runs blocks on decoder-only models that follow transformers' conventions.

    A family that differs overrides what differs; an adapter holds no state.
    """

    def unsupported_reason(self, model: PreTrainedModel) -> str | None:
        """Why lookahead cannot run on this model, as a sentence; None when it can."""
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            return "encoder-decoder models are not supported"
        if getattr(model, "_is_stateful", False):
            return "models with a recurrent state cannot take a tree of guesses"
        if config._attn_implementation not in MASKED_ATTENTION:
            return f"attention {config._attn_implementation!r} takes no mask per block; eager and sdpa do"
        return None

    def max_guess_offset(self, model: PreTrainedModel, root_positions: Tensor) -> int | None:
        """How far beyond the root a guess may lie without changing what the model says about the text; None: anywhere.

        Rotary frequencies of type "dynamic" and "longrope" depend on the largest position of a forward pass. While that
        stays below their boundary nothing changes; beyond it, "dynamic" allows no guesses and "longrope" any.
        """
        config = model.config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":
            return max(0, config.max_position_embeddings - 2 - int(root_positions.max()))
        if rope.get("rope_type") == "longrope":
            boundary = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            last = int(root_positions.max())
            return boundary - 1 - last if last < boundary else None
        return None

    def make_cache(self, model: PreTrainedModel, capacity: int) -> LookaheadCache:
        return LookaheadCache(model.config.get_text_config(decoder=True).num_hidden_layers, capacity)

    def forward_block(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        logit_rows: Tensor,
        cache: LookaheadCache,
        key_mask: Tensor | None,
        **arguments: Any,
    ) -> Any:
        """One forward over a block; its keys/values end up behind the committed slots of `cache`.

        tokens, positions: [B, q]. visible: [B, q, q] bool. logit_rows: [R] rows of the block. key_mask: [B, P] bool or None.
        arguments: more of the model's own, such as output_hidden_states. Returns the model's output, logits [B, R, V].
        """
        cache.begin_block(tokens.shape[1], tokens.device)
        mask = block_mask(visible, cache.lengths, key_mask, model.dtype)
        return model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logit_rows,
            return_dict=True,
            **arguments,
        )


def prompt_key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """generate()'s 2-D mask as bool, or None where it hides nothing. attention_mask: [B, P]."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.to(torch.bool)
