"""What is remembered across calls: that it helps, never changes a text, stays apart, and survives its file."""

import os
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from support import VOCAB, compare, in_threads, prompt, run_both, tiny_llama

import lade
from lade.common.state import forget_all
from lade.drafting import memory as memory_module
from lade.drafting import memory_file
from lade.drafting.likeliest import LEAST_GROUPED, likeliest_on_host, most_likely
from lade.drafting.memory import Memory
from lade.drafting.suffix_index import END, Match, SuffixIndex
from lade.drafting.top_k_table import BIN_BITS, NUM_BINS, PROBABILITIES, ROW_LENGTH, TopKTable


def row_of(table, key):
    """Ids and bins of a key's row; None if it has none."""
    row = table.row(key)
    return None if row is None else ((row >> BIN_BITS).tolist(), (row & NUM_BINS - 1).tolist())


@pytest.fixture(autouse=True)
def tree(lade_on):
    forget_all()
    lade.config_lade(MODE="tree", MAX_BLOCK=6)


def generate(model, **arguments):
    """The steps of a call whose output equals plain generate()'s."""
    stats = run_both(model, prompt(20, seed=3), max_new_tokens=40, **arguments)
    assert stats.fallback_reason is None
    return stats.steps


SAMPLED = {"do_sample": True, "temperature": 0.1}


def test_active_memories_stay_apart(model):
    alice, bob = Memory(), Memory()
    with alice.active():
        first = generate(model, **SAMPLED)
    assert len(alice) > 0
    with bob.active():
        assert generate(model, **SAMPLED) == first  # nothing of hers is used
    with alice.active():
        second = generate(model, **SAMPLED)
    assert second < first
    assert generate(model, **SAMPLED) == first  # the shared one is a third
    lade.config_lade(SHARE=0)
    assert generate(model, **SAMPLED) == first
    alice.clear()
    assert len(alice) == 0


def test_a_memory_that_is_cleared_during_a_call_stays_empty(model):
    """And belongs to nobody: another model, with fewer ids, may use it next."""
    memory = Memory(texts=1000)

    def clear(ids, scores):
        memory.clear()
        return scores

    with memory.active():
        compare(model, prompt(), max_new_tokens=40, logits_processor=[clear])
        assert (len(memory), len(memory.texts), memory.identity) == (0, 0, None)
        inputs = prompt()
        compare(tiny_llama(vocab_size=30), inputs | {"input_ids": inputs["input_ids"] % 27 + 3}, max_new_tokens=40)
    assert len(memory) > 0
    assert memory.identity["vocab_size"] == 30


def test_a_memory_is_not_active_in_other_threads(model):
    memory = Memory()
    with memory.active():
        in_threads(generate, model)
    assert len(memory) == 0


def test_save_and_load(model, tmp_path):
    path = tmp_path / "memory.safetensors"
    memory = Memory(path=path)
    with memory.active():
        first = generate(model, **SAMPLED)
        memory.save()
        second = generate(model, **SAMPLED)
    assert second < first
    with Memory(path=path).active():
        assert generate(model, **SAMPLED) == second
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ValueError, match="path must be given"):
        Memory().save()
    for wrong in (tmp_path / "missing" / "memory.safetensors", tmp_path):
        for use in (memory.save, lambda path: Memory(path=path)):
            with pytest.raises(ValueError, match="path must be a file in a folder that exists"):
                use(wrong)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    memory.save(link)
    assert link.is_symlink()


@pytest.fixture
def saved(model, tmp_path):
    lade.config_lade(ADAPTIVE=1)
    memory = Memory(path=tmp_path / "memory.safetensors")
    with memory.active():
        generate(model)
    memory.save()
    return memory


def test_a_file_of_another_model_is_refused(saved, tmp_path):
    fine_tuned, other = tiny_llama(torch.float32), tiny_llama()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    for stranger, why in ((other, "embeddings differ"), (tiny_llama(vocab_size=80), "vocab_size is 80, not 61")):
        loaded = Memory(path=saved.path)
        with loaded.active(), pytest.raises(ValueError, match=f"memory.safetensors belongs to another model: .*{why}"):
            stranger.generate(**prompt(8), max_new_tokens=4)
        loaded.save(tmp_path / "after.safetensors")
        assert Memory(path=tmp_path / "after.safetensors").identity == saved.identity  # its own model's as before
    with torch.no_grad():
        fine_tuned.get_input_embeddings().weight.add_(1e-4)
    with Memory(path=saved.path).active():
        generate(fine_tuned)


def put(name, place, value):
    return lambda arrays, _: arrays[name].__setitem__(place, value)


def replace(name, change):
    return lambda arrays, _: arrays.__setitem__(name, change(arrays))


