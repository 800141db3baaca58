"""A private view of a model: its own module objects over the same weights, for an adapter to change as it needs. Floor 3.

The user's model is never touched, so that there is nothing to put back after an exception, and another thread that uses
the model meanwhile sees nothing of it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as nn_module
from transformers import PreTrainedConfig, PreTrainedModel

from lade.compat import HOOKS, OWN_DICTIONARIES

M = TypeVar("M", bound=nn.Module)
KNOWN_CODE = ("torch.", "transformers.")


def private_view(model: PreTrainedModel, attention: str | None = None) -> Any:
    """A model with the same weights, buffers and hooks. attention: what its layers use instead of the model's own setting."""
    known: dict[int, Any] = {}
    if attention is not None:
        config = copy.deepcopy(model.config, known)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part._attn_implementation = attention
    return _view(model, known, attention)


def _view(module: M, known: dict[int, Any], attention: str | None) -> M:
    if id(module) in known:  # tied modules stay tied
        return known[id(module)]
    view = module.__class__.__new__(module.__class__)
    known[id(module)] = view
    config = getattr(module, "config", None)
    if attention is not None and isinstance(config, PreTrainedConfig) and id(config) not in known:
        known[id(config)] = copy.copy(config)  # a copy of the model's own, made by whoever built it
        known[id(config)]._attn_implementation = attention
    for name, value in vars(module).items():
        view.__dict__[name] = value.copy() if name in OWN_DICTIONARIES else known.get(id(value), value)
    for name, child in module._modules.items():
        view._modules[name] = None if child is None else _view(child, known, attention)
    return view


def take_hooks(module: nn.Module, stock: nn.Module) -> None:
    """Give a module that stands for another one in a view that one's hooks."""
    for name in HOOKS:
        module.__dict__[name] = stock.__dict__[name].copy()


def has_foreign_forward(parts: Iterable[nn.Module]) -> bool:
    """Whether some module runs other code than its class says, which a view would take along bound to the original's modules.

    Accelerate's dispatch, which replaces `forward` on the object, is such a case, and so is `module.compile()`. parts: the model
    and all modules in it.
    """
    return any("forward" in vars(part) or vars(part).get("_compiled_call_impl") is not None for part in parts)


def has_hooks(parts: Iterable[nn.Module]) -> bool:
    """Whether something of the user's is to run before or after the model or a part of it.

    parts: the model and all modules in it. transformers puts on hooks of its own, which only collect hidden states and
    attentions where a call asks for them.
    """
    everywhere = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
    own = (vars(part)[name] for part in parts for name in ("_forward_hooks", "_forward_pre_hooks"))
    hooks = chain.from_iterable(found.values() for found in chain(everywhere, own) if found)
    return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)


def foreign_code(parts: Iterable[nn.Module]) -> Hashable:
    """What of a model's code is neither torch's nor transformers': classes, and functions put in place of their forwards.

    parts: the model and all modules in it. None where there is nothing of that kind. Two equal results mean the same code.
    """
    found = []
    is_known: dict[type[nn.Module], bool] = {}  # classes are few, and a call looks at all modules
    for module in parts:
        kind, own = type(module), vars(module).get("forward")
        if kind not in is_known:
            is_known[kind] = _is_known(kind) and _is_known(kind.forward)
        if not is_known[kind] or (own is not None and not _is_known(own)):
            found.append((kind, kind.forward, None if own is None else id(own)))
    return tuple(found) or None


def _is_known(source: Any) -> bool:
    """Whether a class or function is torch's or transformers': by where it is written, too, since wrappers take names over."""
    named = getattr(source, "__module__", None)
    written_in = getattr(source, "__globals__", {}).get("__name__", named)
    return all((name or "").startswith(KNOWN_CODE) for name in (named, written_in))


def is_as_made(parts: Iterable[nn.Module]) -> bool:
    """Whether a model runs as its classes say, on ordinary tensors: with nothing hooked on or put in place of a forward, and no
    weights that are quantized or lie on several devices.

    parts: the model and all modules in it, which each call looks at: once.
    """
    is_hooked = bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)
    for part in parts:
        own = vars(part)
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            return False
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            is_hooked = True
        for weight in own["_parameters"].values():
            if weight is not None and type(weight) is not nn.Parameter:
                return False
    return not (is_hooked and has_hooks(parts))


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """What `model.modules()` gives, in another order and at a third of the time: each call looks at all of them."""
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            waiting.extend(child for child in module._modules.values() if child is not None)
            yield module
