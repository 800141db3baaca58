"""Rows of the prompt: what the model predicted behind its last tokens is learned where that pays; no text changes."""

import re
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import VOCAB, compare, generate_plain, note_calls, padded_prompt, prompt, tiny_llama
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import lade
from lade.common.compat import CACHE_NAME
from lade.drafting import DraftRequest, make_drafter, register_drafter
from lade.drafting import tree as tree_module
from lade.drafting.likeliest import most_likely
from lade.drafting.memory import Memory
from lade.drafting.top_k_table import ids_of
from lade.drafting.tree import MAX_PROMPT_ROWS, TreeDrafter
from lade.models.base import prompt_key_mask
from lade.switch import current_config

pytestmark = pytest.mark.usefixtures("lade_on")


@pytest.fixture
def read(monkeypatch):
    """The shapes of the logits that prompts have given."""
    return note_calls(monkeypatch, TreeDrafter, "read_prompt", lambda drafter, logits: tuple(logits.shape))


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
    return [*memory.table.as_arrays(), *(memory.contexts.as_arrays() or ())]


def same(some, others):
    return len(some) == len(others) and all(
        a.shape == b.shape and np.allclose(a, b, atol=1e-3) for a, b in zip(some, others, strict=True)
    )


def distinct_prompt():
    """24 ids, no two of them equal."""
    ids = 3 + torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(0))[None, :24]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def logits_of(model, inputs, count):
    """Behind the last tokens but the very last one."""
    with torch.no_grad():
        return model(**inputs).logits[:, -1 - count : -1]


@pytest.mark.parametrize("inputs", [prompt(24), padded_prompt()], ids=["one", "padded"])
def test_the_rows_are_those_of_the_text(model, inputs):
    """As if the memory had been warmed with each prompt but its last token."""
    memory, warmed = Memory(), Memory()
    drafter = drafter_of(model, inputs, memory)
    drafter.read_prompt(logits_of(model, inputs, 23))
    texts = [ids[mask.bool()][:-1] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    warmed.warm(model, texts)
    assert len(memory) > 30
    assert same(all_rows(memory), all_rows(warmed))
    other = Memory()
    other.warm(model, [text.flip(0) for text in texts])
    assert not same(all_rows(memory), all_rows(other))


def test_the_rows_are_learned_by_generate(model, monkeypatch):
    """Those of the prompt's forward, each in its place."""
    read, inputs = [], prompt(24)
    monkeypatch.setattr(TreeDrafter, "read_prompt", lambda _, logits: read.append(logits.clone()))
    model.generate(**inputs, max_new_tokens=8)
    torch.testing.assert_close(read, [logits_of(model, inputs, 23)])


@pytest.mark.parametrize("count", [5, 23, 30])
@pytest.mark.parametrize("masked", [slice(0, 0), slice(0, 6), slice(10, 14), slice(20, 24)])
def test_each_row_is_its_tokens(model, count, masked):
    """Whatever is masked: the beginning, a hole, the end. More rows than tokens: an adapter adds its own."""
    inputs, memory = distinct_prompt(), Memory()
    inputs["attention_mask"][0, masked] = 0
    logits = torch.randn(1, count, VOCAB, generator=torch.Generator().manual_seed(0))
    drafter_of(model, inputs, memory).read_prompt(logits)
    ids, is_text = inputs["input_ids"][0].tolist(), inputs["attention_mask"][0].tolist()
    places = [place for place in range(max(0, 23 - count), 23) if is_text[place]]
    expected = most_likely(logits[0, [place - 23 for place in places]])
    assert memory.table.as_arrays().keys.tolist() == [ids[place] for place in places]
    for place, row in zip(places, expected, strict=True):
        assert np.array_equal(memory.table.row(ids[place]), row)


def test_the_context_of_the_last_token_is_known(model):
    inputs, memory = prompt(24), Memory()
    drafter = drafter_of(model, inputs, memory)
    drafter.read_prompt(logits_of(model, inputs, 23))
    [text] = drafter._texts
    assert np.array_equal(text.context, memory.contexts._after[22])
    assert np.linalg.norm(text.context) == pytest.approx(1)
    masked = prompt(24)
    masked["attention_mask"][0, -3:] = 0
    drafter = drafter_of(model, masked, Memory())
    drafter.read_prompt(logits_of(model, masked, 23))
    assert drafter._texts[0].context is None  # its row is not the last one


def test_ids_without_an_embedding_are_no_guesses(model):
    memory, inputs = Memory(), prompt(24)
    logits = torch.cat([logits_of(model, inputs, 23), torch.full((1, 23, 7), 100.0)], dim=-1)
    drafter_of(model, inputs, memory).read_prompt(logits)
    assert ids_of(memory.table.as_arrays().rows).max() < VOCAB


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_stay_as_they_are(model, read, sampling, batch_size):
    inputs = padded_prompt() if batch_size == 3 else prompt(24)
    arguments = {"max_new_tokens": 40, "do_sample": sampling}
    with Memory().active():
        assert compare(model, inputs, **arguments).steps < 40
    assert read == [(batch_size, 23, VOCAB)]


def test_the_forward_is_asked_for_so_many_rows(model, monkeypatch, read):
    monkeypatch.setattr(tree_module, "MAX_PROMPT_ROWS", 6)
    kept, original = [], model.forward

    @wraps(original)
    def forward(*args, **kwargs):
        kept.append(kwargs.get("logits_to_keep"))
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", lade.allow_hook(forward))
    for batch_size in (1, 3):
        del kept[:]
        model.generate(**prompt(24, batch_size), max_new_tokens=8)
        assert 1 + 6 // batch_size in [rows for rows in kept if isinstance(rows, int)]
    assert read == [(1, 6, VOCAB), (3, 2, VOCAB)]


def test_rows_that_the_user_asks_for(model, monkeypatch, read):
    """All: they are there, and the last ones are learned. Some: they may be any, and none is."""
    inputs = prompt(140)
    for kept, shapes in ((0, [(1, MAX_PROMPT_ROWS, VOCAB)]), (torch.tensor([0, -1]), [])):
        del read[:]
        arguments = {"max_new_tokens": 8, "logits_to_keep": kept}
        compare(model, inputs, **arguments)
        assert read == shapes


@pytest.mark.parametrize("chunk", [5, 23])
def test_a_prompt_in_chunks_has_none(model, read, chunk):
    """Each chunk would compute as many."""
    inputs = prompt(24, batch_size=2)
    compare(model, inputs, max_new_tokens=20, prefill_chunk_size=chunk)
    assert read == []


def test_embeddings_in_place_of_ids(model, read):
    """Without ids there are no rows; behind ids that only keep places nothing is learned."""
    inputs = prompt(24)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    arguments = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"], "max_new_tokens": 20}
    compare(model, {}, **arguments)
    assert read == []
    ids, memory = distinct_prompt()["input_ids"], Memory()
    ids[0, 10] = -1
    drafter_of(model, inputs | {"input_ids": ids}, memory).read_prompt(logits_of(model, inputs, 23))
    assert memory.table.as_arrays().keys.tolist() == ids[0, 11:-1].tolist()


def test_after_a_cached_prefix(model, read):
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :15], **{CACHE_NAME: cache})
    assert torch.equal(model.generate(**inputs, **{CACHE_NAME: cache}, max_new_tokens=20), expected)
    assert lade.last_stats().fallback_reason is None
    assert read == [(1, 8, VOCAB)]


