"""What lade needs to know about a model: whether it can take a block of guesses, and how to run one. Floor 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from lade.attention import block_mask
from lade.kv_cache import LookaheadCache

# Their attention takes the 4-D mask that a block needs.
MASKED_ATTENTION = ("eager", "sdpa")
# What plain generate() does around each forward, and the loop does in its own way.
HOOKS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class ModelAdapter:
    """Runs blocks on one decoder-only model that follows transformers' conventions; made anew for each call.

    A family that differs overrides what differs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self._rope: dict[str, Any] = getattr(self.config, "rope_parameters", None) or {}

    def unsupported_reason(self) -> str | None:
        """Why lookahead cannot run on this model, as a sentence; None when it can."""
        model = self.model
        if model.config.is_encoder_decoder:
            return "encoder-decoder models are not supported"
        if getattr(model, "_is_stateful", False):
            return "models with a recurrent state cannot take a tree of guesses"
        if self.config._attn_implementation not in MASKED_ATTENTION:
            return f"attention {self.config._attn_implementation!r} takes no mask per block; eager and sdpa do"
        if model.training:
            return "the model is in training mode, where dropout and checkpointing depend on the block"
        if not model._supports_logits_to_keep():
            return f"{type(model).__name__}.forward has no logits_to_keep"
        for name in HOOKS:
            if getattr(getattr(model, name), "__func__", None) is not getattr(GenerationMixin, name):
                return f"{type(model).__name__} has a {name} of its own"
        return None

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether rows of a batch at different lengths would change each other: frequencies follow the longest one."""
        return self._rope.get("rope_type") in ("dynamic", "longrope")

    def max_guess_offset(self, root_positions: Tensor) -> int | None:
        """How far beyond the root a guess may lie without changing what the model says about the text; None: anywhere.

        Rotary frequencies of type "dynamic" and "longrope" depend on the largest position of a forward pass. While that
        stays below their boundary nothing changes; beyond it, "dynamic" allows no guesses and "longrope" any.
        """
        rope_type = self._rope.get("rope_type")
        if rope_type == "dynamic":
            return max(0, self.config.max_position_embeddings - 2 - int(root_positions.max()))
        if rope_type == "longrope":
            boundary = self._rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
            last = int(root_positions.max())
            return boundary - 1 - last if last < boundary else None
        return None

    def make_cache(self, capacity: int) -> LookaheadCache:
        """capacity: slots to start with."""
        devices = set((getattr(self.model, "hf_device_map", None) or {}).values())
        return LookaheadCache(self.config.num_hidden_layers, capacity, uniform=len(devices) <= 1)

    def forward_block(
        self,
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
        mask = block_mask(visible, cache.lengths, key_mask, self.dtype)
        device = self.model.device  # ids may come from the CPU to a model elsewhere; an offloaded model is "nowhere"
        if device not in (tokens.device, torch.device("meta")):
            tokens, positions, mask, logit_rows = (x.to(device) for x in (tokens, positions, mask, logit_rows))
        return self.model(
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
