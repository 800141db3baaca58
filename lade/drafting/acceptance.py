"""How often guesses of each kind turn out right, learned while decoding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.drafting.suffix_index import MAX_MATCH, MIN_MATCH
from lade.drafting.top_k_table import BIN_MIDDLES, NUM_BINS

PRIOR_WEIGHT = 16.0  # trials that the prior counts as
MAX_TRIALS = 400.0  # beyond these, older trials count half: the text changes
TRUST_WEIGHT = 1.0  # expected and accepted guesses that trust starts with and slowly returns to
TRUST_MEMORY = 0.9  # share of the past that is left after each step
FORGET_SHARE = 0.8  # of what was learned that is left after FORGET_EVERY steps without a guess
FORGET_EVERY = 16
MATCH_LENGTHS = (MIN_MATCH, 4, 5, 6, 7, 8, 9, 13, MAX_MATCH)  # matches from one length up to the next count together
# The priors: how often the same token follows again. Greedy text that repeats itself continues to do so.
GREEDY_MATCHES = (0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.96, 0.97, 0.98)
SAMPLED_MATCHES = (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
# The same for a copy that is resumed after a difference, by the number of its tokens that are equal again.
RESUMED_LENGTHS = (0, 1, 2, 3, 5, 9)
RESUMED_COPIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
# The value of a probe, in accepted guesses: it is hardly ever right itself, but its row saves later steps. It counts
# less where the model's likeliest tokens have low probabilities: then rows are seldom right.
PROBE_CREDIT = 0.02
USUAL_SURENESS = 0.5  # mean probability of the likeliest token at which a probe gets its full credit
SURENESS_SHARE = 0.1  # of each token in that mean

# Rows of a token with a similar context: upper ends of the bins of its cosine, and what their guesses are worth at
# first, relative to the row's own probabilities, after another token than the present one and after the same.
SIMILARITIES = (0.5, 0.68, 0.78, 0.87, 0.94)
OTHER_CONTEXTS = (0.3, 0.4, 0.55, 0.65, 0.85, 1.0)
SAME_PAIRS = (0.75, 0.75, 0.78, 0.87, 1.0, 1.1)
# How sharply their probabilities decide, as SHARPNESS below.
SHARP_CONTEXTS = (0.45, 0.55, 0.6, 0.75, 0.8, 1.0)
SHARP_PAIRS = (0.55, 0.6, 0.7, 0.8, 0.95, 1.1)
MAX_PRIOR = 0.99

NUM_SHORT = 6  # of MATCH_LENGTHS; the longer ones came later to saved memories

SECOND_SHARE = 0.3  # of the prior of the longest match, for another continuation

# A kind is the source of a guess and how likely the source takes it to be: an index into these lists. Saved memories
# hold them in this order.
_sources: list[str] = []
_priors: dict[bool, list[float]] = {False: [], True: []}  # by whether tokens are sampled


def _kinds(sources: Sequence[str], greedy: Sequence[float], sampled: Sequence[float] | None = None) -> int:
    """Add kinds: the name of each one's source and its prior. Returns the first."""
    first = len(_sources)
    _sources.extend(sources)
    _priors[False].extend(greedy)
    _priors[True].extend(greedy if sampled is None else sampled)
    return first


def _matches(source: str, first: int, end: int | None, share: float = 1.0) -> int:
    """Add the kinds of MATCH_LENGTHS[first:end]. share: of their priors. Returns the first."""
    greedy, sampled = ([share * chance for chance in of[first:end]] for of in (GREEDY_MATCHES, SAMPLED_MATCHES))
    return _kinds([f"{source} of {length}" for length in MATCH_LENGTHS[first:end]], greedy, sampled)


_by_single = [chance * (1 - chance / 2) for chance in BIN_MIDDLES]  # likely tokens depend more on context
_by_token = [0.6 * chance for chance in _by_single]

