"""Rows of logits that a call has seen and not learned from yet, and the tokens that they follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.drafting.growth import Growth
from lade.drafting.likeliest import likeliest_on_host, with_grades
from lade.drafting.nearest import Contexts
from lade.drafting.top_k_table import Packed, packed


class SeenRows:
    """M rows, either of logits or, from captured steps, of their likeliest tokens.

    previous, tokens: [M] the last two ids before each row. is_accepted: [M] whether the last one was committed.
    contexts: of each text's rows, those of the last ids and those after them, [1 + n, CONTEXT_SIZE] each; None if they
    are not known, as of the first few rows of a memory.
    """

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None) -> None:
        """The parameters of sampling: 1, None and None for greedy."""
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p
        self.clear()

    def __len__(self) -> int:
        return len(self.tokens)

    def clear(self) -> None:
        self.previous: list[int] = []
        self.tokens: list[int] = []
        self.is_accepted: list[bool] = []
        self.contexts: list[tuple[Contexts, Contexts] | None] = []
        self._logits: list[Tensor] = []
        self._ids: list[npt.NDArray[Any]] = []
        self._chances: list[npt.NDArray[Any]] = []

    def add(self, roots: list[int], growth: Growth, path: list[int], logits: Tensor) -> None:
        """Take in a text's rows at its root and each guess. roots: its last two ids. path: the accepted guesses.

        logits: [1 + n, V], without ids that have no embedding.
        """
        self._logits.append(logits)
        self._describe(roots, growth, path)

    def add_digested(
        self,
        roots: list[int],
        growth: Growth,
        path: list[int],
        ids: npt.NDArray[Any],
        chances: npt.NDArray[Any],
    ) -> None:
        """As `add`, for rows whose likeliest ids and their probabilities, [1 + n, K] each, are known."""
        self._ids.append(ids)
        self._chances.append(chances)
        self._describe(roots, growth, path)

    def packed(self) -> Packed:
        """All rows in the order in which they were added, [M, ROW_LENGTH]. They must be of one of the two kinds."""
        if self._ids:
            found = np.concatenate(self._ids), np.concatenate(self._chances)
        else:
            logits = self._logits[0] if len(self._logits) == 1 else torch.cat(self._logits)
            found = likeliest_on_host(logits, self._temperature)
        return packed(*with_grades(*found, self._top_k, self._top_p))

    def all_contexts(self) -> tuple[Contexts, Contexts] | None:
        """Of all rows in the order in which they were added, [M, CONTEXT_SIZE] each; None if some are not known."""
        known = [contexts for contexts in self.contexts if contexts is not None]
        if len(known) < len(self.contexts):
            return None
        if len(known) == 1:
            return known[0]
        before, after = zip(*known, strict=True)
        return np.concatenate(before), np.concatenate(after)

    def _describe(self, roots: list[int], growth: Growth, path: list[int]) -> None:
        tokens = [roots[-1], *growth.tokens]
        self.tokens += tokens
        self.previous += [roots[0] if len(roots) > 1 else -1, *(tokens[parent + 1] for parent in growth.parents)]
        accepted = {0, *(node + 1 for node in path)}
        self.is_accepted += [place in accepted for place in range(len(tokens))]
