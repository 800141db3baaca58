"""Whole steps on the device: plain generate()'s tokens, the ordinary loop's steps, nothing read by the host, everything
kept.

The step itself is pure torch, so that most of this runs as it is. Where a compiler matters, one that compiles nothing
is taken, and torch's own once; CUDA graphs are stood in for by traces (support/graphs.py).
"""

import gc
import shutil
import threading
import weakref
from functools import partial

import pytest
import torch
from support import generate_plain, padded_prompt, prompt, tiny, tiny_llama
from support.device_steps import GREEDY, check, fake_step, ordinary_stats, unchanged
from support.families import FAMILIES
from support.graphs import is_wanted, kept_buffers
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import lade
from lade import decoding
from lade.block import kv_cache
from lade.config import current_config
from lade.forward import static_shapes as fixed
from lade.forward.fingerprint import fingerprint
from lade.forward.on_device import loop as device_loop
from lade.forward.on_device import step as device_step
from lade.forward.runner import BlockRunner
from lade.models import adapter_for

pytestmark = pytest.mark.usefixtures("eager_steps")


@pytest.fixture(scope="module")
def shallow():
    """One layer is traced in half the time of two, which `test_captured_once_for_all_calls` takes."""
    return unchanged(tiny_llama(num_hidden_layers=1))


@pytest.mark.parametrize("by_accepted", [False, True], ids=["roll-by-one", "roll-by-accepted"])
@pytest.mark.parametrize("sizes", [(4, 3, 2), (2, 1, 1), (5, 7, 7), (3, 5, 1), (2, 4, 3), (6, 2, 4)], ids=str)
def test_same_tokens_and_steps(sizes, by_accepted, model):
    level, window, guesses = sizes
    lade.config_lade(LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guesses, ALWAYS_FWD_ONE=not by_accepted)
    stats = check(model, prompt(), max_new_tokens=60)
    assert stats.steps < 60
    assert set(stats.block_tokens) == {(level - 1) * (window + guesses)}


@pytest.mark.parametrize("inputs", [prompt(batch_size=3), padded_prompt()], ids=["batch", "padded"])
@pytest.mark.parametrize("uses_kernel", [False, True], ids=["masked", "kernel"])
def test_rows_at_different_lengths(inputs, uses_kernel, model):
    lade.config_lade(USE_FLASH=uses_kernel)
    stats = check(model, inputs, eos_token_id=[7, 9])
    assert stats.used_kernel == uses_kernel
    assert len(stats.accepted_lengths) > 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 17, 18, 19])
def test_texts_that_end_anywhere(max_new_tokens, model):
    """In the middle of an accepted run too."""
    ids = torch.arange(5, 9).repeat(1, 8)
    check(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=max_new_tokens)


def test_every_token_as_the_end(model):
    """Each one that the text has, so that some end it within an accepted run."""
    text = generate_plain(model, prompt(), **GREEDY)[0, 24:].tolist()
    for token in sorted(set(text)):
        stats = check(model, prompt(), eos_token_id=[token, 60])
        assert stats.generated_tokens == text.index(token) + 1


def test_tokens_of_a_short_prompt(model):
    check(model, prompt(length=1))


def test_windows_by_layer():
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8}
    check(tiny(Gemma2ForCausalLM, Gemma2Config, torch.float32, **sizes), prompt())


def test_learned_positions():
    model = tiny(GPT2LMHeadModel, GPT2Config, n_positions=128)
    check(model, prompt())
    # A full block near the last position would lie beyond it: there the ordinary loop makes blocks smaller.
    expected = generate_plain(model, prompt(), **GREEDY | {"max_new_tokens": 104})
    assert torch.equal(model.generate(**prompt(), **GREEDY | {"max_new_tokens": 104}), expected)
    assert lade.last_stats().device_steps == 0


def test_a_cache_that_grows(model, monkeypatch):
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 32)
    check(model, prompt(), max_new_tokens=200)


