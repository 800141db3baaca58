"""Models with a recurrent state: chains of guesses, right or wrong, change neither text nor what user code sees."""

import copy
import functools
import os
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from support import TOKENIZER, Recorder, compare, generate_plain, prompt, seeded
from support.families import CHAINS, VOCAB, before, named
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import lade
from lade.block.kv_cache import MAX_WAITING
from lade.block.token_tree import TokenTree
from lade.common.compat import STATE_LAYER
from lade.drafting import register_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter
from lade.models import adapter_for
from lade.models.recurrent_state import INDEX
from lade.models.self_check import trial_errors

pytestmark = pytest.mark.skipif(
    STATE_LAYER is None or not isinstance(STATE_LAYER().conv_states, dict),
    reason="in this transformers layers keep their states in another way, and such models run plain generate()",
)
# Gated delta rule beside attention, both in each layer, and no attention at all.
SERVED = ["qwen3_next", "falcon_h1", "mamba2"]
# Queries that select keys beside a state, and beside a window; states beside a window in one layer.
SELECTING = ["qwen4_exp_text", "dots3_note_text", "inkling_text"]
MAX_BLOCK = 10


@functools.cache
def built(name):
    family = named(name)
    if not family.exists:
        pytest.skip(f"this transformers runs no {family.model_class}")
    return family.build()


@pytest.fixture(params=SERVED)
def recurrent(request, lade_on):
    return built(request.param)


def prompts(batch_size=1, num_hidden=0, seed=0):
    inputs = prompt(9, batch_size, seed)
    inputs["attention_mask"][0, :num_hidden] = 0
    inputs["input_ids"] *= inputs["attention_mask"]
    return inputs


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


def ways(model):
    """generate() without and with lade."""
    return functools.partial(generate_plain, model), lambda batch, **arguments: model.generate(**batch, **arguments)


def assert_same(model, inputs, share=None, length=4, **arguments):
    """Text and generator are those of plain generate(). share, length: of `guessing`; None for lade's own drafter."""
    expected, states = seeded(generate_plain, model, inputs, **arguments)
    if share is not None:
        guessing(expected, share, length)
    found, states_then = seeded(model.generate, **inputs, **arguments)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, states, states_then))
    assert lade.last_stats().fallback_reason is None
    return lade.last_stats()


@pytest.mark.parametrize(
    ("share", "length", "do_sample"),
    [
        *((0.0, 1, True), (0.0, MAX_BLOCK - 1, False)),
        *((0.6, 1, False), (0.6, 4, True), (0.6, MAX_BLOCK - 1, True)),
        *((1.0, 4, True), (1.0, MAX_BLOCK - 1, False)),
    ],
)
def test_wrong_and_right_guesses(recurrent, share, length, do_sample):
    stats = assert_same(recurrent, prompts(), share, length, max_new_tokens=30, do_sample=do_sample)
    if share == 0:
        assert stats.steps == 30
        # Tokens that wait make blocks longer, up to a step that has no guesses.
        assert max(stats.block_tokens) == min(MAX_WAITING + length, MAX_BLOCK)
    else:
        assert stats.steps < 30
    if share == 1:
        assert stats.steps == 1 + -(-29 // (1 + length))
        assert max(stats.block_tokens) == 1 + length  # none ever waits


@pytest.mark.parametrize(("name", "num_hidden", "share"), [("qwen3_next", 0, 1.0), ("falcon_h1", 3, 0.5)])
def test_batches_go_in_step(lade_on, name, num_hidden, share):
    ends = {"eos_token_id": [7, 8, 9, 10, 11], "pad_token_id": 0}
    stats = assert_same(built(name), prompts(3, num_hidden), share, max_new_tokens=24, do_sample=True, **ends)
    assert stats.steps < 24


@pytest.mark.parametrize("mode", ["tree", "lookahead"])
def test_lades_own_guesses(recurrent, mode):
    """They are narrowed to chains, without the window."""
    lade.config_lade(MODE=mode)
    inputs = {name: value.repeat(1, 2) for name, value in prompts(2).items()}
    recurrent.generate(**inputs, max_new_tokens=40, do_sample=False)  # what is remembered helps the next call
    stats = assert_same(recurrent, inputs, max_new_tokens=40, do_sample=False)
    assert max(stats.block_tokens) > 1
    assert stats.steps < 40 or mode == "lookahead"  # whose pool has little of a text that repeats nothing


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


CALLS = int(os.environ.get("LADE_RECURRENT_CALLS", "8"))  # per family; with more, of all families that are served


def random_arguments(choice, batch_size):
    """Of a generate() call, without what a call uses up."""
    arguments = {"max_new_tokens": choice.choice([3, 17, 30]), "do_sample": choice.random() < 0.6}
    if arguments["do_sample"]:
        arguments |= {"temperature": choice.choice([0.5, 1.0]), "top_k": choice.choice([0, 5])}
    if choice.random() < 0.4:
        arguments["repetition_penalty"] = 1.3
    if choice.random() < 0.4:
        arguments["no_repeat_ngram_size"] = 2
    if choice.random() < 0.5:
        arguments |= {"eos_token_id": choice.sample(range(3, VOCAB), 4), "pad_token_id": 0}
    if batch_size == 1 and arguments["do_sample"]:
        arguments["num_return_sequences"] = 2
    if choice.random() < 0.4:
        arguments |= RETURNED
    if choice.random() < 0.3:
        arguments |= {"stop_strings": choice.sample(["q", "Zk", "4", "ab", "T"], 3), "tokenizer": TOKENIZER}
        arguments["pad_token_id"] = 0
    return arguments


@pytest.mark.parametrize("name", SERVED + SELECTING if CALLS == 8 else sorted(CHAINS))
def test_random_calls(lade_on, name):
    """Text, generator and a user's cache."""
    model = built(name)
    for seed in range(CALLS):
        choice = random.Random(seed)
        batch_size = choice.choice([1, 2, 3])
        arguments = random_arguments(choice, batch_size)
        inputs = prompts(batch_size, num_hidden=choice.choice([0, 0, 3]) if batch_size > 1 else 0, seed=seed)
        share, length = choice.random(), choice.choice([2, 5])
        mode, has_cache = choice.choice(["known", "known", "known", "tree", "lookahead"]), choice.random() < 0.3
        if choice.random() < 0.5:
            arguments["stopping_criteria"] = StoppingCriteriaList([EndsAt(14)])
        seen = []
        for generate in ways(model):
            if seen:
                guessing(getattr(seen[0][0], "sequences", seen[0][0]), share, length)
                if mode != "known":
                    lade.config_lade(MODE=mode)
            own, cache = own_cache(model) if has_cache else ({}, None)
            seen.append((*seeded(generate, inputs, **arguments, **own), cache))
        assert lade.last_stats().fallback_reason is None, seed
        (expected, states, cache), (found, states_then, cache_then) = seen
        assert all(map(torch.equal, states, states_then)), seed
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected), seed
        else:
            assert_same_outputs(found, expected)
        if cache is not None:
            assert_same_cache(cache_then, cache)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("error", [None, ZeroDivisionError("there")], ids=["ends", "raises"])
