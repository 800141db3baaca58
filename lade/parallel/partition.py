"""Partition of a block over K ranks: the window by columns, the token tree by its leaves.

Every rank computes the same partition from the same tree, without communication.
"""

from __future__ import annotations

from lade.block.token_tree import BlockPart, TokenTree


def column_range(window_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First column of a rank and the one after its last; (0, 0) for none.

    Earlier ranks, which need fewer cells of level 0, get the remainder.
    """
    first, end = -(-window_size * rank // num_ranks), -(-window_size * (rank + 1) // num_ranks)
    return (first, end) if first < end else (0, 0)


def num_window_tokens(ngram_size: int, columns: tuple[int, int]) -> int:
    """Block tokens for a range of columns, the root included; level 0 is needed from its first column on."""
    first, end = columns
    return max(end, 1) + (ngram_size - 2) * (end - first)


def split(tree: TokenTree, window_shape: tuple[int, int], num_ranks: int) -> list[BlockPart]:
    """Each rank's part of a block. window_shape: (N, W).

    Columns are divided evenly. Leaves come with all their ancestors, so that every path is whole on one rank; they
    balance what the columns left uneven.
    """
    ngram_size, window_size = window_shape
    columns = [column_range(window_size, rank, num_ranks) for rank in range(num_ranks)]
    costs = [num_window_tokens(ngram_size, own) for own in columns]
    rows = [split_row(parents, costs) for parents in tree.parents]  # per row and rank
    owners = [owners_of(parts, len(parents)) for parts, parents in zip(rows, tree.parents, strict=True)]
    shares = []
    for rank, own in enumerate(columns):
        nodes = [parts[rank] for parts in rows]
        shares.append(BlockPart(tree.part(nodes), nodes, own, owners))
    return shares


def split_row(parents: list[int], costs: list[int]) -> list[list[int]]:
    """The nodes of one row's tree for each rank, in order; shared ancestors are in several parts.

    costs: tokens that each rank already has. The fewer, the more nodes it gets.
    """
    if not parents:
        return [[] for _ in costs]
    limits = fill(costs, len(parents))
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([node] if parent < 0 else [*paths[parent], node])
    inner = set(parents)
    parts: list[set[int]] = [set() for _ in costs]
    seen: set[int] = set()
    rank, limit = 0, limits[0]
    for path in sorted(path for path in paths if path[-1] not in inner):  # leaves with common ancestors are adjacent
        middle = len(seen) + len(set(path) - seen) / 2
        seen.update(path)
        while middle > limit and rank < len(costs) - 1:
            rank += 1
            limit += limits[rank]
        parts[rank].update(path)
    return [sorted(part) for part in parts]


def fill(costs: list[int], amount: int) -> list[float]:
    """Divide `amount` among ranks so that the largest sum of cost and share is minimal (water-filling)."""
    level = 0.0
    for count, cost in enumerate(sorted(costs)):
        if count and level <= cost:  # the cheaper ranks take everything
            break
        level = (amount + sum(sorted(costs)[: count + 1])) / (count + 1)
    return [max(0.0, level - cost) for cost in costs]


def owners_of(parts: list[list[int]], num_nodes: int) -> list[int]:
    """Per node, the first rank that has it, which then has all its ancestors, too."""
    owners = [-1] * num_nodes
    for rank in reversed(range(len(parts))):
        for node in parts[rank]:
            owners[node] = rank
    return owners
