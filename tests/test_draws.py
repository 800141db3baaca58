"""Reading sampling's random numbers ahead: what torch.multinomial is going to draw, and what that says about its
choice."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support import Recorder, compare, generate_plain, note_calls, prompt, seeded, tiny_llama

import lade
from lade.block.token_tree import TokenTree
from lade.common import transfer
from lade.config import LookaheadConfig
from lade.drafting import DraftRequest, Outcome
from lade.drafting.coming_draws import ComingDraws, wins
from lade.drafting.likeliest import most_likely
from lade.drafting.memory import Memory
from lade.drafting.tree import TreeDrafter
from lade.verification import draws as noise_module
from lade.verification.draws import ExponentialDraws
from lade.verification.sequences import TokenSequences

CPU = torch.device("cpu")
VOCAB_SIZE = 300


def drawn_from(batch_size):
    """Probabilities, tokens that multinomial draws from them, and the generator's states after each; from there on
    the generator is where it began."""
    probabilities = (3 * torch.randn(batch_size, VOCAB_SIZE)).softmax(-1)
    torch.manual_seed(4)
    tokens, states = [], []
    for _ in range(6):
        tokens.append(torch.multinomial(probabilities, 1)[:, 0].tolist())
        states.append(torch.get_rng_state())
    torch.manual_seed(4)
    return probabilities, tokens, states


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_draws_are_those_of_multinomial(batch_size):
    probabilities, expected, states = drawn_from(batch_size)
    noise = ExponentialDraws(CPU, batch_size)
    peek = ComingDraws(noise).peek
    assert peek(0, 5, VOCAB_SIZE).shape == (VOCAB_SIZE,)  # in any order
    for index, tokens in enumerate(expected):
        noise.forget(index)
        draws = [torch.from_numpy(peek(row, index, VOCAB_SIZE)) for row in range(batch_size)]
        assert [int((p / e).argmax()) for p, e in zip(probabilities, draws, strict=True)] == tokens
    # The generator itself has not moved.
    assert [torch.multinomial(probabilities, 1)[:, 0].tolist() for _ in range(6)] == expected
    assert torch.equal(torch.get_rng_state(), states[-1])


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_drawing_moves_the_generator_as_multinomial_does(looks_ahead):
    probabilities, expected, states = drawn_from(2)
    noise = ExponentialDraws(CPU, 2)
    peek = ComingDraws(noise).peek
    for index, (tokens, state) in enumerate(zip(expected, states, strict=True)):
        if looks_ahead:
            peek(1, index + 2, VOCAB_SIZE)
        for _ in range(2):  # once drawn, it is there for other rows
            assert (probabilities / noise.draw(index, VOCAB_SIZE)).argmax(-1).tolist() == tokens
            assert torch.equal(torch.get_rng_state(), state)
        noise.forget(index)


def test_others_may_draw_in_between():
    probabilities = (3 * torch.randn(1, VOCAB_SIZE)).softmax(-1)

    def tokens(choose):
        torch.manual_seed(4)
        found = []
        for index in range(5):
            found.append(choose(index))
            if index % 2:
                torch.rand(3)
        return found, torch.get_rng_state().tolist()

    def draw(index):
        peek(0, index + 3, VOCAB_SIZE)
        return int((probabilities / noise.draw(index, VOCAB_SIZE)).argmax())

    torch.manual_seed(4)
    noise = ExponentialDraws(CPU, 1)
    peek = ComingDraws(noise).peek
    assert tokens(draw) == tokens(lambda _: int(torch.multinomial(probabilities, 1)))
    assert peek(0, 5, VOCAB_SIZE) is None


def test_nothing_is_taken_back_from_those_that_draw_too(monkeypatch):
    """Between the look at the generator and its change another thread may draw; so it is changed by drawing alone."""
    changes = note_calls(monkeypatch, noise_module, "set_generator_state")
    noise = ExponentialDraws(CPU, 1)
    peek = ComingDraws(noise).peek
    for index in range(6):
        peek(0, index + 1, VOCAB_SIZE)
        if index == 2:
            torch.rand(3)
        noise.draw(index, VOCAB_SIZE)
        noise.forget(index)
    assert len(changes) == 2


def test_tokens_that_something_else_has_drawn_for():
    noise = ExponentialDraws(CPU, 1)
    torch.rand(1)
    noise.draw(0, VOCAB_SIZE)
    for index in (1, 2, 3):  # as a processor does whose scores are in another precision
        torch.multinomial(torch.ones(1, VOCAB_SIZE).double(), 1)
        noise.forget(index)
    state = torch.get_rng_state()
    noise.draw(3, VOCAB_SIZE)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.multinomial(torch.ones(1, VOCAB_SIZE), 1)
    assert torch.equal(torch.get_rng_state(), after)


def test_generators_that_cannot_be_copied(monkeypatch):
    probabilities, expected, _ = drawn_from(2)
    monkeypatch.setattr(noise_module, "READABLE", ())
    noise = ExponentialDraws(CPU, 2)
    peek = ComingDraws(noise).peek
    for index, tokens in enumerate(expected):
        assert peek(0, index, VOCAB_SIZE) is None
        assert (probabilities / noise.draw(index, VOCAB_SIZE)).argmax(-1).tolist() == tokens
        noise.draw(max(0, index - 1), VOCAB_SIZE)
        noise.forget(index)


def test_draws_that_nobody_will_ask_for_are_dropped(lade_on, monkeypatch):
    kept = []
    ahead = ExponentialDraws.ahead
    monkeypatch.setattr(ExponentialDraws, "ahead", lambda self, *a: [ahead(self, *a), kept.append(len(self._draws))][0])
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


class Watched:
    """A lock, and whether a thread other than this one has asked for it."""

    def __init__(self, lock):
        self.lock, self.owner, self.is_asked = lock, threading.get_ident(), False

    def __enter__(self):
        self.is_asked |= threading.get_ident() != self.owner
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_a_call_in_another_thread(lade_on, waits, streams, monkeypatch):
    """It draws in between a call's look at the generator and its change to it, unless it waits."""
    lock = Watched(noise_module.drawing)
    monkeypatch.setattr(noise_module, "drawing", lock if waits else nullcontext())
    model, inputs = tiny_llama(), prompt(12)
    arguments = {"max_new_tokens": 1, "do_sample": True, "temperature": 3.0}
    others = []

    def call():
        model.generate(**inputs, **arguments, streamer=Recorder() if streams else None)

    def interrupted(device, state, set_state=noise_module.set_generator_state):
        if not others:
            others.append(threading.Thread(target=call))
            others[0].start()
            while others[0].is_alive() and not (waits and lock.is_asked):  # until it waits, or has drawn
                others[0].join(0.01)
        set_state(device, state)

    monkeypatch.setattr(noise_module, "set_generator_state", interrupted)
    torch.manual_seed(1)
    model.generate(**inputs, **arguments)
    others[0].join()
    after_call = torch.get_rng_state()
    torch.manual_seed(1)
    torch.multinomial(torch.ones(1, 61), 1)
    after_one = torch.get_rng_state()
    torch.multinomial(torch.ones(1, 61), 1)
    # Without the lock both have drawn the same.
    assert torch.equal(after_call, torch.get_rng_state() if waits else after_one)