def test_what_a_users_code_sees(recurrent, share, error):
    """A streamer, and a criterion that ends the text among accepted guesses, or raises there."""
    inputs, arguments = prompts(), {"max_new_tokens": 30, "do_sample": False}
    guessing(generate_plain(recurrent, inputs, **arguments), share, 6)
    seen = []
    for generate in ways(recurrent):
        criterion, streamer = EndsAt(9 + 13, error), Recorder()
        with pytest.raises(ZeroDivisionError) if error else nullcontext():
            generate(inputs, **arguments, stopping_criteria=StoppingCriteriaList([criterion]), streamer=streamer)
        seen.append((criterion.seen, streamer.calls))
    assert seen[0] == seen[1]
    assert lade.last_stats().fallback_reason is None


def test_prompts_in_pieces(lade_on):
    assert_same(built("qwen3_next"), prompts(), 0.6, max_new_tokens=20, do_sample=False, prefill_chunk_size=4)


RETURNED = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


@pytest.mark.parametrize(("num_hidden", "share"), [(0, 0.6), (3, 0.0), (3, 1.0)])
def test_returned_caches(lade_on, num_hidden, share):
    """Two turns, of which the second goes on with the cache of the first."""
    for name in ("qwen3_next", "falcon_h1", "zamba2", "glm_moe_dsa"):
        (plain, ours), batch = ways(built(name)), prompts(2, num_hidden)
        more, caches = prompts(2, seed=1)["input_ids"], ({}, {})
        for _ in range(2):
            arguments = {"max_new_tokens": 14, "do_sample": True} | RETURNED
            expected, states = seeded(plain, batch, **arguments, **caches[0])
            guessing(expected.sequences, share, 4)
            found, states_then = seeded(ours, batch, **arguments, **caches[1])
            assert lade.last_stats().fallback_reason is None
            assert lade.last_stats().steps <= 14 + (share < 1)  # one more for tokens that wait at the end
            assert all(map(torch.equal, states, states_then))
            assert_same_outputs(found, expected)
            caches = tuple({"past_key_values": result.past_key_values} for result in (expected, found))
            mask = torch.nn.functional.pad(batch["attention_mask"], (0, 14 + more.shape[1]), value=1)
            batch = {"input_ids": torch.cat([expected.sequences, more], dim=1), "attention_mask": mask}


