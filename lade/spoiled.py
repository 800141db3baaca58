"""Guesses whose keys or values are not finite: how they are noticed, and what is done about them.

Plain generate() never runs the model over such a token, unless it is in the text. In a block it spoils other tokens'
rows in spite of the mask, because 0 * NaN is NaN. A row whose logits are NaN commits nothing, the slots after its text
are zeroed, the guesses to blame are avoided for the rest of the call, and the next step has no guesses. What is NaN
then is NaN in plain generate(), too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache


class SpoiledGuesses:
    """What a call knows of them.

    next_is_plain: whether the next step has no guesses: the prompt's, and the one after a spoiled step.
    avoided:       guessed ids with non-finite keys or values.
    """

    def __init__(self) -> None:
        self.next_is_plain = True
        self.avoided: set[int] = set()
        self._is_plain = True
        self._lost_rows: set[int] = set()  # rows that are NaN in plain generate(), too

    def begin_step(self) -> None:
        """To be called before a step's logits are used."""
        self._is_plain, self.next_is_plain = self.next_is_plain, False

    def are_usable(self, is_number: Callable[[int, int], bool], rows: slice, nodes: list[int]) -> bool:
        """Whether the logits after one node (-1 = root) of each row can be used: all that plain generate() has, too.

        is_number: (row, node) -> whether the logits are not NaN.
        """
        for row, node in enumerate(nodes, rows.start):
            if not (self._is_plain or row in self._lost_rows or is_number(row, node)):
                self.next_is_plain = True
                return False
        return True

    def without_avoided(self, tokens: Tensor) -> Tensor:
        """Replace the guesses to avoid by the root; after a spoiled step, all guesses.

        tokens: [B, q] of a block.
        """
        if self.next_is_plain:
            return tokens[:, :1].expand_as(tokens)
        if not self.avoided:
            return tokens
        is_avoided = torch.isin(tokens, torch.tensor(sorted(self.avoided), device=tokens.device))
        return torch.where(is_avoided, tokens[:, :1], tokens)

    def recover(
        self, cache: LookaheadCache, tokens: Tensor, accepted: list[list[int] | None], may_avoid: bool = True
    ) -> None:
        """After a spoiled step has been committed. tokens, accepted: as for `clear_guesses`.

        may_avoid: False if the ids to avoid must not depend on this process alone.
        """
        lost_rows, guesses = clear_guesses(cache, tokens, accepted)
        self._lost_rows |= lost_rows
        if may_avoid:
            self.avoided |= guesses


def clear_guesses(cache: LookaheadCache, tokens: Tensor, accepted: list[list[int] | None]) -> tuple[set[int], set[int]]:
    """Zero all slots after the committed ones, where a NaN key or value would spoil later blocks.

    tokens: [B, q] of the block. accepted: as for `LookaheadCache.commit`. Returns the rows whose committed tokens end
    in NaN, and the guessed ids that were the first to be non-finite in rows that kept nothing.
    """
    slot_layers: list[Any] = cache.layers
    layers = [(layer.keys, layer.values) for layer in slot_layers if layer.is_initialized]  # [B, H, C, D] each
    lost_rows = {
        row
        for row, length in enumerate(cache.lengths)
        if any(bool(part[row, :, length - 1].isnan().any()) for states in layers for part in states)
    }
    guesses: set[int] = set()
    for row in {row for row, path in enumerate(accepted) if path is None} - lost_rows:
        is_finite = _first_finite(layers, row, cache.lengths[row], tokens.shape[1])
        if is_finite[0]:  # otherwise the root is not finite either, and no guess is to blame
            ids = tokens[row].tolist()
            guesses |= {token for token, is_fine in zip(ids, is_finite, strict=True) if not is_fine}
    for states in layers:
        for part in states:
            for row, length in enumerate(cache.lengths):
                part[row, :, length:] = 0
    return lost_rows, guesses


def _first_finite(layers: list[tuple[Tensor, Tensor]], row: int, start: int, num_tokens: int) -> list[bool]:
    """Which of one row's block tokens are finite in the first layer where some are not.

    In later layers attention spreads the non-finite values to other tokens. start: slot of the block's first token.
    """
    for states in layers:
        own = [part[row].narrow(1, start, num_tokens) for part in states]  # [H, q, D]
        parts = [part.isfinite().all(2).all(0).tolist() for part in own]
        found = [all(both) for both in zip(*parts, strict=True)]
        if not all(found):
            return found
    return [True] * num_tokens


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
