"""The paper's drafter: a Jacobi window that makes n-grams and a pool that remembers them."""

from __future__ import annotations

import torch
from torch import Tensor

from lade.block.token_tree import TokenTree, merge_candidates
from lade.drafting.base import ROOT_ALONE, Draft, Drafter, DraftRequest, Explanation, Outcome
from lade.drafting.ngram_pool import NGramPool
from lade.drafting.step_costs import MOST_PAPER_COST
from lade.drafting.window import JacobiWindow
from lade.verification.sequences import TokenSequences

# By the number of the block's parts, candidates and window.
REASONS = (
    "Neither candidates nor the window: even one candidate would cost more than it yields.",
    "Candidates without the window, which would cost more than it yields.",
    "The window, which makes new n-grams, and candidates from the pool.",
)


class LookaheadDrafter(Drafter):
    """Proposes the pool's tails of the root; learns from the window's rows and from the committed text."""

    def __init__(self, request: DraftRequest) -> None:
        config, prompts = request.config, request.prompts()
        self.config, self.costs = config, request.costs
        self._num_parts = 0  # of the latest block
        self._num_nodes = [0] * len(prompts)  # of the latest tree, by row
        self._num_proposed = self._num_accepted = 0
        self._num_tokens = request.num_tokens
        ids = request.prompt_ids  # hidden ones stand in the text as well
        self._has_foreign = bool(((ids < 0) | (ids >= request.num_tokens)).any())
        starts = [ids.clamp(min=0) if len(ids) else ids.new_zeros(1) for ids in prompts]
        self.window = JacobiWindow.start(starts, config.ngram_size, config.window_size)
        self.pool: NGramPool | None = None
        if config.num_guesses > 0:
            self.pool = NGramPool(config.ngram_size, config.num_guesses, request.num_tokens, starts[0].device)
            for ids in prompts:
                self._remember([_ngrams_of(ids, config.ngram_size)])

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        roots = torch.tensor(sequences.roots(), device=sequences.device)
        self.window.set_root(roots)
        # Of a block with one candidate, and of the whole one: a part that costs too much is left out.
        sizes = self.config.ngram_size, self.config.max_block_tokens
        self._num_parts = sum(self.costs is None or self.costs.cost(size) <= MOST_PAPER_COST for size in sizes)
        max_depth = self.config.ngram_size - 1 if self._num_parts else 0
        shape, cells = (self.config.ngram_size, self.config.window_size), self.window.cells()
        reach = max(sum(shape) - 3, max_depth)  # (N-2) + (W-1), the window's last cell
        if self._num_parts < len(sizes) or (max_offset is not None and max_offset < reach):
            shape, cells = ROOT_ALONE, cells[:, :0]
        if max_offset is not None:
            max_depth = min(max_depth, max_offset)
        if self.pool is None or max_depth == 0:
            tree = TokenTree.empty(len(roots))
        else:
            tree = merge_candidates([[tail[:max_depth] for tail in tails] for tails in self.pool.lookup(roots)])
        self._num_nodes = [len(tokens) for tokens in tree.tokens]
        return Draft(tree, max_depth, shape, cells, self.explain)

    def learn(self, outcome: Outcome) -> None:
        chosen, num_committed = outcome.choices, outcome.num_committed
        rows = zip(outcome.accepted, outcome.tree.tokens, strict=True)
        judged = [(len(path), len(tokens)) for path, tokens in rows if path is not None]
        self._num_accepted += sum(accepted for accepted, _ in judged)
        self._num_proposed += sum(proposed for _, proposed in judged)
        reach = self.config.ngram_size - 1  # an n-gram that ends in a new token begins at most so far before it
        found = [
            _ngrams_of(outcome.sequences.row(row)[0, -(count + reach) :], self.config.ngram_size)
            for row, count in enumerate(num_committed)
            if count
        ]
        if chosen is not None:
            if self.window.is_ready:
                found.insert(0, self.window.ngrams(chosen))
            self.window.roll(chosen)
        self._remember(found)

    def sources(self) -> dict[str, list[int]]:
        return {"pool": [self._num_proposed, self._num_accepted]}

    def explain(self, row: int) -> Explanation:
        """The sources of a row's guesses and the reason for the block's size, see `Draft.explain`."""
        return Explanation(sources=("pool",) * self._num_nodes[row], reason=REASONS[self._num_parts])

    def _remember(self, found: list[Tensor]) -> None:
        """Put n-grams into the pool, oldest first. found: [M, N] ids each."""
        if self.pool is None or not found:
            return
        ngrams = torch.cat(found)
        if self._has_foreign:
            ngrams = ngrams[((ngrams >= 0) & (ngrams < self._num_tokens)).all(dim=1)]
        self.pool.insert(ngrams)


def _ngrams_of(tokens: Tensor, ngram_size: int) -> Tensor:
    """Every n-gram of a text, in order. tokens: [T] ids. Returns [max(0, T - N + 1), N]."""
    if len(tokens) < ngram_size:
        return tokens.new_empty(0, ngram_size)
    return tokens.unfold(0, ngram_size, 1)
