"""Prompts from a file of JSON lines, or the few that come with lade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
KEYS = ("prompt", "turns", "question")


def read_prompts(path: Path | None, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` objects of a file of JSON lines; lade's own for None.

    Each has a `prompt`, taken as it is, or `turns` or a `question`, of which the first is asked of a chat model. Raises
    ValueError naming the file and the line.
    """
    path = OWN_PROMPTS if path is None else Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be 1 or more, got {limit!r}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts must be a text file that can be read, got {str(path)!r}: {error}") from None
    rows = [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not rows:
        raise ValueError(f"--prompts must have at least one line, got the empty file {str(path)!r}")
    return rows


def _read(path: Path, number: int, line: str) -> dict[str, Any]:
    place = f"--prompts must be JSON lines with one of {', '.join(KEYS)}, {str(path)!r} line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict) or not any(key in row for key in KEYS):
        raise ValueError(f"{place} has {sorted(row) if isinstance(row, dict) else type(row).__name__}")
    if not _text(row).strip():
        raise ValueError(f"{place} is empty")
    return row


def _text(row: dict[str, Any]) -> str:
    if "prompt" in row:
        return str(row["prompt"])
    return str(row["question"] if "question" in row else "".join(map(str, row["turns"][:1])))


def as_inputs(rows: list[dict[str, Any]], tokenizer: Any, device: Any) -> list[dict[str, Tensor]]:
    """The inputs of generate() for each row: ids and mask, [1, P]. Questions go through the chat template, if any."""
    inputs = []
    for row in rows:
        text, is_chat = _text(row), "prompt" not in row and bool(tokenizer.chat_template)
        if is_chat:
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not is_chat)
        inputs.append({name: encoded[name].to(device) for name in ("input_ids", "attention_mask")})
    return inputs
