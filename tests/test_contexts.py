"""Rows by context: the most similar one is found, within bounds, and none changes a text."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import compare, prompt, tiny_llama

import lade
from lade.drafting import drafts_from
from lade.drafting.acceptance import of_context
from lade.drafting.contexts import CONTEXT_SIZE, LEAST_CENTRED, MAX_PLACES, ContextTable, projection
from lade.drafting.contexts import projected as projected_by
from lade.drafting.growth import ABOVE_ROOT, LEAST_FOR_CONTEXT, Grower
from lade.drafting.memory import Memory
from lade.drafting.top_k_table import BIN_BITS, ROW_LENGTH, packed
from lade.drafting.tree import TreeDrafter
from lade.stats import tracing


def contexts_of(numbers, count):
    found = numbers.normal(size=(count, CONTEXT_SIZE)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def number_of(found):
    """The number that `put` has given a row."""
    return int(found.after[0])


def rows_of(*ids):
    """Rows in which one id stands in all places."""
    return packed(np.repeat(np.array(ids)[:, None], ROW_LENGTH, 1), np.ones((len(ids), ROW_LENGTH)))


def put(table, tokens, contexts, first=0):
    """Rows whose number stands in the row itself and in the context after it."""
    number = list(range(first, first + len(tokens)))
    table.put(tokens, rows_of(*number), contexts, np.repeat(np.array(number)[:, None], CONTEXT_SIZE, 1))


@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=20), st.sampled_from([1, 7, 200]))
def test_the_most_similar_row_of_a_token_is_found(steps, capacity):
    """As by a search of the latest rows, one by one."""
    numbers = np.random.default_rng(0)
    table, known = ContextTable(capacity), []
    for tokens in steps:
        contexts = contexts_of(numbers, len(tokens))
        put(table, tokens, contexts, first=len(known))
        known += zip(tokens, contexts, strict=True)
    asked = contexts_of(numbers, 1)[0]
    assert len(table) == min(capacity, len(known))
    for token in range(6):
        places = [i for i in range(max(0, len(known) - capacity), len(known)) if known[i][0] == token][-MAX_PLACES:]
        found = table.find(token, asked)
        if not places:
            assert found is None
            continue
        best = max(places, key=lambda i: known[i][1] @ asked)
        assert (found.row >> BIN_BITS).tolist() == [best] * ROW_LENGTH
        assert found.after.tolist() == [best] * CONTEXT_SIZE
        assert found.similarity == pytest.approx(known[best][1] @ asked, abs=1e-5)


def test_an_interrupt_does_not_damage_the_table():
    """It forgets its rows where one comes in the middle of a change."""

    class Interrupting(dict):
        def setdefault(self, *_):
            raise KeyboardInterrupt

    table, contexts = ContextTable(3), contexts_of(np.random.default_rng(0), 3)
    put(table, [0, 1, 1], contexts)
    table._places = Interrupting(table._places)
    with pytest.raises(KeyboardInterrupt):
        put(table, [2], contexts[:1])
    assert (len(table), table.find(1, contexts[1])) == (0, None)
    put(table, [0, 1, 1], contexts)
    put(table, [0], contexts[:1], first=5)  # over the first
    assert number_of(table.find(0, contexts[0])) == 5


def test_the_latest_rows_of_a_token_are_compared():
    contexts, table = contexts_of(np.random.default_rng(0), MAX_PLACES + 2), ContextTable(1000)
    put(table, [3] * len(contexts), contexts)
    found = [number_of(table.find(3, contexts[number])) == number for number in (0, 1, 2, MAX_PLACES + 1)]
    assert found == [False, False, True, True]


def projected(logits):
    return projected_by(logits, projection(logits.device)).numpy()


@pytest.mark.parametrize("num_tokens", [5, 61, 300, 4096, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_contexts_are_as_similar_as_the_logits(num_tokens, dtype):
    torch.manual_seed(0)
    head, states = torch.randn(num_tokens, 16), torch.randn(40, 16)
    states[20:] = states[:20] + 0.05 * torch.randn(20, 16)
    logits = (states @ head.T + torch.randn(num_tokens)).to(dtype)
    table = ContextTable(100)
    assert table.contexts(projected(logits[: LEAST_CENTRED - 1])) is None
    contexts = table.contexts(projected(logits[LEAST_CENTRED - 1 :]))
    assert contexts.shape == (41 - LEAST_CENTRED, CONTEXT_SIZE)
    contexts = table.contexts(projected(logits))
    assert np.linalg.norm(contexts, axis=1) == pytest.approx(1, abs=1e-3)
    cosines = contexts @ contexts.T - 2 * np.eye(40)
    assert cosines.argmax(1).tolist() == [*range(20, 40), *range(20)]
    # What all have in common says nothing: without taking it off, everything would be similar.
    assert num_tokens < 50 or np.abs(np.median(cosines)) < 0.2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("where", [(3, slice(None)), (slice(None), 7), (3, 7), (slice(None), slice(None))])
def test_logits_that_are_no_numbers_are_harmless(value, where):
    """Nothing is raised, even where numpy is set to, and the other rows are found."""
    torch.manual_seed(0)
    logits, table = torch.randn(10, 300), ContextTable(100)
    logits[where] = value
    with np.errstate(all="raise"):
        contexts = table.contexts(projected(logits))
        assert np.isfinite(contexts).all()
        put(table, [1] * 10, contexts)
        assert number_of(table.find(1, contexts[5])) == (0 if where == (slice(None), slice(None)) else 5)
        saved = table.as_arrays()
    restored = ContextTable(100)
    restored.restore(saved)
    assert restored.find(1, contexts[5]) is not None


def test_a_file_does_not_spell_out_the_texts():
    numbers = np.random.default_rng(0)
    tokens, table = numbers.integers(0, 50, 300).tolist(), ContextTable(1000)
    put(table, tokens, contexts_of(numbers, 300))
    saved = table.as_arrays()
    assert saved.tokens.tolist() == sorted(tokens)
    for token in range(50):  # of each token the order is kept
        order = (saved.rows[saved.tokens == token, 0] >> BIN_BITS).tolist()
        assert order == sorted(order)


def test_guesses_of_similar_contexts():
    """After the root its own context is asked for, after a guess that of the row which gave it."""
    memory, contexts = Memory(), contexts_of(np.random.default_rng(0), 4)
    memory.contexts.put([8, 8, 9], rows_of(9, 10, 11), contexts[[0, 1, 2]], contexts[[2, 3, 3]])

    def guesses(context):
        grower = Grower(memory, [5, 8], context, None, ())
        growth = grower.grow(3, 8, 0.0)
        return growth.tokens, growth.chances, grower

    certain = of_context(1.0).by_bin[-1]
    tokens, chances, grower = guesses(contexts[0])
    assert tokens == [9, 11]  # token 9 has one row, in the context after the first row of token 8
    assert chances == pytest.approx([certain, certain**2])
    assert grower._rows(0, ABOVE_ROOT, 8, 0.9 * LEAST_FOR_CONTEXT) == []
    assert guesses(contexts[1])[0][0] == 10
    # No guess counts as more similar than the row that led to it.
    other = contexts[3] - (contexts[3] @ contexts[0]) * contexts[0]
    tokens, chances, _ = guesses(0.8 * contexts[0] + 0.6 * other / np.linalg.norm(other))
    similar = of_context(0.8).by_bin[-1]
    assert similar < certain
    assert tokens == [9, 11]
    assert chances == pytest.approx([similar, similar**2])
    assert guesses(None)[0] == []  # the control


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.6}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_is_plain_and_a_saved_memory_goes_on(tmp_path, lade_on, arguments, batch_size):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0)
    model, memory = tiny_llama(), Memory(path=tmp_path / "memory.safetensors")
    with memory.active():
        for _ in range(2):
            compare(model, prompt(20, batch_size), max_new_tokens=40, **arguments)
    assert lade.last_stats().sources["context"][0] > 0
    memory.save()
    loaded = Memory(path=memory.path)
    assert len(loaded.contexts) == len(memory.contexts) > 0
    for mine, other in zip(memory.contexts.as_arrays()[1:], loaded.contexts.as_arrays()[1:], strict=True):
        assert np.array_equal(mine, other)
    small = Memory(path=memory.path, max_bytes=2**17)
    assert len(small.contexts) == min(len(memory.contexts), small.contexts.capacity)
    memory.clear()
    assert len(memory) == 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_context_of_each_row_is_the_one_after_its_last_token(lade_on, batch_size):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0)
    model, memory, drafters, ends, found, expected = tiny_llama(), Memory(), [], [], [], []
    with memory.active():  # from here on contexts are known
        model.generate(**prompt(20, seed=1), max_new_tokens=40, do_sample=False)

    def make(request):
        drafters.append(TreeDrafter(request))
        return drafters[-1]

    def keep(step, outcome):
        for row, accepted in enumerate(outcome.accepted):
            if accepted is not None:  # a row may be done before the other
                ends.append(accepted[-1] + 1 if accepted else 0)
                expected.append(memory.contexts.contexts(projected(outcome.logits[row, ends[-1]][None]))[0])
                found.append(drafters[0]._texts[row].context)

    with memory.active(), drafts_from(make), tracing(keep):
        model.generate(**prompt(20, batch_size), max_new_tokens=40, do_sample=False)
    assert any(ends) or batch_size > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(np.subtract(expected[0], expected[1])).max() > 0.1  # steps and rows differ
