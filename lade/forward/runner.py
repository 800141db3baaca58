"""`BlockRunner` runs a call's blocks: eagerly, with static shapes, lade's attention kernel, packed weights.

`ModelAdapter` describes a model family. A runner is made for one call and decides how its blocks run on the model.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.compat import CausalLMOutputWithPast
from lade.config import LookaheadConfig
from lade.forward.buffer_pool import padded_capacity
from lade.forward.grouped_attention import NAME as GROUPED
from lade.forward.grouped_attention import can_group
from lade.forward.packed import PackedProducts, packed_model, packed_weights, packing_reason, weights_to_pack
from lade.forward.race import Race
from lade.forward.static_inputs import DigestSettings, masks_of
from lade.forward.static_shapes import StaticForward, padded_nodes
from lade.kernels import kernel_problem, left_padding
from lade.kernels.interface import NAME as KERNEL
from lade.kernels.interface import unsupported_reason as kernel_unsupported_reason
from lade.models.base import ModelAdapter
from lade.models.shadow import shadow_model
from lade.stats import GenerationStats
from lade.verification.logits import LogitsDigest


class BlockRunner:
    """Runs one call's blocks on a model. Call the `use_*` methods before making a cache or running a block."""

    def __init__(self, adapter: ModelAdapter, device: torch.device | None = None) -> None:
        """device: where blocks that were laid out on the host are sent for eager forwards; None for the model's."""
        self.adapter, self.device = adapter, device or adapter.model.device
        self.uses_kernel = False  # whether blocks use lade's attention kernel
        self.uses_grouped = False  # whether their attention reads shared keys and values without repeating them
        self.is_typical = True  # whether a block's time may be learned as that of its `kind`
        self.padding: Tensor | None = None  # [B] left-padding slots per row, for the kernel
        self._static: StaticForward | None = None
        self._products: PackedProducts | None = None  # of packed weights
        # Whether costs are counted as those of packed weights, even if memory did not allow all copies.
        self._counts_as_packed = False

    # What is chosen before the call begins.

    def use_kernel(self, key_mask: Tensor | None) -> str | None:
        """Let blocks use lade's attention kernel. Returns None, or why they cannot; then nothing changes.

        key_mask: as in `Block`, for the whole call.
        """
        reason = self._own_code_reason() or kernel_unsupported_reason(self.adapter.model)
        if reason is not None:
            return reason
        if key_mask is not None:
            self.padding = left_padding(key_mask)
            if self.padding is None:
                return "the prompt's mask hides tokens other than the first ones"
        self.uses_kernel = True
        return None

    def static_shapes_reason(self) -> str | None:
        """Why blocks cannot have static shapes, to be compiled or captured, as a sentence; None if they can."""
        adapter, reason = self.adapter, self._own_code_reason()
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

    def _own_code_reason(self) -> str | None:
        """Why the model's attention can be neither replaced, compiled nor captured, as a sentence; None if it can."""
        adapter = self.adapter
        if adapter.has_own_blocks:
            return "this family's blocks run on changed modules of the model"
        if adapter.code.is_patched:
            return "the model is dispatched or patched"
        return "the model's attention is not transformers' own" if adapter.code.functions else None

    def use_static_shapes(self, config: LookaheadConfig, stats: GenerationStats, captures: bool) -> None:
        """Compile or capture blocks until that fails. stats: receives counts and reasons."""
        self._static = StaticForward(
            self.adapter, self.model, config, stats, uses_kernel=self.uses_kernel, captures=captures
        )

    def use_grouped_attention(self) -> None:
        """Let blocks read keys and values that several heads share without repeating them, where they can."""
        self.uses_grouped = not self.uses_kernel and can_group(self.adapter)

    def use_packed_weights(self, num_new: int, is_asked: bool) -> str | None:
        """Let blocks use packed weights where possible and useful. Returns why some or all are not packed, or None.

        num_new: the most tokens that the call may generate. is_asked: pack regardless of num_new, within the free
        memory.
        """
        adapter = self.adapter
        shared = packed_weights(adapter.model)
        reason = "blocks have static shapes" if self._static is not None else packing_reason(adapter)
        weights = [] if reason is not None else weights_to_pack(adapter)
        if not weights:
            shared.drop()
            return reason or "the model has no linear layers that gain by it"
        is_due, copies, reason = shared.prepare(weights, num_new, is_asked)
        if copies:
            self._products = PackedProducts(copies, shared, adapter.is_exact)
        # In half precision the text must not depend on the free memory, so nor may the costs.
        self._counts_as_packed = bool(copies) if adapter.is_exact else is_due
        self.is_typical = adapter.is_exact or not is_due or reason is None
        return reason

    @property
    def num_packed(self) -> tuple[int, int]:
        """The number of packed weights and the bytes of their copies."""
        return (0, 0) if self._products is None else (self._products.num_weights, self._products.num_bytes)

    @property
    def captures(self) -> bool:
        """Whether blocks are captured in CUDA graphs."""
        return self._static is not None and self._static.captures

    @property
    def kind(self) -> tuple[str, ...]:
        """What of a block's forward changes its cost: of "kernel", "graph", "grouped", "packed"."""
        features = {
            "kernel": self.uses_kernel,
            "graph": self.captures,
            "grouped": self.uses_grouped,
            "packed": self._counts_as_packed,
        }
        return tuple(name for name, is_used in features.items() if is_used)

    @cached_property
    def model(self) -> Any:
        """The model that runs the blocks: the adapter's, or a shadow model with lade's attention or packed weights."""
        model = self.adapter.model if self.uses_kernel else self.adapter.block_model
        attention = KERNEL if self.uses_kernel else GROUPED if self.uses_grouped else None
        if self._products is not None:
            return packed_model(model, self._products, attention)
        return model if attention is None else shadow_model(model, attention)

    # The cache.

    def make_cache(self, capacity: int) -> LookaheadCache:
        """An empty cache. capacity: its initial number of slots."""
        return self.adapter.make_cache(capacity if self._static is None else padded_capacity(capacity))

    def take_cache(self, num_slots: int, most_slots: int, batch_size: int) -> LookaheadCache:
        """An empty cache for the call: a pooled one of an earlier call that its CUDA graphs read, or a new one.

        num_slots: the slots that the call starts with. most_slots: the most that it may need. See `release`.
        """
        # Ranks of a tensor-parallel model would have to agree on the pooled caches.
        is_whole = (self.adapter.model.tp_size or 1) == 1
        if self._static is None or not is_whole:
            return self.make_cache(num_slots)
        return self._static.take_cache(num_slots, most_slots, batch_size)

    def use_digests(self, nan_column: int | None, temperature: float) -> None:
        """Settings of `digest`, known after the prompt's forward. nan_column: as in `BlockLogits`."""
        if self._static is not None:
            self._static.digest_settings = DigestSettings(nan_column, temperature)

    @property
    def digest(self) -> LogitsDigest | None:
        """Of the latest block's logits; None if it was not computed together with them."""
        return None if self._static is None else self._static.digest

    @property
    def samples(self) -> bool:
        """Whether blocks are captured together with their digest, which tokens can then be sampled for."""
        static = self._static
        if static is None or not (static.captures and static.samples):
            return False
        return self.device == self.adapter.model.device  # draws are made on the prompt's

    def finish(self, stats: GenerationStats) -> None:
        """Record in `stats` what self-checks refused, and return the cache and graphs to the pool.

        After a call that succeeded and whose cache is no longer read.
        """
        if self._static is not None:
            self._static.release()
        problem = kernel_problem(self.adapter.model.device, self.adapter.dtype) if self.uses_kernel else None
        if problem is not None:
            stats.used_kernel, stats.kernel_reason = False, problem
        if self._products is not None and stats.packing_reason is None:
            stats.packing_reason = self._products.refusal

    # The forward.

    def forward(self, block: Block, cache: LookaheadCache, race: Race | None = None, **wanted: Any) -> Any:
        """One forward over a block. Its keys and values are written after the committed slots of `cache`.

        race: decides the tokens of `digest.sampled`; only where `samples`. wanted: further arguments of the model, such
        as output_hidden_states.
        Returns the model's output, logits [B, R, V].
        """
        if self._products is not None:
            self._products.seconds = 0.0
        static = self._static
        if static is not None and wanted:
            static.turn_off(f"{min(wanted)} asks for more than the compiled forward returns")
        if static is not None and static.is_on:
            eager = partial(self.eager_forward, block, cache)
            logits = static.logits(block, cache, self.padding, lambda: eager().logits, race)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits)
        return self.eager_forward(block, cache, **wanted)

    def eager_forward(self, block: Block, cache: LookaheadCache, **wanted: Any) -> Any:
        """The eager forward over a block. wanted: as for `forward`."""
        adapter = self.adapter
        block = adapter.begin_block(block.to(self.device), cache)
        if self.uses_kernel:
            masks = masks_of(block, adapter.dtype, adapter.reaches, True, self.padding)
        else:
            masks = adapter.masks(block)
        return adapter.ordinary_forward(block, cache, self.model, masks, **wanted)

    def padded_nodes(self, num_nodes: int) -> int:
        """The number of nodes, padding included, that a tree takes in the block."""
        static = self._static
        return padded_nodes(num_nodes, static.full_tree) if static is not None and static.is_on else num_nodes

    def block_sizes(self, config: LookaheadConfig) -> tuple[int, ...] | None:
        """The block sizes in tokens that trees are padded to; None without padding."""
        if self._static is None or config.uses_window:
            return None
        full = config.max_block - 1
        return tuple(sorted({1 + padded_nodes(num_nodes, full) for num_nodes in range(1 + full)}))

    @property
    def preparing_seconds(self) -> float:
        """Seconds of the latest block's time that were spent once for all blocks of its shape."""
        if self._products is not None:
            return self._products.seconds
        return 0.0 if self._static is None or not self._static.is_on else self._static.preparing_seconds
