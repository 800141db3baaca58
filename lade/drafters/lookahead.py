"""The paper's drafter: a Jacobi window that makes n-grams and a pool that remembers them. Floor 2."""

from __future__ import annotations

import torch
from torch import Tensor

from lade.config import LookaheadConfig
from lade.ngram_pool import NGramPool
from lade.token_tree import TokenTree, merge_candidates
from lade.window import JacobiWindow


class LookaheadDrafter:
    """Proposes the pool's tails of the root; learns from the window's rows and from the committed text."""

    def __init__(self, config: LookaheadConfig, vocab_size: int, prompt_ids: Tensor, prompt_lengths: list[int]) -> None:
        """prompt_ids: [B, P] ids, padded on the left. prompt_lengths: real tokens of each row, at least 1."""
        device = prompt_ids.device
        self.config = config
        self.window = JacobiWindow.start(
            prompt_ids, torch.tensor(prompt_lengths, device=device), config.ngram_size, config.window_size
        )
        self.pool: NGramPool | None = None
        if config.num_guesses > 0:
            self.pool = NGramPool(config.ngram_size, config.num_guesses, vocab_size, device)
            if config.pool_from_prompt:
                for row, length in zip(prompt_ids, prompt_lengths, strict=True):
                    self.pool.insert(_ngrams_of(row[len(row) - length :], config.ngram_size))

    def propose(self, roots: Tensor) -> TokenTree:
        """Candidates behind each root. roots: [B] ids."""
        self.window.set_root(roots)
        if self.pool is None:
            return TokenTree.empty(len(roots), roots.device)
        return merge_candidates(self.pool.lookup(roots))

    def learn(self, chosen: Tensor | None, texts: list[Tensor], num_committed: list[int]) -> None:
        """Take in what one step showed.

        chosen: [B, W] the model's choices behind the window's last level, None after a prefill. texts: the committed
        text of each row. num_committed: how many of its last tokens are new.
        """
        reach = self.config.ngram_size - 1  # an n-gram that ends in a new token begins at most so far before it
        news = [
            text[max(0, len(text) - count - reach) :] for text, count in zip(texts, num_committed, strict=True) if count
        ]
        found = [_ngrams_of(text, self.config.ngram_size) for text in news]
        if chosen is not None:
            if self.window.is_ready:
                found.insert(0, self.window.ngrams(chosen))
            self.window.roll(chosen, None if self.config.always_forward_one else [max(0, n - 1) for n in num_committed])
        if self.pool is not None and found:
            self.pool.insert(torch.cat(found))


def _ngrams_of(tokens: Tensor, ngram_size: int) -> Tensor:
    """Every n-gram of a text, in order. tokens: [T] ids. Returns [max(0, T - N + 1), N]."""
    if len(tokens) < ngram_size:
        return tokens.new_empty(0, ngram_size)
    return tokens.unfold(0, ngram_size, 1)