PAIR = _kinds(["pair"] * NUM_BINS, BIN_MIDDLES)  # + bin: the row of the last two tokens
SINGLE = _kinds(["single"] * NUM_BINS, _by_single)  # + bin: the row of the last token
SUFFIX = _matches("suffix", 0, NUM_SHORT)  # + number of the length: what followed the longest earlier occurrence
SECOND_SUFFIX = _matches("suffix", 0, NUM_SHORT, SECOND_SHARE)  # the same for another continuation
PROBE = _kinds(["probe"], [PROBE_CREDIT])  # a token whose row is unknown, guessed in order to learn it
FIRST_NUM_KINDS = PROBE + 1  # of the oldest saved memories that load
VOCABULARY = _kinds(["vocabulary"] * NUM_BINS, _by_token)  # + bin: the row of the last token without any text before it
SIBLING = _kinds(["sibling"] * NUM_BINS, _by_token)  # + bin: the row of a wrong guess in the last token's place
LONG_SUFFIX = _matches("suffix", NUM_SHORT, None)
LONG_SECOND = _matches("suffix", NUM_SHORT, None, SECOND_SHARE)
STORE = _matches("earlier text", 0, None)  # what followed the longest occurrence in texts of earlier calls
SECOND_STORE = _matches("earlier text", 0, None, SECOND_SHARE)
RESUMED = _kinds(  # + number among RESUMED_LENGTHS: a copy resumed after a difference
    [f"resumed copy of {length}" for length in RESUMED_LENGTHS],
    RESUMED_COPIES,
    [chance / 2 for chance in RESUMED_COPIES],
)
NEAREST = _kinds(  # + NUM_BINS * the number of the similarity, those after the same pair last, + bin
    ["nearest"] * NUM_BINS * 2 * len(OTHER_CONTEXTS),
    [min(MAX_PRIOR, share * chance) for share in OTHER_CONTEXTS + SAME_PAIRS for chance in BIN_MIDDLES],
)
NUM_KINDS = len(_sources)
# How far the probabilities of a source's rows can be relied on where they are compared with the draws of sampling, by
# the first kind of the source: the exponents of `races`. They are 1.25 times the likeliest ones at the roots of steps,
# which gave no more tokens per step than these (docs/drafting-study.md, "Finer probabilities").
SHARPNESS = {PAIR: 0.75, SINGLE: 0.6, VOCABULARY: 0.55, SIBLING: 0.45} | {
    NEAREST + NUM_BINS * number: sharpness for number, sharpness in enumerate(SHARP_CONTEXTS + SHARP_PAIRS)
}


def _by_length(short: int, long: int) -> tuple[int, ...]:
    """Kinds by match length, up to the longest that is told apart."""
    bins = [bisect_right(MATCH_LENGTHS, length) - 1 for length in range(MAX_MATCH + 1)]
    return tuple(short + place if place < NUM_SHORT else long + place - NUM_SHORT for place in bins)


# By match length, of the longest match and of another continuation.
SUFFIX_KINDS = _by_length(SUFFIX, LONG_SUFFIX), _by_length(SECOND_SUFFIX, LONG_SECOND)
STORE_KINDS = _by_length(STORE, STORE + NUM_SHORT), _by_length(SECOND_STORE, SECOND_STORE + NUM_SHORT)
RESUMED_KINDS = (tuple(RESUMED + bisect_right(RESUMED_LENGTHS, length) - 1 for length in range(MAX_MATCH + 1)),) * 2


def nearest_kind(similarity: float, has_same_pair: bool) -> int:
    """The kind of the rarest guess of a token's row with a similar context, has_same_pair: after the same two ids."""
    return NEAREST + (has_same_pair * len(OTHER_CONTEXTS) + bisect_right(SIMILARITIES, similarity)) * NUM_BINS


def name_of(kind: int) -> str:
    """The source that a kind belongs to, of matches with their length."""
    return _sources[kind]


