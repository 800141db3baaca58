"""Lookahead switched on in code: for a block of code, or for one call without a patch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from lade import augment
from lade.compat import CALLERS_CACHE_MARK, require_names
from lade.config import apply_environment, switched
from lade.parallel.communicator import num_processes
from lade.stats import has_open_stats, recording

INSTEAD = "call generate() inside `with lade.enabled():` instead"


@contextmanager
def enabled(on: bool = True, /, **settings: Any) -> Iterator[None]:
    """Switch lookahead on for the calls of this thread or asyncio task, whatever USE_LADE says; with False, off.

        with lade.enabled(MODE="tree", MAX_BLOCK=32):
            model.generate(...)

    settings: of `config_lade`, on top of those in force here; the block keeps them whatever `config_lade` changes meanwhile. Other
    threads see neither. A thread that is started inside begins without (Python hands it no context): enter the block there, or
    start it with `contextvars.copy_context().run`. Tasks inherit it. Puts the patch on where it is not on yet. Raises as
    `config_lade` and `augment_all` do; then nothing has changed.
    """
    apply_environment()
    with switched(on, **settings):
        if on:
            augment.augment_quietly()
        yield


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Lookahead for one call, without a patch: `model.generate(..., custom_generate=lade.generate)`.

    Called by transformers with what its own decoding loop would get, less what it gives to no function of a user's: the streamer,
    the tokenizer, an assistant model and synced_gpus. A call with one of these raises ValueError, as does one for beam search or
    assisted decoding: nothing is left out in silence. What lookahead cannot serve for other reasons goes to transformers' own loop
    with one warning, as with the patch. Settings are those of `config_lade` and of `lade.enabled`; USE_LADE is not read.
    """
    _prepare()
    call = _arguments_of_generate()
    _refuse(model, generation_config, call)
    cache = model_kwargs.get("past_key_values")
    # If generate()'s frame is not found, the cache may be the caller's, which must end up as plain generate() leaves it.
    if cache is not None and (call is None or call["kwargs"].get("past_key_values") is cache):
        setattr(cache, CALLERS_CACHE_MARK, True)
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
    if has_open_stats():  # the patch is on and keeps the figures
        with switched(True):
            return augment.sample_with_lookahead(type(model))(model, *arguments, **model_kwargs)
    with switched(True), recording() as stats:
        result = augment.sample_with_lookahead(type(model))(model, *arguments, **model_kwargs)
        augment.print_summary(stats)
    return result


@functools.cache
def _prepare() -> None:
    """What the patch does before its first call. Raises as `augment_all` does; the next call then tries again."""
    apply_environment()
    require_names()


def _arguments_of_generate() -> dict[str, Any] | None:
    """The local variables of the calling `generate()`; None if something else called.

    It does not pass the streamer on, and its frame is the only other place to see it.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def _refuse(model: PreTrainedModel, generation_config: Any, call: dict[str, Any] | None) -> None:
    """Raise ValueError if an argument of the call has no effect because transformers did not pass it on."""
    assistant = call and call["assistant_model"]
    mode = generation_config.get_generation_mode(assistant).value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"custom_generate=lade.generate is for greedy decoding and sampling, got a request for {mode}")
    dropped = [name for name in ("streamer", "synced_gpus") if call and call[name]]
    is_divided = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if is_divided and num_processes() > 1:  # for which generate() sets it by itself
        dropped.append("synced_gpus")
    if dropped:
        raise ValueError(f"custom_generate=lade.generate is given no {dropped[0]} by transformers: {INSTEAD}")
