"""How a call's blocks go through the model: what the settings ask for, and what they leave to lade."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lade.config import LookaheadConfig
from lade.forward.runner import BlockRunner
from lade.forward.static_shapes import TOO_MANY_SLOTS, asks_for_graphs, can_capture, graph_refusal, padded_capacity
from lade.kernels import MAX_HEAD_DIM, kernel_problem, unavailable_reason
from lade.models.base import ModelAdapter
from lade.stats import GenerationStats

WEIGHTS_WANTED = "output_attentions asks for weights that the kernel never forms"
FAST_KERNEL_DTYPES = (torch.float16, torch.bfloat16)  # float32 keeps off the tensor cores


def choose_forward(
    runner: BlockRunner,
    config: LookaheadConfig,
    stats: GenerationStats,
    key_mask: Tensor | None,
    num_new: int,
    wanted: Collection[str],
    num_rows: int = 1,
    num_slots: int = 0,
) -> None:
    """Settle how this call's blocks go through the model: what the settings ask for, and what they leave to lade.

    key_mask: as in `Block`, for the whole call. num_new: tokens that it may generate. wanted: what it records of the model
    besides logits, such as "output_attentions". num_rows: B. num_slots: that its cache begins with. `stats` says what was not possible.
    """
    model = runner.adapter.model
    compiles, captures = config.compile, asks_for_graphs(config, model.device)
    reason = runner.static_shapes_reason() if compiles or captures else None
    if compiles:
        stats.compile_reason = reason
    if captures:
        stats.cuda_graph_reason = reason or graph_refusal(config, model, num_new, num_rows)
        captures = stats.cuda_graph_reason is None
    choose_attention(runner, config, stats, key_mask, wanted, captures)
    most_slots = runner.most_captured_slots(config)
    if captures and most_slots is not None and padded_capacity(num_slots) > most_slots:
        captures, stats.cuda_graph_reason = False, TOO_MANY_SLOTS
    if reason is None and (compiles or captures):
        runner.use_static_shapes(config, stats, compiles, captures)
    choose_packing(runner, config, stats, num_new)


def choose_packing(runner: BlockRunner, config: LookaheadConfig, stats: GenerationStats, num_new: int) -> None:
    """Let blocks multiply with packed weights, where the settings ask for it or, on a CPU, leave it to lade."""
    model, is_automatic = runner.adapter.model, config.pack is None
    if config.pack is False or (is_automatic and model.device.type != "cpu"):
        return
    is_one_of_many = is_automatic and config.num_workers > 1
    reason = "each of several processes would keep a copy (PACK=1 does)" if is_one_of_many else None
    stats.packing_reason = reason or runner.use_packed_weights(num_new, is_asked=not is_automatic)
    stats.packed_weights, stats.packed_bytes = runner.num_packed


def choose_attention(
    runner: BlockRunner,
    config: LookaheadConfig,
    stats: GenerationStats,
    key_mask: Tensor | None,
    wanted: Collection[str],
    captures: bool,
) -> None:
    """Let blocks go through lade's own attention, where the settings ask for it or, on CUDA, leave it to lade."""
    is_automatic = config.use_flash is None
    if config.use_flash is False or (is_automatic and not can_capture(runner.adapter.model.device)):
        return
    reason = WEIGHTS_WANTED if "output_attentions" in wanted else None
    if reason is None and is_automatic:
        reason = slow_kernel_reason(runner.adapter, is_captured=captures and not wanted)
    stats.kernel_reason = reason or runner.use_kernel(key_mask)
    stats.used_kernel = runner.uses_kernel


def slow_kernel_reason(adapter: ModelAdapter, is_captured: bool) -> str | None:
    """Why the kernel would cost more than it saves, or not run at all, as a sentence; None where it pays."""
    if not is_captured:
        return "blocks are not captured, and launching the kernel from Python would cost more than it saves"
    if adapter.dtype not in FAST_KERNEL_DTYPES:
        return f"the kernel is not known to pay in {str(adapter.dtype).removeprefix('torch.')}"
    largest = largest_head_dim(adapter.config)
    if largest > MAX_HEAD_DIM:
        return f"the kernel takes heads of up to {MAX_HEAD_DIM}, this model has some of {largest}"
    return unavailable_reason() or kernel_problem(adapter.model.device, adapter.dtype)


def largest_head_dim(config: Any) -> int:
    """Of the attention heads, 0 where that is not known; families have several names for it, some have layers of different ones."""
    sizes = [size for name, size in vars(config).items() if name.endswith("head_dim") and isinstance(size, int)]
    num_heads = getattr(config, "num_attention_heads", None)
    if not sizes and isinstance(num_heads, int):
        sizes = [config.hidden_size // num_heads]
    return max(sizes, default=0)
