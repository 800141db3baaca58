"""Models that their user has compiled, and generate()'s own compilation: the call falls back."""

import functools

import pytest
import torch
from support import compare, generate_plain, prompt, tiny_llama
from transformers import CompileConfig

import lade

dynamo = pytest.importorskip("torch._dynamo")


@pytest.fixture(autouse=True)
def nothing_compiled(small_block):
    dynamo.reset()
    yield
    dynamo.reset()


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compile_wrapped(model):
    """The wrapper has the attributes of what it wraps."""
    compiled = torch.compile(model.forward, backend="eager")
    model.forward = functools.wraps(compiled)(lambda *args, **arguments: compiled(*args, **arguments))


def compile_module(model):
    model.compile(backend="eager")


def compile_layers(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer, backend="eager")


def compile_parts(model):
    """As accelerate's regional compilation does."""
    for part in model.modules():
        if type(part).__name__.endswith("DecoderLayer"):
            part.compile(backend="eager")


@pytest.mark.parametrize("compiles", [compile_forward, compile_wrapped, compile_module, compile_layers, compile_parts])
def test_compiled_models_fall_back(compiles):
    """Dynamo would compile each shape of a block anew, and raise at its limit."""
    model = tiny_llama(num_hidden_layers=1)
    expected = generate_plain(model, prompt(), max_new_tokens=12)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=12), expected)
    assert lade.last_stats().fallback_reason is None
    compiles(model)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=12), expected)
    assert "are compiled" in lade.last_stats().fallback_reason


def test_compile_config():
    """Plain generate() compiles for a static cache alone, whose calls fall back."""
    model = tiny_llama(num_hidden_layers=1)
    settings = CompileConfig(backend="eager", fullgraph=False, mode=None)
    settings._compile_all_devices = True
    static = {"cache_implementation": "static", "max_new_tokens": 8}
    compare(model, None, "cache_implementation='static'", compile_config=settings, **static)
    compare(model, compile_config=settings)
