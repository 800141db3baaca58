"""Incremental detokenization, and text that is safe to print to a terminal."""

from __future__ import annotations

import re
from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to
# Escape sequences, and all control characters but tab and line feed.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    """Text without escape sequences and control characters, which could move the cursor or change the terminal's title.

    The printable characters of an incomplete or other sequence stay visible.
    """
    return CONTROL.sub("", text)


class Detokenizer:
    """Splits a text into the parts that each token completes; a character of several tokens belongs to the last."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []  # the last one given out, which decides on spaces, and all since
        self._given = ""  # their text as far as it was given out

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._decode()
        if text.endswith(INCOMPLETE) or len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        self._tokens = [token]
        self._given = self._decode()
        return new

    def rest(self) -> str:
        """The rest of the text at its end: the bytes of an unfinished character."""
        return self._decode()[len(self._given) :]

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)
        return text
