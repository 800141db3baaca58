"""The tree drafter: every row of a block is a prediction of the next token, so all of them are remembered and reused.

A row of logits that no accepted token came from is still the model's prediction for its context. Its likeliest tokens
are kept under the last token and under the last two, and a tree is grown from them, best guess first. Source: Token
Recycling (arXiv:2408.08696) for the table by one token; the pairs, the learned probabilities, the order of growth and
the suffix match are described in docs/drafting.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, islice, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.block_size.costs import Offers
from lade.block_size.policy import EarlyStop, SpeculationBackoff, choose_size, compared_sizes
from lade.drafting.acceptance import PROBE, SIBLING, name_of
from lade.drafting.base import FOREIGN, ROOT_ALONE, Draft, DraftRequest, Explanation, Outcome
from lade.drafting.coming_draws import ComingDraws, Draws
from lade.drafting.growth import Grower, Growth
from lade.drafting.likeliest import most_likely
from lade.drafting.memory import Memory, memory_for
from lade.drafting.nearest import projected, projection, uses_contexts
from lade.drafting.seen_rows import SeenRows
from lade.drafting.text import DraftedText
from lade.drafting.top_k_table import BIN_OF_GRADE, Packed, packed, unpacked
from lade.drafting.vocabulary import RowsAlone, vocabulary_of
from lade.transfer import on_host
from lade.verification.logits import LogitsDigest
from lade.verification.sequences import TokenSequences

MAX_DEPTH = 32
LONG_MATCH = 5  # tokens
ROWS_AT_ONCE = 8  # rows of logits that are learned from together; fewer take as long
MAX_PROMPT_ROWS = 128  # of all prompts of a call, and no more than twice MAX_BLOCK: their logits take memory, too

# Why a block has its size.
RESTS = "No guesses: they have cost more than they gained lately, so a few steps have none."
NO_ROOM = "No guesses: there is no room for them after the root."
WHOLE = "As many guesses as there is room for: sizes do not follow costs (ADAPTIVE=0)."
SCHEDULED = "A size from a schedule: block costs on this machine are being measured."
BEST = "The size that is expected to commit most tokens per unit of time."
COMPARED = "Not the best known size: it is tried now and then to keep its cost up to date."
BLIND_BLOCK = 16  # tokens of a block of unknown cost: so many pay on most devices


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
        self._rows_alone = _rows_alone(request, self.memory)
        self.prompt_rows = 0 if self._rows_alone is not None else _num_prompt_rows(request)
        self._uses_contexts = uses_contexts(request.model, config)
        self._coming_draws = None if request.draws is None else ComingDraws(request.draws)
        self._texts = [DraftedText(ids.tolist()) for ids in request.prompts()]
        self._prompt_shape, self._is_text = request.prompt_ids.shape, request.is_text()
        self._sampling = temperature or 1.0, request.top_k, request.top_p
        self._seen = SeenRows(*self._sampling)
        self._cells = request.prompt_ids.new_empty(len(request.prompt_ids), 0)
        self._vocab_size = 0  # width of the logits
        self._backoff = SpeculationBackoff()
        self._has_searched = False  # for guesses of this step
        self._reason = ""  # for the size of its block
        # The offers of this step, what is expected of k guesses per row at index k, the number of rows, and the size.
        self._compared: tuple[Offers, list[float], int, int] | None = None
        self._mean_accepted = 0.0  # guesses per row of the last step
        self._proposed: Counter[int] = Counter()  # by kind
        self._accepted: Counter[int] = Counter()

    def read_prompt(self, logits: Tensor) -> None:
        masks = np.ones(self._prompt_shape, bool) if self._is_text is None else self._is_text.cpu().numpy()
        # Some adapters put tokens of their own before the prompt.
        logits = logits[:, 1 - masks.shape[1] :, : self.num_tokens]
        num_texts, num_rows, _ = logits.shape
        every = packed(*most_likely(logits.flatten(0, 1), *self._sampling))
        rows, projections = every.reshape(num_texts, num_rows, -1), self._projections(logits)
        for number, (text, mask) in enumerate(zip(self._texts, masks, strict=True)):
            is_text, is_last_text = mask[:-1], mask[-1]
            end, chosen = int(is_text.sum()), np.flatnonzero(is_text[-num_rows:])
            first = end - len(chosen)
            # Behind the last place for which only an embedding was given.
            first = max((place + 1 for place in range(first, end) if text.tokens[place] == FOREIGN), default=first)
            if first == end:
                continue
            chosen = chosen[first - end :]
            own = None if projections is None else projections[number, chosen]
            before = text.tokens[first - 1] if first else -1
            context = self.memory.learn_text(before, text.tokens[first:end], rows[number, chosen], own)
            text.context = context if is_last_text else None

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        for text, generated in zip(self._texts, sequences.generated, strict=True):
            text.begin_step(len(generated))
        unfinished = [row for row, done in enumerate(is_finished) if not done]
        max_depth = MAX_DEPTH if max_offset is None else min(MAX_DEPTH, max_offset)
        self._reason, self._compared = RESTS if max_depth > 0 else NO_ROOM, None
        self._has_searched = max_depth > 0 and not self._takes_rest(unfinished)
        if self._has_searched:
            self._grow_all(unfinished, max_depth, max(sequences.lengths))
        growths = [text.growth for text in self._texts]
        tree = TokenTree([growth.tokens for growth in growths], [growth.parents for growth in growths])
        depth = max((max(growth.depths, default=0) for growth in growths), default=0)
        return Draft(tree, depth, ROOT_ALONE, self._cells, self.explain)

    def learn(self, outcome: Outcome) -> None:
        is_first, self._vocab_size = not self._vocab_size, outcome.logits.shape[-1]
        num_rows = outcome.logits.shape[:2].numel()
        is_due = is_first or len(self._seen) + num_rows >= ROWS_AT_ONCE or outcome.digest is not None
        if outcome.digest is not None:
            self._learn_rows()  # those without a digest
        projections = self._projections(outcome.logits, outcome.digest)
        num_judged = num_accepted = 0
        replaced: dict[int, int] = {}  # by text, the index among the rows seen of a wrong guess
        for row, (text, path) in enumerate(zip(self._texts, outcome.accepted, strict=True)):
            if path is None or text.growth.tokens != outcome.tree.tokens[row]:
                continue  # ended before; what follows is padding
            num_seen = len(self._seen)
            if text.tokens:
                self._see(outcome, projections, row, path, is_due)
            committed = outcome.sequences.generated[row][-len(path) - 1 :]
            text.extend(committed)
            wrong = self._judge(text.growth, path, committed[-1])
            if wrong is not None:
                replaced[row] = num_seen + 1 + wrong
            num_judged, num_accepted = num_judged + 1, num_accepted + len(path)
        self._mean_accepted = num_accepted / max(1, num_judged)
        rows = self._learn_rows() if is_due else None
        for number, text in enumerate(self._texts):
            text.sibling = (rows[replaced[number]], SIBLING) if rows is not None and number in replaced else None

    def finish(self) -> None:
        self._learn_rows()
        if self.memory.texts is not None:
            for text in self._texts:
                self.memory.texts.add(text.to_keep)

    def spent(self, num_slots: int, num_tokens: int, seconds: float, search_seconds: float) -> None:
        if self.costs is None:
            return
        # A step's cost excludes the search for guesses, which ends before a size is chosen.
        costs = self.costs.at(num_slots)
        costs.observe(num_tokens, seconds, search_seconds)
        if self._has_searched and self._reason != SCHEDULED:
            lost = costs.cost(num_tokens) / costs.plain_cost - 1 + costs.search_cost(search_seconds)
            self._backoff.learn(self._mean_accepted - lost, self.acceptance.promise)

    def explain(self, row: int) -> Explanation:
        """For `Draft.explain`."""
        growth, reason = self._texts[row].growth, self._reason
        compared: list[tuple[int, float, float]] = []
        if self._compared is not None:
            offers, expected, num_rows, chosen = self._compared
            compared = [
                (size, num_tokens / num_rows, cost / offers.costs[0])
                for size, num_tokens, cost in compared_sizes(offers, expected, num_rows)
            ]
            best, *_ = max(compared, key=lambda offer: offer[1] / offer[2])
            reason = BEST if chosen == best else COMPARED
        sources = tuple(name_of(kind) for kind in growth.kinds)
        return Explanation(sources, tuple(growth.chances), reason, tuple(compared))

    def sources(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for kind in sorted(self._proposed):
            counts = found.setdefault(name_of(kind), [0, 0])
            counts[0] += self._proposed[kind]
            counts[1] += self._accepted[kind]
        return found

    def _takes_rest(self, rows: list[int]) -> bool:
        """Whether to propose nothing, because guesses have not paid lately and the text does not repeat itself."""
        if self.costs is None or not self._backoff.begin_step():
            return False
        pointers = (pointer for row in rows for pointer in self._texts[row].pointers(self.memory.texts, 1))
        return all(pointer.length < LONG_MATCH for pointer in pointers)

    def _grow_all(self, rows: list[int], max_depth: int, num_slots: int) -> None:
        """Trees for some rows, all of the size that pays most."""
        costs = None if self.costs is None else self.costs.at(num_slots)
        scheduled = None if costs is None else costs.scheduled_size(self.max_block)
        if costs is None or scheduled is not None:
            self._reason = WHOLE if scheduled is None else SCHEDULED
            for row in rows:
                growth = self._texts[row].growth = self._grow(row, max_depth, (scheduled or self.max_block) - 1)
                if scheduled is not None:  # any tokens will do: the step must have the scheduled size to be timed
                    self._add_probes(growth, range(self.num_tokens), scheduled - 1)
            return
        offers, trust = costs.offers(self.max_block), self.acceptance.trust
        room, least = offers.sizes[-1] - 1, offers.least_chance / trust
        for row in rows:
            stop = EarlyStop(offers, trust, self.acceptance.chances[PROBE], spare=int(costs.may_explore_next))
            self._texts[row].growth = self._grow(row, max_depth, room, least, stop)
        grown = [self._texts[row].growth for row in rows]
        expected = [
            trust * total
            for total in accumulate(map(sum, zip_longest(*(g.chances for g in grown), fillvalue=0.0)), initial=0.0)
        ]
        size = choose_size(costs, expected, len(rows), self.max_block)
        self._compared = offers, expected, len(rows), size
        for growth in grown:
            growth.cut(size - 1)

    def _grow(self, row: int, max_depth: int, size: int, least: float = 0.0, stop: EarlyStop | None = None) -> Growth:
        """The best tree of at most `size` nodes after a text's last token, none with a probability below `least`.

        stop: ends growth once no larger tree can pay; None for the whole size.
        """
        text, draws_at = self._texts[row], partial(self._draws_at, row)
        sources = [] if text.sibling is None else [text.sibling]
        pointers = text.pointers(self.memory.texts, max_depth)
        memory = self.memory, self.acceptance, self._rows_alone
        grower = Grower(*memory, text.tokens, text.context, draws_at, sources, pointers)
        growth, is_stopped = grower.grow(max_depth, size, least, stop)
        if not is_stopped:  # tokens whose rows are unknown: the step that tries them learns their rows
            self._add_probes(growth, reversed(list(self.memory.unseen)), size)
        return growth

    def _draws_at(self, row: int, depth: int) -> Draws | None:
        """The draws of a token at some distance from the root; None if they are not known, or in greedy decoding."""
        if self._coming_draws is None:
            return None
        return self._coming_draws.peek(row, self._texts[row].num_generated + depth - 1, self._vocab_size)

    def _add_probes(self, growth: Growth, tokens: Iterable[int], size: int) -> None:
        """Fill the rest of a tree with tokens that it does not have after the root."""
        room = size - len(growth.tokens)
        if room <= 0:
            return
        known = {token for token, parent in zip(growth.tokens, growth.parents, strict=True) if parent < 0}
        for token in islice((token for token in tokens if token not in known), room):
            growth.add(token, -1, PROBE, self.acceptance.chances[PROBE], 1)

    def _projections(self, logits: Tensor, digest: LogitsDigest | None = None) -> npt.NDArray[Any] | None:
        """What contexts of rows of logits are made of, [B, R, CONTEXT_SIZE]; None where they are not used."""
        if not self._uses_contexts:
            return None
        if digest is not None:
            return digest.projections
        return projected(logits[..., : self.num_tokens], projection(logits.device)).cpu().numpy()

    def _see(
        self, outcome: Outcome, projections: npt.NDArray[Any] | None, row: int, path: list[int], is_due: bool
    ) -> None:
        """Add one text's rows of a step. is_due: they are learned from before the next forward."""
        text, digest = self._texts[row], outcome.digest
        roots, num_rows = text.tokens[-2:], 1 + len(text.growth.tokens)
        if digest is not None:
            ids, chances = digest.ids[row, :num_rows], digest.chances[row, :num_rows]
            self._seen.add_digested(roots, text.growth, path, ids, chances)
        else:  # they wait, and the next forward may overwrite their memory
            logits = outcome.logits[row, :num_rows, : self.num_tokens]
            self._seen.add(roots, text.growth, path, logits if is_due else logits.clone())
        if projections is not None:
            after = self.memory.nearest.contexts(projections[row, :num_rows])
            self._seen.contexts.append(text.take_contexts(path, after))

    def _judge(self, growth: Growth, path: list[int], last: int) -> int | None:
        """Learn which guesses were right. path: the accepted ones. last: the token committed after them.

        Returns the likeliest wrong guess in the last token's place, None if there is none.
        """
        if not growth.tokens:
            self.acceptance.rest()
            return None
        hits = growth.hits(path, last)
        self.acceptance.learn(growth.kinds, growth.parents, growth.chances, path, hits)
        self._proposed.update(growth.kinds)
        self._accepted.update(growth.kinds[node] for node in path)
        return growth.sibling(path[-1] if path else -1) if len(hits) == len(path) else None

    def _learn_rows(self) -> Packed | None:
        """Remember the rows seen, those of accepted tokens last, since later ones win. Returns them in seen order."""
        if not len(self._seen):
            return None
        rows, seen = self._seen.packed(), self._seen
        order = sorted(range(len(rows)), key=seen.is_accepted.__getitem__)  # stable
        in_order, num_accepted = rows[order], sum(seen.is_accepted)
        self.memory.learn([seen.previous[i] for i in order], [seen.tokens[i] for i in order], in_order, num_accepted)
        contexts = seen.all_contexts() if self._uses_contexts else None
        if contexts is not None:
            self.memory.nearest.put(seen.previous, seen.tokens, rows, *contexts)
        _, grades = unpacked(in_order[len(order) - num_accepted :, 0])
        self.acceptance.learn_sureness([BIN_OF_GRADE[grade] for grade in grades.tolist()])
        seen.clear()
        return rows


def _rows_alone(request: DraftRequest, memory: Memory) -> RowsAlone | None:
    """Rows for tokens and pairs without other rows; None if there are none."""
    may_load = request.cost_source != "assumed"  # no text may depend on what earlier processes have stored
    may_make = request.may_measure and not request.is_split
    found = memory.vocabulary or vocabulary_of(request.model, may_make, may_load)
    return None if found is None or found.largest_id >= request.num_tokens else found.at(request.temperature or 1.0)


def _num_prompt_rows(request: DraftRequest) -> int:
    """Behind how many of each prompt's tokens logits pay. Where tokens have rows of their own alone they gain nothing.

    A row costs a product with the head. That is next to nothing on an accelerator, on a CPU about what it gains.
    """
    batch_size, length = request.prompt_ids.shape
    is_cheap = not on_host(request.prompt_ids) or not request.config.adaptive
    if request.is_split or length < 2 or not is_cheap:  # processes may differ in what they know of tokens alone
        return 0
    return min(MAX_PROMPT_ROWS, 2 * request.config.max_block) // batch_size
