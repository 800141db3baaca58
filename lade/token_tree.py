"""The verification branch: candidates behind the root with shared prefixes merged into a tree. Floor 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTree:
    """n guessed tokens per row; parents come before their children.

    tokens:  [B, n] ids; -1 pads a row that has fewer nodes than the widest.
    parents: [B, n] index of the node's parent, -1 for a child of the root.
    depths:  [B, n] distance from the root, 1 for its children; 0 for padding.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str) -> TokenTree:
        nothing = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(nothing, nothing, nothing)

    @property
    def num_nodes(self) -> int:
        """n, padding included."""
        return self.tokens.shape[1]

    def with_chains(self, rows: list[int], token: int, length: int) -> TokenTree:
        """The same tree, but in some rows a single chain of one token: what plain generate() goes on with there."""
        if not rows:
            return self
        missing = max(0, length - self.num_nodes)
        tokens, parents, depths = (
            torch.nn.functional.pad(values, (0, missing), value=empty)
            for values, empty in ((self.tokens, -1), (self.parents, -1), (self.depths, 0))
        )
        steps = torch.arange(length, device=tokens.device)
        for values, chain, empty in ((tokens, token, -1), (parents, steps - 1, -1), (depths, steps + 1, 0)):
            values[rows] = empty
            values[rows, :length] = chain
        return TokenTree(tokens, parents, depths)

    def visibility(self, max_depth: int) -> Tensor:
        """Which node sees which: itself and its ancestors. Returns [B, n, n], query by key, bool."""
        nodes = torch.arange(self.num_nodes, device=self.tokens.device)
        reach = (self.parents[..., None] == nodes).float()  # [B, n, n] one step up
        reach.diagonal(dim1=1, dim2=2).fill_(1)
        # Squaring doubles the number of steps; entries count paths and stay far below float32's range.
        for _ in range((max_depth - 1).bit_length()):
            reach = reach @ reach
        return reach > 0


def merge_candidates(tails: Tensor) -> TokenTree:
    """Merge candidates that begin alike, so that each distinct token is paid for once.

    tails: [B, G, D] ids, -1 for absent candidates. Nodes keep the order of the candidates: the first candidate's tokens
    are nodes 0 .. D-1. Returns a tree of at most G*D nodes.
    """
    batch_size, num_tails, depth = tails.shape
    if num_tails == 0:
        return TokenTree.empty(batch_size, tails.device)
    alike = (tails[:, :, None] == tails[:, None]).cumprod(dim=3)  # [B, G, G, D] same tokens up to depth d
    owner = alike.argmax(dim=2)  # [B, G, D] the first candidate that begins so
    tail_index = torch.arange(num_tails, device=tails.device)[:, None]
    is_node = ((owner == tail_index) & (tails >= 0)).flatten(1)  # [B, G*D]

    counts = is_node.sum(1)
    num_nodes = int(counts.max())
    node_at = is_node.cumsum(1) - 1  # [B, G*D] index of a cell's node
    cells = (
        (~is_node).to(torch.uint8).argsort(dim=1, stable=True)[:, :num_nodes]
    )  # [B, n] cells that are nodes, in order

    depth_at = torch.arange(depth, device=tails.device)
    parent_cell = (owner * depth + depth_at).flatten(1).roll(1, dims=1)  # of the cell one depth up
    parent_at = node_at.gather(1, parent_cell).masked_fill((depth_at == 0).repeat(num_tails), -1)
    is_padding = torch.arange(num_nodes, device=tails.device) >= counts[:, None]  # [B, n]
    return TokenTree(
        tokens=tails.flatten(1).gather(1, cells).masked_fill(is_padding, -1),
        parents=parent_at.gather(1, cells).masked_fill(is_padding, -1),
        depths=(cells % depth + 1).masked_fill(is_padding, 0),
    )
