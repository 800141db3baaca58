"""Sampling in steps on the device: plain generate()'s tokens from the same seed, its generator afterwards, the ordinary
loop's steps."""

import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support import Recorder, generate_plain, padded_prompt, prompt, tiny_llama
from support.device_steps import check, fake_step, ordinary_stats, seeded, unchanged
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import logits_process as warpers

import lade
from lade import decoding
from lade.block import kv_cache
from lade.forward import buffer_pool
from lade.forward import static_shapes as fixed
from lade.forward.on_device import loop as device_loop
from lade.forward.on_device import sampling as device_sampling
from lade.forward.on_device import step as device_step
from lade.forward.on_device.sampling import REFUSED, DrawRing
from lade.forward.race import Sampling
from lade.verification import draws as noise
from lade.verification import selection as rules
from lade.verification.draws import generator_state

# The distribution of a model that has learned something: some tokens are far likelier than others.
SHARPER = 16
SAMPLED = {"do_sample": True, "temperature": 0.3, "pad_token_id": 0, "max_new_tokens": 28}
WARPERS = [
    {"top_k": 0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.05},
    {"renormalize_logits": True, "remove_invalid_values": True},
]
EVERY_WARPER = [
    warpers.TemperatureLogitsWarper(0.7),
    warpers.TopKLogitsWarper(5),
    warpers.TopPLogitsWarper(0.8),
    warpers.MinPLogitsWarper(0.1),
    warpers.TypicalLogitsWarper(0.7),
    warpers.EpsilonLogitsWarper(0.05),
    warpers.LogitNormalization(),
    warpers.InfNanRemoveLogitsProcessor(),
]

pytestmark = pytest.mark.usefixtures("eager_steps")


def sharp_llama(dtype=torch.float64, **changes):
    model = tiny_llama(dtype, **changes)
    model.lm_head.weight.data.mul_(SHARPER)
    return model


@pytest.fixture(scope="module")
def model():
    return unchanged(sharp_llama())


@pytest.fixture(scope="module")
def shallow():
    """One layer is traced in half the time of two, which `test_captured_once_for_each_set_of_parameters` takes."""
    return unchanged(sharp_llama(num_hidden_layers=1))


def inputs_of(kind):
    return {"one": prompt, "padded": padded_prompt, "batch": lambda: prompt(batch_size=3)}[kind]()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("place", range(len(WARPERS)), ids=lambda place: str(WARPERS[place]))
def test_same_tokens_and_steps(place, temperature, model):
    """Warpers and temperatures take turns with one row and with several that are padded, which no warper tells
    apart."""
    arguments, kind = WARPERS[place], ("one", "padded")[(place + int(2 * temperature)) % 2]
    stats = check(model, inputs_of(kind), **SAMPLED | arguments | {"temperature": temperature})
    if temperature < 1:
        assert stats.steps < 28


@pytest.mark.parametrize("by_accepted", [False, True], ids=["roll-by-one", "roll-by-accepted"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (5, 7, 7), (2, 4, 3)], ids=str)
def test_other_sizes(sizes, by_accepted, model):
    level, window, guesses = sizes
    lade.config_lade(LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guesses, ALWAYS_FWD_ONE=not by_accepted)
    for kind in ("one", "padded"):
        assert len(check(model, inputs_of(kind), **SAMPLED).accepted_lengths) > 1


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_every_token_as_the_end(kind, model):
    """Some end a row within an accepted run, others after the rows beside it."""
    texts = seeded(generate_plain, model, inputs_of(kind), **SAMPLED)[0][:, 24:]
    for token in texts.unique().tolist()[::2]:
        check(model, inputs_of(kind), eos_token_id=[token, 60], **SAMPLED)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 17, 18, 19])
def test_texts_that_end_anywhere(max_new_tokens, model):
    for kind in ("one", "batch"):
        check(model, inputs_of(kind), **SAMPLED | {"max_new_tokens": max_new_tokens, "temperature": 0.1})


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 32)


@pytest.fixture
def runs_ahead(monkeypatch):
    """The host starts a step before it has seen the result of the one before."""
    monkeypatch.setattr(device_loop, "runs_ahead", lambda device: True)


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_a_cache_that_grows(kind, model, small_cache):
    check(model, inputs_of(kind), **SAMPLED | {"max_new_tokens": 150})


