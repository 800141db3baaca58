"""Foreign code: code in a model's forward that does not come from torch, transformers, accelerate or lade, except
peft's plain LoRA.

It may be a module class, a replaced forward or attention function, or a hook. Callables are judged by the package that
their code is defined in, not by their names. Foreign code must pass a self-check (`self_check.py`). A hook, or a
forward put on one module, may also retain its inputs, change them on purpose or count its calls, which no self-check
can detect: it sees neither self-checks nor guesses until the user allows it.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as nn_module
from transformers import GenerationMixin, PreTrainedModel

from lade.common.compat import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    DeviceContext,
    dispatch_modes,
    function_modes,
    sdpa_attention_forward,
)

T = TypeVar("T")
MIXES_TOKENS = "torch.nn.modules.transformer"  # torch's own modules whose result for a token depends on later ones
AUTHORS = frozenset({"torch", "transformers", "accelerate", "lade"})  # top-level packages
TRANSFORMERS = frozenset({"transformers"})
# Packages whose hooks, and forwards on modules, need no permission.
RETAINS_NOTHING = AUTHORS | {"compressed_tensors", "peft", "trl"}
# The layer of peft that is known code, as long as `is_plain_lora`: it computes each token by itself and keeps nothing.
LORA = "peft.tuners.lora.layer.Linear"
AUTHORS_OF_METHODS = AUTHORS | {"contextlib"}
AUTHORS_OF_LORA = AUTHORS_OF_METHODS | {"peft"}
# Under these names any other function is foreign, even one of transformers.
STOCK = {"attention sdpa": sdpa_attention_forward}
EAGER = "eager_attention_forward"  # the global in each modeling file that "eager" refers to
PLAIN = (bool, int, float, str, type(None))
IN_PYTHON = (types.FunctionType, types.MethodType)
OF_DYNAMO = "_torchdynamo_orig_callable"  # an attribute of what torch.compile returns
COMPILED = "parts of the model are compiled, and would be anew for each shape of a block; uncompiled, lookahead runs"
MOST_COMPARED = 1 << 13  # elements of a foreign module's tensor whose values are compared from call to call


@dataclass(frozen=True, slots=True)
class Code:
    """Facts about the code of a model. Foreign code is given as keys; equal keys mean the same code."""

    # Modules whose class is foreign, or calls or holds functions that are: place among the parts, keys, attributes.
    classes: tuple[tuple[Any, ...], ...]
    functions: tuple[Hashable, ...]  # foreign replacements of a forward or an attention
    hooks: tuple[Hashable, ...]  # foreign hooks
    names: tuple[str, ...]  # of these functions and hooks, for messages
    reason: str | None  # why a hook, a mode of torch, or a module's own forward rules out blocks, as a sentence
    is_patched: bool  # some module's forward is replaced (patched or dispatched)
    is_hooked: bool  # there are modes of torch, or hooks besides transformers' own, which only record requested outputs
    has_plain_weights: bool  # all are plain `nn.Parameter`: none quantized or distributed

    @property
    def is_as_made(self) -> bool:
        """Whether the model runs unmodified code of torch and transformers, or plain LoRA, on ordinary tensors."""
        is_foreign = self.classes or self.functions or self.hooks
        return self.has_plain_weights and not (is_foreign or self.is_patched or self.is_hooked)


def code_of(parts: Iterable[nn.Module], attentions: Collection[str | None]) -> Code:
    """Inspect a model.

    parts: the model and all modules in it. attentions: names of the attention implementations of the model and its
    blocks.
    """
    classes: list[tuple[Any, ...]] = []
    forwards: list[tuple[Any, ...]] = []  # (place, function put on a module)
    hooks: list[tuple[Any, ...]] = []  # (place, kind, hook)
    known: dict[type[nn.Module], tuple[Hashable, ...] | None] = {}  # each class is examined once: its key if foreign
    lora: set[type[nn.Module]] = set()
    is_patched, is_compiled, has_plain_weights = False, False, True
    for place, part in enumerate(parts):
        kind, own = type(part), vars(part)
        if kind not in known:
            code = tuple(_code_of_class(kind))
            is_known = all(is_written_by(AUTHORS, each) for each in code) and kind.__module__ != MIXES_TOKENS
            known[kind] = None if is_known else tuple(map(key_of, code))
            is_lora = f"{kind.__module__}.{kind.__qualname__}" == LORA
            if is_lora and all(is_written_by(AUTHORS_OF_LORA, each) for each in code):
                lora.add(kind)
        if (key := known[kind]) is not None and not (kind in lora and is_plain_lora(part)):
            classes.append((place, *key, *_settings_of(part)))
        replaced = [each for name, each in own.items() if isinstance(each, IN_PYTHON) and name != "forward"]
        others = [each for each in replaced if not is_written_by(AUTHORS, each)]
        if others and not isinstance(part, GenerationMixin):
            classes.append((place, *map(key_of, others)))
        if "forward" in own:
            forwards.append((place, own["forward"]))
            if "_hf_hook" in own:  # accelerate's wrapper of a forward runs it
                hooks.extend((place, "", hook) for hook in _single_hooks(own["_hf_hook"]))
        is_patched |= "forward" in own
        is_compiled |= own.get("_compiled_call_impl") is not None or hasattr(own.get("forward"), OF_DYNAMO)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if own[name]:
                hooks.extend((place, name, hook) for hook in own[name].values())
        for weight in own["_parameters"].values():
            if weight is not None and type(weight) is not nn.Parameter:
                has_plain_weights = False
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        hooks.extend((None, name, hook) for hook in getattr(nn_module, name).values())

    forwards = [each for each in forwards if not is_written_by(AUTHORS, each[-1])]
    functions = [*forwards, *_foreign_attention(known, attentions)]
    foreign = [each for each in hooks if not is_written_by(AUTHORS, each[-1])]
    refused = [f"the hook {name_of(hook)}" for *_, hook in foreign if not _may_run(hook)]
    refused += [f"{name_of(each)}, put in place of a forward," for _, each in forwards if not _may_run(each)]
    sees, modes = "would see guesses that are rejected", torch_modes()
    reasons = [COMPILED] if is_compiled else []
    reasons += [f"{each} {sees}; lade.allow_hook() lets it" for each in refused]
    reasons += [f"the mode {name_of(mode)} {sees}" for mode in modes if not is_written_by(AUTHORS, mode)]
    return Code(
        classes=tuple(classes),
        functions=tuple((*where, key_of(each), _allowed.get(key_of(each))) for *where, each in functions),
        hooks=tuple((*where, key_of(hook), _allowed.get(key_of(hook))) for *where, hook in foreign),
        names=tuple(dict.fromkeys(name_of(each[-1]) for each in (*functions, *foreign))),
        reason=next(iter(reasons), None),
        is_patched=is_patched,
        is_hooked=bool(modes) or not all(is_written_by(TRANSFORMERS, each[-1]) for each in hooks),
        has_plain_weights=has_plain_weights,
    )


def is_plain_lora(layer: Any) -> bool:
    """Whether a layer of peft's LoRA has plain adapters alone, and its next forward leaves the weights as they are.

    Merged adapters that are disabled are taken out of the weights by the next forward.
    """
    has_variant = bool(getattr(layer, "lora_variant", None))  # such as DoRA
    return not has_variant and not (layer.merged and layer.disable_adapters)


def _may_run(hook: Any) -> bool:
    """Whether a hook, or a forward put on a module, may see guesses."""
    return key_of(hook) in _allowed or is_written_by(RETAINS_NOTHING, hook)


def _code_of_class(kind: type[nn.Module]) -> Iterator[Any]:
    """A module class, what its objects run when called, its foreign methods, and functions that its forward names."""
    yield from (kind, kind.forward, kind.__call__)
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        # Those of a model as a whole, such as its generate(), are not of its forward.
        methods = () if base is PreTrainedModel or issubclass(kind, GenerationMixin) else vars(base).values()
        # Some of transformers' own are context managers.
        yield from (
            each for each in methods if isinstance(each, IN_PYTHON) and not is_written_by(AUTHORS_OF_METHODS, each)
        )
    forward = inspect.unwrap(kind.forward)
    if isinstance(forward, types.FunctionType):
        named = (forward.__globals__.get(name) for name in forward.__code__.co_names if name != EAGER)
        yield from (each for each in named if isinstance(each, (types.FunctionType, types.MethodType)))


def _foreign_attention(
    kinds: Iterable[type[nn.Module]], attentions: Collection[str | None]
) -> Iterator[tuple[Any, ...]]:
    """Foreign functions that compute a model's products, attention or masks, as (what it replaces, function)."""
    found: list[tuple[str, Any]] = [("linear", functional.linear), ("torch", functional.scaled_dot_product_attention)]
    for name in attentions:
        found.append((f"attention {name}", ALL_ATTENTION_FUNCTIONS.get(name)))
        found.append((f"mask {name}", ALL_MASK_ATTENTION_FUNCTIONS.get(name)))
    if "eager" in attentions:
        spaces = [getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in kinds]
        unique = {id(space): space for space in spaces if EAGER in space}  # two modules may have one name
        found.extend((f"eager attention of {space['__name__']}", space[EAGER]) for space in unique.values())
    for place, function in found:
        is_stock = function is STOCK.get(place, function)
        if function is not None and not (is_stock and is_written_by(AUTHORS, function)):
            yield place, function


