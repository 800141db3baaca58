"""Growing a token tree best guess first, with array operations over all nodes of a round.

A node's chance is its own times its parent's, so no child is likelier than its parent, and the best tree of n nodes are the n
likeliest nodes that there are. A round looks up what may follow those of the n likeliest nodes found so far that were not looked
behind yet; when there are none, these n are the tree. What a heap finds one node at a time takes as many rounds as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lade.drafting.acceptance import PAIR, PROBE, SINGLE, VOCABULARY, Acceptance
from lade.drafting.memory import KEY_SHIFT, Memory
from lade.drafting.suffix_index import MAX_MATCH, MIN_MATCH
from lade.drafting.top_k_table import BIN_EDGES, BIN_MIDDLES, Packed, unpacked
from lade.drafting.vocabulary import Vocabulary
from lade.verification.draws import Draws, win_chances

FOREIGN = -1  # in place of an id that no embedding exists for
BOTH_ROWS = 0.3  # at or above this chance of a node, the row of its token is looked up beside the row of its pair
LIKELY_CHILD = 0.6  # a node is looked behind where a child of this chance, relative to its own, could enter the tree
GREEDY_LENGTH = 8  # ids of a row that are guessed where the likeliest token is chosen

Pointer = tuple[int, int, int, int]  # place in the text, match length, kind of the shortest match, place it began at
Node = tuple[int, int, int, int]  # token, parent, kind, depth
Source = tuple[Packed, int]  # rows and the kind of their rarest guess

_EDGES = np.array(BIN_EDGES, dtype=np.float32)
_MIDDLES = np.array(BIN_MIDDLES, dtype=np.float32)


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
        pointers: where the text's end has occurred before.
        """
        self._memory, self._vocabulary, self._temperature, self._text = memory, vocabulary, temperature, text
        self._num_alone = 0 if vocabulary is None else len(vocabulary)  # tokens with such a row
        self._draws_at, self._sources, self._pointers = draws_at, sources, pointers
        self._chances = np.array(acceptance.chances)
        self._pool: list[Node] = []  # all that may belong to the tree, in the order in which they were found
        self._odds: list[float] = []  # of each, its chance
        self._behind: dict[int, tuple[Pointer, ...]] = {-1: pointers} if pointers else {}  # node -> pointers behind it

    def grow(self, max_depth: int, size: int, least: float, enough: Callable[[list[float]], int]) -> Growth:
        """The likeliest tree of at most `size` nodes, none of whose chance is below `least`.

        enough: how many of some nodes are worth having, by their chances, the likeliest first.
        """
        pool, odds, seen = self._pool, self._odds, {-1}
        order: list[int] = []
        limit, batch = size, [-1] if size > 0 else []
        floor, depth = least, 0  # no rarer node can belong to the tree
        while batch:
            for depth in sorted({self._depth(node) for node in batch}):
                self._look_behind([node for node in batch if self._depth(node) == depth], depth + 1, floor, size)
            seen.update(batch)
            order = sorted(range(len(odds)), key=odds.__getitem__, reverse=True)[:size]  # stable: parents stay in front
            limit = min(size, enough([odds[node] for node in order]))
            floor = max(least, odds[order[limit - 1]]) if len(order) >= limit > 0 else least
            worth = floor / LIKELY_CHILD
            batch = [n for n in order[:limit] if odds[n] >= worth and n not in seen and pool[n][3] < max_depth]
        kept = order[:limit]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        tokens, parents, kinds, depths = zip(*(pool[node] for node in kept), strict=True) if kept else ((), (), (), ())
        return Growth(
            list(tokens),
            [place[parent] for parent in parents],
            list(kinds),
            [odds[node] for node in kept],
            list(depths),
        )

    def _depth(self, node: int) -> int:
        return 0 if node < 0 else self._pool[node][3]

    def _add(self, token: int, parent: int, kind: int, depth: int, chance: float) -> int:
        self._pool.append((token, parent, kind, depth))
        self._odds.append(chance)
        return len(self._odds) - 1

    def _look_behind(self, nodes: list[int], depth: int, floor: float, most: int) -> None:
        """Put what may follow some nodes into the pool, about the `most` likeliest of what is above `floor`. depth: of what follows."""
        owners, firsts, rows = self._rows(nodes)
        known: dict[tuple[int, int], int] = {}  # (node, token) -> its place in the pool, where sources may agree
        has_pointers = not self._behind.keys().isdisjoint(nodes)
        is_simple = len(owners) == len(set(owners)) and not has_pointers
        if owners:
            for parent, token, kind, chance in self._likely(owners, firsts, rows, depth, floor, most):
                if is_simple:
                    self._add(token, parent, kind, depth, chance)
                    continue
                place = known.get((parent, token))
                if place is None:
                    known[parent, token] = self._add(token, parent, kind, depth, chance)
                elif self._odds[place] < chance:  # each token by the source that is surest of it
                    self._pool[place], self._odds[place] = (token, parent, kind, depth), chance
        if has_pointers:
            for node in nodes:
                for pointer in self._behind.get(node, ()):
                    self._follow(pointer, node, depth, floor, known)

    def _likely(
        self, owners: list[int], firsts: list[int], rows: list[Packed], depth: int, floor: float, most: int
    ) -> Iterator[tuple[int, int, int, float]]:
        """What rows say: parent, token, kind and chance."""
        ids, bins = unpacked(rows[0] if len(rows) == 1 else np.concatenate(rows))
        draws = self._draws_at(depth)
        if draws is None:
            ids, bins = ids[:, :GREEDY_LENGTH], bins[:, :GREEDY_LENGTH]
        else:
            bins = _EDGES.searchsorted(win_chances(ids, _MIDDLES.take(bins), draws)).astype(np.int32)
        kinds = bins + np.array(firsts)[:, None]
        chances = self._chances.take(kinds)
        chances *= np.array([1.0 if node < 0 else self._odds[node] for node in owners])[:, None]
        flat, width = chances.ravel(), ids.shape[1]
        places = (flat >= floor).nonzero()[0]
        spare = most + 8  # the same token may come from two sources
        if len(places) > spare:
            places = (flat >= np.partition(flat, flat.size - spare)[flat.size - spare]).nonzero()[0]
        parents = [owners[place // width] for place in places.tolist()]
        return zip(
            parents, ids.ravel()[places].tolist(), kinds.ravel()[places].tolist(), flat[places].tolist(), strict=True
        )

    def _rows(self, nodes: list[int]) -> tuple[list[int], list[int], list[Packed]]:
        """The rows behind some nodes: whose each one is, the kind of its rarest guess, and the rows."""
        pool, text, memory = self._pool, self._text, self._memory
        pairs, singles = memory.pairs.slots, memory.singles.slots
        found: dict[int, tuple[list[int], list[int]]] = {PAIR: ([], []), SINGLE: ([], []), VOCABULARY: ([], [])}
        for node in nodes:
            if node < 0:
                before, token, chance = text[-2] if len(text) > 1 else -1, text[-1], 1.0
            else:
                token, parent, _, _ = pool[node]
                before, chance = text[-1] if parent < 0 else pool[parent][0], self._odds[node]
            pair = pairs.get(before << KEY_SHIFT | token)
            if pair is not None:
                found[PAIR][0].append(node)
                found[PAIR][1].append(pair)
                if chance < BOTH_ROWS:
                    continue
            single = singles.get(token)
            if single is not None:
                found[SINGLE][0].append(node)
                found[SINGLE][1].append(single)
            elif pair is None and 0 <= token < self._num_alone:
                found[VOCABULARY][0].append(node)
                found[VOCABULARY][1].append(token)
        owners: list[int] = []
        firsts: list[int] = []
        rows: list[Packed] = []
        for first, (those, slots) in found.items():
            if those:
                owners += those
                firsts += [first] * len(those)
                if first == VOCABULARY and self._vocabulary is not None:
                    rows.append(self._vocabulary.rows(slots, self._temperature))
                else:
                    rows.append((memory.pairs if first == PAIR else memory.singles).rows(slots))
        if nodes[0] < 0:
            for source, first in self._sources:
                owners.append(-1)
                firsts.append(first)
                rows.append(source)
        return owners, firsts, rows

    def _follow(self, pointer: Pointer, node: int, depth: int, floor: float, known: dict[tuple[int, int], int]) -> None:
        """Put what followed an earlier occurrence into the pool. known: (node, token) -> place, of what is there."""
        (place, length, first, start), text = pointer, self._text
        guess, kind = text[place], first + min(length, MAX_MATCH) - MIN_MATCH
        chance = (1.0 if node < 0 else self._odds[node]) * float(self._chances[kind])
        if guess == FOREIGN:
            return
        found = known.get((node, guess))
        if found is None:
            if chance < floor:
                return
            found = known[node, guess] = self._add(guess, node, kind, depth, chance)
        elif self._odds[found] <= chance:
            self._pool[found], self._odds[found] = (guess, node, kind, depth), chance
        # At the text's end it goes on as if it were repeating itself.
        self._behind[found] = ((place + 1 if place + 1 < len(text) else start, length + 1, first, start),)
