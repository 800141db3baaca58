"""Predicted outputs: guesses from a text that the answer may resemble change the number of passes and no token."""

import numpy as np
import pytest
import torch
from support import VOCAB, generate_plain, padded_prompt, prompt, run_both, seeded
from support.families import named

import lade

NUM_NEW = 40
CALLS = {"greedy": {"no_repeat_ngram_size": 2}, "sampled": {"do_sample": True, "temperature": 0.7}}


@pytest.fixture(autouse=True)
def tree(lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=8, ADAPTIVE=0, SHARE=0)


@pytest.fixture(params=CALLS)
def arguments(request):
    return {"max_new_tokens": NUM_NEW, **CALLS[request.param]}


def steps(model, inputs, arguments, prediction):
    """Passes of a call whose tokens and random numbers are those of plain generate()."""
    with lade.enabled(PREDICTION=prediction):
        stats = run_both(model, inputs, **arguments)
    assert stats.fallback_reason is None
    return stats.steps


def answer(model, inputs, arguments):
    """The new tokens of plain generate(), [B, NUM_NEW]."""
    return seeded(generate_plain, model, inputs, **arguments)[0][:, -NUM_NEW:]


def other(ids):
    """As many tokens, all of them wrong."""
    return (ids + 7) % VOCAB


def test_right_half_right_and_wrong(model, arguments):
    inputs = prompt(9)
    right = answer(model, inputs, arguments)[0]
    half = torch.cat([right[:10], other(right[10:20]), right[20:]])  # its end is found again by itself
    without = steps(model, inputs, arguments, None)
    wrong = torch.cat([right[:1], other(right[1:])])  # where the first token differs nothing is guessed at all
    found = [steps(model, inputs, arguments, text) for text in (right, half, wrong)]
    assert found[0] <= 2 + NUM_NEW // 6
    assert found[0] < found[1] < 0.8 * without
    assert without - 2 <= found[2] <= without + 2
    assert without > NUM_NEW // 2  # nothing else guesses most of these tokens


def test_the_first_guess_is_the_beginning(model):
    """Before anything of the prediction has been repeated."""
    inputs, arguments = prompt(9), {"max_new_tokens": 8}
    right = answer(model, inputs, {"max_new_tokens": NUM_NEW})[0]
    assert steps(model, inputs, arguments, right) == 2  # the prompt's, which gives one token, and one for the others
    proposed, accepted = map(sum, zip(*prediction_sources().values(), strict=True))
    assert accepted == 6
    assert proposed <= 12
    assert steps(model, inputs, arguments, right[1:]) > 2


def prediction_sources():
    return {name: count for name, count in lade.last_stats().sources.items() if name.startswith("prediction of")}


@pytest.mark.parametrize(
    ("make", "as_ids"),
    [*((prompt, kind) for kind in (torch.Tensor.tolist, np.asarray, tuple)), (padded_prompt, torch.Tensor.int)],
    ids=["lists", "an array", "a tuple", "a ragged batch"],
)
def test_one_text_for_each_row(model, make, as_ids, arguments):
    inputs = make()
    right = answer(model, inputs, arguments)
    without = steps(model, inputs, arguments, None)
    with_all = steps(model, inputs, arguments, as_ids(right))
    assert with_all <= 2 + NUM_NEW // 6 < without
    if len(right) > 1:  # the rows' own, not each other's
        assert steps(model, inputs, arguments, as_ids(right.roll(1, 0))) > 2 * with_all
        assert steps(model, inputs, arguments, right[0].tolist()) > 2 * with_all  # the same text for all
        assert prediction_sources()
        assert steps(model, inputs, arguments, [[], *right[1:].tolist()]) > 2 * with_all


def test_one_text_for_each_prompt_of_several_answers(model):
    arguments = {"max_new_tokens": NUM_NEW, "do_sample": True, "num_return_sequences": 2}
    inputs = prompt(9, 2)
    first = answer(model, inputs, arguments)[::2]
    assert steps(model, inputs, arguments, first) < NUM_NEW
    assert prediction_sources()


def test_a_call_of_its_own(model):
    """Later calls know nothing of it."""
    inputs, arguments = prompt(9), {"max_new_tokens": NUM_NEW}
    right = answer(model, inputs, arguments)
    wrong = torch.cat([right[:, :1], other(right[:, 1:])], dim=1)
    memory = lade.Memory(texts=1000)
    found = []
    with memory.active():
        for given in ({"PREDICTION": wrong}, {}):
            with lade.enabled(**given):
                output = model.generate(**inputs, **arguments)
            assert torch.equal(output[:, -NUM_NEW:], right)
            found.append(prediction_sources())
    assert found[0]
    assert not found[1]
    assert memory.texts.match(wrong[0, 1:5].tolist()) is None
    assert memory.texts.match(right[0, :5].tolist()) is not None
    with lade.enabled(PREDICTION=right), lade.enabled(SHARE=0):  # a block inside keeps it
        model.generate(**inputs, **arguments)
        assert lade.last_stats().steps <= 2 + NUM_NEW // 6


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_recurrent_model(name):
    model = named(name).build()
    inputs, arguments = prompt(9), {"max_new_tokens": NUM_NEW, **CALLS["sampled"]}
    right = answer(model, inputs, arguments)
    assert steps(model, inputs, arguments, right) < 0.5 * steps(model, inputs, arguments, None)


def test_the_windows_mode_ignores_it(model):
    inputs = prompt(9)
    with lade.enabled(MODE="lookahead"):
        steps(model, inputs, {"max_new_tokens": NUM_NEW}, other(inputs["input_ids"]))
    assert not prediction_sources()


RULE = "PREDICTION must be a list or tensor of token ids for all prompts, or a list of one for each prompt, got "


@pytest.mark.parametrize(
    "value", ["def f():", True, 5, [1, "2"], [[1], 2], [1, -1], [True], torch.ones(3), [[[1]]], {}]
)
def test_what_holds_no_ids(value):
    with pytest.raises(ValueError, match="PREDICTION must be") as error:
        lade.enabled(PREDICTION=value).__enter__()
    assert str(error.value) == RULE + f"{value!r:.80}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([5, VOCAB], f"PREDICTION must hold ids from 0 to {VOCAB - 1}, got {VOCAB}"),
        ([[5], [6], [7]], f"{RULE}3 for 2 prompts"),
    ],
)
def test_what_does_not_fit_the_call(value, message, model, monkeypatch):
    """Nothing has run by then, and the next call is as ever."""
    monkeypatch.setattr(model, "_prefill", None)
    with pytest.raises(ValueError, match="PREDICTION") as error, lade.enabled(PREDICTION=value):
        model.generate(**prompt(8, 2), max_new_tokens=NUM_NEW)
    assert str(error.value) == message
    monkeypatch.undo()
    assert model.generate(**prompt(8, 2), max_new_tokens=NUM_NEW).shape[1] == 8 + NUM_NEW


def test_it_is_no_setting():
    with pytest.raises(TypeError, match=r"config_lade\(\) has no keyword 'PREDICTION': .*lade.enabled\(\)"):
        lade.config_lade(PREDICTION=[5])
