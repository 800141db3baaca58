"""A private view of a model: its own module objects over the same weights, for an adapter to change as it needs. Floor 3.

The user's model is never touched, so that there is nothing to put back after an exception, and another thread that uses
the model meanwhile sees nothing of it.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)
# Dictionaries of a module that the view must be able to change; the tensors and hooks inside are shared.
OWN_DICTIONARIES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def private_view(model: PreTrainedModel, attention: str | None = None) -> Any:
    """A model with the same weights, buffers and hooks. attention: what its layers use instead of the model's own setting."""
    known: dict[int, Any] = {}
    if attention is not None:
        config = copy.deepcopy(model.config, known)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part._attn_implementation = attention
    return _view(model, known)


def _view(module: M, known: dict[int, Any]) -> M:
    if id(module) in known:  # tied modules stay tied
        return known[id(module)]
    view = module.__class__.__new__(module.__class__)
    known[id(module)] = view
    for name, value in vars(module).items():
        view.__dict__[name] = value.copy() if name in OWN_DICTIONARIES else known.get(id(value), value)
    for name, child in module._modules.items():
        view._modules[name] = None if child is None else _view(child, known)
    return view


def has_foreign_forward(model: PreTrainedModel) -> bool:
    """Whether a module's `forward` was replaced on the object, as accelerate's dispatch does: a view would run the original's."""
    return any("forward" in vars(module) for module in model.modules())
