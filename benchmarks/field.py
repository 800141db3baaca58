"""Training-free drafters of the field, written from their papers, for comparison with lade's tree at equal block size.

`register()` gives each a name among the modes, which `replay.py --modes` takes like lade's own. Each proposes MAX_BLOCK
- 1 guesses for one text. What a method may keep from one text to the next lies with the active `lade.Memory`, so that
"cold" and "warm" mean the same for all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lade.block.token_tree import TokenTree, merge_candidates
from lade.drafting import DraftRequest, register_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter, Outcome
from lade.drafting.memory import memory_for
from lade.drafting.top_k_table import TopKTable
from lade.verification.sequences import TokenSequences

END_OF_TEXT = -1  # between the texts of a store; no guess crosses it

State = TypeVar("State")
_states: WeakKeyDictionary[TopKTable, dict[str, Any]] = WeakKeyDictionary()


def state_of(request: DraftRequest, name: str, make: Callable[[], State]) -> State:
    """What a method keeps from call to call beside the memory that is active."""
    table = memory_for(request.model, request.config.share, request.is_exact).table
    state: State = _states.setdefault(table, {}).setdefault(name, make())
    return state


def chain(tokens: list[int]) -> TokenTree:
    """A tree of one path."""
    return TokenTree([tokens], [list(range(-1, len(tokens) - 1))])


class FieldDrafter(Drafter):
    """Follows one text. A method says what it guesses (`guess`) and what it learns from a step (`observe`)."""

    reads_wrong_guesses = False  # whether it learns from the logits behind them

    def __init__(self, request: DraftRequest) -> None:
        if len(request.prompt_ids) != 1:
            raise ValueError(f"a drafter of the field takes one text at a time, got {len(request.prompt_ids)}")
        self.size = request.config.max_block - 1
        self.text: list[int] = []
        self._cells = request.prompt_ids.new_empty(1, 0)
        self.extend(request.prompt_ids[0].tolist())

    def guess(self) -> TokenTree:
        """Guesses behind the text's last token, at most `size`."""
        raise NotImplementedError

    def extend(self, tokens: list[int]) -> None:
        """The text goes on."""
        self.text += tokens

    def observe(self, outcome: Outcome) -> None:
        """Logits of a step, before the text goes on."""

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        tree = self.guess()
        [depths] = tree.padded_depths(tree.num_nodes)
        if max_offset is not None:
            nodes = [node for node, depth in enumerate(depths) if depth <= max_offset]
            tree, depths = tree.part([nodes]), [depths[node] for node in nodes]
        return Draft(tree, max(depths, default=0), ROOT_ALONE, self._cells)

    def learn(self, outcome: Outcome) -> None:
        self.observe(outcome)
        self.extend(outcome.sequences.generated[0][-outcome.num_committed[0] :])


class PromptLookup(FieldDrafter):
    """What followed the first occurrence of the text's last two tokens, or else of the last one.

    As in transformers' `prompt_lookup_num_tokens` by its defaults. Keeps nothing from text to text.
    """

    MAX_MATCH = 2

    def guess(self) -> TokenTree:
        text = self.text
        for length in range(min(self.MAX_MATCH, len(text) - 1), 0, -1):
            for start in range(len(text) - length):
                if text[start : start + length] == text[-length:]:
                    return chain(text[start + length : start + length + self.size])
        return chain([])


