"""The tree drafter: every row of a block is a prediction of the next token, so all of them are remembered and reused.

A row of logits that no accepted token came from is still the model's prediction for its context. Its likeliest tokens
are kept under the last token and under its context, and a tree is grown from them, best guess first. Source: Token
Recycling (arXiv:2408.08696) for the table by token; the rest is described in docs/drafting.md.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, zip_longest
from typing import Any

import numpy.typing as npt
from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.drafting.base import ROOT_ALONE, Draft, DraftRequest, Explanation, Outcome
from lade.drafting.block_policy import choose_size, compared_sizes
from lade.drafting.contexts import projected, projection
from lade.drafting.growth import Grower, Growth
from lade.drafting.likeliest import most_likely
from lade.drafting.memory import memory_for
from lade.drafting.text import DraftedText
from lade.drafting.top_k_table import Packed, packed, without
from lade.verification.logits import LogitsSummary
from lade.verification.sequences import TokenSequences

MAX_DEPTH = 32

# Why a block has its size.
NO_ROOM = "No guesses: there is no room for them after the root."
WHOLE = "As many guesses as there is room for: sizes do not follow costs (ADAPTIVE=0)."
BEST = "The size that is expected to commit most tokens per unit of time."
BLIND_BLOCK = 16  # tokens of a block of unknown cost: so many pay on most devices


class TreeDrafter:
    """Proposes the most probable tree of tokens; learns from every row of a step."""

    def __init__(self, request: DraftRequest) -> None:
        config, temperature = request.config, request.temperature
        self.memory = memory_for(request.model, config.share, request.is_exact)
        self.costs = request.costs
        is_blind = config.adaptive and self.costs is None
        self.max_block = min(config.max_block, BLIND_BLOCK) if is_blind else config.max_block
        self.num_tokens, self._takes_chains = request.num_tokens, request.takes_chains
        prompts = request.prompts()
        predictions = request.predictions or ((),) * len(prompts)
        self._texts = [DraftedText(ids.tolist(), text) for ids, text in zip(prompts, predictions, strict=True)]
        self._temperature = temperature or 1.0
        self._cells = request.prompt_ids.new_empty(len(request.prompt_ids), 0)
        self._reason = ""  # for the size of this step's block
        self._compared: list[tuple[int, float, float]] = []  # sizes of this step's block, as from `compared_sizes`
        self._proposed: Counter[str] = Counter()  # by source
        self._accepted: Counter[str] = Counter()

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        for text in self._texts:
            text.growth = Growth()
        unfinished = [row for row, done in enumerate(is_finished) if not done]
        max_depth = MAX_DEPTH if max_offset is None else min(MAX_DEPTH, max_offset)
        self._compared = []
        self._reason = NO_ROOM
        if unfinished and max_depth > 0:
            self._grow_all(unfinished, max_depth)
        growths = [text.growth for text in self._texts]
        tree = TokenTree([growth.tokens for growth in growths], [growth.parents for growth in growths])
        depth = max((max(growth.depths, default=0) for growth in growths), default=0)
        return Draft(tree, depth, ROOT_ALONE, self._cells, self.explain)

    def learn(self, outcome: Outcome) -> None:
        rows, projections = self._read(outcome.logits, outcome.summary)
        for number, (text, path) in enumerate(zip(self._texts, outcome.accepted, strict=True)):
            growth = text.growth
            if path is None or growth.tokens != outcome.tree.tokens[number]:
                continue  # ended before; what follows is padding
            size = 1 + len(growth.tokens)
            own = rows[number, :size]
            if text.tokens:
                self._learn_rows(text, path, own, projections[number, :size])
            committed = outcome.sequences.generated[number][-len(path) - 1 :]
            text.extend(committed)
            text.root_row = without(own[path[-1] + 1 if path else 0], committed[-1])
            self._proposed.update(growth.sources)
            self._accepted.update(growth.sources[node] for node in path)

    def finish(self) -> None:
        if self.memory.texts is not None:
            for text in self._texts:
                self.memory.texts.add(text.to_keep)

    def explain(self, row: int) -> Explanation:
        """The sources of a row's guesses and the reason for the block's size, see `Draft.explain`."""
        growth = self._texts[row].growth
        return Explanation(tuple(growth.sources), tuple(growth.chances), self._reason, tuple(self._compared))

    def sources(self) -> dict[str, list[int]]:
        return {source: [self._proposed[source], self._accepted[source]] for source in sorted(self._proposed)}

    def _grow_all(self, rows: list[int], max_depth: int) -> None:
        """Trees for some rows, all of the size that pays most."""
        offers = None if self.costs is None else self.costs.offers(self.max_block)
        size, least = (self.max_block, 0.0) if offers is None else (offers.sizes[-1], offers.least_probability)
        for row in rows:
            self._texts[row].growth = self._grow(row, max_depth, size - 1, least)
        self._narrow(rows)
        self._reason = WHOLE if offers is None else BEST
        if offers is None:
            return
        grown = [self._texts[row].growth for row in rows]
        columns = zip_longest(*(growth.chances for growth in grown), fillvalue=0.0)
        expected = list(accumulate(map(sum, columns), initial=0.0))
        self._compared = compared_sizes(offers, expected, len(rows))
        size = choose_size(self._compared)
        for growth in grown:
            growth.cut(size - 1)

    def _narrow(self, rows: list[int]) -> None:
        """Replace trees by their best paths, all as long as the shortest, if the model takes only chains."""
        if self._takes_chains:
            paths = [self._texts[row].growth.best_path() for row in rows]
            length = min((len(path.tokens) for path in paths), default=0)
            for row, path in zip(rows, paths, strict=True):
                path.cut(length)
                self._texts[row].growth = path

    def _grow(self, row: int, max_depth: int, size: int, least: float) -> Growth:
        """The best tree of at most `size` nodes after a text's last token, none with a probability below `least`."""
        text = self._texts[row]
        copies = text.copies(self.memory.texts, max_depth)
        grower = Grower(self.memory, text.tokens, text.context, text.root_row, copies)
        return grower.grow(max_depth, size, least)

    def _read(self, logits: Tensor, summary: LogitsSummary | None = None) -> tuple[Packed, npt.NDArray[Any]]:
        """Rows [B, R, ROW_LENGTH] and projections [B, R, CONTEXT_SIZE] of logits [B, R, V]."""
        if summary is not None:
            shape, projections = summary.ids.shape[:2], summary.projections
            rows = packed(*(part.reshape(-1, part.shape[2]) for part in (summary.ids, summary.chances)))
        else:
            logits = logits[..., : self.num_tokens]
            shape, projections = logits.shape[:2], projected(logits, projection(logits.device)).cpu().numpy()
            rows = most_likely(logits.flatten(0, 1), self._temperature)
        return rows.reshape(*shape, -1), projections

    def _learn_rows(self, text: DraftedText, path: list[int], rows: Packed, projections: npt.NDArray[Any]) -> None:
        """Remember the rows after a text's root and each guess, [1 + n, ..]. path: the accepted guesses."""
        tokens = [text.tokens[-1], *text.growth.tokens]
        accepted = [0, *(node + 1 for node in path)]
        self.memory.learn(tokens, rows, accepted)
        after = self.memory.contexts.contexts(projections)
        if after is not None:
            self.memory.contexts.put(tokens, rows, text.contexts_before(after), after)
        text.context = None if after is None else after[accepted[-1]]
