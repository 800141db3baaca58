"""Where the end of a text has occurred in it before, and what followed there."""

from __future__ import annotations

from collections.abc import Iterable

MIN_MATCH = 3  # shorter repetitions are too often by chance
MAX_MATCH = 21  # longer ones count as this long
MAX_PLACES = 16  # latest places remembered of each key


class SuffixIndex:
    """One row's text with an index of its trigrams. A place is the index of the token behind an occurrence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.tokens
        for token in tokens:
            place = len(text)
            text.append(token)
            if place >= MIN_MATCH:
                places = self._places.setdefault(tuple(text[place - MIN_MATCH : place]), [])
                places.append(place)
                if len(places) > MAX_PLACES:
                    del places[0]

    def matches(self) -> list[tuple[int, int]]:
        """The longest earlier occurrence of the text's end, and the longest that went on differently.

        Returns up to two pairs of place and match length (MIN_MATCH to MAX_MATCH); of equally long ones the latest.
        """
        text = self.tokens
        found: dict[int, tuple[int, int]] = {}  # next token -> its longest match and where
        for place in reversed(self._places.get(tuple(text[-MIN_MATCH:]), ())):
            length = MIN_MATCH
            while length < min(MAX_MATCH, place) and text[place - length - 1] == text[-length - 1]:
                length += 1
            if length > found.get(text[place], (0, 0))[0]:
                found[text[place]] = (length, place)
        return longest_two(found)

    def following(self, place: int, count: int) -> list[int]:
        """The `count` tokens from a place on. At the text's end it goes on as if it were repeating itself."""
        found = self.tokens[place : place + count]
        return found if len(found) == count else (found * (count // len(found) + 1))[:count]


def longest_two(found: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """Place and length of the longest matches. found: by the token that follows, the match's length and place."""
    return [(place, length) for length, place in sorted(found.values(), reverse=True)[:2]]
