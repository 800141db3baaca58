"""The studies of benchmarks/half_precision.py change what they say they change, and nothing else."""

import importlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import generate_plain, prompt, tiny_llama

import lade
from lade.forward.runner import BlockRunner
from lade.verification.selection import GreedySelection

FOLDER = Path(__file__).parent.parent / "benchmarks"
SAMPLED = {"do_sample": True, "temperature": 0.5, "top_k": 0}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("half_precision")


def generate(model, inputs, **arguments):
    torch.manual_seed(3)
    tokens = model.generate(**inputs, max_new_tokens=40, **arguments)
    assert lade.last_stats().fallback_reason is None
    return tokens, torch.get_rng_state()


@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_in_float64_the_studies_change_no_text(study, lade_on, arguments):
    lade.config_lade(MODE="tree", MAX_BLOCK=8, ADAPTIVE=0)
    model, inputs = tiny_llama(dtype=torch.float64), prompt(24)
    torch.manual_seed(3)
    expected = generate_plain(model, inputs, max_new_tokens=40, **arguments), torch.get_rng_state()
    tally = Counter()
    near = 2.0**49 if arguments else 2.0**47  # units of float64: some tokens are near ties, others are not
    for change in (study.own_keys(tally), study.retaking(near, arguments.get("temperature"), tally)):
        with change:
            found = generate(model, inputs, **arguments)
        assert all(map(torch.equal, found, expected))
    assert tally["blocks"] > 0
    assert 0 < tally["retaken"] < tally["tokens"]


def test_near_ties_take_a_step_more(study, lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=8, ADAPTIVE=0)
    model, inputs = tiny_llama(dtype=torch.float64), prompt(24)
    steps = {}
    for units in (0, 2.0**60):  # the last: each token that a block decides
        with study.retaking(units, None, Counter()):
            generate(model, inputs)
        steps[units] = lade.last_stats().steps
    assert steps[0] < steps[2.0**60]


def test_own_keys_are_those_that_a_row_sees(study, lade_on):
    """Negative control: where each token sees the root alone, the text differs."""
    lade.config_lade(MODE="tree", MAX_BLOCK=8, ADAPTIVE=0)
    model, prompts = tiny_llama(dtype=torch.float64), [prompt(24, seed=seed) for seed in range(4)]
    expected = [generate(model, inputs)[0] for inputs in prompts]
    with study.own_keys(Counter()):
        seeing = BlockRunner.eager_forward

        def blind(self, block, cache, **wanted):
            visible = torch.zeros_like(block.visible)  # the block's own is cached for all blocks of this shape
            visible[..., 0] = True
            return seeing(self, replace(block, visible=visible), cache, **wanted)

        with study.replaced(BlockRunner, "eager_forward", blind):
            found = [generate(model, inputs)[0] for inputs in prompts]
    assert not all(map(torch.equal, found, expected))


def test_everything_is_put_back(study):
    before = GreedySelection._choose, BlockRunner.eager_forward, torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(KeyError), study.retaking(1, None, Counter()), study.own_keys(Counter()):
        raise KeyError
    after = GreedySelection._choose, BlockRunner.eager_forward, torch.nn.functional.scaled_dot_product_attention
    assert before == after


@pytest.mark.parametrize("extra", [(), ("--temperature", "0.7")], ids=["greedy", "sampled"])
def test_the_command(study, lade_on, checkpoint, monkeypatch, capsys, extra):
    small = (
        "--limit",
        "1",
        "--max_new_tokens",
        "8",
        "--dtype",
        "bfloat16",
        "--methods",
        "plain,lade,retake_1,own_keys",
    )
    monkeypatch.setattr(sys, "argv", ["half_precision.py", "--model_path", checkpoint, *small, *extra])
    study.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures["methods"]) == ["plain", "lade", "retake_1", "own_keys"]
    assert figures["methods"]["plain"]["identical"] == 1
    assert all(row["same_in_every_trial"] for row in figures["methods"].values())
