"""In half precision no clock decides anything: the same call gives the same text in every run, and step costs are
stored tables."""

import json
import logging
import os
import random
import tempfile
from math import log
from pathlib import Path

import pytest
import torch
from support import beside, forked, generate_plain, prompt, tiny_llama
from transformers import GenerationMixin

import lade
from lade import decoding
from lade.block_size.costs import SIZES, FixedCosts
from lade.block_size.tables import GRID, NUM_ROUNDS, ROUND, Calibration, CostTable, default_costs, load, store, stored
from lade.drafting.memory import memory_for
from lade.models.base import ModelAdapter
from lade.verification import draws as noise

SCHEDULE = NUM_ROUNDS * len(ROUND)  # steps
TREE, WINDOW = {"MODE": "tree", "MAX_BLOCK": 16}, {"LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 3}


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """The schedule is that of a CPU with AVX-512, whatever runs the tests."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wild_clock(monkeypatch, lade_on):
    """Every reading of the clock is some random time later than the last; returns a function that seeds it."""
    now, numbers = [0.0], random.Random()

    def read():
        now[0] += numbers.expovariate(1.0)
        return now[0]

    for module in (decoding, noise):
        monkeypatch.setattr(module, "perf_counter", read)
    lade.config_lade(ADAPTIVE=1)
    return numbers.seed


def script(dtype=torch.bfloat16, num_calls=2, length=80, **arguments):
    """A program of a few calls, with a model and so a state of its own. Returns its texts and the sizes of its
    blocks."""
    model, texts, blocks = tiny_llama(dtype), [], []
    torch.manual_seed(0)
    for seed in range(num_calls):
        texts.append(model.generate(**prompt(12, seed=seed), max_new_tokens=length, **arguments).tolist())
        assert lade.last_stats().fallback_reason is None
        blocks.append(lade.last_stats().block_tokens)
    return texts, blocks


@pytest.mark.parametrize("settings", [TREE, WINDOW], ids=["tree", "window"])
@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
def test_the_same_text_in_every_run(wild_clock, cache, settings, arguments):
    lade.config_lade(**settings)
    runs = []
    for seed in range(4):
        wild_clock(seed)
        runs.append(script(**arguments))
        assert len(stored()) == 1
    assert runs[1] == runs[2] == runs[3]
    assert any(
        size > 1 for sizes in runs[1][1] for size in sizes
    )  # lookahead ran, and where the table says that it pays


def test_live_costs_are_the_control(wild_clock, cache, monkeypatch):
    """With them the sizes of blocks follow the clock: in float32, where no text depends on them, and here in half
    precision too."""
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
        assert len({str(blocks) for _, blocks in runs}) == 3
    assert not stored()


def test_a_program_too_short_to_measure_follows_the_schedule_each_time(wild_clock, cache):
    lade.config_lade(**TREE)
    runs = []
    for seed in range(3):
        wild_clock(seed)
        runs.append(script(num_calls=1, length=12))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1][0][:5] == [1, 8, 1, 16, 4]  # 32 and 64 are more than MAX_BLOCK
    assert not stored()


def test_calls_of_other_lengths_and_batches_have_tables_of_their_own(lade_on, cache):
    lade.config_lade(ADAPTIVE=1, **TREE)
    model = tiny_llama(torch.bfloat16, max_position_embeddings=2048)
    for inputs in (prompt(12), prompt(12, batch_size=2), prompt(600)):
        for _ in range(4):
            model.generate(**inputs, max_new_tokens=SCHEDULE)
    assert len(stored()) == 3


@pytest.mark.parametrize("way", ["setting", "torch"])
def test_nothing_is_measured_where_that_is_asked_for(way, wild_clock, cache):
    lade.config_lade(**TREE)
    wild_clock(0)
    script()  # a table that was stored earlier is not used either
    (path,) = stored()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"costs": {"1": 1.0, "8": 8.0}}))
    measured = script()
    assert max(map(max, measured[1])) < 8
    if way == "setting":
        lade.config_lade(DETERMINISTIC=1)
    else:
        torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for seed in range(3):
            wild_clock(seed)
            runs.append(script())
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1] == runs[2]
    assert max(map(max, runs[0][1])) >= 8
    assert len(stored()) == 1


def test_where_nothing_can_be_stored_nothing_is_measured(wild_clock, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    lade.config_lade(**TREE)
    runs = []
    for place in ("0", "", str(tmp_path / "file" / "below")):
        monkeypatch.setenv("LADE_CACHE", place)
        wild_clock(len(place))
        runs.append(script())
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1][0][1] != ROUND[1]  # no schedule


def test_forwards_that_keep_other_processes_company_are_not_measured(wild_clock, cache, monkeypatch):
    """With synced_gpus a rank whose rows have ended waits for the slowest one: what its steps take says nothing about
    them."""
    monkeypatch.setattr(
        GenerationMixin, "_has_unfinished_sequences", lambda self, is_finished, synced_gpus, device: not is_finished
    )
    lade.config_lade(**TREE)
    wild_clock(0)
    synced = script(length=SCHEDULE + 20, synced_gpus=True)
    assert max(map(max, synced[1])) > 1
    assert not stored()
    script(length=SCHEDULE + 20)  # the control
    assert len(stored()) == 1


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
        assert len(memory_for(model, True, "live"))
        assert not len(memory_for(model, True, "assumed"))
        runs.append(half_precision(model))
        assert len(memory_for(model, True, "assumed"))
    assert runs[0] == runs[1] == runs[2]
    assert max(runs[0][1]) > 1


def test_autocast_and_mixed_weights_are_no_exact_arithmetic(lade_on, cache):
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


@pytest.mark.parametrize("slope", [0.01, 0.05, 1.0])
def test_what_a_calibration_finds(slope):
    """Whatever the machine's speed, which changes here by half every ten steps, and with one odd step in each."""
    calibration, numbers = Calibration(1), random.Random(0)
    for step in range(SCHEDULE):
        size, speed = calibration.next_size(64), 1.5 ** (step // 10 % 3)
        seconds = speed * (1 + slope * (size - 1)) * (50 if numbers.random() < 0.05 else 1)
        assert calibration.add(size, seconds, 0.1 * speed) == (step == SCHEDULE - 1)
    table = calibration.table()
    assert set(table.costs) == set(ROUND)
    assert table.costs[1] == 1.0
    for size, cost in table.costs.items():
        assert cost == pytest.approx(1 + slope * (size - 1), rel=GRID - 1)
        steps = log(cost) / log(GRID)
        assert steps == pytest.approx(round(steps), abs=1e-6)  # so that runs on one machine seldom differ
    assert 0.05 < table.search < 0.2


def test_a_calibration_stays_within_what_is_allowed():
    assert {Calibration(1).next_size(10)} == {1}
    calibration, sizes = Calibration(1), []
    for _ in range(SCHEDULE):
        sizes.append(calibration.next_size(10))
        calibration.add(sizes[-1], 1.0, 0.0)
    assert set(sizes) == {1, 4, 8}
    calibration, sizes = Calibration(16), []
    for _ in range(SCHEDULE):
        sizes.append(calibration.next_size(64))
        calibration.add(sizes[-1], 1.0, 0.0)
    assert set(sizes) == {1, 4, 8}  # 16 rows of 8
    assert Calibration(1).table() is None


def test_what_is_assumed_to_cost_much_is_not_timed(cache, monkeypatch):
    """On a CPU without AVX-512 a block of 64 may cost as much as 60 plain steps."""
    cache.mkdir()
    sizes = {}
    for name in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        costs = FixedCosts(name, "cpu", 1)
        sizes[name] = []
        while (size := costs.scheduled_size(64)) is not None:
            sizes[name].append(size)
            costs.observe(size, 1.0 + size / 2)
        assert costs.cost(8) == pytest.approx(10 / 3, rel=GRID - 1)
        assert costs.cost(64) > 4 * costs.cost(8)
    assert sizes == {"AVX512": list(ROUND) * NUM_ROUNDS, "AVX2": [1, 8, 1, 4, 1] * NUM_ROUNDS}


def test_a_clock_that_stands_still_settles_for_what_is_assumed(cache):
    cache.mkdir()
    costs = FixedCosts("name", "cpu", 1)
    for _ in range(SCHEDULE):
        costs.observe(costs.scheduled_size(64), 0.0)
    assert costs.scheduled_size(64) is None
    assert costs.cost(16) == default_costs("cpu", 1, SIZES).costs[16]
    assert not stored()


def test_the_first_process_to_store_a_table_decides(cache):
    cache.mkdir()
    first, second = (CostTable({1: 1.0, 8: cost}, 0.05) for cost in (1.1, 1.2))
    assert load("name") is None
    assert store("name", first) == first
    assert store("name", second) == load("name") == first
    assert store("another", second) == second
    assert sorted(path.name for path in cache.iterdir()) == sorted(path.name for path in stored())


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"format": 99},
        lambda content: content | {"name": "another"},
        lambda content: content | {"costs": {"1": 1.0, "8": 0.5}},
        lambda content: content | {"costs": {"1": 1.0, "8": float("nan")}},
        lambda content: content | {"costs": {"1": 1.0, "8": float("nan"), "16": 2.0}},
        lambda content: content | {"costs": {"1": 1.0, "8": 10**400}},
        lambda content: content | {"costs": {"8": 1.0, "16": 2.0}},
        lambda content: content | {"costs": [1.0, 2.0]},
        lambda content: content | {"search": -1},
        lambda content: [content],
    ],
)
def test_a_damaged_table_is_measured_again(cache, change, caplog):
    cache.mkdir()
    table = CostTable({1: 1.0, 8: 1.1}, 0.05)
    store("name", table)
    (path,) = stored()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with caplog.at_level(logging.WARNING):
        assert load("name") is None
    assert str(path) in caplog.text
    assert store("name", table) == load("name") == table


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """What is assumed depends on the processor; the tests' is always the same."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def test_a_processor_without_fast_half_precision_is_assumed_to_pay_for_every_token(monkeypatch):
    fast = default_costs("cpu", 1, SIZES)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    slow = default_costs("cpu", 1, SIZES)
    assert fast.costs[16] < 1.5
    assert slow.costs[16] > 3


def test_what_is_assumed_for_batches_and_devices():
    alone, eight = default_costs("cpu", 1, SIZES), default_costs("cpu", 8, SIZES)
    assert alone.costs[1] == eight.costs[1] == 1.0
    assert eight.costs[8] > alone.costs[8]  # 64 tokens beside 8, not 8 beside 1
    assert default_costs("cuda", 1, SIZES).costs[64] < 1.2
    for table in (alone, eight):
        assert list(table.costs.values()) == sorted(table.costs.values())


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
    """What a program prints in three processes, one after the other, and the tables that they leave."""
    with tempfile.TemporaryDirectory() as folder:
        found = [forked(PROGRAM, USE_LADE="1", LADE_CACHE=folder) for _ in range(3)]
        return [(one.stdout, one.stderr) for one in found], len(list(Path(folder).glob("step-costs-*.json")))


def test_real_processes_agree(outputs_of_processes):
    """The first one measures, the others find its table."""
    (_, second, third), num_tables = outputs_of_processes
    assert second == third
    assert second[0].count("\n") == 8, second[1]
    assert num_tables == 1


def test_small_blocks_have_a_table_of_their_own(lade_on, cache):
    """One that was measured up to four tokens says nothing about sixty-four, and two tokens are measured, too."""
    for size in (2, 4, 16):
        lade.config_lade(ADAPTIVE=1, MODE="tree", MAX_BLOCK=size)
        script(num_calls=4)
        assert max(lade.last_stats().block_tokens) <= size
    tables = [json.loads(path.read_text())["costs"] for path in stored()]
    assert sorted(max(map(int, costs)) for costs in tables) == [2, 4, 16]


def test_a_folder_that_is_taken_away_meanwhile(lade_on, cache, monkeypatch):
    lade.config_lade(ADAPTIVE=1, **TREE)
    model = tiny_llama(torch.bfloat16)
    model.generate(**prompt(12), max_new_tokens=8)
    monkeypatch.setenv("LADE_CACHE", "0")
    model.generate(**prompt(12), max_new_tokens=200)
    assert lade.last_stats().fallback_reason is None


def test_a_table_is_for_all_who_share_the_folder(cache):
    cache.mkdir()
    before = os.umask(0o077)
    try:
        store("name", CostTable({1: 1.0, 8: 1.1}, 0.05))
    finally:
        os.umask(before)
    (path,) = stored()
    assert path.stat().st_mode & 0o777 == 0o644


def test_plain_is_untouched(wild_clock, cache):
    model = tiny_llama(torch.bfloat16)
    generate_plain(model, prompt(12), max_new_tokens=60)
    assert not cache.exists()
