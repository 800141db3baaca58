"""The cost of a forward pass over a block of tokens relative to one over a single token, on this device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache, cache_arguments
from lade.block.mask import Block
from lade.commands.measure import synchronize
from lade.config import current_config
from lade.forward.choice import choose_packing
from lade.forward.packed import TOKENS_BEFORE_PACKING
from lade.forward.runner import BlockRunner
from lade.models.base import ModelAdapter
from lade.stats import GenerationStats

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP = 2  # rounds that do not count


@torch.no_grad()
def step_costs(
    adapter: ModelAdapter,
    sizes: Sequence[int] = BLOCK_SIZES,
    context: int = 256,
    trials: int = 11,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> dict[int, float]:
    """Median seconds of one forward pass, batch size 1, for each block size q in `sizes`, after `context` committed
    tokens.

    The sizes take turns, so that other load on the machine affects all alike. Each block runs as in the loop, with the
    logits of all rows, packed where the settings allow. One token is the exception: it is what plain
    generate() steps over, on the model as it is. progress: wraps the rounds, for a progress bar. Sizes beyond the
    model's last position are left out. Raises ValueError when lookahead cannot run on the model.
    """
    reason = adapter.unsupported_reason()
    if reason is not None:
        raise ValueError(f"model must be one that lookahead can run on: {reason}")
    for name, value in (("context", context), ("trials", trials)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value!r}")
    reach = adapter.max_guess_offset(context)
    sizes = [size for size in sizes if reach is None or size <= reach + 1]
    cache = filled_cache(adapter, context, max(sizes))
    blocks = {size: causal_block(adapter, cache, size) for size in sizes}
    runner = BlockRunner(adapter)
    runner.use_grouped_attention()
    choose_packing(runner, current_config(), GenerationStats(), TOKENS_BEFORE_PACKING)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in progress(range(WARM_UP + trials)):
        for size, block in blocks.items():
            seconds[size].append(_timed(adapter.forward_block if size == 1 else runner.forward, block, cache))
    return {size: statistics.median(times[WARM_UP:]) for size, times in seconds.items()}


def filled_cache(adapter: ModelAdapter, context: int, room: int) -> LookaheadCache:
    """A cache that holds a text of `context` random tokens, and has slots for a block of `room` after it."""
    numbers = torch.Generator().manual_seed(0)
    text = torch.randint(adapter.num_tokens, (1, context), generator=numbers).to(_device(adapter))
    cache = adapter.make_cache(context + room)
    arguments = {"position_ids": torch.arange(context, device=text.device)[None]} if adapter.takes_positions else {}
    adapter.prompt_model(input_ids=text, **cache_arguments(cache), **arguments)
    cache.end_prefill(1)
    return cache


def causal_block(adapter: ModelAdapter, cache: LookaheadCache, size: int) -> Block:
    """A block of `size` random tokens under a causal mask: the mask's content does not change the cost."""
    device = _device(adapter)
    numbers = torch.Generator().manual_seed(size)
    offsets = torch.arange(size, device=device)[None]
    return Block(
        tokens=torch.randint(adapter.num_tokens, (1, size), generator=numbers).to(device),
        offsets=offsets,
        positions=cache.lengths[0] + offsets,
        visible=torch.ones(1, size, size, dtype=torch.bool, device=device).tril(),
        logit_rows=offsets[0],
        lengths=cache.lengths,
        key_mask=None,
    )


def cost_at(seconds: dict[int, float], size: float) -> float:
    """Cost of a block relative to one token, interpolated linearly and extrapolated beyond the largest measured size.

    seconds: of `step_costs`, with the size 1 among them.
    """
    known = sorted(seconds)
    if len(known) == 1:
        return 1.0
    right = next((i for i, other in enumerate(known) if other >= size and i > 0), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = (seconds[high] - seconds[low]) / (high - low)
    return (seconds[low] + slope * (size - low)) / seconds[1]


def _timed(forward: Callable[[Block, LookaheadCache], Any], block: Block, cache: LookaheadCache) -> float:
    device = block.tokens.device
    synchronize(device)
    started = time.perf_counter()
    forward(block, cache)
    synchronize(device)
    return time.perf_counter() - started


def _device(adapter: ModelAdapter) -> torch.device:
    weights: Tensor = adapter.model.get_input_embeddings().weight
    return weights.device
