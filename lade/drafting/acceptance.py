"""How often guesses of each source are accepted: priors, and the ratio of accepted to expected guesses."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import PROBABILITIES

RATIO_WEIGHT = 0.5  # expected and accepted guesses that the ratio starts with and slowly returns to
RATIO_MEMORY = 0.95  # share of the past that is left after each step
MAX_CHANCE = 0.99


class RowPrior(NamedTuple):
    """Acceptance of guesses from rows: scale * p ** power, where p is a guess's probability in its row.

    In sampling with known draws p is the probability to have the largest p / e of its row. sharpness: exponent of the
    Gumbel score, the larger the better the row's probabilities are (`lade.drafting.coming_draws.wins`).
    """

    source: str
    scale: float
    power: float
    sharpness: float = 1.0

    def chance(self, probability: float) -> float:
        return min(MAX_CHANCE, self.scale * probability**self.power)

    def by_grade(self) -> list[float]:
        """By the grade of p (`lade.drafting.top_k_table`)."""
        return [self.chance(float(probability)) for probability in PROBABILITIES]


class CopyPrior(NamedTuple):
    """Acceptance of the next token of a copy, by the number of tokens that are equal before it."""

    source: str
    lengths: tuple[int, ...]  # from one to the next the chances are the same
    chances: tuple[float, ...]

    def by_length(self) -> list[tuple[str, float]]:
        """The name of the source with the length, and the chance, for 0 to MAX_MATCH equal tokens."""
        places = [max(0, bisect_right(self.lengths, length) - 1) for length in range(MAX_MATCH + 1)]
        return [(f"{self.source} of {self.lengths[place]}", self.chances[place]) for place in places]


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, MAX_MATCH)
SIMILARITIES = (0.5, 0.68, 0.78, 0.87, 0.94)  # upper ends of the classes of a context's similarity


class Priors:
    """The priors of one kind of decoding. context: by class of similarity. unseen: of a token without a row, which is
    guessed to learn its row."""

    def __init__(
        self,
        token: RowPrior,
        context: tuple[RowPrior, ...],
        rejected: RowPrior,
        root: RowPrior,
        suffix: CopyPrior,
        earlier: CopyPrior,
        unseen: float,
    ) -> None:
        self.token, self.context, self.rejected, self.root, self.unseen = token, context, rejected, root, unseen
        self.suffix, self.earlier = suffix.by_length(), earlier.by_length()
        self.chances = {prior: prior.by_grade() for prior in (token, *context, rejected, root)}

    def of_context(self, similarity: float) -> RowPrior:
        return self.context[bisect_right(SIMILARITIES, similarity)]


def _contexts(
    scales: tuple[float, ...], powers: tuple[float, ...], sharpness: tuple[float, ...]
) -> tuple[RowPrior, ...]:
    return tuple(RowPrior("context", *one) for one in zip(scales, powers, sharpness, strict=True))


SHARPNESS = (0.45, 0.55, 0.6, 0.75, 0.8, 1.0)
# Measured on texts of Qwen2.5-Coder 0.5B and Gemma 3 270M (docs/drafting-study.md, "Priors").
GREEDY = Priors(
    token=RowPrior("token", 0.75, 1.0, 0.6),
    context=_contexts((0.3, 0.4, 0.55, 0.65, 0.85, 1.0), (1.0,) * 6, SHARPNESS),
    rejected=RowPrior("rejected", 0.45, 1.0, 0.45),
    root=RowPrior("root row", 0.2, 0.7, 0.45),
    suffix=CopyPrior("suffix", LENGTHS, (0.1, 0.25, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97, 0.98)),
    earlier=CopyPrior("earlier text", LENGTHS, (0.1, 0.25, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97, 0.98)),
    unseen=0.02,
)
SAMPLED = Priors(
    token=RowPrior("token", 0.75, 1.0, 0.6),
    context=_contexts((0.3, 0.4, 0.55, 0.65, 0.85, 1.0), (1.0,) * 6, SHARPNESS),
    rejected=RowPrior("rejected", 0.45, 1.0, 0.45),
    root=RowPrior("root row", 0.2, 0.7, 0.45),
    suffix=CopyPrior("suffix", LENGTHS, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)),
    earlier=CopyPrior("earlier text", LENGTHS, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)),
    unseen=0.02,
)


class AcceptanceRatio:
    """Guesses accepted in the latest steps over those that the priors expected."""

    def __init__(self) -> None:
        self._expected = self._accepted = RATIO_WEIGHT

    @property
    def value(self) -> float:
        """At most 1."""
        return min(1.0, self._accepted / self._expected)

    def learn(self, expected: float, accepted: int) -> None:
        """Record a step; one without guesses moves the ratio towards 1."""
        self._expected = RATIO_MEMORY * self._expected + (1 - RATIO_MEMORY) * RATIO_WEIGHT + expected
        self._accepted = RATIO_MEMORY * self._accepted + (1 - RATIO_MEMORY) * RATIO_WEIGHT + accepted
