"""Growing a tree in C, against the same in Python. The module is compiled from this checkout, so that one that was
installed from an earlier version is not what is tested."""

import contextlib
import importlib.util
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import CAN_COMPILE, ROOT, VOCAB, generate_plain, prompt, tiny_llama

import lade
from lade.commands import env
from lade.drafting import compiled_growth
from lade.drafting import growth as growth_module
from lade.drafting import tree as tree_module
from lade.drafting.acceptance import (
    NUM_KINDS,
    PAIR,
    SHARPNESS,
    SIBLING,
    SINGLE,
    STORE_KINDS,
    SUFFIX_KINDS,
    VOCABULARY,
    Acceptance,
)
from lade.drafting.base import FOREIGN
from lade.drafting.compiled_growth import CompiledGrower
from lade.drafting.growth import Grower, Pointer
from lade.drafting.memory import Memory
from lade.drafting.nearest import CONTEXT_SIZE
from lade.drafting.top_k_table import GRADE_MIDDLES, KEY_SHIFT, NUM_BINS, ROW_LENGTH, packed
from lade.drafting.vocabulary import Vocabulary

SEEDS = range(40)


def build(folder, script):
    """Run a setup script that compiles one module. Returns its file, None if there is none, and what was printed."""
    command = [
        sys.executable,
        str(script),
        "build_ext",
        "--build-lib",
        str(folder),
        "--build-temp",
        str(folder / "temp"),
    ]
    built = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=300)
    found = [path for path in folder.rglob("*") if path.suffix in (".so", ".pyd")]
    return (found[0] if found else None), built.stdout + built.stderr


