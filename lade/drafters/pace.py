"""How much of the (N, W, G) block each step lays out: all of it, the candidates alone, or nothing but the root. Floor 3."""

from __future__ import annotations

from enum import IntEnum

from lade.price import StepPrice

MEMORY = 32  # steps that an estimate mostly rests on
HOPE = 1.0  # accepted guesses per step that an untried part of the block is credited with
HOPE_WEIGHT = 2  # steps that this counts for
PLAIN_STEPS = 3  # at first: all else is measured by them
GAIN = 1.02  # what is changed for must be better by so much
RETRY_EVERY, RETRY_STEPS = 128, 6  # how often, and for how long, something else is tried
RETRY_SHARE = (
    0.8  # of the best rate, for the second best to be what is tried; otherwise the candidates, which cost little
)
FORGET = 1 / 1024  # how fast what was found about an untried part gives way to hope: the text may have become easy


class Part(IntEnum):
    """What is laid out."""

    NOTHING = 0
    CANDIDATES = 1
    WINDOW = 2  # with the candidates


class Pace:
    """Chooses by tokens per second: one token and the accepted guesses, over the price of a block of that size."""

    def __init__(self) -> None:
        self._accepted = {Part.NOTHING: 0.0, Part.CANDIDATES: HOPE, Part.WINDOW: HOPE}
        self._num_tried = {Part.CANDIDATES: 0, Part.WINDOW: 0}
        self._sizes = {Part.NOTHING: 1.0}  # mean block of each part
        self._part, self._num_steps = Part.NOTHING, 0

    def choose(self, price: StepPrice, sizes: dict[Part, int]) -> Part:
        """What the next step lays out. sizes: tokens of a step with each part, for those that were not tried yet."""
        self._num_steps += 1
        if self._num_steps <= PLAIN_STEPS:
            return Part.NOTHING
        rates = {
            part: (1 + self._accepted[part]) / price.cost(round(self._sizes.get(part, sizes[part]))) for part in Part
        }
        best, second, _ = sorted(Part, key=rates.__getitem__, reverse=True)
        if PLAIN_STEPS < self._num_steps % RETRY_EVERY <= PLAIN_STEPS + RETRY_STEPS:
            return second if rates[second] > RETRY_SHARE * rates[best] else Part.CANDIDATES
        if rates[best] > GAIN * rates[self._part]:
            self._part = best
        return self._part

    def learn(self, part: Part, num_tokens: int, num_accepted: float) -> None:
        """A step laid out q tokens, of which as many guesses per row were accepted."""
        for other in (Part.CANDIDATES, Part.WINDOW):
            if other != part:
                self._accepted[other] += FORGET * (HOPE - self._accepted[other])
        if part != Part.NOTHING:
            self._num_tried[part] += 1
            weight = max(1 / MEMORY, 1 / (self._num_tried[part] + HOPE_WEIGHT))
            self._accepted[part] += weight * (num_accepted - self._accepted[part])
            size = self._sizes.get(part, float(num_tokens))
            self._sizes[part] = size + weight * (num_tokens - size)
