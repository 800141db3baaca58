"""What of a model acts in training mode alone, so that a block of guesses would not compute what single tokens do.

A model in training mode without any of that, as in the rollouts of reinforcement learning, computes what it does in eval mode.
What a module does with its `training` flag is read from the code of its class, once for each class: which settings stand beside it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

# Settings that act in training mode alone, and only where they are neither 0 nor None nor False.
CHECKPOINTING = re.compile("^(is_)?(gradient|activation)_checkpointing$")
SETTINGS = re.compile(f"drop|jitter|noise|{CHECKPOINTING.pattern}")
MISSING = object()
# These act in the same way on any number of tokens: they clip weights.
HARMLESS = frozenset({"altup_coef_clip"})
# These classes hand the flag on, or set it.
COMMON_CLASSES = frozenset(PreTrainedModel.__mro__)
SWITCHES = ("train", "eval")

# By class: of each function that reads the flag, the settings that it uses. A class that is gone takes its entry along.
_readers: weakref.WeakKeyDictionary[type[nn.Module], list[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def training_reason(parts: Iterable[nn.Module]) -> str | None:
    """Why lookahead cannot run while these modules are in training mode, as a sentence; None where nothing depends on it.

    parts: modules in training mode; a model may have some while it is in eval mode itself.
    """
    for part in parts:
        kind = type(part)
        if isinstance(part, _DropoutNd):
            if part.p > 0:
                return acts_in_training(kind.__name__, "p")
            continue
        if kind not in _readers:
            _readers[kind] = list(readers_of(kind))
        found = _readers[kind]
        own = vars(part).get("forward")
        if own is not None:
            found = [*found, *readers(own)]
        for names in found:
            values = {name: value for name in names if (value := setting(part, name)) is not None}
            active = next((name for name, value in values.items() if value), None)
            if active is not None:
                return acts_in_training(kind.__name__, active)
            if not values:
                return f"{kind.__name__} is in training mode, and what it does there is not known to be safe"
    return None


def acts_in_training(kind: str, name: str) -> str:
    if CHECKPOINTING.search(name):
        return "gradient checkpointing is on in training mode, where transformers keeps no cache"
    return f"{kind} is in training mode with a {name} that is not 0, which no block of guesses can repeat"


def setting(part: Any, name: str) -> float | None:
    """What a module, or else its configuration or a module in it, has under this name; None where that is no setting."""
    owners = (part, vars(part).get("config"), *part.children())
    value = next((found for owner in owners if (found := getattr(owner, name, MISSING)) is not MISSING), MISSING)
    # A module in training mode is looked at by itself, and what cannot be checkpointed has no attribute that says so.
    if value is None or isinstance(value, nn.Module) or (value is MISSING and CHECKPOINTING.search(name)):
        return 0.0
    return float(value) if isinstance(value, (bool, int, float)) else None


def readers_of(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    """Of each function of a class that reads the module's `training` flag: the names in it that may be settings."""
    for base in kind.__mro__:
        if base not in COMMON_CLASSES:
            for name, value in vars(base).items():
                if name not in SWITCHES:
                    yield from readers(value)


def readers(value: Any) -> Iterator[tuple[str, ...]]:
    """The same of a function, and of those that it wraps."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            names = set(names_in(value.__code__))
            if "training" in names and not names & HARMLESS:
                yield tuple(sorted(name for name in names if name.isidentifier() and SETTINGS.search(name)))
            waiting += [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif isinstance(value, partial):
            waiting.append(value.func)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            waiting.append(type(value).__call__)
        else:
            continue
        waiting.append(getattr(value, "__wrapped__", None))


def names_in(code: CodeType) -> Iterator[str]:
    """Attributes and globals that a function uses, strings among them: getattr() takes names as such."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str):
            yield constant


def is_filled(cell: Any) -> bool:
    """Whether a closure's variable has been assigned."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
