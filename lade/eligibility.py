"""The checks that decide whether lookahead serves a call of `_sample`, in the order in which they run.

A check returns a reason, a sentence for the user, or None. The first reason sends the call to the original
`generate()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from lade.compat import CALLERS_CACHE_MARK, PLAIN_LAYERS, DynamicSlidingWindowLayer, StaticLayer
from lade.models import ModelAdapter, adapter_for, needs_self_check
from lade.models.base import prompt_key_mask
from lade.models.request import Request
from lade.models.self_check import self_check_reason

# No limit of lade, so without a warning.
TOO_SHORT = "a call for one or two tokens needs as many forward passes with guesses as without"
LEAST_TOKENS = 3  # with fewer new tokens no guess can save a forward pass

# Model arguments that generate() passes to `_sample` and the loop passes on or handles.
KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "tokenizer",
}


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of `_sample` that decide whether a request is served. input_ids: [B, P]."""

    model: PreTrainedModel
    input_ids: Tensor
    config: Any  # a GenerationConfig
    model_kwargs: dict[str, Any]

    @property
    def cache(self) -> Any:
        return self.model_kwargs.get("past_key_values")

    @property
    def prompt_embeds(self) -> Any:
        return self.model_kwargs.get("inputs_embeds")

    @property
    def callers_cache(self) -> Cache | None:
        """The cache if it outlives the call: it is returned, or the caller passed it in."""
        is_callers = getattr(self.cache, CALLERS_CACHE_MARK, False)
        return self.cache if self.config.return_dict_in_generate or is_callers else None

    @property
    def is_short(self) -> bool:
        """Whether the call asks for too few tokens for a guess to save a forward pass."""
        max_length = self.config.max_length
        return max_length is not None and max_length - self.input_ids.shape[1] < LEAST_TOKENS

    def as_request(self) -> Request:
        """The call as an adapter sees it. The prompt may be ids, embeddings, or partly in a cache."""
        mask, config = self.model_kwargs.get("attention_mask"), self.config
        prompt_length = max(known.shape[1] for known in (self.input_ids, mask, self.prompt_embeds) if known is not None)
        may_end_early = config.eos_token_id is not None and config.pad_token_id is not None
        return Request(
            prompt_length=prompt_length,
            # max_length counts from input_ids, which may be empty or only the end of the prompt.
            max_length=prompt_length + int(config.max_length) - self.input_ids.shape[1],
            cached_length=0 if self.cache is None else int(self.cache.get_seq_length()),
            has_static_cache=isinstance(self.cache, StaticCache),
            wants_attentions=bool(config.output_attentions),
            attention_mask=mask,
            position_ids=self.model_kwargs.get("position_ids"),
            batch_size=len(self.input_ids),
            pad_token=int(config.pad_token_id) if may_end_early else None,
        )


# Checks of the call alone.


def not_a_model(call: Call) -> str | None:
    return (
        None if isinstance(call.model, PreTrainedModel) else f"{type(call.model).__name__} is not a transformers model"
    )


def no_cache(call: Call) -> str | None:
    return None if call.model_kwargs.get("use_cache", True) else "use_cache=False leaves nothing to write guesses to"


def assists(call: Call) -> str | None:
    return "the model assists another one" if call.config.is_assistant else None


def records_gradients(call: Call) -> str | None:
    return "gradients are being recorded" if torch.is_grad_enabled() else None


def shows_empty_slots(call: Call) -> str | None:
    if isinstance(call.cache, StaticCache) and call.config.output_attentions:
        return "output_attentions of a static cache include its empty slots"
    return None


def chunked_prefill(call: Call) -> str | None:
    if not call.config.prefill_chunk_size:
        return None
    if call.cache is not None and call.cache.get_seq_length() > 0:
        return "prefill_chunk_size on a cache that is not empty is handled differently by versions of transformers"
    if call.prompt_embeds is not None:
        return "prefill_chunk_size splits ids, while inputs_embeds go whole into each chunk's forward"
    return None


def compiled_by_transformers(call: Call) -> str | None:
    """Calls that transformers would compile itself."""
    model: Any = call.model
    if call.config.compile_config is None or not model._valid_auto_compile_criteria(call.model_kwargs, call.config):
        return None
    return (
        "compile_config asks for transformers' own compiled forward; "
        "leave it out and lade runs, with blocks compiled in its own way under COMPILE=1"
    )


# Checks of the call with the model's adapter.


def unsupported_model(call: Call, adapter: ModelAdapter) -> str | None:
    return adapter.unsupported_reason()


def unsupported_cache(call: Call, adapter: ModelAdapter) -> str | None:
    """Caches that lade's own cache cannot replace."""
    cache = call.cache
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        if call.config.cache_implementation:
            return f"cache_implementation={call.config.cache_implementation!r} saves memory that lade's own cache would take"
        return f"past_key_values of type {type(cache).__name__} is not known to keep every key"
    if call.callers_cache is None and cache.get_seq_length() == 0:
        return None  # generate() made it for this call, and nothing else reads it
    for layer in cache.layers:
        # A sliding layer drops keys outside its window, which a block may still need.
        forgets = type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length >= layer.sliding_window
        if forgets or type(layer) not in (*PLAIN_LAYERS, StaticLayer):
            return f"past_key_values with a {type(layer).__name__} does not keep every key"
    return None


def unsupported_arguments(call: Call, adapter: ModelAdapter) -> str | None:
    """Model arguments that are not known to be safe with a block of guesses."""
    known = KNOWN_ARGUMENTS | adapter.prompt_arguments | adapter.carried_arguments
    unknown = sorted(name for name, value in call.model_kwargs.items() if name not in known and value is not None)
    if unknown:
        return f"the model argument {', '.join(unknown)} is not known to be safe with a block of guesses"
    if adapter.takes_positions and call.model_kwargs.get("position_ids") is None:
        return "generate() hands no position_ids to this model"
    return None


def unsupported_request(call: Call, adapter: ModelAdapter) -> str | None:
    return adapter.unsupported_request(call.as_request())


def failed_self_check(call: Call, adapter: ModelAdapter) -> str | None:
    """Models whose code is not known to be safe must pass a self-check."""
    if not needs_self_check(adapter):
        return None
    key_mask = prompt_key_mask(call.model_kwargs.get("attention_mask"))
    return self_check_reason(adapter, call.config.max_length, len(call.input_ids), key_mask)


CALL_CHECKS: tuple[Callable[[Call], str | None], ...] = (
    not_a_model,
    no_cache,
    assists,
    records_gradients,
    shows_empty_slots,
    chunked_prefill,
    compiled_by_transformers,
)
ADAPTER_CHECKS: tuple[Callable[[Call, ModelAdapter], str | None], ...] = (
    unsupported_model,
    unsupported_cache,
    unsupported_arguments,
    unsupported_request,
    failed_self_check,  # last: it runs the model
)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def adapter_or_reason(call: Call) -> ModelAdapter | str:
    """The adapter that serves a call, or the reason, a sentence, why it goes to the original `generate()`."""
    for check in CALL_CHECKS:
        reason = check(call)
        if reason is not None:
            return reason
    adapter = adapter_for(call.model)
    if type(call.cache) is DynamicCache and call.cache.layers and call.callers_cache is None:
        adapter.cache_layers = call.cache.layers  # made by generate() from the model's configuration
    for check_model in ADAPTER_CHECKS:
        reason = check_model(call, adapter)
        if reason is not None:
            return reason
    return adapter
