"""Compile and capture ahead of the first call: `lade.warmup(model)`.

Runs a short call of `generate()` with a block of every size that later calls may use, so that these find everything
compiled and captured, and code that lade does not know tried out. Kernels compiled by Triton and Inductor are cached on
disk and serve later processes as well; CUDA graphs serve this process only. What blocks of each size cost is stored for
later ones.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from time import perf_counter
from typing import Any

import torch

from lade.block.token_tree import TokenTree
from lade.common.state import keeping_state
from lade.decoding import FIRST_CAPACITY
from lade.drafting import Draft, Drafter, DraftRequest, Outcome, drafts_from
from lade.drafting.base import ROOT_ALONE
from lade.drafting.step_costs import SIZES
from lade.forward.base import can_capture
from lade.forward.cpu.packed import copies_of
from lade.forward.cuda.proof import is_proven
from lade.models.self_check import checking_at_once
from lade.stats import GenerationStats, last_stats
from lade.switch import current_config, is_enabled, off_reason, switched
from lade.verification.draws import keeping_generators
from lade.verification.sequences import TokenSequences

NEVER_CHOSEN = 2**31 - 1  # an id in no vocabulary
ROUNDS = 4  # steps of each size: in the first two its graph is compared, and the second fastest tells its cost
FEW_TOKENS = 16  # where all steps have one shape, or none is to be measured


@dataclass(frozen=True, slots=True)
class Warmup:
    """The result of a warm-up.

    block_tokens: the sizes of blocks that are captured or compiled. reasons: why something is not, as sentences.
    """

    seconds: float
    block_tokens: tuple[int, ...]
    captured_steps: int
    compiled_steps: int
    used_kernel: bool
    reasons: tuple[str, ...]


def warmup(
    model: Any, prompt_tokens: int = 256, max_new_tokens: int = 1024, batch_size: int = 1, **arguments: Any
) -> Warmup:
    """Compile and capture what calls of about these sizes will use under current settings. lade must be switched on.

    prompt_tokens, max_new_tokens: of a later call, in tokens; they determine the cache's capacity, a power of two,
    which graphs depend on. batch_size: number of prompts. arguments: further arguments of generate(), as in that call.
    Raises ValueError for numbers below 1, and RuntimeError if lade does not run.
    """
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("max_new_tokens", max_new_tokens),
        ("batch_size", batch_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if not is_enabled():
        raise RuntimeError(f"lade does not run: {off_reason()}")
    config, began = current_config(), perf_counter()
    captures = can_capture(model.device)
    is_automatic = config.cuda_graph is None and captures and is_proven(model.device, "graph")
    settings = {"CUDA_GRAPH": 1} if is_automatic else {}  # by default short calls capture nothing
    copies_of(model).is_due = True
    num_slots = prompt_tokens + min(max_new_tokens, FIRST_CAPACITY)
    with switched(True, **settings), checking_at_once(num_slots):
        if config.uses_window:
            stats = _generate(model, num_slots, min(FEW_TOKENS, num_slots - 1), batch_size, arguments)
        else:
            arguments = {"eos_token_id": NEVER_CHOSEN, "pad_token_id": 0} | arguments  # random text may end at once
            made: list[_EverySize] = []
            # Each step commits one token, or two if a guess happens to be right: one round more makes up for these.
            most = 2 * (ROUNDS + 1) * sum(size <= config.max_block for size in SIZES) + 2
            # Without shapes to make, a short call packs and checks, and shows whether any costs are left to measure.
            has_shapes = config.compile or captures
            for num_new in (most,) if has_shapes else (FEW_TOKENS, most):
                slots = num_slots if has_shapes else min(num_slots, prompt_tokens + num_new)
                with drafts_from(lambda request: made.append(_EverySize(request)) or made[-1]):  # type: ignore[func-returns-value]
                    stats = _generate(model, slots, min(num_new, slots - 1), batch_size, arguments)
                if not has_shapes and (made[-1].costs is None or made[-1].costs.are_stored):
                    break
            for drafter in made:
                drafter.store_costs()
    done = stats.captured_steps or stats.compiled_steps
    return Warmup(
        seconds=perf_counter() - began,
        block_tokens=tuple(sorted(set(stats.block_tokens))) if done else (),
        captured_steps=stats.captured_steps,
        compiled_steps=stats.compiled_steps,
        used_kernel=stats.used_kernel,
        reasons=tuple(sorted({reason for way, reason in stats.reasons.items() if way != "packed"})),
    )


def _generate(model: Any, num_slots: int, num_new: int, batch_size: int, arguments: dict[str, Any]) -> GenerationStats:
    """Run a call with as many cache slots as a later call has at first, and few new tokens. Returns its statistics."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = model.get_input_embeddings().weight.shape[0]
    shape = (batch_size, max(1, num_slots - num_new))
    ids = torch.randint(num_tokens, shape, generator=generator, device="cpu").to(model.device)
    before = last_stats()
    with keeping_generators(model), keeping_state(model):  # later calls must not change
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, **arguments)
    stats = last_stats()
    if stats is None or stats is before:
        raise RuntimeError("lade does not run: the patch is not on (lade.augment_all())")
    if stats.fallback_reason is not None:
        raise RuntimeError(f"lade does not run: {stats.fallback_reason}")
    return stats


class _EverySize(Drafter):
    """Proposes a tree of every size in turn with plain steps, and measures them. The guesses are arbitrary."""

    def __init__(self, request: DraftRequest) -> None:
        self.costs, most = request.costs, min(request.config.max_block, request.num_tokens)
        sizes = (request.costs.sizes if request.costs else SIZES)[1:]
        rounds = [size for _ in range(ROUNDS) for chosen in sizes if chosen <= most for size in (chosen, 1)]
        self._sizes = rounds  # to come
        self._cells = request.prompt_ids.new_empty(len(request.prompt_ids), 0)
        self._is_chain, self._began = request.takes_chains, perf_counter()
        self._steps: list[tuple[int, float]] = []  # size and seconds of each

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        """Nodes that are all children of the root, or a chain where no other tree is computed."""
        num_nodes = self._sizes.pop(0) - 1 if self._sizes and max_offset != 0 else 0
        parents, depth = [-1] * num_nodes, min(1, num_nodes)
        if self._is_chain:
            depth = num_nodes = num_nodes if max_offset is None else min(num_nodes, max_offset)
            parents = [*range(-1, num_nodes - 1)]
        tree = TokenTree([[*range(num_nodes)] for _ in is_finished], [[*parents] for _ in is_finished])
        self._began = perf_counter()
        return Draft(tree, depth, ROOT_ALONE, self._cells)

    def learn(self, outcome: Outcome) -> None:
        self._steps.append((1 + outcome.tree.num_nodes, perf_counter() - self._began))

    def store_costs(self) -> None:
        """Keep what the steps have cost. Each is compared with the plain step after it, since a machine's speed may
        change by half within seconds.
        """
        ratios: dict[int, list[float]] = defaultdict(list)
        for (size, seconds), (other, plain) in pairwise(self._steps):
            if size > 1 == other:
                ratios[size].append(seconds / plain)
        found = {size: max(1.0, median_low(costs)) for size, costs in ratios.items() if len(costs) >= ROUNDS}
        if self.costs is not None and found:
            self.costs.store({self.costs.sizes[0]: 1.0} | found)
