"""The text of tokens that come one by one, and what of it a terminal may see."""

from __future__ import annotations

import re
from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to
# Escape sequences, and all control characters but tab and line feed.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    """Text without what would move the cursor, set colours or titles, or clear the screen.

    Of a sequence in several pieces, or of another kind, what can be printed stays: nothing is hidden.
    """
    return CONTROL.sub("", text)


class Detokenizer:
    """Gives each token its part of the text, so that the parts make up the whole, characters of several tokens included."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[
            int
        ] = []  # the last one that was given out, whose neighbour decides on spaces, and all since
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
        """What is left at the end: the bytes of a character that was never finished."""
        return self._decode()[len(self._given) :]

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)
        return text
