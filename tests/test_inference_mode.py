"""Inside of torch's inference mode a call does as plain generate() does, and outside of it nothing is made in it."""

import pytest
import torch
from support import generate_plain, prompt, tiny_llama

import lade


@pytest.mark.parametrize("mode", ["auto", "lookahead"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("is_on", [False, True])
def test_what_is_returned(small_block, mode, do_sample, is_on):
    """Outside it may be changed: the text, the cache, scores and logits."""
    model = tiny_llama()
    lade.config_lade(MODE=mode)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = []
    for generate in (generate_plain, lambda model, inputs, **arguments: model.generate(**inputs, **arguments)):
        torch.manual_seed(0)
        with torch.inference_mode(is_on):
            found.append(generate(model, prompt(12), max_new_tokens=24, do_sample=do_sample, **wanted))
    assert lade.last_stats().steps < 24
    expected, output = found
    assert torch.equal(output.sequences, expected.sequences)
    layers = output.past_key_values.layers
    states = [states for layer in layers for states in (layer.keys, layer.values)]
    for tensor in (output.sequences, *output.scores, *output.logits, *states):
        assert tensor.is_inference() == is_on
        if not is_on:
            tensor.add_(1)
