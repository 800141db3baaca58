"""Acceptance probabilities of guesses by source, in greedy decoding and in sampling.

Measured on texts of Qwen2.5-Coder 0.5B and Gemma 3 270M (docs/drafting-study.md, "Priors").
"""

from __future__ import annotations

from bisect import bisect_right

from lade.drafting.suffix_index import MAX_MATCH
from lade.drafting.top_k_table import PROBABILITIES

MAX_CHANCE = 0.99
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, MAX_MATCH)  # of matches; from one to the next they count together
OF_LENGTHS = (0.1, 0.25, 0.5, 0.55, 0.7, 0.78, 0.8, 0.82, 0.93, 0.95, 0.98)  # acceptance of the next token of a copy
SIMILARITIES = (0.5, 0.68, 0.78, 0.87, 0.94)  # upper ends of the classes of a context's similarity

CopyPriors = list[tuple[str, float]]  # by the number of equal tokens: the source, and the acceptance of the next token


class RowPrior:
    """Acceptance of guesses from rows: scale * p ** power, where p is a guess's probability in its row.

    by_bin: for each bin of p (`lade.drafting.top_k_table`).
    """

    def __init__(self, source: str, scale: float, power: float) -> None:
        self.source = source
        self.by_bin = [min(MAX_CHANCE, scale * float(p) ** power) for p in PROBABILITIES]


TOKEN, ROOT = RowPrior("token", 0.5, 0.8), RowPrior("root row", 0.05, 0.4)
CONTEXT = [RowPrior("context", scale, 1.0) for scale in (0.38, 0.42, 0.45, 0.55, 0.8, 0.92)]  # by class


def of_context(similarity: float) -> RowPrior:
    """The prior of rows that were found by a context of some similarity, a cosine."""
    return CONTEXT[bisect_right(SIMILARITIES, similarity)]


def _by_length(source: str) -> CopyPriors:
    """Source and acceptance for 0 to MAX_MATCH equal tokens."""
    places = [max(0, bisect_right(LENGTHS, length) - 1) for length in range(MAX_MATCH + 1)]
    return [(f"{source} of {LENGTHS[place]}", OF_LENGTHS[place]) for place in places]


# Of copies from the text itself, from texts of earlier calls, and from what the answer is expected to resemble.
SUFFIX, EARLIER, PREDICTION = _by_length("suffix"), _by_length("earlier text"), _by_length("prediction")
