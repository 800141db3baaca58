"""Merging candidates, against a trie built from Python lists."""

import random

import pytest
import torch

from lade.token_tree import TokenTree, merge_candidates


def paths_of(tree: TokenTree, row: int) -> list[list[int]]:
    """Tokens from the root's child to each node, in node order; padding left out."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[list[int]] = []
    for node, token in enumerate(tokens):
        assert parents[node] < node
        if token >= 0:
            paths.append([*(paths[parents[node]] if parents[node] >= 0 else []), token])
    return paths


def expected_paths(tails: list[list[int]]) -> list[list[int]]:
    """Distinct prefixes in the order of the candidates."""
    found: list[list[int]] = []
    for tail in tails:
        for depth in range(1, len(tail) + 1):
            if -1 not in tail and tail[:depth] not in found:
                found.append(tail[:depth])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_merging(seed):
    rng = random.Random(seed)
    batch_size, num_tails, depth = rng.randint(1, 4), rng.randint(1, 7), rng.randint(1, 5)
    rows = []
    for _ in range(batch_size):
        tails = [[rng.randrange(2) for _ in range(depth)] for _ in range(num_tails)]
        absent = rng.randint(0, num_tails)
        rows.append(tails[: num_tails - absent] + [[-1] * depth] * absent)
    tree = merge_candidates(torch.tensor(rows))
    widest = max(len(expected_paths(tails)) for tails in rows)
    assert tree.num_nodes == widest
    for row, tails in enumerate(rows):
        paths = expected_paths(tails)
        assert paths_of(tree, row) == paths
        padding = [0] * (widest - len(paths))
        assert tree.depths[row].tolist() == [len(path) for path in paths] + padding
        assert (tree.tokens[row, len(paths) :] == -1).all()


@pytest.mark.parametrize("seed", range(10))
def test_visibility_is_ancestors_and_self(seed):
    rng = random.Random(seed)
    depth = rng.randint(1, 9)
    tails = torch.tensor([[[rng.randrange(2) for _ in range(depth)] for _ in range(5)] for _ in range(2)])
    tree = merge_candidates(tails)
    visible = tree.visibility(depth)
    for row in range(2):
        parents = tree.parents[row].tolist()
        for node in range(tree.num_nodes):
            ancestors, up = {node}, parents[node]
            while up >= 0:
                ancestors.add(up)
                up = parents[up]
            assert {k for k in range(tree.num_nodes) if visible[row, node, k]} == ancestors


def test_no_candidates():
    assert merge_candidates(torch.empty(2, 0, 3, dtype=torch.long)).num_nodes == 0
    assert merge_candidates(torch.full((2, 4, 3), -1)).num_nodes == 0
    assert TokenTree.empty(3, "cpu").visibility(4).shape == (3, 0, 0)
