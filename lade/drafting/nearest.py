"""Several rows of each token, chosen by context: the row that was seen where the model's logits were most alike.

A token's context is what the model has predicted in its place: the logits before it, by a random projection of some of
them. Two logits' cosine tells how alike their hidden states are, and needs no access to these. The context of a text's
root is known; that of a guess is taken from the row that was found for its parent.
"""

from __future__ import annotations

import threading
from functools import cache
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.drafting.top_k_table import ROW_LENGTH, Packed, PackedRow, TableArrays, packed, unpacked

CONTEXT_SIZE = 64  # numbers of a context
NUM_COLUMNS = 256  # logits of a row that it is made of, evenly spaced: more told contexts apart no better
LEAST_CENTRED = 8  # rows whose mean is taken for what all have in common
# Parameters of a model from which on rows by context are worth what it takes to look them up, some tenths of a
# millisecond a step.
LEAST_PARAMETERS = 3e7
MAX_PLACES = 64  # latest rows of a token that are compared
BYTES_PER_RECORD = 2 * 4 * CONTEXT_SIZE + 4 * ROW_LENGTH + 160  # both contexts, ids with their bins, the index
SEED = 0  # of the projection; saved contexts depend on it

Context = npt.NDArray[np.float32]  # [CONTEXT_SIZE], of length 1, or all 0 where it is not known
Contexts = npt.NDArray[np.float32]  # [M, CONTEXT_SIZE]

UNKNOWN: Context = np.zeros(CONTEXT_SIZE, dtype=np.float32)


class Nearest(NamedTuple):
    """A row of a token, the token before it, its context's cosine to the one asked for, and the context after it."""

    row: PackedRow
    previous: int
    similarity: float
    after: Context


def projected(logits: Tensor) -> Tensor:
    """Of each row CONTEXT_SIZE numbers, on the device. logits: [..., V]. Returns [..., CONTEXT_SIZE] float32."""
    columns = logits.detach()[..., :: max(1, logits.shape[-1] // NUM_COLUMNS)][..., :NUM_COLUMNS]
    return (columns.float() @ _projection(columns.shape[-1], logits.device)).float()  # autocast may have rounded it


@cache
def _projection(num_columns: int, device: torch.device) -> Tensor:
    """Random signs, [num_columns, CONTEXT_SIZE]."""
    signs = np.random.default_rng(SEED).choice(np.array([-1.0, 1.0], np.float32), (num_columns, CONTEXT_SIZE))
    return torch.from_numpy(signs).to(device)


class NearestArrays(NamedTuple):
    """All rows, [R] or [R, ..]: by their tokens, the tokens before these, the contexts, and [1, CONTEXT_SIZE] what all
    contexts were taken relative to."""

    table: TableArrays
    previous: npt.NDArray[Any]
    before: npt.NDArray[Any]
    after: npt.NDArray[Any]
    centre: npt.NDArray[Any]


class NearestRows:
    """The latest `capacity` rows of all tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()  # calls in several threads may share a memory
        self._centre, self._num_centred = UNKNOWN, 0  # the mean of so many rows
        self._places: dict[int, list[int]] = {}  # of each token's rows, the latest last
        self._next = 0  # place of the next row
        # By place. Of arrays of zeros the system provides memory only where something is written.
        self._tokens: list[int] = []
        self._previous: list[int] = []
        self._rows = np.zeros((capacity, ROW_LENGTH), np.int32)
        self._before, self._after = (np.zeros((capacity, CONTEXT_SIZE), np.float32) for _ in range(2))

    def __len__(self) -> int:
        return len(self._tokens)

    def contexts(self, projections: npt.NDArray[np.float32]) -> Contexts | None:
        """Contexts [M, CONTEXT_SIZE] of rows of logits that are `projected`; NaN of NaN.

        They are taken relative to the mean of the first LEAST_CENTRED rows or more, which stands for what all have in
        common. None until there have been as many.
        """
        if self._num_centred < LEAST_CENTRED:
            sums = projections.sum(axis=0)
            if not np.isfinite(sums).all():
                return None
            before, self._num_centred = self._num_centred, self._num_centred + len(projections)
            self._centre = (before * self._centre + sums) / self._num_centred
            if self._num_centred < LEAST_CENTRED:
                return None
        with np.errstate(all="ignore"):  # even if numpy is set to raise
            found: Contexts = projections - self._centre
            found /= np.sqrt(np.einsum("mc,mc->m", found, found))[:, None]
        return found

    def put(self, previous: list[int], tokens: list[int], rows: Packed, before: Contexts, after: Contexts) -> None:
        """Add rows. previous, tokens: [M] the last two ids before each. before, after: the contexts of the last one,
        and of what follows it."""
        with self._lock:
            start = 0
            while start < len(tokens):  # from the beginning again where the arrays end
                place = self._next
                count = min(len(tokens) - start, self.capacity - place)
                new, old = slice(start, start + count), slice(place, place + count)
                for token in self._tokens[old]:
                    del self._places[token][0]
                for number, token in enumerate(tokens[new], place):
                    self._places.setdefault(token, []).append(number)
                self._tokens[old], self._previous[old] = tokens[new], previous[new]
                self._rows[old], self._before[old], self._after[old] = rows[new], before[new], after[new]
                self._next, start = (place + count) % self.capacity, start + count

    def find(self, token: int, context: Context) -> Nearest | None:
        """Of a token's rows the one whose context is most like this one; None where there is none."""
        with self._lock:
            places = self._places.get(token, ())[-MAX_PLACES:]
            if not places:
                return None
            similarities = self._before[places] @ context
            best = int(similarities.argmax())
            place, similarity = places[best], float(similarities[best])
            if isnan(similarity):
                return None
            return Nearest(self._rows[place], self._previous[place], similarity, self._after[place])

    def as_arrays(self) -> NearestArrays | None:
        """All rows, longest ago first; None without any."""
        with self._lock:
            if not self._tokens:
                return None
            order = np.roll(np.arange(len(self)), -self._next)
            ids, bins = unpacked(self._rows[order])
            table = TableArrays(np.array(self._tokens, dtype=np.int64)[order], ids, bins.astype(np.int8))
            before, after = (contexts[order].astype(np.float16) for contexts in (self._before, self._after))
            return NearestArrays(
                table, np.array(self._previous, dtype=np.int64)[order], before, after, self._centre[None]
            )

    def restore(self, arrays: NearestArrays) -> None:
        """Continue from saved rows."""
        tokens, ids, bins = arrays.table
        self._centre, self._num_centred = arrays.centre[0], LEAST_CENTRED
        self.put(arrays.previous.tolist(), tokens.tolist(), packed(ids, bins), arrays.before, arrays.after)

    def clear(self) -> None:
        with self._lock:
            for of in (self._places, self._tokens, self._previous):
                of.clear()
            self._centre, self._num_centred, self._next = UNKNOWN, 0, 0
