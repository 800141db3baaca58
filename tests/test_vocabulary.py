"""Rows of tokens alone: they are the model's, bounded, made where that is cheap or asked for, and change no text."""

import heapq

import numpy as np
import pytest
import torch
from support import VOCAB, generate_plain, prompt, tiny_llama

import lade
from lade.drafting import growth as growth_module
from lade.drafting import vocabulary as vocabulary_module
from lade.drafting.acceptance import (
    FIRST_NUM_KINDS,
    NUM_KINDS,
    PAIR,
    SHARPNESS,
    SIBLING,
    SINGLE,
    VOCABULARY,
    Acceptance,
    nearest_kind,
)
from lade.drafting.coming_draws import races
from lade.drafting.growth import GREEDY_LENGTH, Grower
from lade.drafting.likeliest import likeliest, most_likely
from lade.drafting.memory import KEY_SHIFT, Memory
from lade.drafting.top_k_table import (
    BIN_EDGES,
    BIN_OF_GRADE,
    GRADE_BITS,
    GRADE_EDGES,
    GRADE_MIDDLES,
    ROW_LENGTH,
    packed,
    unpacked,
)
from lade.drafting.vocabulary import (
    MAX_BYTES,
    RowsAlone,
    Vocabulary,
    likely_pairs,
    make_vocabulary,
    prepare_vocabulary,
    size_of_rows,
    vocabulary_of,
)


@pytest.fixture(autouse=True)
def tree(lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)


@pytest.fixture
def forwards():
    """Counts the forwards of a model without a hook, which would keep lade from running it unasked."""

    def count(model):
        calls, inner = [], type(model).forward

        class Counted(type(model)):
            def forward(self, *args, **kwargs):
                calls.append(1)
                return inner(self, *args, **kwargs)

        model.__class__ = Counted
        return calls

    return count


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rows_are_the_models(temperature):
    model = tiny_llama()
    found = make_vocabulary(model)
    assert len(found.ids) == VOCAB
    assert found.ids.shape[1] == ROW_LENGTH
    ids, grades = unpacked(found.at(temperature).tokens[[3, 40]])
    logits = torch.stack([model(torch.tensor([[token]])).logits[0, -1] for token in (3, 40)])
    chances, expected = likeliest(logits, temperature)
    assert ids.tolist() == expected.tolist()
    # Half precision of the logarithms, and a rest that is only bounded: at most one grade off.
    assert np.abs(grades - np.searchsorted(GRADE_EDGES, chances.detach().numpy())).max() <= 1


@pytest.fixture
def few_pairs(monkeypatch):
    monkeypatch.setattr(vocabulary_module, "NUM_PAIRS", 300)


