"""The 2-D Jacobi window: N-1 levels by W columns of guessed tokens, one per row of the batch.

Cell (r, j) holds a guess for position L + r + j; cell (0, 0) is the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class JacobiWindow:
    """levels: [B, N-1, W] ids. Each step drops the first and appends the model's choices after the last one."""

    def __init__(self, levels: Tensor) -> None:
        self.levels = levels
        self.num_updates = 0

    @classmethod
    def start(cls, prompts: Sequence[Tensor], ngram_size: int, window_size: int) -> JacobiWindow:
        """Random tokens of each row's own prompt in every cell. prompts: of each row, ids [1 or more]."""
        # A generator of its own: guesses must not consume the random numbers that sampling draws.
        generator = torch.Generator().manual_seed(0)
        draws = torch.rand(len(prompts), (ngram_size - 1) * window_size, generator=generator, device="cpu")
        # Distances from the prompt's end.
        backs = [(row * len(ids)).long().to(ids.device) for row, ids in zip(draws, prompts, strict=True)]
        cells = torch.stack([ids[len(ids) - 1 - back] for ids, back in zip(prompts, backs, strict=True)])
        return cls(cells.view(len(prompts), ngram_size - 1, window_size))

    @property
    def is_ready(self) -> bool:
        """Whether every cell of the n-grams has come from the model: N-1 updates have happened."""
        return self.num_updates >= self.levels.shape[1]

    def set_root(self, roots: Tensor) -> None:
        """roots: [B] ids, put into cell (0, 0)."""
        self.levels[:, 0, 0] = roots

    def cells(self) -> Tensor:
        """Everything but the root, level by level. Returns [B, (N-1)*W - 1] ids."""
        return self.levels.flatten(1)[:, 1:]

    def ngrams(self, chosen: Tensor) -> Tensor:
        """One n-gram per column: its cells and the model's choice after the last. chosen: [B, W]. Returns [B*W, N]."""
        columns = torch.cat([self.levels, chosen[:, None]], dim=1)  # [B, N, W]
        return columns.transpose(1, 2).flatten(0, 1)

    def roll(self, chosen: Tensor) -> None:
        """Level r becomes level r+1, the last level the model's choices. chosen: [B, W] ids."""
        self.levels = torch.cat([self.levels[:, 1:], chosen[:, None]], dim=1)
        self.num_updates += 1
