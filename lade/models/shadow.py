"""Shadow models: new module objects over the same weights, which an adapter may change.

The user's model is never modified, so nothing has to be restored after an exception and other threads that use the
model are not affected.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lade.common.compat import OWN_DICTIONARIES
from lade.models.ropes import is_moving_rope

M = TypeVar("M", bound=nn.Module)


def shadow_model(model: PreTrainedModel, attention: str | None = None) -> Any:
    """A model with the same weights, buffers and hooks, and the same rotary embedding if its state moves.

    attention: the attention implementation of its layers; None for the model's own.
    """
    known: dict[int, Any] = {}
    if attention is not None:
        config = copy.deepcopy(model.config, known)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part._attn_implementation = attention
    return _shadow(model, known, attention)


def _shadow(module: M, known: dict[int, Any], attention: str | None) -> M:
    if id(module) in known:  # tied modules stay tied
        return known[id(module)]
    if is_moving_rope(module):  # the frequencies that a forward leaves decide later calls
        return module
    shadow = module.__class__.__new__(module.__class__)
    known[id(module)] = shadow
    config = getattr(module, "config", None)
    if attention is not None and isinstance(config, PreTrainedConfig) and id(config) not in known:
        known[id(config)] = copy.copy(config)  # a config object that the modules hold besides the model's own
        known[id(config)]._attn_implementation = attention
    for name, value in vars(module).items():
        shadow.__dict__[name] = value.copy() if name in OWN_DICTIONARIES else known.get(id(value), value)
    for name, child in module._modules.items():
        shadow._modules[name] = None if child is None else _shadow(child, known, attention)
    return shadow
