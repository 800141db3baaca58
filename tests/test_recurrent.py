"""Models with a recurrent state: chains of guesses that are all wrong, all right or right in part leave the text, what
a user's code sees and the random numbers as they are without lade."""

import functools
import random

import pytest
import torch
from support import Recorder, generate_plain
from support.families import RECURRENT, VOCAB
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import lade
from lade.block.recurrent_state import MAX_WAITING, RecurrentCache
from lade.block.token_tree import TokenTree
from lade.drafting import register_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter
from lade.models import adapter_for
from lade.models.recurrent import RecurrentAdapter
from lade.models.self_check import probe_states

# Gated delta rule beside attention, both in each layer, and no attention at all.
SERVED = ["qwen3_next", "falcon_h1", "mamba2"]
MAX_BLOCK = 10


@functools.cache
def built(name):
    return next(family for family in RECURRENT if family.name == name).build()


@pytest.fixture(params=SERVED)
def recurrent(request, lade_on):
    return built(request.param)


def prompts(batch_size=1, num_hidden=0, seed=0):
    ids = torch.randint(3, VOCAB, (batch_size, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :num_hidden] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def guessing(text, share, length, seed=0):
    """Chains after the known texts [B, T] whose tokens are right with probability `share`."""
    numbers = random.Random(seed)

    class Guessing(Drafter):
        def __init__(self, request):
            self.cells = request.prompt_ids.new_empty((len(request.prompt_ids), 0))

        def propose(self, sequences, is_finished, max_offset):
            most = length if max_offset is None else min(length, max_offset)
            rows = []
            for number, start in enumerate(sequences.lengths):
                right = text[number, start : start + most].tolist()
                rows.append([token if numbers.random() < share else (token + 1) % VOCAB for token in right])
            tree = TokenTree(rows, [list(range(-1, len(row) - 1)) for row in rows])
            return Draft(tree, tree.num_nodes, ROOT_ALONE, self.cells)

    register_drafter("known", Guessing)
    lade.config_lade(MODE="known", MAX_BLOCK=MAX_BLOCK)


def run(generate, inputs, arguments):
    """The text and the random numbers after it."""
    torch.manual_seed(5)
    return generate(inputs, **arguments), torch.get_rng_state()


def assert_same(model, inputs, share=None, length=4, **arguments):
    """Text and generator are those of plain generate(). share, length: of `guessing`; None for lade's own drafter."""
    expected, state = run(functools.partial(generate_plain, model), inputs, arguments)
    if share is not None:
        guessing(expected, share, length)
    found, state_then = run(lambda batch, **others: model.generate(**batch, **others), inputs, arguments)
    assert torch.equal(found, expected)
    assert torch.equal(state, state_then)
    assert lade.last_stats().fallback_reason is None
    return lade.last_stats()


@pytest.mark.parametrize("length", [1, 4, MAX_BLOCK - 1])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_wrong_and_right_guesses(recurrent, share, do_sample, length):
    stats = assert_same(recurrent, prompts(), share, length, max_new_tokens=30, do_sample=do_sample)
    steps = stats.steps
    if share == 0:
        assert steps == 30
        # Tokens that wait make blocks longer, up to a step that has no guesses.
        assert max(stats.block_tokens) == MAX_WAITING + length
    else:
        assert steps < 30
    if share == 1:
        assert steps == 1 + -(-29 // (1 + length))
        assert max(stats.block_tokens) == 1 + length  # none ever waits


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("num_hidden", [0, 3])
def test_batches_go_in_step(lade_on, num_hidden, share):
    for name in ("qwen3_next", "falcon_h1"):
        ends = {"eos_token_id": [7, 8, 9, 10, 11], "pad_token_id": 0}
        stats = assert_same(built(name), prompts(3, num_hidden), share, max_new_tokens=24, do_sample=True, **ends)
        assert stats.steps < 24


@pytest.mark.parametrize("mode", ["tree", "lookahead"])
def test_lades_own_guesses(recurrent, mode):
    """They are narrowed to chains, without the window."""
    lade.config_lade(MODE=mode)
    for batch_size in (1, 2):
        inputs = prompts(batch_size)
        inputs = {name: value.repeat(1, 2) for name, value in inputs.items()}
        recurrent.generate(**inputs, max_new_tokens=40, do_sample=False)  # what is remembered helps the next call
        stats = assert_same(recurrent, inputs, max_new_tokens=40, do_sample=False)
        assert max(stats.block_tokens) > 1
        assert stats.steps < 40 or mode == "lookahead"  # whose pool has little of a text that repeats nothing


def test_random_calls(recurrent):
    for seed in range(8):
        choice = random.Random(seed)
        arguments = {"max_new_tokens": choice.choice([3, 17, 30]), "do_sample": choice.random() < 0.6}
        if arguments["do_sample"]:
            arguments |= {"temperature": choice.choice([0.5, 1.0]), "top_k": choice.choice([0, 5])}
        if choice.random() < 0.4:
            arguments["repetition_penalty"] = 1.3
        if choice.random() < 0.4:
            arguments["no_repeat_ngram_size"] = 2
        if choice.random() < 0.5:
            arguments |= {"eos_token_id": choice.sample(range(3, VOCAB), 4), "pad_token_id": 0}
        batch_size = choice.choice([1, 2, 3])
        if batch_size == 1 and arguments["do_sample"]:
            arguments["num_return_sequences"] = 2
        assert_same(recurrent, prompts(batch_size, seed=seed), choice.random(), choice.choice([2, 5]), **arguments)


class EndsAt(StoppingCriteria):
    """Ends, or fails, when the text has a certain length; remembers what it has seen."""

    def __init__(self, length, error=None):
        self.length, self.error, self.seen = length, error, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        if input_ids.shape[1] < self.length:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        if self.error is not None:
            raise self.error
        return torch.ones(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_a_users_code_sees(recurrent, share):
    """A streamer, and a criterion that ends the text among accepted guesses, or raises there."""
    inputs = prompts()
    guessing(generate_plain(recurrent, inputs, max_new_tokens=30, do_sample=False), share, 6)
    for error in (None, ZeroDivisionError("there")):
        seen = []
        for generate in (
            functools.partial(generate_plain, recurrent),
            lambda batch, **kw: recurrent.generate(**batch, **kw),
        ):
            criterion, streamer = EndsAt(9 + 13, error), Recorder()
            arguments = {"stopping_criteria": StoppingCriteriaList([criterion]), "streamer": streamer}
            try:
                text = generate(inputs, max_new_tokens=30, do_sample=False, **arguments).tolist()
            except ZeroDivisionError:
                text = None
            seen.append((criterion.seen, streamer.calls, text))
        assert seen[0] == seen[1]
        assert (seen[0][2] is None) == (error is not None)
    assert lade.last_stats().fallback_reason is None


def test_prompts_in_pieces(lade_on):
    assert_same(built("qwen3_next"), prompts(), 0.6, max_new_tokens=20, do_sample=False, prefill_chunk_size=4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"return_dict_in_generate": True}, "does not keep every key"),
        ({"past_key_values": ()}, "does not keep every key"),
        ({"cache_implementation": "static"}, "left to the original code"),
    ],
)
def test_what_is_not_served(lade_on, arguments, reason):
    model, inputs = built("qwen3_next"), prompts()
    expected = generate_plain(model, inputs, max_new_tokens=6, do_sample=False)
    if "past_key_values" in arguments:
        arguments = {"past_key_values": DynamicCache(config=model.config)}
    found = model.generate(**inputs, max_new_tokens=6, do_sample=False, **arguments)
    assert torch.equal(getattr(found, "sequences", found), expected)
    assert reason in lade.last_stats().fallback_reason


