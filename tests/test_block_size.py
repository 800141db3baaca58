"""What a step costs and which block is worth it; that lade never goes on guessing in vain, nor stays small when it
pays."""

import sys
import threading

import pytest
import torch
from support import VOCAB, generate_plain, prompt, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList

import lade
from lade import decoding
from lade.block_size.costs import (
    EXPLORE_EVERY,
    OBSERVATIONS,
    RENEW_EVERY,
    SAME_COST,
    SIZES,
    STALE_AFTER,
    LiveCosts,
    StepCostsByLength,
    saved_costs,
)
from lade.block_size.policy import BlockMode, BlockModePolicy, EarlyStop, choose_size
from lade.drafting import tree as recycling
from lade.drafting.growth import Grower
from lade.drafting.tree import TreeDrafter
from lade.forward.runner import BlockRunner
from lade.verification import draws as noise


def measured(curve, sizes=SIZES[:14]):
    costs = LiveCosts()
    for size in sizes:
        for _ in range(3):
            costs.observe(size, curve(size))
    return costs


def early_stop(costs, limit=64):
    return EarlyStop(costs.offers(limit), 1.0, 0.0, spare=int(costs.may_explore_next))


def test_lines_between_and_a_slope_beyond():
    costs = measured(lambda q: float(q), sizes=(2, 4, 16))
    assert [costs.seconds(q) for q in (2, 4, 10, 16)] == pytest.approx([2, 4, 10, 16])
    assert 16 < costs.seconds(32) < 20
    assert 1.9 < costs.seconds(1) < 2


def test_the_first_step_of_a_size_does_not_count():
    costs = LiveCosts()
    costs.observe(8, 1000.0)
    assert costs.largest_known == 0
    costs.observe(8, 2.0)
    assert costs.seconds(8) == 2.0


def test_a_step_that_took_no_time_does_not_count():
    costs = measured(lambda q: float(q), sizes=(1, 2))
    for seconds in (0.0, -1.0) * 9:
        costs.observe(1, seconds)
        costs.observe(4, seconds)
    assert (costs.seconds(1), costs.largest_known) == (1, 2)


def test_a_machine_that_gets_slower_and_faster_changes_no_price():
    """Each size is used at another speed than the others, for a while; only steps next to each other tell what is
    dearer."""
    costs = LiveCosts()
    for turn in range(40):
        size = SIZES[turn % 7]
        for _ in range(8):
            costs.observe(size, (1 + 0.1 * size) * 2.0 ** (turn % 5))
        costs.observe(1, 1.1 * 2.0 ** (turn % 5))
    found = [costs.cost(size) / costs.cost(1) for size in SIZES[:7]]
    assert found == pytest.approx([(1 + 0.1 * size) / 1.1 for size in SIZES[:7]])
    assert costs.seconds(1) == pytest.approx(1.1 * 2.0 ** (39 % 5))  # at the speed of the latest steps


def test_a_busy_moment_does_not_stick():
    costs = measured(lambda q: float(q), sizes=(1, 2, 4, 8, 4, 8))
    expected = [costs.cost(size) for size in (1, 2, 4, 8)]
    for size, seconds in ((8, 9000.0), (4, 4.0), (8, 8.0), (4, 4000.0)):
        costs.observe(size, seconds)
    assert [costs.cost(size) for size in (1, 2, 4, 8)] == pytest.approx(expected)


def test_one_odd_step_counts_once():
    """It is compared with the steps before it and with those behind: two comparisons against the one that there was."""
    costs = LiveCosts()
    for size in (1, 2, 4, *(1, 1), *(2, 2), *(4, 4), *(1, 1)):  # the first three do not count
        costs.observe(size, float(size))
    costs.observe(2, 20.0)
    costs.observe(1, 1.0)
    assert [costs.cost(size) / costs.cost(1) for size in (1, 2, 4)] == pytest.approx([1, 2, 4])


def test_other_texts_prices_are_taken_in_proportion():
    """Where a longer text makes large blocks dearer, sizes that it has not tried are dearer, too."""
    shorter = measured(lambda q: 1 + 0.1 * q)
    longer = LiveCosts(shorter)
    for size in (1, 8, 1, 8, 1, 8):
        longer.observe(size, 2 + 0.4 * size)
    assert longer.cost(8) / longer.cost(1) == pytest.approx(5.2 / 2.4)
    found = [longer.cost(size) for size in SIZES[:12]]
    assert found == sorted(found)


