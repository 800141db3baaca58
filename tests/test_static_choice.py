"""Sampling behind captured forwards of trees: plain generate()'s text and random numbers, with stand-ins for CUDA
graphs."""

import pytest
import torch
from support import generate_plain, padded_prompt, prompt, seeded, tiny_llama
from support.graphs import kept_buffers

import lade
from lade.forward.cuda import static_choice
from lade.forward.cuda import static_shapes as fixed
from lade.forward.cuda.static_choice import StaticChoice
from lade.verification import draws as noise
from lade.verification.race import RacedSelection
from lade.verification.selection import PerRowSelection

WRONG = "the captured choice is not that of the captured logits"


@pytest.fixture(scope="module")
def model():
    return tiny_llama(torch.float32, num_hidden_layers=1)


@pytest.fixture
def one_by_one(monkeypatch):
    """One entry for each token that the host chose by itself; a call's first one always is."""
    found, scores = [], PerRowSelection._scores
    monkeypatch.setattr(PerRowSelection, "_scores", lambda *args: found.append(None) or scores(*args))
    return found


@pytest.fixture(autouse=True)
def trees(static_blocks, request):
    """Of one size."""
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("graphs")
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0, SHARE=0)


def check(model, inputs=None, captured_steps=None, **arguments):
    """captured_steps: None for all but the prompt's. Returns the call's figures."""
    inputs = prompt() if inputs is None else inputs
    arguments = {"do_sample": True, "max_new_tokens": 40, "pad_token_id": 0} | arguments
    expected, plain_states = seeded(generate_plain, model, inputs, **arguments)
    found, states = seeded(model.generate, **inputs, **arguments)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, states, plain_states))
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.captured_steps == (stats.steps - 1 if captured_steps is None else captured_steps)
    return stats


