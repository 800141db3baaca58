"""Growing a token tree best guess first, with array operations over all nodes of a round.

A node's chance is its own times its parent's, so no child is likelier than its parent, and the best tree of n nodes are the n
likeliest nodes that there are. A round looks up what may follow those of the n likeliest nodes found so far that were not looked
behind yet; when there are none, these n are the tree. What a heap finds one node at a time takes as many rounds as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lade.drafting.acceptance import PAIR, PROBE, SINGLE, VOCABULARY, Acceptance
from lade.drafting.memory import KEY_SHIFT, Memory
from lade.drafting.suffix_index import MAX_MATCH, MIN_MATCH
from lade.drafting.top_k_table import BIN_EDGES, BIN_MIDDLES, RowArrays
from lade.drafting.vocabulary import Vocabulary
from lade.verification.draws import Draws, win_chances

FOREIGN = -1  # in place of an id that no embedding exists for
BOTH_ROWS = 0.3  # chance of a node from which on the row of its token is worth a look beside the row of its pair
VOC_BOTH = False
SAMPLED_LENGTH = 32
GREEDY_LENGTH = 8  # ids of a row that are guessed where the likeliest token is chosen

Pointer = tuple[int, int, int, int]  # place in the text, match length, kind of the shortest match, place it began at
Source = tuple[RowArrays, int]  # rows and the kind of their rarest guess

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
        self._pool = Growth()  # all nodes that may belong to the tree, in the order in which they were found
        self._behind: dict[int, tuple[Pointer, ...]] = {-1: pointers}  # node -> pointers behind it

    def grow(self, max_depth: int, size: int, least: float, enough: Callable[[list[float]], int]) -> Growth:
        """The likeliest tree of at most `size` nodes, none of whose chance is below `least`.

        enough: how many of some nodes are worth having, by their chances, the likeliest first.
        """
        growth, pool, seen = Growth(), self._pool, {-1}
        limit, batch = size, [-1] if size > 0 else []
        order: list[int] = []
        floor = least  # no rarer node can belong to the tree
        while batch:
            self._look_behind(batch, floor, size)
            seen.update(batch)
            chances = np.array(pool.chances)
            order = np.argsort(-chances, kind="stable")[:size].tolist()
            limit = min(size, enough([pool.chances[node] for node in order]))
            floor = max(least, pool.chances[order[limit - 1]]) if len(order) >= limit > 0 else least
            batch = [node for node in order[:limit] if node not in seen and pool.depths[node] < max_depth]
        place = {node: index for index, node in enumerate(order[:limit])} | {-1: -1}
        for node in order[:limit]:
            parent = place[pool.parents[node]]
            growth.add(pool.tokens[node], parent, pool.kinds[node], pool.chances[node], pool.depths[node])
        return growth

    def _look_behind(self, nodes: list[int], floor: float, most: int) -> None:
        """Put what may follow some nodes into the pool, at most the `most` likeliest of what is above `floor`."""
        depths = [1 if node < 0 else self._pool.depths[node] + 1 for node in nodes]
        for depth in sorted(set(depths)):
            chosen = [node for node, d in zip(nodes, depths, strict=True) if d == depth]
            found = self._likely(chosen, depth, floor, most)
            for node in chosen:
                if self._behind.get(node):
                    self._follow_pointers(node, floor, found)
            for (node, token), (kind, chance, pointers) in found.items():
                if pointers:
                    self._behind[len(self._pool.tokens)] = pointers
                self._pool.add(token, node, kind, chance, depth)

    def _likely(
        self, nodes: list[int], depth: int, floor: float, most: int
    ) -> dict[tuple[int, int], tuple[int, float, tuple[Pointer, ...]]]:
        """What the tables say: (node, token) -> kind, chance, no pointers; each token by the source that is surest of it."""
        owners, firsts, rows = self._rows(nodes)
        if not owners:
            return {}
        ids = rows[0][0] if len(rows) == 1 else np.concatenate([ids for ids, _ in rows])
        bins = rows[0][1] if len(rows) == 1 else np.concatenate([bins for _, bins in rows])
        draws = self._draws_at(depth)
        if draws is None:
            ids, bins = ids[:, :GREEDY_LENGTH], bins[:, :GREEDY_LENGTH]
        else:
            ids, bins = ids[:, :SAMPLED_LENGTH], bins[:, :SAMPLED_LENGTH]
            bins = _EDGES.searchsorted(win_chances(ids, _MIDDLES[bins], draws))
        kinds = bins + np.array(firsts)[:, None]
        above = np.array([1.0 if node < 0 else self._pool.chances[node] for node in owners])
        chances = self._chances[kinds] * above[:, None]
        flat = chances.ravel()
        if flat.size > 2 * most:  # the same token may come from two sources
            floor = max(floor, float(np.partition(flat, flat.size - 2 * most)[flat.size - 2 * most]))
        places = (flat >= floor).nonzero()[0]
        width = ids.shape[1]
        found: dict[tuple[int, int], tuple[int, float, tuple[Pointer, ...]]] = {}
        for place, token, kind, chance in zip(
            places.tolist(),
            ids.ravel()[places].tolist(),
            kinds.ravel()[places].tolist(),
            flat[places].tolist(),
            strict=True,
        ):
            key = owners[place // width], token
            if key not in found or found[key][1] < chance:
                found[key] = kind, chance, ()
        return found

    def _rows(self, nodes: list[int]) -> tuple[list[int], list[int], list[RowArrays]]:
        """The rows behind some nodes: whose each one is, the kind of its rarest guess, and the rows."""
        pool, text, memory = self._pool, self._text, self._memory
        pairs, singles = memory.pairs.slots, memory.singles.slots
        found: dict[int, tuple[list[int], list[int]]] = {PAIR: ([], []), SINGLE: ([], []), VOCABULARY: ([], [])}
        for node in nodes:
            if node < 0:
                before, token, chance = text[-2] if len(text) > 1 else -1, text[-1], 1.0
            else:
                parent = pool.parents[node]
                before, token, chance = (
                    text[-1] if parent < 0 else pool.tokens[parent],
                    pool.tokens[node],
                    pool.chances[node],
                )
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
            if (VOC_BOTH or (single is None and pair is None)) and 0 <= token < self._num_alone:
                found[VOCABULARY][0].append(node)
                found[VOCABULARY][1].append(token)
        owners: list[int] = []
        firsts: list[int] = []
        rows: list[RowArrays] = []
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

    def _follow_pointers(
        self, node: int, floor: float, found: dict[tuple[int, int], tuple[int, float, tuple[Pointer, ...]]]
    ) -> None:
        text, above = self._text, 1.0 if node < 0 else self._pool.chances[node]
        for place, length, first, start in self._behind[node]:
            guess, kind = text[place], first + min(length, MAX_MATCH) - MIN_MATCH
            chance = above * float(self._chances[kind])
            if guess == FOREIGN:
                continue
            known = found.get((node, guess))
            if known is not None and known[1] > chance:
                kind, chance = known[:2]
            if chance >= floor:
                # At the text's end it goes on as if it were repeating itself.
                following = (place + 1 if place + 1 < len(text) else start, length + 1, first, start)
                found[node, guess] = kind, chance, (following,)
