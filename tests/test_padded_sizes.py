"""Where blocks are padded to a few sizes, these are what the policy chooses from, and the smallest is a step without
guesses."""

import pytest
from support import prompt, tiny_llama
from support.static_shapes import both, check

import lade
from lade.block_size.costs import SIZES, FixedCosts, LiveCosts
from lade.block_size.policy import choose_size, compared_sizes
from lade.block_size.tables import NUM_ROUNDS, ROUND, Calibration
from lade.config import current_config
from lade.drafting.tree import TreeDrafter
from lade.forward.runner import BlockRunner
from lade.models import adapter_for

pytestmark = pytest.mark.usefixtures("static_blocks")
PADDED = (8, 16, 32, 64)


def told(costs, seconds, rounds=6):
    for _ in range(rounds):
        for size in costs.sizes:
            costs.observe(size, seconds[size])
    return costs


def test_live_costs_offer_what_blocks_are_padded_to():
    costs = LiveCosts(sizes=PADDED)
    assert costs.offers(64).sizes == (8,)  # what is tried grows step by step
    told(costs, {8: 1.0, 16: 1.1, 32: 1.3, 64: 4.0})
    assert costs.offers(64).sizes == PADDED
    assert costs.offers(48).sizes == (8, 16, 32, 48)
    assert costs.plain_cost == costs.cost(8)
    assert set(LiveCosts().offers(64).sizes) <= set(SIZES)


@pytest.mark.parametrize("num_guesses", [0, 1, 6, 7, 8, 14, 15, 20, 31, 63])
def test_a_tree_that_fills_no_size_goes_into_the_next(num_guesses):
    """Guesses that are sure: all of them are worth it where a larger block costs hardly more."""
    costs = told(LiveCosts(sizes=PADDED), {8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03})
    expected = [float(k) for k in range(num_guesses + 1)]
    found = choose_size(costs, expected, 1, 64)
    assert found == next(size for size in PADDED if size > num_guesses)
    assert max(size for size, _, _ in compared_sizes(costs.offers(64), expected, 1)) == found


def test_a_larger_size_that_does_not_pay_is_not_chosen():
    costs = told(LiveCosts(sizes=PADDED), {8: 1.0, 16: 3.0, 32: 6.0, 64: 12.0})
    assert choose_size(costs, [0.4 * k for k in range(12)], 1, 64) == 8


def test_nothing_but_one_size():
    costs = LiveCosts(sizes=(4,))
    told(costs, {4: 1.0})
    assert costs.offers(4).sizes == (4,)
    assert choose_size(costs, [0.0, 0.5], 1, 4) == 4


def test_a_table_is_measured_beside_the_smallest_size():
    """A step without guesses never has one token there: without this no table would ever come of it."""
    calibration = Calibration(1, plain_size=8)
    for _ in range(NUM_ROUNDS * len(ROUND)):
        size = calibration.next_size(64)
        assert size in PADDED
        is_last = calibration.add(size, {8: 1.0, 16: 1.1, 32: 1.5, 64: 3.0}[size], 0.01)
    assert is_last
    costs = calibration.table().costs
    assert costs[1] == costs[8] == 1.0
    assert costs[8] < costs[16] < costs[32] < costs[64]
    assert Calibration(1, plain_size=8).table() is None


def test_fixed_costs_schedule_padded_sizes():
    costs = FixedCosts("name", "cpu", 1, PADDED)
    assert {costs.scheduled_size(64)} <= set(PADDED)
    assert FixedCosts(None, "cpu", 1, PADDED).offers(64).sizes == PADDED


def test_what_a_call_offers(graphs, monkeypatch):
    """Captured trees have no other sizes than those that are offered; elsewhere nothing is padded."""
    model, offered = tiny_llama(num_hidden_layers=1), []

    def spy(self, *args, original=TreeDrafter._grow_all):
        offered.append(self.costs.at(args[-1]).offers(self.max_block).sizes)
        return original(self, *args)

    monkeypatch.setattr(TreeDrafter, "_grow_all", spy)
    lade.config_lade(MODE="tree", ADAPTIVE=1, MAX_BLOCK=32)
    stats = check(*both(model, prompt(), do_sample=False), compiled=False, captured=True)
    assert set(stats.block_tokens) <= {8, 16, 32}
    assert {size for sizes in offered for size in sizes} <= {8, 16, 32}
    offered.clear()
    lade.config_lade(CUDA_GRAPH=0)
    check(*both(model, prompt(), do_sample=False), compiled=False)
    assert not {size for sizes in offered for size in sizes} <= {8, 16, 32}


def test_the_window_is_not_padded():
    runner = BlockRunner(adapter_for(tiny_llama()))
    lade.config_lade(MODE="lookahead")
    runner.use_static_shapes(current_config(), None, captures=False)
    assert runner.block_sizes(current_config()) is None
    lade.config_lade(MODE="tree", MAX_BLOCK=4)
    assert runner.block_sizes(current_config()) == (4,)
