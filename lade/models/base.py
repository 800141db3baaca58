"""What lade needs to know about a model: whether it can take a block of guesses, and how to run one. Floor 3."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lade.attention import (
    LAYER_REACH,
    Block,
    Reach,
    block_mask,
    layer_reaches,
    masks_by_layer,
    packed_block_mask,
)
from lade.block_attention import NAME as KERNEL
from lade.block_attention import unsupported_reason as kernel_unsupported_reason
from lade.compat import PLAIN_LAYERS, PROMPT_ARGUMENTS, CausalLMOutputWithPast, has_unknown_rope, rope_settings
from lade.config import LookaheadConfig
from lade.kernels import kernel_problem, left_padding
from lade.kv_cache import LookaheadCache
from lade.models.compiled import can_pass_by, compiled_reason
from lade.models.fixed import FixedBlocks, padded_capacity
from lade.models.foreign import Code, code_of
from lade.models.reasons import calling_reason, hook_reason, rounding_reason
from lade.models.request import Request, unsupported_by_any
from lade.models.training import training_reason
from lade.models.view import parts_of, private_view
from lade.stats import GenerationStats

# Their attention takes the 4-D mask that a block needs.
MASKED_ATTENTION = ("eager", "sdpa")
# These compute the same without taking such a mask; parts of their names.
MASKLESS_ATTENTION = ("flash", "flex_attention")
EXACT_DTYPES = (torch.float32, torch.float64)
FOREIGN_ATTENTION = "the model's attention is not transformers' own"  # nor to be replaced, or kept for later calls


class ModelAdapter:
    """Runs blocks on one decoder-only model that follows transformers' conventions; made anew for each call.

    A family that differs overrides what differs. docs/adding-a-model.md explains how.
    """

    # Class attributes that a family may set.
    safe_hooks: tuple[str, ...] = ()  # of HOOKS: the model's own version changes nothing after the prompt
    prompt_arguments: frozenset[str] = PROMPT_ARGUMENTS  # generate() arguments that matter to the prompt alone
    draws_in_training = False  # the forward is random in training mode, though dropout and the like be 0
    carried_arguments: frozenset[str] = frozenset()  # those of which each new token has what the prompt's last one has

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.carried: dict[str, Tensor] = {}  # the last values of `carried_arguments`, [B, 1] each
        self.uses_kernel = False  # whether blocks go through lade's own attention
        self.padding: Tensor | None = None  # [B] slots before each row's text, for the kernel
        self._fixed: FixedBlocks | None = None  # runs blocks of fixed shapes, where that is asked for and possible

    def unsupported_reason(self) -> str | None:
        """Why lookahead cannot run on this model, as a sentence; None when it can."""
        model = self.model
        if model.config.is_encoder_decoder:
            return "encoder-decoder models are not supported"
        if model._is_stateful:
            return "models with a recurrent state cannot take a tree of guesses"
        reason = self.unsupported_layers()
        if reason:
            return reason
        if has_unknown_rope(self.config, self.parts):
            return "rotary frequencies of this model depend on the length of the text, and its configuration does not say how"
        attention = self.config._attn_implementation
        configs = {id(config): config for part in self.parts if (config := vars(part).get("config")) is not None}
        found = {other._attn_implementation for other in configs.values() if type(other) is type(self.config)}
        if found - {attention}:
            return (
                f"the model's configuration says attention {attention!r}, its layers say {min(found - {attention})!r}"
            )
        if self._masked_attention is None:
            return f"attention {attention!r} is not known to take a mask per block; eager and sdpa do"
        if attention not in MASKED_ATTENTION and not model._can_set_attn_implementation():
            return f"attention {attention!r} of {type(model).__name__} is built in and takes no mask per block"
        if self.needs_view and self.code.is_patched:
            return "blocks need a changed view of this model, which a dispatched or patched model does not allow"
        return (
            self.unsupported_state()
            or rounding_reason(self.parts)
            or calling_reason(model, self.safe_hooks)
            or hook_reason(self.code.refused_hook)
        )

    def unsupported_state(self) -> str | None:
        """Why the model cannot take blocks as it is now, in training mode or compiled."""
        in_training = [part for part in self.unusual_parts if part.training]
        if in_training and self.draws_in_training:
            return "this family draws random numbers in training mode, whatever its settings"
        return training_reason(in_training) or compiled_reason(self.unusual_parts)

    def unsupported_layers(self) -> str | None:
        """Why the model's layers cannot take a tree of guesses, judged by what they are and by the cache they ask for."""
        for layer_type in getattr(self.config, "layer_types", None) or ():
            if layer_type not in LAYER_REACH:
                return f"layers of type {layer_type!r} cannot take a tree of guesses"
        for layer in self.cache_layers:
            if type(layer) not in PLAIN_LAYERS:
                return f"its cache has a {type(layer).__name__}, whose state cannot take a tree of guesses"
        return None

    def unsupported_request(self, request: Request) -> str | None:
        """Why this call cannot be served, as a sentence; None when it can. Asked when `unsupported_reason` gave none."""
        return unsupported_by_any(self, request)

    @property
    def most_slots(self) -> int | None:
        """How many tokens of a row, padding included, the model's own code has room for; None where there is no such limit."""
        return None

    @property
    def num_tokens(self) -> int:
        """Ids that the model has an embedding for."""
        rows = getattr(self.model.get_input_embeddings(), "num_embeddings", self.config.vocab_size)
        return min(int(rows), int(self.config.vocab_size))

    @cached_property
    def takes_positions(self) -> bool:
        """Whether the model is told positions; otherwise they follow from what it finds in the cache."""
        return "position_ids" in self._parameters

    @cached_property
    def keeps_rows(self) -> bool:
        """Whether the model takes `logits_to_keep`."""
        return "logits_to_keep" in self._parameters

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether rows of a batch at different lengths would change each other: frequencies follow the longest one."""
        return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in self._ropes)

    def max_guess_offset(self, root_position: int) -> int | None:
        """How far beyond the root a guess may lie without changing what the model says about the text; None: anywhere.

        root_position: the largest one of all rows. Rotary frequencies of type "dynamic" and "longrope" depend on the largest
        position of a forward pass. While that stays below their boundary nothing changes; beyond it, "dynamic" allows no
        guesses and "longrope" any. Learned or tabulated positions have a last row.
        """
        limits = [] if self.last_position is None else [self.last_position]
        for rope in self._ropes:
            if rope.get("rope_type") == "dynamic":
                limits.append(self.config.max_position_embeddings - 2)
            elif rope.get("rope_type") == "longrope":
                boundary = rope.get("original_max_position_embeddings") or self.config.max_position_embeddings
                if root_position < boundary:
                    limits.append(boundary - 1)
        return max(0, min(limits) - root_position) if limits else None

    @property
    def last_position(self) -> int | None:
        """The last position that the model knows, None where there is no such limit."""
        if self._ropes or not self.takes_positions:
            return None
        count = getattr(self.config, "max_position_embeddings", None)
        return None if count is None else int(count) - 1

    def carry(self, model_kwargs: dict[str, Any]) -> None:
        """Remember what of the call's arguments each block needs. model_kwargs: as `_sample` gets them."""
        given = {name: model_kwargs.get(name) for name in self.carried_arguments}
        self.carried = {name: value[:, -1:] for name, value in given.items() if value is not None}

    def make_cache(self, capacity: int) -> LookaheadCache:
        """capacity: slots to start with."""
        devices = set((getattr(self.model, "hf_device_map", None) or {}).values())
        if self._fixed is not None:
            capacity = padded_capacity(capacity)
        return LookaheadCache(self.config.num_hidden_layers, capacity, uniform=len(devices) <= 1)

    def take_cache(self, num_slots: int, most_slots: int, batch_size: int) -> LookaheadCache:
        """A call's cache: an earlier call's, where CUDA graphs read it and it fits, see `give_back`; a new one otherwise.

        num_slots, most_slots: what the call begins with, and may come to need.
        """
        # Parts of a model on several ranks would have to agree on what they keep.
        is_whole = (self.model.tp_size or 1) == 1
        if self._fixed is None or not is_whole:
            return self.make_cache(num_slots)
        traits = (batch_size, repr(self.reaches), self.uses_kernel)
        return self._fixed.take_cache(traits, num_slots, most_slots, self.make_cache)

    def give_back(self) -> None:
        """The call has ended well, and nobody reads its cache any more."""
        if self._fixed is not None:
            self._fixed.give_back()

    def check_kernel(self, stats: GenerationStats) -> None:
        """Say in the call's figures where the kernel, tried on the blocks themselves, was not fit to serve them."""
        problem = kernel_problem(self.model.device, self.dtype) if self.uses_kernel else None
        if problem is not None:
            stats.used_kernel, stats.kernel_reason = False, problem

    def use_kernel(self, key_mask: Tensor | None) -> str | None:
        """Let blocks go through lade's own attention. Returns a sentence where they cannot, and nothing is changed.

        key_mask: as in `Block`, for the whole call.
        """
        own = type(self)
        if own.block_model is not ModelAdapter.block_model or own.masks is not ModelAdapter.masks:
            return "this family's blocks need masks of their own"
        if self.code.is_patched:
            return "the kernel needs a changed view of the model, which a dispatched or patched model does not allow"
        if self.code.functions:
            return FOREIGN_ATTENTION
        reason = kernel_unsupported_reason(self.model)
        if reason is not None:
            return reason
        if key_mask is not None:
            self.padding = left_padding(key_mask)
            if self.padding is None:
                return "the prompt's mask hides tokens other than the first ones"
        self.uses_kernel = True
        return None

    def fix_shapes(self, config: LookaheadConfig, stats: GenerationStats, compiles: bool, captures: bool) -> None:
        """Let blocks be compiled or captured, as long as that works."""
        full_tree = (config.ngram_size - 1) * config.num_guesses if config.uses_window else config.max_block - 1
        self._fixed = FixedBlocks(
            self.model,
            self.block_model,
            stats,
            keeps_rows=self.keeps_rows,
            full_tree=full_tree,
            compiles=compiles,
            captures=captures,
        )

    @property
    def captures(self) -> bool:
        """Whether blocks are captured in CUDA graphs."""
        return self._fixed is not None and self._fixed.captures

    @property
    def forward_kind(self) -> tuple[str, ...]:
        """What the forward of a block has besides the ordinary one, which changes its price."""
        return ("kernel",) * self.uses_kernel + ("graph",) * self.captures

    @property
    def preparing_seconds(self) -> float:
        """Of the latest block's time: what was spent once, for later blocks of its shape."""
        return 0.0 if self._fixed is None or not self._fixed.is_on else self._fixed.preparing_seconds

    def unfixable_reason(self) -> str | None:
        """Why blocks of fixed shapes cannot go through one compiled forward, as a sentence; None when they can."""
        own = type(self)
        if own.block_model is not ModelAdapter.block_model or own.masks is not ModelAdapter.masks:
            return "this family's blocks run on a changed view of the model"
        if self.code.is_patched:
            return "the model is dispatched or patched"
        if self.code.functions:
            return FOREIGN_ATTENTION
        if self.code.is_hooked:
            return "the model has hooks, which compiled or captured forwards pass by"
        if not self.takes_positions:
            return f"{type(self.model).__name__}.forward takes no position_ids"
        if self.carried:
            return f"compiled or captured forwards take no {min(self.carried)}"
        if self.needs_equal_lengths:
            return "rotary frequencies of this model depend on the length of the text"
        return None

    def padded_nodes(self, num_nodes: int) -> int:
        """How many nodes a token tree takes up in the block."""
        return num_nodes if self._fixed is None else self._fixed.padded_nodes(num_nodes)

    def masks(self, block: Block) -> Tensor | dict[str, Tensor]:
        """Who sees whom, in the form the model wants: one mask for all layers, or a dict of them by layer type.

        Each is additive, [B, 1, q, K], or packed for lade's own attention.
        """
        make = (
            partial(packed_block_mask, block, self.padding)
            if self.uses_kernel
            else partial(block_mask, block, self.dtype)
        )
        return masks_by_layer(make, self.reaches)

    def forward_block(self, block: Block, cache: LookaheadCache, **arguments: Any) -> Any:
        """One forward over a block; its keys/values end up behind the committed slots of `cache`.

        arguments: more of the model's own, such as output_hidden_states. Returns the model's output, logits [B, R, V].
        """
        cache.begin_block(block.tokens.shape[1], block.tokens.device)
        # Ids may come from the CPU to a model elsewhere; an offloaded model is "nowhere".
        if self._device != block.tokens.device and self._device.type != "meta":
            block = block.to(self._device)
        if self._fixed is not None and arguments:
            self._fixed.turn_off(f"{min(arguments)} asks for more than the compiled forward returns")
        if self._fixed is not None and self._fixed.is_on:
            masks = self.masks(replace(block, capacity=cache.capacity))
            logits = self._fixed.logits(block, cache, masks, lambda: self.ordinary_forward(block, cache).logits)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits)
        return self.ordinary_forward(block, cache, **arguments)

    def ordinary_forward(self, block: Block, cache: LookaheadCache, **wanted: Any) -> Any:
        """The model's ordinary forward over a block that `cache` has room for. wanted: as for `forward_block`."""
        arguments: dict[str, Any] = {
            name: value.to(block.tokens.device).expand_as(block.tokens) for name, value in self.carried.items()
        }
        if self.takes_positions:
            arguments["position_ids"] = block.positions
        if self.keeps_rows:
            arguments["logits_to_keep"] = 0 if block.needs_all_rows else block.logit_rows
        attention_mask = self.masks(block)
        with torch.inference_mode() if self.leaves_no_tensor and not wanted else nullcontext():
            outputs = self.run_blocks(
                input_ids=block.tokens,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
                **wanted,
            )
        if not self.keeps_rows and not block.needs_all_rows:
            outputs.logits = outputs.logits[:, block.logit_rows]
        return outputs

    def run_blocks(self, **arguments: Any) -> Any:
        """The model's own forward, and nothing else."""
        return self.block_model(**arguments)

    @cached_property
    def leaves_no_tensor(self) -> bool:
        """Whether nobody but lade sees the tensors that a block's forward makes.

        Then it runs in torch's inference mode, where each operation costs less. Tensors made in it can take no part in training
        and are not to be changed elsewhere: the user's hooks and modules may keep some, and so does a model whose rotary
        frequencies follow the length of the text.
        """
        kind = self._device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return False  # it keeps the weights that it has cast
        return self.code.is_as_made and not self.needs_equal_lengths

    @cached_property
    def is_exact(self) -> bool:
        """Whether the size of a block cannot change a text: everything is computed in float32 or float64.

        In half precision, and in what is quantized or multiplied in less than its dtype says, products of more rows are rounded
        otherwise.
        """
        if self.dtype not in EXACT_DTYPES or torch.get_float32_matmul_precision() != "highest":
            return False
        kind = self._device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return False
        weights = (weight for part in self.parts for weight in part._parameters.values() if weight is not None)
        return all(type(weight) is nn.Parameter and weight.dtype in EXACT_DTYPES for weight in weights)

    @property
    def prompt_model(self) -> Any:
        """What runs the prompt."""
        return self._uncompiled

    @cached_property
    def _uncompiled(self) -> Any:
        """The model, or a private view of one that its user has compiled, which would be compiled anew for each shape."""
        return private_view(self.model) if any(can_pass_by(part) for part in self.unusual_parts) else self.model

    @cached_property
    def block_model(self) -> Any:
        """What runs the blocks: the model, or a private view of it."""
        if self.uses_kernel:
            return private_view(self.model, attention=KERNEL)
        return private_view(self.model, attention=self._masked_attention) if self.needs_view else self._uncompiled

    @cached_property
    def reaches(self) -> Reach | dict[str, Reach]:
        """How far back the layers look."""
        return layer_reaches(self.config)

    @property
    def _masked_attention(self) -> str | None:
        """An attention for blocks that computes what the model's own does; None when none is known to."""
        own = self.config._attn_implementation
        if own in MASKED_ATTENTION:
            return str(own)
        if not any(name in own for name in MASKLESS_ATTENTION):
            return None
        # In older versions sdpa passes for supported where it ignores the soft cap.
        has_cap = getattr(self.config, "attn_logit_softcapping", None) is not None
        return "sdpa" if self.model._supports_sdpa and not has_cap else "eager"

    @property
    def needs_view(self) -> bool:
        """Whether blocks run on a private view of the model."""
        return self._masked_attention != self.config._attn_implementation

    @cached_property
    def _device(self) -> torch.device:
        """Of the model's first weight."""
        device: torch.device = self.model.device
        return device

    @cached_property
    def parts(self) -> tuple[nn.Module, ...]:
        """The model and all modules in it."""
        return tuple(parts_of(self.model))

    @cached_property
    def unusual_parts(self) -> list[nn.Module]:
        """Of `parts` those in training mode, and those that run something in place of their class's forward."""
        return [
            part
            for part in self.parts
            if part.training or "forward" in (own := part.__dict__) or own.get("_compiled_call_impl") is not None
        ]

    @cached_property
    def cache_layers(self) -> list[Any]:
        """Layers of the cache that the model asks for."""
        layers: list[Any] = DynamicCache(config=self.config).layers
        return layers

    @cached_property
    def code(self) -> Code:
        """Whose code runs inside the model's forward."""
        return code_of(self.parts, dict.fromkeys((self.config._attn_implementation, self._masked_attention)))

    @cached_property
    def _parameters(self) -> frozenset[str]:
        """Arguments of the model's forward."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def _ropes(self) -> list[dict[str, Any]]:
        """Settings of the rotary embeddings; several where they differ by layer type."""
        return rope_settings(self.config)


def prompt_key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """generate()'s 2-D mask as bool, or None where it hides nothing. attention_mask: [B, P]."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.to(torch.bool)
