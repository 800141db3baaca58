"""Growing a token tree best guess first.

A node's chance is its own times its parent's, so no child is likelier than its parent, and the best tree of n nodes
are the n likeliest nodes that there are. A heap gives them one by one. Two things keep it small: of each row only the
next guess is in the heap, and a node is looked behind when LIKELY_CHILD of its chance is the largest number there.
What the draws make of rows is computed with array operations, for all nodes at once that wait to be looked behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp

import numpy as np

from lade.drafting.acceptance import PAIR, PROBE, SINGLE, VOCABULARY, Acceptance
from lade.drafting.memory import KEY_SHIFT, Memory
from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import BIN_BITS, BIN_EDGES, BIN_MIDDLES, ROW_LENGTH, PackedRow
from lade.drafting.vocabulary import Vocabulary
from lade.verification.draws import SHARPNESS, Draws, races

FOREIGN = -1  # in place of an id that no embedding exists for
BOTH_ROWS = 0.3  # at or above this chance of a node, the row of its token is looked up beside the row of its pair
LIKELY_CHILD = 0.6  # a node is looked behind where a child of this chance, relative to its own, would be the next guess
GREEDY_LENGTH = 8  # ids of a row that are guessed where the likeliest token is chosen

Pointer = tuple[
    list[int], int, int, tuple[int, ...]
]  # what followed, number of the next of it, match length, kinds by length
Node = tuple[int, int, int]  # token, parent, depth
Source = tuple[PackedRow, int]  # a row and the kind of its rarest guess
Guess = tuple[float, int, int]  # chance, token, kind

_MIDDLES = np.array(BIN_MIDDLES, dtype=np.float32)
_BIN = (1 << BIN_BITS) - 1


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

    def cut(self, size: int) -> None:
        """Keep the first nodes only. Parents come first, so what is left is a tree."""
        for column in (self.tokens, self.parents, self.kinds, self.chances, self.depths):
            del column[size:]


class Grower:
    """What may follow in one text, and the likeliest tree of it."""

    def __init__(
        self,
        memory: Memory,
        acceptance: Acceptance,
        vocabulary: Vocabulary | None,
        temperature: float,
        text: list[int],
        draws_at: Callable[[int], Draws | None],
        sources: Sequence[Source],
        pointers: tuple[Pointer, ...],
    ) -> None:
        """vocabulary: rows of tokens alone. temperature: of sampling, for those. text: ids up to the root. draws_at: what a token at some
        distance from the root will be drawn with; None for greedy, or where that is not known. sources: more rows behind the root.
        pointers: what followed where the text's end has occurred before.
        """
        self._pairs, self._singles = memory.pairs.row, memory.singles.row
        self._rows_alone = () if vocabulary is None else vocabulary.at(temperature)
        self._text, self._draws_at, self._sources = text, draws_at, sources
        self._chances = acceptance.chances
        self._nodes: list[Node] = []  # all that may belong to the tree, in the order in which they were found
        self._odds: list[float] = []  # of each its chance,
        self._kinds: list[int] = []  # its kind,
        self._siblings: list[Iterator[Guess]] = []  # and what else its row holds
        self._known: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self._behind: dict[int, tuple[Pointer, ...]] = {-1: pointers} if pointers else {}  # node -> pointers behind it
        self._drawn: dict[int, Draws | None] = {}  # by distance from the root
        self._waiting: list[int] = []  # nodes of the tree whose rows were not looked up yet
        self._ready: dict[int, list[Iterator[Guess]]] = {}  # node -> what its rows say
        self._heap: list[
            tuple[float, int]
        ] = []  # -chance and node, or -LIKELY_CHILD * chance and ~node to look behind it

    def grow(
        self, max_depth: int, size: int, least: float, stop: Callable[[int, float, float], bool] | None
    ) -> tuple[Growth, bool]:
        """The likeliest tree of at most `size` nodes, none of whose chance is below `least`.

        Of each row guesses are looked at in order, up to the first below `least`. Chances are learned by kind, so that
        a later one may be above it; it is left out.

        stop: as `EarlyStop.is_enough`, asked for each size. Returns also whether it ended the growth.
        """
        heap, nodes, odds = self._heap, self._nodes, self._odds
        order: dict[int, float] = {}
        expected, is_stopped = 0.0, False
        if size > 0 and max_depth > 0:
            self._waiting.append(-1)
            self._look_behind(-1, 1, least)
            is_stopped = stop is not None and stop(0, 0.0, -heap[0][0] if heap else 0.0)
        while heap and len(order) < size and not is_stopped:
            negative, node = heappop(heap)
            if node < 0:
                self._look_behind(~node, nodes[~node][2] + 1, least)
                continue
            if node in order:  # a surer source has said the same
                continue
            order[node] = -negative
            expected -= negative
            is_stopped = stop is not None and stop(len(order), expected, -negative)
            _, parent, depth = nodes[node]
            self._push_next(self._siblings[node], parent, depth, least)
            if depth < max_depth and -negative * LIKELY_CHILD >= least:
                self._waiting.append(node)
                heappush(heap, (negative * LIKELY_CHILD, ~node))
        kept = sorted(order)
        kept.sort(key=odds.__getitem__, reverse=True)  # stable: parents stay in front
        place = {node: index for index, node in enumerate(kept)}
        place[-1] = -1
        growth = Growth(
            [nodes[node][0] for node in kept],
            [place[nodes[node][1]] for node in kept],
            [self._kinds[node] for node in kept],
            [odds[node] for node in kept],
            [nodes[node][2] for node in kept],
        )
        return growth, is_stopped

    def _look_behind(self, node: int, depth: int, least: float) -> None:
        """Put what may follow a node into the heap: of each of its sources the surest guess. depth: of what follows."""
        if node not in self._ready:
            self._prepare()
        for pointer in self._behind.get(node, ()):
            self._follow(pointer, node, depth, least)
        for guesses in self._ready[node]:
            self._push_next(guesses, node, depth, least)

    def _push_next(self, guesses: Iterator[Guess], parent: int, depth: int, least: float) -> None:
        """Put the next guess of a row into the heap."""
        for chance, token, kind in guesses:
            if chance < least:
                return
            found = self._known.get((parent, token))
            if found is None:
                self._add(token, parent, depth, chance, kind, guesses)
                return
            if self._odds[found] < chance:  # each token by the source that is surest of it
                self._odds[found], self._kinds[found] = chance, kind
                heappush(self._heap, (-chance, found))

    def _add(self, token: int, parent: int, depth: int, chance: float, kind: int, guesses: Iterator[Guess]) -> int:
        node = len(self._nodes)
        self._nodes.append((token, parent, depth))
        self._odds.append(chance)
        self._kinds.append(kind)
        self._siblings.append(guesses)
        self._known[parent, token] = node
        heappush(self._heap, (-chance, node))
        return node

    def _prepare(self) -> None:
        """Look up the rows behind the nodes that wait for it."""
        rows: list[tuple[list[Iterator[Guess]], float, int, PackedRow]] = []
        draws: list[Draws] = []
        is_race = True
        for node in self._waiting:
            guesses = self._ready[node] = []
            found = self._rows(node)
            if found:
                chance, depth = (1.0, 1) if node < 0 else (self._odds[node], self._nodes[node][2] + 1)
                rows += [(guesses, chance, first, row) for row, first in found]
                if depth not in self._drawn:
                    self._drawn[depth] = self._draws_at(depth)
                numbers = self._drawn[depth]
                if numbers is None:
                    is_race = False
                else:
                    draws += [numbers] * len(found)
        self._waiting.clear()
        if rows and is_race:
            self._race(rows, draws)
        else:
            for guesses, chance, first, row in rows:
                guesses.append(self._likeliest(chance, first, row[:GREEDY_LENGTH].tolist()))

    def _likeliest(self, chance: float, first: int, row: list[int]) -> Iterator[Guess]:
        """A row's guesses in its own order, made when asked for."""
        chances = self._chances
        for both in row:
            kind = first + (both & _BIN)
            yield chance * chances[kind], both >> BIN_BITS, kind

    def _race(
        self, rows: Sequence[tuple[list[Iterator[Guess]], float, int, PackedRow]], draws: Sequence[Draws]
    ) -> None:
        """Order the guesses of some rows by what they will be drawn with."""
        packed = np.empty((len(rows), ROW_LENGTH), dtype=np.int32)
        for i, (_, _, _, row) in enumerate(rows):
            if len(row) < ROW_LENGTH:  # short rows repeat their last id, in the rarest bin
                packed[i] = row[-1] & ~_BIN
                packed[i, : len(row)] = row
            else:
                packed[i] = row
        chances = _MIDDLES.take(packed & _BIN)
        packed >>= BIN_BITS
        drawn = np.empty(packed.shape, dtype=np.float32)
        for i, numbers in enumerate(draws):
            numbers.take(packed[i], out=drawn[i], mode="clip")  # without a mode numpy would make a copy first
        times, totals, sums = races(chances, drawn)
        columns = zip(
            rows,
            packed.tolist(),
            times.tolist(),
            times.argsort(axis=1).tolist(),
            totals.tolist(),
            sums.tolist(),
            strict=True,
        )
        for (guesses, chance, first, _), tokens, when, order, total, known in columns:
            guesses.append(self._winners(chance, first, tokens, when, order, 1.0 / total, min(0.0, known - 1.0)))

    def _winners(
        self,
        chance: float,
        first: int,
        tokens: list[int],
        times: list[float],
        order: list[int],
        scale: float,
        rest: float,
    ) -> Iterator[Guess]:
        """A row's guesses, the first to arrive first, made when asked for. scale, rest: as `races` says."""
        chances = self._chances
        for place in order:
            time = times[place]
            kind = first + bisect_left(BIN_EDGES, time**-SHARPNESS * scale * exp(rest * time))
            yield chance * chances[kind], tokens[place], kind

    def _rows(self, node: int) -> Sequence[Source]:
        """The rows behind a node, each with the kind of its rarest guess."""
        text = self._text
        if node < 0:
            before, token, chance = text[-2] if len(text) > 1 else -1, text[-1], 1.0
        else:
            token, parent, _ = self._nodes[node]
            before, chance = text[-1] if parent < 0 else self._nodes[parent][0], self._odds[node]
        found: list[Source] = []
        pair = self._pairs(before << KEY_SHIFT | token)
        if pair is not None:
            found.append((pair, PAIR))
        if pair is None or chance >= BOTH_ROWS:
            single = self._singles(token)
            if single is not None:
                found.append((single, SINGLE))
            elif pair is None and 0 <= token < len(self._rows_alone):
                found.append((self._rows_alone[token], VOCABULARY))
        if node < 0:
            found += self._sources
        return found

    def _follow(self, pointer: Pointer, node: int, depth: int, least: float) -> None:
        """Put what followed an earlier occurrence into the heap."""
        following, number, length, kinds = pointer
        if number == len(following):
            return
        guess, kind = following[number], kinds[min(length, MAX_MATCH)]
        chance = (1.0 if node < 0 else self._odds[node]) * self._chances[kind]
        if guess == FOREIGN:
            return
        found = self._known.get((node, guess))
        if found is None:
            if chance < least:
                return
            found = self._add(guess, node, depth, chance, kind, iter(()))
        elif self._odds[found] <= chance:
            self._odds[found], self._kinds[found] = chance, kind
            heappush(self._heap, (-chance, found))
        self._behind[found] = ((following, number + 1, length + 1, kinds),)