def test_a_step_beyond_the_end_changes_nothing(model, calls, monkeypatch):
    """A device that runs by itself is one step ahead of the host."""
    stats = check(model, prompt(batch_size=2), eos_token_id=[7, 9])
    assert len(calls) == stats.device_steps
    calls.clear()
    # On a CPU the host does not run ahead: let it.
    monkeypatch.setattr(device_loop, "runs_ahead", lambda device: True)
    stats = check(model, prompt(batch_size=2), eos_token_id=[7, 9])
    assert len(calls) == stats.device_steps + 1
    (lengths, ids), (lengths_beyond, ids_beyond) = calls[-2:]
    assert lengths == lengths_beyond
    assert torch.equal(ids, ids_beyond)


def test_ahead_while_the_cache_grows(model, calls, monkeypatch):
    monkeypatch.setattr(device_loop, "runs_ahead", lambda device: True)
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 32)
    stats = check(model, prompt(), max_new_tokens=150)
    assert len(calls) == stats.device_steps + 1


def test_nothing_is_read_by_the_host():
    assert fake_step().shape == (2, 1 + 2 * 3 + 3, 61)


def test_that_a_read_would_be_noticed(monkeypatch):
    def peeking(candidates, is_any, chosen, original=device_step.longest_match):
        found = original(candidates, is_any, chosen)
        found[1].tolist()
        return found

    monkeypatch.setattr(device_step, "longest_match", peeking)
    with pytest.raises(DataDependentOutputException):
        fake_step()


def without_moving(cache, source, target):
    """Accepted keys and values stay where the candidate was."""


def blind_chains(offsets, visible, shape, original=device_step.chains):
    offsets, visible = original(offsets, visible, shape)
    return offsets, torch.ones_like(visible)


def one_more(candidates, is_any, chosen, original=device_step.longest_match):
    best, num_agreed, tokens = original(candidates, is_any, chosen)
    return best, (num_agreed + 1).clamp(max=candidates.shape[2]), tokens


@pytest.mark.parametrize(
    ("name", "broken"),
    [("move_slots", without_moving), ("chains", blind_chains), ("longest_match", one_more)],
)
def test_wrong_steps_are_noticed(name, broken, model, monkeypatch):
    """The control of all tests of equal texts: each part of the step decides about the result."""
    monkeypatch.setattr(device_step, name, broken)
    lade.config_lade(GUESS_SET_SIZE=5)
    different = 0
    for seed in range(4):
        expected = generate_plain(model, prompt(seed=seed), **GREEDY)
        different += not torch.equal(model.generate(**prompt(seed=seed), **GREEDY), expected)
        assert lade.last_stats().device_steps
    assert different


