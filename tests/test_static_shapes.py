"""COMPILE=1 and CUDA_GRAPH=1 (by itself: test_automatic.py): blocks of fixed shapes give the same tokens, are compiled
once, and never get in the way.

Most tests take a backend that compiles nothing, so that only the tracing is tested; one takes torch's own where there
is a C++ compiler. CUDA graphs are stood in for by a trace that, like a graph, remembers tensors and no Python.
"""

import gc
import re
import shutil
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from support import compare, generate_plain, in_threads, note_calls, padded_prompt, prompt, tiny, tiny_llama
from support.families import FAMILIES
from support.graphs import Tape, kept_buffers
from torch.utils._pytree import tree_map
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, Gemma2Config, Gemma2ForCausalLM

import lade
from lade import decoding
from lade.block import kv_cache
from lade.common.state import forget_all
from lade.drafting.contexts import projected, projection
from lade.forward.cuda import buffer_pool as kept
from lade.forward.cuda import static_inputs as fixed_inputs
from lade.forward.cuda import static_shapes as fixed
from lade.models import ModelAdapter
from lade.stats import tracing

pytestmark = pytest.mark.usefixtures("static_blocks")
NEW = {"max_new_tokens": 32}


def check(model, inputs=None, is_compiled=True, is_captured=False, **arguments):
    """`compare`, with fewer steps than tokens, and every block went the way it was to go."""
    stats = compare(model, inputs, **NEW | arguments)
    assert stats.steps < stats.generated_tokens
    assert stats.compiled_steps == (stats.steps - 1 if is_compiled else 0)
    assert stats.captured_steps == (stats.steps - 1 if is_captured else 0)
    return stats


check_captured = partial(check, is_compiled=False, is_captured=True)


@pytest.fixture(scope="module")
def model():
    """One layer is traced in half the time of two, which `test_same_tokens` takes."""
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize(
    ("inputs", "attention", "arguments"),
    [
        (prompt(batch_size=3), "sdpa", {"do_sample": True, "top_k": 20}),
        (padded_prompt(), "eager", {}),
    ],
    ids=["batch-sampled", "padded-eager-attention"],
)
def test_same_tokens(inputs, attention, arguments, monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "aot_eager" if attention == "sdpa" else "eager")
    # Eager attention's softmax is float32's: the smallest float64, which masks what is hidden, would be minus infinity
    # there.
    model = tiny_llama(torch.float64 if attention == "sdpa" else torch.float32, attention=attention)
    stats = check(model, inputs, **arguments)
    assert stats.reasons.get("compile") is None
    assert set(stats.block_tokens) == {3 * 3 + 3 * 2}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
def test_same_tokens_compiled_by_torch(monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    check(tiny_llama(torch.float32, num_hidden_layers=1), prompt())


def test_windows_by_layer():
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8}
    # Its attention is the eager one.
    check(tiny(Gemma2ForCausalLM, Gemma2Config, torch.float32, **sizes), prompt())


def test_nothing_is_compiled_anew_while_the_text_grows(model):
    """Nor by the next call."""
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            stats = check(model, prompt(seed=seed), max_new_tokens=100)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert stats.steps > 10
    assert not kept_buffers(model)  # which graphs alone need


def test_that_count_notices_what_depends_on_the_length(model, monkeypatch):
    """The control of the test above: a cache that says how long the text is."""
    torch._dynamo.utils.counters.clear()

    def call(self, inputs, forward, original=fixed.StaticPath.run):
        inputs.cache.layers[0].length = self._buffers._buffers.cache.lengths[0]
        return original(self, inputs, forward)

    def update(self, *args, original=fixed_inputs.StaticSlotLayer.update, **kwargs):
        assert getattr(self, "length", 1) > 0
        return original(self, *args, **kwargs)

    monkeypatch.setattr(fixed.StaticPath, "run", call)
    monkeypatch.setattr(fixed_inputs.StaticSlotLayer, "update", update)
    with torch._dynamo.config.patch(error_on_recompile=True):
        stats = compare(model, **NEW)
    assert "RecompileError" in stats.reasons.get("compile")
    assert 0 < stats.compiled_steps < stats.steps - 1  # what came before was compiled, the rest went on