DAMAGED = {  # part of the error's text -> a change of the arrays and of the metadata
    "ids beyond the vocabulary": put("rows", (0, 0), VOCAB << BIN_BITS),
    "hold ids beyond": put("context_rows", (0, 0), -1),
    "context differ in number": replace("context_centre", lambda arrays: arrays["context_after"][:2]),
    "rows differ in number": replace("keys", lambda arrays: arrays["keys"][:2]),
    "contexts are out of range": put("context_before", (0, 3), float("nan")),
    "are out of range": put("context_after", (0, 3), 2.0),
    "out of range": put("context_centre", (0, 3), float("inf")),
    "context_before have a wrong shape or type": replace(
        "context_before", lambda arrays: arrays["context_before"].astype(int)
    ),
    "rows have a wrong shape or type": replace("rows", lambda arrays: arrays["rows"][:, :3]),
    "its texts hold": replace("texts", lambda _: np.array([5, END - 1])),
    "texts hold ids": replace("texts", lambda _: np.array([5, 10**6])),
    "texts have a wrong shape": replace("texts", lambda _: np.array([5.0, 6.0])),
    "its texts have a wrong": replace("texts", lambda _: np.array([[5, 6]])),
    "model_type": lambda _, metadata: metadata.__setitem__("model", '{"vocab_size": 61}'),
    "its format is 'lade memory 99'": lambda _, metadata: metadata.__setitem__("format", "lade memory 99"),
}


def damage(path, kind):
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:200])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "npz":
        np.savez(path.with_suffix(".npz"), rows=np.zeros(3))
        path.with_suffix(".npz").rename(path)
    else:
        with safe_open(path, "numpy") as file:
            arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        DAMAGED[kind](arrays, metadata)
        save_file(arrays, path, metadata)


@pytest.mark.parametrize("kind", ["cut", "text", "npz", *DAMAGED])
def test_a_damaged_file_is_refused_and_left_alone(saved, kind):
    path = saved.path
    damage(path, kind)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"path must be a memory saved by lade, .*memory\.safetensors is not") as error:
        Memory(path=path)
    if " " in kind:
        assert kind in str(error.value)
    assert path.read_bytes() == before


