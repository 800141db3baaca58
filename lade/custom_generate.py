"""Lookahead for one call without the patch: `model.generate(..., custom_generate=lade.generate)`."""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from lade import augment
from lade.common.compat import CACHE_NAME, CALLERS_CACHE_MARK, is_divided, require_names
from lade.drafting.prediction import predicted
from lade.stats import has_open_stats, recording
from lade.switch import apply_environment, current_config, switched

INSTEAD = "call generate() inside `with lade.enabled():` instead"


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    PREDICTION: Any = None,
    **model_kwargs: Any,
) -> Any:
    """A decoding loop for generate()'s argument `custom_generate`.

    Transformers calls it with the arguments of its own decoding loop, except those that it never passes to a custom
    function: the streamer, the tokenizer, an assistant model and synced_gpus. A call with one of these raises
    ValueError, as does one for beam search or assisted decoding, so nothing is ignored silently. Other unsupported
    calls run transformers' own loop with one warning, as with the patch. Settings come from `config_lade` and
    `lade.enabled`, whose PREDICTION may also be given here; USE_LADE is not read.
    """
    _prepare()
    call = _arguments_of_generate()
    _refuse(model, generation_config, call)
    cache = model_kwargs.get(CACHE_NAME)
    # Without generate()'s frame the cache may be the caller's, and must end as plain generate() leaves it.
    if cache is not None and (call is None or call["kwargs"].get(CACHE_NAME) is cache):
        setattr(cache, CALLERS_CACHE_MARK, True)
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
    # With the patch on, its generate() records the statistics and prints them.
    with (
        switched(True),
        predicted(PREDICTION),
        nullcontext() if has_open_stats() else recording() as stats,
    ):
        config = current_config()
        result = augment.sample_with_lookahead(type(model))(model, *arguments, **model_kwargs)
        if stats is not None:
            augment.print_summary(stats, config)
    return result


@functools.cache
def _prepare() -> None:
    """The patch's initial checks, done once. Raises as `augment_all` does; the next call then tries again."""
    apply_environment()
    require_names()


def _arguments_of_generate() -> dict[str, Any] | None:
    """The local variables of the calling `generate()`; None if it is not on the stack.

    Some arguments, such as the streamer, are not passed on and can be seen only there.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def _refuse(model: PreTrainedModel, generation_config: Any, call: dict[str, Any] | None) -> None:
    """Raise ValueError if transformers did not pass on an argument of the call, so that it would be ignored."""
    assistant = call and call["assistant_model"]
    mode = generation_config.get_generation_mode(assistant).value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"custom_generate=lade.generate is for greedy decoding and sampling, got a request for {mode}")
    dropped = [name for name in ("streamer", "synced_gpus") if call and call[name]]
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    # generate() sets synced_gpus itself then
    if is_shared and is_divided(model) and torch.distributed.get_world_size() > 1:
        dropped.append("synced_gpus")
    if dropped:
        raise ValueError(f"custom_generate=lade.generate is given no {dropped[0]} by transformers: {INSTEAD}")
