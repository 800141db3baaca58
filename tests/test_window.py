"""The Jacobi window: cells, n-grams, and both ways to roll."""

import torch

from lade.drafting.window import JacobiWindow


def window(levels: int, columns: int) -> JacobiWindow:
    cells = torch.tensor([[[10 * level + column for column in range(columns)] for level in range(levels)]])
    return JacobiWindow(cells)


def test_ngrams_are_columns():
    w = window(3, 2)
    assert w.ngrams(torch.tensor([[90, 91]])).tolist() == [[0, 10, 20, 90], [1, 11, 21, 91]]
    assert w.cells().tolist() == [[1, 10, 11, 20, 21]]


def test_roll_by_levels():
    w = window(3, 2)
    for step in range(3):
        assert not w.is_ready
        w.roll(torch.tensor([[90 + step, 95 + step]]))
    assert w.is_ready
    assert w.levels.tolist() == [[[90, 95], [91, 96], [92, 97]]]


def test_start_takes_tokens_of_the_rows_own_prompt():
    state = torch.get_rng_state()
    w = JacobiWindow.start([torch.tensor([5, 6]), torch.tensor([7, 8, 9, 4])], ngram_size=4, window_size=50)
    assert torch.equal(state, torch.get_rng_state())
    assert set(w.levels[0].flatten().tolist()) == {5, 6}
    assert set(w.levels[1].flatten().tolist()) == {7, 8, 9, 4}
    w.set_root(torch.tensor([1, 2]))
    assert w.levels[:, 0, 0].tolist() == [1, 2]
