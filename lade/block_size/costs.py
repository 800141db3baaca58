"""Step cost models: the time of a step of q tokens relative to a plain step.

Where the block's size cannot change the output (float32, float64), `LiveCosts` follow the machine's present speed. In
half precision the size changes the rounding of matrix products, so a size that depends on a clock would make runs
differ. There `FixedCosts` use a table that is measured once per machine, model shape and dtype, and stored for later
processes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from math import sqrt
from statistics import median_high, median_low
from typing import Any

from lade.block_size.tables import (
    MAX_ASSUMED_COST,
    Calibration,
    can_store,
    default_costs,
    interpolated,
    isotonic,
    load,
    store,
    table_name,
)
from lade.state import PerModel

# The sizes to choose from: few, so that each is well measured and kernels see few shapes.
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
OBSERVATIONS = 9  # per size; the cost is their median
RUN_LENGTH = 4  # latest steps of one size in a row; their median is compared with the next size's time
ASSUMED_SLOPE = 0.004  # of a plain step per token, if nothing was measured: low, so that larger blocks are tried
# Budget for trying unmeasured sizes: a number of plain steps, plus a share of all time. Once it is spent, the costs of
# larger blocks are extrapolated from the last two sizes.
FREE_TRIALS, TRIAL_SHARE = 4.0, 0.02
MAX_LEAST_CHANCE = 0.05  # a wrong cost must not prevent larger sizes from being measured
# Every so many steps another size may be measured again: the next larger, the next smaller, and 1 in turn.
EXPLORE_EVERY = 16
# Offers are kept while costs change by less than this share, for at most so many observations.
SAME_COST, RENEW_EVERY = 0.01, 8
STALE_AFTER = 48  # steps without a measurement after which a size is measured again
MIN_CONTEXT = 256  # tokens; shorter contexts share one cost model


@dataclass(frozen=True, slots=True)
class Offers:
    """The block sizes to choose from, in increasing order, and their costs."""

    sizes: tuple[int, ...]
    costs: list[float]
    least_chance: float  # a guess with a lower acceptance probability does not pay in any block


class StepCosts:
    """Cost of a step of q tokens. The unit is arbitrary; only ratios matter."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        """sizes: the sizes to choose from, rising; a step without guesses costs as much as the first."""
        self.sizes = sizes
        self._offers: dict[int, Offers] = {}  # by limit; replaced when costs change

    def cost(self, num_tokens: int) -> float:
        raise NotImplementedError

    @property
    def largest_size(self) -> int:
        """The largest size that may be chosen, whatever the limit."""
        raise NotImplementedError

    @property
    def largest_known(self) -> int:
        """The largest measured size."""
        raise NotImplementedError

    @property
    def plain_cost(self) -> float:
        """Of a step without guesses."""
        return self.cost(self.sizes[0])

    def search_cost(self, seconds: float) -> float:
        """Cost in plain steps, at most 1, of a search for guesses that took `seconds`."""
        raise NotImplementedError

    def observe(self, num_tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        """Record the time of a step of q tokens and of the search for its guesses."""

    def begin(self) -> None:
        """The next step does not directly follow the last one, so their times must not be compared."""

    def scheduled_size(self, limit: int) -> int | None:
        """The size that the next step must have, because it is to be measured; None if the policy may choose."""
        return None

    def next_place(self, sizes: list[int], best: int) -> int:
        """The index into `sizes` to use in the next step, where `best` is the index of the size that pays most."""
        return best

    @property
    def may_explore_next(self) -> bool:
        """Whether the next choice may be one size larger than the best."""
        return False

    def offers(self, limit: int) -> Offers:
        """The sizes to choose from, up to `limit` and the largest that is known well enough."""
        known = self._offers  # of this time: another thread may replace it meanwhile
        found = known.get(limit)
        if found is None:
            most = min(limit, self.largest_size)
            sizes = tuple(size for size in sorted({*self.sizes, limit}) if size <= most)
            found = known[limit] = Offers(sizes, [self.cost(size) for size in sizes], self._least_chance())
        return found

    def _least_chance(self) -> float:
        first, *others = self.sizes
        plain, largest = self.plain_cost, max([*others[:1], self.largest_known])
        slopes = [(self.cost(size) / plain - 1) / (size - first) for size in others if size <= largest]
        slope = min(slopes, default=0.0)
        return min(MAX_LEAST_CHANCE, max(0.0, slope / 2))  # half, because measured slopes are inexact


class FixedCosts(StepCosts):
    """A table that does not depend on the clock during use: stored by an earlier process, or the default of the device
    type.

    Without a stored table, where one can be stored, the first steps follow a schedule of sizes and are timed. The
    schedule does not depend on the times, so runs agree until the table is stored, and again after that.
    """

    def __init__(self, name: str | None, device_type: str, batch_size: int, sizes: tuple[int, ...] = SIZES) -> None:
        """name: under which the table is stored; None for the default one, unmeasured. sizes: see `StepCosts`."""
        super().__init__(sizes)
        self._name, self._batch_size = name, batch_size
        self._lock = threading.Lock()
        found = None if name is None else load(name)
        self._assumed = default_costs(device_type, batch_size, SIZES)
        self._table = found or self._assumed
        self._calibration = None
        if found is None and name is not None:  # what costs much, as 64 tokens on a CPU may, is not timed
            largest = max(size for size, cost in self._assumed.costs.items() if cost <= MAX_ASSUMED_COST)
            self._calibration = Calibration(batch_size, sizes[0], largest)

    def cost(self, num_tokens: int) -> float:
        costs, assumed = self._table.costs, self._assumed.costs
        found, largest = interpolated(costs, num_tokens), max(costs)
        if num_tokens <= largest:
            return found
        # Beyond the measured sizes at least the default table's growth.
        return max(found, costs[largest] * interpolated(assumed, num_tokens) / interpolated(assumed, largest))

    @property
    def largest_size(self) -> int:
        return SIZES[-1]

    @property
    def largest_known(self) -> int:
        return max(self._table.costs)

    def search_cost(self, seconds: float) -> float:
        return self._table.search

    def observe(self, num_tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        with self._lock:  # calls in several threads share the table
            calibration = self._calibration
            if calibration is None or not calibration.add(num_tokens, seconds, search_seconds):
                return
            assert self._name is not None
            found = calibration.table()
            stored = None if found is None else store(self._name, found)
            if stored is not None:
                self._table = stored
                self._offers = {}
            self._calibration = None

    def begin(self) -> None:
        with self._lock:
            if self._calibration is not None:
                self._calibration.begin()

    def scheduled_size(self, limit: int) -> int | None:
        calibration = self._calibration
        return None if calibration is None else calibration.next_size(limit)


class LiveCosts(StepCosts):
    """Costs measured while decoding, interpolated between measured sizes and extrapolated beyond them.

    A machine's speed may change by half within seconds, so only times of adjacent steps are compared: where the size
    changes from one step to the next, their ratio gives the larger size's cost relative to the smaller's. Costs never
    fall with the size (isotonic regression).
    """

    def __init__(self, similar: LiveCosts | None = None, sizes: tuple[int, ...] = SIZES) -> None:
        """similar: costs for another length of context, for sizes not measured here. sizes: see `StepCosts`."""
        super().__init__(sizes)
        self._similar = similar
        self._seen: dict[int, deque[float]] = {}  # size -> its latest costs
        self._lock = threading.Lock()
        self._measured: dict[int, float] = {}  # cost by size
        self._costs: dict[int, float] = {}  # the same, never falling with the size; replaced, not mutated
        # Size and seconds of the latest steps; replaced, not mutated.
        self._run: tuple[int, list[float]] = 0, []
        self._seconds_per_unit: float = 1.0 if similar is None else similar._seconds_per_unit  # at present
        # The size whose cost the latest comparison gave; 0 if that was averaged with the previous comparison.
        self._changed = 0
        self._num_chosen = 0
        self._seen_at: dict[int, int] = {}  # size -> _num_chosen when it was last measured
        # Cost of all steps, and the extra cost over plain steps of those that tried a new size.
        self._spent = self._lost = 0.0
        self._num_observed = 0  # since the offers were computed

    def observe(self, num_tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        """Record a step, unless it is the first of its size, which includes one-time kernel setup.

        Times of 0 or less, from a clock that was stopped or set back, are ignored.
        """
        if seconds <= 0:
            return
        size = num_tokens
        if size not in self.sizes:
            size = min(self.sizes, key=lambda size: abs(size - num_tokens))
            seconds *= self.cost(size) / self.cost(num_tokens)
        paid = seconds / self._seconds_per_unit
        self._spent += paid
        if size not in self._measured:
            self._lost += max(0.0, paid - self._costs.get(self.sizes[0], paid))
        with self._lock:  # calls in several threads share the costs
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
                    growth = seconds / median_low(run) if changed == size else median_low(run) / seconds
                    self._compare(changed, self._measured[min(size, other)] * growth, is_same_step=len(run) == 1)
                # The size without comparisons is the reference, with full weight.
                weights = {size: len(self._seen.get(size, ())) or OBSERVATIONS for size in self._measured}
                self._costs = isotonic(self._measured, weights)
                self._run = size, [seconds]
            # Of the latest steps the lower median: disturbances only make a step longer.
            self._seconds_per_unit = median_low(self._run[1]) / self._costs[size]
            self._num_observed += 1
            cost = before.get(changed)
            has_changed = cost is None or abs(self._costs[changed] - cost) > SAME_COST * cost
            if has_changed or self._num_observed == RENEW_EVERY:
                self._offers, self._num_observed = {}, 0

    def begin(self) -> None:
        self._run = 0, []

    def _compare(self, size: int, cost: float, is_same_step: bool) -> None:
        """Record the cost of a size. is_same_step: a single step is part of this comparison and the previous one."""
        seen = self._seen[size]
        if is_same_step and self._changed == size and seen:
            cost, self._changed = sqrt(cost * seen.pop()), 0  # averaged, so that one odd step counts once
        else:
            self._changed = size
        seen.append(cost)
        # Clamped between the lower and the upper median: one of two measurements alone changes nothing.
        self._measured[size] = max(median_low(seen), min(self._measured[size], median_high(seen)))

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step of q tokens at the present speed; meaningless before the first steps."""
        return self._seconds_per_unit * self.cost(num_tokens)

    def search_cost(self, seconds: float) -> float:
        return min(1.0, seconds / self.seconds(self.sizes[0]))  # capped: an interruption says nothing about the search

    def cost(self, num_tokens: int) -> float:
        measured = self._costs
        if num_tokens in measured:
            return measured[num_tokens]
        if self._similar is not None:
            cost = self._similar.cost(num_tokens)
            if not measured:
                return cost
            known = min(measured, key=lambda size: abs(size - num_tokens))
            return cost * measured[known] / self._similar.cost(known)
        if not measured:
            return 1 + ASSUMED_SLOPE * num_tokens
        sizes = sorted(measured)
        if sizes[0] < num_tokens < sizes[-1]:
            return interpolated(measured, num_tokens)
        nearest = sizes[0] if num_tokens < sizes[0] else sizes[-1]
        assumed = measured[nearest] * (1 + ASSUMED_SLOPE * num_tokens) / (1 + ASSUMED_SLOPE * nearest)
        may_try = self._lost <= FREE_TRIALS * measured.get(self.sizes[0], 0.0) + TRIAL_SHARE * self._spent
        if num_tokens < sizes[0] or len(sizes) == 1 or may_try:
            return assumed
        return max(assumed, interpolated(measured, num_tokens))

    @classmethod
    def of(cls, seconds: dict[int, float]) -> LiveCosts:
        """Costs from an earlier process's `measured`."""
        costs = cls()
        costs._measured, costs._costs = dict(seconds), dict(seconds)
        return costs

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by size, for the measured sizes."""
        return {size: self.seconds(size) for size in self._costs}

    @property
    def largest_known(self) -> int:
        inherited = 0 if self._similar is None else self._similar.largest_known
        return max(inherited, max(self._costs, default=0))

    @property
    def largest_size(self) -> int:
        return max(self.sizes[0], 2 * self.largest_known)  # unmeasured sizes are tried gradually

    def next_place(self, sizes: list[int], best: int) -> int:
        self._num_chosen += 1
        if self._num_chosen % EXPLORE_EVERY:
            return best
        other = (best + 1, best - 1, 0)[self._num_chosen // EXPLORE_EVERY % 3]
        other = min(max(other, 0), len(sizes) - 1)
        is_stale = self._num_chosen - self._seen_at.get(sizes[other], -STALE_AFTER) >= STALE_AFTER
        return other if is_stale else best

    @property
    def may_explore_next(self) -> bool:
        return (self._num_chosen + 1) % EXPLORE_EVERY == 0


SavedCosts = dict[str, dict[str, float]]  # kind of step -> size -> seconds

_costs: PerModel[dict[tuple[Any, ...], StepCosts]] = PerModel(dict)


class StepCostsByLength:
    """Step costs of one model and batch size, by context length."""

    def __init__(
        self,
        model: Any,
        kind: tuple[Any, ...],
        saved: SavedCosts | None = None,
        source: str = "live",
        batch_size: int = 1,
        limit: int = 64,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        """kind: everything else that changes a step's cost, such as dtype, device and batch size.

        saved: `saved_costs` of an earlier process, as live costs to start with. source: "live"; or fixed costs, from a
        table that is "measured" on this machine, or "assumed". limit: the largest block, up to which that table is
        measured. sizes: the sizes to choose from.
        """
        self._model = weakref.ref(model)  # drafters may lie in circles, which would keep it
        self._saved, self._source = saved or {}, source
        self._batch_size, self._sizes = batch_size, sizes
        # Live and fixed costs of one kind coexist: whether outputs are exact may change between calls.
        self.kind = kind if source == "live" else (*kind, source, limit)
        self._all = _costs.of(model)
        self._latest: StepCosts | None = None

    def at(self, num_slots: int) -> StepCosts:
        """The costs for a context of about `num_slots` tokens."""
        key = (*self.kind, max(MIN_CONTEXT, num_slots).bit_length())
        if key not in self._all:
            self._all[key] = self._live(key) if self._source == "live" else self._fixed(key)
        if self._all[key] is not self._latest:
            self._latest = self._all[key]
            self._latest.begin()
        return self._latest

    def _fixed(self, key: tuple[Any, ...]) -> FixedCosts:
        model = self._model()
        assert model is not None  # the present call holds it
        name = table_name(model, key) if self._source == "measured" and can_store() else None
        return FixedCosts(name, model.device.type, self._batch_size, self._sizes)

    def _live(self, key: tuple[Any, ...]) -> LiveCosts:
        """Those of the nearest length to start with; else of an earlier process, if there are any."""
        known: dict[int, Any] = {
            other[-1]: costs for other, costs in list(self._all.items()) if other[:-1] == self.kind
        }
        if known:
            return LiveCosts(known[min(known, key=lambda bucket: abs(bucket - key[-1]))], self._sizes)
        saved = self._saved.get(_name_of(key), {})
        earlier = LiveCosts.of({int(size): seconds for size, seconds in saved.items()}) if saved else None
        return LiveCosts(earlier, self._sizes)


def saved_costs(model: Any) -> SavedCosts:
    """All live costs of a model, in a JSON-compatible form."""
    live = {_name_of(key): costs for key, costs in list(_costs.of(model).items()) if isinstance(costs, LiveCosts)}
    found = {name: {str(size): seconds for size, seconds in costs.measured.items()} for name, costs in live.items()}
    return {name: seconds for name, seconds in found.items() if seconds}


def _name_of(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))
