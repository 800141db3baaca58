"""GPT-Neo: its attention masks by cache slot, through a buffer in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lade.block.mask import AttentionSpan, Block, block_mask
from lade.common.request import Request
from lade.models.base import ModelAdapter
from lade.models.shadow import Sliced


class GPTNeoAdapter(ModelAdapter):
    """Blocks run on a shadow model whose mask buffers allow all slots, or those within a local layer's window."""

    carried_arguments = frozenset({"token_type_ids"})

    @property
    def most_slots(self) -> int:
        return int(self.config.max_position_embeddings)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._local, self._everything = Sliced(), Sliced()

    def unsupported_request(self, request: Request) -> str | None:
        if request.has_static_cache:
            return "with a static cache GPT-Neo's local layers attend to other slots than with other caches"
        return super().unsupported_request(request)

    def change_shadow(self, shadow: Any) -> None:
        for layer in shadow.transformer.h:
            attention = layer.attn.attention
            del attention._buffers["bias"]
            attention.bias = self._local if attention.attention_type == "local" else self._everything

    def masks(self, block: Block) -> Tensor:
        hidden = AttentionSpan(window=self.config.window_size).hides(block)
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=block.tokens.device)
        self._everything.whole = everything
        self._local.whole = everything if hidden is None else ~hidden[:, None]
        return block_mask(block, self.dtype)
