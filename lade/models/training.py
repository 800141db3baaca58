"""Which modules behave differently in training mode, so that a block would not compute what single tokens do.

A model in training mode without such modules, as in reinforcement-learning rollouts, computes the same as in eval
mode. The check inspects the bytecode of each module class once: functions that read the `training` flag, and the
settings such as dropout that they use.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

# Names of settings that act in training mode only, unless they are 0, None or False.
CHECKPOINTING = re.compile("^(is_)?(gradient|activation)_checkpointing$")
SETTINGS = re.compile(f"drop|jitter|noise|{CHECKPOINTING.pattern}")
MISSING = object()
# Functions with these names clip weights, which is independent of the number of tokens.
HARMLESS = frozenset({"altup_coef_clip"})
# These classes only set the flag or pass it on.
COMMON_CLASSES = frozenset(PreTrainedModel.__mro__)
SWITCHES = ("train", "eval")
# What holds functions, and where.
WRAPPERS = (MethodType, staticmethod, classmethod, partial, property)
INNER = ("__func__", "func", "fget", "fset")
UNASSIGNED = CellType()  # a closure's variable without a value

# Per class: the settings used by each function that reads the flag.
_readers: weakref.WeakKeyDictionary[type[nn.Module], list[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def training_reason(parts: Iterable[nn.Module]) -> str | None:
    """Why lookahead cannot run while these modules are in training mode, as a sentence; None if it can.

    parts: the modules in training mode; a model in eval mode may contain some.
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
    """The value of a setting in a module, its configuration or a child module; None if it is not a number."""
    owners = (part, vars(part).get("config"), *part.children())
    value = next((found for owner in owners if (found := getattr(owner, name, MISSING)) is not MISSING), MISSING)
    # Child modules in training mode are checked on their own. A missing checkpointing attribute means off.
    if value is None or isinstance(value, nn.Module) or (value is MISSING and CHECKPOINTING.search(name)):
        return 0.0
    return float(value) if isinstance(value, (bool, int, float)) else None


def readers_of(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    """For each function of a class that reads the `training` flag: the names in it that may be settings."""
    for base in kind.__mro__:
        if base not in COMMON_CLASSES:
            for name, value in vars(base).items():
                if name not in SWITCHES:
                    yield from readers(value)


def readers(value: Any) -> Iterator[tuple[str, ...]]:
    """As `readers_of`, for one function and the functions that it wraps."""
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
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != UNASSIGNED]
        elif isinstance(value, WRAPPERS):
            waiting += [getattr(value, name, None) for name in INNER]
        elif callable(value) and not isinstance(value, (type, nn.Module)):
            waiting.append(type(value).__call__)
        else:
            continue
        waiting.append(getattr(value, "__wrapped__", None))


def names_in(code: CodeType) -> Iterator[str]:
    """Names of attributes and globals that a function uses, and its string constants, which getattr() may take."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str):
            yield constant
