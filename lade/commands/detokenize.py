"""The text of tokens that come one by one. Floor 7."""

from __future__ import annotations

from typing import Any

INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to


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
