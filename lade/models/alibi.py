"""Families with ALiBi biases (arXiv:2108.12409): Bloom, Falcon and MPT.

The stock code computes the bias from cache slots, which differ from positions within a tree. The bias of a key depends
only on the key's position, so each adapter indexes the stock table by the positions of the block's keys and passes the
result to a shadow model. MPT counts every prompt slot. Bloom and Falcon count only unmasked slots, so masked slots in
the middle or at the end of a prompt reduce the positions of all later keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lade.block.mask import Block, block_mask
from lade.common.request import Request
from lade.models.base import ModelAdapter
from lade.models.shadow import Sliced


class AlibiAdapter(ModelAdapter):
    """Common part of the ALiBi families. Blocks run on a shadow model."""

    needs_shadow = True
    last_position = None

    def unsupported_request(self, request: Request) -> str | None:
        mask = request.attention_mask
        if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
            return "attention_mask holds other numbers than 0 and 1, which the model adds up to positions"
        return super().unsupported_request(request)

    def bias_of_keys(self, block: Block) -> Tensor:
        """The bias of each slot, by the position of its token. Returns [B, H, K]."""
        table = self.stock_table(block.num_slots, block.tokens.device)  # [H, K]
        return table[:, self.counted_positions(block)].transpose(0, 1)

    def counted_positions(self, block: Block) -> Tensor:
        """The position of each slot as the stock code counts it, `attention_mask.cumsum(-1) - 1`. Returns [B, K]."""
        positions = block.key_positions()
        if block.key_mask is not None:
            hidden = (~block.key_mask).cumsum(1)  # [B, P] masked slots up to each slot
            positions[:, : hidden.shape[1]] -= hidden
            positions[:, hidden.shape[1] :] -= hidden[:, -1:]
        return positions.clamp(min=0)  # left padding, which no token attends to

    def stock_table(self, num_positions: int, device: torch.device) -> Tensor:
        """The stock bias for a text without padding. Returns [H, num_positions]."""
        raise NotImplementedError


class BloomAdapter(AlibiAdapter):
    safe_hooks = ("prepare_inputs_for_generation",)  # older versions: only pads the masks of static caches

    def change_shadow(self, shadow: Any) -> None:
        shadow.transformer.build_alibi_tensor = lambda mask, num_heads, dtype: self._bias

    def masks(self, block: Block) -> Tensor:
        bias = self.bias_of_keys(block)
        self._bias = bias.flatten(0, 1)[:, None]  # [B * H, 1, K], the shape that Bloom's layers take
        return block_mask(block, self.dtype)

    def stock_table(self, num_positions: int, device: torch.device) -> Tensor:
        mask = torch.ones(1, num_positions, device=device)
        heads = self.model.transformer.num_heads
        return self.model.transformer.build_alibi_tensor(mask, heads, self.dtype).squeeze(1)


class FalconAdapter(AlibiAdapter):
    """Falcon. With `alibi=False` it has rotary positions and needs no shadow model."""

    def unsupported_request(self, request: Request) -> str | None:
        if request.has_static_cache and self.needs_shadow:
            return "Falcon's ALiBi and its mask have different lengths with a static cache"
        return super().unsupported_request(request)

    @property
    def needs_shadow(self) -> bool:  # type: ignore[override]
        return bool(self.config.alibi)

    def change_shadow(self, shadow: Any) -> None:
        for layer in shadow.transformer.h:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | self._layer_arguments), with_kwargs=True
            )

    def masks(self, block: Block) -> Any:
        if not self.needs_shadow:
            return super().masks(block)
        bias = self.bias_of_keys(block)[:, :, None]  # [B, H, 1, K]
        # Falcon's layers expect the bias inside the mask and, with eager attention, also as an argument.
        scale = (self.config.hidden_size // self.config.num_attention_heads) ** 0.5
        mask = block_mask(block, self.dtype)
        self._layer_arguments = {
            "attention_mask": (bias / scale).masked_fill(mask < -1, torch.finfo(self.dtype).min),
            "alibi": bias.flatten(0, 1),
        }
        return None  # the hooks of `change_shadow` replace the mask that the model builds from it

    def stock_table(self, num_positions: int, device: torch.device) -> Tensor:
        from lade.common.compat import falcon_alibi

        mask = torch.ones(1, num_positions, dtype=torch.long, device=device)
        return falcon_alibi(mask, self.config.num_attention_heads, self.dtype).squeeze(1)


class MptAdapter(AlibiAdapter):
    @property
    def most_slots(self) -> int:
        return int(self.config.max_seq_len)

    def change_shadow(self, shadow: Any) -> None:
        shadow.transformer.build_mpt_alibi_tensor = lambda num_heads, num_slots, device: self._bias

    def masks(self, block: Block) -> Any:
        self._bias = Sliced(self.bias_of_keys(block)[:, :, None])  # [B, H, 1, K]: the stock one is for all rows
        return block_mask(block, self.dtype) < 0  # MPT's layers take True for a hidden key

    def counted_positions(self, block: Block) -> Tensor:
        return block.key_positions()

    def stock_table(self, num_positions: int, device: torch.device) -> Tensor:
        heads = self.config.n_heads
        return self.model.transformer.build_mpt_alibi_tensor(heads, num_positions, device=device).squeeze(1)
