"""Calls a function when a program has imported certain modules, without importing them itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_after_import(names: Iterable[str], action: Callable[[], None], needed: str) -> None:
    """Call `action` once, as soon as all modules `names` are fully imported; at once if they are already.

    needed: a package that the action needs. While one of its modules is being imported, and is what imports `names`,
    the action waits for its end: before, it would find half a module.
    """
    pending = {name for name in names if name not in sys.modules}
    if pending:
        sys.meta_path.insert(0, _Watcher(pending, action, f"{needed}."))
    else:
        action()


class _Watcher(MetaPathFinder):
    """Delegates to the other finders, and notices when the modules it waits for have been executed."""

    def __init__(self, pending: set[str], action: Callable[[], None], prefix: str) -> None:
        self._pending, self._action, self._prefix = pending, action, prefix

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._pending and not name.startswith(self._prefix):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            self._report_end(spec.loader, name)
        return spec

    def _report_end(self, loader: Any, name: str) -> None:
        """Wrap this loader's exec_module once; the module still sees the same `__loader__`."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            is_needed = name.startswith(self._prefix)
            if is_needed:
                self._pending.add(name)
            try:
                run(module)
            except BaseException:
                if is_needed:  # it is not waited for: the next module that can be imported calls the action
                    self._pending.discard(name)
                raise
            self._pending.discard(name)
            if not self._pending and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action()

        loader.exec_module = exec_module