@pytest.mark.parametrize("kind", ["one", "padded"])
def test_one_step_ahead_of_the_host(kind, model, calls, runs_ahead, small_cache):
    stats = check(model, inputs_of(kind), **SAMPLED | {"max_new_tokens": 150})
    assert len(calls) == stats.device_steps + 1


@pytest.fixture
def short_lead(monkeypatch):
    for module in (rules, device_sampling):
        monkeypatch.setattr(module, "MAX_LEAD", 2)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("eos_ids", [[], [5, 11, 17, 23, 31]], ids=["same-end", "ends"])
def test_rows_wait_for_the_slowest(eos_ids, is_ahead, model, short_lead, calls, monkeypatch):
    """As in the ordinary loop, and a ring that just suffices keeps all of their draws."""
    monkeypatch.setattr(device_loop, "runs_ahead", lambda device: is_ahead)
    waited = 0
    for seed in range(3):
        calls.clear()
        arguments = SAMPLED | {"eos_token_id": eos_ids or None, "max_new_tokens": 60}
        check(model, prompt(batch_size=3, seed=seed), **arguments)
        for (before, _), (after, _) in pairwise(calls):
            waited += sum(old == new == max(before) > min(before) + 1 for old, new in zip(before, after, strict=True))
    assert waited


def tampered(part, **changes):
    """A part of the step that sees some of the state otherwise."""

    def sample(state, *args):
        view = SimpleNamespace(**vars(state) | {name: change(state) for name, change in changes.items()})
        found = part(view, *args)
        state.is_refused |= view.is_refused
        return found

    return sample