# The normal run compiles padded rows by sdpa with draws, too: test_on_device_sampling.py.
@pytest.mark.parametrize(
    ("inputs", "uses_kernel"),
    [(prompt, False), pytest.param(padded_prompt, False, marks=pytest.mark.long), (padded_prompt, True)],
)
def test_compiled_without_anything_anew(inputs, uses_kernel, shallow, compiled, monkeypatch):
    """While the text grows, and in the next call."""
    lade.config_lade(USE_FLASH=uses_kernel)
    monkeypatch.setattr(fixed, "BACKEND", "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            stats = check(shallow, inputs(), compiled=True, max_new_tokens=120)
    assert stats.compile_reason is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


# The normal run takes the one of test_on_device_sampling.py, whose step does all of this and draws too.
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
def test_compiled_by_torch(compiled, monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    model = tiny_llama(torch.float32, num_hidden_layers=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            check(model, prompt(seed=seed), compiled=True, max_new_tokens=100)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_failure_is_told_and_the_ordinary_loop_goes_on(shallow, compiled, monkeypatch):
    tried = []

    def broken(graph, inputs):
        tried.append(graph)
        raise ValueError("no such machine\nand more")

    monkeypatch.setattr(fixed, "BACKEND", broken)
    for _ in range(2):
        expected = generate_plain(shallow, prompt(), **GREEDY)
        assert torch.equal(shallow.generate(**prompt(), **GREEDY), expected)
        stats = lade.last_stats()
        assert "no such machine" in stats.compile_reason
        assert (stats.device_steps, stats.compiled_steps) == (0, 0)
        assert 1 < stats.steps < 40
    assert len(tried) == 2  # the step, and the forward alone


def test_a_failure_in_the_middle(model, monkeypatch):
    """The texts, the window and the pool are handed back as they are."""
    ordinary_steps = ordinary_stats(model, prompt(), **GREEDY).steps
    lade.config_lade(CUDA_GRAPH=1)
    count = iter(range(100))

    def fail_later(forward):
        def replay():
            if next(count) == 6:
                raise RuntimeError("device lost")
            return forward()

        return replay

    monkeypatch.setattr(fixed, "GRAPH_DEVICES", ("cpu",))
    for module in (device_loop, fixed):
        monkeypatch.setattr(module, "capture", fail_later)
    expected = generate_plain(model, prompt(), **GREEDY)
    assert torch.equal(model.generate(**prompt(), **GREEDY), expected)
    stats = lade.last_stats()
    assert stats.cuda_graph_reason == "RuntimeError: device lost"
    assert stats.device_steps == 4  # the first two replays are compared with the ordinary forward
    assert stats.steps == ordinary_steps


def test_a_wrong_result_is_noticed(shallow, compiled, monkeypatch):
    def wrong(graph, inputs):
        return lambda *args: [output + 1 if output.is_floating_point() else output for output in graph(*args)]

    monkeypatch.setattr(fixed, "BACKEND", wrong)
    expected = generate_plain(shallow, prompt(), **GREEDY)
    assert torch.equal(shallow.generate(**prompt(), **GREEDY), expected)
    stats = lade.last_stats()
    assert " was off by " in stats.compile_reason
    assert stats.device_steps == 0


@pytest.mark.parametrize("inputs", [prompt, padded_prompt], ids=["one", "padded"])
def test_captured_once_for_all_calls(inputs, model, captured):
    for max_new_tokens in (40, 30):
        stats = check(model, inputs(), captured=True, max_new_tokens=max_new_tokens)
        assert stats.cuda_graph_reason is None
    assert len(captured) == 1
    assert len(kept_buffers(model)) == 1


def test_one_graph_with_padding_and_without(shallow, captured):
    for inputs in (prompt(batch_size=3), padded_prompt(), prompt(batch_size=3)):
        check(shallow, inputs, captured=True)
    assert len(captured) == 1


def test_captured_anew_where_a_graph_would_not_notice(captured):
    model = tiny_llama(num_hidden_layers=1)
    check(model, prompt(), captured=True)
    model.model.layers[0].mlp.gate_proj.weight.data = model.model.layers[0].mlp.gate_proj.weight * -1
    check(model, prompt(), captured=True)
    assert len(captured) == 2
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.5
    check(model, prompt(), captured=True)
    assert len(captured) == 3
    assert len(kept_buffers(model)) == len(captured)


def test_fingerprint():
    model = tiny_llama()
    layer = model.model.layers[1]
    seen = [fingerprint(model)]
    assert fingerprint(model) == seen[0]

    hook = layer.register_forward_hook(lambda *_: None)
    seen.append(fingerprint(model))
    hook.remove()
    assert fingerprint(model) == seen[0]

    layer.active_adapters = ["one"]
    seen.append(fingerprint(model))
    layer.active_adapters.append("two")
    seen.append(fingerprint(model))
    del layer.active_adapters
    old = layer.mlp.up_proj.weight
    layer.mlp.up_proj.weight = torch.nn.Parameter(old.clone())
    seen.append(fingerprint(model))
    layer.mlp.up_proj.weight = old
    assert fingerprint(model) == seen[0]
    assert len(set(seen)) == len(seen)


def test_a_graph_that_cannot_be_captured(shallow, captured, monkeypatch):
    def refuse(forward):
        forward()  # the state is put back
        raise RuntimeError("operation not permitted when stream is capturing")

    for module in (device_loop, fixed):
        monkeypatch.setattr(module, "capture", refuse)
    expected = generate_plain(shallow, prompt(), **GREEDY)
    assert torch.equal(shallow.generate(**prompt(), **GREEDY), expected)
    stats = lade.last_stats()
    assert stats.cuda_graph_reason == "RuntimeError: operation not permitted when stream is capturing"
    assert (stats.device_steps, stats.captured_steps) == (0, 0)


def test_a_graph_of_a_cache_that_has_grown(shallow, captured, monkeypatch):
    """What read the smaller one serves calls that need no more, and the beginning of those that do."""
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 32)
    for max_new_tokens, count in [(80, 2), (80, 2), (10, 2), (80, 2), (10, 2)]:  # 64 and 128 slots; 64
        check(shallow, prompt(), captured=True, max_new_tokens=max_new_tokens)
        assert len(captured) == count


def test_buffers_are_for_one_call_at_a_time(shallow, captured, monkeypatch):
    """A call that begins while another one runs gets its own, and both sets are kept."""
    prefill = shallow._prefill
    inner = []

    def interrupted(*args, **kwargs):
        if not inner:
            inner.append(None)  # this is the outer call's own
            inner[0] = shallow.generate(**prompt(seed=1), **GREEDY)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(shallow, "_prefill", interrupted, raising=False)
    outer = shallow.generate(**prompt(), **GREEDY)
    assert len(kept_buffers(shallow)) == 2
    for seed, output in enumerate((outer, inner[0])):
        assert torch.equal(output, generate_plain(shallow, prompt(seed=seed), **GREEDY))


def test_what_a_call_leaves_in_a_cache_is_gone(shallow, captured):
    check(shallow, prompt(), captured=True)
    kept_buffers(shallow)[0].cache.layers[0].values.fill_(torch.nan)
    check(shallow, prompt(seed=2), captured=True)
    assert len(captured) == 1


def test_in_threads(model):
    outputs = {}

    def work(seed):
        outputs[seed] = model.generate(**prompt(seed=seed), **GREEDY)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, output in outputs.items():
        assert torch.equal(output, generate_plain(model, prompt(seed=seed), **GREEDY))
    assert len(outputs) == 3


def test_in_inference_mode(shallow, captured):
    for _ in range(2):
        check(shallow, prompt(), captured=True)
        with torch.inference_mode():
            check(shallow, prompt(), captured=True)
    assert len(captured) == 2


@pytest.mark.parametrize("way", ["captured", "compiled"])
def test_a_model_is_let_go(way, request):
    request.getfixturevalue(way)
    model = tiny_llama(num_hidden_layers=1)
    model.generate(**prompt(), max_new_tokens=8)
    assert lade.last_stats().device_steps > 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.2},
        {"output_scores": True, "return_dict_in_generate": True},
        {"stop_strings": None, "max_time": 1000.0},
    ],
    ids=["processor", "recorded", "criterion"],
)
def test_what_needs_the_host_goes_the_ordinary_way(arguments, model):
    torch.manual_seed(0)
    expected = generate_plain(model, prompt(), **GREEDY | arguments)
    torch.manual_seed(0)
    found = model.generate(**prompt(), **GREEDY | arguments)
    expected, found = (getattr(output, "sequences", output) for output in (expected, found))
    assert torch.equal(found, expected)
    assert lade.last_stats().device_steps == 0


