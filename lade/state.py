"""Per-model state that outlives a call, in one registry that `restore_all()` empties.

A module that keeps something per model declares a slot:

    _tables: PerModel[Tables] = PerModel(Tables)
    _tables.of(model)  # created at the first use, freed with the model
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

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
            found: T = state[self]
        return found

    def all(self) -> list[T]:
        """What the slots of all models hold, where there is anything."""
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
