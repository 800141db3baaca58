"""Models that take chains of guesses: their layers keep a state from token to token (Mamba-2, gated delta rules, short
convolutions, their mixtures with attention), each query selects the keys that it attends to, or their code counts the
slots of the cache (ALiBi, attention temperature).

A block is a chain of guesses, so the model's own masks serve it, and its forward continues from the states as it does
from a prompt in pieces. Whether it really does, the self-check finds out where transformers' code is not known.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from types import FunctionType
from typing import Any

import torch

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import EVERYWHERE, AttentionSpan, Block
from lade.common.compat import CACHE_NAME, DynamicLayer, DynamicSlidingWindowLayer
from lade.common.request import Request
from lade.models.base import ModelAdapter
from lade.models.declared import QwenVisionAdapter
from lade.models.recurrent_state import SLOT_LAYERS, RecurrentCache, unknown_layer
from lade.switch import current_config

# Model types whose own prepare_inputs_for_generation changes nothing for blocks: it says how many rows the prompt's
# logits have, leaves out a mask that a token without padding does not need, or (Bloom's) pads masks of static caches.
HOOKS_OF_PROMPTS = frozenset({"bamba", "bloom", "falcon_h1", "mamba2", "nemotron_h", "zamba2"})
WITHOUT_WINDOWS = frozenset({"bloom", "falcon", "gpt_neo", "mpt"})  # model types whose code masks none of the cache's
# Model types with Qwen's image encoder.
WITH_PICTURES = frozenset({"glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp"})
NO_LIMIT = (0.0, float("inf"))  # of a time step
SHORT_CHUNK = 16  # tokens to which Mamba-2's scan of a block pads it on a CPU, instead of some 256


def has_limit(part: Any) -> bool:
    limit = vars(part).get("time_step_limit")
    return limit is not None and tuple(limit) != NO_LIMIT


def stepping(kind: type) -> type | None:
    """A module class that takes blocks token by token, through the function by which its forward takes a single one.

    None if its forward has no such function beside the one for several tokens, by their names in transformers. States
    are then rounded as single tokens round them, and on a CPU, where the function for several tokens pads them to 64,
    short blocks cost less.
    """
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType):
        return None
    names, scope = forward.__code__.co_names, forward.__globals__
    singles = {name: name.replace("chunk_", "recurrent_") for name in names if "chunk_" in name and name in scope}
    scans = {name: scope[single] for name, single in singles.items() if single in names and single in scope}
    if not scans:
        return None
    changed = FunctionType(forward.__code__, scope | scans, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": changed})


class ChainAdapter(ModelAdapter):
    """Runs blocks that are chains of guesses, in rows of equal lengths, with the model's own masks."""

    takes_chains = True
    needs_equal_lengths = True

    @property
    def safe_hooks(self) -> tuple[str, ...]:  # type: ignore[override]
        is_known = self.model.config.model_type in HOOKS_OF_PROMPTS
        return ("prepare_inputs_for_generation",) if is_known else ()

    @property
    def prompt_arguments(self) -> frozenset[str]:  # type: ignore[override]
        has_pictures = self.model.config.model_type in WITH_PICTURES
        return QwenVisionAdapter.prompt_arguments if has_pictures else ModelAdapter.prompt_arguments

    def unsupported_layers(self) -> str | None:
        name = unknown_layer(self.cache_layers)
        if name is not None:
            return f"its cache has a {name}, which cannot be put back after a rejected guess"
        window = self.attention_spans.window
        if window is not None and (window < 2 or self.model.config.model_type in WITHOUT_WINDOWS):
            return f"its cache has a window of {window} tokens, and its layers attend to the whole text"
        return self.shared_place()

    def unsupported_request(self, request: Request) -> str | None:
        layers = [type(layer) for layer in request.cache.layers]
        if self._has_states and layers != [type(layer) for layer in self.cache_layers]:
            return f"{CACHE_NAME} has other layers than the model's own cache"
        if any(getattr(layer, "record_past", False) for layer in request.cache.layers):
            return f"{CACHE_NAME} records past states"
        if current_config().num_workers > 1:
            return "processes cannot share chains of guesses"
        mask = request.attention_mask
        if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
            return "attention_mask holds other numbers than 0 and 1, with which such models calculate"
        return super().unsupported_request(request)

    @cached_property
    def attention_spans(self) -> AttentionSpan:
        """The narrowest, for checks of a call: the model makes its own masks."""
        windows = [layer.sliding_window for layer in self.cache_layers if getattr(layer, "is_sliding", False)]
        return AttentionSpan(window=min(windows)) if windows else EVERYWHERE

    @cached_property
    def _has_states(self) -> bool:
        return not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self.cache_layers)

    @cached_property
    def _has_slots(self) -> bool:
        return any(type(layer) in SLOT_LAYERS for layer in self.cache_layers)

    @cached_property
    def changes_shadow(self) -> bool:
        is_dear = any(map(self._is_padded, self.parts)) or bool(self._stepping)
        return any(map(has_limit, self.parts)) or (is_dear and not self.code.is_patched)

    def _is_padded(self, part: Any) -> bool:
        """Whether a module's scan pads a block to more than `SHORT_CHUNK` tokens."""
        return self._device.type == "cpu" and (vars(part).get("chunk_size") or 0) > SHORT_CHUNK

    @cached_property
    def _stepping(self) -> dict[type, type]:
        """By module class, the one that takes its place in blocks on a CPU."""
        kinds = {type(part) for part in self.parts} if self._device.type == "cpu" else set()
        return {kind: changed for kind in kinds if (changed := stepping(kind)) is not None}

    def change_shadow(self, shadow: Any) -> None:
        """Blocks do as single tokens do, whose time steps are not limited as those of several are, at little cost."""
        for part in shadow.modules():
            if has_limit(part):
                part.time_step_limit = NO_LIMIT
            if self._is_padded(part):
                part.chunk_size = SHORT_CHUNK
            part.__class__ = self._stepping.get(type(part), type(part))

    def make_cache(self, capacity: int) -> LookaheadCache:
        if not self._has_states:
            return super().make_cache(capacity)
        devices = set((getattr(self.model, "hf_device_map", None) or {}).values())
        return RecurrentCache(self.cache_layers, capacity, uniform=len(devices) <= 1)

    def masks(self, block: Block) -> Any:
        """The mask that generate() would pass, [B, K] or None: a chain is causal."""
        if block.key_mask is None or not self._has_slots:
            return None
        num_more = block.num_slots - block.key_mask.shape[1]
        return torch.nn.functional.pad(block.key_mask, (0, num_more), value=True).long()

    def begin_block(self, block: Block, cache: LookaheadCache) -> Block:
        return super().begin_block(cache.with_waiting(block) if isinstance(cache, RecurrentCache) else block, cache)
