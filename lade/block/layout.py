"""Block layout: the order of the query tokens, their positions, their visibility, and which rows need logits.

Order of a block: the root, the tree's nodes, the rest of the window. With the tree right after the root, a fully
accepted first candidate already has its keys/values in their final slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.common.transfer import HOST, to_device


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """Layout of q tokens: the root, num_nodes tree nodes (padded if needed), and the window or a range of its columns.

    offsets:    [q] position relative to the root's; 0 for tree nodes, whose depth is added later.
    visible:    [q, q] bool, query by key; the square of root and tree is filled in per tree.
    logit_rows: [1 + num_nodes + W] rows whose logits are needed: the root, the nodes, the window's last level.
    num_tokens: q. has_window: whether the block has window cells besides the root.
    cells:      the window cells in the block, as indices into `window_cells`; None for all.
    """

    offsets: Tensor
    visible: Tensor
    logit_rows: Tensor
    num_nodes: int
    num_tokens: int
    has_window: bool
    cells: Tensor | None = None

    def tokens(self, roots: list[int], tree: TokenTree, window_cells: Tensor) -> Tensor:
        """roots: [B]. window_cells: [B, (N-1)*W - 1]. Returns [B, q] ids, on the host if there is no window."""
        room = self.num_nodes
        rows = [[root, *nodes, *[0] * (room - len(nodes))] for root, nodes in zip(roots, tree.tokens, strict=True)]
        tokens = torch.tensor(rows, device=HOST)
        if not self.has_window:
            return tokens
        tokens = to_device(tokens, window_cells.device)
        return torch.cat([tokens, window_cells if self.cells is None else window_cells[:, self.cells]], dim=1)

    def split(self, logits: Tensor, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """The logits after the root and the tree's nodes, and those after the window's last level, without padding.

        logits: [B, R, V], in the order of `logit_rows`.
        """
        return logits[:, : 1 + tree.num_nodes], logits[:, 1 + self.num_nodes :]

    def offsets_and_visibility(self, tree: TokenTree) -> tuple[Tensor, Tensor]:
        """Position offsets from each row's root, [B, q], and visibility, [B, q, q] bool, query by key.

        On the host if there is no window.
        """
        num_rows, nodes, device = len(tree.tokens), slice(1 + self.num_nodes), self.offsets.device
        depths = [[0, *row] for row in tree.padded_depths(self.num_nodes)]  # [B, 1 + n]
        tree_offsets = torch.tensor(depths, dtype=torch.long, device=HOST)
        tree_visible = torch.from_numpy(tree.visibility(self.num_nodes))  # [B, 1 + n, 1 + n]
        if not self.has_window:
            return tree_offsets, tree_visible
        tree_offsets, tree_visible = to_device(tree_offsets, device), to_device(tree_visible, device)
        offsets, visible = self.offsets.repeat(num_rows, 1), self.visible.repeat(num_rows, 1, 1)
        offsets[:, nodes], visible[:, nodes, nodes] = tree_offsets, tree_visible
        return offsets, visible


@lru_cache(maxsize=256)
def block_layout(
    ngram_size: int, window_size: int, num_nodes: int, device: torch.device, columns: tuple[int, int] | None = None
) -> BlockLayout:
    """The layout for (N, W) and a tree of `num_nodes` nodes, cached per shape and device.

    columns: (first, end) of the window columns in the block; None for all. The root, and the cells of level 0 before
    `first`, which later columns attend to, are always part of the block.
    """
    first, end = columns or (0, window_size)
    cells = torch.arange((ngram_size - 1) * window_size, device=device)
    if columns is not None:
        level, column = cells // window_size, cells % window_size
        cells = cells[(cells == 0) | (column < end) & ((level == 0) | (column >= first))]
    level, column = cells // window_size, cells % window_size  # [C], C = (N-1)*W

    num_tokens = num_nodes + len(cells)
    # Block index of each window cell: the root first, the others after the tree.
    place = torch.where(cells == 0, 0, torch.arange(len(cells), device=device) + num_nodes)
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=device)
    visible[place[:, None], place] = window_visibility(level, column)
    offsets = torch.zeros(num_tokens, dtype=torch.long, device=device)
    offsets[place] = level + column
    is_last = (level == ngram_size - 2) & (column >= first) & (column < end)
    logit_rows = torch.cat([torch.arange(1 + num_nodes, device=device), place[is_last]])
    has_window = num_tokens > 1 + num_nodes
    own_cells = None if columns is None else cells[1:] - 1
    return BlockLayout(offsets, visible, logit_rows, num_nodes, num_tokens, has_window, own_cells)


def window_visibility(level: Tensor, column: Tensor) -> Tensor:
    """Visibility among window cells. level, column: [C]. Returns [C, C] bool, query by key."""
    level_q, column_q = level[:, None], column[:, None]
    first_level = (level == 0) & (column <= column_q)  # plain causal along level 0
    own_column = (level > 0) & (level <= level_q) & (column == column_q)
    return first_level | own_column
