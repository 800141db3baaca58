"""The path of a CPU: attention without repeated keys and values, and linear layers with packed weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.forward.base import BlockCall, ForwardPath
from lade.forward.cpu.grouped_attention import NAME as GROUPED
from lade.forward.cpu.grouped_attention import can_group
from lade.forward.cpu.packed import Packing, begin_packing, pack_layers
from lade.models.shadow import shadow_model


class CpuPath(ForwardPath):
    """Blocks run on a shadow model whose attention or linear layers are replaced."""

    def __init__(self, call: BlockCall, is_grouped: bool, packing: Packing | None) -> None:
        super().__init__(call)
        self.is_grouped, self.packing = is_grouped, packing

    @classmethod
    def serving(cls, call: BlockCall) -> CpuPath | None:
        packing = begin_packing(call)
        is_grouped = can_group(call.adapter)
        return cls(call, is_grouped, packing) if is_grouped or packing is not None else None

    @property
    def kind(self) -> tuple[str, ...]:
        return ("grouped",) * self.is_grouped + (self.packing.kind if self.packing is not None else ())

    @cached_property
    def prompt_model(self) -> Any:
        """Packed as well, where torch's own product of the prompt takes longer."""
        if self.packing is None or not self.packing.serves_prompt:
            return super().prompt_model
        shadow = shadow_model(self.adapter.model)
        pack_layers(shadow, self.packing)
        return shadow

    @cached_property
    def model(self) -> Any:
        shadow = shadow_model(self.adapter.block_model, GROUPED if self.is_grouped else None)
        if self.packing is not None:
            pack_layers(shadow, self.packing)
        return shadow

    def forward(self, block: Block, cache: LookaheadCache) -> Tensor:
        if self.packing is not None:
            self.packing.begin_step(max(cache.lengths))
        return super().forward(block, cache)

    def close(self, num_generated: int) -> None:
        if self.packing is not None:
            self.packing.close(num_generated)
