"""The patch: `augment_all()` puts lookahead behind `generate()`, `restore_all()` removes it.

`generate()` runs its greedy and sampling loop in `GenerationMixin._sample`, which the patch replaces. `generate` is
wrapped only to collect the statistics of a call, and the other decoding methods only to report why lookahead did not
run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import Tensor
from transformers import Cache, GenerationMixin, TextStreamer

from lade.common.compat import CACHE_NAMES, CALLERS_CACHE_MARK, MAMBA_CACHE_NAME, require_names
from lade.common.notices import notify_once
from lade.common.request import Request
from lade.common.state import forget_all, return_memory
from lade.common.version import TESTED, is_newer_than_tested
from lade.config import LookaheadConfig
from lade.decoding import lookahead_decode
from lade.drafting import with_mode
from lade.drafting.prediction import predicted
from lade.models.eligibility import QUIET, TOO_SHORT, adapter_or_reason, is_short
from lade.stats import GenerationStats, open_stats, recording
from lade.switch import apply_environment, current_config, is_enabled, lock, off_hint, off_reason, switched
from lade.verification.single_process import SingleProcess, is_leader, process_group_for

logger = logging.getLogger("lade")

OFF_HINT = "off_hint"  # added to _warned after the hint
NOT_BEGUN = "the call ended before decoding began"
OTHER_LOOP = (
    "the request runs a decoding loop of its own (custom_generate, or a mode that lives outside of transformers)"
)
# Other decoding methods, and the reason reported when generate() calls them.
OTHER_METHODS = {
    "_beam_search": "beam search (num_beams > 1) is not supported",
    "_assisted_decoding": "assisted decoding (assistant_model or prompt_lookup_num_tokens) is not supported",
    "init_continuous_batching": "continuous batching (generate_batch) runs a decoding loop of its own",
}

_originals: dict[str, Any] = {}  # attribute of GenerationMixin or a base -> the original
_wrappers: dict[str, Any] = {}  # -> what the patch put there
_warned: set[str] = set()


def augment_all() -> None:
    """Put lookahead decoding behind `generate()` of all models, loaded before or later. A second call has no effect.

    Lookahead runs while the environment has USE_LADE=1, and inside `with lade.enabled():`. Other calls run the
    original. Raises ImportError if a name that lade uses in the installed transformers or torch is missing or has
    changed, and ValueError if LADE_CONFIG names no settings file.
    """
    with lock:
        if _originals:
            return
        apply_environment()
        require_names()
        if is_newer_than_tested(transformers.__version__):
            notify_once("transformers %s is newer than the tested versions (%s)", transformers.__version__, TESTED)
        wrappers = {"generate": _wrap_generate, "_sample": _wrap_sample}
        wrappers |= {name: functools.partial(_wrap_other, reason=reason) for name, reason in OTHER_METHODS.items()}
        _originals.update({name: vars(_owner(name))[name] for name in wrappers})
        _wrappers.update({name: wrap(_originals[name]) for name, wrap in wrappers.items()})
        for name, wrapper in _wrappers.items():
            setattr(_owner(name), name, wrapper)


@contextmanager
def enabled(on: bool = True, /, *, PREDICTION: Any = None, **settings: Any) -> Iterator[None]:
    """Switch lookahead on (or, with False, off) for calls in this thread or asyncio task, regardless of USE_LADE.

        with lade.enabled(MODE="tree", MAX_BLOCK=32):
            model.generate(...)

    settings: keywords of `config_lade`, applied on top of the settings in force. Inside the block they stay fixed,
    whatever `config_lade` changes. PREDICTION: token ids that the answers are expected to resemble, of one text for all
    prompts or of one for each; guesses are looked for there as well. Other threads are not affected. Asyncio tasks
    started inside inherit the block; threads do not, since Python gives them an empty context: enter the block in the
    thread, or start it with `contextvars.copy_context().run`. Applies the patch if it is not on. Raises as
    `config_lade` and `augment_all` do, in which case nothing has changed.
    """
    apply_environment()
    with switched(on, **settings), predicted(PREDICTION):
        if on and not _originals:
            augment_all()
            _warned.add(OFF_HINT)  # nobody here has forgotten to switch it on
        yield


# The names of the original LookaheadDecoding; one patch serves every model.
augment_generate = augment_all
augment_llama = augment_all


def restore_all() -> None:
    """Restore the identical original functions, and clear all state that lade keeps per model."""
    with lock:
        for name, function in _originals.items():
            if vars(_owner(name))[name] is _wrappers[name]:  # otherwise another library has put its own over it
                setattr(_owner(name), name, function)
        _originals.clear()
        _warned.clear()
        forget_all()
    return_memory()


def _owner(name: str) -> type:
    """The class in GenerationMixin's MRO that defines a method."""
    return next((kind for kind in GenerationMixin.__mro__ if name in vars(kind)), GenerationMixin)


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _originals.get("generate") is not original:  # kept by another library, after restore_all()
            return original(self, *args, **kwargs)
        config = current_config()
        with recording() as stats:
            if OFF_HINT not in _warned and (hint := off_hint()):
                _warned.add(OFF_HINT)
                logger.warning("lade: %s.", hint)
            stats.fallback_reason, streamer = off_reason(), None
            if is_enabled():
                stats.fallback_reason = NOT_BEGUN
                for cache in map(kwargs.get, (*CACHE_NAMES, MAMBA_CACHE_NAME)):
                    if isinstance(cache, Cache):
                        setattr(cache, CALLERS_CACHE_MARK, True)
                if not is_leader(config):  # of several processes only one streams
                    streamer = kwargs.pop("streamer", None)
            result = original(self, *args, **kwargs)
            if streamer is not None and type(streamer) is not TextStreamer:  # its end() prints a newline
                streamer.end()
            if stats.fallback_reason == NOT_BEGUN:
                _fall_back(stats, OTHER_LOOP)
        print_summary(stats, config)
        return result

    # Callers use generate.__wrapped__ to avoid its torch.no_grad(), so it must stay the original's.
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
            config = with_mode(current_config(), self, len(input_ids))
            with process_group_for(config, input_ids.device, stats) as group:
                request = Request(self, *arguments, model_kwargs)
                # Several processes must agree on each token, even in a short call.
                is_useless = type(group) is SingleProcess and is_short(request)
                found = TOO_SHORT if is_useless else adapter_or_reason(request)
                reason = found if isinstance(found, str) else None
                stats.fallback_reason = reason = group.agree(reason, request)
                if reason is None:
                    return lookahead_decode(request, found, stats, group)
            _fall_back(stats, reason)
        return original(self, *arguments, **model_kwargs)

    return _sample


def _wrap_other(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_enabled():
            _fall_back(open_stats(), reason)
        return original(*args, **kwargs)

    return method


def _fall_back(stats: GenerationStats, reason: str) -> None:
    """Record why the original runs, and say it once per reason if it is a limit of lade."""
    stats.fallback_reason = reason
    if reason not in QUIET and reason not in _warned:
        _warned.add(reason)
        logger.warning("lade: plain generate() runs instead of lookahead decoding: %s.", reason)


def print_summary(stats: GenerationStats, config: LookaheadConfig) -> None:
    """Print the statistics of a lookahead call if DEBUG is set. With several processes only the leader prints.

    config: of the beginning of the call.
    """
    if not config.debug or stats.fallback_reason is not None or not is_leader(config):
        return
    num_rows = stats.batch_size  # includes num_return_sequences
    print(
        "==========================ACCELERATION===SUMMARY======================\n"
        f"Generated tokens: {stats.generated_tokens} {f'in {num_rows} sequences ' if num_rows > 1 else ''}"
        f"Total steps: {stats.steps} "
        f"Compression ratio: {stats.tokens_per_step:.2f}{' per sequence' if num_rows > 1 else ''}\n"
        "======================================================================",
        flush=True,
    )