def test_a_call_that_ends_at_once_leaves_nothing(model):
    class Refuses(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise ZeroDivisionError

    with Memory().active() as memory, pytest.raises(ZeroDivisionError):
        model.generate(**prompt(24), max_new_tokens=20, logits_processor=LogitsProcessorList([Refuses()]))
    assert len(memory) == 0


def test_the_first_token_does_not_wait_for_them(model, monkeypatch):
    order = note_calls(monkeypatch, TreeDrafter, "read_prompt", lambda *_: "read")

    class Streamer(BaseStreamer):
        def put(self, value):
            order.append("put")

        def end(self):
            pass

    model.generate(**prompt(24), max_new_tokens=8, streamer=Streamer())
    assert order[:4] == ["put", "put", "read", "put"]  # the prompt, its token, its rows


def test_where_they_pay(monkeypatch):
    """Not on a CPU where costs matter, nor where processes compute one forward together."""
    model, inputs = tiny_llama(), prompt(24, batch_size=2)

    def wanted(on_accelerator, inputs=inputs, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(tree_module, "on_host", lambda _: not on_accelerator)
            config = replace(current_config(), **settings)
            return drafter_of(model, inputs, Memory(), config=config).prompt_rows

    assert wanted(False, adaptive=False) == wanted(True, adaptive=False) == MAX_PROMPT_ROWS // 2
    assert wanted(True, adaptive=True) == MAX_PROMPT_ROWS // 2
    assert wanted(False, adaptive=True) == 0
    assert wanted(True, adaptive=True, max_block=4) == 4
    assert wanted(True, prompt(24, batch_size=MAX_PROMPT_ROWS + 1), adaptive=True) == 0
    assert wanted(True, prompt(1), adaptive=True) == 0
    with monkeypatch.context() as patch:
        patch.setattr(DraftRequest, "is_split", True)
        assert wanted(True, adaptive=True) == 0


@pytest.mark.parametrize("has_prompt_rows", [False, True])
def test_drafters_of_users(model, lade_on, has_prompt_rows):
    """They get what they ask for; one that knows nothing of it gets nothing."""
    got = []

    class Mine(SimpleNamespace):
        def __init__(self, request):
            tree = TreeDrafter(request)
            super().__init__(propose=tree.propose, learn=tree.learn, finish=tree.finish, sources=tree.sources)
            if has_prompt_rows:
                self.prompt_rows, self.read_prompt = 4, got.append

    register_drafter("mine", Mine)
    lade.config_lade(MODE="mine")
    inputs = prompt(24)
    compare(model, inputs, max_new_tokens=20)
    assert [tuple(logits.shape) for logits in got] == [(1, 4, VOCAB)] * has_prompt_rows


@pytest.mark.parametrize(
    ("rows", "has_method", "error", "message"),
    [
        (-5, True, ValueError, "prompt_rows must be an integer of at least 0, got -5"),
        (4.0, True, ValueError, "prompt_rows must be an integer of at least 0, got 4.0"),
        (True, True, ValueError, "prompt_rows must be an integer of at least 0, got True"),
        (4, False, TypeError, "has no read_prompt()"),
    ],
)
def test_wrong_drafters_of_users(model, lade_on, rows, has_method, error, message):
    class Mine(SimpleNamespace):
        def __init__(self, request):
            tree = TreeDrafter(request)
            methods = ["propose", "learn", "finish", "sources"] + ["read_prompt"] * has_method
            super().__init__(prompt_rows=rows, **{name: getattr(tree, name) for name in methods})

    register_drafter("mine", Mine)
    lade.config_lade(MODE="mine")
    with pytest.raises(error, match=re.escape(message)):
        model.generate(**prompt(24), max_new_tokens=20)
