"""Forward paths: their interface, and the ordinary path, the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.config import LookaheadConfig
from lade.models.base import ModelAdapter
from lade.stats import GenerationStats
from lade.verification.logits import LogitsSummary

GRAPH_DEVICES = ("cuda",)  # device types whose forwards can be captured


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """The call whose blocks are to run. Numbers are in tokens.

    stats: receives counts, and under `reasons` why a path that was asked for is not used. device: where the prompt's
    ids lie. key_mask: as in `Block`, for the whole call. num_prompt: of the prompts that are not cached, over all rows.
    num_new: the most to generate. num_slots: slots that the cache starts with.
    """

    adapter: ModelAdapter
    config: LookaheadConfig = field(default_factory=LookaheadConfig)
    stats: GenerationStats = field(default_factory=GenerationStats)
    device: torch.device
    key_mask: Tensor | None = None
    num_rows: int = 1
    num_prompt: int = 0
    num_new: int = 0
    num_slots: int = 0


class ForwardPath:
    """Runs one call's blocks, here by the model's own forward.

    A wing derives from it, overrides what it does faster, and is named in `PATHS`.
    """

    # Block sizes that trees are padded to, rising; None for any size.
    sizes: tuple[int, ...] | None = None
    # Of the latest block's logits, if it was computed together with them.
    summary: LogitsSummary | None = None

    def __init__(self, call: BlockCall) -> None:
        self.call, self.adapter = call, call.adapter

    @classmethod
    def serving(cls, call: BlockCall) -> ForwardPath | None:
        """The path for a call; None where it has nothing to offer, with the reasons in `call.stats`."""
        return cls(call)

    @property
    def kind(self) -> tuple[str, ...]:
        """Properties of the next block's forward that change its cost."""
        return ()

    @cached_property
    def model(self) -> Any:
        """The model that runs the blocks."""
        return self.adapter.block_model

    @property
    def prompt_model(self) -> Any:
        """The model that runs the prompt."""
        return self.adapter.model

    def take_cache(self, most_slots: int) -> LookaheadCache:
        """An empty cache for the call. most_slots: the most that it may need."""
        return self.adapter.make_cache(self.call.num_slots)

    def use_summaries(self, nan_column: int | None, temperature: float) -> None:
        """Settings of `summary`, known after the prompt's forward. nan_column: as in `BlockLogits`."""

    def padded_nodes(self, num_nodes: int) -> int:
        """The number of nodes, padding included, that a tree takes in the block."""
        return num_nodes

    def forward(self, block: Block, cache: LookaheadCache) -> Tensor:
        """One forward over a block. Its keys and values are written after the committed slots of `cache`.

        Returns logits [B, R, V].
        """
        adapter = self.adapter
        block = adapter.begin_block(block.to(self.call.device), cache)
        return adapter.ordinary_forward(block, cache, self.model, self.masks(block))

    def masks(self, block: Block) -> Any:
        """The masks that `model` takes for a block."""
        return self.adapter.masks(block)

    def close(self, num_generated: int) -> None:
        """The call has succeeded: record what was refused, give shared buffers back. num_generated: its tokens."""


def can_capture(device: torch.device) -> bool:
    """Whether forwards on a device can be captured in graphs."""
    return device.type in GRAPH_DEVICES


def may_use_cuda(call: BlockCall) -> bool:
    config = call.config
    asked = config.compile or config.cuda_graph or config.use_flash
    is_automatic = None in (config.cuda_graph, config.use_flash)
    return bool(asked) or (is_automatic and can_capture(call.adapter.model.device))


def may_use_cpu(call: BlockCall) -> bool:
    return call.config.pack is True or call.adapter.model.device.type == "cpu"


# The paths, asked in order: whether one may serve a call at all, and where it is. Importing it may take time.
PATHS: list[tuple[Callable[[BlockCall], bool], str]] = [
    (may_use_cuda, "lade.forward.cuda.path:CudaPath"),
    (may_use_cpu, "lade.forward.cpu.path:CpuPath"),
]


def path_for(call: BlockCall) -> ForwardPath:
    """The first path that serves a call; the ordinary one where none does."""
    for may_serve, name in PATHS:
        found: ForwardPath | None = resolve_name(name).serving(call) if may_serve(call) else None
        if found is not None:
            return found
    return ForwardPath(call)
