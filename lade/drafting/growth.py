"""The likeliest tree after the end of one text, grown best guess first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from lade.block.token_tree import first_path
from lade.drafting.acceptance import ROOT, TOKEN, CopyPriors, RowPrior, of_context
from lade.drafting.base import FOREIGN
from lade.drafting.contexts import Context
from lade.drafting.memory import Memory
from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import BIN_BITS, NUM_BINS, PackedRow

LEAST_FOR_CONTEXT = 0.1  # from this chance of a node on, the row of the most similar context is looked up
LEAST_FOR_BOTH = 0.3  # from this chance of a node on, its token's latest row is looked up beside that one
LIKELY_CHILD = 0.6  # a node is expanded where a child of this chance, relative to its own, would be the next guess

ABOVE_ROOT = -2  # in place of the parent of the root, which is -1
_BIN = NUM_BINS - 1

Edge = tuple[int, int]  # parent, token
Guess = tuple[float, int, str]  # chance, token, source
SourceRow = tuple[PackedRow, RowPrior]


class Copy(NamedTuple):
    """Tokens that followed an earlier occurrence of a text's end.

    following: these tokens. number: of the next one. length: equal tokens before it. priors: by length.
    """

    following: list[int]
    number: int
    length: int
    priors: CopyPriors


@dataclass(slots=True)
class Growth:
    """One row's tree, likeliest guess first. Nodes as in TokenTree."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # of being accepted, each with all its ancestors
    depths: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, source: str, chance: float, depth: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.chances.append(chance)
        self.depths.append(depth)

    def by_chance(self) -> Growth:
        """The same tree with its likeliest nodes first. Parents stay in front of their children."""
        return self._part(sorted(range(len(self.tokens)), key=self.chances.__getitem__, reverse=True))  # stable

    def best_path(self) -> Growth:
        """The path of likeliest children from the root."""
        return self._part(first_path(self.parents))

    def _part(self, nodes: list[int]) -> Growth:
        """Some nodes, each behind its parent, in this order."""
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        found = Growth(*([column[node] for node in nodes] for column in self._columns()))
        found.parents = [place[parent] for parent in found.parents]
        return found

    def cut(self, size: int) -> None:
        """Keep the first nodes only. Parents come first, so what is left is a tree."""
        for column in self._columns():
            del column[size:]

    def _columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.parents, self.sources, self.chances, self.depths


class Grower:
    """Grows one tree."""

    def __init__(
        self,
        memory: Memory,
        text: list[int],
        context: Context | None,
        root_row: PackedRow | None,
        copies: Sequence[Copy],
    ) -> None:
        """text: ids up to the root. context: of the root, None if it is not known.

        root_row: the row that the root was chosen from, None if it is not known. copies: what followed earlier
        occurrences of the text's end.
        """
        self._memory, self._root = memory, text[-1]
        self._root_row, self._copies = root_row, copies
        self._growth = Growth()  # nodes in the order in which they were found
        self._known: set[Edge] = set()  # of these nodes
        self._copy_after: dict[Edge, Copy] = {}
        # The context after a node, and the highest similarity that a row found by it may count as.
        self._contexts: dict[int, tuple[Context, float]] = {} if context is None else {ABOVE_ROOT: (context, 1.0)}
        self._num_pushed = 0
        # The next guess of each source: -chance, order, token, parent, source, and the guesses after it.
        self._heap: list[tuple[float, int, int, int, str, Iterator[Guess]]] = []

    def grow(self, max_depth: int, size: int, least: float) -> Growth:
        """The likeliest tree of at most `size` nodes, none of whose chance is below `least`."""
        heap, growth, known = self._heap, self._growth, self._known
        chances, depths = growth.chances, growth.depths
        waiting: list[int] = []  # nodes that are not expanded
        if size > 0 and max_depth > 0:
            for copy in self._copies:
                self._follow(copy, -1, 1.0, least)
            self._expand([-1], least)
        while len(chances) < size:
            if waiting and (not heap or -heap[0][0] <= LIKELY_CHILD * chances[waiting[0]]):
                self._expand(waiting, least)
                waiting.clear()
                continue
            if not heap:
                break
            negative, _, token, parent, source, guesses = heappop(heap)
            self._push_next(guesses, parent, least)
            if (parent, token) in known:  # a likelier source has guessed the same
                continue
            known.add((parent, token))
            chance, depth = -negative, 1 if parent < 0 else depths[parent] + 1
            growth.add(token, parent, source, chance, depth)
            if depth < max_depth and chance * LIKELY_CHILD >= least:
                waiting.append(len(chances) - 1)
        return growth.by_chance()

    def _expand(self, nodes: Sequence[int], least: float) -> None:
        """Put the likeliest guess of each source after some nodes into the heap."""
        growth = self._growth
        for node in nodes:
            if node < 0:
                chance, found = 1.0, self._rows(node, ABOVE_ROOT, self._root, 1.0)
                if self._root_row is not None:
                    found.append((self._root_row, ROOT))
            else:
                token, parent, chance = growth.tokens[node], growth.parents[node], growth.chances[node]
                found = self._rows(node, parent, token, chance)
                if (parent, token) in self._copy_after:
                    self._follow(self._copy_after[parent, token], node, chance, least)
            for row, prior in found:
                self._push_next(self._likeliest(row, prior, chance), node, least)

    def _push_next(self, guesses: Iterator[Guess], parent: int, least: float) -> None:
        """Put the next guess of a source into the heap; none below `least`."""
        for chance, token, source in guesses:
            if chance < least:
                return
            if (parent, token) not in self._known:
                self._num_pushed += 1  # of guesses that are as likely the first one goes first
                heappush(self._heap, (-chance, self._num_pushed, token, parent, source, guesses))
                return

    def _likeliest(self, row: PackedRow, prior: RowPrior, chance: float) -> Iterator[Guess]:
        """A row's guesses in its own order. chance: of the node before them."""
        for both in row.tolist():
            yield chance * prior.by_bin[both & _BIN], both >> BIN_BITS, prior.source

    def _rows(self, node: int, parent: int, token: int, chance: float) -> list[SourceRow]:
        """The rows of guesses after a node. token, chance: of the node."""
        in_context = self._row_in_context(node, parent, token) if chance >= LEAST_FOR_CONTEXT else None
        found = [] if in_context is None else [in_context]
        if in_context is None or chance >= LEAST_FOR_BOTH:
            latest = self._memory.table.row(token)
            if latest is not None:
                found.append((latest, TOKEN))
        return found

    def _row_in_context(self, node: int, parent: int, token: int) -> SourceRow | None:
        """The row of the node's token that was seen in the most similar context; None where no context is known."""
        if parent not in self._contexts:
            return None
        context, highest = self._contexts[parent]
        found = self._memory.contexts.find(token, context)
        if found is None:
            return None
        similarity = min(found.similarity, highest)
        self._contexts[node] = found.after, similarity
        return found.row, of_context(similarity)

    def _follow(self, copy: Copy, node: int, chance: float, least: float) -> None:
        """Put the next token of a copy into the heap. chance: of the node."""
        following, number, length, priors = copy
        if number == len(following) or following[number] == FOREIGN:
            return
        guess, (source, prior) = following[number], priors[min(length, MAX_MATCH)]
        self._push_next(iter([(chance * prior, guess, source)]), node, least)
        self._copy_after[node, guess] = Copy(following, number + 1, length + 1, priors)
