"""The file of answers, written as they come, so that a stopped run can be resumed.

JSON lines: the settings first, then an answer or the scores of one, each with its question and method.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lade.commands.eval.answers import Answer

Key = tuple[str, str]  # question id, method


class BadResults(ValueError):
    """The file cannot be resumed; the message says why."""


class Results:
    """answers and scores: by question and method. In scores, `by` says with which limits they were found."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Reads the file at `path` where there is one. Raises BadResults when it is another run's; changes nothing."""
        self.path, self.settings = path, json.loads(json.dumps(settings))  # as it will be read again
        self.answers: dict[Key, Answer] = {}
        self.scores: dict[Key, dict[str, Any]] = {}
        self._good_bytes = 0  # of the file: complete lines
        if path.exists():
            self._read()

    def add_answer(self, answer: Answer) -> None:
        self.answers[answer.question, answer.method] = answer
        self._append({"answer": answer.as_dict()})

    def add_scores(self, key: Key, scores: dict[str, Any]) -> None:
        self.scores[key] = scores
        self._append({"scores": scores, "question": key[0], "method": key[1]})

    def _append(self, line: dict[str, Any]) -> None:
        """Append one whole line. The first call writes the settings, or removes a line that was left incomplete."""
        if self._good_bytes == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
            self._write({"settings": self.settings})
        elif self.path.stat().st_size > self._good_bytes:
            os.truncate(self.path, self._good_bytes)
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        with self.path.open("ab") as file:
            file.write(data)
        self._good_bytes += len(data)

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise BadResults(f"--out {self.path} cannot be read: {error}") from error
        self._good_bytes = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[: self._good_bytes].split(b"\n") if line]
            if lines:
                self._compare(lines[0]["settings"])
            for line in lines[1:]:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadResults):
                raise
            raise BadResults(f"--out {self.path} exists and is not a file of this program's; give another") from error
        if data and not lines and not data.startswith(b'{"settings"'):
            raise BadResults(f"--out {self.path} exists and is not a file of this program's; give another")

    def _take(self, line: dict[str, Any]) -> None:
        if "answer" in line:
            answer = Answer(**line["answer"])
            self.answers[answer.question, answer.method] = answer
        else:
            self.scores[line["question"], line["method"]] = line["scores"]

    def _compare(self, found: dict[str, Any]) -> None:
        names = [*self.settings, *(name for name in found if name not in self.settings)]
        differing = [name for name in names if found.get(name) != self.settings.get(name)]
        if differing:
            what = "; ".join(f"{name} was {found.get(name)!r}, now {self.settings.get(name)!r}" for name in differing)
            raise BadResults(
                f"--out {self.path} holds answers found with other settings: {what}. "
                "Give the same settings, another --out, or delete the file"
            )
