"""One text of a batch, for guessing: where its end has occurred before, and which passage it is copying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lade.drafting.acceptance import RESUMED_KINDS, STORE_KINDS, SUFFIX_KINDS
from lade.drafting.growth import Growth, Pointer, Source
from lade.drafting.nearest import UNKNOWN, Context, Contexts
from lade.drafting.suffix_index import MAX_MATCH, Copy, SuffixIndex
from lade.drafting.text_store import TextStore

LONG_COPY = 13  # matches of at least so many tokens are resumed after a difference


class DraftedText:
    """growth: the guesses after its end. sibling: the row of a wrong guess in the place of its root. context: of its
    last token, None if it is not known."""

    def __init__(self, ids: list[int]) -> None:
        """ids: of the prompt."""
        self._index = SuffixIndex()
        self._index.extend(ids)
        self._prompt_length = len(ids)
        self._copy: Copy | None = None  # the passage that it has copied lately
        self.num_generated = 0
        self.growth = Growth()
        self.sibling: Source | None = None
        self.context: Context | None = None

    @property
    def tokens(self) -> list[int]:
        """All ids, the prompt's included."""
        return self._index.tokens

    @property
    def to_keep(self) -> list[int]:
        """What later calls may repeat: the generated tokens, after the end of the prompt, by which they are found."""
        return self.tokens[max(0, self._prompt_length - MAX_MATCH) :]

    def begin_step(self, num_generated: int) -> None:
        self.growth, self.num_generated = Growth(), num_generated

    def take_contexts(self, path: list[int], after: Contexts | None) -> tuple[Contexts, Contexts] | None:
        """Take over what a step says of contexts, before its tokens are committed. path: the accepted guesses.

        after: the contexts after the root and after each guess, [1 + n, CONTEXT_SIZE], None if they are not known.
        Returns those of the root and of each guess themselves, and `after`.
        """
        root = UNKNOWN if self.context is None else self.context
        self.context = None if after is None else after[path[-1] + 1 if path else 0]
        if after is None:
            return None
        return np.concatenate([root[None], after[[parent + 1 for parent in self.growth.parents]]]), after

    def extend(self, committed: list[int]) -> None:
        """Append tokens to the text."""
        if self._copy is not None:
            self._copy.extend(self.tokens, committed)
        self._index.extend(committed)

    def pointers(self, texts: TextStore | None, count: int) -> list[Pointer]:
        """At most `count` tokens each of what followed where the text's end has occurred before. texts: of other calls.

        A long match is remembered as what the text copies, to be resumed after a difference.
        """
        own = self._index.matches()
        found = _followed(self._index, own, SUFFIX_KINDS, count)
        if own and own[0][1] >= LONG_COPY:
            self._copy = Copy(own[0][0])
        elif self._copy is not None:
            places = [place for place, _ in own]
            resumed = [match for match in self._copy.resumed(self.tokens) if match[0] not in places]
            found += _followed(self._index, resumed, RESUMED_KINDS, count)
        if texts is not None:
            longest = own[0][1] if own else 0
            others = _followed(texts, texts.matches(self.tokens[-MAX_MATCH:]), STORE_KINDS, count)
            found += [pointer for pointer in others if pointer.length > longest]
        return found


def _followed(
    texts: SuffixIndex | TextStore, matches: list[tuple[int, int]], kinds: Sequence[tuple[int, ...]], count: int
) -> list[Pointer]:
    """At most `count` tokens after each match. kinds: of each match."""
    found = zip(matches, kinds, strict=False)
    return [Pointer(texts.following(place, count), 0, length, by_length) for (place, length), by_length in found]
