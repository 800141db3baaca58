"""The checks that decide whether lookahead serves a call of `_sample`, in the order in which they run.

A check returns a reason, a sentence for the user, or None. The first reason sends the call to the original
`generate()`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lade.common.bypassed import CACHE_METHODS, replaced_function
from lade.common.compat import CACHE_NAME, MAMBA_CACHE_NAME, PLAIN_LAYERS, DynamicSlidingWindowLayer
from lade.common.request import Request
from lade.common.trial import in_short
from lade.models import ModelAdapter, adapter_for, needs_self_check
from lade.models.self_check import WAITS, self_check_reason
from lade.models.training import failed_in_training

TOO_SHORT = "a call for one or two tokens needs as many forward passes with guesses as without"
QUIET = (TOO_SHORT, WAITS)  # no limits of lade, so without a warning
LEAST_TOKENS = 3  # with fewer new tokens no guess can save a forward pass

# Model arguments that generate() passes to `_sample` and the loop passes on or handles.
KNOWN_ARGUMENTS = frozenset(
    """
    attention_mask inputs_embeds logits_to_keep output_attentions output_hidden_states position_ids tokenizer use_cache
    """.split()  # noqa: SIM905
) | {CACHE_NAME, MAMBA_CACHE_NAME}


def is_short(request: Request) -> bool:
    """Whether the call asks for too few tokens for a guess to save a forward pass."""
    return request.generation_config.max_length is not None and request.num_new < LEAST_TOKENS


@torch.compiler.disable  # type: ignore[untyped-decorator]
def adapter_or_reason(request: Request) -> ModelAdapter | str:
    """The adapter that serves a call, or the reason, a sentence, why it goes to the original `generate()`."""
    try:
        reason = unsupported_call(request)
        if reason is not None:
            return reason
        adapter = adapter_for(request.model)
        if type(request.cache) is DynamicCache and request.cache.layers and request.callers_cache is None:
            adapter.cache_layers = request.cache.layers  # made by generate() from the model's configuration
        reason = (
            adapter.unsupported_reason()
            or unsupported_cache(request, adapter)
            or unsupported_arguments(request, adapter)
            or adapter.unsupported_request(request)
            or (self_check_reason if needs_self_check(adapter) else failed_in_training)(request, adapter)
        )
        return reason or adapter
    except Exception as error:  # a model of somebody's own may lack anything
        return f"the checks of {type(request.model).__name__} failed ({in_short(error)})"


def unsupported_call(request: Request) -> str | None:
    """Checks that need no adapter."""
    model: Any = request.model
    config, model_kwargs = request.generation_config, request.model_kwargs
    if not isinstance(request.model, PreTrainedModel):
        return f"{type(model).__name__} is not a transformers model"
    if (replaced := replaced_function()) is not None:
        return f"{replaced} has been replaced, and lookahead would go past what stands there now"
    if not model_kwargs.get("use_cache", True):
        return "use_cache=False leaves nothing to write guesses to"
    if config.is_assistant:
        return "the model is the assistant of another one"
    if config.max_length is None:  # generate() always sets it
        return "the generation settings name no max_length"
    if torch.is_grad_enabled():
        return "gradients are being recorded"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions and output_hidden_states ask for what forwards of single tokens compute"
    if config.prefill_chunk_size:
        if request.cached_length > 0:
            return "prefill_chunk_size on a cache that is not empty is handled differently by versions of transformers"
        if model_kwargs.get("inputs_embeds") is not None:
            return "prefill_chunk_size splits ids, but inputs_embeds are passed whole to each chunk's forward"
    return None


def unsupported_cache(request: Request, adapter: ModelAdapter) -> str | None:
    """Caches that lade's own cache cannot replace."""
    cache = request.cache
    if cache is None:
        return "the model makes a cache of its own kind in its forward"
    if type(cache) is not DynamicCache or cache.offloading:
        setting = request.generation_config.cache_implementation
        if setting:
            return f"cache_implementation={setting!r} asks for another cache than lade's own"
        return f"{CACHE_NAME} of type {type(cache).__name__} is not known to keep every key"
    for part in (cache, *cache.layers):
        if not CACHE_METHODS.isdisjoint(vars(part)):
            return f"{CACHE_NAME} has an {min(CACHE_METHODS & vars(part).keys())} of its own"
    mask = request.attention_mask
    if mask is not None and mask.shape[1] < request.cached_length + request.num_uncached:
        return "attention_mask is shorter than the text, so that plain generate() hides other keys in each step"
    if request.callers_cache is None and request.cached_length == 0:
        return None  # generate() made it for this call, and nothing else reads it
    kept = {*PLAIN_LAYERS, *map(type, adapter.cache_layers)}
    for layer in cache.layers:
        # A sliding layer drops keys outside its window, which a block may still need.
        forgets = isinstance(layer, DynamicSlidingWindowLayer) and layer.cumulative_length >= layer.sliding_window
        if forgets or type(layer) not in kept:
            return f"{CACHE_NAME} with a {type(layer).__name__} does not keep every key"
    for layer, own in zip(cache.layers, adapter.cache_layers, strict=False):
        window = getattr(layer, "sliding_window", None)
        if window not in (None, getattr(own, "sliding_window", None)):
            return f"{CACHE_NAME} has a window of {window} tokens, and the model another"
    return None


def unsupported_arguments(request: Request, adapter: ModelAdapter) -> str | None:
    """Model arguments that are not known to be safe with a block of guesses."""
    known = KNOWN_ARGUMENTS | adapter.prompt_arguments | adapter.carried_arguments
    unknown = sorted(name for name, value in request.model_kwargs.items() if name not in known and value is not None)
    if unknown:
        return f"the model argument {', '.join(unknown)} is not known to be safe with a block of guesses"
    if adapter.takes_positions == (request.position_ids is None):
        return "position_ids are passed to a forward that does not name them, or not to one that does"
    if request.position_ids is not None and request.position_ids.is_floating_point():
        return "position_ids are no integers"
    return None