def win_chances(ids, chances, draws):
    """As guesses of a row are judged whose probabilities are exact: only the first of them has a chance."""
    return wins(np.asarray([chances]), draws.take(ids)[None], np.array([[40.0]]))[1][0]


def test_chances_add_up_to_what_happens():
    """Over many races: what a token is given beforehand is how often it wins, where probabilities are exact."""
    ids, rng = [3, 5, 8], np.random.default_rng(0)
    chances = [0.5, 0.2, 0.1]
    given, won = np.zeros(3), np.zeros(3)
    for _ in range(4000):
        draws = rng.exponential(size=10)
        given += win_chances(ids, chances, draws)
        times = np.array([draws[i] / p for i, p in zip(ids, chances, strict=True)])
        won[times.argmin()] += times.min() < rng.exponential() / 0.2  # the other tokens together
    assert np.abs(given - won).max() < 0.02 * 4000
    early, late = (max(win_chances(ids, chances, np.full(10, draw))) for draw in (1e-3, 5.0))
    assert early > late  # where all draws are late, another token comes first


def first_guess_is_right(model, seed, probabilities, reads_noise):
    """Whether the first guess behind a token whose row is known is the token that sampling then puts there."""
    prompt_ids = torch.tensor([[7, 9]])
    memory = Memory()
    memory.learn([5], most_likely(probabilities.log()), [0])
    torch.manual_seed(seed)
    noise = ExponentialDraws(CPU, 1) if reads_noise else None
    request = DraftRequest(
        config=LookaheadConfig(mode="tree", max_block=8, adaptive=False), model=model,
        num_tokens=VOCAB_SIZE, prompt_ids=prompt_ids, key_mask=None, temperature=1.0, draws=noise,
    )  # fmt: skip
    with memory.active():
        drafter = TreeDrafter(request)
    texts = TokenSequences(prompt_ids, 10)
    torch.multinomial(probabilities, 1)  # after the prompt
    texts.append([5], 0)
    drafter.learn(Outcome(TokenTree.empty(1), torch.zeros(1, 1, VOCAB_SIZE), [[]], None, texts))
    guess = drafter.propose(texts, [False], None).tree.tokens[0][0]
    return guess == int(torch.multinomial(probabilities, 1))


