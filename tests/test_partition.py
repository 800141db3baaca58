"""How a block is split over ranks: everything is somewhere, paths lie whole in one share, and shares are even."""

import random

import pytest
import torch

from lade.block.layout import block_layout
from lade.block.token_tree import merge_candidates
from lade.parallel.partition import column_range, fill, split

CPU = torch.device("cpu")


def random_tree(ngram_size, num_guesses, batch_size=1, num_values=4, seed=0):
    rng = random.Random(seed)
    tails = [[rng.randrange(num_values) for _ in range(ngram_size - 1)] for _ in range(num_guesses)]
    return merge_candidates([rng.sample(tails, num_guesses) for _ in range(batch_size)])


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("window_size", [1, 7])
def test_columns_are_dealt_out_evenly(window_size, num_ranks):
    ranges = [column_range(window_size, rank, num_ranks) for rank in range(num_ranks)]
    columns = [column for first, end in ranges for column in range(first, end)]
    assert columns == list(range(window_size))
    counts = [end - first for first, end in ranges]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_ranks", [1, 3, 16])
@pytest.mark.parametrize("num_guesses", [0, 1, 15])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_paths_lie_whole_in_one_share(num_ranks, num_guesses, batch_size):
    tree = random_tree(5, num_guesses, batch_size)
    shares = split(tree, (5, 7), num_ranks)
    assert len(shares) == num_ranks
    for row in range(batch_size):
        parents, tokens = tree.parents[row], tree.tokens[row]
        assert sorted({node for share in shares for node in share.nodes[row]}) == list(range(len(parents)))
        for share in shares:
            nodes = share.nodes[row]
            assert share.tree.tokens[row] == [tokens[node] for node in nodes]
            own = share.tree.parents[row]
            assert [nodes[parent] if parent >= 0 else -1 for parent in own] == [parents[node] for node in nodes]
        for node, owner in enumerate(shares[0].owners[row]):
            while node >= 0:
                assert node in shares[owner].nodes[row]
                node = parents[node]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("ngram_size", "window_size", "num_guesses"), [(5, 15, 15), (5, 7, 7), (4, 10, 20)])
def test_blocks_are_even(ngram_size, window_size, num_guesses, num_ranks):
    tree = random_tree(ngram_size, num_guesses, num_values=1000)  # no shared prefixes
    assert tree.num_nodes == (ngram_size - 1) * num_guesses
    sizes = [
        block_layout(ngram_size, window_size, share.tree.num_nodes, CPU, share.columns).num_tokens
        for share in split(tree, (ngram_size, window_size), num_ranks)
    ]
    assert max(sizes) - min(sizes) <= 2 * (ngram_size - 1)  # a path is not split
    # What is computed more than once: the root and the window's first level.
    assert sum(sizes) <= (ngram_size - 1) * (window_size + num_guesses) + (num_ranks - 1) * (window_size + 1)


def test_fill_levels_out():
    assert fill([0, 0], 10) == [5, 5]
    assert fill([4, 0, 100], 6) == [1, 5, 0]
    assert fill([9, 0], 3) == [0, 3]
    assert sum(fill([3, 1, 4, 1, 5], 7)) == pytest.approx(7)
