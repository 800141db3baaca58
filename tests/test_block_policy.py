"""Which block is worth its cost: lade never goes on guessing in vain, nor stays small when it pays."""

from dataclasses import replace

import pytest
import torch
from support import VOCAB, Choose, compare, prompt, tiny_llama
from transformers import LogitsProcessorList

import lade
from lade.common import notices
from lade.drafting import step_costs, with_mode
from lade.drafting.block_policy import choose_size, compared_sizes
from lade.drafting.step_costs import SIZES, StepCosts
from lade.stats import tracing
from lade.switch import current_config


def known(slope):
    """The costs of a call, of which each further token adds so much of a plain step."""
    costs = StepCosts(tiny_llama())
    costs._table = {size: 1 + slope * (size - 1) for size in SIZES}
    return costs


@pytest.mark.parametrize(
    ("slope", "chance", "best"), [(0.01, 0.5, 64), (0.2, 0.5, 64), (0.2, 0.1, 1), (0.0, 0.0, 1), (1.0, 0.9, 1)]
)
def test_the_best_rate_wins(slope, chance, best):
    costs = known(slope)
    assert choose_size(compared_sizes(costs.offers(64), [chance * k for k in range(64)], 1)) == best
    assert choose_size(compared_sizes(costs.offers(10), [chance * k for k in range(64)], 1)) == min(best, 10)


@pytest.fixture
def priced(monkeypatch, lade_on, request):
    """Steps have set costs: each further token costs as much of a plain step as on a CPU with wide registers."""
    slope = getattr(request, "param", 0.03)
    table = {size: 1 + slope * (size - 1) for size in SIZES}
    monkeypatch.setattr(step_costs, "load_table", lambda *_: table)
    lade.config_lade(ADAPTIVE=1)


@pytest.fixture(params=["auto", "lookahead"])
def mode(priced, request):
    lade.config_lade(MODE=request.param, LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7)
    return request.param


ORDER = torch.randint(3, VOCAB, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
EASY, HARD = (LogitsProcessorList([Choose(by)]) for by in (lambda length: 3 + length % 7, ORDER.__getitem__))


def test_guesses_that_never_hit_are_given_up(priced):
    stats = compare(tiny_llama(), prompt(12), max_new_tokens=160, logits_processor=HARD)
    assert max(stats.block_tokens) > 1  # it did try
    cost = sum(1 + 0.03 * (size - 1) for size in stats.block_tokens)
    assert cost <= 1.03 * 160  # a plain call would have cost 160


def test_guesses_that_always_hit_make_the_block_grow(mode):
    stats = compare(tiny_llama(), prompt(12), max_new_tokens=160, logits_processor=EASY)
    assert max(stats.accepted_lengths) >= (4 if mode == "lookahead" else 20)
    assert stats.steps < (65 if mode == "lookahead" else 20)


@pytest.mark.parametrize("priced", [1.0], indirect=True)
def test_a_dear_machine_gets_plain_steps(mode):
    """A mixture of experts, say, where each further token costs as much as the first."""
    tiny_llama().generate(**prompt(12), max_new_tokens=100)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.plain_step_share > 0.8
    assert sum(stats.block_tokens) <= 1.2 * 100  # a plain call would have cost 100


@pytest.mark.parametrize(("priced", "has_window"), [(0.005, True), (0.03, False)], indirect=["priced"])
def test_the_window_runs_where_its_block_costs_little(priced, has_window):
    lade.config_lade(MODE="lookahead", LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7)
    found = []
    with tracing(lambda step, outcome: found.append(step.draft.has_window)):
        tiny_llama().generate(**prompt(12), max_new_tokens=20)
    assert set(found) == {has_window}


def test_embeddings_alone_are_guessed_behind(priced):
    """Their text begins empty while the cache does not: costs are looked up where they were noted."""
    model = tiny_llama()
    lade.config_lade(MODE="auto")
    embeds = model.get_input_embeddings()(prompt(300)["input_ids"]).detach()
    stats = compare(model, {"inputs_embeds": embeds}, max_new_tokens=100, logits_processor=EASY)
    assert stats.steps < 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_originals_three_lines_gain(priced, dtype, caplog):
    """On a CPU the window's block of 84 tokens never pays: its keywords without MODE leave the choice to the call."""
    lade.config_lade(MODE="auto", ADAPTIVE=1)
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)
    notices._said.clear()
    model = tiny_llama(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # as sure of its tokens as a trained model
    for _ in range(2):
        model.generate(**prompt(12), max_new_tokens=120)
    stats = lade.last_stats()
    assert "pool" not in stats.sources
    assert stats.steps < 0.8 * stats.generated_tokens
    assert caplog.text.count("were given without MODE") == 1
    lade.config_lade(MODE="lookahead")  # which forces the paper's method
    model.generate(**prompt(12), max_new_tokens=40)
    assert "pool" in lade.last_stats().sources


def test_the_window_runs_where_its_block_pays(lade_on):
    lade.config_lade(MODE="auto")
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7)
    config = current_config()
    assert not with_mode(config, tiny_llama(), 1).uses_window
    assert with_mode(config, tiny_llama().to("meta"), 1).uses_window  # another device than a CPU
    assert not with_mode(config, tiny_llama().to("meta"), 64).uses_window  # in 64 rows it is large there, too
    assert with_mode(replace(config, dist_workers=2), tiny_llama(), 1).uses_window  # what several processes split
    assert not with_mode(replace(config, prefers_window=False), tiny_llama().to("meta"), 1).uses_window
