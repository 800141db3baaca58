"""Reading sampling's random numbers ahead: what torch.multinomial is going to draw, and what that says about its choice."""

import numpy as np
import pytest
import torch
from conftest import generate_plain, prompt, tiny_llama

import lade
from lade import noise
from lade.drafters import Outcome, RecyclingDrafter
from lade.drafters import recycling as recycling_module
from lade.memory import Memory, most_likely
from lade.noise import NoiseAhead, noise_ahead, win_chances
from lade.texts import Texts
from lade.token_tree import TokenTree

CPU = torch.device("cpu")
VOCAB_SIZE = 300


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_draws_are_those_of_multinomial(batch_size):
    probabilities = (3 * torch.randn(batch_size, VOCAB_SIZE)).softmax(-1)
    torch.manual_seed(4)
    expected = [torch.multinomial(probabilities, 1)[:, 0].tolist() for _ in range(6)]
    state = torch.get_rng_state()

    torch.manual_seed(4)
    ahead = NoiseAhead(CPU, batch_size)
    assert ahead.of(0, 5, VOCAB_SIZE).shape == (VOCAB_SIZE,)  # in any order
    for index, tokens in enumerate(expected):
        ahead.forget(index)
        draws = [torch.from_numpy(ahead.of(row, index, VOCAB_SIZE)) for row in range(batch_size)]
        assert [int((p / e).argmax()) for p, e in zip(probabilities, draws, strict=True)] == tokens
    # The generator itself has not moved.
    assert [torch.multinomial(probabilities, 1)[:, 0].tolist() for _ in range(6)] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_that_nobody_will_ask_for_are_dropped(lade_on, monkeypatch):
    """Also those of a row that has ended."""
    kept = []
    of = NoiseAhead.of
    monkeypatch.setattr(NoiseAhead, "of", lambda self, *a: [of(self, *a), kept.append(len(self._draws))][0])
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
        torch.manual_seed(1)
        plain = generate_plain(model, inputs, max_new_tokens=20, do_sample=True)
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=True), plain)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lade.last_stats().fallback_reason is None


def test_no_copy_of_other_generators():
    assert noise_ahead(torch.device("meta"), 1) is None


def test_chances_add_up_to_what_happens(monkeypatch):
    """Over many races: what a token is given beforehand is how often it wins, where probabilities are exact."""
    monkeypatch.setattr(noise, "SHARPNESS", 100.0)
    ids, rng = [3, 5, 8], np.random.default_rng(0)
    chances = [0.5, 0.2, 0.1]
    given, won = np.zeros(3), np.zeros(3)
    for _ in range(4000):
        draws = rng.exponential(size=10)
        given += win_chances(ids, chances, draws)
        times = np.array([draws[i] / p for i, p in zip(ids, chances, strict=True)])
        won[times.argmin()] += times.min() < rng.exponential() / 0.2  # the other tokens together
    assert np.abs(given - won).max() < 0.02 * 4000
    surest = max(win_chances(ids, chances, np.full(10, 1e-3)))
    assert surest > max(
        win_chances(ids, chances, np.full(10, 5.0))
    )  # where all draws are late, another token comes first


def first_guess_is_right(seed, probabilities):
    """Whether the first guess behind a token whose row is known is the token that sampling then puts there."""
    prompt_ids = torch.tensor([[7, 9]])
    memory = Memory()
    memory.learn([9], [5], most_likely(probabilities.log()), 1)
    torch.manual_seed(seed)
    drafter = RecyclingDrafter(memory, VOCAB_SIZE, prompt_ids, None, 1.0, 8, None)
    texts = Texts(prompt_ids, 10)
    torch.multinomial(probabilities, 1)  # after the prompt
    texts.append([5], 0)
    drafter.learn(Outcome(TokenTree.empty(1), torch.zeros(1, 1, VOCAB_SIZE), [[]], None, texts))
    guess = drafter.propose(texts, [False], None).tree.tokens[0][0]
    return guess == int(torch.multinomial(probabilities, 1))


def test_guesses_follow_the_draws(monkeypatch):
    probabilities = torch.zeros(1, VOCAB_SIZE)
    probabilities[0, 20:28] = torch.tensor([0.25, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05, 0.05])
    assert np.mean([first_guess_is_right(seed, probabilities) for seed in range(100)]) > 0.8
    monkeypatch.setattr(recycling_module, "noise_ahead", lambda *_: None)
    assert np.mean([first_guess_is_right(seed, probabilities) for seed in range(100)]) < 0.4