@pytest.fixture(scope="session")
def module(tmp_path_factory):
    """The compiled module, in a folder of its own. Skips where nothing can be compiled."""
    pytest.importorskip("setuptools")
    path, printed = build(tmp_path_factory.mktemp("compiled"), ROOT / "setup.py")
    if path is None:
        trivial = tmp_path_factory.mktemp("trivial")
        (trivial / "trivial.c").write_text(
            "#include <Python.h>\nPyMODINIT_FUNC PyInit_trivial(void) { return NULL; }\n"
        )
        modules = 'ext_modules=[Extension("trivial", ["trivial.c"], optional=True)]'
        (trivial / "setup.py").write_text(
            f'from setuptools import Extension, setup\nsetup(name="trivial", {modules})\n'
        )
        if CAN_COMPILE and build(trivial, trivial / "setup.py")[0] is not None:
            pytest.fail(f"_growth.c does not compile: {printed[-2000:]}")
        pytest.skip("nothing can be compiled here")
    spec = importlib.util.spec_from_file_location("lade.drafting._growth", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def compiled(module):
    return type("Compiled", (CompiledGrower,), {"module": module})


class Stop:
    """Ends a growth at a number of nodes, and notes what it is told."""

    def __init__(self, count):
        self.count, self.told = count, []

    def update(self, num_nodes, expected, chance):
        self.told.append((num_nodes, expected, chance))
        return num_nodes >= self.count


def world(seed):
    """A memory and a text with guesses of every source, of which each seed lacks some. Returns what a grower is given
    and the arguments of `grow`."""
    numbers = np.random.default_rng(seed)

    def has(share):
        return numbers.random() < share

    def rows(count, length=ROW_LENGTH):
        ids = np.argsort(numbers.random((count, VOCAB)), axis=1)[:, :length]
        grades = -np.sort(-numbers.integers(0, len(GRADE_MIDDLES), (count, length)), axis=1)  # the likeliest first
        return packed(ids, grades)

    memory, acceptance = Memory(), Acceptance(bool(seed % 2))
    acceptance.chances = numbers.uniform(0, 1, NUM_KINDS).tolist()
    memory.singles.put(numbers.permutation(VOCAB)[: VOCAB // 2].tolist(), rows(VOCAB // 2))
    pairs = {int(a) << KEY_SHIFT | int(b) for a, b in numbers.integers(0, VOCAB, (VOCAB * 20, 2))}
    memory.pairs.put(sorted(pairs), rows(len(pairs)))
    text = numbers.integers(0, VOCAB, numbers.integers(1, 5)).tolist()
    context = None
    if has(0.6):
        contexts = numbers.normal(size=(2 * VOCAB, CONTEXT_SIZE)).astype(np.float32)
        contexts /= np.linalg.norm(contexts, axis=1, keepdims=True)
        tokens, before = numbers.integers(0, VOCAB, 2 * VOCAB).tolist(), numbers.integers(0, VOCAB, 2 * VOCAB).tolist()
        tokens[0] = text[-1]
        memory.nearest.put(before, tokens, rows(2 * VOCAB), contexts, contexts[::-1])
        context = contexts[0] + seed % 4 / 2 * contexts[1]  # nearly at a right angle
        context /= np.linalg.norm(context)
    alone = None
    if has(0.7):
        ids = np.argsort(numbers.random((VOCAB + 200, VOCAB)), axis=1)[:, :8].astype(np.int32)
        logs = -np.sort(numbers.uniform(0.5, 9, ids.shape), axis=1).astype(np.float16)
        likely = numbers.integers(0, VOCAB, (200, 2)).astype(np.int32)
        alone = Vocabulary(ids, logs, likely).at(1.0)
    draws = numbers.exponential(size=(33, VOCAB - 1)).astype(np.float32)  # of the last id there is none
    asked = []

    def draws_at(depth):
        asked.append(depth)
        return draws[depth] if is_drawn else None

    is_drawn = has(0.5)
    sources = [(rows(1)[0], SIBLING)] if has(0.5) else []
    pointers = []
    for kinds in (*SUFFIX_KINDS, STORE_KINDS[0]):
        following = numbers.integers(0, VOCAB, 12).tolist()
        if has(0.3):
            following[3] = FOREIGN
        if pointers and has(0.5):
            following[:2] = pointers[-1].following[:2]
        if has(0.6):
            pointers.append(Pointer(following, 0, int(numbers.integers(3, 25)), kinds))
    if has(0.1):
        text[-1] = FOREIGN
    size = int(numbers.choice([1, 7, 15, 63, 127]))
    stop = Stop(int(numbers.integers(0, 2 * size))) if has(0.5) else None
    known = memory, acceptance, alone, text, context, draws_at, sources, pointers
    return known, (int(numbers.choice([1, 3, 32])), size, float(numbers.choice([0.0, 0.01, 0.2])), stop), asked


def grown(grower, seed):
    """The tree, whether it was stopped, what the stop was told, and the depths whose draws were asked for."""
    known, arguments, asked = world(seed)
    tree, is_stopped = grower(*known).grow(*arguments)
    return tree, is_stopped, [] if arguments[-1] is None else arguments[-1].told, asked


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_trees(compiled, seed):
    """Chances included: rounding could only move a guess into another bin of probabilities."""
    assert grown(compiled, seed) == grown(Grower, seed)


def test_the_trees_have_guesses_of_all_sources(compiled):
    trees = [grown(compiled, seed)[0] for seed in SEEDS]
    kinds = {kind for tree in trees for kind in tree.kinds}
    firsts = {first for first in SHARPNESS if kinds & set(range(first, first + NUM_BINS))}
    assert {PAIR, SINGLE, VOCABULARY, SIBLING} < firsts
    assert len(firsts) >= 4 + 4  # rows by context of several similarities
    assert all(kinds & set(of) for of in (*SUFFIX_KINDS, STORE_KINDS[0]))
    assert max(max(tree.depths, default=0) for tree in trees) > 5
    assert max(len(tree.tokens) for tree in trees) == 127
    assert any(grown(compiled, seed)[1] for seed in SEEDS)


@pytest.mark.parametrize("name", ["BOTH_ROWS", "SIMILAR_ROWS", "LIKELY_CHILD", "GREEDY_LENGTH"])
def test_the_rules_are_those_of_the_other(compiled, name, monkeypatch):
    """A rule that is changed in Python alone shows."""
    trees = [grown(compiled, seed)[0] for seed in SEEDS]
    assert getattr(growth_module, name) in compiled_growth.RULES
    monkeypatch.setattr(growth_module, name, 2 if name == "GREEDY_LENGTH" else 0.99)
    assert [grown(Grower, seed)[0].tokens for seed in SEEDS] != [tree.tokens for tree in trees]


def test_a_text_of_one_token_and_nothing_known(compiled):
    grower = compiled(Memory(), Acceptance(False), None, [5], None, lambda depth: None, (), ())
    assert grower.grow(32, 63, 0.0, None)[0].tokens == []
    known, _, _ = world(1)
    for max_depth, size in ((0, 5), (5, 0), (-1, -1)):
        assert compiled(*known).grow(max_depth, size, 0.0, None)[0].tokens == []


@pytest.mark.parametrize("place", ["draws", "stop", "nearest"])
def test_an_exception_is_passed_on(compiled, place):
    def fail(*_):
        raise KeyError(place)

    (memory, *known), (max_depth, size, _, _), _ = world(3)
    assert known[3] is not None  # there is a context
    if place == "draws":
        known[4] = fail
    if place == "nearest":
        memory.nearest.find = fail
    stop = SimpleNamespace(update=fail) if place == "stop" else None
    with pytest.raises(KeyError, match=place):
        compiled(memory, *known).grow(max_depth, size, 0.0, stop)
    assert grown(compiled, 4)[0].tokens == grown(Grower, 4)[0].tokens


@pytest.mark.parametrize(
    ("draws", "error"),
    [
        (np.ones(VOCAB), TypeError),
        (np.ones((1, VOCAB), np.float32), TypeError),
        (np.ones(2 * VOCAB, np.float32)[::2], ValueError),
        (np.ones(0, np.float32), ValueError),
        ("draws", TypeError),
    ],
    ids=["float64", "two dimensions", "apart", "none", "text"],
)
def test_wrong_draws_are_an_error(compiled, draws, error):
    (*known, _, sources, pointers), (max_depth, size, *_), _ = world(3)
    with pytest.raises(error):
        compiled(*known, lambda depth: draws, sources, pointers).grow(max_depth, size, 0.0, None)


def test_a_row_beyond_the_table_is_none(compiled):
    """Another thread may have enlarged a table after its rows were looked at."""
    memory = Memory()
    memory.singles.put([5], packed(np.full((1, ROW_LENGTH), 7), np.full((1, ROW_LENGTH), 60)))
    for slot, expected in ((0, [7]), (len(memory.singles.rows), []), (-1, [])):
        memory.singles.slots[5] = slot
        grower = compiled(memory, Acceptance(False), None, [5], None, lambda depth: None, (), ())
        assert grower.grow(1, 3, 0.0, None)[0].tokens == expected


def test_no_memory_is_lost(compiled):
    (*known, _, sources, pointers), _, _ = world(3)
    known[3] = [1000, 2000]  # integers of which Python does not keep one object each
    known[0].singles.put([2000], known[0].singles.rows[:1])
    draws, stop = np.ones(VOCAB, np.float32), SimpleNamespace(update=lambda *_: False)
    things = [*known, draws, stop, sources, pointers, known[0].pairs.rows, known[0].pairs.slots]

    def run(count):
        for _ in range(count):
            compiled(*known, lambda depth: draws, sources, pointers).grow(32, 63, 0.0, stop)
            with contextlib.suppress(TypeError):
                compiled(*known, lambda depth: "wrong", sources, pointers).grow(32, 63, 0.0, stop)

    tracemalloc.start()
    run(20)
    (before, _), counts = tracemalloc.get_traced_memory(), [sys.getrefcount(thing) for thing in things]
    run(200)
    (after, _), counts_too = tracemalloc.get_traced_memory(), [sys.getrefcount(thing) for thing in things]
    tracemalloc.stop()
    assert after - before < 10_000
    assert counts_too == counts


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_those_of_plain(compiled, lade_on, monkeypatch, arguments, batch_size):
    """And both ways take as many steps."""
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0, SHARE=0)
    model, inputs, steps, calls = tiny_llama(), prompt(20, batch_size), [], []
    torch.manual_seed(5)
    expected = generate_plain(model, inputs, max_new_tokens=40, **arguments)
    monkeypatch.setattr(compiled, "grow", lambda self, *args: calls.append(1) or CompiledGrower.grow(self, *args))
    for grower in (Grower, compiled):
        monkeypatch.setattr(tree_module, "FastestGrower", grower)
        torch.manual_seed(5)
        assert torch.equal(model.generate(**inputs, max_new_tokens=40, **arguments), expected)
        steps.append(lade.last_stats().steps)
    assert steps[0] == steps[1]
    assert calls


def test_another_version_is_not_used(monkeypatch):
    right = {"VERSION": compiled_growth.VERSION, "ROW_LENGTH": ROW_LENGTH}
    for wrong in ({}, {"VERSION": 0}, {"ROW_LENGTH": 8}):
        module = SimpleNamespace(**right | wrong)
        monkeypatch.setattr(compiled_growth, "import_module", lambda name, module=module: module)
        assert compiled_growth._compiled() is (None if wrong else module)
    monkeypatch.setattr(compiled_growth, "import_module", __import__)
    monkeypatch.setitem(sys.modules, "lade.drafting._growth", None)
    assert compiled_growth._compiled() is None


def test_it_is_said_which_is_used(monkeypatch):
    for module, says in ((None, "in Python"), (object(), "compiled")):
        monkeypatch.setattr(CompiledGrower, "module", module)
        assert f"search for guesses: {says}" in env.report()
