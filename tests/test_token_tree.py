"""Merging candidates, against prefixes collected from Python lists."""

import random

import pytest

from lade.block.token_tree import TokenTree, merge_candidates


def paths_of(tree: TokenTree, row: int) -> list[list[int]]:
    """Tokens from the root's child to each node, in node order."""
    paths: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens[row], tree.parents[row], strict=True)):
        assert parent < node
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def distinct_prefixes(candidates: list[list[int]]) -> list[list[int]]:
    """In the order of the candidates."""
    found: list[list[int]] = []
    for candidate in candidates:
        for depth in range(1, len(candidate) + 1):
            if candidate[:depth] not in found:
                found.append(candidate[:depth])
    return found


def random_rows(seed: int) -> list[list[list[int]]]:
    rng = random.Random(seed)
    depth = rng.randint(1, 6)
    return [
        [[rng.randrange(2) for _ in range(depth)] for _ in range(rng.randint(0, 7))] for _ in range(rng.randint(1, 4))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_merged_candidates(seed):
    """A node for each distinct prefix, which sees the root, its ancestors and itself."""
    rows = random_rows(seed)
    tree = merge_candidates(rows)
    assert tree.num_nodes == max(len(distinct_prefixes(row)) for row in rows)
    size = 1 + tree.num_nodes + seed % 3
    visible, depths = tree.visibility(size - 1), tree.padded_depths(size - 1)
    assert visible.shape == (len(rows), size, size)
    for row, candidates in enumerate(rows):
        prefixes = distinct_prefixes(candidates)
        assert paths_of(tree, row) == prefixes
        assert depths[row] == [len(path) for path in prefixes] + [0] * (size - 1 - len(prefixes))
        paths = [[], *prefixes]
        for query in range(size):
            for key in range(size):
                is_path = query < len(paths) and key < len(paths)
                expected = paths[query][: len(paths[key])] == paths[key] if is_path else key in (0, query)
                assert visible[row, query, key] == expected


def test_chains():
    assert TokenTree.empty(3).visibility(0).tolist() == [[[True]]] * 3
    tree = merge_candidates([[[5, 6]], [[7], [8]], []]).with_chains([1, 2], token=0, length=3)
    assert tree.tokens == [[5, 6], [0, 0, 0], [0, 0, 0]]
    assert tree.parents == [[-1, 0], [-1, 0, 1], [-1, 0, 1]]
    assert merge_candidates([[[5]]]).with_chains([0], 9, 0).num_nodes == 0
