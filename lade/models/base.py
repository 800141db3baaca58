"""`ModelAdapter`: whether a model can take a block of guesses, and how to run one on it."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lade.block.kv_cache import LookaheadCache, cache_arguments
from lade.block.mask import EVERYWHERE, AttentionSpan, Block, block_mask, masks_by_layer
from lade.common.compat import CACHE_NAME, MAMBA_CACHE_NAME, PLAIN_LAYERS, PROMPT_ARGUMENTS
from lade.common.request import Request
from lade.common.tolerance import has_exact_products
from lade.models.attention_spans import LAYER_SPANS, declares_layer_types, layer_spans
from lade.models.foreign import Code, code_of
from lade.models.reasons import calling_reason, rounding_reason
from lade.models.ropes import is_moving, is_moving_rope, rope_settings
from lade.models.shadow import shadow_model
from lade.switch import current_config

# Attention implementations that accept the 4-D mask of a block.
MASKED_ATTENTION = ("eager", "sdpa")
# Parts of names of implementations that compute the same but accept no such mask.
MASKLESS_ATTENTION = ("flash", "flex_attention")
# By model type, the setting that says for how many slots the model's code has room, those of guesses included.
MOST_SLOTS = {
    "gpt_neo": "max_position_embeddings",
    "mpt": "max_seq_len",
    "xglm": "max_position_embeddings",
}
EXACT_DTYPES = (torch.float32, torch.float64)


class ModelAdapter:
    """Runs blocks on a decoder-only model that follows transformers' conventions. One instance serves one call.

    A family that differs overrides the methods concerned; see docs/adding-a-model.md.
    """

    # Class attributes that a family may set.
    takes_chains: bool = False  # takes chains of guesses alone, in rows of equal lengths
    safe_hooks: tuple[str, ...] = ()  # names in `reasons.HOOKS` that change nothing after the prompt
    prompt_arguments: frozenset[str] = PROMPT_ARGUMENTS  # model arguments used by the prompt's forward only
    carried_arguments: frozenset[str] = frozenset()  # each new token repeats the prompt's last value

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.carried: dict[str, Tensor] = {}  # `carried_arguments` of the call, [B, 1] each

    def unsupported_reason(self) -> str | None:
        """Why lookahead cannot run on this model, as a sentence; None if it can."""
        model = self.model
        if model.config.is_encoder_decoder:
            return "encoder-decoder models are not supported"
        if model._is_stateful and not self.takes_chains:
            return "models with a recurrent state cannot take a tree of guesses"
        return (
            self.unsupported_layers()
            or self.unsupported_attention()
            or rounding_reason(self.parts)
            or calling_reason(model, self.safe_hooks, self.cache_name)
            or self.code.reason
        )

    def unsupported_attention(self) -> str | None:
        """Why the model's attention cannot take a block, as a sentence; None if it can."""
        if not self._has_moving_ropes and any(map(is_moving_rope, self.parts)):
            return "rotary frequencies of this model depend on the length of the text, and its configuration does not say so"
        attention = self.config._attn_implementation
        configs = {id(config): config for part in self.parts if (config := vars(part).get("config")) is not None}
        found = {other._attn_implementation for other in configs.values() if type(other) is type(self.config)}
        others = found - {attention}
        if others:
            return f"the model's configuration says attention {attention!r}, its layers say {min(others)!r}"
        if self._masked_attention is None:
            return f"attention {attention!r} is not known to take a mask per block; eager and sdpa do"
        if attention not in MASKED_ATTENTION and not self.model._can_set_attn_implementation():
            return f"attention {attention!r} of {type(self.model).__name__} is built in and takes no mask per block"
        if self.needs_shadow and self.code.is_patched:
            return "blocks need changed modules of this model, which a dispatched or patched model does not allow"
        return None

    def unsupported_layers(self) -> str | None:
        """Why the model's layers cannot take a tree of guesses, by their types and cache layers; None if they can."""
        kind, layer_types = type(self.config), getattr(self.config, "layer_types", None) or ()
        for layer_type in layer_types:
            if layer_type not in LAYER_SPANS:
                return f"layers of type {layer_type!r} cannot take a tree of guesses"
        if layer_types and not self.code.classes and not declares_layer_types(kind):
            return f"its configuration has layer_types, which the models of a {kind.__name__} do not read"
        for layer in self.cache_layers:
            if type(layer) not in PLAIN_LAYERS:
                return f"its cache has a {type(layer).__name__}, whose state cannot take a tree of guesses"
        spans = self.attention_spans  # raises where layers of one type differ
        for span in [spans] if isinstance(spans, AttentionSpan) else spans.values():
            if span != EVERYWHERE and (span.window or 0) < 2:
                return "its windows have fewer than two tokens, for which transformers' cache keeps all keys"
        if self._sees_everything and any(getattr(layer, "is_sliding", False) for layer in self.cache_layers):
            return "its cache has a window or chunks, and its layers attend to the whole text"
        return self.shared_place()

    def shared_place(self) -> str | None:
        """Why layers that share a layer of the cache, or leave out its first one, are not served; None if none do.

        So it is after copying or removing a layer. A DynamicCache then grows twice per token, or counts none.
        """
        numbers = [vars(part).get(name) for part in self.parts for name in ("layer_idx", "layer_id")]
        if min((number for number in numbers if type(number) is int), default=0) > 0:
            return "no layer writes to the first layer of the cache (layer_idx), by which its tokens are counted"
        for layers in self.parts:
            if isinstance(layers, nn.ModuleList):
                children = [child for layer in layers for child in layer._modules.items() if child[1] is not None]
                places = [(name, vars(part).get("layer_idx")) for name, part in children]
                used = [(name, place) for name, place in places if place is not None]  # HunYuan's MLPs all have None
                if len(set(used)) < len(used):
                    return "two layers write to the same layer of the cache (their layer_idx is the same)"
        return None

    def unsupported_request(self, request: Request) -> str | None:
        """Why this call, of a model without an `unsupported_reason`, cannot be served, as a sentence; None if it can.

        Plain generate() keeps finished rows in the batch until the last row ends; lade usually drops them. Where
        keeping them may raise an error, the call goes to plain generate(), so that the error is the same.
        """
        if self.most_slots is not None and request.num_slots > self.most_slots:
            return f"the text may grow over {self.most_slots} tokens, padding included, for which the model's code has no room"
        # By the criteria, which a caller may bring, and with the token that generate() takes if it is given none.
        has_end = any(hasattr(criterion, "eos_token_id") for criterion in request.stopping_criteria)
        pad_token = request.generation_config._pad_token_tensor
        if has_end and pad_token is None:
            return "a stopping criterion knows how a text ends, and there is no token to pad with"
        if request.batch_size > 1:
            last = self.last_position
            if last is not None and request.num_slots > last + 1 and request.furthest_position > last:
                return f"rows of the batch may grow over the {last + 1} positions that the model knows"
            if has_end and not 0 <= int(pad_token) < self.num_tokens:
                return f"token {int(pad_token)}, which pads rows that end early, is not a token of the model"
        if self._forgets_nan(request.attention_mask):
            return "eager attention in float64 makes padding NaN, which leaves the model's windows but not lade's own cache"
        return None

    @property
    def _sees_everything(self) -> bool:
        """Whether all layers attend to the whole text, with no window."""
        return self.attention_spans in (EVERYWHERE, {"full_attention": EVERYWHERE})

    def _forgets_nan(self, attention_mask: Tensor | None) -> bool:
        """Whether padding may put NaN into the cache that a sliding window would later drop and lade's cache keeps.

        Eager attention computes the softmax in float32. The mask value, the minimum of float64, becomes minus infinity
        there, so a token that attends to no key, such as left padding, becomes NaN. attention_mask: [B, P] or None.
        """
        if self.dtype != torch.float64 or self.config._attn_implementation != "eager" or attention_mask is None:
            return False
        return not self._sees_everything and not bool(attention_mask.all())

    @property
    def most_slots(self) -> int | None:
        """The most tokens per row, padding included, that the model's code has room for; None for no limit."""
        count = getattr(self.config, MOST_SLOTS.get(self.config.model_type, ""), None)
        return None if count is None else max(0, int(count) - current_config().max_block_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of token ids that have an embedding."""
        return num_tokens_of(self.model)

    @cached_property
    def takes_positions(self) -> bool:
        """Whether the forward accepts `position_ids`; otherwise the model derives positions from the cache."""
        return "position_ids" in self._parameters

    @cached_property
    def cache_name(self) -> str:
        """The forward's argument for the cache."""
        return (
            MAMBA_CACHE_NAME if {MAMBA_CACHE_NAME, CACHE_NAME} & self._parameters == {MAMBA_CACHE_NAME} else CACHE_NAME
        )

    @cached_property
    def keeps_rows(self) -> bool:
        """Whether the forward accepts `logits_to_keep`."""
        return "logits_to_keep" in self._parameters

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether rows of different lengths would affect each other: rotary frequencies depend on the longest row."""
        return self._has_moving_ropes

    def max_guess_offset(self, root_position: int) -> int | None:
        """The largest offset of a guess from the root that leaves the logits of the text unchanged; None for no limit.

        root_position: the largest of all rows. Rotary frequencies of types "dynamic" and "longrope" depend on the
        largest position of a forward and are constant below a boundary. Beyond it, "dynamic" allows no guesses,
        "longrope" any. Learned or tabulated positions end at the last row of their table.
        """
        limits = [] if self.last_position is None else [self.last_position]
        for rope in self._ropes:
            if "dynamic" in str(rope.get("rope_type")):
                limits.append(self.config.max_position_embeddings - 2)
            elif rope.get("rope_type") == "longrope":
                boundary = rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
                if root_position < boundary:
                    limits.append(boundary - 1)
        return max(0, min(limits) - root_position) if limits else None

    @property
    def last_position(self) -> int | None:
        """The last position that the model has an embedding for; None for no limit."""
        if self._ropes or not self.takes_positions:
            return None
        count = getattr(self.config, "max_position_embeddings", None)
        return None if count is None else int(count) - 1

    def carry(self, model_kwargs: dict[str, Any]) -> None:
        """Store the call's `carried_arguments` for its blocks. model_kwargs: those of `_sample`."""
        given = {name: model_kwargs.get(name) for name in self.carried_arguments}
        self.carried = {name: value[:, -1:] for name, value in given.items() if value is not None}

    def make_cache(self, capacity: int) -> LookaheadCache:
        """An empty cache. capacity: its initial number of slots."""
        devices = set((getattr(self.model, "hf_device_map", None) or {}).values())
        return LookaheadCache(self.config.num_hidden_layers, capacity, uniform=len(devices) <= 1)

    @property
    def has_own_blocks(self) -> bool:
        """Whether the family has masks or a shadow model of its own."""
        names = ("masks", "change_shadow", "block_model")
        return any(getattr(type(self), name) is not getattr(ModelAdapter, name) for name in names)

    def masks(self, block: Block) -> Tensor | dict[str, Tensor]:
        """The additive attention mask of a block, [B, 1, q, K]: one for all layers, or a dict by layer type."""
        return masks_by_layer(partial(block_mask, block, self.dtype), self.attention_spans)

    def begin_block(self, block: Block, cache: LookaheadCache) -> Block:
        """Make room for a block in the cache. Returns the block on the model's device."""
        cache.begin_block(block.tokens.shape[1], block.tokens.device)
        # Ids may lie on the CPU and the model elsewhere. The weights of an offloaded model are on the meta device.
        is_elsewhere = self._device != block.tokens.device and self._device.type != "meta"
        return block.to(self._device) if is_elsewhere else block

    def forward_block(self, block: Block, cache: LookaheadCache) -> Tensor:
        """One eager forward over a block. Its keys and values are written after the committed slots of `cache`.

        Returns logits [B, R, V].
        """
        block = self.begin_block(block, cache)
        return self.ordinary_forward(block, cache, self.block_model, self.masks(block))

    def ordinary_forward(self, block: Block, cache: LookaheadCache, model: Any, masks: Any) -> Tensor:
        """`forward_block` with a given model and masks, for a block that `cache` has room for."""
        arguments: dict[str, Any] = {
            name: value.to(block.tokens.device).expand_as(block.tokens) for name, value in self.carried.items()
        }
        if self.takes_positions:
            arguments["position_ids"] = block.positions
        if self.keeps_rows:
            arguments["logits_to_keep"] = 0 if block.needs_all_rows else block.logit_rows
        with torch.inference_mode() if self.leaves_no_tensor else nullcontext():
            named = cache_arguments(cache, self.cache_name) | arguments
            logits: Tensor = model(input_ids=block.tokens, attention_mask=masks, **named).logits
        return logits if self.keeps_rows or block.needs_all_rows else logits[:, block.logit_rows]

    @cached_property
    def leaves_no_tensor(self) -> bool:
        """Whether no tensor made in a block's forward outlives it, so that it may run in torch's inference mode.

        Operations cost less there, but its tensors cannot be used in training or modified in place outside. Hooks and
        modules of the user may keep tensors, and so does a model whose rotary frequencies depend on the length of the
        text.
        """
        # Autocast caches the weights that it has cast.
        return self.code.is_as_made and not self.needs_equal_lengths and not self._is_autocast

    @cached_property
    def is_exact(self) -> bool:
        """Whether the size of a block cannot change the text: all weights and products are float32 or float64.

        In half precision, in quantized layers and in reduced-precision products, rounding depends on the number of
        rows.
        """
        if self.dtype not in EXACT_DTYPES or not has_exact_products() or self._is_autocast:
            return False
        weights = (weight for part in self.parts for weight in part._parameters.values() if weight is not None)
        return all(type(weight) is nn.Parameter and weight.dtype in EXACT_DTYPES for weight in weights)

    @property
    def _is_autocast(self) -> bool:
        kind = self._device.type
        return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)

    @cached_property
    def block_model(self) -> Any:
        """The model that runs the blocks: the user's, or a shadow model of it."""
        if not self.needs_shadow:
            return self.model
        own, attention = self.config._attn_implementation, self._masked_attention
        shadow = shadow_model(self.model, attention=None if attention == own else attention)
        self.change_shadow(shadow)
        return shadow

    @property
    def changes_shadow(self) -> bool:
        return type(self).change_shadow is not ModelAdapter.change_shadow

    def change_shadow(self, shadow: Any) -> None:
        """Change the shadow model that runs the blocks, where `needs_shadow`."""

    @cached_property
    def attention_spans(self) -> AttentionSpan | dict[str, AttentionSpan]:
        """The positions the layers attend to: one `AttentionSpan`, or one per layer type."""
        return layer_spans(self.config)

    @property
    def _masked_attention(self) -> str | None:
        """An attention implementation for blocks that computes what the model's does; None if none is known."""
        own = self.config._attn_implementation
        if own in MASKED_ATTENTION:
            return str(own)
        if not any(name in own for name in MASKLESS_ATTENTION):
            return None
        # Older versions report sdpa as supported although it ignores the soft cap.
        has_cap = getattr(self.config, "attn_logit_softcapping", None) is not None
        return "sdpa" if self.model._supports_sdpa and not has_cap else "eager"

    @property
    def needs_shadow(self) -> bool:
        """Whether blocks run on a shadow model: one that the family changes, or one with another attention."""
        return self.changes_shadow or self._masked_attention != self.config._attn_implementation

    @cached_property
    def _device(self) -> torch.device:
        """The device of the model's first weight."""
        return self.model.device

    @cached_property
    def parts(self) -> tuple[nn.Module, ...]:
        """The model and all modules in it."""
        return tuple(self.model.modules())

    @cached_property
    def cache_layers(self) -> list[Any]:
        """The layers of a `DynamicCache` made from the model's configuration."""
        return DynamicCache(config=self.config).layers

    @cached_property
    def code(self) -> Code:
        """The code that runs inside the model's forward, and the packages that it comes from."""
        return code_of(self.parts, dict.fromkeys((self.config._attn_implementation, self._masked_attention)))

    @cached_property
    def _parameters(self) -> frozenset[str]:
        """Arguments of the model's forward."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def _ropes(self) -> list[dict[str, Any]]:
        """Settings of the rotary embeddings: none, one dict, or one per layer type if they differ."""
        return rope_settings(self.config)

    @property
    def _has_moving_ropes(self) -> bool:
        """Whether the configuration says that rotary frequencies depend on the sequence length."""
        return any(is_moving(rope.get("rope_type")) for rope in self._ropes)


def prompt_key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """The 2-D attention mask of generate() as bool, or None if it hides nothing. attention_mask: [B, P]."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.to(torch.bool)


def num_tokens_of(model: Any) -> int:
    """Token ids that have an embedding, by its rows: they may have been changed without the configuration."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    embedding = model.get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    has_rows = weight is not None and weight.ndim == 2 and weight.is_floating_point()  # otherwise quantized
    rows = weight.shape[0] if has_rows else getattr(embedding, "num_embeddings", vocab_size)
    return min(int(rows), int(vocab_size))
