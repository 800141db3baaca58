"""Text as it is generated: each token's own characters at once, guessed ones in another colour. Floor 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.streamers import BaseStreamer

GUESSED, ORDINARY = "\033[32m", "\033[0m"  # green, and back
INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to


class AnswerStreamer(BaseStreamer):
    """Hands the text of each token to `write` when it comes; lade calls `put_guess` for tokens that had been guessed."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], color: bool, stop_string: str | None) -> None:
        """stop_string: what ends the answer and is not shown; it may come in several tokens."""
        self._tokenizer, self._write, self._color, self._stop = tokenizer, write, color, stop_string
        self._is_prompt = True  # generate() puts the prompt first
        self._tokens: list[int] = []  # the last one that was shown, which decides on spaces, and all since
        self._shown = ""  # their text as far as it was shown
        self._held = ""  # may be the beginning of the stop string
        self._is_begun = self._is_over = False

    def put(self, value: Any) -> None:
        """value: the prompt at first, [1, P]; then one token, [1]."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._add(int(value), is_guess=False)

    def put_guess(self, value: Any) -> None:
        """value: one token, [1]."""
        self._add(int(value), is_guess=True)

    def end(self) -> None:
        """Show what was held back."""
        text = self._decode(self._tokens)[len(self._shown) :]
        self._show(text, is_guess=False)
        if not self._is_over:
            self._paint(self._held, is_guess=False)

    def _add(self, token: int, is_guess: bool) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._shown):
            return
        self._show(text[len(self._shown) :], is_guess)
        self._tokens = [token]
        self._shown = self._decode(self._tokens)

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
        text = text if self._is_begun else text.lstrip()  # an answer's leading blanks are left out
        if text:
            self._is_begun = True
            self._write(f"{GUESSED}{text}{ORDINARY}" if is_guess and self._color else text)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the beginning of `stop`, without being all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
