"""The model's likeliest tokens after a key, with their probabilities: the memory of the tree drafter."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from math import ceil, log, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ROW_LENGTH = 32  # tokens kept per key
BYTES_PER_ROW = ROW_LENGTH * 4 + 136  # ids with their grades, and what the index takes
# To find its first key, a dict walks over all that were deleted before it: one by one the time would grow with the
# table. So one in so many keys of the table is looked up at once.
LOOKED_UP_SHARE = 64
# Upper ends of the bins of probabilities. What guesses of each bin are worth is learned (lade/drafting/acceptance.py).
BIN_EDGES = (0.003, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95, 0.99)
NUM_BINS = len(BIN_EDGES) + 1
BIN_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *BIN_EDGES, 1.0))]
# Rows keep grades, which divide each bin into parts of equal ratio: sampling compares p / e, and most tokens of a row
# are in the bin of the rarest.
LEAST_CHANCE = 1e-5  # below it all tokens are of one grade, and count as half as likely
GRADE_RATIO = 1.25  # of a grade's ends, at most


def _grades() -> list[float]:
    edges = [LEAST_CHANCE]
    for low, high in pairwise((LEAST_CHANCE, *BIN_EDGES, 1.0)):
        parts = ceil(log(high / low) / log(GRADE_RATIO))
        edges += [*(low * (high / low) ** (part / parts) for part in range(1, parts)), high]
    return edges[:-1]


GRADE_EDGES = _grades()  # upper ends
GRADE_MIDDLES = [sqrt(low * high) for low, high in pairwise((LEAST_CHANCE / 4, *GRADE_EDGES, 1.0))]
BIN_OF_GRADE = [bisect_left(BIN_EDGES, high) for high in (*GRADE_EDGES, 1.0)]
GRADE_BITS = 6
_EDGES = np.array(GRADE_EDGES, dtype=np.float32)

Packed = npt.NDArray[np.int32]  # [R, ROW_LENGTH]: ids and grades in one number, so that one look-up finds both
PackedRow = npt.NDArray[np.int32]  # likewise, [ROW_LENGTH], or shorter
KEY_SHIFT = 32  # a pair of tokens as one integer: the first one shifted, and the second


class TableArrays(NamedTuple):
    """All rows of a table: keys [R], ids and grades [R, ROW_LENGTH]."""

    keys: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    grades: npt.NDArray[Any]


def grades_of(chances: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """The grade of each probability, in the shape of `chances`."""
    return _EDGES.searchsorted(chances)


def packed(ids: npt.NDArray[Any], grades: npt.NDArray[Any]) -> Packed:
    """ids, grades: [R, K]."""
    rows = ids.astype(np.int32)
    rows <<= GRADE_BITS
    rows |= grades.astype(np.int32)
    return rows


def unpacked(rows: Packed) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Ids and grades."""
    return rows >> GRADE_BITS, rows & (1 << GRADE_BITS) - 1


class TopKTable:
    """At most `capacity` rows by key; a full table drops the one that was written longest ago.

    A row holds ROW_LENGTH ids, most probable first, and the grade of each one's probability.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: dict[int, int] = {}  # key -> slot, written longest ago first
        self._oldest: dict[int, None] = {}  # the next keys to be dropped, the first one last
        self._rows = np.zeros((0, ROW_LENGTH), dtype=np.int32)
        self._lock = threading.Lock()  # calls in several threads may share a table

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def rows(self) -> Packed:
        """All rows by slot; a table that grows gets another array."""
        return self._rows

    def row(self, key: int) -> PackedRow | None:
        """The row of a key as it is stored, [ROW_LENGTH], None when there is none."""
        slot = self.slots.get(key)
        return None if slot is None else self._rows[slot]

    def put(self, keys: Sequence[int], rows: Packed) -> None:
        """Write rows; of one key the last counts."""
        with self._lock:
            found = []
            slots, oldest = self.slots, self._oldest
            for key in keys:
                slot = slots.pop(key, None)
                if slot is None:
                    slot = self._new_slot()
                    oldest = self._oldest
                elif oldest:
                    oldest.pop(key, None)
                slots[key] = slot
                found.append(slot)
            self._rows[found] = rows

    def clear(self) -> None:
        with self._lock:
            self.slots.clear()
            self._oldest.clear()

    def as_arrays(self) -> TableArrays:
        """All rows, written longest ago first."""
        with self._lock:
            ids, grades = unpacked(self._rows[list(self.slots.values())])
            return TableArrays(np.array(list(self.slots), dtype=np.int64), ids, grades.astype(np.int8))

    def _new_slot(self) -> int:
        slot = len(self.slots)
        if slot < self.capacity:
            if slot >= len(self._rows):
                self._grow()
            return slot
        if not self._oldest:
            found = list(islice(self.slots, self.capacity // LOOKED_UP_SHARE + 1))
            self._oldest = dict.fromkeys(reversed(found))
        return self.slots.pop(self._oldest.popitem()[0])

    def _grow(self) -> None:
        size = min(self.capacity, max(1024, 2 * len(self._rows)))
        self._rows = np.resize(self._rows, (size, ROW_LENGTH))
