"""The path of blocks that may run with lade's attention kernel."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from lade.block.mask import Block
from lade.forward.base import BlockCall, ForwardPath
from lade.forward.cuda.kernel import kernel_problem
from lade.forward.cuda.kernel.interface import NAME as KERNEL
from lade.forward.cuda.static_inputs import masks_of
from lade.models.shadow import shadow_model


class KernelPath(ForwardPath):
    """Blocks run by the model's forward, with lade's attention kernel where it was chosen."""

    def __init__(self, call: BlockCall, uses_kernel: bool, padding: Tensor | None) -> None:
        """padding: [B] left-padding slots per row, for the kernel; None without any."""
        super().__init__(call)
        self.uses_kernel, self.padding = uses_kernel, padding

    @property
    def kind(self) -> tuple[str, ...]:
        return ("kernel",) * self.uses_kernel

    @cached_property
    def model(self) -> Any:
        return shadow_model(self.adapter.model, KERNEL) if self.uses_kernel else self.adapter.block_model

    def masks(self, block: Block) -> Any:
        if not self.uses_kernel:
            return super().masks(block)
        return masks_of(block, self.adapter.dtype, self.adapter.attention_spans, True, self.padding)

    def close(self, num_generated: int) -> None:
        problem = kernel_problem(self.adapter.model.device, self.adapter.dtype) if self.uses_kernel else None
        if problem is not None:
            self.call.stats.used_kernel, self.call.stats.reasons["kernel"] = False, problem
