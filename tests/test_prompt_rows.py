"""Rows of the prompt: what the model predicted behind its last tokens is learned where that pays; no text changes."""

from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import VOCAB, generate_plain, padded_prompt, prompt, tiny_llama

import lade
from lade.config import current_config
from lade.drafting import DraftRequest, make_drafter, register_drafter
from lade.drafting import tree as tree_module
from lade.drafting import vocabulary as vocabulary_module
from lade.drafting.memory import Memory
from lade.drafting.tree import MAX_PROMPT_ROWS, TreeDrafter
from lade.models.base import prompt_key_mask


@pytest.fixture
def large(lade_on, monkeypatch):
    """Models are too large for rows of tokens alone, and sizes do not follow costs: so prompts are learned from."""
    monkeypatch.setattr(vocabulary_module, "CHEAP", {})


@pytest.fixture
def read(monkeypatch):
    """The shapes of the logits that prompts have given."""
    shapes, original = [], TreeDrafter.read_prompt

    def spy(drafter, logits):
        shapes.append(tuple(logits.shape))
        return original(drafter, logits)

    monkeypatch.setattr(TreeDrafter, "read_prompt", spy)
    return shapes


def drafter_of(model, inputs, memory, **changes):
    request = DraftRequest(
        config=current_config(),
        model=model,
        num_tokens=VOCAB,
        prompt_ids=inputs["input_ids"],
        key_mask=prompt_key_mask(inputs["attention_mask"]),
        temperature=None,
    )
    with memory.active():
        return make_drafter(replace(request, **changes))


def all_rows(memory):
    """What the tables hold, in a form that can be compared."""
    nearest = memory.nearest.as_arrays()
    contexts = [] if nearest is None else [*nearest.table, nearest.previous, nearest.before, nearest.after]
    return [*memory.singles.as_arrays(), *memory.pairs.as_arrays(), *contexts]


def same(some, others):
    return len(some) == len(others) and all(
        a.shape == b.shape and np.allclose(a, b, atol=1e-3) for a, b in zip(some, others, strict=True)
    )


def logits_of(model, inputs, count):
    """Behind the last tokens but the very last one."""
    with torch.no_grad():
        return model(**inputs).logits[:, -1 - count : -1]


@pytest.mark.parametrize("inputs", [prompt(24), padded_prompt()], ids=["one", "padded"])
def test_the_rows_are_those_of_the_text(model, large, inputs):
    """As if the memory had been warmed with each prompt but its last token."""
    memory, warmed = Memory(), Memory()
    drafter = drafter_of(model, inputs, memory)
    drafter.read_prompt(logits_of(model, inputs, 23))
    texts = [ids[mask.bool()][:-1] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    warmed.warm(model, texts)
    assert len(memory) > 60
    assert same(all_rows(memory), all_rows(warmed))
    other = Memory()
    other.warm(model, [text.flip(0) for text in texts])
    assert not same(all_rows(memory), all_rows(other))


def test_the_rows_are_learned_by_generate(model, large, monkeypatch):
    """Those of the prompt's forward, each in its place."""
    read, inputs = [], prompt(24)
    monkeypatch.setattr(TreeDrafter, "read_prompt", lambda _, logits: read.append(logits.clone()))
    model.generate(**inputs, max_new_tokens=8)
    torch.testing.assert_close(read, [logits_of(model, inputs, 23)])


def test_only_the_end_of_a_prompt(model, large):
    memory, warmed, inputs = Memory(), Memory(), prompt(24)
    drafter_of(model, inputs, memory).read_prompt(logits_of(model, inputs, 5))
    ids = inputs["input_ids"][0]
    warmed.warm(model, [ids[:-1]])
    latest = [(int(ids[-3 - i]), int(ids[-2 - i])) for i in range(5)]
    assert set(memory.pairs.slots) == {before << vocabulary_module.KEY_SHIFT | token for before, token in latest}
    assert set(memory.pairs.slots) < set(warmed.pairs.slots)


def test_the_context_of_the_last_token_is_known(model, large):
    inputs, memory = prompt(24), Memory()
    drafter = drafter_of(model, inputs, memory)
    drafter.read_prompt(logits_of(model, inputs, 23))
    [text] = drafter._texts
    assert np.array_equal(text.context, memory.nearest._after[22])
    assert np.linalg.norm(text.context) == pytest.approx(1)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_stay_as_they_are(model, large, read, sampling, batch_size):
    inputs = padded_prompt() if batch_size == 3 else prompt(24)
    arguments = {"max_new_tokens": 40, "do_sample": sampling}
    torch.manual_seed(1)
    expected = generate_plain(model, inputs, **arguments)
    with Memory().active() as memory:
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs, **arguments), expected)
    assert read == [(batch_size, 23, VOCAB)]
    assert lade.last_stats().steps < 40
    assert memory.nearest.as_arrays() is not None


