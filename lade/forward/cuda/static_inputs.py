"""The inputs of a forward of one static shape, and its view of the cache, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from lade.block.kv_cache import LookaheadCache, cache_arguments
from lade.block.mask import EVERYWHERE, AttentionSpan, Block, block_mask, masks_by_layer
from lade.common.compat import CacheLayer
from lade.common.transfer import HOST
from lade.common.trial import Trial
from lade.drafting.contexts import CONTEXT_SIZE, projected, projection
from lade.drafting.likeliest import likeliest
from lade.forward.cuda.kernel import pack_mask
from lade.forward.cuda.transfer import HostCopy, TensorBuffer
from lade.verification.logits import LogitsSummary, best_on_device

Forward = Callable[..., Tensor]
Masks = Tensor | dict[str, Tensor]
Outputs = tuple[Tensor, ...]  # logits [B, R, V], and what `packed_summary` returns of them where that is wanted
NUM_SINGLE = 2  # columns of a packed summary before the ids
NUM_CHECKS = 2  # replays compared: with the inputs of the capture, and with different ones


class StaticSlotLayer(CacheLayer):
    """One layer of a `LookaheadCache` for static shapes: it writes to the slots given in a tensor."""

    is_sliding = False
    is_compileable = True

    keys: Any
    values: Any

    def __init__(self, keys: Tensor | None, values: Tensor | None, slots: Tensor) -> None:
        """keys, values: the cache's own [B, H, C, D], None for a layer without any. slots: [B, q]."""
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The storage exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [B, H, q, D]. Returns keys and values of all slots, [B, H, C, D]."""
        write_slots(self.keys, self.slots, key_states)
        write_slots(self.values, self.slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are passed, so the changing length must not be used

    def get_max_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


def write_slots(states: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new keys or values [B, H, k, D] to slots [B, k] of a layer's states [B, H, C, D]."""
    if len(slots) == 1:
        states.index_copy_(2, slots[0], new)
    else:
        states.scatter_(2, slots[:, None, :, None].expand_as(new), new)


def static_view(cache: LookaheadCache, slots: Tensor) -> Cache:
    """A cache of the same memory that is written at slots [B, q] and knows no length."""
    layers: list[Any] = [
        StaticSlotLayer(getattr(layer, "keys", None), getattr(layer, "values", None), slots) for layer in cache.layers
    ]
    return Cache(layers=layers)


def masks_of(
    block: Block,
    dtype: torch.dtype,
    spans: AttentionSpan | dict[str, AttentionSpan],
    uses_kernel: bool,
    padding: Tensor | None,
) -> Masks:
    """The masks of `ModelAdapter.masks`, or packed ones for lade's kernel.

    padding: [B] left-padding slots per row, for the kernel; None without any.
    """
    make = partial(packed_block_mask, block, padding) if uses_kernel else partial(block_mask, block, dtype)
    return masks_by_layer(make, spans)


def packed_block_mask(block: Block, padding: Tensor | None, span: AttentionSpan = EVERYWHERE) -> Tensor:
    """The mask in the packed form of `lade.forward.cuda.kernel.packed_mask`.

    padding: [B] padding slots before each row's first token, None when there are none.
    """
    visible, first = block.visible, span.first_places(block)
    if first is not None:
        places = block.starts() + block.offsets
        visible = visible & (places[:, None] >= first[:, :, None])
        first = first.clamp(min=0) if padding is None else torch.maximum(first, padding[:, None])
    return pack_mask(visible, block.starts().squeeze(1), padding if first is None else first)


def plain_forward(
    model: Any, keeps_rows: bool, tokens: Tensor, positions: Tensor, masks: Masks, logit_rows: Tensor, cache: Cache
) -> Tensor:
    """The forward that is compiled or captured. tokens, positions: [B, q]. Returns logits [B, R, V]."""
    arguments = {"logits_to_keep": logit_rows} if keeps_rows else {}
    logits = model(
        input_ids=tokens,
        attention_mask=masks,
        position_ids=positions,
        **cache_arguments(cache),
        **arguments,
    ).logits
    return logits if keeps_rows else logits[:, logit_rows]


