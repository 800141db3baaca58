"""Reasons for a fallback that users of other libraries meet: true, and the same each time."""

import copy
import functools
import logging
import re
import sys
import types

import pytest
import torch
from support import prompt, run_both, tiny_llama
from support.families import before, named, rope
from torch.ao import quantization
from transformers import GenerationMixin, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

import lade
from lade import augment
from lade.models import adapter_for

pytestmark = pytest.mark.usefixtures("small_block")


def reason_of(model):
    """Why plain generate() runs; twice, with its text."""
    reasons = []
    for seed in (0, 1):
        reasons.append(run_both(model, prompt(seed=seed), max_new_tokens=8).fallback_reason)
    assert len(set(reasons)) == 1
    if reasons[0] is not None:
        assert not re.search(r"\d\.\d|<class| at 0x", reasons[0])
    return reasons[0]


def test_peft_prompt_tuning():
    """It puts a method of its own on the model for the time of a call; this is a stand-in for it."""
    model = named("phi3").build()  # whose own method is known
    stock = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))
    assert "prepare_inputs_for_generation of its own" in reason_of(model)

    def of_peft(self, *args, **kwargs):
        return stock(*args, **kwargs)

    of_peft.__module__ = "peft.peft_model"
    model.prepare_inputs_for_generation = types.MethodType(of_peft, model)
    assert "PEFT's prompt and prefix tuning" in reason_of(model)


def test_a_forward_that_does_not_say_what_it_takes():
    model = tiny_llama()
    stock = model.forward
    model.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    assert "does not say which arguments it takes" in reason_of(model)
    model.forward = lade.allow_hook(functools.wraps(stock)(model.forward))
    assert reason_of(model) is None


@pytest.mark.parametrize("copied", [lambda layer: layer, copy.deepcopy], ids=["shared", "copied"])
def test_two_layers_with_one_place_in_the_cache(copied):
    """Plain generate()'s cache then grows twice per token, where it can run at all; lade's would be overwritten."""
    model = tiny_llama()
    assert adapter_for(model).unsupported_layers() is None
    model.model.layers[1] = copied(model.model.layers[0])
    assert "same layer of the cache" in adapter_for(model).unsupported_layers()
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1
    assert reason_of(model) is None
    # Of another name; plain generate() cannot run it either.
    model = named("bloom").build()
    assert adapter_for(model).unsupported_layers() is None
    model.transformer.h[1] = copied(model.transformer.h[0])
    assert "same layer of the cache" in adapter_for(model).unsupported_layers()


def test_layer_types_that_the_model_does_not_read():
    """They come from a config.json made for another class. The model's masks are no dictionary by type."""
    model = tiny_llama()
    model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers
    assert "layer_types, which the models of a LlamaConfig do not read" in reason_of(model)
    model.config.__class__ = type("OwnConfig", (LlamaConfig,), {})
    assert "layer_types, which the models of a OwnConfig do not read" in reason_of(model)


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_8_bit_layers_of_bitsandbytes(monkeypatch, threshold):
    """A stand-in that, as they do, keeps columns in full precision by the largest value of all rows."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setattr(Linear8bitLt, "__module__", "bitsandbytes.nn.modules")
    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Linear8bitLt(mlp.down_proj, threshold / 3)
    reason = reason_of(model)
    assert reason is None if threshold == 0 else "8-bit layers of bitsandbytes" in reason


class Linear8bitLt(torch.nn.Module):
    def __init__(self, stock, threshold):
        super().__init__()
        self.weight, self.state = stock.weight, types.SimpleNamespace(threshold=threshold)

    def forward(self, x):
        is_kept = x.abs().flatten(0, -2).amax(0) > (self.state.threshold or float("inf"))
        scale = x.masked_fill(is_kept, 0).abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return torch.where(is_kept, x, (x / scale).round() * scale) @ self.weight.T


def test_without_the_first_layer():
    """A cache counts its tokens by its first layer."""
    for model in (tiny_llama(), named("gpt2").build()):
        layers = getattr(model, "model", getattr(model, "transformer", None))
        name = "layers" if hasattr(layers, "layers") else "h"
        setattr(layers, name, getattr(layers, name)[1:])
        assert "no layer writes to the first layer of the cache" in reason_of(model)


def test_settings_that_only_a_part_reads():
    """A chunk size makes the cache forget keys that layers see; a rotary embedding keeps its first type."""
    model = tiny_llama()
    model.config.attention_chunk_size = 8
    assert "its cache has a window or chunks" in reason_of(model)
    model = tiny_llama(rope_parameters=rope("dynamic", factor=2.0))
    model.config.rope_parameters["rope_type"] = "default"
    assert "its configuration does not say so" in reason_of(model)


def test_an_embedding_that_is_rescaled():
    model = tiny_llama()
    model.get_input_embeddings().max_norm = 0.5
    assert "max_norm" in reason_of(model)


def test_observers_of_torch():
    model = tiny_llama(torch.float32)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.qconfig = quantization.QConfig(quantization.MinMaxObserver, quantization.default_weight_observer)
    quantization.prepare(model, inplace=True)
    assert "_observer_forward_hook would see guesses" in reason_of(model)


def test_layers_whose_configurations_differ():
    """Gemma 4 with fewer key heads in its global layers is served, a window of one layer alone is not."""
    pytest.importorskip("transformers.integrations.heterogeneity")
    settings = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    assert reason_of(named("gemma4_text", **settings).build()) is None
    if before("5.23"):
        return  # plain generate() may raise for the other
    model = tiny_llama(sliding_window=40, per_layer_config={1: {"sliding_window": 4}})
    assert "is a per-layer attribute" in reason_of(model)


@pytest.mark.parametrize("size", [1, 2])
def test_a_window_of_one_token(size):
    """transformers' cache keeps the last `size - 1` keys, and all where that is none."""
    reason = reason_of(named("mistral-window", sliding_window=size).build())
    assert (reason is None) == (size > 1)


