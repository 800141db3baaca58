"""The token tree: candidates after the root, with common prefixes merged.

Trees are small and change shape in every step, so they live on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The guesses of each row. Parents precede their children; the root is not a node.

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
        """n: nodes of the largest row, to which the others are padded."""
        return max(map(len, self.tokens))

    def padded_depths(self, size: int) -> list[list[int]]:
        """Distance from the root (1 for its children), [B, size]; 0 for padding. size: at least n."""
        rows = []
        for parents in self.parents:
            depths: list[int] = []
            for parent in parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            rows.append(depths + [0] * (size - len(depths)))
        return rows

    def visibility(self, num_nodes: int) -> npt.NDArray[np.bool_]:
        """Tree attention: each node attends to the root, its ancestors and itself; padding to the root and itself.

        num_nodes: at least n. The root is index 0. Returns [B, 1 + num_nodes, 1 + num_nodes] bool, query by key.
        """
        visible = np.tile(np.eye(1 + num_nodes, dtype=np.bool_), (len(self.parents), 1, 1))
        visible[:, :, 0] = True
        for row, parents in zip(visible, self.parents, strict=True):
            for node, parent in enumerate(parents, 1):
                row[node] |= row[parent + 1]
        return visible

    def part(self, nodes: list[list[int]]) -> TokenTree:
        """A subtree. nodes: per row, increasing node indices that include all their ancestors."""
        tokens, parents = [], []
        for row, kept in enumerate(nodes):
            place = {node: index for index, node in enumerate(kept)} | {-1: -1}
            tokens.append([self.tokens[row][node] for node in kept])
            parents.append([place[self.parents[row][node]] for node in kept])
        return TokenTree(tokens, parents)

    def first_paths(self, is_finished: list[bool]) -> TokenTree:
        """The path of first children of each row, all as long as the shortest; none for a finished row."""
        rows = zip(self.parents, is_finished, strict=True)
        paths = [[] if has_ended else first_path(parents) for parents, has_ended in rows]
        unfinished = (len(path) for path, has_ended in zip(paths, is_finished, strict=True) if not has_ended)
        length = min(unfinished, default=0)
        return self.part([path[:length] for path in paths])

    def with_chains(self, rows: list[int], token: int, length: int) -> TokenTree:
        """Replace the given rows' trees by a chain of `length` copies of `token`."""
        tokens, parents = list(self.tokens), list(self.parents)
        for row in rows:
            tokens[row], parents[row] = [token] * length, list(range(-1, length - 1))
        return TokenTree(tokens, parents)


def first_path(parents: Sequence[int]) -> list[int]:
    """The nodes on the path of first children from the root. parents: of a row's nodes, as in `TokenTree`."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def merge_candidates(candidates: Sequence[Sequence[Sequence[int]]]) -> TokenTree:
    """Merge the common prefixes of candidates into a tree.

    candidates: per row, sequences of ids. Nodes keep the candidates' order: those of the first are nodes 0, 1, ..
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


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The part of a block that one rank computes. nodes and owners are empty where one process computes all of it.

    tree:    its part of the tree.
    nodes:   per row, the indices of these nodes in the whole tree.
    columns: its range of the window's columns, None for all.
    owners:  per row and node of the whole tree, the rank whose result counts.
    """

    tree: TokenTree
    nodes: list[list[int]]
    columns: tuple[int, int] | None
    owners: list[list[int]]
