"""Texts of earlier calls: found again, bounded, kept only where asked for, and never a different output."""

import random
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import compare, prompt

import lade
from lade.drafting.suffix_index import END, MAX_MATCH
from lade.drafting.text_store import TextStore


@pytest.fixture(autouse=True)
def tree(lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=12, ADAPTIVE=0)


def call(model, memory, seed, **arguments):
    """Statistics of a call whose output equals plain generate()'s."""
    with memory.active():
        return compare(model, prompt(20, seed=seed), max_new_tokens=60, **arguments)


SAMPLED = {"do_sample": True, "temperature": 1.0}


def steps(model, memory):
    """Of six calls, the last three of which repeat the first; and tokens accepted from earlier texts."""
    found = [call(model, memory, seed, **SAMPLED) for seed in (0, 1, 2, 0, 1, 2)]
    accepted = sum(hits for s in found for name, (_, hits) in s.sources.items() if name.startswith("earlier text"))
    return sum(s.steps for s in found[3:]), accepted


def test_a_text_that_comes_again_takes_fewer_steps(model):
    without, none = steps(model, lade.Memory())
    kept, accepted = steps(model, lade.Memory(texts=1000))
    assert none == 0 < accepted
    assert kept < 0.7 * without


def test_the_latest_of_two_texts_ends_in_the_store(model):
    """What was generated and the end of its prompt, END behind it; not the rest of the prompt."""
    memory = lade.Memory(texts=10_000)
    for seed in (0, 1):
        call(model, memory, seed, **SAMPLED)
    kept = memory.texts.as_array().tolist()
    assert kept.count(END) == 2
    assert kept[-1] == END
    first = kept[: kept.index(END)]
    assert len(first) == 20 + 60  # the whole prompt is shorter than the longest match
    assert first[:20] == prompt(20, seed=0)["input_ids"][0].tolist()
    with memory.active():
        model.generate(**prompt(40, seed=5), max_new_tokens=7)
    assert len(memory.texts.as_array()) == len(kept) + MAX_MATCH + 7 + 1


def test_a_batch_leaves_each_of_its_texts(model):
    memory = lade.Memory(texts=10_000)
    with memory.active():
        output = model.generate(**prompt(8, 2), max_new_tokens=9)
    kept = memory.texts.as_array()
    for row, text in zip(output.tolist(), np.split(kept, np.flatnonzero(kept == END) + 1), strict=False):
        assert text.tolist()[-10:] == [*row[-9:], END]


def test_what_is_found_is_what_a_search_finds():
    """Against the plain definition, in a store that overwrites itself many times."""
    rng = random.Random(0)
    store, kept = TextStore(200), []
    for _ in range(60):
        text = [rng.randrange(4) for _ in range(rng.randrange(3, 40))]
        store.add(text)
        kept = [*kept, *text, END][-200:]
        assert store.as_array().tolist() == kept
        assert len(store) == len(kept) <= 200
        tail = text[: rng.randrange(3, len(text) + 1)][-MAX_MATCH:]
        longest = 0
        for place in range(3, len(kept)):
            length = 0
            while length < min(place, len(tail)) and kept[place - length - 1] == tail[-length - 1]:
                length += 1
            if length >= 3 and kept[place] != END:
                longest = max(length, longest)
        found = store.match(tail)
        assert (found is not None) == (longest > 0)
        if found is not None:
            following = store.following(found.place, 5)
            assert found.length <= longest
            start = len(kept) - (store._end - found.place)
            assert kept[start - found.length : start] == tail[-found.length :]
            assert kept[start : start + len(following)] == following
            if len(kept) < 60:  # fewer places than are looked at
                assert found.length == longest


def test_memory_is_bounded():
    store = TextStore(1000)
    for number in range(100):
        store.add(range(number, number + 300))
    assert len(store) == 1000
    assert sum(map(sys.getsizeof, vars(store).values())) < 32 * 1000 + 1000


def test_a_text_longer_than_the_store_leaves_its_end():
    store = TextStore(10)
    store.add(list(range(100)))
    assert store.as_array().tolist() == [*range(91, 100), END]
    assert store.match([93, 94, 95]).length == 3
    assert store.match([50, 51, 52]) is store.match([94, 95]) is store.match([]) is None


def test_texts_are_saved_only_where_asked_for(model, tmp_path):
    path = tmp_path / "memory.safetensors"
    memory = lade.Memory(path=path, texts=1000)
    call(model, memory, 0, **SAMPLED)
    memory.save()
    assert "texts" not in load_file(path)
    assert len(lade.Memory(path=path, texts=1000).texts) == 0
    memory.save(texts=True)
    kept = memory.texts.as_array().tolist()
    assert len(kept) > 60
    loaded = lade.Memory(path=path, texts=1000)
    assert loaded.texts.as_array().tolist() == kept
    assert call(model, loaded, 0, **SAMPLED).steps < call(model, lade.Memory(path=path), 0, **SAMPLED).steps
    assert lade.Memory(path=path, texts=30).texts.as_array().tolist() == kept[-30:]
    assert lade.Memory(path=path).texts is None
    memory.clear()
    assert len(memory.texts) == 0
    assert memory.texts.match(kept[:5]) is None


@pytest.mark.parametrize("value", [-1, 10_000_001, "1", True, 1e3, None])
def test_texts_is_checked(value):
    with pytest.raises(ValueError, match=f"texts must be an integer from 0 to 10000000, got {value!r}"):
        lade.Memory(texts=value)


def test_saving_texts_that_are_not_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="texts must be False for a memory that keeps none, got True"):
        lade.Memory().save(tmp_path / "memory.safetensors", texts=True)
    assert not list(tmp_path.iterdir())
