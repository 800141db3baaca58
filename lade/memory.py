"""What the recycling drafter remembers across calls. Floor 2."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.acceptance import Acceptance
from lade.price import StepPrice
from lade.row_table import BIN_EDGES, BYTES_PER_ROW, ROW_LENGTH, RowTable

MAX_BYTES = 16 * 2**20
MAX_UNSEEN = 256  # tokens without a row that are remembered
KEY_SHIFT = 32  # a pair of tokens as one integer

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # ids and bins, [M, ROW_LENGTH] each


class Memory:
    """Rows of likely next tokens by the last token and by the last two, and how often such guesses were right."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        capacity = max(1, max_bytes // (2 * BYTES_PER_ROW))
        self.singles, self.pairs = RowTable(capacity), RowTable(capacity)
        self.unseen: dict[int, None] = {}  # likely tokens without a row of their own, the latest last
        self.acceptance = {False: Acceptance(), True: Acceptance()}  # by whether tokens are sampled
        self.prices: dict[tuple[Any, ...], StepPrice] = {}

    def learn(self, previous: list[int], tokens: list[int], rows: Rows, num_likely: int) -> None:
        """Remember what the model put after some tokens, later ones counting more.

        previous, tokens: [M] the last two ids before each row. num_likely: of how many rows, from the last, the tokens are worth
        knowing more about.
        """
        ids, bins = rows
        self.pairs.put([before << KEY_SHIFT | token for before, token in zip(previous, tokens, strict=True)], ids, bins)
        self.singles.put(tokens, ids, bins)
        unseen = self.unseen
        for token in tokens:
            unseen.pop(token, None)
        for row in ids[len(ids) - num_likely :].tolist():
            for token in reversed(row):
                if token not in self.singles:
                    unseen.pop(token, None)
                    unseen[token] = None
        for token in list(unseen)[: max(0, len(unseen) - MAX_UNSEEN)]:
            unseen.pop(token, None)


def most_likely(logits: Tensor) -> Rows:
    """The ROW_LENGTH most likely tokens of each row and the bins of their probabilities. logits: [M, V]."""
    scores = logits.float()
    values, ids = scores.topk(min(ROW_LENGTH, scores.shape[-1]), dim=-1)
    chances = (values - scores.logsumexp(-1, keepdim=True)).exp()
    bins = torch.bucketize(chances, torch.tensor(BIN_EDGES, device=scores.device))
    found = torch.stack([ids, bins]).cpu().numpy()
    missing = ROW_LENGTH - found.shape[-1]
    if missing:  # a vocabulary of fewer tokens
        found = np.concatenate([found, np.repeat(found[..., :1], missing, axis=-1)], axis=-1)
    return found[0], found[1]


_shared: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def shared_memory(model: Any) -> Memory:
    """The memory that all calls of a model in this process have in common."""
    if model not in _shared:
        _shared[model] = Memory()
    return _shared[model]
