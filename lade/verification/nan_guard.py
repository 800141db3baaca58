"""Guesses whose keys or values are NaN: one rule.

Plain generate() never runs the model over such a token, unless it is in the text. In a block it reaches other tokens'
logits in spite of the mask, because 0 * NaN is NaN. A row whose logits are NaN in a step with guesses commits nothing,
the slots after its text are zeroed, and the rest of the call has no guesses. What is NaN then is NaN in plain
generate(), too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache


class NanGuard:
    """Whether the logits of a call's steps can be used.

    has_tripped: a guess has made logits NaN, so no later step has guesses.
    """

    def __init__(self) -> None:
        self.has_tripped = False
        self._is_plain = True  # whether the present step has no guesses; the prompt's has none
        self._num_steps = 0

    def begin_step(self) -> None:
        """To be called before a step's logits are used."""
        self._is_plain = self._num_steps == 0 or self.has_tripped
        self._num_steps += 1

    def are_usable(self, is_number: Callable[[int, int], bool], rows: slice, nodes: list[int]) -> bool:
        """Whether the logits after one node (-1 = root) of each row can be used: all that plain generate() has, too.

        is_number: (row, node) -> whether the logits are not NaN.
        """
        is_fine = self._is_plain or all(is_number(row, node) for row, node in enumerate(nodes, rows.start))
        self.has_tripped |= not is_fine
        return is_fine

    def without_guesses(self, tokens: Tensor) -> Tensor:
        """Replace the padding of a plain block by its root once a guess was NaN. tokens: [B, q]."""
        return tokens[:, :1].expand_as(tokens) if self.has_tripped else tokens

    def clear(self, cache: LookaheadCache) -> None:
        """After the step that tripped has been committed: zero all slots after the committed ones."""
        if self._is_plain or not self.has_tripped:
            return
        for layer in cache.slot_layers:
            for part in (layer.keys, layer.values) if layer.is_initialized else ():
                for row, length in enumerate(cache.lengths):
                    part[row, :, length:] = 0


def find_nan_column(logits: Tensor) -> int | None:
    """A column that tells whether a row of logits is NaN: one that is finite, and large, after the prompt.

    Other columns may be NaN or infinite in every row, because of a weight or because the model masks them. Returns None
    if no row has a finite column. logits: [B, V].
    """
    for row in logits:
        best = int(row.argmax())
        if not isfinite(row[best]):
            best = int(row.masked_fill(~row.isfinite(), -torch.inf).argmax())
        if isfinite(row[best]):
            return best
    return None
