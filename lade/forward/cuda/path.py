"""The path of a GPU: blocks of static shapes, compiled or captured in CUDA graphs, and lade's attention kernel.

COMPILE and USE_FLASH work on other devices, too, where the kernel is plain torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.common.compat import CausalLMOutputWithPast
from lade.forward.base import BlockCall, ForwardPath, can_capture, changed_attention
from lade.forward.cuda.buffer_pool import padded_capacity
from lade.forward.cuda.kernel import MAX_HEAD_DIM, kernel_problem, left_padding, unavailable_reason
from lade.forward.cuda.kernel.interface import NAME as KERNEL
from lade.forward.cuda.kernel.interface import unsupported_reason
from lade.forward.cuda.proof import UNPROVEN, is_proven
from lade.forward.cuda.static_inputs import masks_of
from lade.forward.cuda.static_shapes import (
    TOO_MANY_SLOTS,
    StaticForward,
    graph_refusal,
    most_captured_slots,
    padded_nodes,
)
from lade.models.base import ModelAdapter
from lade.models.shadow import shadow_model
from lade.verification.logits import LogitsSummary
from lade.verification.race import Race

WEIGHTS_WANTED = "output_attentions asks for weights that the kernel never forms"
FAST_KERNEL_DTYPES = (torch.float16, torch.bfloat16)  # float32 does not use the tensor cores


class CudaPath(ForwardPath):
    """Blocks of static shapes until one cannot be had, with lade's attention kernel where it was chosen."""

    def __init__(
        self, call: BlockCall, uses_kernel: bool, padding: Tensor | None, is_static: bool, captures: bool
    ) -> None:
        """padding: [B] left-padding slots per row, for the kernel. is_static: whether blocks have static shapes.

        captures: whether these are captured.
        """
        super().__init__(call)
        self.uses_kernel, self.padding = uses_kernel, padding
        self.static: StaticForward | None = None
        if is_static:
            self.static = StaticForward(call, self.model, uses_kernel=uses_kernel, captures=captures)

    @classmethod
    def serving(cls, call: BlockCall) -> CudaPath | None:
        config, reasons, device = call.config, call.stats.reasons, call.adapter.model.device
        captures = config.cuda_graph is True or (config.cuda_graph is None and can_capture(device))
        no_shapes = static_shapes_reason(call) if config.compile or captures else None
        if config.compile and no_shapes is not None:
            reasons["compile"] = no_shapes
        refusal = (
            (no_shapes or graph_refusal(config, call.adapter.model, call.num_new, call.num_rows)) if captures else None
        )
        refusal_of_kernel, padding = kernel_refusal(call, captures and refusal is None)
        uses_kernel = refusal_of_kernel is None
        if captures and refusal is None and padded_capacity(call.num_slots) > most_captured_slots(config, uses_kernel):
            refusal = TOO_MANY_SLOTS
        if refusal is not None:
            captures, reasons["graph"] = False, refusal
        if refusal_of_kernel:
            reasons["kernel"] = refusal_of_kernel
        call.stats.used_kernel = uses_kernel
        is_static = no_shapes is None and (config.compile or captures)
        if config.pack and (uses_kernel or is_static):
            reasons["packed"] = "blocks have static shapes or lade's own attention"
        return cls(call, uses_kernel, padding, is_static, captures) if uses_kernel or is_static else None

    @property
    def kind(self) -> tuple[str, ...]:
        is_captured = self.static is not None and self.static.captures
        return ("kernel",) * self.uses_kernel + ("graph",) * is_captured

    @cached_property
    def model(self) -> Any:
        return shadow_model(self.adapter.model, KERNEL) if self.uses_kernel else self.adapter.block_model

    @property
    def sizes(self) -> tuple[int, ...] | None:  # type: ignore[override]
        if self.static is None or self.call.config.uses_window:
            return None
        full = self.call.config.max_block - 1
        return tuple(sorted({1 + padded_nodes(num_nodes, full) for num_nodes in range(1 + full)}))

    @property
    def summary(self) -> LogitsSummary | None:  # type: ignore[override]
        return None if self.static is None else self.static.summary

    @property
    def samples(self) -> bool:  # type: ignore[override]
        static = self.static
        if static is None or not (static.captures and static.samples):
            return False
        return self.call.device == self.adapter.model.device  # draws are made on the prompt's

    @property
    def preparing_seconds(self) -> float:  # type: ignore[override]
        return 0.0 if self.static is None or not self.static.is_on else self.static.preparing_seconds

    def take_cache(self, most_slots: int) -> LookaheadCache:
        # Ranks of a tensor-parallel model would have to agree on the pooled caches.
        if self.static is None or (self.adapter.model.tp_size or 1) > 1:
            return self.replacement_cache(self.call.num_slots)
        return self.static.take_cache(self.call.num_slots, most_slots, self.call.num_rows)

    def replacement_cache(self, capacity: int) -> LookaheadCache:
        return self.adapter.make_cache(capacity if self.static is None else padded_capacity(capacity))

    def use_summaries(self, nan_column: int | None, temperature: float) -> None:
        if self.static is not None:
            self.static.nan_column, self.static.temperature = nan_column or 0, temperature

    def padded_nodes(self, num_nodes: int) -> int:
        static = self.static
        return padded_nodes(num_nodes, static.full_tree) if static is not None and static.is_on else num_nodes

    def masks(self, block: Block) -> Any:
        if not self.uses_kernel:
            return super().masks(block)
        return masks_of(block, self.adapter.dtype, self.adapter.attention_spans, True, self.padding)

    def forward(self, block: Block, cache: LookaheadCache, race: Race | None = None) -> Any:
        ordinary = super().forward
        if self.static is not None and self.static.is_on:
            logits = self.static.logits(block, cache, self.padding, lambda: ordinary(block, cache).logits, race)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits)
        return ordinary(block, cache)

    def close(self, num_generated: int) -> None:
        if self.static is not None:
            self.static.release()
        problem = kernel_problem(self.adapter.model.device, self.adapter.dtype) if self.uses_kernel else None
        if problem is not None:
            self.call.stats.used_kernel, self.call.stats.reasons["kernel"] = False, problem