@pytest.mark.parametrize("on_class", [True, False])
def test_a_method_other_than_forward(monkeypatch, on_class):
    """That a single token attends to the last six slots alone is found out by the self-check."""
    model, stock = named("gpt_neo").build(), GPTNeoSelfAttention._attn

    def local(self, query, key, value, mask=None):
        if query.shape[-2] == 1:
            mask = torch.zeros(key.shape[-2], dtype=query.dtype)
            mask[:-6] = torch.finfo(query.dtype).min
        return stock(self, query, key, value, mask)

    assert reason_of(model) is None
    if on_class:
        monkeypatch.setattr(GPTNeoSelfAttention, "_attn", local)
    else:
        attention = model.transformer.h[0].attn.attention
        attention._attn = types.MethodType(local, attention)
    assert "a trial block on this 'gpt_neo' model" in reason_of(model)


def test_frequencies_under_another_name(monkeypatch):
    """transformers looks for "dynamic" in the name of a kind of rotary embedding."""
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "dynamic_own", ROPE_INIT_FUNCTIONS["dynamic"])
    model = tiny_llama(max_position_embeddings=30, rope_parameters=rope("dynamic_own", factor=4.0))
    stats = run_both(model, prompt(24), max_new_tokens=30)
    assert max(stats.block_tokens) > max(stats.block_tokens[-24:]) == 1  # beyond 30 tokens there are no guesses


def test_decoders_without_position_ids():
    """They count slots, which are no positions where guesses lie side by side."""
    assert "ignore the mask or the positions" in reason_of(named("bart").build())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bloom", {"sliding_window": 8}),
        ("gpt_neo", {"attention_chunk_size": 8}),
        ("llama4_text", {"attention_chunk_size": 1}),
    ],
)
def test_windows_of_chains(name, settings):
    """Of the cache alone, or of one token. Older versions of Bloom raise."""
    model = named(name).build()
    assert reason_of(model) is None
    for key, value in settings.items():
        setattr(model.config, key, value)
    assert "its cache has a window" in adapter_for(model).unsupported_layers()


def test_continuous_batching_is_named(caplog, monkeypatch):
    """It bypasses generate(), so that one line in the log is all there can be."""
    owner = augment._owner("init_continuous_batching")
    assert owner is not GenerationMixin
    monkeypatch.setattr(augment, "_warned", set())
    lade.restore_all()
    before = vars(owner)["init_continuous_batching"]
    monkeypatch.setattr(owner, "init_continuous_batching", lambda self, *args, **kwargs: "a manager")
    lade.augment_all()
    with caplog.at_level(logging.WARNING, logger="lade"):
        for _ in range(2):
            assert tiny_llama().init_continuous_batching() == "a manager"
    assert [record.getMessage() for record in caplog.records if "continuous batching" in record.getMessage()] == [
        "lade: plain generate() runs instead of lookahead decoding: "
        "continuous batching (generate_batch) runs a decoding loop of its own."
    ]
    lade.restore_all()
    monkeypatch.undo()
    assert vars(owner)["init_continuous_batching"] is before