def test_a_new_call_is_not_compared_with_the_last_one():
    model = torch.nn.Linear(1, 1)
    for seconds in (1.0, 500.0, 1.0):  # in between others had the machine
        costs = StepCostsByLength(model, ("cpu", 1)).at(100)
        for size in (1, 1, 4, 4, 8):
            costs.observe(size, seconds * (1 + 0.1 * size))
    assert [costs.cost(size) / costs.cost(1) for size in (4, 8)] == pytest.approx([1.4 / 1.1, 1.8 / 1.1])
    assert costs.seconds(8) == pytest.approx(1.8)


def test_the_order_of_sizes_is_kept():
    """A larger block does all that a smaller one does: what seems cheaper is worth the mean of both."""
    costs = measured({1: 2.0, 2: 3.0, 4: 2.5, 8: 5.0}.__getitem__, sizes=(1, 2, 4, 8))
    assert [costs.cost(q) / costs.cost(1) for q in (1, 2, 4, 8)] == pytest.approx([1, 1.375, 1.375, 2.5])


def test_sizes_are_tried_from_small_to_large():
    costs, sizes = LiveCosts(), []
    expected = [0.9 * k for k in range(65)]
    for _ in range(20):
        sizes.append(choose_size(costs, expected, 1, 64))
        costs.observe(sizes[-1], 1.0)
    assert sizes[0] == 1
    assert max(sizes) == 64
    assert all(after <= 2 * max(sizes[: index + 1]) for index, after in enumerate(sizes[1:]))


@pytest.mark.parametrize(
    ("slope", "chance", "best"), [(0.01, 0.5, 64), (0.2, 0.5, 64), (0.2, 0.1, 1), (0.0, 0.0, 1), (1.0, 0.9, 1)]
)
def test_the_best_rate_wins(slope, chance, best):
    costs = measured(lambda q: 1 + slope * (q - 1))
    assert choose_size(costs, [chance * k for k in range(64)], 1, 64) == best
    assert choose_size(costs, [chance * k for k in range(64)], 1, 10) == min(best, 10)


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.05, 0.3])
@pytest.mark.parametrize(("first", "fall"), [(0.9, 0.5), (0.9, 1.0), (0.3, 0.7), (0.05, 1.0), (0.01, 0.5)])
def test_a_tree_grows_until_no_larger_block_can_pay(slope, first, fall):
    """The choice is the one that a full tree would lead to, and fewer guesses are looked for."""
    costs = measured(lambda q: 1 + slope * (q - 1))
    expected = [0.0]
    for k in range(1, 64):
        expected.append(expected[-1] + first / k**fall)
    stop, num_nodes = early_stop(costs), 0
    while num_nodes < 63 and not stop.update(num_nodes, expected[num_nodes], first / (num_nodes + 1) ** fall):
        num_nodes += 1
    best = choose_size(costs, expected, 1, 64)
    assert choose_size(costs, expected[: num_nodes + 1], 1, 64) == best
    assert num_nodes == 63 or num_nodes < max(8, 4 * best)


def test_a_tree_grows_one_size_further_where_that_is_to_be_tried():
    costs = measured(lambda q: 1 + 0.3 * (q - 1))
    for _ in range(EXPLORE_EVERY - 1):
        assert early_stop(costs).update(0, 0.0, 0.05)
        choose_size(costs, [0.0], 1, 64)
    stop = early_stop(costs)
    assert [stop.update(0, 0.0, 0.05), stop.update(1, 0.05, 0.05)] == [False, True]


def test_prices_that_hardly_change_are_compared_now_and_then():
    costs, offers = measured(lambda q: float(q)), []
    for turn in range(4 * RENEW_EVERY):
        costs.observe(1 + turn % 2, 1.0 + turn % 2 + 1e-5 * turn)
        offers.append(costs.offers(64))
    assert len(set(map(id, offers))) in (4, 5)
    for turn in range(4 * OBSERVATIONS):
        costs.observe(1 + turn % 2, 1.0 + 2 * (turn % 2))
        found = costs.offers(64).costs
        assert found[:2] == pytest.approx([costs.cost(1), costs.cost(2)], rel=SAME_COST)
    assert found[1] / found[0] == pytest.approx(3.0)


def test_guesses_get_rarer_and_the_block_ends_there():
    costs = measured(lambda q: 1 + 0.05 * (q - 1))
    expected = [0.0]
    for k in range(63):
        expected.append(expected[-1] + 0.5 * 0.8**k)
    size = choose_size(costs, expected, 1, 64)
    assert 4 <= size <= 12
    assert 0 < costs.offers(64).least_chance <= 0.05


