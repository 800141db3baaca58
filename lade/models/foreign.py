"""Foreign code: what runs inside a model's forward and neither torch, transformers nor accelerate wrote.

Classes of modules, functions in place of a forward or of an attention, and hooks. Callables are judged by where their code is
written, never by a name. What is foreign is tried out before it is trusted (`self_check.py`). A hook may also keep what it sees, which no
trial can find out: so it meets neither trials nor guesses before its owner allows it.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from torch import nn
from torch.nn import functional
from torch.nn.modules import module as nn_module

from lade.compat import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, sdpa_attention_forward
from lade.models.compiled import can_pass_by

T = TypeVar("T")
AUTHORS = frozenset({"torch", "transformers", "accelerate", "lade"})  # top-level packages
TRANSFORMERS = frozenset({"transformers"})
RETAINS_NOTHING = AUTHORS | {"peft"}  # their hooks need nobody's leave
# A function of transformers under another one's name is as foreign as any.
STOCK = {"attention sdpa": sdpa_attention_forward}
EAGER = "eager_attention_forward"  # a global of each file of models, which "eager" stands for
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Code:
    """What a call has to know about the code of a model. Foreign pieces are given as keys: equal ones mean the same code."""

    classes: tuple[Hashable, ...]  # foreign ones of modules
    functions: tuple[Hashable, ...]  # foreign ones in place of a forward or an attention
    hooks: tuple[Hashable, ...]  # foreign ones
    names: tuple[str, ...]  # of these functions and hooks, for a reason
    refused_hook: str | None  # the name of one that may not meet guesses
    is_patched: bool  # some module does not run its class's forward: patched or dispatched, by whomever
    is_compiled: bool  # some module runs that forward compiled by torch, which a view does not
    is_hooked: bool  # there are hooks besides transformers' own, which only collect what a call asks for
    has_plain_weights: bool  # none is quantized or lies on several devices

    @property
    def is_as_made(self) -> bool:
        """Whether the model runs as torch and transformers made it, on ordinary tensors."""
        is_foreign = self.classes or self.functions or self.hooks
        return self.has_plain_weights and not (is_foreign or self.is_patched or self.is_compiled or self.is_hooked)


def code_of(parts: Iterable[nn.Module], attentions: Collection[str | None]) -> Code:
    """Look over a model. parts: the model and all modules in it. attentions: names of those that it and its blocks use."""
    classes: list[Hashable] = []
    functions: list[tuple[Any, ...]] = []  # what each is in place of, and itself
    hooks: list[tuple[Any, ...]] = []  # what each is on, and itself
    known: dict[type[nn.Module], bool] = {}  # classes are few, and modules many
    is_patched, is_compiled, has_plain_weights = False, False, True
    for place, part in enumerate(parts):
        kind, own = type(part), vars(part)
        if kind not in known:
            known[kind] = _is_known_class(kind)
        if not known[kind]:
            classes.append((place, key_of(kind), key_of(kind.forward)))
        if "forward" in own:
            functions.append((place, own["forward"]))
            if "_hf_hook" in own:  # accelerate's wrapper of a forward runs it
                hooks.extend((place, "", hook) for hook in _single_hooks(own["_hf_hook"]))
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            is_compiled, is_patched = (True, is_patched) if can_pass_by(part) else (is_compiled, True)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if own[name]:
                hooks.extend((place, name, hook) for hook in own[name].values())
        for weight in own["_parameters"].values():
            if weight is not None and type(weight) is not nn.Parameter:
                has_plain_weights = False
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        hooks.extend((None, name, hook) for hook in getattr(nn_module, name).values())

    functions = [each for each in functions if not is_written_by(AUTHORS, each[-1])]
    functions.extend(_foreign_attention(known, attentions))
    foreign = [each for each in hooks if not is_written_by(AUTHORS, each[-1])]
    refused = (hook for *_, hook in foreign if not (_leave_for(hook) or is_written_by(RETAINS_NOTHING, hook)))
    return Code(
        classes=tuple(classes),
        functions=tuple((*where, key_of(function)) for *where, function in functions),
        hooks=tuple((*where, key_of(hook), _leave_for(hook)) for *where, hook in foreign),
        names=tuple(dict.fromkeys(name_of(each[-1]) for each in (*functions, *foreign))),
        refused_hook=next(map(name_of, refused), None),
        is_patched=is_patched,
        is_compiled=is_compiled,
        is_hooked=not all(is_written_by(TRANSFORMERS, each[-1]) for each in hooks),
        has_plain_weights=has_plain_weights,
    )


def _leave_for(hook: Any) -> Hashable:
    """Its owner's permission for a hook, as a key; None where there is none."""
    leave = _allowed.get(key_of(hook))
    return leave and Held(leave)


def _is_known_class(kind: type[nn.Module]) -> bool:
    forward = kind.forward
    if _known_classes.get(kind) is not forward:
        if not (is_written_by(AUTHORS, kind) and is_written_by(AUTHORS, forward)):
            return False
        _known_classes[kind] = forward
    return True


