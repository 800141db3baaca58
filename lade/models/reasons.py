"""Why a model's own code rules out lookahead, as sentences for the user."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from transformers import GenerationMixin

# Methods that plain generate() calls around each forward; lade's loop has its own code for them.
HOOKS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
DYNAMIC_INT8 = ("torch.ao.nn.quantized.dynamic", "torch.ao.nn.intrinsic.quantized.dynamic")  # packages
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def calling_reason(model: Any, safe_hooks: Collection[str], cache_name: str) -> str | None:
    """Why the model's forward cannot be called with blocks, as a sentence; None if it can. cache_name: its argument."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("attention_mask", cache_name):
        if name not in parameters:
            if "forward" in vars(model) and any(parameter.kind in ANY for parameter in parameters.values()):
                return (
                    f"the function put in place of {type(model).__name__}.forward does not say which arguments it takes; "
                    "functools.wraps(model.forward) makes it say so"
                )
            return f"{type(model).__name__}.forward takes no {name}"
    for name in HOOKS:
        function = getattr(getattr(model, name), "__func__", None)
        written_in = getattr(function, "__module__", None) or ""
        if function is getattr(GenerationMixin, name) or (
            name in safe_hooks and written_in.startswith("transformers.models.")
        ):
            continue
        if written_in.split(".")[0] == "peft":
            return "PEFT's prompt and prefix tuning put tokens or keys of their own before the text at each call"
        return f"{type(model).__name__} has a {name} of its own"
    return None


def rounding_reason(parts: Iterable[nn.Module]) -> str | None:
    """Why guesses would change the rounding of the text's logits, as a sentence; None if no reason is known."""
    for part in parts:
        written_in = type(part).__module__
        if isinstance(part, nn.Embedding) and part.max_norm is not None:
            return "an embedding with max_norm rescales in place the row of each token that it sees, guesses included"
        if written_in.startswith(DYNAMIC_INT8):
            return "torch's dynamic int8 layers have one scale for all tokens of a forward, so that guesses would change the text"
        is_int8 = written_in.partition(".")[0] == "bitsandbytes" and "8bit" in type(part).__name__
        if is_int8 and getattr(getattr(part, "state", None), "threshold", True):
            return (
                "8-bit layers of bitsandbytes choose the columns that they keep in 16 bits by all tokens of a forward, "
                "so that guesses would change the text (llm_int8_threshold=0 chooses none)"
            )
    return None