def test_other_sizes_are_measured_now_and_then():
    """The neighbours of the best one, and the plain step, with which everything is compared."""
    costs, sizes = measured(lambda q: 1 + 0.05 * (q - 1)), []
    expected = [min(4.0, 0.9 * k) for k in range(64)]
    for _ in range(8 * STALE_AFTER):
        sizes.append(choose_size(costs, expected, 1, 64))
        costs.observe(sizes[-1], 1 + 0.05 * (sizes[-1] - 1))
    usual = max(sizes, key=sizes.count)
    others = {1, *(SIZES[SIZES.index(usual) + step] for step in (-1, 1))}
    assert set(sizes) == {usual, *others}
    for other in others:  # as often as needed, and no more
        assert 3 <= sizes.count(other) <= 8


def test_a_size_that_is_used_anyway_is_not_measured_apart():
    costs = measured(lambda q: 1 + 0.05 * (q - 1))
    easy, hard = [min(4.0, 0.9 * k) for k in range(64)], [0.0] * 64
    for turn in range(8 * STALE_AFTER):
        size = choose_size(costs, easy if turn % 2 else hard, 1, 64)
        costs.observe(size, 1 + 0.05 * (size - 1))
        assert turn % 2 == 0 or size > 1


def test_longer_texts_start_from_the_prices_of_shorter_ones():
    model = torch.nn.Linear(1, 1)
    costs = StepCostsByLength(model, ("cpu", 1))
    for size in (1, 4, 16):
        for _ in range(2):
            costs.at(100).observe(size, float(size))
    assert costs.at(250) is costs.at(100)
    longer = StepCostsByLength(model, ("cpu", 1)).at(5000)
    assert longer.cost(4) / longer.cost(1) == pytest.approx(4)
    longer.observe(4, 8.0)
    longer.observe(4, 8.0)  # everything takes twice as long here
    assert longer.seconds(16) == pytest.approx(32)
    for size in (1, 4, 1, 4):
        longer.observe(size, 1.0 + size)  # and grows otherwise
    assert longer.cost(4) / longer.cost(1) == pytest.approx(2.5)
    assert costs.at(100).cost(4) / costs.at(100).cost(1) == pytest.approx(4)
    assert StepCostsByLength(model, ("cpu", 2)).at(100).largest_known == 0


@pytest.mark.parametrize(("slope", "num_accepted", "part"), [(0.01, 1.0, BlockMode.WINDOW), (0.01, 0, BlockMode.PLAIN)])
def test_mode_policy(slope, num_accepted, part):
    costs, pace = LiveCosts(), BlockModePolicy()
    sizes = {BlockMode.PLAIN: 1, BlockMode.CANDIDATES: 29, BlockMode.WINDOW: 56}
    parts = []
    for _ in range(64):
        parts.append(pace.choose(costs, sizes))
        costs.observe(sizes[parts[-1]], 1 + slope * sizes[parts[-1]])
        # Without the window there is little to accept.
        pace.learn(parts[-1], sizes[parts[-1]], num_accepted * {BlockMode.CANDIDATES: 0.3}.get(parts[-1], 1.0))
    assert parts[:3] == [BlockMode.PLAIN] * 3
    assert parts[32:].count(part) >= 29


def test_one_slow_step_does_not_end_guessing():
    """Without the sizes in between being tried again nobody would learn that it was chance."""
    costs = LiveCosts()
    for _ in range(3):
        costs.observe(1, 1.0)
    for _ in range(2):
        costs.observe(2, 5.0)
    expected = [0.9 * k for k in range(65)]
    sizes = []
    for _ in range(200):
        grown = [total for total in expected if total <= 0.9 * 64]
        sizes.append(choose_size(costs, grown, 1, 64))
        costs.observe(sizes[-1], 1 + 0.01 * sizes[-1])
    assert costs.offers(64).least_chance <= 0.05
    assert sizes[-10:].count(64) >= 9


def test_trying_is_paid_for_from_a_small_share_of_all_time():
    costs, tokens = LiveCosts(), 0.0
    for _ in range(2000):
        size = choose_size(costs, [0.99 * k for k in range(65)], 1, 64)
        tokens += 1 + 0.99 * (size - 1)
        costs.observe(size, float(size))
    assert costs._spent <= 1.05 * tokens  # a plain call would have taken as many seconds as tokens


