"""Blocks on a CPU read keys and values that several heads share without repeating them, and compute the same bits."""

from types import SimpleNamespace

import pytest
import torch
from support import compare, generate_plain, padded_prompt, prompt, tiny, tiny_llama
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import lade
from lade.common.compat import sdpa_attention_forward
from lade.forward.base import BlockCall, path_for
from lade.forward.cpu import grouped_attention
from lade.forward.cpu.grouped_attention import grouped_attention_forward, has_same_bits
from lade.models import adapter_for

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
needs_kernel = pytest.mark.skipif(
    not all(map(has_same_bits, DTYPES)), reason="this torch repeats keys and values on a CPU"
)
NEW = 24


def states(num_heads, num_shared, num_queries, num_slots, dtype, batch_size=1, head_dim=64):
    """Of a layer: the module, its query, key and value, the latter two a part of a larger cache, and a mask."""
    numbers = torch.Generator().manual_seed(num_slots)
    query = torch.randn(batch_size, num_queries, num_heads, head_dim, generator=numbers).to(dtype).transpose(1, 2)
    cache = torch.randn(2, batch_size, num_shared, num_slots + 9, head_dim, generator=numbers).to(dtype)
    is_hidden = torch.rand(batch_size, 1, num_queries, num_slots, generator=numbers) < 0.3
    is_hidden[-1, :, :, : num_slots // 2] = batch_size > 1  # ragged
    mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, torch.finfo(dtype).min)
    module = SimpleNamespace(num_key_value_groups=num_heads // num_shared, is_causal=True)
    return module, query, *cache[..., :num_slots, :], mask


@pytest.fixture
def calls(monkeypatch):
    """What torch's attention was called with, by `grouped_attention_forward` alone: (query heads, key heads, q)."""
    found = []

    def watch(query, key, value, **arguments):
        assert arguments["enable_gqa"]
        found.append((query.shape[1], key.shape[1], query.shape[2]))
        return functional.scaled_dot_product_attention(query, key, value, **arguments)

    monkeypatch.setattr(grouped_attention, "functional", SimpleNamespace(scaled_dot_product_attention=watch))
    return found


# One layer.


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(14, 2), (8, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_bits_are_those_of_repeated_keys_and_values(heads, dtype, batch_size, calls):
    for num_queries in (2, 17, 64, 129):
        for num_slots in (num_queries, 150, 601):
            layer = states(*heads, num_queries, num_slots, dtype, batch_size)
            expected, _ = sdpa_attention_forward(*layer, scaling=0.2)
            found, weights = grouped_attention_forward(*layer, scaling=0.2)
            assert torch.equal(found, expected)
            assert found.is_contiguous()
            assert weights is None
            assert calls.pop() == (*heads, num_queries)


def test_what_it_is_not_for_is_left_to_transformers(calls):
    """Each case has the bits, or the error, of transformers' function."""
    layer = states(4, 2, 6, 50, torch.float32)
    query, key, value, mask = layer[1:]
    one = states(4, 2, 1, 50, torch.float32)
    repeated = (SimpleNamespace(num_key_value_groups=1), query, *(x.repeat_interleave(2, 1) for x in (key, value)))
    cases = {
        "no mask": ((*layer[:4], None), {}),
        "one token": (one, {}),
        "no groups": ((*repeated, mask), {}),
        "no attribute": ((torch.nn.Identity(), *repeated[1:], mask), {}),
        "causal": ((*layer[:4], None), {"is_causal": False}),
        "bias": (layer, {"position_bias": torch.ones(1, 4, 6, 50).cumsum(-1)}),
        "soft cap": (layer, {"softcap": 0.5}),
        "dropout": (layer, {"dropout": 0.5}),
    }
    for name, (given, arguments) in cases.items():
        results = []
        for function in (sdpa_attention_forward, grouped_attention_forward):
            torch.manual_seed(0)
            try:
                results.append(function(*given, scaling=0.2, **arguments)[0])
            except (ValueError, TypeError) as error:
                results.append(torch.tensor(list(str(error).encode())))
        assert torch.equal(*results), name
    assert not calls
    with pytest.raises(RuntimeError):  # the module says another number of groups than its heads
        grouped_attention_forward(SimpleNamespace(num_key_value_groups=4), query, key, value, mask)
    assert not calls
    grouped_attention_forward(*layer, scaling=0.2, softcap=None, sliding_window=7, output_attentions=False)
    assert calls == [(4, 2, 6)]


def test_a_torch_that_rounds_otherwise_is_noticed(monkeypatch):
    stock = functional.scaled_dot_product_attention

    def rounds(*arguments, enable_gqa=False, **others):
        return stock(*arguments, enable_gqa=enable_gqa, **others) * (1 + enable_gqa * 2e-7)

    for function, expected in ((stock, has_same_bits(torch.float32)), (rounds, False)):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", function)
        assert has_same_bits.__wrapped__(torch.float32) is expected


# The path.


def path_of(model):
    return path_for(BlockCall(adapter=adapter_for(model), device=torch.device("cpu")))


class Own(LlamaForCausalLM):
    """Whose model type is known, and whose code is not."""


def attention(*_, **__):
    """In place of torch's."""


REFUSED = {  # a change of a model of that kind, by monkeypatch's setattr()
    "one head each": ({"num_key_value_heads": 4}, lambda model, put: None),
    "eager": ({"attention": "eager"}, lambda model, put: None),
    "other device": ({}, lambda model, put: model.to("meta")),
    "hooked": ({}, lambda model, put: model.model.layers[0].register_forward_hook(lade.allow_hook(attention))),
    "patched": ({}, lambda model, put: setattr(model.model.layers[0].mlp, "forward", attention)),
    "unknown": ({}, lambda model, put: setattr(model, "__class__", Own)),
    "heads by layer": ({}, lambda model, put: vars(model.config).update(num_key_value_heads=[2, 2])),
    "replaced attention": ({}, lambda model, put: put(functional, "scaled_dot_product_attention", attention)),
    "other bits": ({}, lambda model, put: put(grouped_attention, "has_same_bits", lambda dtype: False)),
}


@needs_kernel
@pytest.mark.parametrize("name", REFUSED)
def test_other_models_keep_their_attention(name, monkeypatch):
    settings, change = REFUSED[name]
    model = tiny_llama(**settings)
    change(model, monkeypatch.setattr)
    blocks = path_of(model)
    assert blocks.kind == ()
    assert blocks.model is blocks.adapter.model


# Texts.


def mistral(dtype):
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9}
    return tiny(MistralForCausalLM, MistralConfig, dtype, attn_implementation="sdpa", **sizes)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize(("make", "mode"), [(tiny_llama, "tree"), (mistral, "lookahead")])
def test_texts_are_plain_ones(lade_on, calls, dtype, arguments, make, mode):
    model, inputs = make(dtype), padded_prompt() if dtype == torch.float64 else prompt()
    lade.config_lade(MODE=mode)
    generate_plain(model, inputs, max_new_tokens=NEW, **arguments)
    assert not calls
    compare(model, inputs, max_new_tokens=NEW, **arguments)
    assert {heads[:2] for heads in calls} == {(4, 2)}
    num_steps = sum(count > 1 for count in lade.last_stats().block_tokens)
    assert len(calls) == 2 * num_steps > 0  # of two layers; steps of a single token are left to transformers
    assert model.config._attn_implementation == "sdpa"


@needs_kernel
def test_a_wrong_attention_would_be_seen(lade_on, monkeypatch):
    """The negative control: what the grouped attention says decides."""
    model = tiny_llama(torch.float32)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW)
    stock = functional.scaled_dot_product_attention
    wrong = SimpleNamespace(scaled_dot_product_attention=lambda *given, **named: -stock(*given, **named))
    monkeypatch.setattr(grouped_attention, "functional", wrong)
    assert not torch.equal(model.generate(**prompt(), max_new_tokens=NEW), expected)
