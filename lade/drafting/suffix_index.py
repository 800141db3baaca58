"""Where the end of a text has occurred in it before, and what followed there, also after a difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIN_MATCH = 3  # shorter repetitions are too often accidental
MAX_MATCH = 21  # longer ones count as this long
MAX_PLACES = 16  # latest places remembered of each key
END = -2  # after each text of several; not a token id
MAX_DIFFERENCE = 16  # tokens that a copy may differ in, on either side, and still be resumed


class SuffixIndex:
    """One row's text with an index of its trigrams. A place is the index of the token after an occurrence."""

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
        places = reversed(self._places.get(tuple(text[-MIN_MATCH:]), ()))
        return longest_two(text, text, len(text), places, num_equal=MIN_MATCH)

    def following(self, place: int, count: int) -> list[int]:
        """The `count` tokens from a place on. At the text's end it goes on as if it were repeating itself."""
        found = self.tokens[place : place + count]
        return found if len(found) == count else (found * (count // len(found) + 1))[:count]


class Copy:
    """Where a text copies an earlier part of itself, so that it can be resumed after a difference."""

    def __init__(self, place: int) -> None:
        """place: of the next token of the earlier part."""
        self.place = place  # of the next token, or of the first that differs
        self.num_different = 0  # tokens of the text from the difference on

    def extend(self, text: Sequence[int], tokens: Sequence[int]) -> None:
        """text: up to `tokens`, which follow."""
        for token in tokens:
            if self.num_different or self.place >= len(text) or text[self.place] != token:
                self.num_different += 1
            else:
                self.place += 1

    def resumed(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """Where the earlier part may continue after a difference: places and numbers of equal tokens before them.

        The place where most of the text's last tokens are equal again, and the one where as many tokens were replaced.
        Nothing before a difference, nor after a long one.
        """
        if not 0 < self.num_different <= MAX_DIFFERENCE:
            return []
        end = len(text)
        equal = {}  # tokens, by place
        for place in range(self.place, min(self.place + MAX_DIFFERENCE + 1, end)):
            length = 0
            while length < min(self.num_different, place) and text[place - length - 1] == text[end - length - 1]:
                length += 1
            equal[place] = length
        replaced = self.place + self.num_different
        best = max(equal, key=equal.__getitem__, default=replaced)  # the first of them
        found = [(best, equal[best])] if equal.get(best) else []
        return found + [(replaced, 0)] * (replaced < end and replaced != best)


def longest_two(
    end: Sequence[int], tokens: Sequence[int], size: int, places: Iterable[int], oldest: int = 0, num_equal: int = 0
) -> list[tuple[int, int]]:
    """The longest occurrence of a text's end, and the longest that went on differently, as `SuffixIndex.matches`.

    tokens: where it may have occurred; place p lies at p % size, from place `oldest` on. places: after occurrences, of
    which at least `num_equal` tokens are known to be equal.
    """
    found: dict[int, tuple[int, int]] = {}  # next token -> its longest match and where
    longest = min(MAX_MATCH, len(end))
    for place in places:
        length, most = num_equal, min(longest, place - oldest)
        while length < most and tokens[(place - length - 1) % size] == end[-length - 1]:
            length += 1
        following = tokens[place % size]
        if length >= MIN_MATCH and following != END and length > found.get(following, (0, 0))[0]:
            found[following] = (length, place)
    return [(place, length) for length, place in sorted(found.values(), reverse=True)[:2]]
