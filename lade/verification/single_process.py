"""Operations that differ if several processes share each step; here for one process alone.

`lade.parallel` derives from it. It is imported when DIST_WORKERS asks for more than one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.token_tree import BlockPart, TokenTree
from lade.common.request import Request
from lade.config import LookaheadConfig
from lade.stats import GenerationStats
from lade.verification.logits import BlockLogits
from lade.verification.selection import Accepted, Selection

PARALLEL = "lade.parallel"


class SingleProcess:
    """A call in one process, which computes whole blocks."""

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config

    def agree(self, reason: str | None, request: Request) -> str | None:
        """Why the request falls back to the original path, or None; the same on all ranks. reason: this rank's own."""
        return reason

    def selection(self, kind: type[Selection], request: Request) -> Selection:
        """Create the selection of this kind."""
        return kind(request)

    def partition(self, tree: TokenTree, window_shape: tuple[int, int]) -> BlockPart:
        """The part of the block that this rank computes. window_shape: (N, W)."""
        return BlockPart(tree, nodes=[], columns=None, owners=[])

    def exchange(
        self, part: BlockPart, block_logits: BlockLogits, choices: Tensor | None
    ) -> tuple[BlockLogits, Tensor | None]:
        """Combine all ranks' results: from those of this rank's part of a block, those of the whole block.

        choices: the model's choices after the window's last level, [B, W] for the whole block; None without a window.
        """
        return block_logits, choices

    def commit(self, cache: LookaheadCache, part: BlockPart, accepted: Accepted) -> None:
        """Keep the keys/values of each row's root and accepted nodes."""
        cache.commit([None if path is None else [node + 1 for node in path] for path in accepted])

    def end(self, do_sample: bool, device: torch.device) -> None:
        """Called at the end of the call."""


@contextmanager
def process_group_for(config: LookaheadConfig, device: torch.device, stats: GenerationStats) -> Iterator[SingleProcess]:
    """The processes that take part in a call."""
    if config.num_workers == 1:
        yield SingleProcess(config)
        return
    with resolve_name(f"{PARALLEL}.group:open_group")(config, device, stats) as group:
        yield group


def is_leader(config: LookaheadConfig) -> bool:
    """Whether this process streams and prints."""
    return config.num_workers == 1 or bool(resolve_name(f"{PARALLEL}.communicator:is_leader")(config))