def static_shapes_reason(call: BlockCall) -> str | None:
    """Why blocks cannot have static shapes, to be compiled or captured, as a sentence; None if they can."""
    adapter = call.adapter
    reason = changed_attention(adapter)
    if reason is not None:
        return reason
    if adapter.code.is_hooked:
        return "the model has hooks, which compiled or captured forwards pass by"
    if not adapter.takes_positions:
        return f"{type(adapter.model).__name__}.forward takes no position_ids"
    if adapter.carried:
        return f"compiled or captured forwards take no {min(adapter.carried)}"
    if adapter.needs_equal_lengths:
        return "rotary frequencies of this model depend on the length of the text"
    return f"{min(call.wanted)} asks for more than the compiled forward returns" if call.wanted else None


def kernel_refusal(call: BlockCall, is_captured: bool) -> tuple[str | None, Tensor | None]:
    """Why blocks do not use lade's attention, empty where nobody has asked for it, None if they do.

    is_captured: whether they are captured. Returns with it the rows' left padding, [B], None without any.
    """
    adapter, use_flash = call.adapter, call.config.use_flash
    if use_flash is False or (use_flash is None and not can_capture(adapter.model.device)):
        return "", None
    reason = WEIGHTS_WANTED if "output_attentions" in call.wanted else None
    if reason is None and use_flash is None:
        reason = slow_kernel_reason(adapter, is_captured)
    reason = reason or changed_attention(adapter) or unsupported_reason(adapter.model)
    if reason is not None or call.key_mask is None:
        return reason, None
    padding = left_padding(call.key_mask)
    return ("the prompt's mask hides tokens other than the first ones", None) if padding is None else (None, padding)


def slow_kernel_reason(adapter: ModelAdapter, is_captured: bool) -> str | None:
    """Why the kernel would not run or not pay, as a sentence; None if it is expected to pay."""
    if not is_proven(adapter.model.device, "kernel"):
        return UNPROVEN
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
