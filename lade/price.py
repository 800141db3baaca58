"""What a step costs by the size of its block, as measured while decoding, and which size is worth its price. Floor 1."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any

# Sizes that are chosen from: few, so that each is well measured and kernels see few shapes.
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
OBSERVATIONS = 9  # the latest of a size; their median is its price
RUN_LENGTH = 4  # the latest steps of one size in a row, whose median another one is compared with
ASSUMED_SLOPE = 0.004  # of a step per token, where nothing was measured: low, so that larger blocks are tried
# What trying new sizes may cost: as much as some plain steps, and this share of all time. Beyond that, larger blocks are assumed to
# cost what the line through the last two says.
FREE_TRIALS, TRIAL_SHARE = 4.0, 0.02
MAX_LEAST_CHANCE = 0.05  # a price that is wrong must not keep the sizes from being tried that would put it right
# Steps after which another size may be measured again: the next larger, the next smaller, 1, in turn.
EXPLORE_EVERY = 16
# A change that needs no new comparison, and observations after which there is one anyway.
SAME_PRICE, RENEW_EVERY = 0.01, 8
STALE_AFTER = 48  # steps without a measurement after which a price is worth a look
MIN_CONTEXT = 256  # tokens; shorter texts cost the same


class StepPrice:
    """What steps of different sizes cost beside each other: measured, or on lines between what was, or a guess beyond.

    A machine's speed may change by half within seconds, so no times are compared that were not taken next to each other: where a
    step's size differs from the last one's, the two tell what the larger costs in terms of the smaller. A larger block never
    costs less than a smaller one; where it seems to, both have what they cost on average.
    """

    def __init__(self, similar: StepPrice | None = None) -> None:
        """similar: the prices of a shorter or longer text, which stand in for what was not measured here."""
        self._similar = similar
        self._seen: dict[int, deque[float]] = {}  # size -> its cost as found lately
        self._lock = threading.Lock()
        self._measured: dict[int, float] = {}  # cost by size
        self._costs: dict[int, float] = {}  # the same, never falling with the size; replaced, never changed
        # Size of the latest steps, and their seconds; replaced, never changed.
        self._run: tuple[int, list[float]] = 0, []
        self._pace: float = 1.0 if similar is None else similar._pace  # seconds per unit of cost, lately
        # The size whose cost the latest comparison told; 0 where that was put together with the one before.
        self._changed = 0
        self._num_chosen = 0
        self._seen_at: dict[int, int] = {}  # size -> _num_chosen when it was last measured
        # What all steps have cost; and what those have that tried a new size, beyond plain steps.
        self._spent = self._lost = 0.0
        self._offers: dict[int, Offers] = {}  # by limit; made anew where prices have changed
        self._num_observed = 0  # since then

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of q tokens took so long. The first one of a size also pays for setting kernels up and does not count.

        Nor does one that took no time: the clock stood still or was set back, as tests of programs around lade make it do.
        """
        if seconds <= 0:
            return
        size = num_tokens
        if size not in SIZES:
            size = min(SIZES, key=lambda size: abs(size - num_tokens))
            seconds *= self.cost(size) / self.cost(num_tokens)
        paid = seconds / self._pace
        self._spent += paid
        if size not in self._measured:
            self._lost += max(0.0, paid - self._costs.get(1, paid))
        with self._lock:  # calls in several threads share the prices
            if size not in self._seen:
                self._seen[size] = deque(maxlen=OBSERVATIONS)
                return
            self._seen_at[size] = self._num_chosen
            other, run = self._run
            before, changed = self._costs, size
            if size == other:
                self._run = size, [*run[1 - RUN_LENGTH :], seconds]
            else:
                if size not in self._measured:
                    self._measured[size] = self.cost(size)
                if run:
                    changed = max(size, other)
                    growth = seconds / _median(run) if changed == size else _median(run) / seconds
                    self._compare(changed, self._measured[min(size, other)] * growth, is_same_step=len(run) == 1)
                self._costs = self._rising_costs()
                self._run = size, [seconds]
            self._pace = _median(self._run[1]) / self._costs[size]
            self._num_observed += 1
            price = before.get(changed)
            has_changed = price is None or abs(self._costs[changed] - price) > SAME_PRICE * price
            if has_changed or self._num_observed == RENEW_EVERY:
                self._offers, self._num_observed = {}, 0

    def begin(self) -> None:
        """The next step is compared with none before it: other things have been done in between."""
        self._run = 0, []

    def _compare(self, size: int, cost: float, is_same_step: bool) -> None:
        """A size's cost has been found. is_same_step: a single step of it, or of the other size, was compared before and after."""
        seen = self._seen[size]
        if is_same_step and self._changed == size and seen:
            cost, self._changed = sqrt(cost * seen.pop()), 0  # one odd step is to count but once
        else:
            self._changed = size
        seen.append(cost)
        ordered, count = sorted(seen), len(seen)
        # No further than to the two in the middle: one odd measurement beside one other changes nothing.
        self._measured[size] = max(ordered[(count - 1) // 2], min(self._measured[size], ordered[count // 2]))

    def _rising_costs(self) -> dict[int, float]:
        """Costs that never fall with the size: neighbours in the wrong order get their mean (isotonic regression)."""
        groups: list[tuple[float, int, list[int]]] = []  # cost, weight, sizes
        for size in sorted(self._measured):
            # What has not been compared is what others are compared with.
            cost, weight, sizes = self._measured[size], len(self._seen.get(size, ())) or OBSERVATIONS, [size]
            while groups and groups[-1][0] >= cost:
                other, other_weight, others = groups.pop()
                cost = (other * other_weight + cost * weight) / (other_weight + weight)
                weight, sizes = other_weight + weight, others + sizes
            groups.append((cost, weight, sizes))
        return {size: cost for cost, _, sizes in groups for size in sizes}

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step of q tokens, the machine being as fast as in the latest steps; of no meaning before them."""
        return self._pace * self.cost(num_tokens)

    def cost(self, num_tokens: int) -> float:
        """What a step of q tokens costs, in a unit of this object's own; that of a shorter or longer text is the same."""
        measured = self._costs
        if num_tokens in measured:
            return measured[num_tokens]
        if self._similar is not None:
            cost = self._similar.cost(num_tokens)
            if not measured:
                return cost
            known = min(measured, key=lambda size: abs(size - num_tokens))
            return cost * measured[known] / self._similar.cost(known)
        below = max((size for size in measured if size < num_tokens), default=None)
        above = min((size for size in measured if size > num_tokens), default=None)
        if below is not None and above is not None:
            share = (num_tokens - below) / (above - below)
            return measured[below] + share * (measured[above] - measured[below])
        nearest = below or above
        if nearest is None:
            return 1 + ASSUMED_SLOPE * num_tokens
        assumed = measured[nearest] * (1 + ASSUMED_SLOPE * num_tokens) / (1 + ASSUMED_SLOPE * nearest)
        if below is None or len(measured) == 1 or self._may_try:
            return assumed
        *_, before, last = sorted(measured)
        return max(
            assumed, measured[last] + (num_tokens - last) * (measured[last] - measured[before]) / (last - before)
        )

    @property
    def _may_try(self) -> bool:
        """Whether trying sizes that nobody has measured has cost little so far."""
        return self._lost <= FREE_TRIALS * self._costs.get(1, 0.0) + TRIAL_SHARE * self._spent

    @classmethod
    def of(cls, seconds: dict[int, float]) -> StepPrice:
        """What was measured earlier, as `measured` told it."""
        price = cls()
        price._measured, price._costs = dict(seconds), dict(seconds)
        return price

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by size, of the sizes that were measured."""
        pace = self._pace
        return {size: pace * cost for size, cost in self._costs.items()}

    @property
    def largest_known(self) -> int:
        """The largest size with a price."""
        inherited = 0 if self._similar is None else self._similar.largest_known
        return max(inherited, max(self._costs, default=0))

    def offers(self, limit: int) -> Offers:
        """What may be chosen: sizes up to the largest that is allowed, and at most twice as large as what has been tried."""
        found = self._offers.get(limit)
        if found is None:
            reach = max(1, 2 * self.largest_known)
            sizes = [size for size in SIZES if size < min(limit, reach + 1)] + ([limit] if limit <= reach else [])
            found = self._offers[limit] = Offers(
                tuple(sizes), [self.cost(size) for size in sizes], self._least_chance()
            )
        return found

    def _least_chance(self) -> float:
        plain, sizes = self.cost(1), [size for size in SIZES[1:] if size <= max(2, self.largest_known)]
        slope = min((self.cost(size) / plain - 1) / (size - 1) for size in sizes)
        return min(MAX_LEAST_CHANCE, max(0.0, slope / 2))  # half: measured lines are not exact

    def choose(self, expected: Sequence[float], num_rows: int, limit: int) -> int:
        """The size of block that commits most tokens per second; now and then another one, to keep its price known.

        expected: accepted guesses, summed over rows, that k guesses per row are good for, at index k. num_rows: rows that are not
        finished. limit: the largest block that is allowed. Returns q, 1 for a plain step.
        """
        offers = self.offers(limit)
        sizes = [size for size in offers.sizes if size <= len(expected)]
        rates = [(num_rows + expected[size - 1]) / cost for size, cost in zip(sizes, offers.costs, strict=False)]
        best = rates.index(max(rates))
        self._num_chosen += 1
        if self._num_chosen % EXPLORE_EVERY == 0:
            other = (best + 1, best - 1, 0)[self._num_chosen // EXPLORE_EVERY % 3]
            other = min(max(other, 0), len(sizes) - 1)
            if self._num_chosen - self._seen_at.get(sizes[other], -STALE_AFTER) >= STALE_AFTER:
                best = other
        return sizes[best]

    def appetite(self, limit: int, trust: float) -> Appetite:
        """What tells when one row's tree for the next step has grown enough. limit: the largest block. trust: of its chances."""
        is_exploring = (self._num_chosen + 1) % EXPLORE_EVERY == 0  # then the next larger size may be chosen, too
        return Appetite(self.offers(limit), trust, int(is_exploring))


@dataclass(frozen=True, slots=True)
class Offers:
    """Sizes that may be chosen, from small to large, and what they cost."""

    sizes: tuple[int, ...]
    costs: list[float]
    least_chance: float  # a guess that is accepted more rarely is not worth its place in any block


@lru_cache(maxsize=256)
def _hoped(sizes: tuple[int, ...], place: int) -> list[float]:
    """How many accepted guesses each larger block may be worth, in units of the next guess's chance, where one size is full.

    Further guesses are likely to be rarer the more there are of them: as if the k-th had chance * sqrt(size / k).
    """
    size = sizes[place]
    return [1 + 2 * (sqrt(size * (larger - 1)) - size) for larger in sizes[place + 1 :]]


class Appetite:
    """Whether a tree that grows best guess first is worth growing on: whether any larger block could still pay better."""

    def __init__(self, offers: Offers, trust: float, spare: int) -> None:
        """trust: accepted guesses per expected one. spare: sizes to grow beyond what is enough."""
        self._offers, self._trust, self._spare = offers, trust, spare
        self._place = 0  # of the smallest size that the tree has not reached yet
        self._best = 0.0  # tokens per second of the sizes that it has

    def is_sated(self, num_nodes: int, expected: float, chance: float) -> bool:
        """num_nodes: guesses so far, to be told one after the other. expected: sum of their chances. chance: of the next one, at most."""
        sizes, costs, place = self._offers.sizes, self._offers.costs, self._place
        if place == len(sizes):
            return True
        size = sizes[place]
        if num_nodes + 1 < size:
            return False
        self._place += 1
        gain = 1 + self._trust * expected
        self._best = max(self._best, gain / costs[place])
        promise = self._trust * chance
        for more, cost in zip(_hoped(sizes, place), costs[place + 1 :], strict=True):
            if gain + promise * more > self._best * cost:
                return False
        self._spare -= 1
        return self._spare < 0


def _median(seconds: list[float]) -> float:
    """The lower one of two in the middle: what disturbs a step only ever makes it longer."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


SavedPrices = dict[str, dict[str, float]]  # what else a price depends on -> size -> seconds

_prices: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], StepPrice]] = weakref.WeakKeyDictionary()


class ModelPrices:
    """The prices of one model for a batch size, by the length of the text."""

    def __init__(self, model: Any, kind: tuple[Any, ...], saved: SavedPrices | None = None) -> None:
        """kind: whatever else changes what a step costs, such as dtype, device and batch size.

        saved: `saved_prices` of an earlier process, to begin with where nothing was measured in this one.
        """
        self._kind, self._all = kind, _prices.setdefault(model, {})
        self._saved = saved or {}
        self._latest: StepPrice | None = None

    def at(self, num_slots: int) -> StepPrice:
        """The prices for texts of about this many tokens."""
        bucket = max(MIN_CONTEXT, num_slots).bit_length()
        key = (*self._kind, bucket)
        if key not in self._all:
            known = [other[-1] for other in list(self._all) if other[:-1] == self._kind]
            nearest = min(known, key=lambda other: abs(other - bucket), default=None)
            similar = None if nearest is None else self._all[(*self._kind, nearest)]
            saved = self._saved.get(_name_of(key))
            if similar is None and saved:
                similar = StepPrice.of({int(size): seconds for size, seconds in saved.items()})
            self._all[key] = StepPrice(similar)
        if self._all[key] is not self._latest:
            self._latest = self._all[key]
            self._latest.begin()
        return self._latest


def saved_prices(model: Any) -> SavedPrices:
    """All prices of a model, in a form for JSON."""
    found = {key: price.measured for key, price in list(_prices.get(model, {}).items())}
    return {
        _name_of(key): {str(size): cost for size, cost in seconds.items()} for key, seconds in found.items() if seconds
    }


def _name_of(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))