def test_rows_of_pairs_are_the_models(few_pairs):
    model = tiny_llama()
    found = make_vocabulary(model, pairs=True)
    rows = found.at(1.0)
    assert len(rows.tokens) == VOCAB
    assert len(rows.pairs) == len({*map(tuple, found.pairs.tolist())}) == 300
    for first, second in found.pairs[::60].tolist():
        _, expected = likeliest(model(torch.tensor([[first, second]])).logits[:, -1])
        ids, _ = unpacked(rows.after_pair(first << KEY_SHIFT | second))
        assert ids.tolist() == expected[0].tolist()
    chosen = found.pairs[:, 0] * VOCAB + found.pairs[:, 1]
    (missing, *_) = set(range(VOCAB**2)) - set(chosen.tolist())
    assert rows.after_pair((missing // VOCAB) << KEY_SHIFT | missing % VOCAB) is None


def test_likely_pairs():
    """Token 0 is followed by 1, token 1 by 0 or 2, token 2 by 0; nothing says 3."""
    ids = np.array([[1, 3], [2, 0], [0, 3], [0, 3]], dtype=np.int32)
    logs = np.log([[0.9999, 0.0001], [0.6, 0.4], [0.9999, 0.0001], [0.9999, 0.0001]]).astype(np.float16)
    assert {*map(tuple, likely_pairs(ids, logs, 4).tolist())} == {(0, 1), (1, 2), (1, 0), (2, 0)}
    assert likely_pairs(ids, logs, 1).tolist() == [[0, 1]]
    assert len(likely_pairs(ids, logs, 100)) == 8


def test_rows_of_pairs_serve_where_a_memory_has_none(few_pairs):
    memory, rows = Memory(), make_vocabulary(tiny_llama(), pairs=True).at(1.0)
    (first, second), (other, another) = ((key >> KEY_SHIFT, key & 0xFFFFFFFF) for key in list(rows.places)[:2])
    own = packed(np.full((1, ROW_LENGTH), 5), np.full((1, ROW_LENGTH), 3))
    memory.pairs.put([other << KEY_SHIFT | another], own)
    grower = Grower(memory, Acceptance(False), rows, [7], None, lambda depth: None, (), ())
    ((row, kind),) = grower._rows(0, -1, first, second, 1.0)
    assert kind == PAIR
    assert row.tolist() == rows.after_pair(first << KEY_SHIFT | second).tolist()
    ((row, _),) = grower._rows(0, -1, other, another, 1.0)
    assert row.tolist() == own[0].tolist()


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.6}])
def test_pairs_change_no_text_and_are_saved(few_pairs, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(vocabulary_module, "CHEAP", {})
    model, memory = tiny_llama(), Memory(path=tmp_path / "memory.npz", max_bytes=2**16)
    memory.warm_vocabulary(model, pairs=True)
    memory.save()
    loaded = Memory(path=memory.path, max_bytes=2**16)
    assert loaded.vocabulary.at(0.6).places == memory.vocabulary.at(0.6).places
    assert len(loaded.vocabulary.pairs) == 300
    torch.manual_seed(5)
    expected = generate_plain(model, prompt(20), max_new_tokens=40, **arguments)
    stranger, found, find = tiny_llama(), [], RowsAlone.after_pair

    def noted(self, key):
        found.append(find(self, key))
        return found[-1]

    monkeypatch.setattr(RowsAlone, "after_pair", noted)
    torch.manual_seed(5)
    with loaded.active():
        assert torch.equal(stranger.generate(**prompt(20), max_new_tokens=40, **arguments), expected)
    assert lade.last_stats().fallback_reason is None
    assert any(row is not None for row in found)
    with np.load(memory.path) as file:
        arrays = dict(file)
    for pairs, says in (
        (arrays["vocabulary_pairs"] + VOCAB, "beyond the vocabulary"),
        (np.zeros((3, 3), int), "shape"),
    ):
        np.savez(memory.path, **arrays | {"vocabulary_pairs": pairs})
        with pytest.raises(ValueError, match=says):
            Memory(path=memory.path)


def test_pairs_are_prepared_where_they_take_seconds(few_pairs, tmp_path, monkeypatch):
    """By `lade tune`."""
    monkeypatch.setenv("LADE_CACHE", str(tmp_path))
    model = tiny_llama()
    cost = 2 * sum(parameter.numel() for parameter in model.parameters()) * (VOCAB + 600)
    for share, num_pairs in [(0.09, 0), (0.11, 300)]:
        monkeypatch.setattr(vocabulary_module, "CHEAP", {"cpu": share * cost})
        assert prepare_vocabulary(model)
        assert len(vocabulary_of(tiny_llama(), may_make=True).pairs) == num_pairs


@pytest.mark.parametrize("num_tokens", [5, 61, 4096, 32_000, 128_256, 151_936, 262_144, 5_000_000])
def test_memory_is_bounded(num_tokens):
    num_rows, length = size_of_rows(num_tokens)
    assert 0 < num_rows <= num_tokens
    assert num_rows * length * 6 <= MAX_BYTES
    assert length == min(num_tokens, ROW_LENGTH) if num_tokens <= 32_000 else 8 <= length < ROW_LENGTH
    assert num_rows == num_tokens or num_tokens > 150_000


@pytest.mark.parametrize("length", [0, ROW_LENGTH + 1])
def test_rows_that_are_too_long_or_empty_are_refused(length):
    """Of a file, for example."""
    with pytest.raises(ValueError, match="wrong shape or type"):
        Vocabulary(np.zeros((3, length), dtype=np.int32), np.full((3, length), -3, dtype=np.float16))


def test_short_rows_hold_each_guess_once():
    """With draws, rows are filled up to one length: with what can be no second guess of a token."""
    vocabulary = Vocabulary(np.arange(24, dtype=np.int32).reshape(3, 8), np.full((3, 8), -3, dtype=np.float16))
    draws = np.random.default_rng(0).exponential(size=24).astype(np.float32)
    for known in (draws, None):
        grower = Grower(Memory(), Acceptance(True), vocabulary.at(1.0), [1], None, lambda _, known=known: known, (), ())
        grown, _ = grower.grow(1, ROW_LENGTH, 0.0, None)
        assert sorted(grown.tokens) == list(range(8, 16))


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.8}])
def test_guesses_from_the_first_step_and_the_same_text(arguments):
    model, inputs = tiny_llama(), prompt(20)
    torch.manual_seed(5)
    expected = generate_plain(model, inputs, max_new_tokens=40, **arguments)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**inputs, max_new_tokens=40, **arguments), expected)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.sources["vocabulary"][0] > 0
    assert stats.block_tokens[0] == 16


