"""Rows of one stage in a JSON file, written anew after each row, so that whatever ends a stage takes no row with it.
Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_json(path: Path, content: Any) -> None:
    """All or nothing: a reader finds the old file or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_json(path: Path) -> Any:
    """None where there is no such file, or none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Record:
    """The rows of a stage, by key; those that an earlier run has finished are there already.

    A row is a dict of figures. `passed` in it says whether a check held; `error` that the row could not be made.
    """

    def __init__(self, path: Path, told: Callable[[], Row] = dict) -> None:
        """told: what else to note with each row, asked when the row is done."""
        self._path, self._told = path, told
        found = read_json(path)
        rows = found.get("rows", {}) if isinstance(found, dict) else {}
        self.rows: dict[str, Row] = {key: row for key, row in rows.items() if row.get("passed") is not False}

    def add(self, key: str, **figures: Any) -> Row:
        """Note a row, in place of an earlier one of this key."""
        row = self.rows[key] = figures | self._told()
        write_json(self._path, {"rows": self.rows})
        print(f"{key}: {json.dumps(row)}", flush=True)
        return row

    def measure(self, key: str, function: Callable[[], Row]) -> Row:
        """The row of this key: what `function` returns, unless an earlier run has it. An exception makes a row of its
        own."""
        if key in self.rows:
            return self.rows[key]
        began = time.perf_counter()
        try:
            figures = function()
        except (Exception, SystemExit) as problem:  # the second is how a benchmark refuses
            print_exception(problem)
            figures = {"passed": False, "error": first_line(problem)}
        return self.add(key, **figures, seconds=round(time.perf_counter() - began, 3))


def first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".split("\n", 1)[0][:300]


def print_exception(problem: BaseException) -> None:
    """To the stage's log."""
    import traceback

    traceback.print_exception(problem)