@pytest.mark.parametrize("name", ["jamba", "zamba2"])
def test_states_that_blocks_leave_otherwise(lade_on, name):
    """Jamba's forward of several tokens begins from zero; Zamba2's computes another state than its single steps."""
    model, inputs = built(name), prompts()
    expected = generate_plain(model, inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), expected)
    assert "recurrent state" in lade.last_stats().fallback_reason


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_the_self_check(name, is_masked):
    """The second figure is its negative control: a rejected guess that stays in the states."""
    error, effect = probe_states(adapter_for(built(name)), is_masked=is_masked and name != "mamba2")
    assert error < 1e-5 * effect
    assert effect > 1


def test_states_are_put_back():
    """A partly rejected block leaves the states as they were; its tokens wait, and run in front of the next one."""
    model = built("qwen3_next")
    adapter = adapter_for(model)
    assert type(adapter) is RecurrentAdapter
    cache = adapter.make_cache(64)
    with torch.no_grad():
        model(**prompts(), past_key_values=cache, use_cache=True)
    cache.end_prefill(1)
    before = states(cache)
    cache._tokens = torch.tensor([[4, 5, 6]])
    cache.begin_block(3, torch.device("cpu"))
    for state in states(cache, copied=False):
        state.add_(1)  # as a forward does
    cache.commit([[1]])
    assert all(map(torch.equal, states(cache), before))
    assert (cache.lengths, cache.num_waiting, cache.block_start) == ([11], 2, 9)
    assert cache._waiting.tolist() == [[4, 5]]
    cache._tokens = torch.tensor([[4, 5, 7]])
    cache.begin_block(3, torch.device("cpu"))
    for state in states(cache, copied=False):
        state.add_(1)
    cache.commit([[]])  # all of it is committed
    assert (cache.lengths, cache.num_waiting, cache.block_start) == ([12], 0, 12)
    assert not any(map(torch.equal, states(cache), before))


def states(cache: RecurrentCache, copied=True):
    return [state.clone() if copied else state for _, _, state in cache._states()]


def test_trees_become_chains():
    tree = TokenTree([[1, 2, 3, 4], [5, 6, 7], [8]], [[-1, -1, 0, 2], [-1, 0, 0], [-1]])
    assert tree.first_paths([False, False, True]) == TokenTree([[1, 3], [5, 6], []], [[-1, 0], [-1, 0], []])
    assert tree.first_paths([True] * 3) == TokenTree.empty(3)
