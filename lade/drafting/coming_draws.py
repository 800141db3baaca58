"""Predicts sampled tokens from the draws of the next steps.

Given these draws and estimated probabilities, lade can predict the sampled token. The prediction only orders guesses.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lade.common.transfer import on_host
from lade.verification.draws import ExponentialDraws, gumbel_scores

Draws = npt.NDArray[Any]  # [V]

READ_AHEAD = 8  # tokens whose draws are copied from a device to the host together
TINY = 1e-30  # in place of 0 where something is divided by it


class ComingDraws:
    """The draws of tokens to come, on the host."""

    def __init__(self, draws: ExponentialDraws) -> None:
        self._draws = draws
        self._on_host: dict[int, npt.NDArray[Any]] = {}  # [B, V] by token number: a step peeks many times

    def peek(self, row: int, index: int, vocab_size: int) -> Draws | None:
        """The draws with which one row's generated token number `index` (from 0) will be sampled.

        vocab_size: width of the logits. Returns [V]; None where the generator cannot be copied or other code draws from
        it, too.
        """
        if not self._draws.reads_ahead:
            return None
        if index not in self._on_host:
            self._on_host = {i: draws for i, draws in self._on_host.items() if i >= self._draws.first}
            self._copy(index, vocab_size)
        return self._on_host[index][row]

    def _copy(self, index: int, vocab_size: int) -> None:
        """Copy the draws of a token to the host, from a device together with those of the next ones: a copy waits."""
        draws = self._draws.ahead(index, 1, vocab_size)
        if not on_host(draws[0]):
            following = range(index + 1, index + READ_AHEAD)
            count = sum(1 for _ in takewhile(lambda i: i not in self._on_host, following))
            draws += self._draws.ahead(index + 1, count, vocab_size)
        found = draws[0] if len(draws) == 1 else torch.stack(draws)
        self._on_host.update(enumerate(found.cpu().numpy().reshape(len(draws), *draws[0].shape), index))


def wins(
    probabilities: npt.NDArray[Any], draws: npt.NDArray[Any], sharpness: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Estimated probability of each of some tokens to be sampled, given its draw.

    probabilities: [R, K] estimates p of some tokens of each row. draws: [R, K] e. sharpness: [R, 1], the larger the
    better the estimates; if they were exact, the largest Gumbel score p / e would win for certain. A token wins with a
    probability of about score**sharpness / sum * exp(-rest / score), where all tokens that are not listed share the
    rest. Returns the order of the tokens, likeliest first, and these probabilities in the order of `probabilities`,
    [R, K] each.
    """
    scores = gumbel_scores(probabilities, np.maximum(draws, TINY))
    rest = np.maximum(0.0, 1.0 - np.add.reduce(probabilities, axis=-1, keepdims=True))
    with np.errstate(under="ignore"):  # even if numpy is set to raise
        weights = scores**sharpness
        found = weights / np.add.reduce(weights, axis=-1, keepdims=True) * np.exp(-rest / scores)
    return (-scores).argsort(axis=1, kind="stable"), found