def test_outputs_stay_as_they_are(model, large, read):
    inputs = prompt(24)
    arguments = {"max_new_tokens": 12, "return_dict_in_generate": True}
    arguments |= {f"output_{name}": True for name in ("scores", "logits", "hidden_states")}
    expected = generate_plain(model, inputs, **arguments)
    found = model.generate(**inputs, **arguments)
    assert read
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for one, other in zip(found[name], expected[name], strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other)
    assert found.hidden_states[0][-1].shape == expected.hidden_states[0][-1].shape


def test_the_forward_is_asked_for_so_many_rows(model, large, monkeypatch, read):
    monkeypatch.setattr(tree_module, "MAX_PROMPT_ROWS", 6)
    kept, original = [], model.forward

    @wraps(original)
    def forward(*args, **kwargs):
        kept.append(kwargs.get("logits_to_keep"))
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    for batch_size in (1, 3):
        del kept[:]
        model.generate(**prompt(24, batch_size), max_new_tokens=8)
        assert 1 + 6 // batch_size in [rows for rows in kept if isinstance(rows, int)]
    assert read == [(1, 6, VOCAB), (3, 2, VOCAB)]


def test_all_rows_that_the_user_asks_for(model, large, read):
    """Then they are there anyway, and the last ones are learned."""
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=8, logits_to_keep=0)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, logits_to_keep=0), expected)
    assert read == [(1, 23, VOCAB)]


@pytest.mark.parametrize(("chunk", "expected_rows"), [(5, [(2, 3, VOCAB)]), (23, [])])
def test_a_prompt_in_chunks(model, large, read, chunk, expected_rows):
    """What the last chunk gave."""
    inputs = prompt(24, batch_size=2)
    expected = generate_plain(model, inputs, max_new_tokens=20, prefill_chunk_size=chunk)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, prefill_chunk_size=chunk), expected)
    assert read == expected_rows


def test_embeddings_in_place_of_ids(model, large, read):
    """Without ids, and with ids that only keep places, behind which nothing is learned."""
    inputs = prompt(24)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    arguments = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"], "max_new_tokens": 20}
    expected = generate_plain(model, {}, **arguments)
    with Memory().active():
        assert torch.equal(model.generate(**arguments), expected)
    assert read == [(1, 23, VOCAB)]
    ids = inputs["input_ids"].clone()
    ids[0, 10] = -1
    memory = Memory()
    drafter_of(model, inputs | {"input_ids": ids}, memory).read_prompt(logits_of(model, inputs, 23))
    assert set(memory.singles.slots) == set(ids[0, 11:-1].tolist())


def test_prompts_of_a_token_have_no_rows(model, large, read):
    inputs = prompt(1)
    expected = generate_plain(model, inputs, max_new_tokens=20)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20), expected)
    assert read == []


def test_sampling_leaves_out_what_it_cannot_choose(model, large):
    inputs, memory = prompt(24), Memory()
    drafter = drafter_of(model, inputs, memory, temperature=0.7, top_k=3)
    drafter.read_prompt(logits_of(model, inputs, 23))
    _, ids, _ = memory.singles.as_arrays()
    assert max(len(set(row.tolist())) for row in ids) == 3


def test_where_they_pay(lade_on, monkeypatch):
    """On an accelerator, or where costs do not matter; not where tokens have rows of their own alone."""
    model, inputs = tiny_llama(), prompt(24, batch_size=2)

    def wanted(adaptive, device="cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "device", torch.device(device))
            config = replace(current_config(), adaptive=adaptive)
            return drafter_of(model, inputs, Memory(), config=config, may_measure=False).prompt_rows

    assert wanted(adaptive=False) == wanted(adaptive=False, device="meta") == MAX_PROMPT_ROWS // 2
    assert wanted(adaptive=True) == 0
    assert wanted(adaptive=True, device="meta") == MAX_PROMPT_ROWS // 2
    assert drafter_of(model, inputs, Memory(), may_measure=True).prompt_rows == 0  # makes rows of tokens alone
    assert wanted(adaptive=True, device="meta") == 0


@pytest.mark.parametrize("has_prompt_rows", [False, True])
def test_drafters_of_users(model, lade_on, has_prompt_rows):
    """They get what they ask for; one that knows nothing of it gets nothing."""
    got = []

    class Mine(SimpleNamespace):
        def __init__(self, request):
            tree = TreeDrafter(request)
            super().__init__(
                propose=tree.propose, learn=tree.learn, finish=tree.finish, spent=tree.spent, sources=tree.sources
            )
            if has_prompt_rows:
                self.prompt_rows, self.read_prompt = 4, got.append

    register_drafter("mine", Mine)
    lade.config_lade(MODE="mine")
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=20)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20), expected)
    assert [tuple(logits.shape) for logits in got] == [(1, 4, VOCAB)] * has_prompt_rows
