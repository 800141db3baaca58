"""Texts of earlier calls, bounded, and where the end of another text has occurred in them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.drafting.suffix_index import END, KEY_LENGTH, MAX_PLACES, Match, longest_match

NOWHERE = -1


class TextStore:
    """The last `max_tokens` tokens of texts, with an index of their trigrams.

    A place counts tokens from the first that was ever added. A token, and the previous place of the same trigram, are
    stored at place % max_tokens: new ones overwrite the oldest, so adding takes constant time and memory is bounded.
    """

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: each takes 24 to 32 bytes, allocated at the start."""
        self.max_tokens = max_tokens
        self._lock = threading.Lock()  # calls in several threads may share a store
        self._tokens = array("q", [END]) * max_tokens
        self._before = array("q", [NOWHERE]) * max_tokens  # the previous place of the trigram that ends there
        self._latest = array("q", [NOWHERE]) * (1 << (max_tokens - 1).bit_length())  # by the hash of a trigram
        self._end = 0

    def __len__(self) -> int:
        """Tokens, with one after each text."""
        return min(self._end, self.max_tokens)

    def add(self, text: Sequence[int]) -> None:
        """Add a text of ids."""
        size = self.max_tokens
        with self._lock:
            for number, token in enumerate([*text, END]):
                place, at = self._end, self._end % size
                self._tokens[at], self._before[at] = token, NOWHERE
                if number >= KEY_LENGTH:
                    key = self._key(text[number - KEY_LENGTH : number])
                    self._before[at], self._latest[key] = self._latest[key], place
                self._end = place + 1

    def match(self, text: Sequence[int]) -> Match | None:
        """The longest occurrence of a text's end; none at the end of a stored text."""
        oldest = self._end - len(self)
        return longest_match(text, self._tokens, self.max_tokens, self._places(text, oldest), oldest)

    def _places(self, text: Sequence[int], oldest: int) -> Iterator[int]:
        """The latest places after the text's last trigram, or after one of the same hash."""
        place = self._latest[self._key(text[-KEY_LENGTH:])] if len(text) >= KEY_LENGTH else NOWHERE
        for _ in range(MAX_PLACES):
            if place < oldest + KEY_LENGTH:
                return
            yield place
            place = self._before[place % self.max_tokens]

    def following(self, place: int, count: int) -> list[int]:
        """At most `count` tokens from a place on, up to the end of that text."""
        tokens, size = self._tokens, self.max_tokens
        found = [tokens[at % size] for at in range(place, min(place + count, self._end))]
        return found[: found.index(END)] if END in found else found

    def as_array(self) -> npt.NDArray[np.int32]:
        """All texts, the oldest first, END after each. The beginning of the first may be missing."""
        with self._lock:
            places = range(self._end - len(self), self._end)
            return np.array([self._tokens[place % self.max_tokens] for place in places], dtype=np.int32)

    def restore(self, tokens: npt.NDArray[Any]) -> None:
        """Add what `as_array` gave."""
        for text in np.split(tokens, np.flatnonzero(tokens == END) + 1):
            if len(text):
                self.add([token for token in text.tolist() if token != END])

    def _key(self, trigram: Sequence[int]) -> int:
        return hash(tuple(trigram)) & len(self._latest) - 1
