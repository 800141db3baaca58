"""Rows of a task's data, from a file or from the hub."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from lade.commands.eval.tasks import TASKS, Question, Row, Task


class BadData(ValueError):
    """The data cannot be read; the message says why and what to do."""


def load_questions(task_name: str, data: str | None, limit: int | None) -> tuple[list[Question], dict[str, str]]:
    """The first `limit` questions, and what the data was: its name and a digest of the rows that were read.

    data: a file, or a data set on the hub as name, name:configuration or name:configuration@split; None for the task's.
    Raises BadData.
    """
    task = TASKS[task_name]
    is_file = data is not None and (Path(data).is_file() or Path(data).suffix in (".jsonl", ".json"))
    rows = read_file(Path(data)) if is_file and data else read_hub(task_name, task, data)
    if not rows:
        raise BadData(f"--data {data} has no rows")
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]
    name = Path(data).name if is_file and data else (data or hub_name(task))
    chosen = rows[:limit]
    for number, row in enumerate(chosen):
        check_fields(row, number, task_name, task, name)
    return with_own_ids([read_row(row, number, task, name) for number, row in enumerate(chosen)]), {
        "data": name,
        "data_digest": digest,
    }


def read_file(path: Path) -> list[Row]:
    """JSON lines, or one JSON list as some tasks publish it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"--data must be a readable JSON file, got {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise BadData(f"--data {path} is not JSON: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also cut at characters inside of strings
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise BadData(f"--data {path}, line {number} is not JSON: {error}") from error
    return rows


def hub_name(task: Task) -> str:
    """The task's own data set, written as --data takes it."""
    if task.hub is None:
        return ""
    name, configuration, split = task.hub
    return f"{name}{':' + configuration if configuration else ''}@{split}"


def read_hub(task_name: str, task: Task, data: str | None) -> list[Row]:
    asked = data or hub_name(task)
    if not asked:
        raise BadData(f"--data FILE must be given for --task {task_name}: the hub has no such data set")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise BadData(
            f"--data must be an existing file or, where the package `datasets` is installed, a data set on the hub; "
            f"it is not installed here, and there is no file {asked!r}"
        ) from error
    path, _, split = asked.partition("@")
    name, _, configuration = path.partition(":")
    if task.hub and name == task.hub[0]:
        configuration = configuration or task.hub[1] or ""
    split = split or (task.hub[2] if task.hub else "test")
    try:
        return [dict(row) for row in datasets.load_dataset(name, configuration or None, split=split)]
    except Exception as error:  # whatever the hub, the network and the package come up with
        raise BadData(f"--data {asked!r} could not be loaded from the hub: {type(error).__name__}: {error}") from error


def check_fields(row: Any, number: int, task_name: str, task: Task, name: str) -> None:
    if not isinstance(row, dict):
        raise BadData(f"--data {name}, row {number + 1} must be a JSON object, got {str(row)[:80]!r}")
    for names in task.fields:
        if not any(one in row for one in names):
            raise BadData(
                f"--data {name}, row {number + 1} must have the field {' or '.join(names)} for --task {task_name}, "
                f"it has {', '.join(map(str, row))}"
            )


def read_row(row: Row, number: int, task: Task, name: str) -> Question:
    try:
        return task.read(row, number)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadData(f"--data {name}, row {number + 1} has a field of another kind than published: {error}") from error


def with_own_ids(questions: list[Question]) -> list[Question]:
    """Raises BadData where two questions have one id: their answers could not be told apart."""
    first: dict[str, int] = {}
    for question in questions:
        if question.id in first:
            raise BadData(
                f"--data has the id {question.id!r} twice, in rows {first[question.id] + 1} and {question.number + 1}"
            )
        first[question.id] = question.number
    return questions