WRONG = {
    "as-it-is": ({}, False),
    "next-draws": ({"lengths": lambda state: state.lengths + 1}, True),
    "root's-draws": ({"offsets": lambda state: 0 * state.offsets}, True),
    "first-row's-draws": ({"rows": lambda state: 0 * state.rows}, True),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_draws_are_noticed(name, model, monkeypatch):
    changes, is_wrong = WRONG[name]
    monkeypatch.setattr(device_step, "sample", tampered(device_step.sample, **changes))
    expected, _ = seeded(generate_plain, model, prompt(batch_size=3), **SAMPLED)
    found, _ = seeded(model.generate, **prompt(batch_size=3), **SAMPLED)
    assert lade.last_stats().device_steps
    assert torch.equal(found, expected) != is_wrong


@pytest.mark.parametrize("kind", ["one", "batch"])
def test_a_ring_too_small_is_noticed(kind, model, runs_ahead, short_lead, monkeypatch):
    arguments = SAMPLED | {"temperature": 0.1, "max_new_tokens": 60}
    expected, _ = seeded(generate_plain, model, inputs_of(kind), **arguments)
    for unseen, is_right in [(2, True), (1, False)]:
        monkeypatch.setattr(device_sampling, "MAX_UNSEEN", unseen)
        assert torch.equal(seeded(model.generate, **inputs_of(kind), **arguments)[0], expected) == is_right
        assert lade.last_stats().device_steps


def test_a_generator_that_is_not_put_back_is_noticed(model, monkeypatch):
    monkeypatch.setattr(DrawRing, "put_back", lambda self, length: None)
    expected, plain_states = seeded(generate_plain, model, prompt(), **SAMPLED)
    found, states = seeded(model.generate, **prompt(), **SAMPLED)
    assert torch.equal(found, expected)
    assert not torch.equal(states[0], plain_states[0])


def test_draws_are_those_of_multinomial():
    probabilities = (3 * torch.randn(2, 300)).softmax(-1)
    torch.manual_seed(4)
    torch.multinomial(probabilities, 1)
    before = torch.get_rng_state()
    expected, states = [], []
    for _ in range(20):
        expected.append(torch.multinomial(probabilities, 1)[:, 0])
        states.append(torch.get_rng_state())

    torch.set_rng_state(before)
    ring = DrawRing(torch.ones(5, 2, 300), 31)
    for first in (1, 3, 3, 8, 12):
        ring.fill([30 + first, 50], [False, False])
        for index in range(first, first + 5):
            assert torch.equal((probabilities / ring.of(30 + index)).argmax(-1), expected[index - 1])
    ring.put_back(44)
    assert torch.equal(torch.get_rng_state(), states[12])


def test_a_generator_that_others_use_is_left_alone():
    """Of threads that share it, none may take back what another one has drawn."""
    cpu = torch.device("cpu")
    for num_draws in (0, 3):
        ring = DrawRing(torch.ones(5, 1, 300), 8)
        ring.fill([8], [False])
        torch.rand(num_draws)
        ring.fill([10], [False])
        state = generator_state(cpu)
        ring.put_back(11)
        assert torch.equal(generator_state(cpu), state) == bool(num_draws)


@pytest.mark.parametrize("warper", EVERY_WARPER, ids=lambda warper: type(warper).__name__)
def test_probabilities_are_those_of_each_row_alone(warper):
    """To the last bit, whatever stands beside a row."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 7, 1003)).bfloat16()
    found = Sampling(None, (warper,)).probabilities(logits)
    for row, of_row in zip(logits.flatten(0, 1), found.flatten(0, 1), strict=True):
        ids = torch.zeros(1, 5, dtype=torch.long)
        scores = LogitsProcessorList([warper])(ids, row[None].to(copy=True, dtype=torch.float32))
        assert torch.equal(of_row, scores.softmax(-1)[0])


@pytest.mark.parametrize("warper", EVERY_WARPER, ids=lambda warper: type(warper).__name__)
def test_nothing_is_read_by_the_host(warper):
    assert type(warper) in device_sampling.WARPERS
    assert fake_step(Sampling(None, (warper,))).shape == (2, 1 + 2 * 3 + 3, 61)


def test_those_that_read_are_not_among_them(monkeypatch):
    """One of them by the checks of a distribution's arguments, which torch.compile turns off for good."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    for warper in (warpers.EtaLogitsWarper(0.1), warpers.TopHLogitsWarper(0.5)):
        assert type(warper) not in device_sampling.WARPERS
        with pytest.raises((DataDependentOutputException, AssertionError)):
            fake_step(Sampling(None, (warper,)))
    assert {type(warper) for warper in EVERY_WARPER} == device_sampling.WARPERS


class Cliff(torch.nn.Linear):
    """An output layer whose logits are not numbers for hidden states beyond a limit."""

    def forward(self, states):
        return super().forward(states).masked_fill(states[..., :1] > 1.7, torch.nan)


def outcome(generate, *args, **arguments):
    try:
        return seeded(generate, *args, **arguments)[0].tolist()
    except RuntimeError as problem:
        return str(problem)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_is_no_number(batch_size):
    """generate() refuses it where it has to sample there, and not where a wrong guess would have led."""
    model = sharp_llama()
    model.lm_head.__class__ = Cliff
    refused = []
    for seed in range(12):
        inputs = prompt(batch_size=batch_size, seed=seed)
        expected = outcome(generate_plain, model, inputs, **SAMPLED)
        assert outcome(model.generate, **inputs, **SAMPLED) == expected
        stats = lade.last_stats()
        if stats.device_steps and stats.device_reason == REFUSED:
            refused.append(type(expected))
        elif stats.device_steps:
            assert stats.device_steps == stats.steps - 1
            assert isinstance(expected, list)
    assert str in refused
    if batch_size == 1:
        assert list in refused


@pytest.fixture
def refuses(monkeypatch):
    """Steps refuse to sample from the seventh on, while this tensor says so."""
    is_on = torch.tensor(True)

    def refusing(state, sampling, answers, original=device_step.sample):
        chosen, is_active = original(state, sampling, answers)
        state.is_refused |= (state.num_steps >= 6) & is_on
        return chosen, is_active & ~state.is_refused

    monkeypatch.setattr(device_step, "sample", refusing)
    return is_on


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", ["one", "padded"])
def test_a_refusal_changes_nothing(kind, is_ahead, model, refuses, monkeypatch):
    """Steps, texts and generator are those of a call that the device had no part in."""
    monkeypatch.setattr(device_loop, "runs_ahead", lambda device: is_ahead)
    assert_goes_on(model, inputs_of(kind), device_steps=6)
    assert lade.last_stats().device_reason == REFUSED


def test_a_graph_serves_the_call_after_a_refusal(shallow, refuses, captured):
    assert_goes_on(shallow, prompt(), device_steps=6)
    refuses.fill_(False)
    check(shallow, prompt(), captured=True, **SAMPLED)
    # The step, and the forward alone.
    assert len(captured) == 2


def assert_goes_on(model, inputs, device_steps):
    """The ordinary loop takes over in the middle, and nobody notices."""
    expected, plain_states = seeded(generate_plain, model, inputs, **SAMPLED)
    ordinary = ordinary_stats(model, inputs, **SAMPLED)
    found, states = seeded(model.generate, **inputs, **SAMPLED)
    stats = lade.last_stats()
    assert torch.equal(found, expected)
    assert torch.equal(states[0], plain_states[0])
    assert stats.device_steps == device_steps
    assert (stats.steps, stats.accepted_lengths) == (ordinary.steps, ordinary.accepted_lengths)


@pytest.mark.parametrize("kind", ["one", "padded"])
def test_a_failure_in_the_middle(kind, model, monkeypatch):
    """Rows are at different lengths then: what the slower ones are to be chosen with is handed back too."""
    lade.config_lade(CUDA_GRAPH=1)

    def fail_later(forward):
        count = iter(range(100))

        def replay():
            if next(count) == 9:
                raise RuntimeError("device lost")
            return forward()

        return replay

    monkeypatch.setattr(fixed, "GRAPH_DEVICES", ("cpu",))
    for module in (device_loop, fixed):
        monkeypatch.setattr(module, "capture", fail_later)
    assert_goes_on(
        model, inputs_of(kind), device_steps=7
    )  # the first two replays are compared with the ordinary forward
    assert lade.last_stats().device_reason == "RuntimeError: device lost"
    if kind == "padded":
        take_over = noise.ExponentialDraws.take_over

        def with_others(self, index, draws):  # with which token 5 is chosen
            take_over(self, index, [each.index_fill(1, torch.tensor([5]), 1e-30) for each in draws])

        monkeypatch.setattr(noise.ExponentialDraws, "take_over", with_others)
        with pytest.raises(AssertionError):
            assert_goes_on(model, inputs_of(kind), device_steps=8)


# The normal run compiles one row without draws: test_on_device_step.py.
@pytest.mark.parametrize("kind", [pytest.param("one", marks=pytest.mark.long), "padded"])
def test_compiled_once_for_each_set_of_parameters(kind, shallow, compiled, monkeypatch):
    """Not anew while the text grows, nor in the next call."""
    monkeypatch.setattr(fixed, "BACKEND", "aot_eager")
    arguments = SAMPLED | {"max_new_tokens": 48}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for temperature, num_graphs in [(0.3, 1), (0.3, 1), (0.4, 2), (0.3, 2)]:
            check(shallow, inputs_of(kind), compiled=True, **arguments | {"temperature": temperature})
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
@pytest.mark.parametrize("kind", [pytest.param("one", marks=pytest.mark.long), "padded"])
def test_compiled_by_torch(kind, compiled, monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    model = sharp_llama(torch.float32, num_hidden_layers=1)
    check(model, inputs_of(kind), compiled=True, **SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.02})


@pytest.mark.parametrize("kind", ["one", "padded"])
def test_captured_once_for_each_set_of_parameters(kind, model, captured):
    for arguments, num_graphs in [({}, 1), ({}, 1), ({"top_p": 0.5}, 2), ({}, 2), ({"max_new_tokens": 20}, 2)]:
        check(model, inputs_of(kind), captured=True, **SAMPLED | arguments)
        assert len(captured) == num_graphs


def test_a_graph_of_a_cache_that_has_grown(shallow, captured, small_cache, runs_ahead):
    for max_new_tokens, num_graphs in [(80, 2), (80, 2), (10, 2), (80, 2)]:
        check(shallow, prompt(batch_size=2), captured=True, **SAMPLED | {"max_new_tokens": max_new_tokens})
        assert len(captured) == num_graphs


def test_draws_are_not_read_where_others_may_write(shallow, captured, small_cache, monkeypatch):
    """The smaller buffers are another call's as soon as they are in the pool."""

    def overwritten(model, buffers, original=buffer_pool.release):
        buffers.state.draws.fill_(1.0)
        return original(model, buffers)

    monkeypatch.setattr(buffer_pool, "release", overwritten)
    check(shallow, prompt(batch_size=2), captured=True, **SAMPLED | {"max_new_tokens": 80})
    assert len(captured) == 2


def test_the_callers_warper_changes(shallow, captured):
    """A graph keeps to the parameters that it was captured with."""
    own = warpers.TopKLogitsWarper(2)
    for top_k, num_graphs in [(2, 1), (20, 2), (2, 2)]:
        own.top_k = top_k
        check(shallow, prompt(), captured=True, logits_processor=LogitsProcessorList([own]), **SAMPLED)
        assert len(captured) == num_graphs


class Half(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2


class Halved(warpers.TemperatureLogitsWarper):
    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores) / 2


class HalfList(LogitsProcessorList):
    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) / 2


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def with_tensor():
    warper = warpers.MinPLogitsWarper(0.1)
    warper.min_p = torch.tensor([[0.1]])
    return warper