def test_when_it_is_wanted(model, monkeypatch):
    monkeypatch.setattr(device_loop, "is_wanted", is_wanted)
    model.generate(**prompt(), **GREEDY)
    assert lade.last_stats().device_steps == 0  # on a CPU, without a compiler
    for settings, on_cpu, on_cuda in [
        ({"ADAPTIVE": 1, "COMPILE": 0, "CUDA_GRAPH": 0}, False, False),
        ({"ADAPTIVE": 1, "COMPILE": 1}, False, True),
        ({"ADAPTIVE": 1, "COMPILE": 0, "CUDA_GRAPH": 1}, False, True),
        ({"ADAPTIVE": 0, "COMPILE": 0, "CUDA_GRAPH": 0}, False, True),
        ({"ADAPTIVE": 0, "COMPILE": 1, "CUDA_GRAPH": 0}, True, True),
    ]:
        lade.config_lade(**settings)
        found = [
            is_wanted(current_config(), torch.device(name), torch.float64, 1, current_config().cuda_graph)
            for name in ("cpu", "cuda")
        ]
        assert found == [on_cpu, on_cuda]


def test_embeddings_instead_of_a_prompt(model):
    """The text begins empty, and slots are ahead of it."""
    embeddings = model.get_input_embeddings()(prompt()["input_ids"])
    check(model, {"inputs_embeds": embeddings, "attention_mask": prompt()["attention_mask"]})


