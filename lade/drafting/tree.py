"""The tree drafter: every row of a block tells what may come next there, so all of them are remembered and used again.

A row of logits that no accepted token came from still says what the model thinks of its context. Its likeliest tokens
are kept under the last token and under the last two, and a tree is grown from them, best guess first. Source: Token
Recycling (arXiv:2408.08696) for the table by one token; the pairs, the learned chances, the order of growth and the
suffix match are described in docs/drafting.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, islice, zip_longest

import numpy as np
import torch
from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.block_size.costs import Offers
from lade.block_size.policy import EarlyStop, SpeculationBackoff, choose_size
from lade.drafting.acceptance import PROBE, RESUMED_KINDS, SIBLING, STORE_KINDS, SUFFIX_KINDS, name_of
from lade.drafting.base import ROOT_ALONE, Draft, DraftRequest, Explanation, Outcome
from lade.drafting.coming_draws import ComingDraws, Draws
from lade.drafting.growth import Grower, Growth, Pointer, Source
from lade.drafting.likeliest import Rows, likeliest_on_host, with_bins
from lade.drafting.memory import Memory, memory_for
from lade.drafting.suffix_index import MAX_MATCH, Copy, SuffixIndex
from lade.drafting.text_store import TextStore
from lade.drafting.top_k_table import Packed, packed, unpacked
from lade.drafting.vocabulary import vocabulary_of
from lade.verification.sequences import TokenSequences

MAX_DEPTH = 32
LONG_MATCH = 5  # tokens
LONG_COPY = 13  # tokens of a match from which on it is taken up again behind a difference
ROWS_AT_ONCE = 8  # rows of logits that are learned from together: for fewer it takes as long

# Why a block has its size.
RESTS = "No guesses: they have cost more than they gained lately, so a few steps go without."
NO_ROOM = "No guesses: there is no room for them behind the root."
WHOLE = "As many guesses as there is room for: sizes do not follow costs (ADAPTIVE=0)."
SCHEDULED = "A size from a schedule: what blocks cost on this machine is being measured."
BEST = "The size that is expected to commit most tokens per unit of time."
COMPARED = "Not the best size by what is known: it is tried now and then to keep its cost up to date."
BLIND_BLOCK = 16  # tokens of a block whose cost cannot be known: they pay on most devices


class TreeDrafter:
    """Proposes the most probable tree of tokens; learns from every row of a step."""

    def __init__(self, request: DraftRequest) -> None:
        config, temperature = request.config, request.temperature
        self.memory = memory_for(request.model, config.share, request.cost_source)
        self.costs = request.step_costs(saved=self.memory.step_costs)
        is_blind = config.adaptive and request.is_split
        self.max_block = min(config.max_block, BLIND_BLOCK) if is_blind else config.max_block
        self.num_tokens = request.num_tokens
        self.acceptance = self.memory.acceptance[temperature is not None]
        self._warping = (temperature or 1.0, request.top_k, request.top_p)
        self._rows_alone = _rows_alone(request, self.memory)
        self._coming_draws = None if request.draws is None else ComingDraws(request.draws)
        self._suffixes = [SuffixIndex() for _ in request.prompt_ids]
        for index, ids in zip(self._suffixes, request.prompts(), strict=True):
            index.extend(ids.tolist())
        self._prompt_lengths = [len(index.tokens) for index in self._suffixes]
        self._cells = request.prompt_ids.new_empty(len(request.prompt_ids), 0)
        self._copies: dict[int, Copy] = {}  # of each row, what it has copied lately
        self._siblings: dict[int, Source] = {}  # of each row, what stood behind a wrong guess in the place of its root
        self._wrong: dict[int, int] = {}  # of each row, such a guess's place among the rows seen
        self._vocab_size = 0  # width of the logits
        self._num_generated = [0] * len(self._suffixes)
        self._growths = [Growth() for _ in self._suffixes]
        # What was not learned from yet: logits [M, V], or of captured steps the ids and probabilities of the likeliest
        # tokens; and of each row the last two tokens before it, and whether the last one was accepted.
        self._logits: list[Tensor] = []
        self._digested: list[Rows] = []
        self._previous: list[int] = []
        self._tokens: list[int] = []
        self._is_accepted: list[bool] = []
        self._backoff = SpeculationBackoff()
        self._has_searched = False  # for guesses of this step
        self._reason = ""  # for the size of its block
        # The offers of this step, what is expected of k guesses per row at index k, and the number of rows.
        self._compared: tuple[Offers, list[float], int] | None = None
        self._mean_accepted = 0.0  # guesses per row of the last step
        self._proposed: Counter[int] = Counter()  # by kind
        self._accepted: Counter[int] = Counter()

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        self._growths = [Growth() for _ in self._suffixes]
        max_depth = MAX_DEPTH if max_offset is None else min(MAX_DEPTH, max_offset)
        self._num_generated = [len(tokens) for tokens in sequences.generated]
        unfinished = [row for row, done in enumerate(is_finished) if not done]
        self._reason, self._compared = RESTS if max_depth > 0 else NO_ROOM, None
        self._has_searched = max_depth > 0 and not self._takes_rest(unfinished)
        if self._has_searched:
            self._grow_all(unfinished, max_depth, max(sequences.lengths))
        tree = TokenTree([growth.tokens for growth in self._growths], [growth.parents for growth in self._growths])
        depth = max((max(growth.depths, default=0) for growth in self._growths), default=0)
        return Draft(tree, depth, ROOT_ALONE, self._cells, self.explain)

    def learn(self, outcome: Outcome) -> None:
        is_first, self._vocab_size = not self._vocab_size, outcome.logits.shape[-1]
        logits, digest = outcome.logits[..., : self.num_tokens], outcome.digest
        is_due = is_first or len(self._tokens) + logits.shape[:2].numel() >= ROWS_AT_ONCE or digest is not None
        num_judged = num_accepted = 0
        self._siblings, self._wrong = {}, {}
        if digest is not None:
            self._learn_rows()  # those that came without a digest
        for row, (index, growth, path) in enumerate(zip(self._suffixes, self._growths, outcome.accepted, strict=True)):
            if path is None or growth.tokens != outcome.tree.tokens[row]:  # ended before; what goes on there is padding
                continue
            committed = outcome.sequences.generated[row][-len(path) - 1 :]
            first = len(self._tokens)
            if index.tokens:
                num_rows = 1 + len(growth.tokens)
                if digest is not None:
                    self._digested.append((digest.ids[row, :num_rows], digest.chances[row, :num_rows]))
                else:  # where they are kept, the next forward may write where they lie
                    self._logits.append(logits[row, :num_rows] if is_due else logits[row, :num_rows].clone())
                self._see(index.tokens[-2:], growth, path)
            num_judged, num_accepted = num_judged + 1, num_accepted + len(path)
            if row in self._copies:
                self._copies[row].extend(index.tokens, committed)
            index.extend(committed)
            if not growth.tokens:
                self.acceptance.rest()
                continue
            hits = growth.hits(path, committed[-1])
            wrong = growth.sibling(path[-1] if path else -1) if len(hits) == len(path) else None
            if wrong is not None:
                self._wrong[row] = first + 1 + wrong
            self.acceptance.learn(growth.kinds, growth.parents, growth.chances, path, hits)
            self._proposed.update(growth.kinds)
            self._accepted.update(growth.kinds[node] for node in path)
        self._mean_accepted = num_accepted / max(1, num_judged)
        if is_due:
            self._learn_rows()

    def finish(self) -> None:
        self._learn_rows()
        if self.memory.texts is not None:
            for index, length in zip(self._suffixes, self._prompt_lengths, strict=True):
                # What a text began with is found by the end of its prompt.
                self.memory.texts.add(index.tokens[max(0, length - MAX_MATCH) :])

    def spent(self, num_slots: int, num_tokens: int, seconds: float, search_seconds: float) -> None:
        if self.costs is None:
            return
        # A step's cost is without the search for guesses, which is over when a size is chosen.
        costs = self.costs.at(num_slots)
        costs.observe(num_tokens, seconds, search_seconds)
        if self._has_searched and self._reason != SCHEDULED:
            lost = costs.cost(num_tokens) / costs.plain_cost - 1 + costs.search_cost(search_seconds)
            self._backoff.learn(self._mean_accepted - lost, self.acceptance.promise)

    def explain(self, row: int) -> Explanation:
        """For `Draft.explain`."""
        growth, reason = self._growths[row], self._reason
        offers: list[tuple[int, float, float]] = []
        if self._compared is not None:
            compared, expected, num_rows = self._compared
            offers = [
                (size, 1 + expected[size - 1] / num_rows, cost / compared.costs[0])
                for size, cost in zip(compared.sizes, compared.costs, strict=True)
                if size <= len(expected)
            ]
            best, *_ = max(offers, key=lambda offer: offer[1] / offer[2])
            reason = BEST if max(len(g.tokens) for g in self._growths) + 1 == best else COMPARED
        sources = tuple(name_of(kind) for kind in growth.kinds)
        return Explanation(sources, tuple(growth.chances), reason, tuple(offers))

    def sources(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for kind in sorted(self._proposed):
            counts = found.setdefault(name_of(kind), [0, 0])
            counts[0] += self._proposed[kind]
            counts[1] += self._accepted[kind]
        return found

    def _takes_rest(self, rows: list[int]) -> bool:
        """Whether to propose nothing, because guesses have not paid lately; unless the text repeats itself."""
        if self.costs is None or not self._backoff.rests():
            return False
        return all(length < LONG_MATCH for row in rows for _, _, length, _ in self._pointers(row, 1))

    def _grow_all(self, rows: list[int], max_depth: int, num_slots: int) -> None:
        """Trees for some rows, all of the size that pays."""
        costs = None if self.costs is None else self.costs.at(num_slots)
        scheduled = None if costs is None else costs.scheduled_size(self.max_block)
        if costs is None or scheduled is not None:
            self._reason = WHOLE if scheduled is None else SCHEDULED
            for row in rows:
                growth = self._growths[row] = self._grow(row, max_depth, (scheduled or self.max_block) - 1)
                if scheduled is not None:  # any tokens, so that the step has the size that is to be timed
                    self._add_probes(growth, range(self.num_tokens), scheduled - 1)
            return
        offers, trust = costs.offers(self.max_block), self.acceptance.trust
        room, least = offers.sizes[-1] - 1, offers.least_chance / trust
        for row in rows:
            stop = EarlyStop(offers, trust, self.acceptance.chances[PROBE], spare=int(costs.may_explore_next))
            self._growths[row] = self._grow(row, max_depth, room, least, stop)
        grown = [self._growths[row] for row in rows]
        expected = [
            trust * total
            for total in accumulate(map(sum, zip_longest(*(g.chances for g in grown), fillvalue=0.0)), initial=0.0)
        ]
        size = choose_size(costs, expected, len(rows), self.max_block)
        self._compared = offers, expected, len(rows)
        for growth in grown:
            growth.cut(size - 1)

    def _grow(self, row: int, max_depth: int, size: int, least: float = 0.0, stop: EarlyStop | None = None) -> Growth:
        """The best tree of at most `size` nodes behind a text's last token, none of whose chance is below `least`.

        stop: where no more guesses than can pay are wanted.
        """
        text, pointers = self._suffixes[row].tokens, self._pointers(row, max_depth)
        sources, draws = [self._siblings[row]] if row in self._siblings else [], partial(self._draws, row)
        grower = Grower(self.memory, self.acceptance, self._rows_alone, text, draws, sources, pointers)
        growth, is_stopped = grower.grow(max_depth, size, least, stop)
        if not is_stopped:  # tokens whose rows are unknown: the step that tries them learns their rows
            self._add_probes(growth, reversed(list(self.memory.unseen)), size)
        return growth

    def _pointers(self, row: int, count: int) -> list[Pointer]:
        """At most `count` tokens each of what followed where a text's end has occurred before.

        A long match is remembered as what the text copies, to be taken up again behind a difference.
        """
        index, texts = self._suffixes[row], self.memory.texts
        own = index.matches()
        found = _followed(index, own, SUFFIX_KINDS, count)
        if own and own[0][1] >= LONG_COPY:
            self._copies[row] = Copy(own[0][0])
        elif row in self._copies:
            places = [place for place, _ in own]
            resumed = [match for match in self._copies[row].resumed(index.tokens) if match[0] not in places]
            found += _followed(index, resumed, RESUMED_KINDS, count)
        if texts is not None:
            shorter = own[0][1] if own else 0
            matches = texts.matches(index.tokens[-MAX_MATCH:])
            others = _followed(texts, matches, STORE_KINDS, count)
            found += [pointer for pointer in others if pointer[2] > shorter]
        return found

    def _draws(self, row: int, depth: int) -> Draws | None:
        """The draws of a token at some distance from the root; None where they are not known, or for greedy."""
        if self._coming_draws is None:
            return None
        return self._coming_draws.peek(row, self._num_generated[row] + depth - 1, self._vocab_size)

    def _add_probes(self, growth: Growth, tokens: Iterable[int], size: int) -> None:
        """Fill what is left of a tree with tokens that it does not have behind the root."""
        room = size - len(growth.tokens)
        if room <= 0:
            return
        known = {token for token, parent in zip(growth.tokens, growth.parents, strict=True) if parent < 0}
        for token in islice((token for token in tokens if token not in known), room):
            growth.add(token, -1, PROBE, self.acceptance.chances[PROBE], 1)

    def _see(self, roots: list[int], growth: Growth, path: list[int]) -> None:
        """Take note of which tokens a step's rows of logits are of. roots: the last two of the text. path: accepted."""
        tokens = [roots[-1], *growth.tokens]
        self._tokens += tokens
        self._previous += [roots[0] if len(roots) > 1 else -1, *(tokens[parent + 1] for parent in growth.parents)]
        accepted = {0, *(node + 1 for node in path)}
        self._is_accepted += [place in accepted for place in range(len(tokens))]

    def _likeliest(self) -> Rows:
        """Ids and probabilities of the likeliest tokens of the rows seen."""
        if self._digested:
            ids, chances = zip(*self._digested, strict=True)
            return np.concatenate(ids), np.concatenate(chances)
        first, *others = self._logits
        return likeliest_on_host(torch.cat(self._logits) if others else first, self._warping[0])

    def _learn_rows(self) -> None:
        """Remember the rows seen, those of accepted tokens last: later ones count more."""
        if not self._tokens:
            return
        rows = packed(*with_bins(*self._likeliest(), *self._warping[1:]))
        self._siblings = {row: (rows[i], SIBLING) for row, i in self._wrong.items()}
        order = sorted(range(len(rows)), key=self._is_accepted.__getitem__)  # stable
        rows, num_accepted = rows[order], sum(self._is_accepted)
        self.memory.learn([self._previous[i] for i in order], [self._tokens[i] for i in order], rows, num_accepted)
        _, bins = unpacked(rows[len(order) - num_accepted :, 0])
        self.acceptance.learn_sureness(bins.tolist())
        self._logits, self._digested, self._previous, self._tokens, self._is_accepted = [], [], [], [], []


def _followed(
    texts: SuffixIndex | TextStore, matches: list[tuple[int, int]], kinds: Sequence[tuple[int, ...]], count: int
) -> list[Pointer]:
    """At most `count` tokens behind each match. kinds: of each match."""
    found = zip(matches, kinds, strict=False)
    return [(texts.following(place, count), 0, length, by_length) for (place, length), by_length in found]


def _rows_alone(request: DraftRequest, memory: Memory) -> Packed | None:
    """Rows of tokens that nothing else is known of, where there are any."""
    may_load = request.cost_source != "assumed"  # no text is to depend on what earlier processes have stored
    may_make = request.may_measure and not request.is_split
    found = memory.vocabulary or vocabulary_of(request.model, may_make, may_load)
    return None if found is None or found.largest_id >= request.num_tokens else found.at(request.temperature or 1.0)
