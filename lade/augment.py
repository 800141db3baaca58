"""The patch: `augment_all()` puts lookahead behind `generate()`, `restore_all()` takes it away again.

`GenerationMixin._sample` is where `generate()` looks up its greedy and sampling loop. `generate` itself is wrapped only
to keep one set of figures per call, and the other decoding methods only to say why lookahead did not run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, StaticCache, TextStreamer

from lade.compat import (
    CALLERS_CACHE_MARK,
    PLAIN_LAYERS,
    DynamicSlidingWindowLayer,
    StaticLayer,
    require_names,
    warn_if_newer,
)
from lade.config import apply_environment, current_config, is_enabled, off_hint, off_reason, one_at_a_time
from lade.decoding import lookahead_decode
from lade.models import ModelAdapter, adapter_for, needs_self_check
from lade.models.base import prompt_key_mask
from lade.models.request import Request
from lade.models.self_check import self_check_reason
from lade.parallel.communicator import is_leader
from lade.parallel.group import SingleProcess, process_group_for
from lade.state import forget_all
from lade.stats import GenerationStats, open_stats, recording

logger = logging.getLogger("lade")

# No fault of the request: it is not warned about.
TOO_SHORT = "a call for one or two tokens needs as many forward passes with guesses as without"
LEAST_TOKENS = 3  # of a call that guesses can make faster
OFF_HINT = "off_hint"  # that it has been given
NOT_BEGUN = "the call ended before decoding began"
OTHER_LOOP = (
    "the request runs a decoding loop of its own (custom_generate, or a mode that lives outside of transformers)"
)
# Decoding methods other than _sample, and what brings generate() there.
OTHER_METHODS = {
    "_beam_search": "beam search (num_beams > 1) is not supported",
    "_assisted_decoding": "assisted decoding (assistant_model or prompt_lookup_num_tokens) is not supported",
    "init_continuous_batching": "continuous batching (generate_batch) runs a decoding loop of its own",
}

# What generate() itself passes on to the model, and the loop passes on or handles.
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

_originals: dict[str, Any] = {}  # attribute of GenerationMixin or a base of it -> the object that was there
_warned: set[str] = set()


@one_at_a_time
def augment_all() -> None:
    """Put lookahead decoding behind `generate()` of all models, loaded before or later. Calling it twice changes nothing.

    It runs while the environment says USE_LADE=1, and inside of `with lade.enabled():`; otherwise every call is the original's.
    Raises ImportError when something that lade uses of the installed transformers or torch is missing or has changed, and ValueError
    when LADE_CONFIG names no file of settings.
    """
    if _originals:
        return
    apply_environment()
    require_names()
    warn_if_newer(transformers.__version__)
    replacements = {"generate": _wrap_generate, "_sample": _wrap_sample}
    replacements |= {name: functools.partial(_wrap_other, reason=reason) for name, reason in OTHER_METHODS.items()}
    wrapped = {name: wrap(vars(_owner(name))[name]) for name, wrap in replacements.items()}
    for name, function in wrapped.items():
        _originals[name] = vars(_owner(name))[name]
        setattr(_owner(name), name, function)


def augment_quietly() -> None:
    """`augment_all()` for code that switches lookahead on by itself: calls outside of that code are not told how to switch it on."""
    if not _originals:
        augment_all()
        _warned.add(OFF_HINT)


# The original's names: one patch serves every model.
augment_generate = augment_all
augment_llama = augment_all


@one_at_a_time
def restore_all() -> None:
    """Put the original functions back, the very same objects, and forget what was learned of models."""
    for name, function in _originals.items():
        setattr(_owner(name), name, function)
    _originals.clear()
    _warned.clear()
    forget_all()


def _owner(name: str) -> type:
    """The class that defines a method of GenerationMixin."""
    return next((kind for kind in GenerationMixin.__mro__ if name in vars(kind)), GenerationMixin)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def adapter_or_reason(
    model: PreTrainedModel, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> ModelAdapter | str:
    """What serves a request that reached `_sample`; or why it goes to the original, as a sentence."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is not a transformers model"
    cache = model_kwargs.get("past_key_values")
    checks = [
        (not model_kwargs.get("use_cache", True), "use_cache=False leaves nothing to write guesses to"),
        (generation_config.is_assistant, "the model assists another one"),
        (torch.is_grad_enabled(), "gradients are being recorded"),
        (
            isinstance(cache, StaticCache) and generation_config.output_attentions,
            "output_attentions of a static cache include its empty slots",
        ),
        (
            generation_config.prefill_chunk_size and cache is not None and cache.get_seq_length() > 0,
            "prefill_chunk_size on a cache that is not empty is handled differently by versions of transformers",
        ),
        (
            generation_config.prefill_chunk_size and model_kwargs.get("inputs_embeds") is not None,
            "prefill_chunk_size splits ids, while inputs_embeds go whole into each chunk's forward",
        ),
    ]
    reason = next((reason for applies, reason in checks if applies), None) or compile_reason(
        model, generation_config, model_kwargs
    )
    if reason is not None:
        return reason
    adapter = adapter_for(model)
    is_callers = callers_cache(generation_config, model_kwargs) is not None
    if type(cache) is DynamicCache and cache.layers and not is_callers:
        adapter.cache_layers = cache.layers  # generate() has made it for the call, as the model asks for it
    return (
        adapter.unsupported_reason()
        or unsupported_cache(cache, generation_config, is_callers)
        or unsupported_arguments(adapter, model_kwargs)
        or adapter.unsupported_request(request_of(input_ids, generation_config, model_kwargs))
        or (trial_of(adapter, generation_config, input_ids, model_kwargs) if needs_self_check(adapter) else None)
        or adapter
    )


