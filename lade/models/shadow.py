"""Shadow models: new module objects over the same weights, which an adapter may change.

The user's model is never modified, so nothing has to be restored after an exception and other threads that use the
model are not affected.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lade.common.compat import HOOKS, OWN_DICTIONARIES
from lade.models.compiled import can_pass_by
from lade.models.ropes import is_moving_rope

M = TypeVar("M", bound=nn.Module)


def shadow_model(model: PreTrainedModel, attention: str | None = None) -> Any:
    """An uncompiled model with the same weights, buffers and hooks, and the same rotary embedding if its state moves.

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
    is_compiled = can_pass_by(module)
    if is_compiled and "_orig_mod" in module._modules:
        known[id(module)] = _shadow(module._modules["_orig_mod"], known, attention)  # type: ignore[type-var]
        return known[id(module)]
    shadow = module.__class__.__new__(module.__class__)
    known[id(module)] = shadow
    config = getattr(module, "config", None)
    if attention is not None and isinstance(config, PreTrainedConfig) and id(config) not in known:
        known[id(config)] = copy.copy(config)  # a config object that the modules hold besides the model's own
        known[id(config)]._attn_implementation = attention
    for name, value in vars(module).items():
        shadow.__dict__[name] = value.copy() if name in OWN_DICTIONARIES else known.get(id(value), value)
    if is_compiled:
        shadow.__dict__.pop("forward", None)
        shadow.__dict__.pop("_compiled_call_impl", None)
    for name, child in module._modules.items():
        shadow._modules[name] = None if child is None else _shadow(child, known, attention)
    return shadow


def take_hooks(module: nn.Module, stock: nn.Module) -> None:
    """Copy the hooks of `stock` to the module that replaces it in a shadow model."""
    for name in HOOKS:
        module.__dict__[name] = stock.__dict__[name].copy()


class Sliced:
    """Replaces a tensor that the stock code slices by cache slots: every slice is `whole`, made for each block."""

    shape = (0, 0, 0)  # what the stock code computes its slices from

    def __init__(self, whole: Any = None) -> None:
        self.whole = whole

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, _: Any) -> Any:
        return self.whole
