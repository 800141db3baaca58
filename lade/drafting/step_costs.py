"""The cost model: cost of a step of q tokens, relative to a plain step.

Costs are what `lade.warmup` has measured on this machine and stored, or what is assumed for the hardware. No call of
generate() changes them, so its steps follow from the call alone and not from a clock.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lade.common.cache_folder import load_table, store_table
from lade.common.processor import FP16, has_fast_mkl, has_fast_products
from lade.common.state import PerModel
from lade.config import LookaheadConfig
from lade.models.base import ModelAdapter

# The sizes to choose from: few, because libraries prepare each for some 0.2 s.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
# Assumed costs by size at batch size 1: models of 0.5B parameters and more with torch's own products and with packed
# weights, and models of up to SMALL_BYTES, where calls cost as much as products. Which table counts depends on what the
# processor has for the dtype (`has_fast_products`). Measured on two cores, "own, fast MKL" on 16; fast FP16 up
# to 16 tokens and fast bfloat16 "packed" up to 32 from whole steps of calls, drafting included, and scaled beyond.
FAST_PRODUCTS = {
    ("float32", "own"): {1: 1.0, 2: 1.9, 4: 2.2, 8: 2.4, 16: 2.8, 32: 3.6, 64: 5.4},
    ("float32", "own, fast MKL"): {1: 1.0, 2: 1.1, 4: 1.5, 8: 1.6, 16: 1.9, 32: 2.75, 64: 4.5},
    ("float32", "packed"): {1: 1.0, 4: 1.05, 6: 1.1, 8: 1.35, 12: 1.5, 16: 1.85, 32: 2.9, 64: 5.3, 128: 10.0},
    ("float32", FP16): {1: 1.0, 4: 1.08, 6: 1.28, 8: 1.55, 12: 2.1, 16: 2.8, 24: 3.9, 32: 5.0, 64: 9.5},
    ("float32", "small"): {1: 1.0, 4: 1.35, 8: 1.4, 16: 1.6, 32: 2.0, 64: 2.9, 128: 5.0},
    ("bfloat16", "own"): {1: 1.0, 4: 1.06, 8: 1.15, 16: 1.35, 32: 1.85, 64: 2.9, 128: 4.6},
    ("bfloat16", "packed"): {1: 1.0, 4: 1.0, 8: 1.22, 16: 1.6, 32: 2.5, 64: 4.4, 128: 8.0},
    ("bfloat16", "small"): {1: 1.0, 4: 1.08, 8: 1.19, 16: 1.33, 32: 1.65, 64: 2.15, 128: 3.7},
}
SLOW_PRODUCTS = {
    ("float32", "own"): {1: 1.0, 2: 2.2, 4: 2.7, 8: 5.0, 16: 8.0, 32: 12.0, 64: 20.0},
    ("float32", "packed"): {1: 1.0, 4: 1.25, 8: 1.4, 16: 1.85, 32: 2.9, 64: 4.6},
    ("float32", FP16): {1: 1.0, 4: 1.06, 6: 1.4, 8: 1.75, 12: 2.3, 16: 3.0, 24: 4.2, 32: 5.4, 64: 10.0},
    ("float32", "small"): {1: 1.0, 4: 1.2, 8: 1.3, 16: 1.6, 32: 2.0, 64: 3.45},
    ("bfloat16", "own"): {1: 1.0, 2: 1.5, 4: 2.6, 8: 4.6, 16: 8.8, 32: 17.0, 64: 33.0},
    ("bfloat16", "small"): {1: 1.0, 4: 1.15, 8: 1.55, 16: 2.4, 32: 4.5, 64: 7.8},
}
ON_ACCELERATORS = {1: 1.0, 128: 1.25, 512: 2.5}  # steps of so few tokens are bound by reading the weights
SMALL_BYTES = 128 << 20  # of a model's weights
# Names of the settings of mixtures of experts, and the share of a step's time that their weights take.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERT_SHARE = 0.6
MOST_PAPER_COST = 1.5  # of a part of the paper's block, in plain steps; a dearer one is left out
MAX_LEAST_PROBABILITY = 0.05  # costs are inexact, and must not keep larger sizes from being taken


@dataclass(frozen=True, slots=True)
class Offers:
    """The block sizes to choose from, rising, and their costs.

    least_probability: a guess with a lower probability of acceptance does not pay in any block.
    """

    sizes: tuple[int, ...]
    costs: list[float]
    least_probability: float


def assumed_costs(model: Any, kind: tuple[str, ...], batch_size: int) -> dict[int, float]:
    """The costs by size that are assumed for a model on its device, relative to a step of one token per row.

    kind: how blocks run.
    """
    found: Mapping[int, float] = ON_ACCELERATORS
    if model.device.type == "cpu":
        is_fp16 = FP16 in kind  # multiplied in float32, whatever the dtype
        is_float32 = model.dtype.itemsize >= 4 or is_fp16
        is_fast = has_fast_products(torch.float32 if is_float32 else model.dtype)
        own = "own, fast MKL" if is_float32 and has_fast_mkl() else "own"
        layout = FP16 if is_fp16 else "packed" if "packed" in kind else own
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        tables, dtype = FAST_PRODUCTS if is_fast else SLOW_PRODUCTS, "float32" if is_float32 else "bfloat16"
        found = tables[dtype, "small" if num_bytes <= SMALL_BYTES else layout]
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


_tables: PerModel[dict[tuple[Any, ...], dict[int, float]]] = PerModel(dict)


class StepCosts:
    """The costs of one call's steps, of whatever kind the next step is."""

    def __init__(
        self, model: Any, batch_size: int = 1, sizes: tuple[int, ...] = SIZES, *, uses_stored: bool = True
    ) -> None:
        """sizes: to choose from, rising; a step without guesses costs as much as the first. uses_stored: take stored
        tables, where there are some.
        """
        self._all = _tables.of(model)
        self._model = weakref.ref(model)  # drafters may lie in circles, which would keep it
        self._batch_size, self.sizes, self._uses_stored = batch_size, sizes, uses_stored
        self.at(())

    @classmethod
    def of_call(
        cls, adapter: ModelAdapter, config: LookaheadConfig, batch_size: int, sizes: tuple[int, ...] | None
    ) -> StepCosts | None:
        """The costs of a call; None where no size follows costs. sizes: those that blocks are padded to, if any."""
        is_split = (adapter.model.tp_size or 1) > 1  # its processes must lay out the same block
        if not config.adaptive or is_split:
            return None
        is_fixed = config.deterministic or torch.are_deterministic_algorithms_enabled()
        return cls(adapter.model, batch_size, sizes or SIZES, uses_stored=adapter.is_exact or not is_fixed)

    def at(self, kind: tuple[str, ...], num_waiting: int = 0) -> None:
        """Take the costs of steps of one kind.

        kind: how blocks run. num_waiting: tokens that run again in front of the next block, whatever its size.
        """
        self._kind, self._num_waiting = kind, num_waiting
        key = (kind, self._batch_size, self.sizes, self._uses_stored)
        if key not in self._all:
            stored = load_table(self._model(), self._name) if self._uses_stored else None
            self._all[key] = self._assumed() if stored is None else stored
        self._table = self._all[key]

    @property
    def are_stored(self) -> bool:
        """Whether a table of this kind is stored for this machine."""
        return load_table(self._model(), self._name) is not None

    def _assumed(self) -> dict[int, float]:
        costs = assumed_costs(self._model(), self._kind, self._batch_size)
        plain = interpolated(costs, self.sizes[0])
        return {size: interpolated(costs, size) / plain for size in self.sizes}

    def cost(self, num_tokens: int) -> float:
        """The cost of a step of q tokens and those that run again, relative to a plain step."""
        return interpolated(self._table, num_tokens + self._num_waiting)

    def offers(self, limit: int) -> Offers:
        """The sizes to choose from, up to `limit`."""
        sizes = tuple(sorted({*(size for size in self.sizes if size <= limit), max(limit, self.sizes[0])}))
        costs = [self.cost(size) for size in sizes]
        plain, first = costs[0], sizes[0]
        slopes = [(cost / plain - 1) / (size - first) for size, cost in zip(sizes[1:], costs[1:], strict=True)]
        slope = min(slopes, default=0.0) / 2  # half, because costs are inexact
        return Offers(sizes, costs, min(MAX_LEAST_PROBABILITY, max(0.0, slope)))

    def store(self, measured: Mapping[int, float]) -> None:
        """Store a table for steps of this kind, unless one is stored already: in half precision another one could
        change the text of a call from run to run.

        measured: costs by size, relative to a step of the first size; made not to fall with the size.
        """
        sizes = sorted(measured)
        costs = dict(zip(sizes, accumulate((measured[size] for size in sizes), max), strict=True))
        store_table(self._model(), self._name, costs)
        self._all.clear()  # read again by the next call

    @property
    def _name(self) -> str:
        padded = "" if self.sizes == SIZES else f" in {len(self.sizes)} sizes from {self.sizes[0]}"
        return f"{' '.join(self._kind) or 'ordinary'}, {self._batch_size} rows{padded}"