def test_saving_that_fails_leaves_the_old_file(saved, tmp_path, monkeypatch):
    before = saved.path.read_bytes()

    def fail(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        saved.save()
    assert saved.path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    Memory().save(path)
    monkeypatch.setattr(memory_file, "MAX_TEXTS", 0)
    with path.open("ab") as file:
        file.truncate(8 * memory_module.MIN_BYTES + 1)
    with pytest.raises(ValueError, match="bytes, which is too much for max_bytes=65536"):
        Memory(memory_module.MIN_BYTES, path)


def test_of_a_file_with_more_rows_than_fit_the_latest_are_loaded(tmp_path):
    large, path = Memory(), tmp_path / "memory.safetensors"
    large.identity = {"model_type": "any", "vocab_size": 4, "hidden_size": 8, "signs": ""}
    rows = np.arange(1000 * ROW_LENGTH).reshape(1000, ROW_LENGTH) % 4
    large.table.put(list(range(1000)), rows << BIN_BITS | rows)
    large.save(path)
    small = Memory(memory_module.MIN_BYTES, path)
    assert len(small.table) == small.table.capacity < 200
    for key in (999, 1000 - small.table.capacity):
        assert row_of(small.table, key) == row_of(large.table, key) == (rows[key].tolist(), rows[key].tolist())
    assert small.table.row(999 - small.table.capacity) is None


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_file_keeps_its_mode(tmp_path):
    path = tmp_path / "memory.safetensors"
    before = os.umask(0o027)
    try:
        Memory().save(path)
        assert path.stat().st_mode & 0o777 == 0o640  # as any new file
        for mode in (0o600, 0o664):
            path.chmod(mode)
            Memory().save(path)
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_max_bytes_is_checked():
    for value in (0, -1, 1000, "1", True, 1e9):
        with pytest.raises(ValueError, match="max_bytes must be an integer of at least 65536"):
            Memory(max_bytes=value)


def test_a_full_table_drops_what_was_written_longest_ago():
    """Against a list in the order of writing; keys come again, so that old rows become new ones."""
    numbers, table, order = np.random.default_rng(0), TopKTable(capacity=200), []
    for _ in range(300):
        keys = numbers.integers(0, 400, size=7).tolist()
        rows = np.repeat(np.array(keys)[:, None], ROW_LENGTH, axis=1)
        table.put(keys, rows << BIN_BITS | rows % 3)
        for key in keys:
            order = [*(other for other in order if other != key), key][-200:]
        assert table.as_arrays().keys.tolist() == order
    assert len(table) == 200
    assert all(row_of(table, key) == ([key] * ROW_LENGTH, [key % 3] * ROW_LENGTH) for key in order)


def test_a_full_table_costs_no_more_than_an_empty_one():
    """The best of several times of this thread, with room for a busy machine: it was 20 times as much."""
    capacity, rows = 100_000, np.zeros((16, ROW_LENGTH), dtype=np.int64)
    empty, full = TopKTable(capacity), TopKTable(capacity)
    everything = np.zeros((capacity, ROW_LENGTH), dtype=np.int64)
    for start in (0, capacity // 4):  # and a quarter of its rows has been replaced
        full.put(list(range(start, start + capacity)), everything)

    def seconds(table, first):
        calls = [list(range(key, key + 16)) for key in range(first, first + 1600, 16)]
        started = time.thread_time()
        for keys in calls:
            table.put(keys, rows)
        return time.thread_time() - started

    places = range(10 * capacity, 10 * capacity + 8000, 1600)
    assert min(seconds(full, first) for first in places) < 10 * min(seconds(empty, first) for first in places)


def exact_chances(logits: torch.Tensor, temperature: float, ids: np.ndarray) -> np.ndarray:
    return (logits.float() / temperature).softmax(-1).gather(1, torch.from_numpy(ids.astype(np.int64))).numpy()


@pytest.mark.parametrize("vocab_size", [40, 127, 128, LEAST_GROUPED - 1, LEAST_GROUPED, 65537])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_most_likely(vocab_size, dtype):
    logits = (torch.randn(5, vocab_size + 3, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[:, 3:]
    logits[0, -1] = 40  # the last one is in no group where their size does not divide the vocabulary's
    before = logits.clone()
    rows = most_likely(logits)
    ids = rows >> BIN_BITS
    assert torch.equal(logits, before)
    found = logits.gather(1, torch.from_numpy(ids.astype(np.int64))).float()
    assert torch.equal(found, logits.float().topk(ROW_LENGTH).values)
    assert all(len(set(row)) == ROW_LENGTH for row in ids.tolist())
    assert ids[0, 0] == vocab_size - 1
    if dtype == torch.float32:
        assert ids[:, :4].tolist() == logits.topk(4).indices.tolist()
    # Random logits have no likely tokens; the estimated sum of rows of models is better.
    allowed = 1.6 if vocab_size >= LEAST_GROUPED else 1 + 1e-5
    chances = exact_chances(logits, 1.0, ids)
    found = PROBABILITIES[rows & NUM_BINS - 1]
    assert np.abs(np.log(found / chances))[chances > 1e-6].max() <= np.log(allowed) + np.log(1.25) / 2
    rows = most_likely(logits[:, :3])  # fewer tokens than a row holds
    assert rows.shape == (5, ROW_LENGTH)
    assert (rows >> BIN_BITS).max() <= 2


@pytest.mark.parametrize("vocab_size", [LEAST_GROUPED - 1, LEAST_GROUPED, 32_000])
def test_most_likely_where_many_are_equal_or_not_a_number(vocab_size):
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, 7] = torch.nan
    logits[5, 8:] = -torch.inf
    ids, chances = likeliest_on_host(logits, 0.5)
    assert np.isnan(chances[3]).all()
    is_large = vocab_size >= LEAST_GROUPED
    exact, best = exact_chances(logits, 0.5, ids), (logits / 0.5).softmax(-1).topk(ROW_LENGTH).values.numpy()
    for row in (0, 1, 2, 4, 5):
        np.testing.assert_allclose(exact[row], best[row], rtol=1e-6)
        factor = chances[row, 0] / exact[row, 0]
        np.testing.assert_allclose(chances[row], exact[row] * factor, rtol=1e-5)
        if row != 2:  # of a flat row too small a sum is expected
            assert abs(factor - 1) < (0.3 if is_large else 1e-5)
    assert all(len(set(row)) == ROW_LENGTH for row in ids.tolist())
    assert ids.max() < vocab_size


def test_suffix_matches():
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 9, 2, 3, 4, 5, 9, 9, 1, 2, 3, 4])
    assert index.match() == Match(4, 4)
    index.extend([6])
    assert index.match() is None
    index.extend([9])
    assert index.match() == Match(5, 1)  # of equally long ones the first
    index.extend([2])
    assert index.match() == Match(6, 2)
    loop = SuffixIndex()
    loop.extend([1, 2, 3] * 20)
    assert loop.match() == Match(21, 21)  # the first of the longest; of each trigram the first place and the latest 15
    loop.extend([7, 8, 1, 2, 3])
    assert loop.match() == Match(3, 3)
    loop.extend([9, 7, 8, 1, 2, 3])
    assert loop.match() == Match(65, 5)  # a longer one is among the latest
    assert loop.following(69, 7) == [2, 3, 2, 3, 2, 3, 2]


@pytest.mark.parametrize("by_hand", [False, "shrunk", "grown"])
def test_a_vocabulary_that_has_shrunk(by_hand):
    """By hand: the configuration and the embedding's `num_embeddings` still say what they said before."""
    model = tiny_llama()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if by_hand == "grown":
        for part in ends:
            part.weight = torch.nn.Parameter(torch.cat([part.weight.detach(), -part.weight.detach()]))
    generate(model)
    if by_hand:
        for part in ends:
            part.weight = torch.nn.Parameter(part.weight.detach()[:30].clone())
    else:
        model.resize_token_embeddings(30)
    inputs = {name: value % 30 if name == "input_ids" else value for name, value in prompt(20, seed=3).items()}
    for arguments in ({}, SAMPLED):
        compare(model, inputs, max_new_tokens=12, **arguments)