def test_a_model_is_run_unasked_only_where_nobody_notices(forwards, monkeypatch):
    assert vocabulary_of(tiny_llama(), may_make=True) is not None  # the control
    assert vocabulary_of(tiny_llama(), may_make=False) is None
    assert vocabulary_of(tiny_llama().train(), may_make=True) is None
    hooked, patched = tiny_llama(), tiny_llama()
    seen = []
    hooked.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert vocabulary_of(hooked, may_make=True) is None
    assert not seen
    patched.forward = patched.forward
    assert vocabulary_of(patched, may_make=True) is None
    inside, training = tiny_llama(), tiny_llama()
    inside.model.layers[0].forward = inside.model.layers[0].forward
    assert vocabulary_of(inside, may_make=True) is None
    training.model.layers[0].train()
    assert vocabulary_of(training, may_make=True) is None
    assert vocabulary_of(tiny_llama(), may_make=True) is not None
    monkeypatch.setattr(vocabulary_module, "CHEAP", {"cpu": 1.0})
    model = tiny_llama()
    calls = forwards(model)
    assert vocabulary_of(model, may_make=True) is None
    assert not calls
    Memory().warm_vocabulary(model)  # asked for
    assert calls
    assert vocabulary_of(model, may_make=True) is not None


def test_prepared_for_later_processes_where_it_takes_seconds(tmp_path, monkeypatch):
    """What `lade tune` does; with DETERMINISTIC=1 no text depends on it."""
    monkeypatch.setenv("LADE_CACHE", str(tmp_path))
    model = tiny_llama()
    cost = 2 * sum(parameter.numel() for parameter in model.parameters()) * VOCAB
    for share, is_made in [(0.001, False), (0.1, True)]:
        monkeypatch.setattr(vocabulary_module, "CHEAP", {"cpu": share * cost})
        assert prepare_vocabulary(tiny_llama()) is is_made
        assert (vocabulary_of(tiny_llama(), may_make=True) is not None) is is_made
        assert vocabulary_of(tiny_llama(), may_make=True, may_load=False) is None


def test_a_model_that_cannot_be_run_so_is_left_alone(monkeypatch):
    model = tiny_llama()

    def fail(model, pairs):
        raise TypeError("pixels, please")

    monkeypatch.setattr(vocabulary_module, "make_vocabulary", fail)
    expected = generate_plain(model, prompt(8), max_new_tokens=8)
    assert torch.equal(model.generate(**prompt(8), max_new_tokens=8), expected)
    assert lade.last_stats().fallback_reason is None


def test_kept_for_later_processes(tmp_path, monkeypatch, forwards):
    monkeypatch.setenv("LADE_CACHE", str(tmp_path))
    first = vocabulary_of(tiny_llama(), may_make=True)
    (path,) = tmp_path.glob("vocabulary-*.npz")
    model = tiny_llama()  # as in another process
    calls = forwards(model)
    assert np.array_equal(vocabulary_of(model, may_make=True).ids, first.ids)
    assert not calls
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    assert not np.array_equal(vocabulary_of(other, may_make=True).logs, first.logs)  # of other weights
    path.write_bytes(path.read_bytes()[:100])
    model = tiny_llama()
    calls = forwards(model)
    assert np.array_equal(vocabulary_of(model, may_make=True).ids, first.ids)
    assert calls


