"""Blocks run in torch's inference mode, which is faster, and nothing that was made in it gets out of a call."""

from contextlib import nullcontext

import pytest
import torch
from support import compare, generate_plain, inference_tensors, prompt, tiny_llama
from support.families import rope

import lade
from lade.models.base import ModelAdapter


@pytest.fixture
def modes(monkeypatch, small_block):
    """Whether each block so far ran in inference mode."""
    found, run = [], ModelAdapter.ordinary_forward

    def ordinary_forward(self, *args, **arguments):
        logits = run(self, *args, **arguments)
        found.append(logits.is_inference())
        return logits

    monkeypatch.setattr(ModelAdapter, "ordinary_forward", ordinary_forward)
    return found


def check(model, modes, expected_mode, inputs=None, context=nullcontext, **arguments):
    """Same text as plain generate(), every block in the mode that is expected. Returns the output."""
    inputs = prompt(12) if inputs is None else inputs
    arguments = {"max_new_tokens": 24, "do_sample": False} | arguments
    with context():
        expected = generate_plain(model, inputs, **arguments)
        modes.clear()
        found = model.generate(**inputs, **arguments)
    assert lade.last_stats().fallback_reason is None
    assert set(modes) == {expected_mode}
    texts = [getattr(output, "sequences", output) for output in (expected, found)]
    assert torch.equal(*texts)
    assert texts[0].is_inference() == texts[1].is_inference()
    return found


@pytest.mark.parametrize("mode", ["auto", "lookahead"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_blocks_run_in_it(modes, mode, do_sample):
    model = tiny_llama()
    lade.config_lade(MODE=mode)
    compare(model, prompt(12), max_new_tokens=30, do_sample=do_sample)
    assert set(modes) == {True}
    assert not inference_tensors(model)


def test_what_is_returned_may_be_changed(modes):
    """The cache, scores and logits that a call returns."""
    model = tiny_llama()
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = check(model, modes, True, **wanted)
    layers = output.past_key_values.layers
    states = [states for layer in layers for states in (layer.keys, layer.values)]
    for tensor in (*output.scores, *output.logits, *states):
        assert not tensor.is_inference()
        tensor.add_(1.0)


def test_an_allowed_hook_may_keep_what_it_sees(modes):
    model = tiny_llama()
    keep = lade.allow_hook(lambda module, _, output: setattr(module, "latest", output))
    model.model.layers[0].mlp.register_forward_hook(keep)
    check(model, modes, False)
    assert "latest" in vars(model.model.layers[0].mlp)
    assert not inference_tensors(model)


def test_frequencies_that_follow_the_length(modes):
    model = tiny_llama(max_position_embeddings=64, rope_parameters=rope("dynamic", factor=2.0))
    check(model, modes, False, prompt(56))
    assert not inference_tensors(model)


def test_a_cache_that_grows_and_rows_that_part(modes, monkeypatch):
    monkeypatch.setattr("lade.decoding.FIRST_CAPACITY", 0)
    monkeypatch.setattr("lade.block.kv_cache.MIN_CAPACITY", 16)
    check(tiny_llama(), modes, True, prompt(12, batch_size=3))
    output = check(tiny_llama(), modes, True, max_new_tokens=60, return_dict_in_generate=True)
    for layer in output.past_key_values.layers:
        assert not layer.keys.is_inference()


def test_quantized_weights(modes):
    """A subclass of Tensor need not work in inference mode."""
    model = tiny_llama()
    model.lm_head.weight = type("Packed", (torch.nn.Parameter,), {})(model.lm_head.weight.detach().clone())
    check(model, modes, False)


def test_weights_that_autocast_has_cast(modes):
    model = tiny_llama(torch.float32)
    check(model, modes, False, context=lambda: torch.autocast("cpu", torch.bfloat16), max_new_tokens=4)


def test_inside_of_the_users_own(modes):
    check(tiny_llama(), modes, True, context=torch.inference_mode)
