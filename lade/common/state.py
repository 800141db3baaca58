"""Per-model state that outlives a call, in one registry that `restore_all()` empties; and the model's own state.

A module that keeps something per model declares a slot:

    _tables: PerModel[Tables] = PerModel(Tables)
    _tables.of(model)  # created at the first use, freed with the model
"""

from __future__ import annotations

import ctypes
import operator
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
FIXED = (bool, int, float, str, type(None))
PLAIN = (*FIXED, Tensor)
CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
OWN_DICTIONARIES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
MOST_COPIED = 2**20  # elements of a tensor: larger ones are tables and quantized weights, which no forward writes to

_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[Any, dict[PerModel[Any], Any]] = weakref.WeakKeyDictionary()


class PerModel(Generic[T]):
    """A slot of per-model state. Its value must not refer to the model, which would then never be freed."""

    def __init__(self, make: Callable[[], T]) -> None:
        """make: creates a model's initial value."""
        self._make = make

    def of(self, model: Any) -> T:
        """The value for this model."""
        with _lock:
            state = _states.setdefault(model, {})
            if self not in state:
                state[self] = self._make()
            return state[self]

    def all(self) -> list[T]:
        """The values of all models that have one."""
        with _lock:
            return [state[self] for state in _states.values() if self in state]

    def set(self, model: Any, value: T) -> None:
        """Replace the value for this model."""
        with _lock:
            _states.setdefault(model, {})[self] = value


def forget_all() -> None:
    """Remove all values of all models. Running calls keep the objects they already have."""
    with _lock:
        _states.clear()


@contextmanager
def keeping_state(model: Any) -> Iterator[None]:
    """Restore the buffers and plain attributes of all modules afterwards: for forwards that plain generate() lacks.

    Rotary embeddings keep frequencies that decide later calls, and modules may count or collect, in containers inside
    of containers, too. What a forward changes elsewhere, as in the closure of a hook, is not restored.
    """
    before = [(part, ModuleState(part)) for part in model.modules()]
    try:
        yield
    finally:
        for part, state in before:
            state.restore(part)


class ModuleState:
    """Buffers and plain attributes of one module."""

    def __init__(self, part: Any) -> None:
        own = vars(part)
        self._weights = [*own["_parameters"].values()]
        self._merged = _merged_adapters(own)
        self._buffers = dict(own["_buffers"])
        self._plain = {name: value for name, value in own.items() if _is_plain(name, value)}
        values = [*self._buffers.values(), *self._plain.values()]
        self._contents = [(container, container.copy()) for container in _containers(values)]
        tensors = (value for value in values if isinstance(value, Tensor) and not value.is_meta)
        self._copies = [(tensor, tensor.clone()) for tensor in tensors if tensor.numel() <= MOST_COPIED]

    def is_of(self, part: Any) -> bool:
        """Whether the module's buffers and attributes are the same objects, or equal numbers, and hold the same."""
        now = ModuleState(part)
        pairs = ((self._buffers, now._buffers), (self._plain, now._plain))
        return (
            all(_holds_equal(*pair) for pair in pairs)
            and all(_holds(*pair) for pair in self._contents)
            and all(_is_equal(*pair) for pair in self._copies)
        )

    def restore(self, part: Any) -> None:
        own = vars(part)
        is_same = all(map(operator.is_, own["_parameters"].values(), self._weights))
        if not is_same or self._merged != _merged_adapters(own):
            return  # the first forward has packed the weights, or taken adapters out of them, which attributes tell
        _restore(own["_buffers"], own["_buffers"], self._buffers)
        _restore(own, [name for name, value in own.items() if _is_plain(name, value)], self._plain)
        for container, content in self._contents:
            if not _holds(container, content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, copy in self._copies:
            if not _is_equal(tensor, copy):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(copy)


def _containers(values: Iterable[Any]) -> list[Any]:
    """The containers among some values, and those inside of them."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if type(value) in CONTAINERS and id(value) not in found:
            found[id(value)] = value
            left.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def _holds(container: Any, content: Any) -> bool:
    """Whether a container has the same objects as a copy of it, which need not be comparable."""
    if isinstance(container, set):
        return bool(container == content)
    both = (chain.from_iterable(part.items()) if isinstance(part, dict) else part for part in (container, content))
    return len(container) == len(content) and all(map(operator.is_, *both))


def _holds_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects, or equal ones that cannot change."""
    return one.keys() == other.keys() and all(
        value is other[name] or (isinstance(value, FIXED) and value == other[name]) for name, value in one.items()
    )


def _merged_adapters(own: dict[str, Any]) -> list[Any]:
    """Names of adapters of peft that the weights of a layer contain."""
    found = own.get("merged_adapters")
    return found.copy() if isinstance(found, list) else []


def _is_equal(one: Tensor, other: Tensor) -> bool:
    try:  # not by the version: batch norm does not count its writes
        return torch.equal(one, other)
    except NotImplementedError:  # some dtypes
        return False


def _restore(own: dict[str, Any], names: Iterable[str], before: dict[str, Any]) -> None:
    """Touches only what has changed, since other threads may run the model."""
    for name in [name for name in names if name not in before]:
        del own[name]
    for name, value in before.items():
        if own.get(name, before) is not value:
            own[name] = value


def _is_plain(name: str, value: Any) -> bool:
    return name not in OWN_DICTIONARIES and (isinstance(value, PLAIN) or type(value) in CONTAINERS)


def return_memory() -> None:
    """Give the memory of dropped values back to the system, where the C library keeps it: packed weights are large."""
    with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        ctypes.CDLL(None).malloc_trim(0)
