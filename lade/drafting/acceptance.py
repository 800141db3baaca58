"""Acceptance probabilities of guesses by source."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import PROBABILITIES

MAX_CHANCE = 0.99


class RowPrior(NamedTuple):
    """Acceptance of guesses from rows: scale * p ** power, where p is a guess's probability in its row."""

    source: str
    scale: float
    power: float

    def chance(self, probability: float) -> float:
        return min(MAX_CHANCE, self.scale * probability**self.power)

    def by_bin(self) -> list[float]:
        """`chance` for each bin of p (`lade.drafting.top_k_table`)."""
        return [self.chance(float(probability)) for probability in PROBABILITIES]


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, MAX_MATCH)  # of matches; from one to the next they count together
SIMILARITIES = (0.5, 0.68, 0.78, 0.87, 0.94)  # upper ends of the classes of a context's similarity
CopyPriors = list[tuple[str, float]]  # by the number of equal tokens: the source, and the acceptance of the next token


class Priors:
    """The priors of greedy decoding, or of sampling.

    token, context, root: of rows, by source; context: by class of similarity. suffix, earlier, prediction: of copies
    from the text itself, from earlier ones, and from what the answer is expected to resemble.
    """

    def __init__(
        self,
        token: tuple[float, float],
        root: tuple[float, float],
        contexts: tuple[float, ...],
        copies: tuple[float, ...],
    ) -> None:
        """token, root: scale and power. contexts: scales. copies: by LENGTHS."""
        self.token, self.root = RowPrior("token", *token), RowPrior("root row", *root)
        self.context = [RowPrior("context", scale, 1.0) for scale in contexts]
        self.suffix, self.earlier = _by_length("suffix", copies), _by_length("earlier text", copies)
        self.prediction = _by_length("prediction", copies)
        self.chances = {prior: prior.by_bin() for prior in (self.token, self.root, *self.context)}

    def of_context(self, similarity: float) -> RowPrior:
        return self.context[bisect_right(SIMILARITIES, similarity)]


def _by_length(source: str, chances: tuple[float, ...]) -> CopyPriors:
    """Source and acceptance for 0 to MAX_MATCH equal tokens. chances: by LENGTHS."""
    places = [max(0, bisect_right(LENGTHS, length) - 1) for length in range(MAX_MATCH + 1)]
    return [(f"{source} of {LENGTHS[place]}", chances[place]) for place in places]


# Measured on texts of Qwen2.5-Coder 0.5B and Gemma 3 270M (docs/drafting-study.md, "Priors").
GREEDY = Priors(
    token=(0.5, 0.8),
    root=(0.05, 0.4),
    contexts=(0.38, 0.42, 0.45, 0.55, 0.8, 0.92),
    copies=(0.1, 0.25, 0.5, 0.55, 0.7, 0.78, 0.8, 0.82, 0.93, 0.95, 0.95),
)
SAMPLED = Priors(
    token=(0.6, 1.0),
    root=(0.1, 0.7),
    contexts=(0.4, 0.42, 0.5, 0.6, 0.8, 0.85),
    copies=(0.1, 0.3, 0.5, 0.6, 0.65, 0.65, 0.66, 0.68, 0.83, 0.88, 0.88),
)