def test_saved_with_a_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary_module, "CHEAP", {})
    model, memory = tiny_llama(), Memory(path=tmp_path / "memory.npz", max_bytes=2**16)
    memory.warm_vocabulary(model)
    memory.save()
    loaded = Memory(path=memory.path, max_bytes=2**16)
    assert np.array_equal(loaded.vocabulary.ids, memory.vocabulary.ids)
    stranger = tiny_llama()
    with loaded.active():
        stranger.generate(**prompt(20), max_new_tokens=20)
    assert lade.last_stats().sources["vocabulary"][0] > 0
    loaded.clear()
    assert loaded.vocabulary is None
    with np.load(memory.path) as file:
        arrays = dict(file)
    arrays["vocabulary_ids"][0, 0] = VOCAB
    np.savez(memory.path, **arrays)
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        Memory(path=memory.path)


@pytest.mark.parametrize(("file_format", "row_length"), [(3, ROW_LENGTH), (2, 8)])
def test_files_of_earlier_formats_load(tmp_path, file_format, row_length):
    """They hold bins in place of grades, the oldest rows of 8 ids, and chances of the kinds that there were then."""
    lade.config_lade(ADAPTIVE=0)  # so that the small model has rows by context
    model, path = tiny_llama(), tmp_path / "memory.npz"
    memory = Memory(path=path)
    with memory.active():
        model.generate(**prompt(20), max_new_tokens=20)
    memory.save()
    left_out = ("vocabulary", "nearest") if file_format == 2 else ("vocabulary",)
    with np.load(path) as file:
        arrays = {name: array for name, array in file.items() if not name.startswith(left_out)}
    arrays["header"] = np.array(str(arrays["header"]).replace('"format": 4', f'"format": {file_format}'))
    for name in {"singles", "pairs", "nearest"}.difference(left_out):
        arrays[f"{name}_ids"] = arrays[f"{name}_ids"][:, :row_length]
        grades = arrays.pop(f"{name}_grades")[:, :row_length]
        arrays[f"{name}_bins"] = np.array(BIN_OF_GRADE, dtype=np.int8)[grades]
    for flag in (0, 1):
        arrays[f"chances_{flag}"] = arrays[f"chances_{flag}"][:, :FIRST_NUM_KINDS]
    np.savez(path, **arrays)
    loaded = Memory(path=path)
    assert len(memory.nearest) > 0
    assert len(loaded) == len(memory) - (len(memory.nearest) if file_format == 2 else 0)
    assert loaded.acceptance[False].trials[:FIRST_NUM_KINDS] == memory.acceptance[False].trials[:FIRST_NUM_KINDS]
    assert loaded.acceptance[False].chances[VOCABULARY:] == Acceptance(False).chances[VOCABULARY:]
    assert len(loaded.acceptance[False].trials) == NUM_KINDS
    key = next(iter(loaded.pairs.slots))
    (ids, grades), (old_ids, old_grades) = (unpacked(table.row(key)) for table in (loaded.pairs, memory.pairs))
    assert ids[:row_length].tolist() == old_ids[:row_length].tolist()
    bins = np.array(BIN_OF_GRADE)
    assert bins[grades[:row_length]].tolist() == bins[old_grades[:row_length]].tolist()
    expected = generate_plain(model, prompt(20), max_new_tokens=20)
    with loaded.active():
        assert torch.equal(model.generate(**prompt(20), max_new_tokens=20), expected)
    for wrong in (-1, len(BIN_EDGES) + 1):
        arrays["pairs_bins"][0, 0] = wrong
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="bins of probabilities are out of range"):
            Memory(path=path)


