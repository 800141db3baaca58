"""Growing a token tree best guess first.

A node's probability is its own times its parent's, so no child is likelier than its parent, and the best tree of n
nodes consists of the n likeliest nodes. A heap returns them one by one. Of each row only the next guess is in the heap.
A node is expanded only once a child with LIKELY_CHILD of its probability would be the best candidate in the heap. All
waiting nodes are then expanded together, so that their rows can be processed as one array operation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp
from typing import Any, NamedTuple

import numpy as np

from lade.block_size.policy import EarlyStop
from lade.drafting.acceptance import PAIR, PROBE, SHARPNESS, SINGLE, VOCABULARY, Acceptance, nearest_kind
from lade.drafting.base import FOREIGN
from lade.drafting.coming_draws import Draws, races
from lade.drafting.memory import Memory
from lade.drafting.nearest import Context
from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import (
    BIN_EDGES,
    BIN_OF_GRADE,
    GRADE_BITS,
    GRADE_MIDDLES,
    KEY_SHIFT,
    ROW_LENGTH,
    PackedRow,
)
from lade.drafting.vocabulary import NO_ROWS, RowsAlone

BOTH_ROWS = 0.3  # at or above this chance of a node, the row of its token is looked up beside the row of its pair
SIMILAR_ROWS = 0.1  # the same for rows of its token that were seen in similar contexts
LIKELY_CHILD = 0.6  # a node is looked behind where a child of this chance, relative to its own, would be the next guess
GREEDY_LENGTH = 8  # ids of a row that are guessed where the likeliest token is chosen

ABOVE_ROOT = -2  # in place of the parent of the root, which is -1

Edge = tuple[int, int]  # parent, token
Source = tuple[PackedRow, int]  # a row and the kind of its rarest guess
Guess = tuple[float, int, int]  # chance, token, kind


class Pointer(NamedTuple):
    """Where an earlier occurrence of a text's end goes on."""

    following: list[int]  # what followed there
    number: int  # of the next token of it
    length: int  # of the match, with what was followed since
    kinds: tuple[int, ...]  # by length


class Looked(NamedTuple):
    """A row that says what may follow a node."""

    node: int
    chance: float  # of the node
    first: int  # the kind of the row's rarest guess
    row: PackedRow


_MIDDLES = np.array(GRADE_MIDDLES, dtype=np.float32)
_GRADE = (1 << GRADE_BITS) - 1