class StaticInputs:
    """The inputs of one shape at fixed addresses, and the matching view of the cache."""

    def __init__(self, block: Block, cache: LookaheadCache, device: torch.device) -> None:
        """An example of the shape: a block, and the cache that it is for. device: of the forward."""
        batch_size = len(block.tokens)
        self._step = TensorBuffer(step_inputs(block, cache), device)  # what changes in each step
        sent = self._step.tensors
        self.slots, self._nan_column, self._temperature = sent["slots"], sent["nan_column"], sent["temperature"]
        self.padding = torch.zeros(batch_size, dtype=torch.int32, device=device)  # slots before each row's first token
        self.block = Block(
            tokens=sent["tokens"],
            offsets=sent["offsets"],
            positions=sent["positions"],
            visible=sent["visible"],
            logit_rows=sent["logit_rows"],
            lengths=[],
            key_mask=torch.ones(batch_size, cache.capacity, dtype=torch.bool, device=device),
            capacity=cache.capacity,
            start_slots=sent["starts"],
        )
        self._projection = projection(self._nan_column.device)  # made here: a capture must not wait for its copy
        self._has_begun = False  # whether the padding is the present call's
        self.cache = static_view(cache, self.slots)
        self.replay: Callable[[], Outputs] | None = None  # replays the CUDA graph that reads these inputs
        self.trial = Trial(NUM_CHECKS)  # of that graph
        self._host_copy: HostCopy | None = None

    def begin_call(self, key_mask: Tensor | None, padding: Tensor | None) -> None:
        """Set what stays the same during a call, at the first block of it. key_mask: as in `Block`.

        padding: [B] slots before each row's first token, for the kernel; None without any.
        """
        if self._has_begun:
            return
        self._has_begun = True
        assert self.block.key_mask is not None
        self.block.key_mask.fill_(True)
        if key_mask is not None:
            self.block.key_mask[:, : key_mask.shape[1]] = key_mask
        self.padding.zero_() if padding is None else self.padding.copy_(padding)

    def end_call(self) -> None:
        self._has_begun = False

    def fill(self, block: Block, cache: LookaheadCache, *others: Any) -> None:
        """Send a block to the device: one copy, if it lies on the host. others: as for `step_inputs`."""
        self._step.fill(step_inputs(block, cache, *others))

    def packed_summary(self, logits: Tensor, num_tokens: int | None) -> Tensor:
        """A `LogitsSummary` of logits [B, R, V] on the device, [B, R, 2 + 2 * K + CONTEXT_SIZE] int32.

        num_tokens: ids that have an embedding.
        """
        is_nan = logits.index_select(-1, self._nan_column).isnan()  # [B, R, 1]
        values, ids = likeliest(logits[..., :num_tokens].flatten(0, 1), self._temperature)  # [B * R, K]
        chances, shape = values.view(torch.int32), (*logits.shape[:2], -1)
        projections = projected(logits[..., :num_tokens], self._projection).view(torch.int32)
        parts = [best_on_device(logits)[..., None], is_nan, ids.view(shape), chances.view(shape), projections]
        return torch.cat([part.to(torch.int32) for part in parts], dim=-1)

    def start_summary(self, packed: Tensor) -> None:
        """Begin to copy what `packed_summary` returned to the host."""
        if self._host_copy is None:
            self._host_copy = HostCopy(packed)
        self._host_copy.start(packed)

    def read_summary(self) -> LogitsSummary:
        assert self._host_copy is not None
        packed = self._host_copy.read()
        ids, bits = np.split(packed[..., NUM_SINGLE:-CONTEXT_SIZE], 2, axis=-1)
        chances, projections = (
            np.ascontiguousarray(part).view(np.float32) for part in (bits, packed[..., -CONTEXT_SIZE:])
        )
        return LogitsSummary(packed[..., 0], packed[..., 1] != 0, ids, chances, projections)


def step_inputs(
    block: Block, cache: LookaheadCache, nan_column: int = 0, temperature: float = 1.0
) -> dict[str, Tensor]:
    """The inputs of a forward of static shape for one step; on the host if the block is.

    nan_column, temperature: of the summary of its logits.
    """
    starts = torch.tensor(cache.lengths, device=HOST)[:, None]  # [B, 1]
    return {
        "tokens": block.tokens,
        "offsets": block.offsets,
        "positions": block.positions,
        "logit_rows": block.logit_rows,
        "starts": starts,
        "slots": starts + torch.arange(block.tokens.shape[1], device=HOST),  # [B, q]
        "nan_column": torch.tensor([nan_column], device=HOST),
        "temperature": torch.tensor(temperature, dtype=torch.float32, device=HOST),
        "visible": block.visible,
    }
