"""Finds earlier occurrences of the end of a text, and the tokens that followed them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

KEY_LENGTH = 3  # tokens of the index's keys; shorter repetitions are looked up in the text itself
MAX_MATCH = 21  # longer ones count as this long
MAX_PLACES = 16  # remembered of each key: the first and the latest
END = -2  # after each text of several; not a token id


class Match(NamedTuple):
    """An occurrence of a text's end: the place of the token after it, and how many tokens are equal."""

    place: int
    length: int


class SuffixIndex:
    """One row's text with an index of its trigrams. A place is the index of the token after an occurrence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # of a trigram
        self._first: dict[tuple[int, ...], int] = {}  # place of one token or two

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.tokens
        for token in tokens:
            place = len(text)
            text.append(token)
            for length in range(1, min(KEY_LENGTH, place + 1)):
                self._first.setdefault(tuple(text[place - length : place]), place)
            if place >= KEY_LENGTH:
                places = self._places.setdefault(tuple(text[place - KEY_LENGTH : place]), [])
                places.append(place)
                if len(places) > MAX_PLACES:
                    del places[1]

    def match(self) -> Match | None:
        """The longest earlier occurrence of the text's end, of equally long ones the first; None if there is none."""
        text = self.tokens
        places = self._places.get(tuple(text[-KEY_LENGTH:]), ())
        found = longest_match(text, text, len(text), places, num_equal=KEY_LENGTH)
        for length in range(KEY_LENGTH - 1, 0, -1):
            if found is None and length <= len(text) and tuple(text[-length:]) in self._first:
                found = Match(self._first[tuple(text[-length:])], length)
        return found

    def following(self, place: int, count: int) -> list[int]:
        """The `count` tokens from a place on. At the text's end it goes on as if it were repeating itself."""
        found = self.tokens[place : place + count]
        return found if len(found) == count else (found * (count // len(found) + 1))[:count]


def longest_match(
    end: Sequence[int], tokens: Sequence[int], size: int, places: Iterable[int], oldest: int = 0, num_equal: int = 0
) -> Match | None:
    """The longest occurrence of a text's end of at least KEY_LENGTH tokens, the first of equally long ones.

    tokens: where it may have occurred; place p lies at p % size, from place `oldest` on. places: after occurrences, of
    which at least `num_equal` tokens are known to be equal.
    """
    best = None
    longest = min(MAX_MATCH, len(end))
    for place in places:
        length, most = num_equal, min(longest, place - oldest)
        while length < most and tokens[(place - length - 1) % size] == end[-length - 1]:
            length += 1
        is_long = length >= KEY_LENGTH and tokens[place % size] != END
        if is_long and (best is None or length > best.length):
            best = Match(place, length)
    return best