def torch_modes() -> list[Any]:
    """The active modes of torch, which see and may change each operation; one that sets a default device does not."""
    return [mode for mode in (*function_modes(), *dispatch_modes()) if type(mode) is not DeviceContext]


def _single_hooks(hook: Any) -> Iterator[Any]:
    """The hooks in one of accelerate's, which may be a sequence of hooks."""
    inner = getattr(hook, "hooks", None)
    yield from chain.from_iterable(map(_single_hooks, inner)) if isinstance(inner, (tuple, list)) else (hook,)


def is_written_by(authors: frozenset[str], source: Any) -> bool:
    """Whether all visible code of a class or callable is defined in these packages."""
    return all(home in authors for home in _homes_of(source))


def _homes_of(source: Any) -> Iterator[str]:
    """The packages that define a class's or callable's code.

    A wrapper copies `__module__`, so its globals count as well.
    """
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
    yield from (package_of(name or "") for name in names)
    for each in inner:
        if each is not None:
            yield from _homes_of(each)


def package_of(module: str) -> str:
    """The top-level package of a module; torch.ao, which observes and records what passes, is one by itself."""
    return "torch.ao" if module.startswith("torch.ao.") else module.partition(".")[0]


def name_of(source: Any) -> str:
    """The name of a class or callable, without addresses."""
    while isinstance(source, functools.partial):
        source = source.func
    return str(getattr(source, "__qualname__", type(source).__qualname__))


