"""Llama 4: layers without rotary positions scale their queries by cache slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lade.block.mask import Block
from lade.models.base import ModelAdapter


class Llama4Adapter(ModelAdapter):
    """With `attn_temperature_tuning`, blocks run on a shadow model whose query projections scale by position."""

    @property
    def needs_shadow(self) -> bool:
        return bool(self.config.attn_temperature_tuning) or self._masked_attention != self.config._attn_implementation

    def change_shadow(self, shadow: Any) -> None:
        for attention in list(shadow.modules()):
            if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
                attention.attn_temperature_tuning = False
                attention.q_proj = ScaledProjection(attention.q_proj, attention, self)

    def masks(self, block: Block) -> Tensor | dict[str, Tensor]:
        # The stock code counts slots, padding included, so these are slots and not `block.positions`.
        self.positions = block.starts() + block.offsets  # [B, q]
        return super().masks(block)


class ScaledProjection(nn.Module):
    """A query projection scaled by the temperature of each token's position (arXiv:2501.19399)."""

    def __init__(self, stock: nn.Module, attention: Any, adapter: Llama4Adapter) -> None:
        super().__init__()
        self.stock, self.adapter = stock, adapter
        self.floor_scale, self.attn_scale = attention.floor_scale, attention.attn_scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [B, q, D]. Returns [B, q, H * D]."""
        queries = self.stock(hidden_states)
        positions = self.adapter.positions.to(queries.device).float()
        scale = torch.log1p(torch.floor((positions + 1.0) / self.floor_scale)) * self.attn_scale + 1.0
        return (queries * scale[..., None]).to(queries.dtype)