@pytest.mark.parametrize(
    ("arguments", "is_batched"),
    [
        ({}, True),
        ({"temperature": 0.3, "top_k": 20}, True),
        ({"temperature": 1.7, "top_k": 0, "min_p": 0.05}, True),
        ({"top_k": 5, "min_p": 0.2}, True),
        ({"top_k": 1}, True),
        ({"top_k": 0}, True),  # no warpers
        ({"top_p": 0.8}, False),
        ({"temperature": 0.8, "repetition_penalty": 1.2}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", [prompt(), padded_prompt()], ids=["one", "padded"])
def test_same_text_and_random_numbers(arguments, is_batched, inputs, model, graphs, one_by_one):
    num_rows, counts = len(inputs["input_ids"]), []
    for _ in range(2):  # the second call replays what the first one captured
        one_by_one.clear()
        stats = check(model, inputs, **arguments)
        assert stats.steps < stats.generated_tokens / num_rows
        assert (len(one_by_one) == num_rows) == is_batched
        counts.append(len(graphs))
    # Rows that are far apart need room for more draws.
    assert counts[0] == counts[1] <= 1 + is_batched * num_rows
    assert (counts[0] > 1) == is_batched


def test_rows_that_end_and_wait(model, one_by_one):
    """They have numbers of tokens of their own."""
    inputs = prompt(batch_size=3)
    text = seeded(generate_plain, model, inputs, do_sample=True, max_new_tokens=40)[0]
    check(model, inputs, eos_token_id=[int(text[1, 30]), int(text[2, 45])], max_new_tokens=60)
    assert len(one_by_one) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype, one_by_one):
    """The warpers see float32. In half precision the forward alone may choose otherwise than plain generate()'s."""
    model = tiny_llama(dtype, num_hidden_layers=1)
    if dtype == torch.float64:
        check(model, top_k=20)
    else:
        model.generate(**prompt(), do_sample=True, top_k=20, max_new_tokens=40)
        assert lade.last_stats().captured_steps == lade.last_stats().steps - 1
    assert len(one_by_one) == 1


def test_in_inference_mode(model, graphs, one_by_one):
    with torch.inference_mode():
        check(model)
    assert (len(graphs), len(one_by_one)) == (2, 1)


def test_others_draw_in_between(model, one_by_one, monkeypatch):
    """Noticed at the sixth token: from there on the generator itself draws, and nothing is known ahead."""
    same, compared = noise.same_state, iter(range(1000))
    monkeypatch.setattr(noise, "same_state", lambda *args: same(*args) and next(compared) != 5)
    check(model)
    assert 10 < len(one_by_one) < 40


def test_parameters_are_captured_apart(model, graphs, monkeypatch):
    """Not with the forward; the kinds of sampling used last are kept, and their memory counts."""
    monkeypatch.setattr(fixed, "KEPT_CHOICES", 2)
    for temperature, count in [(0.5, 2), (0.6, 3), (0.5, 3), (0.7, 4), (0.5, 4), (0.6, 5)]:
        check(model, temperature=temperature)
        assert len(graphs) == count
    (buffers,) = kept_buffers(model)
    (inputs,) = buffers.inputs.values()
    assert len(inputs.choices) == 2
    assert buffers.num_bytes > buffers.cache.num_bytes + 2 * static_choice.LEAST_PLACES * 61 * 4 - 1


def test_deeper_trees_than_expected(model, graphs, one_by_one, monkeypatch):
    monkeypatch.setattr(static_choice, "LEAST_PLACES", 1)
    ids = torch.tensor([[5, 6, 7] * 12])
    check(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, temperature=0.05)
    assert len(graphs) > 2
    assert len(one_by_one) == 1


def refused(model, graphs):
    """The forward's graphs are right, and go on without one that samples, in later calls as well."""
    assert check(model).reasons.get("graph") == WRONG
    num_graphs = len(graphs)
    assert check(model).reasons.get("graph") is None
    check(model, do_sample=False)
    assert len(graphs) == num_graphs
    assert kept_buffers(model)


def test_a_wrong_choice_is_noticed(model, graphs, monkeypatch):
    """The text must not depend on it."""

    def call(self, original=StaticChoice.call):
        original(self)
        self._sampled.add_(1)

    monkeypatch.setattr(StaticChoice, "call", call)
    refused(model, graphs)


def test_compiled_forwards_go_on_without_it(model, monkeypatch):
    """Nothing decides the tokens of later blocks any more."""
    lade.config_lade(COMPILE=1)
    monkeypatch.setattr(StaticChoice, "replay", lambda self: None)
    races, fixed_inputs = [], fixed.StaticPath._fixed_inputs
    monkeypatch.setattr(fixed.StaticPath, "_fixed_inputs", lambda *args: races.append(args[-1]) or fixed_inputs(*args))
    stats = check(model)
    assert stats.compiled_steps == stats.steps - 1
    assert stats.reasons.get("graph") == WRONG
    assert [race is not None for race in races] == [True] + [False] * (len(races) - 1)


def test_a_choice_that_remembers_too_much_is_noticed(model, graphs, monkeypatch):
    """At the second block: the draws of the capture lie elsewhere than those of later steps."""

    def call(self):
        sampling, logits, _, draw_rows = self._parts
        self._sampled.copy_(static_choice.winners(sampling, logits, self.frozen, draw_rows))

    def fill(self, race, original=StaticChoice.fill):
        original(self, race)
        if not hasattr(self, "frozen"):
            self.frozen = self.draws.clone()

    monkeypatch.setattr(StaticChoice, "call", call)
    monkeypatch.setattr(StaticChoice, "fill", fill)
    refused(model, graphs)


def test_without_checks_a_wrong_choice_would_be_believed(model, monkeypatch):
    """The control of the two tests above."""

    def call(self, original=StaticChoice.call):
        original(self)
        self._sampled.add_(1).remainder_(61)

    monkeypatch.setattr(StaticChoice, "call", call)
    monkeypatch.setattr(StaticChoice, "difference", lambda self: None)
    with pytest.raises(AssertionError):
        check(model)


def test_guesses_that_are_no_numbers(graphs):
    """The token after a row that is NaN is looked at without it, as where the host chooses."""
    model = tiny_llama(torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = torch.nan  # a guess may be; plain generate() never says it
        model.lm_head.weight[33] = 0
        model.lm_head.weight[:9] *= 8
    check(model, top_k=5)


def test_nothing_on_a_cpu(model, monkeypatch):
    """Without graphs no tokens are sampled ahead."""
    lade.config_lade(CUDA_GRAPH=0)
    monkeypatch.setattr(RacedSelection, "begin_race", lambda *_: pytest.fail("asked for"))
    check(model, captured_steps=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arguments", [{}, {"temperature": 0.6, "top_k": 20}, {"top_k": 0, "min_p": 0.05}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_captured_by_cuda(arguments, batch_size, one_by_one):
    lade.config_lade(COMPILE=0, CUDA_GRAPH=1)
    model = tiny_llama(torch.float32, num_hidden_layers=1, vocab_size=64).cuda()
    inputs = {name: tensor.cuda() for name, tensor in prompt(batch_size=batch_size).items()}
    for _ in range(2):
        one_by_one.clear()
        check(model, inputs, **arguments)
        assert len(one_by_one) == batch_size