HOST_WORK = {
    "own-processor": lambda: {"logits_processor": LogitsProcessorList([Half()])},
    "subclass": lambda: {"logits_processor": LogitsProcessorList([Halved(0.5)])},
    "tensor": lambda: {"logits_processor": LogitsProcessorList([with_tensor()])},
    "repetition-penalty": lambda: {"repetition_penalty": 1.2},
    "eta": lambda: {"eta_cutoff": 0.05},
    "min-length": lambda: {"min_new_tokens": 5, "eos_token_id": 7},
    "criterion": lambda: {"stopping_criteria": [Never()]},
    "scores": lambda: {"output_scores": True, "return_dict_in_generate": True},
    "streamer": lambda: {"streamer": Recorder()},
}


@pytest.mark.parametrize("name", HOST_WORK)
def test_what_needs_the_host_goes_the_ordinary_way(name, model):
    results = []
    for run in (
        lambda **arguments: generate_plain(model, prompt(), **arguments),
        lambda **a: model.generate(**prompt(), **a),
    ):
        output, states = seeded(run, **SAMPLED | HOST_WORK[name]())
        results.append((getattr(output, "sequences", output), states[0]))
    assert all(map(torch.equal, *results))
    assert lade.last_stats().fallback_reason is None
    assert (lade.last_stats().device_steps, lade.last_stats().device_reason) == (0, None)


