"""The likeliest tree: what a search of all guesses finds, from rows whose probabilities are rounded to bins."""

import heapq

import numpy as np
import pytest
from support import VOCAB

from lade.drafting import growth as growth_module
from lade.drafting.acceptance import RowPrior
from lade.drafting.growth import Grower
from lade.drafting.memory import Memory
from lade.drafting.top_k_table import BIN_BITS, BIN_RATIO, NUM_BINS, PROBABILITIES, ROW_LENGTH, packed, without


def test_a_grade_is_within_its_ratio():
    probabilities = np.geomspace(1e-6, 1.0, 4000, dtype=np.float32).reshape(-1, 1)
    rows = packed(np.full(probabilities.shape, 7), probabilities)
    found = PROBABILITIES[rows[:, :1] & NUM_BINS - 1]
    assert np.abs(np.log(found / probabilities)).max() <= np.log(BIN_RATIO) / 2 + 1e-4
    assert (rows >> BIN_BITS == 7).all()
    with np.errstate(all="raise"):
        assert (packed(np.array([[3, 4]]), np.array([[np.nan, 0.0]])) & NUM_BINS - 1 == 0).all()


def test_a_row_without_a_token():
    row = packed(np.arange(8)[None], np.full((1, 8), 0.1))[0]
    assert {*(without(row, 3) >> BIN_BITS).tolist()} == {0, 1, 2, 4, 5, 6, 7}
    assert len(without(row, 3)) == ROW_LENGTH
    assert without(packed(np.array([[3]]), np.array([[1.0]]))[0], 3) is None


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("max_depth", [2, 32])
def test_trees_are_the_likeliest_of_their_size(size, max_depth, monkeypatch):
    """As a heap of all guesses finds them, each row looked at by itself."""
    numbers = np.random.default_rng(size)
    memory, prior = Memory(), RowPrior("token", 0.8, 1.3)
    rows = np.stack([numbers.permutation(VOCAB)[:ROW_LENGTH] for _ in range(VOCAB)])
    probabilities = -np.sort(-numbers.dirichlet(np.full(ROW_LENGTH, 0.3), VOCAB))  # the likeliest first
    table = packed(rows, probabilities)
    memory.table.put(list(range(VOCAB)), table)
    monkeypatch.setattr(growth_module, "LIKELY_CHILD", 1.0)
    monkeypatch.setattr(growth_module, "TOKEN", prior)
    grown = Grower(memory, [5, 6], None, None, ()).grow(max_depth, size, 0.0)
    frontier, expected = [(-1.0, 6, 0)], []
    while len(expected) <= size:
        negative, token, depth = heapq.heappop(frontier)
        expected.append(-negative)
        if depth < max_depth:
            for both in table[token]:
                chance = 0.8 * float(PROBABILITIES[both & NUM_BINS - 1]) ** 1.3
                heapq.heappush(frontier, (negative * chance, int(both >> BIN_BITS), depth + 1))
    assert grown.chances == pytest.approx(expected[1:], rel=1e-3)
    assert all(parent < node for node, parent in enumerate(grown.parents))
    assert max(grown.depths) <= max_depth