def few_ids(length):
    """A prompt with many tails for each n-gram."""
    ids = torch.randint(3, 12, (1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_trees_of_several_sizes(model):
    lade.config_lade(GUESS_SET_SIZE=7)
    torch._dynamo.utils.counters.clear()
    stats = check(model, few_ids(120))
    sizes = {tokens - 9 for tokens in stats.block_tokens}
    assert len(sizes) > 1
    assert sizes <= {7, 15, 21}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(sizes)


@pytest.fixture
def small_caches(monkeypatch):
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    monkeypatch.setattr(kv_cache, "MIN_CAPACITY", 32)


def test_a_cache_that_grows(model, small_caches):
    torch._dynamo.utils.counters.clear()
    check(model, max_new_tokens=80)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # 64 and 128 slots


def broken(graph, inputs):
    raise ValueError("no such machine\nand more")


def wrong(graph, inputs):
    return lambda *args: [output + 1 for output in graph(*args)]


@pytest.mark.parametrize(
    ("backend", "reason"), [(broken, ".*no such machine.*"), (wrong, "the compiled forward was off by .*")]
)
def test_failure_is_told_once_and_costs_nothing_more(backend, reason, model, monkeypatch):
    tried = []
    monkeypatch.setattr(fixed, "BACKEND", lambda *args: tried.append(args) or backend(*args))
    for _ in range(2):
        stats = check(model, is_compiled=False)
        assert re.fullmatch(reason, stats.reasons.get("compile"))  # which is one line
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny(BloomForCausalLM, BloomConfig), "this family's blocks have masks or modules of their own"),
        (lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rotary frequ"),
    ],
    ids=["view", "rope"],
)  # fmt: skip
def test_refused(make, reason):
    lade.config_lade(CUDA_GRAPH=1)
    model = make()
    model.generate(**prompt(), max_new_tokens=8)
    stats = lade.last_stats()
    assert (stats.fallback_reason, stats.compiled_steps, stats.captured_steps) == (None, 0, 0)
    assert stats.reasons.get("compile").startswith(reason)
    assert stats.reasons.get("graph") == stats.reasons.get("compile")


@pytest.mark.parametrize("uses_kernel", [False, True], ids=["other-attention", "kernel"])
def test_on_a_private_view(uses_kernel, model, monkeypatch):
    """Which is made anew for each call: what was compiled for the first one serves the next."""
    monkeypatch.setattr(fixed, "BACKEND", "aot_eager")
    monkeypatch.setattr(ModelAdapter, "needs_shadow", True)
    lade.config_lade(USE_FLASH=uses_kernel)
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        stats = check(model, prompt(seed=seed))
        assert stats.used_kernel == uses_kernel
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("batch_size", "arguments"), [(1, {}), (3, {"do_sample": True, "top_k": 20})])
def test_captured_once_for_all_calls(batch_size, arguments, model, graphs):
    for seed, max_new_tokens in enumerate((32, 20, 40)):
        inputs = prompt(batch_size=batch_size, seed=seed)
        stats = check_captured(model, inputs, **arguments, max_new_tokens=max_new_tokens)
        assert stats.reasons.get("graph") is None
    assert len(graphs) == 1
    assert len(kept_buffers(model)) == 1


def test_compiled_and_captured_once_for_all_calls(model, graphs):
    for number, compiles in enumerate((True, False), start=1):
        lade.config_lade(COMPILE=compiles)
        for seed in range(2):
            check(model, prompt(seed=seed), is_compiled=compiles, is_captured=True)
        assert len(graphs) == number


def test_trees_captured_once_for_all_calls(model, graphs):
    """Once for each size."""
    sizes, counts = set(), []
    for max_block in (16, 64, 16, 64):
        lade.config_lade(MODE="tree", MAX_BLOCK=max_block)
        stats = check_captured(model, few_ids(60), do_sample=True, top_k=20)
        sizes |= set(stats.block_tokens)
        counts.append(len(graphs))
    assert len(sizes) > 1
    assert counts[1:] == [len(sizes)] * 3