def test_threads_share_prices():
    costs, errors = LiveCosts(), []

    def use():
        try:
            for step in range(300):
                costs.observe(SIZES[step % 12], 1.0 + step % 7)
                choose_size(costs, [0.1 * k for k in range(40)], 1, 40)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


@pytest.mark.parametrize("mode", ["auto", "lookahead"])
def test_a_clock_that_stands_still(mode, lade_on, monkeypatch):
    """Programs are tested with such clocks: nothing is known of costs then, and the text is the same."""
    model, inputs = tiny_llama(), prompt(12)
    expected = generate_plain(model, inputs, max_new_tokens=40)
    for module in (decoding, noise):
        monkeypatch.setattr(module, "perf_counter", lambda: 5.0)
    lade.config_lade(MODE=mode, ADAPTIVE=1)
    assert torch.equal(model.generate(**inputs, max_new_tokens=40), expected)
    assert lade.last_stats().fallback_reason is None


class Choose(LogitsProcessor):
    """Whatever the model says, the text goes on as told."""

    def __init__(self, token_at):
        self.token_at = token_at

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -100.0)
        forced[:, self.token_at(input_ids.shape[1])] = 0.0
        return forced


@pytest.fixture
def slope(request):
    """What each further token of a step costs, in plain steps; by default as on a CPU with wide registers."""
    return getattr(request, "param", 0.03)


@pytest.fixture
def priced(monkeypatch, lade_on, slope):
    """Steps have set costs, whatever this machine is doing."""
    observe = LiveCosts.observe
    monkeypatch.setattr(LiveCosts, "observe", lambda self, q, *times: observe(self, q, 1 + slope * (q - 1)))
    lade.config_lade(ADAPTIVE=1)


MODES = [{"MODE": "auto"}, {"MODE": "lookahead", "LEVEL": 5, "WINDOW_SIZE": 7, "GUESS_SET_SIZE": 7}]


@pytest.mark.parametrize("settings", MODES, ids=lambda settings: settings["MODE"])
def test_guesses_that_never_hit_are_given_up(priced, settings):
    model, inputs = tiny_llama(), prompt(12)
    lade.config_lade(**settings)
    order = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    processors = LogitsProcessorList([Choose(order.__getitem__)])
    expected = generate_plain(model, inputs, max_new_tokens=160, logits_processor=processors)
    assert torch.equal(model.generate(**inputs, max_new_tokens=160, logits_processor=processors), expected)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert sum(stats.block_tokens[:32]) > 32  # it did try
    later = stats.block_tokens[32 if settings["MODE"] == "auto" else 80 :]
    assert later.count(1) >= (0.9 if settings["MODE"] == "auto" else 0.8) * len(later)


@pytest.mark.parametrize("settings", MODES, ids=lambda settings: settings["MODE"])
def test_guesses_that_always_hit_make_the_block_grow(priced, settings):
    model, inputs = tiny_llama(), prompt(12)
    lade.config_lade(**settings)
    processors = LogitsProcessorList([Choose(lambda length: 3 + length % 7)])
    expected = generate_plain(model, inputs, max_new_tokens=160, logits_processor=processors)
    assert torch.equal(model.generate(**inputs, max_new_tokens=160, logits_processor=processors), expected)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    longest = 4 if settings["MODE"] == "lookahead" else 30
    assert max(stats.accepted_lengths) >= longest
    assert stats.steps < 65


@pytest.mark.parametrize("slope", [1.0], indirect=True)
@pytest.mark.parametrize("settings", MODES, ids=lambda settings: settings["MODE"])
def test_a_dear_machine_gets_plain_steps(priced, settings):
    """A mixture of experts, say, where each further token costs as much as the first."""
    model, inputs = tiny_llama(), prompt(12)
    lade.config_lade(**settings)
    model.generate(**inputs, max_new_tokens=100)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.plain_step_share > 0.8
    later = stats.block_tokens[0 if settings["MODE"] == "auto" else 10 :]
    assert sum(later) <= 1.2 * 100  # a plain call would have cost 100


@pytest.mark.parametrize("slope", [1.0], indirect=True)
def test_where_no_block_pays_no_tree_is_grown(priced, monkeypatch):
    """What may follow is looked up behind the root alone, not behind guesses that will not be laid out."""
    looked_up, inner = [], Grower._expand

    def look(self, nodes, *args):
        looked_up.extend(nodes)
        inner(self, nodes, *args)

    monkeypatch.setattr(Grower, "_expand", look)
    model, steps = tiny_llama(), {}
    for adaptive in (1, 0):  # the last is the control
        looked_up.clear()
        lade.config_lade(MODE="tree", ADAPTIVE=adaptive, SHARE=0)
        model.generate(**prompt(12), max_new_tokens=60)
        steps[adaptive] = len(looked_up) / lade.last_stats().steps
    assert steps[1] < 2
    assert steps[0] > 4


