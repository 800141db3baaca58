"""What a step costs: assumed for the hardware, corrected by the times of steps where no text can depend on it, stored
for later processes."""

import json
import logging
import os
import random
import sys
import time

import pytest
import torch
from support import beside, compare, forked, forked_twice, generate_plain, in_threads, prompt, tiny_llama
from transformers import GenerationMixin

import lade
from lade import decoding
from lade.common import cache_folder
from lade.common.cache_folder import load_table, store_table, stored_files
from lade.drafting import step_costs
from lade.drafting.block_policy import choose_size, compared_sizes
from lade.drafting.memory import memory_for
from lade.drafting.step_costs import PLAIN_EVERY, SETTLED, SIZES, CostTable, StepCosts, assumed_costs
from lade.models.base import ModelAdapter
from lade.verification import draws as noise

TREE, WINDOW = (
    {"MODE": "tree", "MAX_BLOCK": 16},
    {"MODE": "lookahead", "LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 3},
)
FLAT = dict.fromkeys(SIZES, 1.0)
PADDED = (8, 16, 32, 64)


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """What is assumed depends on the processor; the tests' is always the same."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wild_clock(monkeypatch, lade_on):
    """Every reading of the clock is some random time later than the last; returns a function that seeds it."""
    now, numbers = [0.0], random.Random(0)

    def read():
        now[0] += numbers.expovariate(1.0)
        return now[0]

    for module in (decoding, noise):
        monkeypatch.setattr(module, "perf_counter", read)
    lade.config_lade(ADAPTIVE=1)
    return numbers.seed


def told(table, curve, sizes, rounds=6):
    for _ in range(rounds):
        for size in sizes:
            table.observe(size, curve(size))
    return table


# The table of one kind of step.


def test_costs_follow_the_times_of_adjacent_steps():
    """Whatever the machine's speed, which changes here by half every ten steps."""
    table = CostTable(FLAT)
    for step in range(120):
        size, speed = (1, 4, 1, 16)[step % 4], 1.5 ** (step // 10 % 3)
        table.observe(size, speed * (1 + 0.1 * (size - 1)))
    assert [table.measured(size) for size in (1, 4, 16)] == pytest.approx([1.0, 1.3, 2.5], rel=0.05)
    assert table.assumed(16) == 1.0


def test_sizes_in_between_are_corrected_in_proportion():
    """What was never compared is as much dearer than assumed as its neighbours are."""
    table = told(CostTable({size: 1 + 0.01 * (size - 1) for size in SIZES}), lambda q: 1.0 if q == 1 else 3.0, (1, 16))
    assert table.measured(1) == 1.0
    assert 1.5 < table.measured(8) < 3.0
    assert table.measured(16) == pytest.approx(3.0)
    assert table.measured(64) == pytest.approx(3.0 * 1.63 / 1.15)


def test_a_busy_moment_changes_nothing():
    table = told(CostTable(FLAT), lambda q: 1 + 0.1 * q, (1, 8, 1, 8))
    expected = dict(table.costs)
    for size, seconds in ((1, 1.1), (8, 9000.0), (1, 1.1)):
        table.observe(size, seconds)
    assert table.costs == pytest.approx(expected)
    first = CostTable(FLAT)
    first.observe(1, 1.0)
    first.observe(8, 9000.0)  # nor does the first comparison alone
    assert first.measured(8) == 1.0


def test_costs_never_fall_with_the_size():
    table = told(CostTable(FLAT), {1: 2.0, 4: 3.0, 16: 2.5}.__getitem__, (1, 4, 1, 16))
    assert list(table.costs.values()) == sorted(table.costs.values())


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_that_took_no_time_does_not_count(seconds):
    table = told(CostTable(FLAT), lambda q: float(q), (1, 2))
    expected = dict(table.costs)
    for size in (1, 2, 1, 2):
        table.observe(size, seconds)
    assert table.costs == expected


def test_a_plain_step_is_wanted_until_enough_were_compared_and_then_seldom():
    table, wanted = CostTable(FLAT), []
    for _ in range(3 * PLAIN_EVERY):
        wanted.append(table.wants_plain_step)
        size = 1 if wanted[-1] else 8
        table.observe(size, 1.0 + size / 10)
    assert 1 <= sum(wanted[: 2 * SETTLED + 1]) <= SETTLED
    assert 1 <= sum(wanted[2 * SETTLED + 1 :]) <= 3
    assert table.is_settled


# The costs of a call.


held = []  # models, which costs do not keep alive


def costs_of(model=None, **arguments):
    held.append(model or tiny_llama())
    return StepCosts(held[-1], **{"follows_clock": True} | arguments)


def test_offers_follow_costs():
    costs = costs_of()
    for size in (1, 8) * 6:
        costs.observe(size, 1.0 + 3.0 * (size > 1))
    found = costs.offers(64)
    assert found.sizes[:3] == (1, 2, 4)
    assert found.costs[found.sizes.index(8)] == pytest.approx(4.0)
    assert 0 < found.least_probability <= step_costs.MAX_LEAST_PROBABILITY
    assert costs.offers(5).sizes == (1, 2, 4, 5)


def test_where_the_clock_decides_nothing_costs_stay():
    model = tiny_llama(torch.bfloat16)
    costs = costs_of(model, follows_clock=False)
    before = costs.offers(64).costs
    for size in (1, 8) * 40:
        costs.observe(size, float(size))
    assert costs.offers(64).costs == before
    assert not costs.wants_plain_step
    followed = costs_of(model)
    assert followed.cost(8) > costs.cost(8)  # the control: the same table


def test_a_size_never_compared_is_hoped_to_cost_less_while_trials_are_cheap(monkeypatch):
    monkeypatch.setattr(step_costs, "SMALL_BYTES", 0)
    costs = costs_of(tiny_llama(torch.float32))
    assert costs.offers(16).costs[-1] < costs.cost(16)
    for size in (1, 16):
        costs.observe(size, 1.0 + 9.0 * (size > 1))
    assert costs.offers(16).costs[1] == costs.cost(2)  # the trial has cost nine steps
    fixed = costs_of(tiny_llama(torch.float32), follows_clock=False)
    assert fixed.offers(16).costs[-1] == fixed.cost(16)


def test_trials_take_a_small_share_of_all_time(monkeypatch):
    """Each further token costs as much as the first, and all guesses are hoped for."""
    monkeypatch.setattr(step_costs, "SMALL_BYTES", 0)
    costs, tokens, seconds = costs_of(tiny_llama(torch.float32)), 0.0, 0.0
    for _ in range(1000):
        size = 1 if costs.wants_plain_step else choose_size(costs.offers(64), [0.99 * k for k in range(65)], 1)
        tokens, seconds = tokens + 1 + 0.99 * (size - 1), seconds + size
        costs.observe(size, float(size))
    assert seconds <= 1.05 * tokens


def test_other_contexts_and_kinds_have_tables_of_their_own():
    costs = costs_of()
    for size in (1, 8) * 9:
        costs.observe(size, float(size))
    short = costs.cost(8)
    assert short == pytest.approx(8.0)
    costs.at((), 250)
    assert costs.cost(8) == short
    costs.at((), 5000)
    assert costs.cost(8) == pytest.approx(short)  # begun from the shorter one's
    for size in (1, 8) * 9:
        costs.observe(size, 1.0 + size)
    assert costs.cost(8) == pytest.approx(4.5)
    costs.at((), 100)
    assert costs.cost(8) == short
    costs.at(("packed",), 100)
    assert costs.cost(8) < 2
    assert costs_of(batch_size=2).cost(8) < 4


def test_what_is_assumed(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_llama(dtype)
        alone, eight = assumed_costs(model, False, 1), assumed_costs(model, False, 8)
        assert alone[1] == eight[1] == 1.0
        assert eight[8] > alone[8]  # 64 tokens beside 8, not 8 beside 1
        for table in (alone, eight):
            assert list(table.values()) == sorted(table.values())
    model.to("meta")
    assert assumed_costs(model, False, 1)[64] < 1.2


def test_what_is_assumed_of_the_processor(monkeypatch):
    """Half precision, in which no clock corrects it, takes instructions for its dtype."""
    monkeypatch.setattr(step_costs, "SMALL_BYTES", 0)

    def are_cheap():
        kinds = torch.float32, torch.bfloat16, torch.float16
        return [assumed_costs(tiny_llama(dtype), False, 1)[16] < 3 for dtype in kinds]

    assert are_cheap() == [True, True, False]
    single = tiny_llama(torch.float32)
    assert assumed_costs(single, True, 1)[16] < assumed_costs(single, False, 1)[16]  # packed
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # Skylake to Ice Lake
    assert are_cheap() == [True, False, False]
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert are_cheap() == [True, False, False]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert are_cheap() == [False, False, False]


def test_threads_share_tables():
    costs = costs_of()

    def use(_):
        for step in range(300):
            costs.observe(SIZES[step % 12], 1.0 + step % 7)
            choose_size(costs.offers(40), [0.1 * k for k in range(40)], 1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(use, *range(4))
    finally:
        sys.setswitchinterval(interval)


# Where blocks are padded to a few sizes, these are what the policy chooses from.


def padded(seconds):
    costs = costs_of(sizes=PADDED)
    for size in PADDED * 6:
        costs.observe(size, seconds[size])
    return costs


@pytest.mark.parametrize("num_guesses", [0, 1, 6, 7, 8, 14, 15, 20, 31, 63])
def test_a_tree_that_fills_no_size_goes_into_the_next(num_guesses):
    """Guesses that are sure: all of them are worth it where a larger block costs hardly more."""
    costs = padded({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03})
    assert costs.cost(8) == 1.0
    expected = [float(k) for k in range(num_guesses + 1)]
    found = choose_size(costs.offers(64), expected, 1)
    assert found == next(size for size in PADDED if size > num_guesses)
    assert max(size for size, _, _ in compared_sizes(costs.offers(64), expected, 1)) == found


def test_a_larger_size_that_does_not_pay_is_not_chosen():
    costs = padded({8: 1.0, 16: 3.0, 32: 6.0, 64: 12.0})
    assert choose_size(costs.offers(64), [0.4 * k for k in range(12)], 1) == 8
    one = costs_of(sizes=(4,))
    assert choose_size(one.offers(4), [0.0, 0.5], 1) == 4


# Files.


def test_a_stored_table_is_found(cache):
    model = tiny_llama()
    assert load_table(model, "x") is None
    store_table(model, "x", {1: 1.0, 8: 1.23456})
    store_table(model, "y", {8: 1.0, 16: 1.5})
    assert load_table(model, "x") == {1: 1.0, 8: 1.2346}
    store_table(model, "x", {1: 1.0, 8: 3.0})  # the first one stays
    assert load_table(model, "x")[8] == 1.2346
    store_table(model, "x", {1: 1.0, 8: 3.0}, replaces=True)
    assert load_table(model, "x")[8] == 3.0
    assert load_table(model, "y") == {8: 1.0, 16: 1.5}
    assert load_table(tiny_llama(torch.float32), "x") is None
    (path,) = stored_files()
    assert [path] == list(cache.iterdir())


def test_a_file_is_for_all_who_share_the_folder(cache):
    before = os.umask(0o077)
    try:
        store_table(tiny_llama(), "x", {1: 1.0, 8: 1.1})
    finally:
        os.umask(before)
    (path,) = stored_files()
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"format": 99},
        lambda content: content | {"tables": {"x": {"1": 1.0, "8": 0.5}}},
        lambda content: content | {"tables": {"x": {"1": 1.0, "8": float("nan")}}},
        lambda content: content | {"tables": {"x": {"1": 1.0, "8": 10**400}}},
        lambda content: content | {"tables": {"x": {"1": 2.0, "8": 3.0}}},
        lambda content: content | {"tables": {"x": [1.0, 2.0]}},
        lambda content: [content],
    ],
)
def test_a_damaged_file_is_said_and_replaced(cache, change, caplog):
    model = tiny_llama()
    store_table(model, "x", {1: 1.0, 8: 1.1})
    (path,) = stored_files()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with caplog.at_level(logging.WARNING):
        assert load_table(model, "x") is None
    assert str(path) in caplog.text
    store_table(model, "x", {1: 1.0, 8: 1.2})
    assert load_table(model, "x")[8] == 1.2


def test_files_are_bounded_by_number_and_age(cache, monkeypatch):
    cache.mkdir()
    monkeypatch.setattr(cache_folder, "MAX_FILES", 3)
    for number in range(6):
        path = cache / f"step-costs-{number}.json"
        path.write_text("{}")
        os.utime(path, (time.time() - 100 + number,) * 2)
    os.utime(cache / "step-costs-5.json", (time.time() - 2 * cache_folder.MAX_AGE,) * 2)
    (cache / "another.json").write_text("{}")
    store_table(tiny_llama(), "x", {1: 1.0, 8: 1.1})
    kept = {path.name for path in cache.iterdir()}
    assert kept >= {"another.json", "step-costs-3.json", "step-costs-4.json"}
    assert len(stored_files()) == 3


def test_where_nothing_can_be_stored(tmp_path, monkeypatch, lade_on):
    (tmp_path / "file").write_text("")
    lade.config_lade(ADAPTIVE=1, **TREE)
    for place in ("0", "", str(tmp_path / "file" / "below")):
        monkeypatch.setenv("LADE_CACHE", place)
        model = tiny_llama()
        compare(model, prompt(12), max_new_tokens=2 * PLAIN_EVERY)
        assert not stored_files()


# Calls.


def script(dtype=torch.bfloat16, num_calls=2, length=100, **arguments):
    """A program of a few calls, with a model and so a state of its own. Returns its texts and the sizes of its
    blocks."""
    model, texts, blocks = tiny_llama(dtype), [], []
    torch.manual_seed(0)
    for seed in range(num_calls):
        texts.append(model.generate(**prompt(12, seed=seed), max_new_tokens=length, **arguments).tolist())
        assert lade.last_stats().fallback_reason is None
        blocks.append(lade.last_stats().block_tokens)
    return texts, blocks


@pytest.mark.parametrize(
    ("settings", "arguments"), [(TREE, {"do_sample": True, "temperature": 0.8}), (WINDOW, {})], ids=["tree", "window"]
)
def test_half_precision_gives_the_same_text_in_every_run(wild_clock, cache, settings, arguments):
    """From the first one on, in which nothing is stored yet."""
    lade.config_lade(**settings)
    runs = []
    for seed in range(3):
        wild_clock(seed)
        runs.append(script(**arguments))
    assert runs[0] == runs[1] == runs[2]
    assert any(size > 1 for sizes in runs[0][1] for size in sizes)  # lookahead ran
    assert not stored_files()


def test_exact_calls_are_the_control(wild_clock, cache, monkeypatch):
    """There sizes follow the clock, in float32, where no text depends on them, and here in half precision too."""
    lade.config_lade(**TREE)
    exact, rounding = [], []
    for seed in range(3):
        wild_clock(seed)
        exact.append(script(torch.float32))
        with monkeypatch.context() as patch:
            patch.setattr(ModelAdapter, "is_exact", True)
            wild_clock(seed)
            rounding.append(script())
    assert all(texts == exact[0][0] for texts, _ in exact)
    for runs in (exact, rounding):
        assert len({str(blocks) for _, blocks in runs}) > 1
    assert stored_files()


@pytest.mark.parametrize("way", ["setting", "torch"])
def test_a_stored_table_of_half_precision_is_used_unless_that_is_ruled_out(way, wild_clock, monkeypatch):
    lade.config_lade(**TREE)
    monkeypatch.setattr(step_costs, "load_table", lambda *_: {1: 1.0, 2: 50.0, 64: 100.0})
    assert max(map(max, script()[1])) == 1
    if way == "setting":
        lade.config_lade(DETERMINISTIC=1)
    else:
        torch.use_deterministic_algorithms(True)
    try:
        assert max(map(max, script()[1])) > 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_forwards_that_keep_other_processes_company_are_not_measured(wild_clock, cache, monkeypatch):
    """With synced_gpus a rank whose rows have ended waits for the slowest one: what its steps take says nothing about
    them."""
    monkeypatch.setattr(
        GenerationMixin, "_has_unfinished_sequences", lambda self, is_finished, synced_gpus, device: not is_finished
    )
    lade.config_lade(**TREE)
    script(torch.float32, length=200, synced_gpus=True)
    assert not stored_files()
    script(torch.float32, length=200)  # the control
    assert stored_files()


def test_half_precision_does_not_meet_what_was_learned_in_blocks_that_followed_a_clock(wild_clock, cache):
    """A call under autocast after exact ones of the same model: its text, blocks and memory are those of a model never
    used before."""
    lade.config_lade(DETERMINISTIC=1, **TREE)

    def half_precision(model):
        with torch.autocast("cpu", torch.bfloat16):
            text = model.generate(**prompt(12), max_new_tokens=60).tolist()
        return text, lade.last_stats().block_tokens

    runs = [half_precision(tiny_llama(torch.float32))]
    for seed in range(2):
        wild_clock(seed)
        model = tiny_llama(torch.float32)
        model.generate(**prompt(12), max_new_tokens=60)
        assert lade.last_stats().fallback_reason is None
        assert len(memory_for(model, True, True))
        assert not len(memory_for(model, True, False))
        runs.append(half_precision(model))
        assert len(memory_for(model, True, False))
    assert runs[0] == runs[1] == runs[2]
    assert max(runs[0][1]) > 1


def test_autocast_and_mixed_weights_are_no_exact_arithmetic(lade_on):
    model = tiny_llama(torch.float32)
    assert ModelAdapter(model).is_exact
    with torch.autocast("cpu", torch.bfloat16):
        assert not ModelAdapter(model).is_exact
    torch.set_float32_matmul_precision("medium")
    try:
        assert not ModelAdapter(model).is_exact
    finally:
        torch.set_float32_matmul_precision("highest")
    model.lm_head.to(torch.bfloat16)
    assert not ModelAdapter(model).is_exact
    assert ModelAdapter(tiny_llama()).is_exact


PROGRAM = """
import torch, lade
from support import prompt, tiny_llama
lade.augment_all()
model = tiny_llama(torch.bfloat16)
torch.manual_seed(0)
for seed in range(4):
    print(model.generate(**prompt(12, seed=seed), max_new_tokens=80, do_sample=seed > 1).tolist())
    print(lade.last_stats().block_tokens)
"""


@beside
def outputs_of_processes():
    return forked_twice(PROGRAM)


def test_real_processes_agree(outputs_of_processes):
    first, second = outputs_of_processes
    assert first[0] == second[0]
    assert first[0].count("\n") == 8, first[1]


SHARED = """
import torch, lade
from lade.common.cache_folder import store_table
from support import prompt, tiny_llama
lade.augment_all()
lade.config_lade(ADAPTIVE=1)
model = tiny_llama(torch.float32)
print(model.generate(**prompt(12), max_new_tokens=100).tolist(), lade.last_stats().fallback_reason)
for number in range(100):
    store_table(model, f"table {number}", {1: 1.0, 8: 1.1}, replaces=True)
"""


def test_processes_that_store_at_once_damage_no_file(cache):
    """Every run ends with plain's text, and the folder holds one file, which can be read."""
    expected = generate_plain(tiny_llama(torch.float32), prompt(12), max_new_tokens=100).tolist()
    for run in in_threads(lambda _: forked(SHARED, USE_LADE="1", LADE_CACHE=str(cache)), *range(4)):
        assert run.stdout == f"{expected} None\n", run.stderr
        assert "cannot be used" not in run.stderr
    assert list(cache.iterdir()) == stored_files()
    (file,) = stored_files()
    assert "table 99" in json.loads(file.read_text())["tables"]