def test_only_so_many_shapes_are_kept(model, graphs, monkeypatch):
    """Those that were used last."""
    monkeypatch.setattr(kept, "KEPT_SHAPES", 1)
    lade.config_lade(GUESS_SET_SIZE=7)
    stats = check_captured(model, few_ids(120))
    assert len(graphs) > 1
    (buffers,) = kept_buffers(model)
    (inputs,) = buffers.inputs.values()
    assert inputs.block.tokens.shape[1] == stats.block_tokens[-1]


def test_one_graph_with_padding_and_without(model, graphs):
    for uses_kernel in (False, True):
        lade.config_lade(USE_FLASH=uses_kernel)
        for inputs in (padded_prompt(), prompt(batch_size=3, seed=1), padded_prompt()):
            check_captured(model, inputs)
    assert len(graphs) == 2  # each attention's


def test_what_is_kept_is_bounded_by_bytes(model, graphs, monkeypatch):
    """The set used last stays, older ones go. Bytes of graphs count."""

    def sizes():
        forget_all()
        for length in (10, 250, 10):
            model.generate(**prompt(length), **NEW)
        return sorted(buffers.num_bytes for buffers in kept_buffers(model))

    small, large = sizes()
    monkeypatch.setattr(kept, "KEPT_BYTES", small + large - 1)
    assert sizes() == [small]
    assert len(graphs) == 2 + 3
    monkeypatch.setattr(Tape, "num_bytes", large, raising=False)
    assert sizes() == []


def test_captured_anew_where_a_graph_would_not_notice(graphs):
    model = tiny_llama(torch.float32, attention="eager", num_hidden_layers=1)
    layer = model.model.layers[0]

    def other_weights():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))

    def other_code():
        layer.mlp.act_fn = torch.nn.ReLU()  # with SiLU's attributes

    def other_scale():
        layer.post_attention_layernorm.variance_epsilon = 0.5

    def other_setting():
        model.config.final_logit_softcapping = 30.0  # what some models read in each forward

    changes = [other_weights, other_code, other_scale, other_setting, lambda: model.set_attn_implementation("sdpa")]
    check_captured(model)
    for count, change in enumerate(changes, start=2):
        change()
        for _ in range(2):
            check_captured(model)
            assert len(graphs) == count
    assert len(kept_buffers(model)) == len(graphs)  # what was changed may be put back, as an adapter is


def test_other_settings_of_the_process_and_of_the_call(model, graphs):
    def run(inputs=None, **arguments):
        check_captured(model, inputs or prompt(), **arguments)
        return len(graphs)

    assert [run(), run()] == [1, 1]
    with torch.inference_mode():
        assert [run(), run()] == [2, 2]
    assert run() == 1 + 1
    assert run(prompt(batch_size=2)) == 3


def test_a_graph_of_a_cache_that_has_grown(model, graphs, small_caches):
    """It serves calls that may need as much, beside a smaller one for those that need less."""
    for max_new_tokens, num_captured in ((80, 2), (10, 3), (80, 3), (10, 3)):  # 64 and then 128 slots; 64; 128; 64
        check_captured(model, max_new_tokens=max_new_tokens)
        assert len(graphs) == num_captured


def test_with_the_kernel_a_short_call_takes_a_large_cache(model, graphs, small_caches):
    lade.config_lade(USE_FLASH=1)
    for max_new_tokens in (80, 10):
        assert check_captured(model, max_new_tokens=max_new_tokens).used_kernel
    assert len(graphs) == 2  # 64 and 128 slots


def test_a_deterministic_call_begins_in_a_cache_of_its_own_size(model, graphs, small_caches):
    check_captured(model, max_new_tokens=80)
    lade.config_lade(DETERMINISTIC=1)
    check_captured(model, max_new_tokens=80)
    assert len(graphs) == 4  # 64 and 128 slots, twice


def test_a_cache_that_grows_behind_the_last_graph(model, graphs, small_caches, monkeypatch):
    """Blocks of the ordinary forward need more slots: what reads the old storage is not kept."""

    def switch_off(input_ids, scores):
        if blocks and input_ids.shape[1] > 34:
            blocks[-1].compiles = blocks[-1].captures = False
        return torch.zeros(len(input_ids), dtype=torch.bool)

    blocks = note_calls(monkeypatch, fixed.StaticPath, "take_cache", lambda path, *_, **__: path)
    stats = compare(model, max_new_tokens=80, stopping_criteria=[switch_off])
    assert 0 < stats.captured_steps < stats.steps - 1
    assert not kept_buffers(model)


