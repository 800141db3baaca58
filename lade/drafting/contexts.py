"""Several rows of each token, chosen by context: the row that was seen where the model's logits were most alike.

A token's context is what the model had predicted in its place: a random projection of some of the logits before it. The
cosine of two contexts is about that of the hidden states, to which no access is needed. The context of a text's root is
known; that of a guess is taken from the row that was found for its parent.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.drafting.top_k_table import ROW_LENGTH, Packed, PackedRow

CONTEXT_SIZE = 64  # numbers of a context
NUM_COLUMNS = 256  # logits of a row that it is made of, at most, evenly spaced: more told contexts apart no better
LARGEST_LOGIT = 1e4  # larger ones count as this: some models rule out tokens by logits of -inf
LEAST_CENTRED = 8  # rows whose mean is taken for what all have in common
MAX_PLACES = 128  # latest rows of a token that are compared
SAVED_TOGETHER = 1024  # rows that are saved in the order of their tokens, so that a file does not spell out the texts
BYTES_PER_RECORD = 2 * 4 * CONTEXT_SIZE + 4 * ROW_LENGTH + 160  # both contexts, ids with their bins, the index
SEED = 0  # of the projection; saved contexts depend on it
TINY = 1e-9  # in place of 0 where something is divided by it

Context = npt.NDArray[np.float32]  # [CONTEXT_SIZE], of length 1, or all 0 where it is not known
Contexts = npt.NDArray[np.float32]  # [M, CONTEXT_SIZE]

UNKNOWN: Context = np.zeros(CONTEXT_SIZE, dtype=np.float32)


class ContextRow(NamedTuple):
    """A row of a token, the cosine of its context to the one asked for, and the context after it."""

    row: PackedRow
    similarity: float
    after: Context


class ContextArrays(NamedTuple):
    """The saved arrays: R tokens, their rows, the contexts of the tokens and of what follows them, and the mean that
    contexts are relative to, [1, CONTEXT_SIZE]."""

    tokens: npt.NDArray[Any]
    rows: Packed
    before: npt.NDArray[Any]
    after: npt.NDArray[Any]
    centre: npt.NDArray[Any]


@cache
def projection(device: torch.device) -> Tensor:
    """Random signs, [NUM_COLUMNS, CONTEXT_SIZE]. The first call for a device makes the host wait for it."""
    signs = np.random.default_rng(SEED).choice(np.array([-1.0, 1.0], np.float32), (NUM_COLUMNS, CONTEXT_SIZE))
    return torch.from_numpy(signs).to(device)


def projected(logits: Tensor, by: Tensor) -> Tensor:
    """A finite projection of each row of logits, [..., V] to [..., CONTEXT_SIZE] float32. by: `projection`."""
    columns = logits.detach()[..., :: -(-logits.shape[-1] // NUM_COLUMNS)].float()
    columns = columns.nan_to_num(0.0).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return (columns @ by[: columns.shape[-1]]).float()  # autocast may have rounded the product


class ContextTable:
    """The latest `capacity` rows of all tokens, with their contexts."""

    _places: dict[int, list[int]]  # of each token's rows, the latest last
    _next: int  # place of the next row
    _tokens: list[int]  # by place, as the arrays

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()  # calls in several threads may share a memory
        self._centre, self._num_centred = UNKNOWN, 0  # the mean of so many rows
        self._forget_rows()
        self._allocate(0)

    def __len__(self) -> int:
        return len(self._tokens)

    def contexts(self, projections: npt.NDArray[np.float32]) -> Contexts | None:
        """Contexts [M, CONTEXT_SIZE] of rows of logits that are `projected`.

        They are taken relative to the mean of the first LEAST_CENTRED rows or more, which stands for what all have in
        common. None until there have been as many.
        """
        with np.errstate(all="ignore"):  # even if numpy is set to raise
            with self._lock:
                if self._num_centred < LEAST_CENTRED:
                    count = self._num_centred + len(projections)
                    total = self._num_centred * self._centre + projections.sum(axis=0)
                    self._centre = np.divide(total, count, dtype=np.float32)
                    self._num_centred = count
                    if count < LEAST_CENTRED:
                        return None
                centre = self._centre
            found: Contexts = projections - centre
            found /= np.maximum(np.sqrt(np.einsum("mc,mc->m", found, found)), TINY)[:, None]
        return found

    def put(self, tokens: list[int], rows: Packed, before: Contexts, after: Contexts) -> None:
        """Add rows [M, ROW_LENGTH] after some tokens. before, after: contexts of the tokens, and of what follows."""
        with self._lock:
            if not len(self._rows):
                self._allocate(self.capacity)
            start = 0
            try:
                while start < len(tokens):  # from the beginning again where the arrays end
                    place = self._next
                    count = min(len(tokens) - start, self.capacity - place)
                    new, old = slice(start, start + count), slice(place, place + count)
                    for token in self._tokens[old]:  # what is overwritten is the longest ago of its token
                        del self._places[token][0]
                    for at, token in enumerate(tokens[new], place):
                        self._places.setdefault(token, []).append(at)
                    self._tokens[old] = tokens[new]
                    self._rows[old], self._before[old], self._after[old] = rows[new], before[new], after[new]
                    self._next, start = (place + count) % self.capacity, start + count
            except BaseException:  # an interrupt: places and tokens may contradict each other
                self._forget_rows()
                raise

    def find(self, token: int, context: Context) -> ContextRow | None:
        """The row of a token whose context is most like this one; None where it has none.

        Another thread may overwrite it while it is used: then a guess is worse.
        """
        with self._lock:
            places = self._places.get(token, ())[-MAX_PLACES:]
            if not places:
                return None
            similarities = self._before[places] @ context
            best = int(similarities.argmax())
            place = places[best]
            return ContextRow(self._rows[place], float(similarities[best]), self._after[place])

    def as_arrays(self) -> ContextArrays | None:
        """All rows, those of longest ago first; None without any."""
        with self._lock:
            if not self._tokens:
                return None
            tokens = np.array(self._tokens, dtype=np.int64)
            by_age = np.roll(np.arange(len(tokens)), -self._next)
            order = by_age[np.lexsort((tokens[by_age], np.arange(len(tokens)) // SAVED_TOGETHER))]
            with np.errstate(all="ignore"):  # even if numpy is set to raise
                before, after = (contexts[order].astype(np.float16) for contexts in (self._before, self._after))
            return ContextArrays(tokens[order], self._rows[order], before, after, self._centre[None])

    def restore(self, arrays: ContextArrays) -> None:
        """Continue from saved rows."""
        with self._lock:
            self._centre, self._num_centred = arrays.centre[0], LEAST_CENTRED
        self.put(arrays.tokens.tolist(), *arrays[1:4])

    def _forget_rows(self) -> None:
        self._places, self._next, self._tokens = {}, 0, []

    def _allocate(self, size: int) -> None:
        # Of arrays of zeros the system provides memory only where something is written.
        self._rows = np.zeros((size, ROW_LENGTH), np.int32)
        self._before, self._after = (np.zeros((size, CONTEXT_SIZE), np.float32) for _ in range(2))
