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

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], color: bool) -> None:
        self._text, self._write, self._color = Detokenizer(tokenizer), write, color
        self._is_prompt = True  # generate() puts the prompt first
        self.text = ""  # shown so far, without colours

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

    def _show(self, text: str, is_guess: bool) -> None:
        text = for_terminal(text)
        text = text if self.text else text.lstrip()  # an answer's leading blanks are left out
        if text:
            self.text += text
            self._write(f"{GUESSED}{text}{ORDINARY}" if is_guess and self._color else text)
