"""Predicted outputs: a text that a call's answer is expected to resemble, such as the file that it edits.

It is one more text to find guesses in, for the calls inside `lade.enabled(PREDICTION=...)` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lade.common.request import Request
from lade.drafting.suffix_index import KEY_LENGTH, MAX_MATCH, Match
from lade.drafting.text_store import TextStore

RULE = "a list or tensor of token ids for all prompts, or a list of one for each prompt"
BEGIN = -3  # before a prediction and before the answer, KEY_LENGTH times, so that their beginnings match; no token id

Predictions = tuple[tuple[int, ...], ...]  # one for all prompts, or one for each
_current: ContextVar[Predictions | None] = ContextVar("prediction", default=None)


class Prediction(TextStore):
    """The text that one row's answer is expected to resemble."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        super().__init__(KEY_LENGTH + len(ids) + 1)
        self.add([BEGIN] * KEY_LENGTH + list(ids))

    def match(self, text: Sequence[int]) -> Match | None:
        """The place in the prediction that matches the end of the answer. text: its latest generated tokens."""
        return super().match([*[BEGIN] * KEY_LENGTH, *text][-MAX_MATCH:])


@contextmanager
def predicted(value: Any) -> Iterator[None]:
    """Let this thread's calls look for guesses in a text, or in one for each prompt. None leaves it as it is.

    Raises ValueError for what holds no token ids.
    """
    token = _current.set(_current.get() if value is None else _checked(value))
    try:
        yield
    finally:
        _current.reset(token)


def predictions_for(request: Request, num_tokens: int) -> Predictions | None:
    """The prediction of each row of a call; None without any.

    num_tokens: ids that the model has an embedding for. Raises ValueError for other ids, or a wrong number of texts.
    """
    found = _current.get()
    if found is None:
        return None
    num_copies = request.generation_config.num_return_sequences or 1
    num_prompts = request.batch_size // num_copies
    if len(found) not in (1, num_prompts):
        raise ValueError(f"PREDICTION must be {RULE}, got {len(found)} for {num_prompts} prompts")
    unknown = [token for text in found for token in text if token >= num_tokens]
    if unknown:
        raise ValueError(f"PREDICTION must hold ids from 0 to {num_tokens - 1}, got {unknown[0]}")
    return found * request.batch_size if len(found) == 1 else tuple(text for text in found for _ in range(num_copies))


def _checked(value: Any) -> Predictions:
    rows = _as_list(value)
    if isinstance(rows, list):
        rows = [_as_list(row) for row in rows]
        rows = rows if any(isinstance(row, list) for row in rows) else [rows]
        if all(isinstance(row, list) and all(type(token) is int and token >= 0 for token in row) for row in rows):
            return tuple(map(tuple, rows))
    raise ValueError(f"PREDICTION must be {RULE}, got {value!r:.80}")


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value.tolist() if hasattr(value, "tolist") else value