def test_a_list_with_a_mind_of_its_own(model, monkeypatch):
    """A model class may make one."""
    make = type(model)._get_logits_processor
    monkeypatch.setattr(type(model), "_get_logits_processor", lambda self, *a, **k: HalfList(make(self, *a, **k)))
    expected, _ = seeded(generate_plain, model, prompt(), **SAMPLED)
    assert torch.equal(seeded(model.generate, **prompt(), **SAMPLED)[0], expected)
    assert lade.last_stats().device_steps == 0


def test_the_callers_cache(model):
    """One text, in a cache that is returned; several would have to have one length in it."""
    for batch_size in (1, 2):
        arguments = SAMPLED | {"return_dict_in_generate": True}
        expected, plain_states = seeded(generate_plain, model, prompt(batch_size=batch_size), **arguments)
        found, states = seeded(model.generate, **prompt(batch_size=batch_size), **arguments)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(states[0], plain_states[0])
        assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        assert bool(lade.last_stats().device_steps) == (batch_size == 1)


def test_embeddings_instead_of_a_prompt(model):
    embeddings = model.get_input_embeddings()(prompt()["input_ids"])
    check(model, {"inputs_embeds": embeddings, "attention_mask": prompt()["attention_mask"]}, **SAMPLED)


def test_another_default_dtype(model):
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(model, prompt(), **SAMPLED)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", [{"CUDA_GRAPH": 0}, {"CUDA_GRAPH": 1}, {"COMPILE": 1, "CUDA_GRAPH": 1}], ids=str)
def test_on_cuda(way, monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    lade.config_lade(**way)
    model = sharp_llama(torch.float32).cuda()
    for kind in ("one", "padded", "one"):
        inputs = {name: tensor.cuda() for name, tensor in inputs_of(kind).items()}
        for arguments in ({"top_k": 0}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}):
            is_compiled, is_captured = "COMPILE" in way, way["CUDA_GRAPH"] == 1
            check(model, inputs, compiled=is_compiled, captured=is_captured, **SAMPLED | arguments)
