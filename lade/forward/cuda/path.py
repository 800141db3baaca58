"""Which path a GPU takes: blocks of static shapes, compiled or captured in CUDA graphs, and lade's attention kernel.

COMPILE and USE_FLASH work on other devices, too, where the kernel is plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lade.forward.base import BlockCall, can_capture
from lade.forward.cuda.buffer_pool import padded_capacity
from lade.forward.cuda.kernel import MAX_HEAD_DIM, kernel_problem, left_padding, unavailable_reason
from lade.forward.cuda.kernel.interface import unsupported_reason
from lade.forward.cuda.kernel_path import KernelPath
from lade.forward.cuda.proof import UNPROVEN, is_proven
from lade.forward.cuda.static_shapes import TOO_MANY_SLOTS, StaticPath, graph_refusal, most_captured_slots
from lade.models.base import ModelAdapter

FAST_KERNEL_DTYPES = (torch.float16, torch.bfloat16)  # float32 does not use the tensor cores


class CudaPath:
    """Chooses blocks of static shapes, lade's attention kernel, both or neither."""

    @staticmethod
    def serving(call: BlockCall) -> KernelPath | None:
        """As `ForwardPath.serving`."""
        config, reasons, model = call.config, call.stats.reasons, call.adapter.model
        captures = config.cuda_graph is True or (config.cuda_graph is None and can_capture(model.device))
        no_shapes = static_shapes_reason(call) if config.compile or captures else None
        if config.compile and no_shapes is not None:
            reasons["compile"] = no_shapes
        refusal = (no_shapes or graph_refusal(config, model, call.num_new, call.num_rows)) if captures else None
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
        if is_static:
            return StaticPath(call, uses_kernel, padding, captures)
        return KernelPath(call, uses_kernel, padding) if uses_kernel else None


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
    return None


def kernel_refusal(call: BlockCall, is_captured: bool) -> tuple[str | None, Tensor | None]:
    """Why blocks do not use lade's attention, empty where nobody has asked for it, None if they do.

    is_captured: whether they are captured. Returns with it the rows' left padding, [B], None without any.
    """
    adapter, use_flash = call.adapter, call.config.use_flash
    if use_flash is False or (use_flash is None and not can_capture(adapter.model.device)):
        return "", None
    reason = slow_kernel_reason(adapter, is_captured) if use_flash is None else None
    reason = reason or changed_attention(adapter) or unsupported_reason(adapter.model)
    if reason is not None or call.key_mask is None:
        return reason, None
    padding = left_padding(call.key_mask)
    return ("the prompt's mask hides tokens other than the first ones", None) if padding is None else (None, padding)


def changed_attention(adapter: ModelAdapter) -> str | None:
    """Why the model's attention can be neither replaced, compiled nor captured, as a sentence; None if it can."""
    if adapter.has_own_blocks:
        return "this family's blocks have masks or modules of their own"
    if adapter.code.is_patched:
        return "the model is dispatched or patched"
    return "the model's attention is not transformers' own" if adapter.code.functions else None


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
