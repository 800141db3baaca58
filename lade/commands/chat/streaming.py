"""Streams an answer token by token, with accepted guesses in another colour.

Control characters in the model's text are left out: they could move the cursor or change the terminal's title.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lade.commands.detokenize import Detokenizer, for_terminal
from lade.common.compat import BaseStreamer

GUESSED, ORDINARY = "\033[32m", "\033[0m"  # green, and back


class AnswerStreamer(BaseStreamer):
    """Passes the text of each token to `write` as it arrives; lade calls `put_guess` for accepted guesses."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], color: bool, stop_string: str | None) -> None:
        """stop_string: what ends the answer and is not shown; it may come in several tokens."""
        self._text, self._write, self._color, self._stop = Detokenizer(tokenizer), write, color, stop_string
        self._is_prompt = True  # generate() puts the prompt first
        self._held = ""  # may be the beginning of the stop string
        self.is_begun = self._is_over = False

    def put(self, value: Any) -> None:
        """value: the prompt at first, [1, P]; then one token, [1]."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._show(self._text.add(int(value)), is_guess=False)

    def put_guess(self, value: Any) -> None:
        """value: one token, [1]."""
        self._show(self._text.add(int(value)), is_guess=True)

    def end(self) -> None:
        """Show what was held back."""
        self._show(self._text.rest(), is_guess=False)
        if not self._is_over:
            self._paint(self._held, is_guess=False)

    def _show(self, text: str, is_guess: bool) -> None:
        """Hand on what cannot belong to the stop string."""
        if self._is_over:
            return
        before, found, _ = (self._held + text).partition(self._stop) if self._stop else (self._held + text, "", "")
        self._is_over = bool(found)
        keep = 0 if found else overlap(before, self._stop or "")
        self._held = before[len(before) - keep :]
        self._paint(before[: len(before) - keep], is_guess)

    def _paint(self, text: str, is_guess: bool) -> None:
        text = for_terminal(text)
        text = text if self.is_begun else text.lstrip()  # an answer's leading blanks are left out
        if text:
            self.is_begun = True
            self._write(f"{GUESSED}{text}{ORDINARY}" if is_guess and self._color else text)


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
