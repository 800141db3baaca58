"""Models that their user has compiled, and generate()'s own compilation: blocks pass it by, or the call falls back."""

import functools

import pytest
import torch
from support import compare, generate_plain, prompt, tiny_llama
from support.families import named
from transformers import CompileConfig

import lade
from lade.models import adapter_for

dynamo = pytest.importorskip("torch._dynamo")


@pytest.fixture(autouse=True)
def nothing_compiled(small_block):
    dynamo.reset()
    yield
    dynamo.reset()


def compile_forward(model, **arguments):
    model.forward = torch.compile(model.forward, **arguments)


def compile_module(model, **arguments):
    model.compile(**arguments)


def compile_layers(model, **arguments):
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, **arguments)


def compile_parts(model, **arguments):
    """As accelerate's regional compilation does."""
    for part in model.modules():
        if type(part).__name__.endswith("DecoderLayer"):
            part.compile(**arguments)


def check(compiles, build=tiny_llama, inputs=None):
    """The compiled model's text under lade is the other's, nothing is compiled, and the model stays as it is."""
    model, inputs = build(), prompt() if inputs is None else inputs
    expected = generate_plain(build(), inputs, max_new_tokens=24)
    compiles(model, backend="eager", fullgraph=True)
    before = [dict(vars(part)) for part in model.modules()]
    with torch.compiler.set_stance("fail_on_recompile"):
        found = model.generate(**inputs, max_new_tokens=24)
    assert torch.equal(found, expected)
    assert lade.last_stats().fallback_reason is None
    assert [vars(part) for part in model.modules()] == before  # by identity: tensors cannot be compared so


@pytest.mark.parametrize("compiles", [compile_forward, compile_module, compile_layers, compile_parts])
def test_what_is_compiled_is_passed_by(compiles):
    check(compiles)
    check(compiles, inputs=prompt(12, batch_size=2))


@pytest.mark.parametrize("name", ["gpt_neo", "falcon-alibi", "lfm2"])
def test_families_that_need_a_view(name):
    check(compile_forward, named(name).build)


def own_backend(graph, inputs):
    """What it makes of the graph is its own business."""
    return graph.forward


@pytest.mark.parametrize(("backend", "is_passed_by"), [("eager", True), ("inductor", True), (own_backend, False)])
def test_another_backend_falls_back(backend, is_passed_by):
    """Lade cannot know that it computes the same."""
    for compiles in (compile_forward, compile_module, compile_layers):
        model = tiny_llama()
        compiles(model, backend=backend)
        reason = adapter_for(model).unsupported_reason()
        assert reason is None if is_passed_by else "compiled by a backend" in reason


def test_compiled_together_with_other_code_falls_back():
    model = tiny_llama(num_hidden_layers=1)
    stock = model.forward

    @functools.wraps(stock)
    def forward(*args, **arguments):
        return stock(*args, **arguments)

    model.forward = torch.compile(forward, backend="eager")
    assert "together with other code" in adapter_for(model).unsupported_reason()
    inner = tiny_llama()
    model.forward = torch.compile(inner.forward, backend="eager")  # another model's
    assert "together with other code" in adapter_for(model).unsupported_reason()


def test_compiled_blocks_of_a_compiled_model(monkeypatch):
    """COMPILE=1 compiles blocks in lade's own way."""
    monkeypatch.setattr(lade.forward.cuda.static_shapes, "BACKEND", "eager")
    lade.config_lade(COMPILE=1)
    model = tiny_llama(num_hidden_layers=1)
    expected = generate_plain(model, prompt(), max_new_tokens=24)
    compile_forward(model, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=24), expected)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().reasons.get("compile") is None
    assert lade.last_stats().compiled_steps > 0
    shapes = dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(model.generate(**prompt(), max_new_tokens=24), expected)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == shapes  # another call's view is no reason to compile


def test_compile_config():
    """Plain generate() runs where transformers would compile; elsewhere the setting is without effect there, too."""
    model = tiny_llama(num_hidden_layers=1)
    settings = CompileConfig(backend="eager", fullgraph=False, mode=None)
    settings._compile_all_devices = True
    compare(model, None, "compile_config", max_new_tokens=8, compile_config=settings, cache_implementation="static")
    compare(model, compile_config=settings)  # a dynamic cache is not compiled for
    compare(model, compile_config=settings, cache_implementation="static", disable_compile=True)