@pytest.fixture
def clock(monkeypatch, lade_on):
    """Searching for guesses takes half a second, a forward one, a draw a quarter, all else no time.

    Returns a list with an entry per search.
    """
    now, searched = [0.0], []
    forward, search, exponential = BlockRunner.forward, TreeDrafter._grow_all, torch.Tensor.exponential_

    def slow_exponential(*args, **named):
        now[0] += 0.25
        return exponential(*args, **named)

    def slow_forward(self, *args, **named):
        now[0] += 1.0
        return forward(self, *args, **named)

    def slow_search(self, *args):
        now[0] += 0.5
        searched.append(args)
        search(self, *args)

    monkeypatch.setattr(BlockRunner, "forward", slow_forward)
    monkeypatch.setattr(TreeDrafter, "_grow_all", slow_search)
    monkeypatch.setattr(torch.Tensor, "exponential_", slow_exponential)
    monkeypatch.setattr(recycling, "LONG_MATCH", 100)  # nothing ends a rest early
    for module in (decoding, noise):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    lade.config_lade(MODE="tree", ADAPTIVE=1, SHARE=0)
    return searched


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_search_for_guesses_is_no_part_of_a_price(do_sample, clock):
    """Nor are sampling's draws, which the search looks at: they are drawn once, for verification."""
    model = tiny_llama()
    model.generate(**prompt(12), max_new_tokens=60, do_sample=do_sample)
    stats = lade.last_stats()
    assert clock
    assert stats.draft_seconds == 0.5 * len(clock)
    num_draws = stats.verify_seconds / 0.25
    assert 58 <= num_draws <= 60 + recycling.MAX_DEPTH if do_sample else num_draws == 0
    (costs,) = saved_costs(model).values()
    assert costs
    assert list(costs.values()) == pytest.approx([1.0] * len(costs))


def test_guessing_rests_where_the_search_costs_more_than_it_brings(clock):
    """Not where it brings more: the other text repeats itself."""
    order = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    shares = []
    for token_at in (order.__getitem__, lambda length: 3 + length % 7):
        clock.clear()
        processors = LogitsProcessorList([Choose(token_at)])
        tiny_llama().generate(**prompt(12), max_new_tokens=160, logits_processor=processors)
        shares.append(len(clock) / lade.last_stats().steps)
    assert 0 < shares[0] < 0.1
    assert shares[1] > 0.5


def test_embeddings_alone_are_guessed_behind(priced):
    """Their text begins empty while the cache does not: costs are looked up where they were noted."""
    model = tiny_llama()
    lade.config_lade(MODE="auto")
    embeds = model.get_input_embeddings()(prompt(300)["input_ids"]).detach()
    processors = LogitsProcessorList([Choose(lambda length: 3 + length % 7)])
    arguments = {"max_new_tokens": 100, "logits_processor": processors}
    expected = generate_plain(model, {"inputs_embeds": embeds}, **arguments)
    assert torch.equal(model.generate(inputs_embeds=embeds, **arguments), expected)
    assert lade.last_stats().steps < 60


def test_lookahead_is_tried_again_when_the_text_becomes_easy(priced):
    """And without SHARE nothing of a call is left for the next."""
    model, inputs = tiny_llama(), prompt(12)
    lade.config_lade(LEVEL=5, WINDOW_SIZE=2, GUESS_SET_SIZE=4)
    order = torch.randint(3, VOCAB, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    hard = LogitsProcessorList([Choose(order.__getitem__)])
    easy = LogitsProcessorList([Choose(lambda length: 3 + length % 7)])
    steps = {}
    for share in (0, 1):
        lade.config_lade(SHARE=share)
        model.generate(**inputs, max_new_tokens=400, logits_processor=hard)
        model.generate(**inputs, max_new_tokens=100, logits_processor=easy)
        steps[share] = lade.last_stats().steps
    fresh = tiny_llama()
    fresh.generate(**inputs, max_new_tokens=100, logits_processor=easy)
    assert steps[1] < 80
    assert steps[0] <= lade.last_stats().steps + 3
