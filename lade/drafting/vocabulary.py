"""A row for every token from the start: what the model puts behind it where no text comes before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lade.drafting.memory import most_likely
from lade.drafting.top_k_table import RowArrays
from lade.state import PerModel

BATCH = 256


class Vocabulary:
    def __init__(self, ids, bins) -> None:
        self._ids, self._bins = ids, bins

    def has(self, token: int) -> bool:
        return 0 <= token < len(self._ids)

    def rows(self, tokens: Sequence[int]) -> RowArrays:
        return self._ids[tokens], self._bins[tokens]


def vocabulary_of(model: Any, temperature) -> Vocabulary:
    known = _known.of(model)
    if temperature not in known:
        n = model.config.get_text_config().vocab_size
        ids, bins = [], []
        import os
        bos = os.environ.get("BOS")
        with torch.inference_mode():
            for start in range(0, n, BATCH):
                x = torch.arange(start, min(n, start + BATCH))[:, None]
                if bos:
                    x = torch.cat([torch.full_like(x, int(bos)), x], 1)
                i, b = most_likely(model(input_ids=x, use_cache=False, logits_to_keep=1).logits[:, -1], temperature)
                ids.append(i)
                bins.append(b)
        known[temperature] = Vocabulary(np.concatenate(ids).astype(np.int32), np.concatenate(bins).astype(np.int8))
    return known[temperature]


_known: PerModel[dict[float, Vocabulary]] = PerModel(dict)
