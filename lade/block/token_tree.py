"""The verification branch: candidates behind the root with shared prefixes merged into a tree.

Trees are small and change shape with every step, so they live on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The guesses of each row. Parents come before their children; the root itself is not a node.

    tokens:  per row, the ids of its nodes.
    parents: per row, the index of each node's parent, -1 for a child of the root.
    """

    tokens: list[list[int]]
    parents: list[list[int]]

    @classmethod
    def empty(cls, batch_size: int) -> TokenTree:
        return cls([[] for _ in range(batch_size)], [[] for _ in range(batch_size)])

    @property
    def num_nodes(self) -> int:
        """n, the nodes of the widest row; the other rows are padded to it."""
        return max(map(len, self.tokens))

    def padded_tokens(self, size: int | None = None) -> list[list[int]]:
        """Ids of all rows, [B, size]; padding is token 0. size: n or more, None for n."""
        size = self.num_nodes if size is None else size
        return [row + [0] * (size - len(row)) for row in self.tokens]

    def padded_depths(self, size: int | None = None) -> list[list[int]]:
        """Distance from the root, 1 for its children, [B, size]; 0 for padding."""
        size = self.num_nodes if size is None else size
        rows = []
        for parents in self.parents:
            depths: list[int] = []
            for parent in parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            rows.append(depths + [0] * (size - len(depths)))
        return rows

    def visibility(self, size: int | None = None) -> npt.NDArray[np.bool_]:
        """Who sees whom, the root in front: each node the root, its ancestors and itself; padding the root and itself.

        Returns [B, 1 + size, 1 + size], query by key.
        """
        size = 1 + (self.num_nodes if size is None else size)
        num_bytes = -(-size // 8)
        packed = bytearray()  # a bit per key: an integer holds what a node sees, and its children see that too
        for parents in self.parents:
            seen = [1]
            for node, parent in enumerate(parents, 1):
                seen.append(seen[parent + 1] | 1 << node)
            seen += [1 | 1 << node for node in range(len(seen), size)]
            for bits in seen:
                packed += bits.to_bytes(num_bytes, "little")
        rows = np.frombuffer(packed, np.uint8).reshape(len(self.parents), size, num_bytes)
        return np.unpackbits(rows, axis=2, count=size, bitorder="little").view(np.bool_)

    def part(self, nodes: list[list[int]]) -> TokenTree:
        """Some of the nodes. nodes: per row, increasing, with all their ancestors."""
        tokens, parents = [], []
        for row, kept in enumerate(nodes):
            place = {node: index for index, node in enumerate(kept)} | {-1: -1}
            tokens.append([self.tokens[row][node] for node in kept])
            parents.append([place[self.parents[row][node]] for node in kept])
        return TokenTree(tokens, parents)

    def with_chains(self, rows: list[int], token: int, length: int) -> TokenTree:
        """The same tree, but in some rows a single chain of one token: what plain generate() goes on with there."""
        tokens, parents = list(self.tokens), list(self.parents)
        for row in rows:
            tokens[row], parents[row] = [token] * length, list(range(-1, length - 1))
        return TokenTree(tokens, parents)


def merge_candidates(candidates: Sequence[Sequence[Sequence[int]]]) -> TokenTree:
    """Merge candidates that begin alike, so that each distinct token is paid for once.

    candidates: per row, sequences of ids. Nodes keep the order of the candidates: the first one's tokens are nodes 0, 1, ..
    """
    tree = TokenTree.empty(len(candidates))
    for row, tokens, parents in zip(candidates, tree.tokens, tree.parents, strict=True):
        node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for candidate in row:
            parent = -1
            for token in candidate:
                node = node_of.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                parent = node
    return tree
