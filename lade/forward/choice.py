"""Choose how a call's blocks run: compiled, captured, with lade's attention kernel, with packed weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lade.config import LookaheadConfig
from lade.forward.buffer_pool import padded_capacity
from lade.forward.runner import BlockRunner
from lade.forward.static_shapes import (
    TOO_MANY_SLOTS,
    asks_for_graphs,
    can_capture,
    graph_refusal,
    most_captured_slots,
)
from lade.kernels import MAX_HEAD_DIM, kernel_problem, unavailable_reason
from lade.models.base import ModelAdapter
from lade.stats import GenerationStats

WEIGHTS_WANTED = "output_attentions asks for weights that the kernel never forms"
FAST_KERNEL_DTYPES = (torch.float16, torch.bfloat16)  # float32 does not use the tensor cores


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
    """Set up `runner` for one call, as the settings ask or, where they are automatic, as is expected to pay.

    stats: receives the reasons for what was not possible. key_mask: as in `Block`, for the whole call. num_new: the
    most tokens that the call may generate. wanted: outputs besides logits, such as "output_attentions". num_rows: B.
    num_slots: the cache's initial slots.
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
    runner.use_grouped_attention()
    if captures and padded_capacity(num_slots) > most_captured_slots(config, runner.uses_kernel):
        captures, stats.cuda_graph_reason = False, TOO_MANY_SLOTS
    if reason is None and (compiles or captures):
        runner.use_static_shapes(config, stats, captures)
    choose_packing(runner, config, stats, num_new)


def choose_packing(runner: BlockRunner, config: LookaheadConfig, stats: GenerationStats, num_new: int) -> None:
    """Let blocks use packed weights if PACK asks for it or, on a CPU, is automatic."""
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
    """Let blocks use lade's attention kernel if USE_FLASH asks for it or, on CUDA, is automatic."""
    is_automatic = config.use_flash is None
    if config.use_flash is False or (is_automatic and not can_capture(runner.adapter.model.device)):
        return
    reason = WEIGHTS_WANTED if "output_attentions" in wanted else None
    if reason is None and is_automatic:
        reason = slow_kernel_reason(runner.adapter, is_captured=captures and not wanted)
    stats.kernel_reason = reason or runner.use_kernel(key_mask)
    stats.used_kernel = runner.uses_kernel


def slow_kernel_reason(adapter: ModelAdapter, is_captured: bool) -> str | None:
    """Why the kernel would not run or not pay, as a sentence; None if it is expected to pay."""
    if not is_captured:
        return "blocks are not captured, and launching the kernel from Python would cost more than it saves"
    if adapter.dtype not in FAST_KERNEL_DTYPES:
        return f"the kernel is not known to pay in {str(adapter.dtype).removeprefix('torch.')}"
    largest = largest_head_dim(adapter.config)
    if largest > MAX_HEAD_DIM:
        return f"the kernel takes heads of up to {MAX_HEAD_DIM}, this model has some of {largest}"
    return unavailable_reason() or kernel_problem(adapter.model.device, adapter.dtype)


def largest_head_dim(config: Any) -> int:
    """The largest head size of any layer; 0 if unknown. Families name the setting differently."""
    sizes = [size for name, size in vars(config).items() if name.endswith("head_dim") and isinstance(size, int)]
    num_heads = getattr(config, "num_attention_heads", None)
    if not sizes and isinstance(num_heads, int):
        sizes = [config.hidden_size // num_heads]
    return max(sizes, default=0)