def test_what_a_call_leaves_in_a_cache_is_gone(model, graphs):
    check_captured(model)
    kept_buffers(model)[0].cache.layers[0].values.fill_(torch.nan)
    check_captured(model, prompt(seed=2))
    assert len(graphs) == 1


def test_what_a_call_returns_is_not_overwritten(model, graphs):
    """Neither the cache that its caller gets, nor recorded logits and scores."""
    wanted = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "do_sample": False}

    def parts(output):
        layers = output.past_key_values.layers
        return [*output.logits, *output.scores, *(x for layer in layers for x in (layer.keys, layer.values))]

    first = model.generate(**prompt(), **NEW, **wanted)
    before = [tensor.clone() for tensor in parts(first)]
    own = {buffers.cache.layers[0].keys.untyped_storage().data_ptr() for buffers in kept_buffers(model)}
    model.generate(**prompt(seed=1), **NEW, **wanted)
    assert len(graphs) == 1
    assert all(torch.equal(*pair) for pair in zip(parts(first), before, strict=True))
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in parts(first)}


def test_a_text_that_goes_on(model, graphs):
    """With the cache of an earlier call."""

    def cache():
        filled = DynamicCache(config=model.config)
        generate_plain(model, prompt(24), max_new_tokens=1, past_key_values=filled)
        return filled

    for _ in range(2):
        check_captured(model, prompt(30), cache=cache)
    assert len(graphs) == 1


def test_buffers_are_for_one_call_at_a_time(model, graphs, monkeypatch):
    """A call that begins while another one runs gets its own, and both sets are kept."""
    prefill = model._prefill
    inner = []

    def interrupted(*args, **kwargs):
        if not inner:
            inner.append(None)  # this is the outer call's own
            inner[0] = model.generate(**prompt(seed=1), **NEW)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(model, "_prefill", interrupted, raising=False)
    outer = model.generate(**prompt(), **NEW)
    assert len(kept_buffers(model)) == 2
    assert len(graphs) == 2
    for seed, output in enumerate((outer, inner[0])):
        assert torch.equal(output, generate_plain(model, prompt(seed=seed), **NEW))


def test_in_threads(model, graphs):
    """More calls at once than sets that are kept."""
    for seed in range(2):
        check_captured(model, prompt(seed=seed))
    outputs = in_threads(lambda seed: model.generate(**prompt(seed=seed), **NEW), *range(4))
    for seed, output in enumerate(outputs):
        assert torch.equal(output, generate_plain(model, prompt(seed=seed), **NEW))
    buffers = kept_buffers(model)
    assert len({id(each.cache) for each in buffers}) == len(buffers)


def test_an_exception_keeps_nothing(model, graphs):
    """The call's buffers may be in any state; the next call captures its own."""

    def fill(input_ids, scores):
        if input_ids.shape[1] == 40:
            raise OSError("disk full")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            model.generate(**prompt(), **NEW, stopping_criteria=[fill])
        assert not kept_buffers(model)
        check_captured(model)
    assert len(graphs) == 3  # the second of the two broken calls had what the first good one left


def off_by_one(forward):
    """A graph that always gives the result of its capture, and that a wrong one."""
    output = tree_map(lambda tensor: tensor + 1, forward())
    return lambda: output


def wrong_summary(forward):
    """Of right logits: the text must not depend on it."""
    return Tape(lambda: (forward()[0], forward()[1] + 1))


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (off_by_one, "the captured forward was off by .*"),
        (wrong_summary, "the captured summary is not that of the captured logits"),
    ],
)
def test_a_wrong_graph_is_noticed(capture, reason, model, graphs, monkeypatch):
    """And not kept; the text is right all the same."""
    lade.config_lade(MODE="tree", MAX_BLOCK=16)
    monkeypatch.setattr(fixed, "capture", capture)
    stats = check(model, is_compiled=False)
    assert re.fullmatch(reason, stats.reasons.get("graph"))
    assert not kept_buffers(model)