class Held:
    """A weak reference to one object by identity, for use in keys. Not equal to a later object at the same address."""

    __slots__ = ("_hash", "_thing")

    def __init__(self, thing: Any) -> None:
        self._hash = id(thing)
        try:
            self._thing = weakref.ref(thing)
        except TypeError:  # no weak references possible: keeps the object alive
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
    """A key that is equal only for the same function, bound to the same object, with the same plain arguments."""
    if isinstance(source, types.MethodType):
        return Held(source.__self__), key_of(source.__func__)
    if isinstance(source, types.FunctionType):
        return Held(source), Held(source.__code__)  # autoreload replaces the code object of an existing function
    if type(source) is functools.partial:
        given = (*source.args, *chain.from_iterable(sorted(source.keywords.items())))
        return key_of(source.func), *(repr(each) if _is_plain(each) else Held(each) for each in given)
    return Held(source)


def _settings_of(part: nn.Module) -> Iterator[Hashable]:
    """What a foreign module holds that may decide what it computes, such as a switch, a gate, or a vector to add."""
    held = [vars(part)["_parameters"], vars(part)["_buffers"], vars(part), vars(type(part))]
    for name, value in chain.from_iterable(values.items() for values in held):
        if _is_plain(value):
            yield name, repr(value)
        elif type(value) in (Tensor, nn.Parameter) and has_numbers(value) and value.numel() <= MOST_COMPARED:
            yield name, value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, Held(value)


def has_numbers(tensor: Tensor) -> bool:
    """Whether the elements of a tensor can be read as they are."""
    is_other = tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return tensor.layout == torch.strided and not is_other


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, chain(value, value.values())))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in PLAIN


def is_gone(key: Hashable) -> bool:
    """Whether an object in the key no longer exists, so that the key can never occur again."""
    if isinstance(key, Held):
        return key.is_gone
    return isinstance(key, tuple) and any(map(is_gone, key))


def allow_hook(hook: T) -> T:
    """Allow a hook to run on blocks, which contain rejected guesses; otherwise its models use plain generate().

    hook: the function passed to `register_forward_hook`, `register_forward_pre_hook` and the like, or a forward that
    was put on a module (`lade.allow_hook(module.forward)`). A self-check on random tokens runs it first. What it does
    must depend neither on the number of tokens in a forward nor on the number of earlier forwards. Call this again
    after changing what the hook does. Returns the hook, so this works as a decorator. Raises TypeError if the hook is
    not callable and is no hook of accelerate.
    """
    if not callable(hook) and not hasattr(hook, "pre_forward"):  # hooks of accelerate are objects
        raise TypeError(f"hook must be callable, got {hook!r}")
    for key in [key for key in _allowed if is_gone(key)]:
        del _allowed[key]
    _allowed[key_of(hook)] = next(_numbers)
    return hook


_numbers = count()
_allowed: dict[Hashable, int] = {}  # hooks with the number of their permission: a new one causes a new self-check