def assert_same_outputs(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        results = getattr(found, name), getattr(expected, name)
        # Where a layer's output is near zero before its norm, float32 rounding of the states is amplified.
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    if "past_key_values" in expected:  # Mamba-2 returns none
        assert_same_cache(found.past_key_values, expected.past_key_values)


def assert_same_cache(found, expected):
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert type(mine) is type(theirs)
        for name in ("keys", "values", "conv_states", "recurrent_states", "has_previous_state", *INDEX):
            one, other = (getattr(layer, name, None) for layer in (mine, theirs))
            scale = max((float(part.abs().max()) for part in tensors(other)), default=0.0)
            # Most states are float32, amplified likewise.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * scale)


def tensors(part):
    parts = part.values() if isinstance(part, dict) else [part]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def own_cache(model):
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    cache = DynamicCache(config=model.config)
    return {name: cache}, cache


def test_a_users_cache(recurrent):
    """It ends as without lade, and after an exception it is as before."""
    inputs = prompts()
    guessing(generate_plain(recurrent, inputs, max_new_tokens=20, do_sample=False), 0.5, 4)
    (plain, expected), (arguments, cache) = own_cache(recurrent), own_cache(recurrent)
    text = generate_plain(recurrent, inputs, max_new_tokens=20, do_sample=False, **plain)
    criteria = StoppingCriteriaList([EndsAt(9 + 13, ZeroDivisionError("there"))])
    with pytest.raises(ZeroDivisionError):
        recurrent.generate(**inputs, max_new_tokens=20, do_sample=False, stopping_criteria=criteria, **arguments)
    assert_same_cache(cache, own_cache(recurrent)[1])
    assert torch.equal(recurrent.generate(**inputs, max_new_tokens=20, do_sample=False, **arguments), text)
    assert lade.last_stats().fallback_reason is None
    assert 1 < lade.last_stats().steps < 20
    assert_same_cache(cache, expected)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen4_exp_text"])
def test_other_processes_go_on(lade_on, monkeypatch, name):
    """With synced_gpus forwards go on after the text's end, for other processes' sake; they leave nothing."""
    model, inputs = built(name), prompts()
    arguments = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True}
    expected = generate_plain(model, inputs, **arguments)
    guessing(expected.sequences, 0.6, 4)
    left = iter(range(3))
    monkeypatch.setattr(
        type(model),
        "_has_unfinished_sequences",
        lambda self, is_finished, synced_gpus, device: not is_finished or next(left, None) is not None,
    )
    found = model.generate(**inputs, **arguments, synced_gpus=True)
    assert lade.last_stats().fallback_reason is None
    assert next(left, None) is None
    assert torch.equal(found.sequences, expected.sequences)
    assert_same_cache(found.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("name", ["qwen3_next", "glm_moe_dsa"])
def test_offloaded_weights(lade_on, name):
    """accelerate keeps them on the meta device between forwards."""
    model = copy.deepcopy(built(name))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert_same(model, prompts(), max_new_tokens=14, do_sample=False)


def own(cache):
    return {"past_key_values": cache}


def recording(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def of_another_window(config):
    config = copy.deepcopy(config)
    config.sliding_window //= 2
    return DynamicCache(config=config)


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("qwen3_next", lambda config: own(DynamicCache()), "has other layers"),
        ("qwen3_next", lambda config: own(recording(config)), "records past states"),
        ("dots3_note_text", lambda config: own(of_another_window(config)), "has a window of"),
    ],
    ids=["without-states", "recording", "another-window"],
)
def test_what_is_not_served(lade_on, name, make, reason):
    model, inputs = built(name), prompts()
    seen = []
    for generate in ways(model):
        try:
            seen.append(generate(inputs, max_new_tokens=20, do_sample=False, **make(model.config)).tolist())
        except IndexError:  # the cache has no place for states
            seen.append("raises")
    assert seen[0] == seen[1]
    assert reason in lade.last_stats().fallback_reason


def test_a_first_layer_that_keeps_nothing(lade_on, small_block):
    if before("5.23"):
        pytest.skip("not tried out there")
    compare(named("nemotron_h", hybrid_override_pattern="-*").build(), prompts(), max_new_tokens=20)


def test_several_processes(monkeypatch):
    adapter = adapter_for(built("qwen3_next"))
    request = SimpleNamespace(cache=DynamicCache(config=adapter.config))
    monkeypatch.setattr("lade.models.chains.current_config", lambda: SimpleNamespace(num_workers=2))
    assert "processes cannot share" in adapter.unsupported_request(request)


@pytest.mark.parametrize("name", ["jamba", "zamba2"])
def test_states_that_blocks_leave_otherwise(lade_on, monkeypatch, name):
    """Jamba's forward of several tokens begins from zero; Zamba2's limits time steps, which single steps do not."""
    monkeypatch.setattr("lade.models.chains.has_limit", lambda part: False)
    compare(built(name), prompts(), "continue from the state", max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_the_self_check(name, is_masked):
    """The second figure is its negative control: a rejected guess that stays in the states."""
    (error, effect), *_ = trial_errors(adapter_for(built(name)), is_masked=is_masked and name != "mamba2")
    # A delta rule's states are float32, but on a CPU they are rounded as single tokens round them.
    assert error < (1e-12 if name == "qwen3_next" else 1e-5) * effect
    assert effect > 1
