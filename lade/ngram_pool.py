"""The pool: for each key token, the tails that followed it, most recently seen first.

Tensors on the device, changed by a fixed number of array operations per step. Knows nothing about models or text. Floor 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
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
        self.clock: int | Tensor = 1
        self.use_numpy(self.ngrams.device.type == "cpu")

    def use_numpy(self, on: bool) -> None:
        """Work on the same memory through numpy: on a CPU one of its calls costs a sixth of one of torch's.

        The code below uses only what both libraries write alike.
        """
        self._xp: Any = np if on else torch
        self._ngrams: Any = self.ngrams.numpy() if on else self.ngrams
        self._seen: Any = self.seen.numpy() if on else self.seen

    def insert(self, ngrams: Tensor) -> None:
        """Remember n-grams, oldest first. ngrams: [M, N] ids; one whose key is negative leaves no trace."""
        for chunk in ngrams.split(INSERT_CHUNK):
            if len(chunk):
                self._insert(chunk.numpy() if self._xp is np else chunk)

    def lookup(self, keys: Tensor) -> list[list[list[int]]]:
        """Tails of each key, most recently seen first, at most G of N-1 ids each. keys: [B] ids."""
        key: Any = keys.numpy() if self._xp is np else keys
        row = key % self.num_rows
        ngrams = self._ngrams[row]  # [B, G, N]
        seen = self._seen[row] * (ngrams[..., 0] == key[:, None])  # [B, G]
        found = []
        for tails, times in zip(ngrams[..., 1:].tolist(), seen.tolist(), strict=True):
            newest_first = sorted(range(self.num_guesses), key=times.__getitem__, reverse=True)
            found.append([tails[slot] for slot in newest_first if times[slot]])
        return found

    def newest(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """`lookup` without a copy to the host. keys: [B] ids. Returns tails [B, G, N-1] and which of them are any, [B, G]."""
        row = keys % self.num_rows
        ngrams = self.ngrams[row]  # [B, G, N]
        seen = self.seen[row] * (ngrams[..., 0] == keys[:, None])  # [B, G]
        order = seen.argsort(dim=1, descending=True)
        tails = ngrams[..., 1:].gather(1, order[..., None].expand(-1, -1, ngrams.shape[2] - 1))
        return tails, seen.gather(1, order) > 0

    def _insert(self, new: Any) -> None:
        """new: [M, N]. Everything below is [M], or [M, M] for pairs, or [M, G] for the slots of each one's row."""
        xp, nowhere = self._xp, self.num_rows
        order, is_later = _numpy_order(len(new)) if xp is np else _torch_order(len(new), self.ngrams.device)
        times = order + self.clock
        self.clock += len(new)

        row = xp.where(new[:, 0] < 0, nowhere, new[:, 0] % self.num_rows)
        in_row = row[:, None] == row
        is_last = ~((new[:, None] == new).all(-1) & is_later).any(1)  # of equal ones only the last counts
        after = in_row & is_later & is_last
        before = in_row & is_later.T

        matches = (self._ngrams[row] == new[:, None]).all(-1)
        is_known = matches.any(1)
        self._seen[xp.where(is_known & is_last, row, nowhere), xp.argmax(matches + 0, 1)] = times

        # G newer ones in the same row would have evicted it within this very call.
        is_fresh = is_last & ~is_known & (after.sum(1) < self.num_guesses)
        turn = (before & is_fresh).sum(1) % self.num_guesses  # fresh ones before it in its row; G or more are not fresh
        slot = xp.argsort(self._seen[row], 1)[order, turn]  # the least recently seen one goes first
        target = xp.where(is_fresh, row, nowhere)
        self._ngrams[target, slot] = new
        self._seen[target, slot] = times


@lru_cache(maxsize=INSERT_CHUNK)
def _numpy_order(count: int) -> tuple[Any, Any]:
    """Returns 0 .. M-1, and [M, M] whether the column comes after the row."""
    order = np.arange(count)
    return order, order > order[:, None]


def _torch_order(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same, made anew each time: a CUDA graph could not tell when a cache lets go of them."""
    order = torch.arange(count, device=device)
    return order, order > order[:, None]
