"""Guesses whose embeddings are NaN, which plain generate() never meets: 0 * NaN is NaN, in every row, masks or not."""

import pytest
import torch
from support import Recorder, generate_plain, prompt, tiny_llama

import lade
from lade.verification.nan_guard import NanGuard, find_nan_column

MODES = {"lookahead": {"LEVEL": 4, "WINDOW_SIZE": 4, "GUESS_SET_SIZE": 4}, "tree": {"MODE": "tree", "MAX_BLOCK": 16}}
REQUESTS = {
    "greedy": {},
    "by-row": {"repetition_penalty": 1.1},
    "sampled": {"do_sample": True, "temperature": 0.3, "top_k": 5},
    "lockstep": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def settings(request, lade_on):
    lade.config_lade(**request.param)


@pytest.fixture
def trips(monkeypatch):
    """One entry for each call in which a guess made logits NaN."""
    found, clear = [], NanGuard.clear

    def watch(self, cache):
        if self.has_tripped and not self._is_plain:
            found.append(self)
        clear(self, cache)

    monkeypatch.setattr(NanGuard, "clear", watch)
    return found


def seeded(generate, *args, **arguments):
    """Sequences, scores and logits where asked for, and the generator's state afterwards."""
    torch.manual_seed(5)
    result = generate(*args, max_new_tokens=48, **arguments)
    recorded = [] if isinstance(result, torch.Tensor) else [*result.scores, *result.logits]
    return getattr(result, "sequences", result), recorded, torch.get_rng_state()


def unused_tokens(model, text):
    return sorted(set(range(model.config.vocab_size)) - set(text.flatten().tolist()))


def poison(model, tokens, value=float("nan")):
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens] = value


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)  # NaN would not be


def check(model, inputs, **arguments):
    """What a call gives with lade is what it gives without. Returns it."""
    expected = seeded(generate_plain, model, inputs, **arguments)
    assert_same(seeded(model.generate, **inputs, **arguments), expected)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps <= 48 + 1  # one step in vain, and plain ones after it
    return expected


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize(
    ("attention", "value", "batch_size"), [("sdpa", "nan", 1), ("sdpa", "nan", 3), ("eager", "inf", 3)]
)
def test_a_guess_that_is_no_number(settings, trips, attention, value, request_, batch_size):
    model, inputs = tiny_llama(attention=attention), prompt(24, batch_size)
    expected = seeded(generate_plain, model, inputs, **request_)
    poison(model, unused_tokens(model, expected[0]), float(value))
    assert_same(check(model, inputs, **request_), expected)
    assert len(trips) == 1
    assert lade.last_stats().block_tokens[-1] == 1


def test_negative_control(settings, trips, monkeypatch):
    """Where no row's logits are looked at, a guess changes the text."""
    monkeypatch.setattr("lade.decoding.find_nan_column", lambda logits: None)
    model, inputs = tiny_llama(), prompt(24)
    expected = seeded(generate_plain, model, inputs)
    poison(model, unused_tokens(model, expected[0]))
    assert not torch.equal(seeded(model.generate, **inputs)[0], expected[0])
    assert not trips


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_head_that_shares_the_embedding(settings, trips, batch_size):
    """Then that token's logit is not a number in any row, and whoever suppresses it never sees that."""
    model, inputs = tiny_llama(tie_word_embeddings=True), prompt(24, batch_size)
    inputs["input_ids"][inputs["input_ids"] == 7] = 8
    poison(model, [7])
    check(model, inputs, suppress_tokens=[7], do_sample=True, temperature=0.3)
    assert len(trips) <= 1


class Hidden(torch.nn.Linear):
    """Some columns are infinite in every row, as where a vocabulary is padded."""

    def forward(self, states):
        logits = super().forward(states)
        logits[..., :5] = -torch.inf
        return logits


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_infinite_logits_are_no_reason_for_another_step(settings, trips, request_):
    model, inputs = tiny_llama(), prompt(24, 2)
    model.lm_head.__class__ = Hidden
    text, *_ = check(model, inputs, **request_)
    assert not trips
    poison(model, unused_tokens(model, text))
    assert torch.equal(check(model, inputs, **request_)[0], text)
    assert trips


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_that_is_no_number(settings, trips, streams):
    """In one row plain generate() takes such a token, and goes on with the first id alone; the others lose little."""
    model, inputs = tiny_llama(), prompt(24, 3)
    text = generate_plain(model, inputs, max_new_tokens=48)
    taken = [token for token in text[1, 30:].tolist() if token not in text[[0, 2]] and token not in text[1, :30]]
    poison(model, taken[:1])
    found, *_ = check(model, inputs, **{"streamer": Recorder()} if streams else {})
    assert not torch.equal(found, text)
    assert torch.equal(found[[0, 2]], text[[0, 2]])
    assert len(trips) == 1


def test_prompts_that_are_no_numbers(settings, trips):
    """Plain generate() goes on with the first id, and with any other row."""
    model, inputs = tiny_llama(), prompt(24, 2)
    inputs["input_ids"][inputs["input_ids"] == 7] = 8
    inputs["input_ids"][0, 5] = 7
    poison(model, [7])
    for rows in ([0], [0, 1]):
        check(model, {name: value[rows] for name, value in inputs.items()})


def test_blocks_of_fixed_shapes(lade_on, trips, monkeypatch):
    """A small tree is padded with token 0, which is one of those."""
    monkeypatch.setattr("lade.forward.cuda.static_shapes.BACKEND", "eager")
    lade.config_lade(**MODES["tree"] | {"MAX_BLOCK": 64, "COMPILE": 1})  # more than the first tree has
    model = tiny_llama()
    poison(model, [0])
    try:
        check(model, prompt(24), suppress_tokens=[0])
    finally:
        torch._dynamo.reset()
    assert trips


def test_the_nan_column_is_finite_after_the_prompt():
    nan, inf = float("nan"), float("inf")
    assert find_nan_column(torch.tensor([[0.0, 2.0, 1.0]])) == 1
    assert find_nan_column(torch.tensor([[nan, inf, -inf, 1.0, 3.0]])) == 4
    assert find_nan_column(torch.tensor([[nan, nan], [-inf, -1.0]])) == 1
    assert find_nan_column(torch.tensor([[nan, inf]])) is None