def test_guesses_follow_the_draws():
    probabilities = torch.zeros(1, VOCAB_SIZE)
    probabilities[0, 20:28] = torch.tensor([0.25, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05, 0.05])
    model = tiny_llama(num_hidden_layers=1)
    assert np.mean([first_guess_is_right(model, seed, probabilities, True) for seed in range(100)]) > 0.8
    assert np.mean([first_guess_is_right(model, seed, probabilities, False) for seed in range(100)]) < 0.4


@pytest.mark.parametrize(
    ("arguments", "batch_size"), [({}, 1), ({}, 3), ({"top_p": 0.8}, 3), ({"repetition_penalty": 1.2}, 1)], ids=str
)
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "others-draw"])
def test_sampled_on_a_device(arguments, batch_size, is_alone, lade_on, monkeypatch):
    """Where numpy cannot read scores: plain generate()'s text and random numbers."""
    model, inputs = tiny_llama(torch.float32, num_hidden_layers=1), prompt(batch_size=batch_size)
    arguments = {"do_sample": True, "max_new_tokens": 40} | arguments
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)
    expected = seeded(generate_plain, model, inputs, **arguments)
    monkeypatch.setattr(transfer, "ON_HOST", ())
    compared, stops = iter(range(1000)), note_calls(monkeypatch, ExponentialDraws, "_stop_reading_ahead")
    if not is_alone:  # noticed at the sixth token: from there on the generator itself draws what it would have drawn
        same = noise_module.same_state
        monkeypatch.setattr(noise_module, "same_state", lambda *args: same(*args) and next(compared) != 5)
    text, states = seeded(model.generate, **inputs, **arguments)
    assert torch.equal(text, expected[0])
    assert all(map(torch.equal, states, expected[1]))
    assert len(stops) == (not is_alone)
    stats = lade.last_stats()
    assert stats.steps < stats.generated_tokens / batch_size


def test_a_probability_that_is_no_number_is_refused_at_once(lade_on, monkeypatch):
    model = tiny_llama(torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    monkeypatch.setattr(transfer, "ON_HOST", ())
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        model.generate(**prompt(), do_sample=True, max_new_tokens=10)
