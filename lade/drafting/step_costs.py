"""The cost model: cost of a step of q tokens, relative to a plain step.

Costs begin from a table that an earlier process has stored, or from one assumed for the hardware. In float32 and
float64, where a block's size cannot change the text, the times of steps correct them, and a settled table is stored for
later processes. In half precision sizes change the rounding of products, so no clock may change them: costs stay as
they began, and only `lade.warmup` stores what its steps have measured.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_low
from typing import Any

import torch

from lade.common.cache_folder import load_table, store_table
from lade.common.processor import has_fast_products
from lade.common.state import PerModel
from lade.config import LookaheadConfig
from lade.models.base import ModelAdapter

# The sizes to choose from: few, so that each is well measured, and because libraries prepare each for some 0.2 s.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
# Assumed costs by size at batch size 1, measured on two cores: models of 0.5B parameters and more with torch's own
# products and with packed weights, and models of up to SMALL_BYTES, where calls cost as much as products. Which table
# counts depends on what the processor has for the dtype (`has_fast_products`): without it 16 bits are not packed.
FAST_PRODUCTS = {
    ("float32", "own"): {1: 1.0, 2: 1.9, 4: 2.2, 8: 2.4, 16: 2.8, 32: 3.6, 64: 5.4},
    ("float32", "packed"): {1: 1.0, 4: 1.05, 6: 1.1, 8: 1.35, 12: 1.5, 16: 1.85, 32: 2.9, 64: 5.3, 128: 10.0},
    ("float32", "small"): {1: 1.0, 4: 1.35, 8: 1.4, 16: 1.6, 32: 2.0, 64: 2.9, 128: 5.0},
    ("bfloat16", "own"): {1: 1.0, 4: 1.06, 8: 1.15, 16: 1.35, 32: 1.85, 64: 2.9, 128: 4.6},
    ("bfloat16", "packed"): {1: 1.0, 4: 1.0, 8: 1.1, 16: 1.35, 32: 2.05, 64: 3.5, 128: 6.0},
    ("bfloat16", "small"): {1: 1.0, 4: 1.08, 8: 1.19, 16: 1.33, 32: 1.65, 64: 2.15, 128: 3.7},
}
SLOW_PRODUCTS = {
    ("float32", "own"): {1: 1.0, 2: 2.2, 4: 2.7, 8: 5.0, 16: 8.0, 32: 12.0, 64: 20.0},
    ("float32", "packed"): {1: 1.0, 4: 1.15, 8: 1.4, 16: 1.9, 32: 3.2, 64: 6.0, 128: 11.0},
    ("float32", "small"): {1: 1.0, 4: 1.45, 8: 1.6, 16: 2.0, 32: 2.9, 64: 4.8, 128: 9.0},
    ("bfloat16", "own"): {1: 1.0, 2: 1.5, 4: 2.6, 8: 4.6, 16: 8.8, 32: 17.0, 64: 33.0},
    ("bfloat16", "small"): {1: 1.0, 4: 1.55, 8: 2.4, 16: 3.9, 32: 7.0, 64: 13.3},
}
ON_ACCELERATORS = {1: 1.0, 128: 1.25, 512: 2.5}  # steps of so few tokens are bound by reading the weights
SMALL_BYTES = 128 << 20  # of a model's weights
# Names of the settings of mixtures of experts, and the share of a step's time that their weights take.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERT_SHARE = 0.6
PENDING = "pending"  # kind of steps that will soon cost less: nothing is tried out in them
MIN_CONTEXT = 256  # tokens; shorter contexts share one table

RATIOS = 9  # the latest comparisons of a size with smaller ones; its correction is their median
RUN_LENGTH = 4  # the latest steps of one size in a row: their median is compared with the next size's time
SETTLED = 3  # comparisons after which a correction is relied on
PLAIN_EVERY = 64  # steps; a plain step among so many keeps the comparison up to date
# A size never compared may cost less than assumed. It is taken to as long as trials have cost at most this share.
TRIAL_SHARE, HOPED_SHARE = 0.02, 0.6
FIRST_LIMIT, GROWTH = 8, 4  # tokens of the first blocks, and how much larger than the largest compared others may be
MAX_LEAST_PROBABILITY = 0.05  # costs are inexact, and must not keep larger sizes from being measured


@dataclass(frozen=True, slots=True)
class Offers:
    """The block sizes to choose from, rising, and their costs.

    least_probability: a guess with a lower probability of acceptance does not pay in any block.
    """

    sizes: tuple[int, ...]
    costs: list[float]
    least_probability: float


def assumed_costs(model: Any, is_packed: bool, batch_size: int) -> dict[int, float]:
    """The costs by size that are assumed for a model on its device, relative to a step of one token per row."""
    found: Mapping[int, float] = ON_ACCELERATORS
    if model.device.type == "cpu":
        tables = FAST_PRODUCTS if has_fast_products(model.dtype) else SLOW_PRODUCTS
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        dtype = "float32" if model.dtype.itemsize >= 4 else "bfloat16"
        found = tables[dtype, "small" if num_bytes <= SMALL_BYTES else "packed" if is_packed else "own"]
    plain = interpolated(found, batch_size)
    costs = {size: max(1.0, interpolated(found, size * batch_size) / plain) for size in SIZES}
    return {size: max(cost, _expert_cost(model.config, size * batch_size, batch_size)) for size, cost in costs.items()}


def _expert_cost(config: Any, num_tokens: int, batch_size: int) -> float:
    """The least cost in a mixture of experts, where each token may need weights of its own; 0 in other models."""
    settings = vars(config.get_text_config())
    counts = [settings.get(name) for name in NUM_EXPERTS], [settings.get(name) for name in EXPERTS_PER_TOKEN]
    num_experts, per_token = (max((n for n in found if isinstance(n, int)), default=0) for found in counts)
    if not 0 < per_token < num_experts:
        return 0.0
    used, plain = (1 - (1 - per_token / num_experts) ** count for count in (num_tokens, batch_size))
    return 1 + EXPERT_SHARE * (used / plain - 1)


def interpolated(costs: Mapping[int, float], num_tokens: float) -> float:
    """Linear interpolation; beyond the last size on the line through the last two. costs: not empty."""
    sizes = sorted(costs)
    if len(sizes) == 1 or num_tokens <= sizes[0]:
        return costs[sizes[0]]
    place = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    return costs[low] + (num_tokens - low) * (costs[high] - costs[low]) / (high - low)


class CostTable:
    """Costs of one kind of step, begun from `start` and corrected by the times of steps.

    A machine's speed may change by half within seconds, so only adjacent steps are compared: where the size changes
    from one step to the next, the ratio of their times gives the larger size's cost relative to the smaller's.
    """

    def __init__(self, start: Mapping[int, float], is_assumed: bool = False) -> None:
        """start: costs by size, not falling, from 1 for a step without guesses. is_assumed: nothing was measured on
        this machine, so larger blocks are tried one after the other.
        """
        self.start = dict(start)
        self._ratios: dict[int, deque[float]] = {}  # by size: measured costs over those of `start`
        self._run: tuple[int, list[float]] = 0, []  # size and seconds of the latest steps
        self._spent = self._lost = 0.0  # cost of all steps, and what those of sizes never compared have cost beyond 1
        self._since_plain = 0
        self.num_observed = 0
        self.largest = FIRST_LIMIT if is_assumed else max(self.start)  # size to offer
        self._lock = threading.Lock()  # calls in several threads share the table
        self.costs = dict(self.start)  # as corrected by the steps so far; replaced, not mutated

    def assumed(self, num_tokens: int) -> float:
        """The cost as it was at the beginning."""
        return interpolated(self.start, num_tokens)

    def measured(self, num_tokens: int) -> float:
        """The cost as corrected by the steps so far."""
        return interpolated(self.costs, num_tokens)

    @property
    def may_try(self) -> bool:
        """Whether trials of sizes never compared have cost little so far."""
        return self._lost <= TRIAL_SHARE * self._spent

    def is_compared(self, size: int) -> bool:
        """Whether a size, or one close to it, has been compared with smaller ones."""
        return any(other / 2 < size < other * 2 for other, ratios in list(self._ratios.items()) if ratios)

    @property
    def wants_plain_step(self) -> bool:
        """Whether the next step should be a plain one, with which larger ones are compared.

        Depends on the number of steps, not on their times.
        """
        num_compared = max(map(len, list(self._ratios.values())), default=0)
        return self._since_plain >= (1 if num_compared < SETTLED else PLAIN_EVERY)

    @property
    def is_settled(self) -> bool:
        """Whether there is enough to store."""
        return self.num_observed >= PLAIN_EVERY and any(len(ratios) >= SETTLED for ratios in self._ratios.values())

    def begin(self) -> None:
        """The next step does not directly follow the last one, so their times must not be compared."""
        self._run = 0, []

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step of q tokens. Times of 0 or less, of a clock that was set back, are ignored."""
        with self._lock:
            self._since_plain = 0 if num_tokens <= min(self.start) else self._since_plain + 1
            if seconds <= 0:
                self._run = 0, []
                return
            self.num_observed += 1
            other, run = self._run
            if num_tokens == other:
                self._run = num_tokens, [*run[1 - RUN_LENGTH :], seconds]
                return
            self._run = num_tokens, [seconds]
            self._spent += self.measured(num_tokens)
            if not run:
                return
            smaller, larger = sorted((num_tokens, other))
            # Of steps in a row the lower median: disturbances only make a step longer.
            growth = seconds / median_low(run) if larger == num_tokens else median_low(run) / seconds
            if not self.is_compared(larger):
                self._lost += max(0.0, growth * self.measured(smaller) - 1)
            cost = max(1.0, self.measured(smaller) * growth)
            self.largest = max(self.largest, GROWTH * larger)
            self._ratios.setdefault(larger, deque(maxlen=RATIOS)).append(cost / self.assumed(larger))
            self.costs = self._corrected()

    def _corrected(self) -> dict[int, float]:
        """Costs by size: those of `start` times the corrections, which are interpolated between compared sizes."""
        plain, factors = min(self.start), {min(self.start): 1.0}
        for size, ratios in sorted(self._ratios.items(), key=lambda item: -len(item[1])):
            # A single comparison counts beside what those of other sizes lead to expect: it may be a disturbance.
            factors[size] = median_low([_factor(factors, size), *ratios])
        found, least = {}, float("inf")
        for size in sorted(self.start, reverse=True):
            cost = self.start[size] * _factor(factors, size)
            # What was never compared is not dearer than a larger size that was.
            least = min(least, cost) if size in self._ratios else least
            found[size] = cost if size in self._ratios or size == plain else min(cost, least)
        sizes = sorted(found)
        return dict(zip(sizes, accumulate((found[size] for size in sizes), max), strict=True))


