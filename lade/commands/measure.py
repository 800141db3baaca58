"""Times `generate()`: several methods take turns on the same prompts, in one process, after a warm-up.

`lade bench` and the benchmarks share it. Imports torch and transformers only when something is timed.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lade

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Inputs = dict[str, "Tensor"]  # one prompt: ids and mask, [1, P]
# The same prompts come repeatedly: no run may learn from another.
NOT_SHARED = {"SHARE": 0}
MEMORY_NOTE = "each call of lade begins with an empty memory (SHARE=0); by default later calls profit from earlier ones"
MAX_WARM_UPS = 8
ENOUGH_STEPS = 256  # of a warm-up: costs have then been compared, or timed by schedule and stored


@dataclass(frozen=True)
class Method:
    """A way to decode. settings: keywords of `config_lade` on top of the current ones; None runs without lookahead."""

    arguments: dict[str, Any] = field(default_factory=dict)  # of generate()
    settings: dict[str, Any] | None = None


@dataclass
class Run:
    """One method over all prompts, once; one entry per prompt in each list."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # of lade only
    block_tokens: int = 0  # over all prompts

    def speed(self, chosen: list[int] | None = None) -> float:
        """Tokens per second over all prompts, or over the chosen ones."""
        chosen = list(range(len(self.outputs))) if chosen is None else chosen
        return sum(len(self.outputs[i]) for i in chosen) / sum(self.seconds[i] for i in chosen)

    def tokens_per_step(self, chosen: list[int] | None = None) -> float | None:
        chosen = list(range(len(self.outputs))) if chosen is None else chosen
        if not self.steps:
            return None
        return round(sum(len(self.outputs[i]) for i in chosen) / sum(self.steps[i] for i in chosen), 4)


def generate_timed(model: Any, inputs: Inputs, seed: int = 0, **arguments: Any) -> tuple[list[int], float]:
    """New token ids of one prompt, and seconds. arguments: of generate()."""
    import torch

    torch.manual_seed(seed)
    synchronize(model.device)
    started = time.perf_counter()
    output = model.generate(**inputs, **arguments)
    synchronize(model.device)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started


def run_once(model: Any, inputs: Inputs, method: Method, run: Run, common: dict[str, Any]) -> None:
    """Run one prompt through one method and record it in `run`. Raises RuntimeError when lookahead did not run."""
    is_ahead = method.settings is not None
    with lade.enabled(is_ahead, **(method.settings or {}) | NOT_SHARED):
        tokens, seconds = generate_timed(model, inputs, **common, **method.arguments)
    run.seconds.append(seconds)
    run.outputs.append(tokens)
    if is_ahead:
        stats = lade.last_stats()
        if stats is None or stats.fallback_reason is not None:
            raise RuntimeError(f"lookahead did not run: {stats and stats.fallback_reason}")
        run.steps.append(stats.steps)
        run.block_tokens += sum(stats.block_tokens)


def run_methods(
    model: Any,
    prompts: list[Inputs],
    methods: dict[str, Method],
    trials: int,
    common: dict[str, Any],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    runs: dict[str, list[Run]] | None = None,
) -> dict[str, list[Run]]:
    """Each trial takes every prompt through every method in turn, so that each is compared with its neighbours in time.

    The order rotates from prompt to prompt, since a method's place in it affects its time.

    common: arguments of `generate_timed` for all methods. progress: wraps the list of (trial, prompt), for a progress
    bar. runs: an empty dictionary to fill, which holds the runs made so far after an interrupt. Returns `trials` runs
    of each method.
    """
    for method in methods.values():
        for inputs in for_warm_up(prompts):
            run_once(model, inputs, method, Run(), common)
    runs = {} if runs is None else runs
    runs |= {name: [Run() for _ in range(trials)] for name in methods}
    order = deque(methods)
    for trial, inputs in progress([(trial, inputs) for trial in range(trials) for inputs in prompts]):
        for name in order:
            run_once(model, inputs, methods[name], runs[name][trial], common)
        order.rotate(-1)
    return runs


def settle(model: Any, inputs: Inputs, method: Method, common: dict[str, Any], num_steps: int = ENOUGH_STEPS) -> None:
    """Run one prompt until weights are packed and graphs captured, as in a process that has run for a while."""
    run = Run()
    while len(run.steps) < MAX_WARM_UPS and sum(run.steps) < num_steps:
        run_once(model, inputs, method, run, common)


def for_warm_up(prompts: list[Inputs]) -> list[Inputs]:
    """The longest prompt, which makes a static cache as large as it will get, and two more."""
    longest = max(prompts, key=lambda inputs: inputs["input_ids"].shape[1])
    return [longest, *prompts[:2]]


def compare(runs: list[Run], plain: list[Run], chosen: list[int] | None = None) -> dict[str, Any]:
    """A method's figures relative to plain generate()'s in the same trials. chosen: indices of the prompts."""
    ratios = [run.speed(chosen) / base.speed(chosen) for run, base in zip(runs, plain, strict=True)]
    return {
        "tokens_per_second": spread([run.speed(chosen) for run in runs]),
        "ratio_to_plain": spread(ratios),
        "tokens_per_step": runs[0].tokens_per_step(chosen),
    }


def share_identical(run: Run, plain: Run) -> float:
    """The share of prompts for which both gave the same tokens."""
    return sum(a == b for a, b in zip(run.outputs, plain.outputs, strict=True)) / len(plain.outputs)


def spread(values: list[float]) -> dict[str, float]:
    """Median with the 20th and 80th percentile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {"median": round(statistics.median(ordered), 4), "p20": round(at(0.2), 4), "p80": round(at(0.8), 4)}


def is_looping(tokens: list[int], last: int = 64, share: float = 0.3) -> bool:
    """True if more than 30 % of the last 64 tokens are one repeated n-gram of at least three tokens."""
    tail = tokens[-last:]
    for size in range(3, len(tail) // 2 + 1):
        ngrams = Counter(tuple(tail[i : i + size]) for i in range(len(tail) - size + 1))
        ngram, _ = ngrams.most_common(1)[0]
        count, i = 0, 0
        while i + size <= len(tail):  # occurrences that do not overlap
            found = tuple(tail[i : i + size]) == ngram
            count += found
            i += size if found else 1
        if count > 1 and count * size > share * len(tail):
            return True
    return False


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(model: Any) -> dict[str, Any]:
    """Hardware, versions and model size, for a record of figures."""
    return machine(model.device, model.dtype) | {"parameters": sum(p.numel() for p in model.parameters())}


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Hardware and versions, for a record of figures."""
    import torch
    import transformers

    from lade.common.cache_folder import cpu_name

    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"{cpu_name()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lade": lade.__version__,
    }