def trial_of(
    adapter: ModelAdapter, generation_config: Any, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> str | None:
    """Why a model that is not known to be right failed the trial for such a call; None when it passed."""
    return self_check_reason(
        adapter, generation_config.max_length, len(input_ids), prompt_key_mask(model_kwargs.get("attention_mask"))
    )


def compile_reason(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why transformers' own compilation keeps lookahead from running, as a sentence: where a call asks for it and will get it."""
    if generation_config.compile_config is None or not model._valid_auto_compile_criteria(
        model_kwargs, generation_config
    ):
        return None
    return (
        "compile_config asks for transformers' own compiled forward; "
        "leave it out and lade runs, with blocks compiled in its own way under COMPILE=1"
    )


def is_short(input_ids: Tensor, generation_config: Any) -> bool:
    """Whether so few tokens are asked for that no guess could save a forward pass."""
    max_length = generation_config.max_length
    return max_length is not None and max_length - input_ids.shape[1] < LEAST_TOKENS


def request_of(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Request:
    """The call as an adapter sees it; a prompt may be given as ids, as embeddings, or in a cache."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    cache = model_kwargs.get("past_key_values")
    prompt_length = max(known.shape[1] for known in (input_ids, mask, embeds) if known is not None)
    may_end_early = generation_config.eos_token_id is not None and generation_config.pad_token_id is not None
    return Request(
        prompt_length=prompt_length,
        # generate() counts from the ids, which may be the last of a longer text, or not there at all.
        max_length=prompt_length + int(generation_config.max_length) - input_ids.shape[1],
        cached_length=0 if cache is None else int(cache.get_seq_length()),
        has_static_cache=isinstance(cache, StaticCache),
        wants_attentions=bool(generation_config.output_attentions),
        attention_mask=mask,
        position_ids=model_kwargs.get("position_ids"),
        batch_size=len(input_ids),
        pad_token=int(generation_config.pad_token_id) if may_end_early else None,
    )


def unsupported_arguments(adapter: ModelAdapter, model_kwargs: dict[str, Any]) -> str | None:
    """Which of the model's arguments may mean something that a block of guesses would change."""
    known = KNOWN_ARGUMENTS | adapter.prompt_arguments | adapter.carried_arguments
    unknown = sorted(name for name, value in model_kwargs.items() if name not in known and value is not None)
    if unknown:
        return f"the model argument {', '.join(unknown)} is not known to be safe with a block of guesses"
    if adapter.takes_positions and model_kwargs.get("position_ids") is None:
        return "generate() hands no position_ids to this model"
    return None


def unsupported_cache(cache: Any, generation_config: Any, is_seen: bool) -> str | None:
    """Why our cache cannot stand in for this one. is_seen: somebody looks at it before or after the call."""
    if type(cache) not in (DynamicCache, StaticCache) or cache.offloading:
        if generation_config.cache_implementation:
            name = generation_config.cache_implementation
            return f"cache_implementation={name!r} saves memory that lade's own cache would take"
        return f"past_key_values of type {type(cache).__name__} is not known to keep every key"
    if not is_seen and cache.get_seq_length() == 0:
        return None  # made for this call by generate() itself, and never looked at
    for layer in cache.layers:
        # A sliding layer forgets what is out of its window, which a block may still need.
        forgets = type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length >= layer.sliding_window
        if forgets or type(layer) not in (*PLAIN_LAYERS, StaticLayer):
            return f"past_key_values with a {type(layer).__name__} does not keep every key"
    return None


def callers_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The cache that outlives the call, because it is returned or was the caller's own; None when nobody sees it."""
    cache = model_kwargs.get("past_key_values")
    is_callers = getattr(cache, CALLERS_CACHE_MARK, False)
    return cache if generation_config.return_dict_in_generate or is_callers else None


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recording() as stats:
            stats.fallback_reason = NOT_BEGUN if is_enabled() else off_reason()
            _hint_once()
            if is_enabled() and isinstance(kwargs.get("past_key_values"), Cache):
                setattr(kwargs["past_key_values"], CALLERS_CACHE_MARK, True)
            is_leading = not is_enabled() or is_leader(current_config())
            streamer = None if is_leading else kwargs.pop("streamer", None)  # of several processes one streams
            result = original(self, *args, **kwargs)
            if streamer is not None and type(streamer) is not TextStreamer:  # whose end is a line feed
                streamer.end()
            if stats.fallback_reason == NOT_BEGUN:
                stats.fallback_reason = OTHER_LOOP
                _warn_once(OTHER_LOOP)
        print_summary(stats)
        return result

    # generate.__wrapped__ is how one gets past its torch.no_grad(): that must lead where it led before.
    if hasattr(original, "__wrapped__"):
        generate.__wrapped__ = original.__wrapped__
    return generate


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        stats = open_stats()
        if is_enabled():
            with process_group_for(current_config(), input_ids.device, stats) as group:
                # Several processes have to agree on each token, however few there are.
                is_useless = type(group) is SingleProcess and is_short(input_ids, generation_config)
                found = TOO_SHORT if is_useless else adapter_or_reason(self, input_ids, generation_config, model_kwargs)
                reason = found if isinstance(found, str) else None
                reason = group.agree(reason, self, input_ids, generation_config, model_kwargs, synced_gpus)
                stats.fallback_reason = reason
                if reason is None:
                    return lookahead_decode(
                        *arguments,
                        config=group.config,
                        adapter=found,
                        stats=stats,
                        callers_cache=callers_cache(generation_config, model_kwargs),
                        group=group,
                        **model_kwargs,
                    )
            if reason != TOO_SHORT:
                _warn_once(reason)
        return original(self, *arguments, **model_kwargs)

    return _sample


def sample_with_lookahead(kind: Any) -> Callable[..., Any]:
    """The decoding loop of a model class with lookahead in it, whether the patch is on or not; one of the class's own stays as it is."""
    found = kind._sample
    if found is not GenerationMixin._sample:
        open_stats().fallback_reason = OTHER_LOOP
        _warn_once(OTHER_LOOP)
        return found
    return found if _originals else _wrap_sample(found)


def _wrap_other(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_enabled():
            open_stats().fallback_reason = reason
            _warn_once(reason)
        return original(*args, **kwargs)

    return method


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        logger.warning("lade: plain generate() runs instead of lookahead decoding: %s.", reason)


def _hint_once() -> None:
    """Where the patch is on and nothing says whether lookahead is to run: one line at the first call."""
    if OFF_HINT not in _warned and (hint := off_hint()):
        _warned.add(OFF_HINT)
        logger.warning("lade: %s.", hint)


def print_summary(stats: GenerationStats) -> None:
    """With DEBUG, what a call of lookahead came to; of several processes one prints it."""
    config = current_config()
    if not config.debug or stats.fallback_reason is not None or not is_leader(config):
        return
    num_rows = stats.batch_size  # num_return_sequences counted
    print(
        "==========================ACCELERATION===SUMMARY======================\n"
        f"Generated tokens: {stats.generated_tokens} {f'in {num_rows} sequences ' if num_rows > 1 else ''}"
        f"Total steps: {stats.steps} "
        f"Compression ratio: {stats.tokens_per_step:.2f}{' per sequence' if num_rows > 1 else ''}\n"
        "======================================================================",
        flush=True,
    )
