"""`Grower` in C, where it could be compiled when lade was installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from lade.block_size.policy import EarlyStop
from lade.drafting.acceptance import NUM_KINDS, PAIR, SHARPNESS, SINGLE, VOCABULARY
from lade.drafting.base import FOREIGN
from lade.drafting.coming_draws import TINY
from lade.drafting.growth import BOTH_ROWS, GREEDY_LENGTH, LIKELY_CHILD, SIMILAR_ROWS, Grower, Growth
from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import BIN_EDGES, BIN_OF_GRADE, GRADE_BITS, GRADE_MIDDLES, ROW_LENGTH

VERSION = 1  # of what _growth.c is given and returns
RULES = (
    BOTH_ROWS,
    SIMILAR_ROWS,
    LIKELY_CHILD,
    TINY,
    GREEDY_LENGTH,
    GRADE_BITS,
    MAX_MATCH,
    FOREIGN,
    PAIR,
    SINGLE,
    VOCABULARY,
)
GRADES = np.minimum(np.arange(1 << GRADE_BITS), len(GRADE_MIDDLES) - 1)  # all that a row can hold
ARRAYS = (
    np.array(BIN_EDGES),
    np.array(GRADE_MIDDLES, dtype=np.float32)[GRADES],
    np.array(BIN_OF_GRADE, dtype=np.int32)[GRADES],
    np.array([SHARPNESS.get(kind, 1.0) for kind in range(NUM_KINDS)]),
)


def _compiled() -> Any:
    """The module of _growth.c; None where it was not compiled, or from another version of it."""
    try:
        module = import_module("lade.drafting._growth")
    except ImportError:
        return None
    return module if (module.VERSION, module.ROW_LENGTH) == (VERSION, ROW_LENGTH) else None


class CompiledGrower(Grower):
    """Grows the same trees; what it looks up in memory it reads without the methods of the tables."""

    module = _compiled()

    def grow(self, max_depth: int, size: int, least: float, stop: EarlyStop | None) -> tuple[Growth, bool]:
        pairs, singles, alone, text = self._memory.pairs, self._memory.singles, self._alone, self._text
        columns, is_stopped = self.module.grow(
            (pairs.slots, pairs.rows, singles.slots, singles.rows, alone.tokens, alone.places, alone.pairs),
            (text[-2] if len(text) > 1 else -1, text[-1]),
            (self._similar if self._contexts else None, self._draws_at, None if stop is None else stop.update),
            self._sources,
            self._pointers,
            self._chances,
            RULES,
            ARRAYS,
            max_depth,
            size,
            least,
        )
        return Growth(*columns), is_stopped


FastestGrower = Grower if CompiledGrower.module is None else CompiledGrower
