"""Sampling's random numbers: each token is the one that torch.multinomial would draw, row by row."""

import threading

import numpy as np
import pytest
import torch
from support import compare, prompt, tiny_llama

import lade
from lade.common import transfer
from lade.verification.draws import ExponentialDraws, keeping_generators

CPU = torch.device("cpu")
VOCAB_SIZE = 300


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_draws_are_those_of_multinomial(batch_size):
    probabilities = (3 * torch.randn(batch_size, VOCAB_SIZE)).softmax(-1)
    torch.manual_seed(4)
    expected = [(torch.multinomial(probabilities, 1)[:, 0].tolist(), torch.get_rng_state()) for _ in range(6)]
    torch.manual_seed(4)
    draws = ExponentialDraws(CPU, batch_size)
    for index, (tokens, state) in enumerate(expected):
        for _ in range(2):  # once drawn, it is there for other rows
            assert (probabilities / draws.draw(index, VOCAB_SIZE)).argmax(-1).tolist() == tokens
            assert torch.equal(torch.get_rng_state(), state)
        draws.forget(index)


def test_tokens_that_something_else_has_drawn_for():
    draws = ExponentialDraws(CPU, 1)
    draws.draw(0, VOCAB_SIZE)
    for _ in (1, 2, 3):  # as a processor does whose scores are in another precision
        torch.multinomial(torch.ones(1, VOCAB_SIZE).double(), 1)
    draws.forget(3)
    state = torch.get_rng_state()
    draws.draw(4, VOCAB_SIZE)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.multinomial(torch.ones(1, VOCAB_SIZE), 1)
    assert torch.equal(torch.get_rng_state(), after)


def test_draws_that_nobody_will_ask_for_are_dropped(lade_on, monkeypatch):
    kept = []
    draw = ExponentialDraws.draw
    monkeypatch.setattr(ExponentialDraws, "draw", lambda self, *a: [draw(self, *a), kept.append(len(self._draws))][0])
    model, inputs = tiny_llama(), prompt(12, batch_size=2)
    lade.config_lade(MODE="tree", MAX_BLOCK=8, SHARE=0)
    torch.manual_seed(1)
    text = model.generate(**inputs, max_new_tokens=4, do_sample=True)
    torch.manual_seed(1)
    ended = int(text[0, -1]) if int(text[0, -1]) not in text[1, -4:].tolist() else int(text[0, -2])
    model.generate(**inputs, max_new_tokens=60, do_sample=True, eos_token_id=ended, pad_token_id=0)
    assert lade.last_stats().fallback_reason is None
    assert 0 < max(kept) < 45


def test_another_default_dtype(lade_on):
    model, inputs = tiny_llama(torch.float32), prompt(12)
    lade.config_lade(MODE="tree", MAX_BLOCK=8, SHARE=0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        compare(model, inputs, max_new_tokens=20, do_sample=True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_numpy_told_to_raise(lade_on, batch_size):
    """Probabilities as small as these underflow where they are divided, which is nothing to plain generate()."""
    arguments = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.003, "top_k": 0}
    with np.errstate(all="raise"):
        compare(tiny_llama(torch.float32), prompt(12, batch_size), **arguments)


def test_what_another_thread_draws_is_not_taken_back(model):
    """It would be drawn again: so it waits until the generator is as it was."""
    torch.manual_seed(4)
    expected = ExponentialDraws(CPU, 1).draw(0, VOCAB_SIZE)
    torch.manual_seed(4)
    draws, found = ExponentialDraws(CPU, 1), []
    other = threading.Thread(target=lambda: found.append(draws.draw(0, VOCAB_SIZE)))
    with keeping_generators(model):
        torch.rand(3)
        other.start()
        other.join(0.05)
    other.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize(
    ("arguments", "batch_size"), [({}, 1), ({}, 3), ({"top_p": 0.8}, 3), ({"repetition_penalty": 1.2}, 1)], ids=str
)
def test_sampled_on_a_device(arguments, batch_size, lade_on, monkeypatch):
    """Where numpy cannot read scores: plain generate()'s text and random numbers."""
    model, inputs = tiny_llama(torch.float32, num_hidden_layers=1), prompt(batch_size=batch_size)
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)
    monkeypatch.setattr(transfer, "ON_HOST", ())
    stats = compare(model, inputs, do_sample=True, max_new_tokens=40, **arguments)
    assert stats.steps < stats.generated_tokens / batch_size


def test_a_probability_that_is_no_number_is_refused_at_once(lade_on, monkeypatch):
    model = tiny_llama(torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    monkeypatch.setattr(transfer, "ON_HOST", ())
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        model.generate(**prompt(), do_sample=True, max_new_tokens=10)
