"""The pool: for each key token, the tails that followed it, latest first. Knows nothing about models or text.

Tensors on the model's device, changed by a fixed number of operations per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BYTES = 16 * 2**20  # upper bound of one pool's memory
INSERT_CHUNK = 256  # n-grams compared with each other at once; bounds the quadratic part of insert()

Tails = list[list[list[int]]]  # per key, of N-1 ids each


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
        """Remember n-grams, oldest first. ngrams: [M, N] ids; one whose key is negative leaves no trace."""
        for chunk in ngrams.split(INSERT_CHUNK):
            if len(chunk):
                self._insert(chunk)

    def lookup(self, keys: Tensor) -> Tails:
        """Tails of each key, most recently seen first, at most G of N-1 ids each. keys: [B] ids."""
        row = keys % self.num_rows
        ngrams = self.ngrams[row]  # [B, G, N]
        seen = self.seen[row] * (ngrams[..., 0] == keys[:, None])  # [B, G]
        order = seen.argsort(dim=1, descending=True)
        tails = ngrams[..., 1:].gather(1, order[..., None].expand(-1, -1, ngrams.shape[2] - 1))
        is_any = seen.gather(1, order) > 0
        slots = torch.cat([is_any[..., None], tails], dim=-1).tolist()  # together: one copy to the host
        return [[tail for is_one, *tail in row if is_one] for row in slots]

    def _insert(self, new: Tensor) -> None:
        """new: [M, N]. Everything below is [M], or [M, M] for pairs, or [M, G] for the slots of each one's row."""
        nowhere = self.num_rows
        order = torch.arange(len(new), device=self.ngrams.device)
        is_later = order > order[:, None]
        times = order + self.clock
        self.clock += len(new)

        row = torch.where(new[:, 0] < 0, nowhere, new[:, 0] % self.num_rows)
        in_row = row[:, None] == row
        is_last = ~((new[:, None] == new).all(-1) & is_later).any(1)  # of equal ones only the last counts
        after = in_row & is_later & is_last
        before = in_row & is_later.T

        matches = (self.ngrams[row] == new[:, None]).all(-1)
        is_known = matches.any(1)
        self.seen[torch.where(is_known & is_last, row, nowhere), matches.long().argmax(1)] = times

        # G newer ones in the same row would have evicted it within this very call.
        is_fresh = is_last & ~is_known & (after.sum(1) < self.num_guesses)
        turn = (before & is_fresh).sum(1) % self.num_guesses  # fresh ones before it in its row; G or more are not fresh
        # The least recently seen one goes first. Stable: n-grams of one row must agree on the order of its empty slots.
        slot = self.seen[row].argsort(dim=1, stable=True)[order, turn]
        target = torch.where(is_fresh, row, nowhere)
        self.ngrams[target, slot] = new
        self.seen[target, slot] = times
