"""Whether looking for guesses pays at all: where it costs more than it brings, some steps go without. Floor 0."""

from __future__ import annotations

CREDIT = 0.5  # plain steps that guessing may lose before it stops for the first time
MOST_CREDIT = 1.0  # what it can have gained at most, so that a text that has become hard is noticed
TRIAL_CREDIT = 0.15  # what it may lose when it is tried again
SHORTEST_REST, LONGEST_REST = 8, 64  # steps


class CoolDown:
    """Counts what guessing has gained and lost; in debt, it rests, and twice as long after each trial that failed."""

    def __init__(self) -> None:
        self._credit = CREDIT
        self._rest = SHORTEST_REST  # the next one
        self._num_left = 0  # steps of this one

    def takes_rest(self) -> bool:
        """Whether the next step goes without guesses. To be asked once before each step."""
        self._num_left -= self._num_left > 0
        return self._num_left > 0

    def learn(self, gain: float) -> None:
        """What one step with guesses has gained, or lost where it is negative, in plain steps."""
        if gain > 0:
            self._rest = SHORTEST_REST
        self._credit = min(MOST_CREDIT, self._credit + gain)
        if self._credit < 0:
            self._num_left, self._rest = self._rest + 1, min(LONGEST_REST, 2 * self._rest)
            self._credit = TRIAL_CREDIT