class Occurrences:
    """Texts one behind the other, and the places behind each token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[int, list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._places.setdefault(token, []).append(len(self.tokens))

    def behind(self, pattern: list[int]) -> Iterator[tuple[int, int]]:
        """Places behind the pattern's last token that something follows, latest first, each with the length of the
        match."""
        tokens = self.tokens
        for place in reversed(self._places.get(pattern[-1], ())):
            if place == len(tokens) or tokens[place] == END_OF_TEXT:
                continue
            length = 1
            while length < min(len(pattern), place) and tokens[place - 1 - length] == pattern[-1 - length]:
                length += 1
            yield place, length


class SuffixDecoding(FieldDrafter):
    """The likeliest tree by how often each continuation of the text's end has occurred (arXiv:2411.04975).

    Texts kept and the text itself are counted apart. Of all lengths of the pattern and both stores the tree with the
    largest sum of chances is taken, so that long rare matches and short frequent ones compete. The paper bounds a tree
    by the length of its match, to save verification; here blocks are compared at equal size, and a tree is as large as
    the block.
    """

    MAX_PATTERN = 16

    def __init__(self, request: DraftRequest) -> None:
        self._kept = state_of(request, "suffix", Occurrences)
        self._own = Occurrences()
        self._prompt_length = request.prompt_ids.shape[1]
        super().__init__(request)

    def extend(self, tokens: list[int]) -> None:
        super().extend(tokens)
        self._own.extend(tokens)

    def finish(self) -> None:
        self._kept.extend([*self.text[self._prompt_length :], END_OF_TEXT])

    def guess(self) -> TokenTree:
        best, best_score = chain([]), 0.0
        for store in (self._own, self._kept):
            by_length: dict[int, list[int]] = {}
            for place, length in store.behind(self.text[-self.MAX_PATTERN :]):
                by_length.setdefault(length, []).append(place)
            places: list[int] = []
            for length in sorted(by_length, reverse=True):
                places = places + by_length[length]
                tree, score = self._grow(store.tokens, places)
                if score > best_score:
                    best, best_score = tree, score
        return best

    def _grow(self, tokens: list[int], places: list[int]) -> tuple[TokenTree, float]:
        """The most frequent continuations from some places, and the sum of their shares."""
        tree, score = TokenTree.empty(1), 0.0
        frontier: list[tuple[float, int, int, int, list[int]]] = []

        def push(parent: int, share: float, places: list[int]) -> None:
            following: dict[int, list[int]] = {}
            for place in places:
                if place < len(tokens) and tokens[place] != END_OF_TEXT:
                    following.setdefault(tokens[place], []).append(place + 1)
            for token, found in following.items():
                heapq.heappush(frontier, (-share * len(found) / len(places), parent, len(frontier), token, found))

        push(-1, 1.0, places)
        while frontier and len(tree.tokens[0]) < self.size:
            negative, parent, _, token, found = heapq.heappop(frontier)
            tree.tokens[0].append(token)
            tree.parents[0].append(parent)
            score -= negative
            push(len(tree.tokens[0]) - 1, -negative, found)
        return tree, score


# Share of accepted guesses by rank in a token's row, roughly; it shapes the static tree.
RANK_CHANCES = (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)


def static_tree(size: int) -> list[tuple[int, int]]:
    """The `size` most probable nodes by RANK_CHANCES, as parent (-1 for the root) and rank."""
    nodes: list[tuple[int, int]] = []
    frontier = [(-chance, -1, rank) for rank, chance in enumerate(RANK_CHANCES)]
    heapq.heapify(frontier)
    while len(nodes) < size:
        chance, parent, rank = heapq.heappop(frontier)
        nodes.append((parent, rank))
        for next_rank, next_chance in enumerate(RANK_CHANCES):
            heapq.heappush(frontier, (chance * next_chance, len(nodes) - 1, next_rank))
    return nodes


class TokenRecycling(FieldDrafter):
    """One table of the eight likeliest tokens behind each token, one tree of ranks for all steps (arXiv:2408.08696).

    Every row of a step, those of wrong guesses too, replaces what was known behind its token; accepted ones last. The
    published tree has 80 nodes; this one is made for the size, by the same kind of counts.
    """

    reads_wrong_guesses = True

    def __init__(self, request: DraftRequest) -> None:
        self._rows = state_of(request, "recycling", dict[int, list[int]])
        super().__init__(request)
        self._template = static_tree(self.size)

    def guess(self) -> TokenTree:
        tokens, parents = [], []
        places = {-1: -1}  # of the template's nodes in this step's tree
        for node, (parent, rank) in enumerate(self._template):
            if parent not in places:
                continue
            place = places[parent]
            row = self._rows.get(self.text[-1] if place < 0 else tokens[place], ())
            if rank < len(row):
                places[node] = len(tokens)
                tokens.append(row[rank])
                parents.append(place)
        return TokenTree([tokens], [parents])

    def observe(self, outcome: Outcome) -> None:
        logits = outcome.logits[0]
        likeliest = logits.topk(min(len(RANK_CHANCES), logits.shape[-1])).indices.tolist()
        tokens = [self.text[-1], *outcome.tree.tokens[0]]
        path = [0, *(node + 1 for node in outcome.accepted[0] or ())]
        for index in [*(i for i in range(len(tokens)) if i not in path), *path]:
            self._rows[tokens[index]] = likeliest[index]


class SuffixAutomaton:
    """All substrings of a growing text, each with the end of its first occurrence.

    A state stands for substrings that end at the same places. Source: Blumer et al. 1985.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # by state and token
        self._link = [-1]  # the state of the longest suffix that ends at more places
        self._length = [0]  # of a state's longest substring
        self._end = [0]  # index behind its first occurrence
        self._last = 0

    def append(self, token: int) -> None:
        self.tokens.append(token)
        new = self._add({}, -1, len(self.tokens), len(self.tokens))
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return
        other = self._next[state][token]
        if self._length[state] + 1 == self._length[other]:
            self._link[new] = other
            return
        copy = self._add(dict(self._next[other]), self._link[other], self._length[state] + 1, self._end[other])
        while state >= 0 and self._next[state].get(token) == other:
            self._next[state][token] = copy
            state = self._link[state]
        self._link[other] = self._link[new] = copy

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a match and a token behind it that occurs. Returns its state and length; (0, 0) for
        none."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return (self._next[state][token], length + 1) if token in self._next[state] else (0, 0)

    def following(self, state: int, count: int) -> list[int]:
        """At most `count` tokens behind a state's first occurrence, up to the text's end."""
        end = self._end[state]
        found = self.tokens[end : end + count]
        return found[: found.index(END_OF_TEXT)] if END_OF_TEXT in found else found

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class SamDecoding(TokenRecycling):
    """A copy of what followed the longest match of the text's end; Token Recycling where the match is short
    (arXiv:2411.10666).

    One automaton is of the text itself, one of the texts kept; a match in the latter must be longer by LENGTH_BIAS.
    """

    MIN_MATCH = 5
    LENGTH_BIAS = 5

    def __init__(self, request: DraftRequest) -> None:
        self._kept = state_of(request, "automaton", SuffixAutomaton)
        self._own = SuffixAutomaton()
        self._kept_match = self._own_match = (0, 0)  # state and length
        self._prompt_length = request.prompt_ids.shape[1]
        super().__init__(request)

    def extend(self, tokens: list[int]) -> None:
        super().extend(tokens)
        for token in tokens:
            self._own_match = self._own.step(*self._own_match, token)  # before the token is part of the automaton
            self._own.append(token)
            self._kept_match = self._kept.step(*self._kept_match, token)

    def finish(self) -> None:
        for token in [*self.text[self._prompt_length :], END_OF_TEXT]:
            self._kept.append(token)

    def guess(self) -> TokenTree:
        (own, own_length), (kept, kept_length) = self._own_match, self._kept_match
        store, state, length = self._own, own, own_length
        if kept_length - self.LENGTH_BIAS > own_length:
            store, state, length = self._kept, kept, kept_length - self.LENGTH_BIAS
        if length >= self.MIN_MATCH:
            return chain(store.following(state, self.size))
        return super().guess()