def test_a_text_that_goes_on(model):
    """With the cache of an earlier call."""
    outputs = []
    for run in (partial(generate_plain, model), lambda inputs, **arguments: model.generate(**inputs, **arguments)):
        cache = DynamicCache(config=model.config)
        ids = prompt()["input_ids"]
        for _ in range(2):
            ids = run({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, past_key_values=cache, **GREEDY)
        outputs.append(ids)
    assert lade.last_stats().device_steps > 0
    assert torch.equal(*outputs)


def test_the_callers_cache(model):
    """Who gets the cache finds the text in it."""
    outputs = [
        run(**prompt(), **GREEDY, return_dict_in_generate=True)
        for run in (partial(generate_plain_dict, model), model.generate)
    ]
    assert lade.last_stats().device_steps > 0
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    ours, plain = (output.past_key_values for output in outputs)
    assert ours.get_seq_length() == plain.get_seq_length()
    torch.testing.assert_close(ours.layers[1].keys, plain.layers[1].keys)


def generate_plain_dict(model, **arguments):
    return generate_plain(model, {}, **arguments)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family(family):
    """Steps run on the device wherever blocks of fixed shapes are possible at all."""
    if not family.exists:
        pytest.skip(f"transformers has no {family.model_class}")
    model = family.build()
    arguments = GREEDY | {"max_new_tokens": 16}
    expected = generate_plain(model, prompt(), **arguments)
    assert torch.equal(model.generate(**prompt(), **arguments), expected)
    stats = lade.last_stats()
    if stats.fallback_reason is None:
        is_served = BlockRunner(adapter_for(model)).static_shapes_reason() is None
        assert stats.device_steps == (stats.steps - 1 if is_served else 0)


WAYS = [{"CUDA_GRAPH": 0}, {"CUDA_GRAPH": 1}, {"CUDA_GRAPH": "auto"}, {"COMPILE": 1, "CUDA_GRAPH": 1}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("uses_kernel", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_on_cuda(way, uses_kernel, monkeypatch):
    monkeypatch.setattr(device_loop, "is_wanted", is_wanted)
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    check_way(way, uses_kernel, tiny_llama(torch.float32).cuda(), monkeypatch)


@pytest.mark.parametrize("way", WAYS[:3], ids=str)  # what is compiled cannot be traced
def test_on_a_cpu_that_counts_as_cuda(way, shallow, captured, monkeypatch):
    check_way(way, True, shallow, monkeypatch)


def check_way(way, uses_kernel, model, monkeypatch):
    monkeypatch.setattr(fixed, "MIN_NEW_TOKENS", 1)
    lade.config_lade(COMPILE=0)
    lade.config_lade(**way, USE_FLASH=uses_kernel)
    for inputs in (prompt(), padded_prompt(), prompt()):
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        check(model, inputs, compiled="COMPILE" in way, captured=way["CUDA_GRAPH"] != 0)
