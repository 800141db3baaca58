"""The logits after the root and each node of a tree: the most likely tokens, and which rows are NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.common.transfer import on_host


@dataclass(frozen=True, slots=True)
class LogitsSummary:
    """Reductions of a block's logits, computed together with them and copied to the host at once.

    best:    [B, R] the most likely tokens.
    is_nan:  [B, R] whether the logits in the NaN column are NaN.
    ids:     [B, R, K] the K most likely tokens that have an embedding, in order of their probabilities.
    chances: [B, R, K] these probabilities, at the temperature of the call.
    projections: [B, R, C] what tells apart the contexts that they are (`lade.drafting.contexts.projected`).
    """

    best: npt.NDArray[Any]
    is_nan: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    chances: npt.NDArray[Any]
    projections: npt.NDArray[Any]


class BlockLogits:
    """The logits after the root and after each node of a tree."""

    def __init__(self, logits: Tensor, nan_column: int | None = None, summary: LogitsSummary | None = None) -> None:
        """logits: [B, 1 + n, V]. nan_column: from `lade.verification.nan_guard.find_nan_column`; None to assume that no
        row is NaN.

        summary: of these logits, and of padding behind them; None to compute lazily what is asked for.
        """
        self.logits, self.nan_column, self.summary = logits, nan_column, summary

    def best(self) -> Callable[[int, int], int]:
        """(row, node) -> the most likely token after a node (-1 = root)."""
        if self.summary is not None:
            rows = self.summary.best.tolist()
        elif on_host(self.logits):  # one at a time: few are asked for, and there may be 260,000 tokens
            return lambda row, node: int(best_tokens(self.logits[row, node + 1]))
        else:  # tokens and NaN flags in one copy to the host: V is subtracted from the token of a NaN row
            size, column = self.logits.shape[-1], self.nan_column or 0  # without one, `is_number` does not ask
            best = best_on_device(self.logits)
            found = torch.where(self.logits[..., column].isnan(), best - size, best).tolist()
            self._is_nan = [[token < 0 for token in row] for row in found]
            rows = [[token % size for token in row] for row in found]
        return lambda row, node: int(rows[row][node + 1])

    def is_number(self, row: int, node: int) -> bool:
        """Whether the logits after one node (-1 = root) of one row are not NaN."""
        return self.nan_column is None or not self._is_nan[row][node + 1]

    @cached_property
    def _is_nan(self) -> list[list[bool]]:
        """Whether the logits after the root and each node are NaN, [B, 1 + n]."""
        if self.summary is not None:
            return self.summary.is_nan.tolist()
        return self.logits[..., self.nan_column].isnan().tolist()

    def of(self, rows: slice, nodes: list[int]) -> Tensor:
        """The logits after one node (-1 = root) of each of some rows. Returns [R, V]."""
        if len(nodes) == 1:
            return self.logits[rows, nodes[0] + 1]
        index = torch.tensor(nodes, device=self.logits.device) + 1
        return self.logits[rows][torch.arange(len(nodes), device=index.device), index]


def best_tokens(logits: Tensor) -> Tensor:
    """argmax in float32, with the same ties as generate(). logits: [..., V]. Returns [...] ids."""
    # numpy's argmax is vectorised: in half precision it takes a tenth of torch's time.
    if on_host(logits):
        return torch.from_numpy(np.asarray(logits.float().numpy().argmax(axis=-1)))
    return best_on_device(logits)


def best_on_device(logits: Tensor) -> Tensor:
    """`best_tokens` on the logits' own device."""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(dim=-1)
