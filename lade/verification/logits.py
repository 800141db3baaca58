"""What the model said behind each node of a tree: which token is the likeliest, and whether it said anything at all."""

from __future__ import annotations

from functools import cached_property
from math import isfinite, isnan, nan

import numpy as np
import torch
from torch import Tensor

ON_HOST = ("cpu",)  # devices whose memory numpy reads


class BlockLogits:
    """What the model said behind the root and behind each node of a tree."""

    def __init__(self, logits: Tensor, witness: int | None = None) -> None:
        """logits: [B, 1 + n, V]. witness: column by which to tell rows that are no numbers, see `witness_of`; None: none are."""
        self.logits, self.witness = logits, witness

    def best(self) -> list[list[int]]:
        """The likeliest token behind each of them, [B, 1 + n]."""
        if self.witness is None:
            found: list[list[int]] = best_tokens(self.logits).tolist()
            return found
        if self.logits.device.type in ON_HOST:
            logits = self.logits.float().numpy()
            self._witnessed = logits[..., self.witness].tolist()  # this way they take next to no time
            return np.asarray(logits.argmax(axis=-1)).tolist()
        # Both in one copy to the host: a token that is less by V stands behind a row that is no number.
        size = self.logits.shape[-1]
        chosen = best_on_device(self.logits)
        rows = torch.where(self.logits[..., self.witness].isnan(), chosen - size, chosen).tolist()
        self._witnessed = [[nan if token < 0 else 0.0 for token in row] for row in rows]
        return [[token % size for token in row] for row in rows]

    def is_number(self, row: int, node: int) -> bool:
        """Whether what the model computed behind one node (-1 = root) of one row is no NaN."""
        return self.witness is None or not isnan(self._witnessed[row][node + 1])

    @cached_property
    def _witnessed(self) -> list[list[float]]:
        """The witness's logits, [B, 1 + n]."""
        found: list[list[float]] = self.logits[..., self.witness].float().cpu().tolist()
        return found

    def of_row(self, row: int, node: int) -> Tensor:
        """Behind one node (-1 = root) of one row. Returns [1, V]."""
        return self.logits[row : row + 1, node + 1]

    def of_all(self, nodes: list[int]) -> Tensor:
        """Behind one node of each row. Returns [B, V]."""
        if len(nodes) == 1:
            return self.logits[:, nodes[0] + 1]
        index = torch.tensor(nodes, device=self.logits.device) + 1
        return self.logits[torch.arange(len(nodes), device=index.device), index]


def witness_of(logits: Tensor) -> int | None:
    """A column that is NaN just where what the model computed is: one that holds a number behind the prompt, and a large one.

    Others may be NaN or infinite in each row, because of a weight or because the model hides them. Each row of the prompt is
    asked until one has such a column; None where none has. logits: [B, V].
    """
    for row in logits:
        best = int(best_tokens(row))
        if not isfinite(row[best]):
            best = int(best_tokens(row.masked_fill(~row.isfinite(), -torch.inf)))
        if isfinite(row[best]):
            return best
    return None


def best_tokens(logits: Tensor) -> Tensor:
    """argmax with the ties that generate() sees, which compares in float32. logits: [..., V]. Returns [...] ids."""
    if (
        logits.device.type in ON_HOST
    ):  # numpy's argmax is vectorised: in half precision it takes a tenth of torch's time
        return torch.from_numpy(np.asarray(logits.float().numpy().argmax(axis=-1)))
    return best_on_device(logits)


def best_on_device(logits: Tensor) -> Tensor:
    """The same by torch alone, wherever the logits are."""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(dim=-1)
