"""Whether looking for guesses pays at all: where it costs more than it brings, some steps go without. Floor 0."""

from __future__ import annotations

# Plain steps that guessing may lose, on a text that looks predictable, before it stops for the first time.
PATIENCE = 2.5
MOST_GAINED = 0.5  # what counts of earlier gains, so that a text that has become hard is noticed
TRIAL = 0.15  # plain steps that it may lose when it is tried again
SHORTEST_REST, LONGEST_REST = 8, 64  # steps


class CoolDown:
    """Counts what guessing has gained and lost; in debt it rests, and twice as long after each trial that failed."""

    def __init__(self) -> None:
        self._balance = 0.0  # plain steps gained
        self._rest = SHORTEST_REST  # the next one
        self._num_left = 0  # steps of this one

    def takes_rest(self) -> bool:
        """Whether the next step goes without guesses. To be asked once before each step."""
        if self._num_left == 0:
            return False
        self._num_left -= 1
        return True

    def learn(self, gain: float, promise: float) -> None:
        """What one step with guesses has gained, in plain steps; lost where it is negative.

        promise: how predictable the text looks, from 0 to 1; it says how much may be lost.
        """
        limit = -PATIENCE * promise
        if gain > 0:
            self._rest = SHORTEST_REST
        self._balance = min(MOST_GAINED, self._balance + gain)
        if self._balance < limit:
            self._num_left, self._rest = self._rest, min(LONGEST_REST, 2 * self._rest)
            self._balance = limit + TRIAL