class LogitSpec(FieldDrafter):
    """The likeliest tokens of the row that the last token came from, as guesses of the one after it (arXiv:2507.01449).

    Each of them, and the text as it is, goes on with what followed the latest occurrence of its last three, two or one
    tokens. The likelier ones come first, with more tokens, until the block is full. In the paper only the text itself
    is searched; here the texts kept are, too, where it has no such tokens.
    """

    MAX_MATCH = 3
    # By the size of the block: tokens copied behind the text as it is, and tokens of a guess with its copy by its rank
    # among the likeliest tokens, up to which they hold; behind the last rank it stands alone. The best found; in the
    # paper (6, ((8, 4), (32, 3))).
    LENGTHS = ((8, 4, ()), (16, 6, ((1, 3),)), (64, 6, ((4, 3), (16, 2))))

    def __init__(self, request: DraftRequest) -> None:
        self._kept = state_of(request, "retrieval", Occurrences)
        self._own = Occurrences()
        self._likeliest: list[int] = []
        self._prompt_length = request.prompt_ids.shape[1]
        super().__init__(request)
        fitting = [lengths for q, *lengths in self.LENGTHS if q <= self.size + 1]
        self._first, self._lengths = fitting[-1] if fitting else self.LENGTHS[0][1:]

    def extend(self, tokens: list[int]) -> None:
        super().extend(tokens)
        self._own.extend(tokens)

    def finish(self) -> None:
        self._kept.extend([*self.text[self._prompt_length :], END_OF_TEXT])

    def observe(self, outcome: Outcome) -> None:
        [path] = outcome.accepted
        row = outcome.logits[0, path[-1] + 1 if path else 0]
        self._likeliest = row.topk(min(self.size + 1, len(row))).indices.tolist()

    def guess(self) -> TokenTree:
        text = self.text[-self.MAX_MATCH :]
        candidates = [self._retrieve(text, min(self._first, self.size))]
        for rank, token in enumerate(self._likeliest):
            if token == text[-1]:
                continue
            length = next((length for last, length in self._lengths if rank <= last), 1)
            candidates.append([token, *self._retrieve([*text, token][-self.MAX_MATCH :], length - 1)])
        tree = merge_candidates([candidates])
        return tree.part([list(range(min(self.size, tree.num_nodes)))])

    def _retrieve(self, pattern: list[int], count: int) -> list[int]:
        """What followed the longest match of a pattern: its latest occurrence with `count` tokens behind it, or else
        the earliest."""
        for store in (self._own, self._kept):
            best: tuple[int, int, list[int]] = (0, 0, [])
            for place, length in store.behind(pattern):
                found = store.tokens[place : place + count]
                if END_OF_TEXT in found:
                    found = found[: found.index(END_OF_TEXT)]
                if (length, len(found)) > best[:2]:
                    best = (length, len(found), found)
                if best[:2] == (len(pattern), count):
                    break
            if best[0]:
                return best[2]
        return []