def _foreign_attention(
    kinds: Iterable[type[nn.Module]], attentions: Collection[str | None]
) -> Iterator[tuple[Any, ...]]:
    """Foreign functions that compute a model's attention or its masks, each behind what it is in place of."""
    found: list[tuple[str, Any]] = [("torch", functional.scaled_dot_product_attention)]
    for name in attentions:
        found.append((f"attention {name}", ALL_ATTENTION_FUNCTIONS.get(name)))
        found.append((f"mask {name}", ALL_MASK_ATTENTION_FUNCTIONS.get(name)))
    if "eager" in attentions:
        spaces = {id(space): space for kind in kinds if EAGER in (space := _globals_of(kind.forward))}
        found.extend((f"eager attention of {space['__name__']}", space[EAGER]) for space in spaces.values())
    for place, function in found:
        is_stock = function is STOCK.get(place, function)
        if function is not None and not (is_stock and is_written_by(AUTHORS, function)):
            yield place, function


def _globals_of(function: Any) -> dict[str, Any]:
    space: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    return space


def _single_hooks(hook: Any) -> Iterator[Any]:
    """accelerate's hooks may be made of several."""
    inner = getattr(hook, "hooks", None)
    yield from chain.from_iterable(map(_single_hooks, inner)) if isinstance(inner, (tuple, list)) else (hook,)


def is_written_by(authors: frozenset[str], source: Any) -> bool:
    """Whether all of a class's or callable's code, as far as it can be seen, is these packages'."""
    if type(source) is types.FunctionType:  # asked for in each call
        if source not in _homes:
            _homes[source] = frozenset(_homes_of(source))
        return _homes[source] <= authors
    return all(home in authors for home in _homes_of(source))


def _homes_of(source: Any) -> Iterator[str]:
    """Packages that a class's or callable's code is written in. A wrapper takes over the name of what it wraps, so both count."""
    names = [getattr(source, "__module__", None)]
    inner: list[Any] = [getattr(source, "__wrapped__", None)]
    if isinstance(source, types.FunctionType):
        names.append(source.__globals__.get("__name__"))
    elif isinstance(source, types.MethodType):
        inner = [source.__func__]
    elif isinstance(source, functools.partial):
        names = []
        given = (*source.args, *source.keywords.values())
        inner += [source.func, *(each for each in given if isinstance(each, (types.FunctionType, types.MethodType)))]
    elif not isinstance(source, (type, types.BuiltinFunctionType)):
        names = [type(source).__module__]
    yield from ((name or "").partition(".")[0] for name in names)
    for each in inner:
        if each is not None:
            yield from _homes_of(each)


def name_of(source: Any) -> str:
    """What a class or callable is called, the same in each run."""
    while isinstance(source, functools.partial):
        source = source.func
    return str(getattr(source, "__qualname__", type(source).__qualname__))


class Held:
    """Stands for one object in a key, without keeping it alive. Never equal to what comes to lie at its address later."""

    __slots__ = ("_hash", "_thing")

    def __init__(self, thing: Any) -> None:
        self._hash = id(thing)
        try:
            self._thing = weakref.ref(thing)
        except TypeError:  # held for good
            self._thing = lambda: thing  # type: ignore[assignment]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        thing = self._thing()
        return isinstance(other, Held) and thing is not None and thing is other._thing()

    @property
    def is_gone(self) -> bool:
        return self._thing() is None


def key_of(source: Any) -> Hashable:
    """Equal for the same code alone: the same function, bound to the same object, with the same plain arguments."""
    if isinstance(source, types.MethodType):
        return Held(source.__self__), key_of(source.__func__)
    if isinstance(source, types.FunctionType):
        return Held(source), Held(source.__code__)  # which an editor's reload puts into the old function
    if type(source) is functools.partial:
        given = (*source.args, *chain.from_iterable(sorted(source.keywords.items())))
        return key_of(source.func), *(repr(each) if _is_plain(each) else Held(each) for each in given)
    return Held(source)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in PLAIN


def is_gone(key: Hashable) -> bool:
    """Whether something that a key stands for no longer exists, so that the key can never be met again."""
    if isinstance(key, Held):
        return key.is_gone
    return isinstance(key, tuple) and any(map(is_gone, key))


def allow_hook(hook: T) -> T:
    """Let a hook of yours meet guesses, rejected ones among them; without that, models that have it go to plain generate().

    hook: what `register_forward_hook`, `register_forward_pre_hook` and their like are given. It is tried out first, on random tokens:
    what it does must not depend on how many tokens a forward has, nor on how many forwards there were before. Allow it once more after
    a change of what it does. Returns it, so that this can be a decorator.
    """
    if not callable(hook) and not hasattr(hook, "pre_forward"):  # accelerate's are no functions
        raise TypeError(f"hook must be callable, got {hook!r}")
    for key in [key for key in _allowed if is_gone(key)]:
        del _allowed[key]
    _allowed[key_of(hook)] = Allowed()
    return hook


class Allowed:
    """One permission: another one asks for another trial."""


_allowed: dict[Hashable, Allowed] = {}
_homes: weakref.WeakKeyDictionary[types.FunctionType, frozenset[str]] = weakref.WeakKeyDictionary()
_known_classes: weakref.WeakKeyDictionary[type[nn.Module], Any] = weakref.WeakKeyDictionary()  # and their forwards
