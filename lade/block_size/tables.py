"""Stored step cost tables: one per machine, model shape and dtype, in the user's cache folder.

In half precision block sizes must not follow a clock, or runs would differ. So costs are measured once, rounded to a
coarse grid and stored. The first process to store a table decides for all later ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch

logger = logging.getLogger("lade")

FORMAT = 1  # of a stored table
GRID = 1.05  # costs are rounded to powers of it
# Default costs relative to a plain step at batch size 1. On CPUs measured in the decoding loop, bfloat16 on two cores,
# with and without AVX-512. On accelerators assumed: steps of so few tokens are bound by reading the weights.
ASSUMED_WITH_AVX512 = {1: 1.0, 4: 1.08, 8: 1.19, 16: 1.33, 32: 1.65, 64: 2.15, 128: 3.7}
ASSUMED_ON_CPU = {1: 1.0, 4: 1.55, 8: 2.4, 16: 3.9, 32: 7.0, 64: 13.3}
ASSUMED_ELSEWHERE = {1: 1.0, 128: 1.25, 512: 2.5}
ASSUMED_SEARCH = 0.05  # cost of a search for guesses, in plain steps
# Sizes of one round of steps: each is next to a plain step, the last next to the first of the next round.
ROUND = (1, 8, 32, 1, 16, 4, 1, 64)
NUM_ROUNDS = 6
# Of a scheduled step: its tokens over all rows, and its assumed cost. Up to four tokens per row are always allowed.
MAX_BATCH_TOKENS, MAX_ASSUMED_COST = 128, 3.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """costs: by size, relative to a plain step; never falling. search: cost of a search for guesses, in plain steps."""

    costs: dict[int, float]
    search: float


class Calibration:
    """Times steps of scheduled sizes relative to the nearest plain step. The schedule does not depend on the times."""

    def __init__(self, batch_size: int, plain_size: int = 1, largest: int = max(ROUND)) -> None:
        """plain_size: of a step without guesses, more than 1 where blocks are padded. largest: size to time."""
        most = max(4, min(largest, MAX_BATCH_TOKENS // batch_size))
        self._sizes, self._plain_size = [size for size in ROUND if size <= most], plain_size
        self._num_steps = 0
        self._runs: list[list[tuple[int, float]]] = [[]]  # (size, seconds) of steps in a row
        self._seen: set[int] = set()
        self._searches: list[float] = []  # seconds

    def next_size(self, limit: int) -> int:
        """limit: the largest block allowed."""
        sizes = [size for size in self._sizes if size <= limit] if limit >= 4 else [1, limit]
        return max(sizes[self._num_steps % len(sizes)], self._plain_size)

    def add(self, num_tokens: int, seconds: float, search_seconds: float) -> bool:
        """Record a step. Returns whether it was the last one of the schedule."""
        self._num_steps += 1
        if num_tokens in self._seen:
            self._runs[-1].append((num_tokens, seconds))
        else:  # the first step of a size also pays for setting kernels up
            self._seen.add(num_tokens)
            self.begin()
        if num_tokens > self._plain_size:
            self._searches.append(search_seconds)
        return self._num_steps == NUM_ROUNDS * len(self._sizes)

    def begin(self) -> None:
        """The next step does not directly follow the last one."""
        self._runs.append([])

    def table(self) -> CostTable | None:
        """The measured table; None if there are too few measurements."""
        plain_size = self._plain_size
        ratios: dict[int, list[float]] = {1: [1.0], plain_size: [1.0]}
        num_given = len(ratios)
        plain: list[float] = []
        for run in self._runs:
            places = [place for place, (size, seconds) in enumerate(run) if size == plain_size and seconds > 0]
            plain += [run[place][1] for place in places]
            for place, (size, seconds) in enumerate(run):
                if size > plain_size and places and seconds > 0:
                    nearest = min(places, key=lambda other: abs(other - place))
                    ratios.setdefault(size, []).append(seconds / run[nearest][1])
        if len(ratios) == num_given:
            return None
        weights = {size: NUM_ROUNDS if size <= plain_size else len(found) for size, found in ratios.items()}
        costs = isotonic({size: median(found) for size, found in ratios.items()}, weights)
        search = median(self._searches) / median(plain)
        return CostTable({size: rounded(cost / costs[1]) for size, cost in costs.items()}, min(1.0, rounded(search)))


def rounded(value: float) -> float:
    """Round to the grid; 0 stays 0."""
    return exp(round(log(value) / log(GRID)) * log(GRID)) if value > 0 else 0.0


def default_costs(device_type: str, batch_size: int, sizes: Sequence[int]) -> CostTable:
    """The default table of a device type, if nothing was measured."""
    assumed = ASSUMED_ELSEWHERE
    if device_type == "cpu":
        has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        assumed = ASSUMED_WITH_AVX512 if has_avx512 else ASSUMED_ON_CPU
    plain = interpolated(assumed, batch_size)
    return CostTable({size: interpolated(assumed, size * batch_size) / plain for size in sizes}, ASSUMED_SEARCH)


def interpolated(costs: Mapping[int, float], num_tokens: int) -> float:
    """Linear interpolation; beyond the last size on the line through the last two. costs: not empty."""
    if num_tokens in costs:
        return costs[num_tokens]
    sizes = sorted(costs)
    if len(sizes) == 1 or num_tokens < sizes[0]:
        return costs[sizes[0]]
    place = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    return costs[low] + (num_tokens - low) * (costs[high] - costs[low]) / (high - low)


def isotonic(costs: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, float]:
    """Isotonic regression: costs that never fall with the size. Adjacent violators get their weighted mean."""
    groups: list[tuple[float, float, list[int]]] = []  # cost, weight, sizes
    for size in sorted(costs):
        cost, weight, sizes = costs[size], weights[size], [size]
        while groups and groups[-1][0] >= cost:
            other, other_weight, others = groups.pop()
            cost = (other * other_weight + cost * weight) / (other_weight + weight)
            weight, sizes = other_weight + weight, others + sizes
        groups.append((cost, weight, sizes))
    return {size: cost for cost, _, sizes in groups for size in sizes}


def folder() -> Path | None:
    """LADE_CACHE, by default `lade` in the user's cache folder.

    None (store nothing) if LADE_CACHE is 0 or empty, or if there is no home directory.
    """
    chosen = os.environ.get("LADE_CACHE")
    if chosen is not None:
        return None if chosen.strip() in ("", "0") else Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lade"
    except RuntimeError:  # no home directory
        return None


def can_store() -> bool:
    """Whether a table stored now will be found by the next process."""
    path = folder()
    if path is None:
        return False
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def load(name: str) -> CostTable | None:
    """The stored table of this name; None if there is none that can be read."""
    path = _path_of(name)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["name"] != name:
            raise ValueError(f"its format is {content['format']!r}")
        costs = {int(size): float(cost) for size, cost in content["costs"].items()}
        search = float(content["search"])
        ordered = [costs[size] for size in sorted(costs)]
        if len(costs) < 2 or min(costs) != 1 or not all(0 < a <= b < 1e6 for a, b in pairwise(ordered)):
            raise ValueError("its costs are not those of rising sizes from 1")
        if not 0 <= search <= 1:
            raise ValueError("its cost of a search is not a share of a step")
    except OSError:  # missing, or not readable
        return None
    except Exception as error:  # whatever a damaged file may lead to
        logger.warning("lade: the step costs in %s cannot be used and are measured again: %s", path, error)
        return None
    return CostTable(costs, search)


def store(name: str, table: CostTable) -> CostTable | None:
    """Write a table, unless another process was faster.

    Returns the table that later processes will find; None if there is none.
    """
    path = _path_of(name)
    if path is None:
        return None
    content = {"format": FORMAT, "name": name, "costs": table.costs, "search": table.search}
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            temporary.chmod(0o644)  # other users of a shared folder read it as well
            os.link(temporary, path)  # atomic; fails if the file exists
        except FileExistsError:
            found = load(name)
            if found is None and os.access(path, os.R_OK):
                os.replace(temporary, path)  # the file there is damaged
            else:
                return found
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:  # a full disk, a deleted folder, a file system without links
        return None
    return table


def stored() -> list[Path]:
    """The files of all stored tables."""
    path = folder()
    return [] if path is None else sorted(path.glob("step-costs-*.json"))


def _path_of(name: str) -> Path | None:
    path = folder()
    return None if path is None else path / f"step-costs-{FORMAT}-{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def table_name(model: Any, kind: tuple[Any, ...]) -> str:
    """Identifies a table: the machine, the model's shape, and `kind`, whatever else changes a step's cost."""
    sizes = sum(parameter.numel() for parameter in model.parameters())
    device = model.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"
    return f"{machine}; torch {torch.__version__}; {type(model).__name__} of {sizes} parameters; " + " ".join(
        map(str, kind)
    )


def cpu_name() -> str:
    """The CPU's name from /proc/cpuinfo, else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