FIELD: dict[str, type[FieldDrafter]] = {
    "prompt-lookup": PromptLookup,
    "suffix-decoding": SuffixDecoding,
    "token-recycling": TokenRecycling,
    "sam-decoding": SamDecoding,
    "logitspec": LogitSpec,
}
# The best (N, W, G) found for lookahead (arXiv:2402.02057) in blocks of at most q tokens.
LOOKAHEAD = {8: (3, 2, 2), 16: (3, 4, 4), 64: (3, 16, 16)}
KEEP_NOTHING = ("lookahead", "prompt-lookup")  # from text to text: warm is as cold


def settings_of(mode: str, q: int) -> dict[str, Any]:
    """What `config_lade` is to be told for blocks of at most q tokens, all of them used in every step."""
    if mode != "lookahead":
        return {"MODE": mode, "MAX_BLOCK": q, "ADAPTIVE": 0}
    if q not in LOOKAHEAD:
        raise ValueError(f"lookahead has settings for blocks of {', '.join(map(str, LOOKAHEAD))} tokens, got {q}")
    level, window, guess = LOOKAHEAD[q]
    return {"MODE": mode, "LEVEL": level, "WINDOW_SIZE": window, "GUESS_SET_SIZE": guess, "ADAPTIVE": 0}


def register() -> None:
    """Let MODE choose each."""
    for name, drafter in FIELD.items():
        register_drafter(name, drafter)
