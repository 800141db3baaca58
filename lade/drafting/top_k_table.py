"""Rows of the model's likeliest next tokens with their probabilities, and a bounded table of them by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ROW_LENGTH = 32  # tokens of a row
BYTES_PER_ROW = ROW_LENGTH * 4 + 136  # ids with their bins, and the index
# Probabilities are rounded to powers of BIN_RATIO, down to 8e-7. A bin and an id share one integer.
BIN_RATIO, BIN_BITS = 1.25, 6
NUM_BINS = 1 << BIN_BITS
PROBABILITIES = BIN_RATIO ** np.arange(1 - NUM_BINS, 1, dtype=np.float32)  # [NUM_BINS] by bin, rising to 1

PackedRow = npt.NDArray[np.int32]  # [ROW_LENGTH] ids, likeliest first, each with the bin of its probability
Packed = npt.NDArray[np.int32]  # [R, ROW_LENGTH]


class TableArrays(NamedTuple):
    """All rows of a table: keys [R], packed rows [R, ROW_LENGTH]."""

    keys: npt.NDArray[Any]
    rows: Packed


def packed(ids: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> Packed:
    """Rows of ids [R, K], likeliest first, and their probabilities [R, K].

    Shorter rows repeat their first id with probability 0, which adds no guess.
    """
    with np.errstate(all="ignore"):  # probabilities of 0 and NaN get the lowest bin
        bins = np.rint(np.log(probabilities) / np.float32(np.log(BIN_RATIO))) + (NUM_BINS - 1)
    rows = ids.astype(np.int32) << BIN_BITS
    rows |= np.nan_to_num(bins, nan=0.0, neginf=0.0).clip(0, NUM_BINS - 1).astype(np.int32)
    missing = ROW_LENGTH - rows.shape[1]
    if missing:
        first = rows[:, :1] >> BIN_BITS << BIN_BITS
        rows = np.concatenate([rows, first.repeat(missing, axis=1)], axis=1)
    return rows


def without(row: PackedRow, token: int) -> PackedRow | None:
    """A row without a token, of the same length; None if it has no other."""
    others = row[row >> BIN_BITS != token]
    if not len(others):
        return None
    return np.concatenate([others, np.repeat(others[:1] >> BIN_BITS << BIN_BITS, len(row) - len(others))])


class TopKTable:
    """The latest row of each of at most `capacity` keys; a full table drops the one that was written longest ago."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[int, int] = OrderedDict()  # key -> slot, written longest ago first
        self._rows = np.zeros((0, ROW_LENGTH), dtype=np.int32)
        self._lock = threading.Lock()  # calls in several threads may share a table

    def __len__(self) -> int:
        return len(self._slots)

    def row(self, key: int) -> PackedRow | None:
        """The row of a key, [ROW_LENGTH]; None if there is none."""
        slot = self._slots.get(key)
        return None if slot is None else self._rows[slot]

    def put(self, keys: Sequence[int], rows: Packed) -> None:
        """Write rows; of one key the last counts."""
        with self._lock:
            slots = [self._slot_of(key) for key in keys]  # which may replace the array
            self._rows[slots] = rows

    def as_arrays(self) -> TableArrays:
        """All rows, written longest ago first."""
        with self._lock:
            keys = np.array(list(self._slots), dtype=np.int64)
            return TableArrays(keys, self._rows[list(self._slots.values())])

    def _slot_of(self, key: int) -> int:
        """The slot of a key that is written now."""
        slots = self._slots
        if key in slots:
            slots.move_to_end(key)
        elif len(slots) < self.capacity:
            if len(slots) == len(self._rows):
                size = min(self.capacity, max(1024, 2 * len(slots)))
                self._rows = np.resize(self._rows, (size, ROW_LENGTH))
            slots[key] = len(slots)
        else:
            _, slots[key] = slots.popitem(last=False)
        return slots[key]