@dataclass(slots=True)
class Growth:
    """One row's tree, best guess first. Nodes as in TokenTree; kinds as in lade/drafting/acceptance.py."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # of being accepted, each with all its ancestors
    depths: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, kind: int, chance: float, depth: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.chances.append(chance)
        self.depths.append(depth)

    def hits(self, path: list[int], last: int) -> list[int]:
        """Nodes that were right: the accepted ones, and one more that may hold the last committed token.

        Such a one is not accepted where another row of the batch missed, or the text ended.
        """
        end = path[-1] if path else -1
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == end and token == last:
                return [*path, node]
        return path

    def sibling(self, parent: int) -> int | None:
        """The likeliest guess behind a node, None where there is none but probes."""
        siblings = (node for node, above in enumerate(self.parents) if above == parent and self.kinds[node] != PROBE)
        return next(siblings, None)

    def by_chance(self) -> Growth:
        """The same tree with its likeliest nodes first. Parents stay in front of their children."""
        order = sorted(range(len(self.tokens)), key=self.chances.__getitem__, reverse=True)  # stable
        place = {node: index for index, node in enumerate(order)} | {-1: -1}
        found = Growth(*([column[node] for node in order] for column in self._columns()))
        found.parents = [place[parent] for parent in found.parents]
        return found

    def cut(self, size: int) -> None:
        """Keep the first nodes only. Parents come first, so what is left is a tree."""
        for column in self._columns():
            del column[size:]

    def _columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.parents, self.kinds, self.chances, self.depths


class Grower:
    """What may follow in one text, and the likeliest tree of it."""

    def __init__(
        self,
        memory: Memory,
        acceptance: Acceptance,
        rows_alone: RowsAlone | None,
        text: list[int],
        context: Context | None,
        draws_at: Callable[[int], Draws | None],
        sources: Sequence[Source],
        pointers: Sequence[Pointer],
    ) -> None:
        """rows_alone: what the model says without any text before it, None if that is not known. text: ids up to the
        root.

        context: of the root, None if it is not known.
        draws_at: the draws of a token at some distance from the root; None for greedy, or where they are not known.
        sources: more rows behind the root. pointers: what followed where the text's end has occurred before.
        """
        self._memory = memory
        self._alone = NO_ROWS if rows_alone is None else rows_alone
        self._text, self._draws_at, self._chances = text, draws_at, acceptance.chances
        self._sources, self._pointers = list(sources), list(pointers)
        self._growth = Growth()  # nodes in the order in which they were found
        self._known: set[Edge] = set()  # of these nodes
        self._behind: dict[Edge, Pointer] = {}  # what follows an earlier occurrence
        self._drawn: dict[int, Draws | None] = {}  # by distance from the root
        # The context after a node, and how similar a row found by it may be called at most.
        self._contexts: dict[int, tuple[Context, float]] = {} if context is None else {ABOVE_ROOT: (context, 1.0)}
        self._num_pushed = 0
        # The next guess of each source: -chance, order, token, parent, kind, and the guesses after it.
        self._heap: list[tuple[float, int, int, int, int, Iterator[Guess]]] = []

    def grow(self, max_depth: int, size: int, least: float, stop: EarlyStop | None) -> tuple[Growth, bool]:
        """The likeliest tree of at most `size` nodes, none of whose chance is below `least`.

        Of each row guesses are looked at in order, up to the first below `least`. Chances are learned by kind, so that
        a later one may be above it; it is left out.

        stop: asked for each size. Returns also whether it ended the growth.
        """
        heap, growth, known = self._heap, self._growth, self._known
        chances, depths = growth.chances, growth.depths
        waiting: list[int] = []  # nodes that were not looked behind
        expected, is_stopped = 0.0, False
        if size > 0 and max_depth > 0:
            for pointer in self._pointers:
                self._follow(pointer, -1, 1.0, least)
            self._look_behind([-1], least)
            is_stopped = stop is not None and stop.update(0, 0.0, -heap[0][0] if heap else 0.0)
        while len(chances) < size and not is_stopped:
            if waiting and (not heap or -heap[0][0] <= LIKELY_CHILD * chances[waiting[0]]):
                self._look_behind(waiting, least)
                waiting.clear()
                continue
            if not heap:
                break
            negative, _, token, parent, kind, guesses = heappop(heap)
            self._push_next(guesses, parent, least)
            if (parent, token) in known:  # a surer source has said the same
                continue
            known.add((parent, token))
            chance, depth = -negative, 1 if parent < 0 else depths[parent] + 1
            growth.add(token, parent, kind, chance, depth)
            expected += chance
            is_stopped = stop is not None and stop.update(len(chances), expected, chance)
            if depth < max_depth and chance * LIKELY_CHILD >= least:
                waiting.append(len(chances) - 1)
        return growth.by_chance(), is_stopped

    def _look_behind(self, waiting: Sequence[int], least: float) -> None:
        """Put what may follow some nodes into the heap: of each of its sources the surest guess."""
        growth, text = self._growth, self._text
        rows: list[Looked] = []
        draws: list[Draws] = []
        for node in waiting:
            if node < 0:
                before, token, chance, depth = text[-2] if len(text) > 1 else -1, text[-1], 1.0, 1
                found = self._rows(node, ABOVE_ROOT, before, token, chance) + self._sources
            else:
                token, parent, chance = growth.tokens[node], growth.parents[node], growth.chances[node]
                before, depth = text[-1] if parent < 0 else growth.tokens[parent], growth.depths[node] + 1
                found = self._rows(node, parent, before, token, chance)
                if (parent, token) in self._behind:
                    self._follow(self._behind[parent, token], node, chance, least)
            if not found:
                continue
            rows += [Looked(node, chance, first, row) for row, first in found]
            if depth not in self._drawn:
                self._drawn[depth] = self._draws_at(depth)
            numbers = self._drawn[depth]
            if numbers is not None:
                draws += [numbers] * len(found)
        if draws:  # of all nodes, or of none
            self._race(rows, draws, least)
        else:
            for node, chance, first, row in rows:
                self._push_next(self._likeliest(chance, first, row[:GREEDY_LENGTH].tolist()), node, least)

    def _push_next(self, guesses: Iterator[Guess], parent: int, least: float) -> None:
        """Put the next guess of a source into the heap."""
        for chance, token, kind in guesses:
            if chance < least:
                return
            if (parent, token) not in self._known:
                self._num_pushed += 1  # of guesses that are as likely the first one goes first
                heappush(self._heap, (-chance, self._num_pushed, token, parent, kind, guesses))
                return

    def _likeliest(self, chance: float, first: int, row: list[int]) -> Iterator[Guess]:
        """A row's guesses in its own order, made when asked for."""
        chances = self._chances
        for both in row:
            kind = first + BIN_OF_GRADE[both & _GRADE]
            yield chance * chances[kind], both >> GRADE_BITS, kind

    def _race(self, rows: Sequence[Looked], draws: Sequence[Draws], least: float) -> None:
        """Put the guesses of some rows into the heap, ordered by what they will be drawn with."""
        packed = np.empty((len(rows), ROW_LENGTH), dtype=np.int32)
        for i, looked in enumerate(rows):
            row = looked.row
            packed[i, : len(row)] = row
            if len(row) < ROW_LENGTH:  # short rows repeat their last id, in the lowest grade
                packed[i, len(row) :] = row[-1] & ~_GRADE
        chances = _MIDDLES.take(packed & _GRADE)
        packed >>= GRADE_BITS
        drawn = np.empty(packed.shape, dtype=np.float32)
        for i, numbers in enumerate(draws):
            numbers.take(packed[i], out=drawn[i], mode="clip")  # without a mode numpy would make a copy first
        sharpness = np.array([[SHARPNESS[looked.first]] for looked in rows], dtype=np.float32)
        times, totals, sums = races(chances, drawn, sharpness)
        arrays = packed, times, times.argsort(axis=1, kind="stable"), totals, sums
        columns = zip(rows, *(array.tolist() for array in arrays), strict=True)
        for looked, tokens, when, order, total, known in columns:
            self._push_next(self._winners(looked, tokens, when, order, total, known), looked.node, least)

    def _winners(
        self, looked: Looked, tokens: list[int], times: list[float], order: list[int], total: float, known: float
    ) -> Iterator[Guess]:
        """A row's guesses, the first to arrive first, made when asked for. total, known: sums, as `races` says."""
        chance, first = looked.chance, looked.first
        chances, scale, rest, sharpness = self._chances, 1.0 / total, min(0.0, known - 1.0), SHARPNESS[first]
        for place in order:
            time = times[place]
            kind = first + bisect_left(BIN_EDGES, time**-sharpness * scale * exp(rest * time))
            yield chance * chances[kind], tokens[place], kind

    def _rows(self, node: int, parent: int, before: int, token: int, chance: float) -> list[Source]:
        """The rows behind a node, each with the kind of its rarest guess. before, token: the last two ids there."""
        similar = self._similar(node, parent, before, token) if chance >= SIMILAR_ROWS else None
        found = [] if similar is None else [similar]
        key = before << KEY_SHIFT | token
        pair = self._memory.pairs.row(key)
        if pair is None:
            pair = self._alone.after_pair(key)
        if pair is not None:
            found.append((pair, PAIR))
        if pair is None or chance >= BOTH_ROWS:
            single = self._memory.singles.row(token)
            if single is not None:
                found.append((single, SINGLE))
            elif pair is None and 0 <= token < len(self._alone.tokens):
                found.append((self._alone.tokens[token], VOCABULARY))
        return found

    def _similar(self, node: int, parent: int, before: int, token: int) -> Source | None:
        """The row of the node's token that was seen in the most similar context; None where no context is known."""
        if parent not in self._contexts:
            return None
        context, surest = self._contexts[parent]
        nearest = self._memory.nearest.find(token, context)
        if nearest is None:
            return None
        similarity = min(nearest.similarity, surest)
        self._contexts[node] = nearest.after, similarity
        return nearest.row, nearest_kind(similarity, nearest.previous == before)

    def _follow(self, pointer: Pointer, node: int, chance: float, least: float) -> None:
        """Put what followed an earlier occurrence into the heap. chance: of the node."""
        following, number, length, kinds = pointer
        if number == len(following) or following[number] == FOREIGN:
            return
        guess, kind = following[number], kinds[min(length, MAX_MATCH)]
        self._push_next(iter([(chance * self._chances[kind], guess, kind)]), node, least)
        self._behind[node, guess] = Pointer(following, number + 1, length + 1, kinds)
