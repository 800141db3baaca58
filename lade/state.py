"""What outlives a call, by model: one registry, which `restore_all()` empties.

Knows nothing about what is kept in it. A module that keeps something of each model declares a slot:

    _tables: PerModel[Tables] = PerModel(Tables)
    _tables.of(model)  # made when it is first asked for, gone with the model

Floor 0.
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
    """A slot of each model's state. What is in it must not refer to the model, which would otherwise never be freed."""

    def __init__(self, make: Callable[[], T]) -> None:
        """make: what a model's slot holds at first."""
        self._make = make

    def of(self, model: Any) -> T:
        """What the slot of this model holds."""
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
        """Put something else into the slot of this model."""
        with _lock:
            _states.setdefault(model, {})[self] = value


def forget_all() -> None:
    """Empty all slots of all models. A call that is under way keeps what it has asked for."""
    with _lock:
        _states.clear()