def _factor(factors: Mapping[int, float], size: int) -> float:
    """The correction of a size: interpolated, beyond the last one that of the last."""
    return interpolated(factors, min(size, max(factors)))


_tables: PerModel[dict[tuple[Any, ...], CostTable]] = PerModel(dict)


class StepCosts:
    """The costs of one call's steps, of whatever kind and length of context the next step has."""

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
        sizes: tuple[int, ...] = SIZES,
        *,
        follows_clock: bool,
        uses_stored: bool = True,
        may_measure: bool = True,
    ) -> None:
        """sizes: to choose from, rising; a step without guesses costs as much as the first. follows_clock: whether
        times may change the costs, as they may where a block's size cannot change the text. uses_stored: begin from
        stored tables. may_measure: False where other processes' waits distort the times.
        """
        self._all = _tables.of(model)
        self._model = weakref.ref(model)  # drafters may lie in circles, which would keep it
        self._batch_size, self.sizes = batch_size, sizes
        self._follows_clock = follows_clock and may_measure
        self._uses_stored, self._may_measure = uses_stored, may_measure
        self.at((), 0)

    @classmethod
    def of_call(
        cls,
        adapter: ModelAdapter,
        config: LookaheadConfig,
        batch_size: int,
        sizes: tuple[int, ...] | None,
        may_measure: bool = True,
    ) -> StepCosts | None:
        """The costs of a call; None where no size follows costs. sizes: those that blocks are padded to, if any."""
        is_split = (adapter.model.tp_size or 1) > 1  # its processes must lay out the same block
        if not config.adaptive or is_split:
            return None
        is_fixed = config.deterministic or torch.are_deterministic_algorithms_enabled()
        return cls(
            adapter.model,
            batch_size,
            sizes or SIZES,
            follows_clock=adapter.is_exact,
            uses_stored=adapter.is_exact or not is_fixed,
            may_measure=may_measure,
        )

    def at(self, kind: tuple[str, ...], num_slots: int, num_waiting: int = 0) -> None:
        """Take the costs of steps of one kind.

        kind: how blocks run. num_slots: tokens of the context. num_waiting: tokens that run again in front of the next
        block, whatever its size.
        """
        self._num_waiting = num_waiting
        key = (*kind, self._batch_size, max(MIN_CONTEXT, num_slots).bit_length(), self._uses_stored, self.sizes)
        if key not in self._all:
            self._all[key] = self._begun(kind, key)
        self._is_pending = PENDING in kind
        if getattr(self, "_table", None) is not self._all[key]:
            self._table = self._all[key]
            self._table.begin()

    def _begun(self, kind: tuple[str, ...], key: tuple[Any, ...]) -> CostTable:
        """A table of this kind: as stored, else as for the closest length of context, else as assumed."""
        model = self._model()
        stored = load_table(model, _name(key)) if self._uses_stored else None
        if stored is not None:
            return CostTable(stored)
        others = {
            other[-3]: table for other, table in self._all.items() if _without_length(other) == _without_length(key)
        }
        if others and self._follows_clock:
            closest = others[min(others, key=lambda length: abs(length - key[-3]))]
            return CostTable(closest.costs)
        assumed = assumed_costs(model, "packed" in kind, self._batch_size)
        plain = interpolated(assumed, self.sizes[0])
        return CostTable({size: interpolated(assumed, size) / plain for size in self.sizes}, is_assumed=True)

    def cost(self, num_tokens: int) -> float:
        """The cost of a step of q tokens and those that run again, relative to a plain step."""
        num_tokens += self._num_waiting
        return self._table.measured(num_tokens) if self._follows_clock else self._table.assumed(num_tokens)

    @property
    def wants_plain_step(self) -> bool:
        """Whether the next step should have no guesses, for comparison."""
        return self._follows_clock and not self._is_pending and self._table.wants_plain_step

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step of q tokens."""
        if self._may_measure:
            self._table.observe(num_tokens, seconds)

    def offers(self, limit: int) -> Offers:
        """The sizes to choose from, up to `limit`."""
        most = max(self.sizes[0], min(limit, self._table.largest)) if self._follows_clock else limit
        sizes = tuple(size for size in sorted({*self.sizes, limit}) if size <= most)
        costs = [self._hoped(size) for size in sizes]
        plain, first = costs[0], sizes[0]
        slopes = [(cost / plain - 1) / (size - first) for size, cost in zip(sizes[1:], costs[1:], strict=True)]
        slope = min(slopes, default=0.0) / 2  # half, because costs are inexact
        return Offers(sizes, costs, min(MAX_LEAST_PROBABILITY, max(0.0, slope)))

    def _hoped(self, size: int) -> float:
        """The cost of a size, and less for one never compared, as long as such trials have cost little."""
        cost = self.cost(size)
        is_known = size == self.sizes[0] or self._table.is_compared(size)
        if is_known or not self._follows_clock or self._is_pending or not self._table.may_try:
            return cost
        return 1 + HOPED_SHARE * (cost - 1)

    def store(self, is_asked: bool = False) -> None:
        """Store settled tables for later processes. is_asked: also where a block's size can change the text."""
        if not (self._follows_clock or (is_asked and self._may_measure)):
            return
        for key, table in list(self._all.items()):
            if table.is_settled and self._uses_stored:
                store_table(self._model(), _name(key), table.costs, replaces=is_asked)


def _without_length(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[:-3] + key[-2:]


def _name(key: tuple[Any, ...]) -> str:
    *kind, batch_size, length, _, sizes = key
    padded = "" if sizes == SIZES else f" in {len(sizes)} sizes from {sizes[0]}"
    return f"{' '.join(kind) or 'ordinary'}, {batch_size} rows, context below {2**length}{padded}"
