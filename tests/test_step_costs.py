"""What a step costs: what a warm-up has measured and stored, or what is assumed for the hardware."""

import itertools
import json
import logging
import os
import random
import time

import pytest
import torch
from support import beside, compare, forked_twice, in_threads, prompt, tiny_llama
from support.families import RECURRENT

import lade
from lade import decoding, preparation
from lade.common.cache_folder import load_table, store_table, stored_files
from lade.common.processor import FP16
from lade.drafting import step_costs
from lade.drafting.block_policy import choose_size, compared_sizes
from lade.drafting.memory import memory_for
from lade.drafting.step_costs import StepCosts, assumed_costs
from lade.forward.base import ForwardPath
from lade.models.base import ModelAdapter

TREE, WINDOW = (
    {"MODE": "tree", "MAX_BLOCK": 16},
    {"MODE": "lookahead", "LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 3},
)
PADDED = (8, 16, 32, 64)


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """What is assumed depends on the processor; the tests' is always the same."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(step_costs, "has_fast_mkl", lambda: False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The costs of a call.


held = []  # models, which costs do not keep alive


def costs_of(model=None, **arguments):
    held.append(model or tiny_llama())
    return StepCosts(held[-1], **arguments)


@pytest.fixture
def table(monkeypatch):
    """Lets all costs be those of a table."""
    return lambda costs: monkeypatch.setattr(step_costs, "load_table", lambda *_: costs)


def test_offers_follow_costs(table):
    table({1: 1.0, 8: 4.0, 16: 8.0})
    costs = costs_of()
    found = costs.offers(64)
    assert found.sizes[:3] == (1, 2, 4)
    assert [found.costs[found.sizes.index(size)] for size in (1, 8, 64)] == pytest.approx([1.0, 4.0, 32.0])
    assert 0 < found.least_probability <= step_costs.MAX_LEAST_PROBABILITY
    assert costs.offers(5).sizes == (1, 2, 4, 5)


def test_kinds_and_batches_have_tables_of_their_own():
    costs = costs_of(tiny_llama(torch.float32))
    own = costs.cost(8)
    costs.at((), num_waiting=4)
    assert costs.cost(8) > own  # the tokens that wait run again
    costs.at(())
    assert costs_of(batch_size=8).cost(8) > costs.cost(8) == own


def test_what_is_assumed_of_the_processor(monkeypatch):
    """A cheap block takes instructions for its dtype."""
    monkeypatch.setattr(step_costs, "SMALL_BYTES", 0)

    def are_cheap():
        kinds = torch.float32, torch.bfloat16, torch.float16
        return [assumed_costs(tiny_llama(dtype), (), 1)[16] < 3 for dtype in kinds]

    assert are_cheap() == [True, True, False]
    single = tiny_llama(torch.float32)
    own = assumed_costs(single, (), 1)
    assert assumed_costs(single, ("packed",), 1)[16] < own[16]
    assert assumed_costs(single, (FP16,), 1)[16] > assumed_costs(single, ("packed",), 1)[16]  # one token is cheaper
    with monkeypatch.context() as patch:
        patch.setattr(step_costs, "has_fast_mkl", lambda: True)
        assert assumed_costs(single, (), 1)[4] < 0.75 * own[4]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # Skylake to Ice Lake
    assert are_cheap() == [True, False, False]
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert are_cheap() == [True, False, False]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert are_cheap() == [False, False, False]
    assert assumed_costs(single.to("meta"), (), 1)[64] < 1.2  # a GPU


# Where blocks are padded to a few sizes, these are what the policy chooses from.


@pytest.mark.parametrize("num_guesses", [0, 7, 8, 20, 63])
def test_a_tree_that_fills_no_size_goes_into_the_next(num_guesses, table):
    """Guesses that are sure: all of them are worth it where a larger block costs hardly more."""
    table({8: 1.0, 16: 1.01, 32: 1.02, 64: 1.03})
    costs = costs_of(sizes=PADDED)
    assert costs.cost(8) == 1.0
    expected = [float(k) for k in range(num_guesses + 1)]
    found = choose_size(compared_sizes(costs.offers(64), expected, 1))
    assert found == next(size for size in PADDED if size > num_guesses)
    assert max(size for size, _, _ in compared_sizes(costs.offers(64), expected, 1)) == found


# Files.


def test_a_stored_table_is_found(cache):
    model = tiny_llama()
    assert load_table(model, "x") is None
    store_table(model, "x", {1: 1.0, 8: 1.23456})
    store_table(model, "y", {8: 1.0, 16: 1.5})
    assert load_table(model, "x") == {1: 1.0, 8: 1.2346}
    store_table(model, "x", {1: 1.0, 8: 3.0})  # the first one stays
    assert load_table(model, "x")[8] == 1.2346
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


def test_a_warm_up_stores_what_steps_cost(cache, lade_on, monkeypatch):
    """By a clock on which a forward over q tokens takes 1 + 0.1 q seconds, at twice the speed every few steps."""
    now, count, forward = [0.0], itertools.count(), ForwardPath.forward

    def timed(self, block, cache):
        now[0] += (1 + 0.1 * block.tokens.shape[1]) * (1 + next(count) // 10 % 2)
        return forward(self, block, cache)

    monkeypatch.setattr(ForwardPath, "forward", timed)
    monkeypatch.setattr(preparation, "perf_counter", lambda: now[0])
    lade.config_lade(ADAPTIVE=1, PACK=0, **TREE)
    model = tiny_llama(num_key_value_heads=4)
    before = costs_of(model).cost(16)
    lade.warmup(model, 24, 200)
    num_measured = 2 * preparation.ROUNDS * sum(1 < size <= TREE["MAX_BLOCK"] for size in preparation.SIZES)
    assert num_measured <= lade.last_stats().steps < 1.5 * num_measured
    assert costs_of(model).cost(1) == 1.0
    assert [costs_of(model).cost(size) for size in (2, 8, 16)] == pytest.approx(
        [1.2 / 1.1, 1.8 / 1.1, 2.6 / 1.1], rel=1e-3
    )
    assert costs_of(model).cost(16) != before
    assert costs_of(model, uses_stored=False).cost(16) == before
    (file,) = stored_files()
    content = file.read_text()
    monkeypatch.setattr(preparation, "perf_counter", time.perf_counter)
    lade.warmup(model, 24, 200)  # what is stored stays, so that texts in half precision do, and is not measured again
    assert file.read_text() == content
    assert lade.last_stats().steps <= preparation.FEW_TOKENS
    assert costs_of(model).cost(8) == pytest.approx(1.8 / 1.1, rel=1e-3)


def test_a_warm_up_of_a_model_that_takes_chains(cache, lade_on):
    lade.config_lade(ADAPTIVE=1, **TREE)
    model = next(family for family in RECURRENT if family.name == "falcon_h1").build()
    lade.warmup(model, 24, 200)
    (file,) = stored_files()
    (table,) = json.loads(file.read_text())["tables"].values()
    assert {"1", "2", "4", "8"} < set(table)


def test_where_nothing_can_be_stored(tmp_path, monkeypatch, lade_on):
    (tmp_path / "file").write_text("")
    lade.config_lade(ADAPTIVE=1, **TREE)
    for place in ("0", "", str(tmp_path / "file" / "below")):
        monkeypatch.setenv("LADE_CACHE", place)
        model = tiny_llama()
        before = costs_of(model).cost(16)
        lade.warmup(model, 24, 60)
        assert not stored_files()
        assert costs_of(model).cost(16) == before
        compare(model, prompt(12), max_new_tokens=40)


# Calls.


def script(dtype=torch.bfloat16, num_calls=2, length=50, **arguments):
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
    ("settings", "dtype", "arguments"),
    [(TREE, torch.bfloat16, {"do_sample": True, "temperature": 0.8}), (WINDOW, torch.float32, {})],
    ids=["tree", "window"],
)
def test_every_run_has_the_same_steps(lade_on, cache, settings, dtype, arguments, monkeypatch):
    """Whatever a clock says: here each reading is some random time later than the last."""
    now, numbers = [0.0], random.Random(0)

    def read():
        now[0] += numbers.expovariate(1.0)
        return now[0]

    monkeypatch.setattr(decoding, "perf_counter", read)
    lade.config_lade(ADAPTIVE=1, **settings)
    runs = [script(dtype, **arguments) for _ in range(2)]
    assert runs[0] == runs[1]
    assert any(size > 1 for sizes in runs[0][1] for size in sizes)  # lookahead ran
    assert not stored_files()


@pytest.mark.parametrize("way", ["setting", "torch"])
def test_a_stored_table_of_half_precision_is_used_unless_that_is_ruled_out(way, lade_on, table):
    lade.config_lade(ADAPTIVE=1, **TREE)
    table({1: 1.0, 2: 50.0, 64: 100.0})
    assert max(map(max, script()[1])) == 1
    if way == "setting":
        lade.config_lade(DETERMINISTIC=1)
    else:
        torch.use_deterministic_algorithms(True)
    try:
        assert max(map(max, script()[1])) > 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_half_precision_does_not_meet_what_exact_calls_have_learned(lade_on):
    """A call under autocast after exact ones of the same model, whose blocks may depend on the free memory: its text,
    blocks and memory are those of a model never used before."""
    lade.config_lade(ADAPTIVE=1, **TREE)

    def half_precision(model):
        with torch.autocast("cpu", torch.bfloat16):
            text = model.generate(**prompt(12), max_new_tokens=60).tolist()
        return text, lade.last_stats().block_tokens

    expected = half_precision(tiny_llama(torch.float32))
    model = tiny_llama(torch.float32)
    model.generate(**prompt(12), max_new_tokens=60)
    assert lade.last_stats().fallback_reason is None
    assert len(memory_for(model, True, True))
    assert not len(memory_for(model, True, False))
    assert half_precision(model) == expected
    assert len(memory_for(model, True, False))
    assert max(expected[1]) > 1


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


def test_what_is_stored_at_once_damages_no_file(cache, caplog):
    """Each change is written to a file of its own name, which then takes the place of the last."""
    model, names = tiny_llama(), [f"table {number}" for number in range(100)]

    def store_and_load(_):
        for name in names:
            store_table(model, name, {1: 1.0, 8: 1.1})
            assert load_table(model, name) in (None, {1: 1.0, 8: 1.1})  # another's may have taken its place

    in_threads(store_and_load, *range(4))
    assert list(cache.iterdir()) == stored_files()
    assert load_table(model, names[-1]) == {1: 1.0, 8: 1.1}
    assert "cannot be used" not in caplog.text