def test_grades_divide_bins():
    """Files hold grades: other ones need another number of the format."""
    assert len(GRADE_MIDDLES) == len(GRADE_EDGES) + 1 == len(BIN_OF_GRADE) == 61 <= 1 << GRADE_BITS
    assert set(BIN_EDGES) <= set(GRADE_EDGES)
    assert np.searchsorted(BIN_EDGES, [*GRADE_EDGES, 1.0]).tolist() == BIN_OF_GRADE
    ends = [0.0, *GRADE_EDGES, 1.0]
    assert all(low < middle < high for low, middle, high in zip(ends[:-1], GRADE_MIDDLES, ends[1:], strict=True))
    chances = np.geomspace(1e-7, 1.0, 10_000)
    grades = np.searchsorted(GRADE_EDGES, chances)
    assert np.array_equal(np.array(BIN_OF_GRADE)[grades], np.searchsorted(BIN_EDGES, chances))


def test_every_source_of_rows_has_its_sharpness():
    sources = {PAIR, SINGLE, VOCABULARY, SIBLING}
    sources |= {nearest_kind(cosine, pair) for cosine in np.linspace(-1, 1, 201) for pair in (False, True)}
    assert sources == set(SHARPNESS)


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("max_depth", [2, 32])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_trees_are_the_likeliest_of_their_size(size, max_depth, is_drawn, monkeypatch):
    """As a heap of all guesses finds them, each row looked at by itself."""
    numbers = np.random.default_rng(size)
    memory, acceptance = Memory(), Acceptance(False)
    acceptance.chances = np.sort(numbers.uniform(0, 1, NUM_KINDS)).tolist()  # the likelier, the surer
    rows = np.stack([numbers.permutation(VOCAB)[:ROW_LENGTH] for _ in range(VOCAB * VOCAB)])
    grades = -np.sort(-numbers.integers(0, len(GRADE_MIDDLES), rows.shape))  # the likeliest first
    memory.pairs.put([a << KEY_SHIFT | b for a in range(VOCAB) for b in range(VOCAB)], packed(rows, grades))
    monkeypatch.setattr(growth_module, "LIKELY_CHILD", 1.0)
    draws = numbers.exponential(size=(33, VOCAB)).astype(np.float32)
    grower = Grower(memory, acceptance, None, [5, 6], None, lambda depth: draws[depth] if is_drawn else None, (), ())

    def guesses(before, token, depth):
        ids, grades = (numbers.tolist() for numbers in unpacked(memory.pairs.row(before << KEY_SHIFT | token)))
        if not is_drawn:
            return [(token, BIN_OF_GRADE[grade]) for token, grade in zip(ids, grades, strict=True)][:GREEDY_LENGTH]
        sharpness = SHARPNESS[PAIR]
        times, total, known = races(
            np.array(GRADE_MIDDLES)[grades][None], draws[depth].take(ids)[None], np.array([[sharpness]])
        )
        chances = times[0] ** -sharpness / total[0] * np.exp(-times[0] * max(0, 1 - known[0]))
        return list(zip(ids, np.searchsorted(BIN_EDGES, chances), strict=True))

    grown, _ = grower.grow(max_depth, size, 0.0, None)
    frontier, expected = [(-1.0, 5, 6, 0)], []
    while len(expected) <= size:
        negative, before, token, depth = heapq.heappop(frontier)
        expected.append(-negative)
        if depth < max_depth:
            for guess, index in guesses(before, token, depth + 1):
                heapq.heappush(frontier, (negative * acceptance.chances[PAIR + index], token, guess, depth + 1))
    assert grown.chances == pytest.approx(expected[1:], rel=1e-12)
    assert all(parent < node for node, parent in enumerate(grown.parents))
    assert max(grown.depths) <= max_depth


def test_what_sampling_cuts_off_is_not_guessed():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log().repeat(2, 8)  # eight times each, of 1/8 the probability
    for top_k, top_p, num_left in [
        (None, None, ROW_LENGTH),
        (3, None, 3),
        (None, 0.3, 6),
        (10, 0.45, 5),
        (100, 1.0, ROW_LENGTH),
    ]:
        ids, grades = most_likely(logits, 1.0, top_k, top_p)
        assert ids.shape == grades.shape == (2, ROW_LENGTH)
        assert len(set(ids[0].tolist())) == num_left, (top_k, top_p)
        assert not grades[:, num_left:].any()
        assert grades[0, 0] > most_likely(logits)[1][0, 0] or num_left == ROW_LENGTH  # what is left is likelier
