"""The replay bench takes the very steps of the loop, from what was recorded alone. Its command: test_benchmarks.py."""

from contextlib import nullcontext

import pytest
import torch
from support import prompt

import lade
from lade.drafting.memory import Memory
from lade.switch import current_config

OF_THE_FIELD = ("prompt-lookup", "suffix-decoding", "token-recycling", "sam-decoding", "logitspec")


@pytest.fixture
def bench(module):
    return module("replay")


@pytest.mark.parametrize("temperature", [None, 0.6])
@pytest.mark.parametrize("mode", ["tree", "lookahead", *OF_THE_FIELD])
def test_steps_and_sources_are_those_of_the_loop(lade_on, bench, module, model, mode, temperature):
    module("field").register()
    lade.config_lade(MODE=mode, MAX_BLOCK=12, LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3, ADAPTIVE=0)
    looped, replayed = Memory(), Memory()
    for seed in range(2):  # the second with what the memory has learned
        inputs = prompt(20, seed=seed)
        text = bench.record(model, inputs, temperature, 60)
        torch.manual_seed(0)
        with looped.active():
            output = model.generate(**inputs, max_new_tokens=60, **text.arguments)
        stats = lade.last_stats()
        assert (output[0, 20:].tolist(), stats.fallback_reason) == (text.tokens, None)
        found = bench.replay(model, text, current_config(), replayed)
        assert (found.num_steps, found.sources) == (stats.steps, stats.sources)
        assert found.num_steps < found.num_tokens == 60 or temperature
        if mode == "tree":
            right = sum(is_right for _, _, is_right in found.guesses)  # one more where the text ends at a guess
            assert right - sum(accepted for _, accepted in stats.sources.values()) in (0, 1)
            assert all(0 < chance <= 1 for _, chance, _ in found.guesses)


def test_nothing_is_predicted_after_a_guess_that_counted_as_impossible(bench):
    explanation = bench.Explanation(("a", "b", "c"), (0.0, 0.0, 0.5))
    assert list(bench.guesses_after(explanation, [-1, 0, -1], [0, 1], -1)) == [("a", 0.0, True), ("c", 0.5, False)]


def test_logits_behind_wrong_guesses_are_the_models(bench, model):
    """Also behind guesses that the text does not go on with."""
    text = bench.record(model, prompt(20), None, 12)
    tree = bench.TokenTree([[1, 2, 3, text.tokens[5]]], [[-1, 0, 1, -1]])
    found = bench.Oracle(model, text).rows(20 + 5, tree)
    before = text.prompt + text.tokens[:5]
    for row, more in enumerate([[], [1], [1, 2], [1, 2, 3], [text.tokens[5]]]):
        expected = model(torch.tensor([before + more])).logits[0, -1]
        likely, ids = expected.softmax(-1).topk(32)
        assert found[row].likeliest[:32].tolist() == found[row].ids.tolist() == ids.tolist()
        torch.testing.assert_close(torch.from_numpy(found[row].probabilities), likely.float())


@pytest.fixture
def texts(lade_on, bench, model):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0)
    return [bench.record(model, prompt(20, seed=seed), None, 60) for seed in range(3)]


def test_a_part_left_out_guesses_nothing(texts, bench, model):
    parts = {"suffix": "suffix", "token": "token", "context": "context", "root-row": "root row"}

    def sources(without):
        """Of guesses that were accepted or rejected."""
        replays = bench.replay_all(model, texts, current_config(), True, without=without)
        return {name for one in replays for name, counts in one.sources.items() if sum(counts)}

    everything = sources(None)
    for part, source in parts.items():
        assert any(name.startswith(source) for name in everything)
        assert not any(name.startswith(source) for name in sources(part))


def test_rows_of_rejected_guesses_left_out(texts, bench, model):
    sizes = []
    for change in (nullcontext(), bench.patch.object(*bench.PARTS["rejected"])):
        memory = Memory()
        with change:
            for text in texts:
                bench.replay(model, text, current_config(), memory)
        sizes.append(len(memory))
    assert sizes[1] < sizes[0]