def test_a_replay_that_fails_keeps_nothing(model, graphs):
    """In a later call; the text is right all the same."""
    check_captured(model)
    (buffers,) = kept_buffers(model)
    (inputs,) = buffers.inputs.values()
    replay, count = inputs.replay, iter(range(100))

    def fail_later():
        if next(count) == 3:
            raise RuntimeError("device lost")
        return replay()

    inputs.replay = fail_later
    stats = compare(model, **NEW)
    assert (stats.captured_steps, stats.reasons.get("graph")) == (3, "RuntimeError: device lost")
    assert not kept_buffers(model)


@pytest.mark.parametrize(
    "settings",
    [{"COMPILE": 1, "CUDA_GRAPH": 0}, {"USE_FLASH": 0}, {"USE_FLASH": 1}],
    ids=["compiled", "captured", "captured-view"],
)
def test_a_model_is_let_go(settings, graphs):
    lade.config_lade(**settings)
    model = tiny_llama(num_hidden_layers=1)
    model.generate(**prompt(), max_new_tokens=8)
    assert lade.last_stats().compiled_steps + lade.last_stats().captured_steps > 0
    gone = [weakref.ref(model), *(weakref.ref(buffers.cache) for buffers in kept_buffers(model))]
    del model
    gc.collect()
    assert [each() for each in gone] == [None] * (1 if "COMPILE" in settings else 2)


def test_a_summary_is_that_of_its_logits(model, graphs):
    lade.config_lade(MODE="tree", MAX_BLOCK=16)
    seen = []

    def keep(step, outcome):
        if outcome.summary is not None:
            count, logits = outcome.logits.shape[1], outcome.logits.float()
            seen.append(np.abs(outcome.summary.projections[:, :count]).max())
            assert outcome.summary.best[:, :count].tolist() == logits.argmax(-1).tolist()
            assert outcome.summary.ids[:, :count, 0].tolist() == logits.argmax(-1).tolist()
            np.testing.assert_allclose(outcome.summary.chances[:, :count, 0], logits.softmax(-1).amax(-1), atol=1e-5)
            expected = projected(outcome.logits, projection(logits.device))
            np.testing.assert_allclose(outcome.summary.projections[:, :count], expected, atol=1e-4)

    with tracing(keep):
        model.generate(**prompt(), **NEW)
    assert len(seen) > 3
    assert min(seen) > 0


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family(family):
    """Every block is compiled, or the call says why none was; the tokens are plain generate()'s either way."""
    if not family.exists:
        pytest.skip(f"transformers has no {family.model_class}")
    model = family.build()
    expected = generate_plain(model, prompt(), max_new_tokens=12)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=12), expected)
    stats = lade.last_stats()
    if stats.fallback_reason is None:
        assert stats.compiled_steps == (0 if stats.reasons.get("compile") else stats.steps - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("uses_kernel", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_by_cuda(compiled, uses_kernel, monkeypatch):
    monkeypatch.setattr(fixed, "BACKEND", "inductor")
    lade.config_lade(COMPILE=compiled, CUDA_GRAPH=1, USE_FLASH=uses_kernel)
    model = tiny_llama(torch.float32).cuda()
    captured = note_calls(monkeypatch, fixed, "capture")
    for seed in range(3):
        inputs = {name: tensor.cuda() for name, tensor in prompt(seed=seed).items()}
        stats = check(model, inputs, is_compiled=compiled, is_captured=True)
        assert stats.reasons.get("graph") is None
    assert len(captured) == 1


def test_hooks_are_run_and_nothing_is_compiled(model):
    """Also one that was put on after the forward had been compiled."""
    check(model, prompt(20))
    layer = model.model.layers[0].mlp
    for register in (layer.register_forward_hook, torch.nn.modules.module.register_module_forward_hook):
        with register(lade.allow_hook(lambda part, _, output: -output if part is layer else output)):
            stats = check(model, prompt(20), is_compiled=False)
        assert "hooks" in stats.reasons.get("compile")
    check(model, prompt(20))
