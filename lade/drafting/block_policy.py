"""The block policy: the size of a tree, and the mode of the paper's block.

Every decision compares tokens per unit of cost. Costs come from `lade.drafting.step_costs`; the rest counts tokens and
steps, never seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from lade.drafting.step_costs import Offers, StepCosts


def compared_sizes(offers: Offers, expected: Sequence[float], num_rows: int) -> list[tuple[int, float, float]]:
    """The sizes that so many guesses fill: q, the tokens expected of a step per row, its cost over the first size's.

    expected: at index k, accepted guesses expected from k guesses per row, summed over rows. num_rows: unfinished rows.
    """
    num_filled = sum(size <= len(expected) for size in offers.sizes)
    is_padded = offers.sizes[0] > 1
    if is_padded and (not num_filled or offers.sizes[num_filled - 1] < len(expected)):
        num_filled += 1  # guesses that fill no size go into the next
    found = zip(offers.sizes[:num_filled], offers.costs, strict=False)
    plain = offers.costs[0]
    return [(size, 1 + expected[min(size, len(expected)) - 1] / num_rows, cost / plain) for size, cost in found]


def choose_size(compared: Iterable[tuple[int, float, float]]) -> int:
    """The block size that commits most tokens per unit of cost. compared: as from `compared_sizes`. Returns q."""
    size, *_ = max(compared, key=lambda offer: offer[1] / offer[2])
    return size


MEMORY = 32  # steps in a mode's running mean
PRIOR_MEAN, PRIOR_WEIGHT = 1.0, 2  # accepted guesses per step of an untried mode; its weight in steps
MIN_GAIN = 1.02  # a change of mode must improve the rate by this factor
RETRY_EVERY, RETRY_STEPS = 128, 6  # every so many steps, another mode is tried for so many steps
RETRY_SHARE = 0.8  # of the best rate: from here on the second best mode is tried, below it the cheap candidates
FORGET = 1 / 1024  # rate per step at which an unused mode's mean returns to the prior


class BlockMode(IntEnum):
    """Which parts of the paper's (N, W, G) block a step has."""

    PLAIN = 0
    CANDIDATES = 1
    WINDOW = 2  # with the candidates


class BlockModePolicy:
    """Chooses the mode with most tokens per unit of cost."""

    def __init__(self) -> None:
        self._accepted = {BlockMode.PLAIN: 0.0, BlockMode.CANDIDATES: PRIOR_MEAN, BlockMode.WINDOW: PRIOR_MEAN}
        self._num_tried = {BlockMode.CANDIDATES: 0, BlockMode.WINDOW: 0}
        self._sizes = {BlockMode.PLAIN: 1.0}  # mean block of each mode
        self._mode, self._num_steps = BlockMode.PLAIN, 0

    def choose(self, costs: StepCosts, sizes: dict[BlockMode, int]) -> BlockMode:
        """The next step's mode. sizes: tokens of a step by mode, for modes without an observed mean."""
        self._num_steps += 1
        rates = {
            mode: (1 + self._accepted[mode]) / costs.cost(round(self._sizes.get(mode, sizes[mode])))
            for mode in BlockMode
        }
        best, second, _ = sorted(BlockMode, key=rates.__getitem__, reverse=True)
        if 0 < self._num_steps % RETRY_EVERY <= RETRY_STEPS:
            return second if rates[second] > RETRY_SHARE * rates[best] else BlockMode.CANDIDATES
        if rates[best] > MIN_GAIN * rates[self._mode]:
            self._mode = best
        return self._mode

    def learn(self, mode: BlockMode, num_tokens: int, num_accepted: float) -> None:
        """Record a step of q tokens. num_accepted: accepted guesses per row."""
        for other in (BlockMode.CANDIDATES, BlockMode.WINDOW):
            if other != mode:
                self._accepted[other] += FORGET * (PRIOR_MEAN - self._accepted[other])
        if mode != BlockMode.PLAIN:
            self._num_tried[mode] += 1
            weight = max(1 / MEMORY, 1 / (self._num_tried[mode] + PRIOR_WEIGHT))
            self._accepted[mode] += weight * (num_accepted - self._accepted[mode])
            size = self._sizes.get(mode, float(num_tokens))
            self._sizes[mode] = size + weight * (num_tokens - size)
