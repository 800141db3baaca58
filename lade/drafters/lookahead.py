"""The paper's drafter: a Jacobi window that makes n-grams and a pool that remembers them. Floor 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lade.config import LookaheadConfig
from lade.ngram_pool import NGramPool
from lade.texts import Texts
from lade.token_tree import TokenTree, merge_candidates
from lade.window import JacobiWindow


@dataclass(frozen=True, slots=True)
class Draft:
    """The guesses of one step."""

    tree: TokenTree
    max_depth: int  # of the tree
    window_shape: tuple[int, int]  # (N, W) of the window's part of the block; (2, 1) is the root alone
    window_cells: Tensor  # [B, (N-1)*W - 1] ids

    @property
    def has_window(self) -> bool:
        return self.window_shape != ROOT_ALONE


ROOT_ALONE = (2, 1)


class LookaheadDrafter:
    """Proposes the pool's tails of the root; learns from the window's rows and from the committed text."""

    def __init__(self, config: LookaheadConfig, vocab_size: int, prompt_ids: Tensor, key_mask: Tensor | None) -> None:
        """prompt_ids: [B, P] ids, padded on the left. key_mask: [B, P or more] bool, False for padding; None without."""
        self.config = config
        prompt_ids = prompt_ids.long()
        # Beside inputs_embeds, ids may be placeholders that no embedding exists for.
        is_foreign = (prompt_ids < 0) | (prompt_ids >= vocab_size)
        self._known_ids = range(vocab_size) if bool(is_foreign.any()) else None
        prompt_lengths = [prompt_ids.shape[1]] * len(prompt_ids)
        if key_mask is not None:
            prompt_lengths = key_mask[:, key_mask.shape[1] - prompt_ids.shape[1] :].sum(1).clamp(min=1).tolist()
        start_ids = (
            prompt_ids.masked_fill(is_foreign, 0) if prompt_ids.shape[1] else prompt_ids.new_zeros(len(prompt_ids), 1)
        )
        self.window = JacobiWindow.start(
            start_ids, [max(1, length) for length in prompt_lengths], config.ngram_size, config.window_size
        )
        self.pool: NGramPool | None = None
        if config.num_guesses > 0:
            self.pool = NGramPool(config.ngram_size, config.num_guesses, vocab_size, prompt_ids.device)
            if config.pool_from_prompt:
                for row, length in zip(prompt_ids, prompt_lengths, strict=True):
                    self._remember([_ngrams_of(row[len(row) - length :], config.ngram_size)])

    def propose(self, roots: Tensor, max_offset: int | None) -> Draft:
        """Guesses behind each root. roots: [B] ids. max_offset: how far beyond the root one may lie, None for anywhere."""
        self.window.set_root(roots)
        max_depth = self.config.ngram_size - 1
        shape, cells = (self.config.ngram_size, self.config.window_size), self.window.cells()
        if max_offset is not None:
            if max_offset < sum(shape) - 3 or max_offset < max_depth:  # (N-2) + (W-1), the window's last cell
                shape, cells = ROOT_ALONE, cells[:, :0]
            max_depth = min(max_depth, max_offset)
        if self.pool is None or max_depth == 0:
            tree = TokenTree.empty(len(roots))
        else:
            tree = merge_candidates([[tail[:max_depth] for tail in tails] for tails in self.pool.lookup(roots)])
        return Draft(tree, max_depth, shape, cells)

    def learn(self, chosen: Tensor | None, texts: Texts, num_committed: list[int]) -> None:
        """Take in what one step showed.

        chosen: [B, W] the model's choices behind the window's last level; None after a step without a window. texts: the
        committed text of each row, num_committed of whose last tokens are new.
        """
        reach = self.config.ngram_size - 1  # an n-gram that ends in a new token begins at most so far before it
        found = [
            _ngrams_of(texts.row(row)[0, -(count + reach) :], self.config.ngram_size)
            for row, count in enumerate(num_committed)
            if count
        ]
        if chosen is not None:
            if self.window.is_ready:
                found.insert(0, self.window.ngrams(chosen))
            self.window.roll(chosen, None if self.config.always_forward_one else [max(0, n - 1) for n in num_committed])
        self._remember(found)

    def _remember(self, found: list[Tensor]) -> None:
        """Put n-grams into the pool, oldest first. found: [M, N] ids each."""
        if self.pool is None or not found:
            return
        ngrams = torch.cat(found)
        if self._known_ids is not None:
            ngrams = ngrams[((ngrams >= 0) & (ngrams < len(self._known_ids))).all(dim=1)]
        self.pool.insert(ngrams)


def _ngrams_of(tokens: Tensor, ngram_size: int) -> Tensor:
    """Every n-gram of a text, in order. tokens: [T] ids. Returns [max(0, T - N + 1), N]."""
    if len(tokens) < ngram_size:
        return tokens.new_empty(0, ngram_size)
    return tokens.unfold(0, ngram_size, 1)
