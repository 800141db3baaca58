"""The pool: for each key token, the tails that followed it, most recently seen first. Device tensors only.

Knows nothing about models or text. Floor 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BYTES = 16 * 2**20  # upper bound of one pool's memory
INSERT_CHUNK = 256  # n-grams compared with each other at once; bounds the quadratic part of insert()


class NGramPool:
    """At most G n-grams of N tokens per key; a full row drops its least recently seen one.

    Each key has a row of its own while V * G * (N + 1) integers fit MAX_BYTES. Beyond that, keys that are congruent
    modulo the number of rows share a row: they evict each other, and `lookup` returns only the asked key's n-grams.
    """

    def __init__(self, ngram_size: int, num_guesses: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """ngram_size: N >= 2. num_guesses: G >= 1. vocab_size: V."""
        bytes_per_row = num_guesses * (ngram_size + 1) * 8
        self.num_rows = max(1, min(vocab_size, MAX_BYTES // bytes_per_row))
        self.num_guesses = num_guesses
        # The extra last row takes the writes that are to have no effect, so that every shape stays fixed.
        self.ngrams = torch.full((self.num_rows + 1, num_guesses, ngram_size), -1, device=device)  # [rows, G, N]
        self.seen = torch.zeros(self.num_rows + 1, num_guesses, dtype=torch.long, device=device)  # 0 = empty slot
        self.clock = 1

    def insert(self, ngrams: Tensor) -> None:
        """Remember n-grams, oldest first. ngrams: [M, N] ids; those whose key is negative are ignored."""
        for chunk in ngrams.split(INSERT_CHUNK):
            self._insert(chunk)

    def lookup(self, keys: Tensor) -> Tensor:
        """Tails of each key, most recently seen first. keys: [B] ids. Returns [B, G, N-1] ids, -1 where none is left."""
        row = keys % self.num_rows
        ngrams = self.ngrams[row]  # [B, G, N]
        seen = self.seen[row] * (ngrams[..., 0] == keys[:, None])  # [B, G]
        seen, order = seen.sort(dim=1, descending=True)
        tails = ngrams[..., 1:].gather(1, order[..., None].expand(-1, -1, ngrams.shape[2] - 1))
        return tails.masked_fill(seen[..., None] == 0, -1)

    def _insert(self, new: Tensor) -> None:
        nowhere = self.num_rows
        order = torch.arange(len(new), device=new.device)
        is_later = order > order[:, None]  # [M, M] the column comes after the row
        times = order + self.clock
        self.clock += len(new)

        key = new[:, 0]
        row = torch.where(key < 0, nowhere, key % self.num_rows)  # [M]
        same_row = row == row[:, None]  # [M, M]
        comes_again = ((new[:, None] == new).all(-1) & is_later).any(1)  # [M] only the last of equal ones counts
        last = ~comes_again

        matches = (self.ngrams[row] == new[:, None]).all(-1)  # [M, G]
        is_known = matches.any(1)
        self.seen[torch.where(is_known & last, row, nowhere), matches.int().argmax(1)] = times

        # G newer ones in the same row would have evicted it within this very call.
        is_fresh = ~is_known & last & ((same_row & is_later & last).sum(1) < self.num_guesses)
        oldest = self.seen[row].argsort(dim=1)  # [M, G] slots, least recently seen first
        turn = (same_row & is_later.T & is_fresh).sum(1, keepdim=True)  # [M, 1] fresh ones before it in its row
        slot = oldest.gather(1, turn.clamp(max=self.num_guesses - 1))[:, 0]
        target = torch.where(is_fresh, row, nowhere)
        self.ngrams[target, slot] = new
        self.seen[target, slot] = times