class Acceptance:
    """Probability of each kind: hits over trials, starting with a prior; and how far to trust their sum."""

    def __init__(self, do_sample: bool) -> None:
        self._prior = _priors[do_sample]
        self.chances = list(self._prior)
        self.trials = [PRIOR_WEIGHT] * NUM_KINDS
        self.hits = [PRIOR_WEIGHT * chance for chance in self.chances]
        self._expected = self._accepted = TRUST_WEIGHT
        self._num_idle = 0  # steps without a guess
        self._sureness = USUAL_SURENESS

    @property
    def trust(self) -> float:
        """Guesses accepted lately over those expected to be, at most 1."""
        return min(1.0, self._accepted / self._expected)

    @property
    def promise(self) -> float:
        """How predictable the text is, from 0 to 1: near 0 if the model's likeliest tokens have low probabilities."""
        return min(1.0, self._sureness / USUAL_SURENESS) ** 2

    def learn(
        self,
        kinds: Sequence[int],
        parents: Sequence[int],
        expected: Sequence[float],
        path: Sequence[int],
        hits: Sequence[int],
    ) -> None:
        """Record the outcome of one tree, which has guesses.

        kinds, parents, expected: each node's kind, parent (-1 for the root) and probability, its ancestors'
        included. path: the accepted nodes; only their children were judged. hits: the nodes that were right.
        """
        self._num_idle = 0
        judged = {-1, *path}
        tried = [kind for kind, parent in zip(kinds, parents, strict=True) if parent in judged and kind != PROBE]
        right = [kinds[node] for node in hits if kinds[node] != PROBE]
        for kind in tried:
            self.trials[kind] += 1
            if self.trials[kind] > MAX_TRIALS:
                self.trials[kind] /= 2
                self.hits[kind] /= 2
        for kind in right:
            self.hits[kind] += 1
        for kind in {*tried, *right}:
            self._set_chance(kind)
        hoped = sum([chance for kind, chance in zip(kinds, expected, strict=True) if kind != PROBE])
        self._learn_trust(hoped, len(hits))

    def rest(self) -> None:
        """Record a step without guesses."""
        self._num_idle += 1
        if self._num_idle == FORGET_EVERY:
            self._num_idle = 0
            self.forget()
        self._learn_trust(0.0, 0)

    def learn_sureness(self, bins: Sequence[int]) -> None:
        """Record how likely the model's first choice was after accepted tokens. bins: of its probability each time."""
        for bin_index in bins:
            self._sureness += SURENESS_SHARE * (self._prior[PAIR + bin_index] - self._sureness)
        self._value_probes()

    def forget(self) -> None:
        """Move back towards the prior: nothing is learned without guesses, and the text may have become easy."""
        for kind, prior in enumerate(self._prior):
            self.trials[kind] = PRIOR_WEIGHT + FORGET_SHARE * (self.trials[kind] - PRIOR_WEIGHT)
            self.hits[kind] = PRIOR_WEIGHT * prior + FORGET_SHARE * (self.hits[kind] - PRIOR_WEIGHT * prior)
            self._set_chance(kind)
        self._value_probes()

    def as_array(self) -> npt.NDArray[Any]:
        """Trials and hits of each kind, [2, NUM_KINDS]."""
        return np.array([self.trials, self.hits])

    def restore(self, trials: list[float], hits: list[float]) -> None:
        """Continue from saved counts. trials, hits: of each kind."""
        self.trials, self.hits = trials, hits
        for kind in range(NUM_KINDS):
            self._set_chance(kind)

    def _learn_trust(self, expected: float, accepted: int) -> None:
        self._expected = TRUST_MEMORY * self._expected + (1 - TRUST_MEMORY) * TRUST_WEIGHT + expected
        self._accepted = TRUST_MEMORY * self._accepted + (1 - TRUST_MEMORY) * TRUST_WEIGHT + accepted

    def _value_probes(self) -> None:
        self.chances[PROBE] = PROBE_CREDIT * self.promise

    def _set_chance(self, kind: int) -> None:
        # A hit is counted after its trial. Where the trial halved both, there may be more hits than trials.
        self.chances[kind] = min(1.0, self.hits[kind] / self.trials[kind])
