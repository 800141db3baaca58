"""What a step costs by the size of its block, beside what a plain step costs.

Two models of it. Where no choice of size can change a text (float32, float64), `LiveCosts` follow the machine as it is now. In half
precision the size of a block changes how its products are rounded, so a size that follows the clock would give another text in
every run: there `FixedCosts` are a table that is settled once per machine, model shape and dtype, and kept for later processes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from math import sqrt
from typing import Any

from lade.block_size.tables import (
    Calibration,
    can_store,
    default_costs,
    interpolated,
    load,
    rising,
    store,
    table_name,
)
from lade.state import PerModel

# Sizes that are chosen from: few, so that each is well measured and kernels see few shapes.
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
OBSERVATIONS = 9  # the latest of a size; their median is its cost
RUN_LENGTH = 4  # the latest steps of one size in a row, whose median another one is compared with
ASSUMED_SLOPE = 0.004  # of a step per token, where nothing was measured: low, so that larger blocks are tried
# What trying new sizes may cost: as much as some plain steps, and this share of all time. Beyond that, larger blocks are assumed to
# cost what the line through the last two says.
FREE_TRIALS, TRIAL_SHARE = 4.0, 0.02
MAX_LEAST_CHANCE = 0.05  # a cost that is wrong must not keep the sizes from being tried that would put it right
# Steps after which another size may be measured again: the next larger, the next smaller, 1, in turn.
EXPLORE_EVERY = 16
# A change that needs no new comparison, and observations after which there is one anyway.
SAME_COST, RENEW_EVERY = 0.01, 8
STALE_AFTER = 48  # steps without a measurement after which a cost is worth a look
MIN_CONTEXT = 256  # tokens; shorter texts cost the same


@dataclass(frozen=True, slots=True)
class Offers:
    """Sizes that may be chosen, from small to large, and what they cost."""

    sizes: tuple[int, ...]
    costs: list[float]
    least_chance: float  # a guess that is accepted more rarely is not worth its place in any block


class StepCosts:
    """What a step of q tokens costs. The unit is each object's own: only ratios have a meaning."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        """sizes: that are chosen from, rising; a step without guesses costs as much as the first."""
        self.sizes = sizes
        self._offers: dict[int, Offers] = {}  # by limit; made anew where costs have changed

    def cost(self, num_tokens: int) -> float:
        raise NotImplementedError

    @property
    def largest_size(self) -> int:
        """The largest size that may be chosen, whatever the limit."""
        raise NotImplementedError

    @property
    def largest_known(self) -> int:
        """The largest size that was measured."""
        raise NotImplementedError

    @property
    def plain_cost(self) -> float:
        """Of a step without guesses."""
        return self.cost(self.sizes[0])

    def search_cost(self, seconds: float) -> float:
        """What a search for guesses that took so long has cost, in plain steps, at most 1."""
        raise NotImplementedError

    def observe(self, num_tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        """A step of q tokens took so long, and the search for its guesses before it."""

    def begin(self) -> None:
        """The next step does not follow the last one: other things have been done in between."""

    def scheduled_size(self, num_rows: int, limit: int) -> int | None:
        """The size that the next step is to have so that it is measured; None where the policy is free."""
        return None

    @property
    def is_scheduled(self) -> bool:
        """Whether sizes follow a schedule at present, and say nothing about what pays."""
        return False

    def explored_place(self, sizes: list[int], best: int) -> int:
        """The place in `sizes` to choose, where `best` is the one that pays most."""
        return best

    @property
    def may_explore_next(self) -> bool:
        """Whether the next choice may be a size larger than the best."""
        return False

    def offers(self, limit: int) -> Offers:
        """What may be chosen: sizes up to the largest that is allowed and known well enough."""
        known = self._offers
        found = known.get(limit)
        if found is None:
            reach = self.largest_size
            sizes = [size for size in self.sizes if size < min(limit, reach + 1)] + ([limit] if limit <= reach else [])
            costs = [self.cost(size) for size in sizes]
            found = known[limit] = Offers(tuple(sizes), costs, self._least_chance())
        return found

    def _least_chance(self) -> float:
        first, *others = self.sizes
        plain, largest = self.plain_cost, max([*others[:1], self.largest_known])
        slopes = [(self.cost(size) / plain - 1) / (size - first) for size in others if size <= largest]
        slope = min(slopes, default=0.0)
        return min(MAX_LEAST_CHANCE, max(0.0, slope / 2))  # half: measured lines are not exact


class FixedCosts(StepCosts):
    """A table that no clock changes while it is used: stored by an earlier process, or assumed for the kind of device.

    Where neither exists and a table can be stored, the first steps follow a schedule of sizes, in which each is timed beside plain
    steps. The schedule does not depend on the times, so a text is the same in every run until the table is there, and again from then on.
    """

    def __init__(self, name: str | None, device_type: str, batch_size: int, sizes: tuple[int, ...] = SIZES) -> None:
        """name: under which the table is stored; None to use the assumed one and measure nothing. sizes: as for `StepCosts`."""
        super().__init__(sizes)
        self._name, self._batch_size = name, batch_size
        self._lock = threading.Lock()
        found = None if name is None else load(name)
        self._assumed = default_costs(device_type, batch_size, SIZES)
        self._table = found or self._assumed
        self._calibration = Calibration(batch_size, sizes[0]) if found is None and name is not None else None

    def cost(self, num_tokens: int) -> float:
        costs, assumed = self._table.costs, self._assumed.costs
        found, largest = interpolated(costs, num_tokens), max(costs)
        if num_tokens <= largest:
            return found
        # Beyond what was measured at least what is assumed, in proportion.
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
            stored = None if found is None else store(self._name, found)  # None leaves what is assumed
            if stored is not None:
                self._table = stored
                self._offers = {}  # another thread may still write to the old one
            self._calibration = None

    def begin(self) -> None:
        with self._lock:
            if self._calibration is not None:
                self._calibration.begin()

    def scheduled_size(self, num_rows: int, limit: int) -> int | None:
        calibration = self._calibration
        return None if calibration is None else calibration.next_size(limit)

    @property
    def is_scheduled(self) -> bool:
        return self._calibration is not None


class LiveCosts(StepCosts):
    """Measured while decoding; on lines between what was measured, or a guess beyond.

    A machine's speed may change by half within seconds, so no times are compared that were not taken next to each other: where a
    step's size differs from the last one's, the two tell what the larger costs in terms of the smaller. A larger block never
    costs less than a smaller one; where it seems to, both have what they cost on average.
    """

    def __init__(self, similar: LiveCosts | None = None, sizes: tuple[int, ...] = SIZES) -> None:
        """similar: the costs of a shorter or longer text, which stand in for what was not measured here. sizes: as for `StepCosts`."""
        super().__init__(sizes)
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
        self._num_observed = 0  # since the offers were made

    def observe(self, num_tokens: int, seconds: float, search_seconds: float = 0.0) -> None:
        """The first step of a size also pays for setting kernels up and does not count.

        Nor does one that took no time: the clock stood still or was set back, as tests of programs around lade make it do.
        """
        if seconds <= 0:
            return
        size = num_tokens
        if size not in self.sizes:
            size = min(self.sizes, key=lambda size: abs(size - num_tokens))
            seconds *= self.cost(size) / self.cost(num_tokens)
        paid = seconds / self._pace
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
                    growth = seconds / _median(run) if changed == size else _median(run) / seconds
                    self._compare(changed, self._measured[min(size, other)] * growth, is_same_step=len(run) == 1)
                # What has not been compared is what others are compared with.
                weights = {size: len(self._seen.get(size, ())) or OBSERVATIONS for size in self._measured}
                self._costs = rising(self._measured, weights)
                self._run = size, [seconds]
            self._pace = _median(self._run[1]) / self._costs[size]
            self._num_observed += 1
            cost = before.get(changed)
            has_changed = cost is None or abs(self._costs[changed] - cost) > SAME_COST * cost
            if has_changed or self._num_observed == RENEW_EVERY:
                self._offers, self._num_observed = {}, 0

    def begin(self) -> None:
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

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step of q tokens, the machine being as fast as in the latest steps; of no meaning before them."""
        return self._pace * self.cost(num_tokens)

    def search_cost(self, seconds: float) -> float:
        return min(1.0, seconds / self.seconds(self.sizes[0]))  # an interruption says nothing about the search

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
        if num_tokens < sizes[0] or len(sizes) == 1 or self._may_try:
            return assumed
        return max(assumed, interpolated(measured, num_tokens))

    @property
    def _may_try(self) -> bool:
        """Whether trying sizes that nobody has measured has cost little so far."""
        return self._lost <= FREE_TRIALS * self._costs.get(self.sizes[0], 0.0) + TRIAL_SHARE * self._spent

    @classmethod
    def of(cls, seconds: dict[int, float]) -> LiveCosts:
        """What was measured earlier, as `measured` told it."""
        costs = cls()
        costs._measured, costs._costs = dict(seconds), dict(seconds)
        return costs

    @property
    def measured(self) -> dict[int, float]:
        """Seconds by size, of the sizes that were measured."""
        pace = self._pace
        return {size: pace * cost for size, cost in self._costs.items()}

    @property
    def largest_known(self) -> int:
        inherited = 0 if self._similar is None else self._similar.largest_known
        return max(inherited, max(self._costs, default=0))

    @property
    def largest_size(self) -> int:
        return max(self.sizes[0], 2 * self.largest_known)  # so that what is tried grows step by step

    def explored_place(self, sizes: list[int], best: int) -> int:
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


def _median(seconds: list[float]) -> float:
    """The lower one of two in the middle: what disturbs a step only ever makes it longer."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


SavedCosts = dict[str, dict[str, float]]  # what else a cost depends on -> size -> seconds

_costs: PerModel[dict[tuple[Any, ...], StepCosts]] = PerModel(dict)


class StepCostsByLength:
    """The step costs of one model for a batch size, by the length of the text."""

    def __init__(
        self,
        model: Any,
        kind: tuple[Any, ...],
        saved: SavedCosts | None = None,
        fixed_for: int | None = None,
        may_measure: bool = True,
        limit: int = 64,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        """kind: whatever else changes what a step costs, such as dtype, device and batch size.

        saved: `saved_costs` of an earlier process, for live costs to begin with. fixed_for: a batch size where no clock may change a
        choice, None for live costs. may_measure: whether fixed costs may be a table that was measured on this machine. limit: the
        largest block, up to which such a table is measured. sizes: of blocks, where they are padded to a few.
        """
        self._model, self._saved = weakref.ref(model), saved or {}
        # Live and fixed costs of one kind lie side by side: what is exact may change between calls.
        way = "measured" if may_measure else "assumed"
        self.kind = kind if fixed_for is None else (*kind, way, limit)
        self._all = _costs.of(model)
        self._fixed_for, self._may_measure, self._sizes = fixed_for, may_measure, sizes or SIZES
        self._latest: StepCosts | None = None

    def at(self, num_slots: int) -> StepCosts:
        """The costs for texts of about this many tokens."""
        key = (*self.kind, max(MIN_CONTEXT, num_slots).bit_length())
        if key not in self._all:
            self._all[key] = self._live(key) if self._fixed_for is None else self._fixed(key, self._fixed_for)
        if self._all[key] is not self._latest:
            self._latest = self._all[key]
            self._latest.begin()
        return self._latest

    def _fixed(self, key: tuple[Any, ...], batch_size: int) -> FixedCosts:
        model = self._model()
        assert model is not None  # the call that asks holds it
        name = table_name(model, key) if self._may_measure and can_store() else None
        return FixedCosts(name, model.device.type, batch_size, self._sizes)

    def _live(self, key: tuple[Any, ...]) -> LiveCosts:
        bucket = key[-1]
        known = [other[-1] for other in list(self._all) if other[:-1] == self.kind]
        nearest = min(known, key=lambda other: abs(other - bucket), default=None)
        if nearest is not None:
            similar = self._all[(*self.kind, nearest)]
            assert isinstance(similar, LiveCosts)
            return LiveCosts(similar, self._sizes)
        saved = self._saved.get(_name_of(key))
        earlier = LiveCosts.of({int(size): seconds for size, seconds in saved.items()}) if saved else None
        return LiveCosts(earlier, self._sizes)


def saved_costs(model: Any) -> SavedCosts:
    """All live costs of a model, in a form for JSON."""
    found = {key: costs.measured for key, costs in list(_costs.of(model).items()) if isinstance(costs, LiveCosts)}
    return {
        _name_of(key): {str(size): cost for size, cost in seconds.items()} for key, seconds in found.items() if seconds
    }


def _name_of(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))
