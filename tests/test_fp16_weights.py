"""Weights packed in float16: products as exact as torch's own, texts as plain generate() writes them, and nothing where
float16 does not hold a weight."""

import copy
from unittest import mock

import pytest
import torch
import transformers
from support import assert_same_state, compare, generate_plain, note_calls, prompt, tiny_llama
from support.families import COMPOSITE, FAMILIES, RECURRENT
from torch import nn

import lade
from lade.common import notices, processor
from lade.common.processor import FP16
from lade.config import LookaheadConfig
from lade.forward.base import BlockCall, path_for
from lade.forward.cpu import fp16_weights, packed
from lade.forward.cpu.fp16_weights import Fp16Weight, pack_fp16, packs_fp16
from lade.forward.cpu.packed import copies_of
from lade.models import adapter_for

pytestmark = pytest.mark.skipif(
    not fp16_weights.has_fbgemm(torch.backends.quantized.engine), reason="FBGEMM multiplies nothing here"
)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
MIXED = {"llama4", "inkling2_text"}
# Layers of a class of their own, or in transformers 5.8 none that get_decoder() shows.
NO_LINEAR = {"gpt2", "falcon", "falcon-new-decoder", "falcon-alibi", "doge", "modernbert-decoder"}
NEW, NUM_LAYERS = 40, 15  # linear layers of the model: seven of each of two layers, and the head


@pytest.fixture
def slow(lade_on, monkeypatch):
    """A processor without fast products, where weights of any size pay."""
    for module in (fp16_weights, packed):
        monkeypatch.setattr(module, "has_fast_products", lambda dtype: False)
    monkeypatch.setattr(processor, "has_amx", lambda: False)
    monkeypatch.setattr(processor, "has_fast_mkl", lambda: False)
    monkeypatch.setattr(packed, "has_slow_mkl", lambda: False)
    monkeypatch.setattr(packed, "least_elements", lambda dtype: 1)
    monkeypatch.setattr(notices, "_said", set())


def model_of(dtype=torch.float32):
    """A model whose weights are numbers of bfloat16."""
    return tiny_llama(torch.bfloat16).to(dtype)


@pytest.mark.parametrize(("scale", "has_bias"), [(1.0, False), (1.0, True), (2.0**-40, False), (2.0**40, True)])
@pytest.mark.parametrize("shape", [(2, 5, 96), (96,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_torchs_within_rounding(monkeypatch, dtype, shape, has_bias, scale):
    monkeypatch.setattr(fp16_weights, "PART_ELEMENTS", 96 * 16)  # the weight has three parts, the last one smaller
    scale = 1.0 if dtype == torch.float16 else scale
    weight = (torch.randn(40, 96).bfloat16() * scale).to(dtype)
    bias = torch.randn(40).to(dtype) * scale if has_bias else None
    input = torch.randn(shape).to(dtype)
    (copied,) = pack_fp16([weight])
    found = copied.multiply(input, bias)
    expected = nn.functional.linear(input.double(), weight.double(), None if bias is None else bias.double())
    assert (found.dtype, found.shape, len(copied.parts)) == (dtype, expected.shape, 3)
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error < max(1e-6, torch.finfo(dtype).eps)


def test_small_elements_beside_a_large_one():
    """To 2**-39 of the largest element; plain rounding to float16 would lose more than float32 does. A row of small
    ones alone must be held, since a float32 product would keep them."""
    weight = torch.full((16, 16), 2.0**-30) * torch.linspace(1, 2, 16).bfloat16().float()
    weight[:, 0] = 1.0
    (copied,) = pack_fp16([weight])
    found = copied.multiply(torch.eye(16), None).T
    assert float((found - weight).abs().max()) <= 2.0**-39
    assert float((weight.half().float() - weight).abs().max()) > 2.0**-32
    weight[3] = 2.0**-34
    weight[3, 5] *= 1 + 2.0**-7
    assert pack_fp16([weight]) == [None]
    weight[3, 5] = weight[3, 0]
    assert torch.equal(pack_fp16([weight])[0].multiply(torch.eye(16), None).T[3], weight[3])


@pytest.mark.parametrize("element", [1 / 3, float("inf"), float("nan")])
def test_what_float16_does_not_hold(element):
    weights = [torch.ones(8, 8), torch.ones(8, 8)]
    weights[0][7, 7] = element
    refused, held = pack_fp16(weights)
    assert refused is None
    assert isinstance(held, Fp16Weight)
    assert pack_fp16([torch.full((8, 8), 2.0**-80)]) == [None]
    assert pack_fp16([torch.zeros(8, 8)])[0].multiply(torch.ones(1, 8), None).abs().max() == 0


def test_where_no_thread_can_be_started(monkeypatch):
    """As when a thread outlives the main one."""
    expected = pack_fp16([torch.ones(16, 32)])[0].multiply(torch.ones(1, 32), None)

    refuse = mock.Mock(side_effect=RuntimeError("cannot schedule new futures after interpreter shutdown"))
    monkeypatch.setattr(fp16_weights.ThreadPoolExecutor, "submit", refuse)
    assert torch.equal(pack_fp16([torch.ones(16, 32)])[0].multiply(torch.ones(1, 32), None), expected)


def test_inputs_without_rows_or_with_rows_that_are_no_numbers():
    with torch.inference_mode():
        weight = torch.randn(16, 32).bfloat16()
    (copied,) = pack_fp16([weight])
    assert copied.multiply(torch.ones(0, 32), None).shape == (0, 16)
    input = torch.randn(6, 32)
    input[2, 5], input[4, 0] = float("nan"), float("inf")
    found = copied.multiply(input, None)
    assert found[2].isnan().all()
    assert not found[4].isfinite().any()
    assert found[[0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", ["tree", "lookahead"])
def test_float32_texts_are_plain_ones(slow, mode, do_sample):
    model = model_of()
    lade.config_lade(MODE=mode, PACK=1)
    num_packed = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2) - 61 * 48
    for seed in range(2):
        stats = compare(model, prompt(seed=seed), max_new_tokens=NEW, do_sample=do_sample)
        assert (stats.packed_weights, stats.packed_bytes, stats.reasons) == (NUM_LAYERS, 2 * num_packed, {})
        assert all(isinstance(copy.packed, Fp16Weight) for copy in copies_of(model).copies.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_products_are_found(slow, monkeypatch, dtype):
    multiply, model = Fp16Weight.multiply, model_of(dtype)
    lade.config_lade(PACK=0)
    expected = model.generate(**prompt(), max_new_tokens=NEW)
    monkeypatch.setattr(Fp16Weight, "multiply", lambda *arguments: multiply(*arguments) * (1 + 2**-5))
    lade.config_lade(PACK=1)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=NEW), expected)
    assert "is not within rounding of torch's own" in lade.last_stats().reasons["packed"]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_texts_in_16_bits(slow, dtype, do_sample):
    """The same from the same state, over the call that packs as well."""
    first, second = model_of(dtype), model_of(dtype)
    texts = []
    for model in (first, second):
        for _ in range(2):  # the second call packs
            copies_of(model).num_tokens += packed.TOKENS_BEFORE_FP16 // 2
            torch.manual_seed(3)
            texts.append(model.generate(**prompt(), max_new_tokens=NEW, do_sample=do_sample))
            texts.append(lade.last_stats().block_tokens)
        assert lade.last_stats().packed_weights == NUM_LAYERS
        assert max(lade.last_stats().block_tokens) > 1
    assert str(texts[:4]) == str(texts[4:])


def test_logits_in_16_bits(slow):
    model = model_of(torch.bfloat16)
    wanted = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    expected = generate_plain(copy.deepcopy(model).double(), prompt(), **wanted)
    with lade.enabled(PACK=1, PREDICTION=expected.sequences[0, -NEW:]):
        found = model.generate(**prompt(), **wanted)
    assert lade.last_stats().packed_weights == NUM_LAYERS
    for mine, exact in zip(found.logits[:8], expected.logits[:8], strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=0, atol=0.05 * float(exact.abs().max()))


def test_others_in_float32_are_packed_by_onednn(slow):
    model = model_of()
    weight = model.lm_head.weight
    weight.data += torch.rand(weight.shape) / 1000
    lade.config_lade(PACK=1)
    stats = compare(model, max_new_tokens=NEW)
    kinds = {type(copy.packed) for copy in copies_of(model).copies.values()}
    is_there = packed.onednn_error(torch.float32) is None
    assert kinds == {Fp16Weight, torch.Tensor if is_there else type(None)}
    assert stats.packed_weights == NUM_LAYERS - (not is_there)
    with torch.backends.mkldnn.flags(enabled=False):
        copies_of(model).drop()
        assert compare(model, max_new_tokens=NEW).packed_weights == NUM_LAYERS - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_is_written_while_it_is_packed(slow, monkeypatch, dtype):
    """The next call notices it. Not a first weight of its shape, whose product is compared."""
    model = model_of(dtype)

    def and_write(weights):
        found = pack_fp16(weights)
        model.model.layers[1].mlp.gate_proj.weight.data.mul_(-3)
        return found

    monkeypatch.setattr(packed, "pack_fp16", and_write)
    lade.config_lade(PACK=1)
    model.generate(**prompt(), max_new_tokens=NEW)
    before = dict(copies_of(model).copies)
    monkeypatch.setattr(packed, "pack_fp16", pack_fp16)
    model.generate(**prompt(), max_new_tokens=NEW)
    changed = [key for key, copy in copies_of(model).copies.items() if copy is not before[key]]
    assert changed == [id(model.model.layers[1].mlp.gate_proj.weight)]
    assert copies_of(model).copies[changed[0]].packed is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_call_does_not_see_what_others_pack(slow, monkeypatch, dtype):
    model, products = model_of(dtype), note_calls(monkeypatch, Fp16Weight, "multiply", lambda *_: 1)
    paths = [path_for(call_of(model)), path_for(call_of(model, pack=True))]
    found = []
    for path in paths:
        products.clear()
        path.model.lm_head(torch.ones(1, model.config.hidden_size, dtype=dtype))
        found.append((bool(products), FP16 in path.kind))
    assert found == [(False, False), (True, True)]


def test_weights_that_nothing_packs(slow, monkeypatch):
    """They are tried once, until they change."""
    model, tried = model_of(torch.bfloat16), note_calls(monkeypatch, packed, "pack_fp16", len)
    model.lm_head.weight.data[0, 0] = float("nan")
    lade.config_lade(PACK=1)
    for _ in range(2):
        model.generate(**prompt(), max_new_tokens=NEW)
        assert lade.last_stats().packed_weights == NUM_LAYERS - 1
        assert lade.last_stats().reasons["packed"].startswith("1 weights are not packed: float16 does not hold them")
    assert [count for count in tried if count] == [NUM_LAYERS]
    model.lm_head.weight.data[0, 0] = 0.0
    model.generate(**prompt(), max_new_tokens=NEW)
    assert lade.last_stats().packed_weights == NUM_LAYERS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_when_calls_pay_for_it(slow, monkeypatch, dtype):
    """In 16 bits a long prompt does, and tokens that there were, of prompts too, not those that are asked for."""
    monkeypatch.setattr(packed, "TOKENS_BEFORE_FP16", 90 + NEW)
    monkeypatch.setattr(packed, "PACKING_STEPS", 1)
    is_exact, counts = dtype == torch.float32, []
    for prompts in ((90, 10, 10), (89, 190, 10), (packed.PROMPT_BEFORE_FP16, 10)):
        model = model_of(dtype)
        for length in prompts:
            model.generate(**prompt(length=length), max_new_tokens=NEW)
            counts.append(lade.last_stats().packed_weights)
    assert counts == ([0, 15, 15, 0, 15, 15, 0, 15] if is_exact else [0, 15, 15, 0, 0, 15, 15, 15])


def test_each_change_of_the_weights_doubles_what_packing_waits_for(slow, monkeypatch):
    monkeypatch.setattr(packed, "PROMPT_BEFORE_FP16", 60)
    monkeypatch.setattr(packed, "TOKENS_BEFORE_FP16", 150)
    for prompts, expected in (((119, 120), [0, 15]), ((119, 100, 10, 10), [0, 0, 0, 15])):
        model, counts = model_of(torch.bfloat16), []
        model.generate(**prompt(length=60), max_new_tokens=NEW)
        assert lade.last_stats().packed_weights == 15
        model.lm_head.weight.data.mul_(2)
        for length in prompts:
            model.generate(**prompt(length=length), max_new_tokens=NEW)
            counts.append(lade.last_stats().packed_weights)
            reason = lade.last_stats().reasons.get("packed")
            assert reason == (None if counts[-1] else "packing pays from 300 tokens on, or before a prompt of 120")
        assert counts == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_warm_up_packs(slow, dtype):
    """Also after a change of the weights that no call has seen."""
    model = model_of(dtype)
    for _ in range(2):
        lade.warmup(model, prompt_tokens=8, max_new_tokens=8)
        model.generate(**prompt(), max_new_tokens=packed.LEAST_NEW_TOKENS)
        assert lade.last_stats().packed_weights == NUM_LAYERS
        model.lm_head.weight.data.mul_(2)
    model.generate(**prompt(), max_new_tokens=packed.LEAST_NEW_TOKENS)
    assert lade.last_stats().packed_weights == 0


def test_packed_within_a_long_answer(slow, monkeypatch):
    """The tokens of all rows count. No copy is used before all are made, since each may change a text."""
    monkeypatch.setattr(packed, "TOKENS_BEFORE_FP16", 64)
    used = note_calls(monkeypatch, packed.Packing, "_pack", lambda packing, *_: len(packing.packed))
    for num_rows, length, count in ((1, 64, 0), (1, 128, 15), (2, 30, 0), (2, 50, 15)):
        torch.manual_seed(0)  # a text that does not repeat itself, so that a step begins soon after so many tokens
        arguments = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": True}
        model_of(torch.bfloat16).generate(**prompt(1, num_rows), **arguments)
        assert lade.last_stats().packed_weights == count
    assert len(used) > 2
    assert not any(used)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_answers_to_long_prompts(slow, dtype):
    """The prompt alone is worth packing in 16 bits; what is cached of it is not computed."""
    model, inputs = model_of(dtype), prompt(length=packed.PROMPT_BEFORE_FP16)
    wanted = {"max_new_tokens": packed.LEAST_NEW_TOKENS - 1, "return_dict_in_generate": True}
    cache = model.generate(**inputs, **wanted).past_key_values
    assert lade.last_stats().packed_weights == (15 if dtype in HALVES else 0)
    other = model_of(dtype)
    text = torch.cat([inputs["input_ids"], torch.ones(1, 20, dtype=torch.long)], dim=-1)
    other.generate(text, past_key_values=cache, **wanted)
    assert lade.last_stats().packed_weights == 0
    assert lade.last_stats().generated_tokens


def test_prompts_of_embeddings_count(slow):
    model, inputs = model_of(torch.bfloat16), prompt(length=packed.PROMPT_BEFORE_FP16)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=NEW)
    assert lade.last_stats().packed_weights == NUM_LAYERS


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts(slow, monkeypatch, dtype, is_slow):
    """In 16 bits they run packed, too, of any length; in float32 where MKL is slow, up to a length."""
    monkeypatch.setattr(packed, "has_slow_mkl", lambda: is_slow)
    monkeypatch.setattr(packed, "MOST_FP32_ROWS", packed.MOST_ROWS + 9)
    model = model_of(dtype)
    rows = note_calls(monkeypatch, Fp16Weight, "multiply", lambda _, input, bias: input.shape[-2])
    lade.config_lade(PACK=1, SHARE=0)
    inputs = prompt(length=packed.MOST_ROWS + 9)
    texts = [model.generate(**inputs, max_new_tokens=NEW) for _ in range(2)]
    assert torch.equal(*texts)
    assert (packed.MOST_ROWS + 9 in rows) == (dtype in HALVES or is_slow)
    if dtype == torch.float32:
        for do_sample in (False, True):
            compare(model, inputs, max_new_tokens=NEW, do_sample=do_sample)
        model.model.layers[0].mlp.up_proj.weight.data.neg_()  # seen before the next prompt
        compare(model, inputs, max_new_tokens=NEW)
        assert not torch.equal(generate_plain(model, inputs, max_new_tokens=NEW), texts[0])
    model.generate(**prompt(length=packed.MOST_ROWS + 10), max_new_tokens=NEW)
    assert (packed.MOST_ROWS + 10 in rows) == (dtype in HALVES)


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *COMPOSITE], ids=lambda family: family.name)
@pytest.mark.long
def test_every_family(slow, monkeypatch, family):
    """A prompt's packed forward leaves in the model what plain generate()'s leaves."""
    monkeypatch.setattr(packed, "has_slow_mkl", lambda: True)
    if not family.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_class}")
    if family.name in MIXED:
        pytest.skip("buffers stay in float64, and plain generate() fails")
    model = family.build().bfloat16().float()
    twin, inputs = copy.deepcopy(model), family.inputs(True) if family in COMPOSITE else prompt()
    rows = note_calls(monkeypatch, Fp16Weight, "multiply", lambda _, input, bias: input.numel() // input.shape[-1])
    lade.config_lade(PACK=1, SHARE=0)
    for _ in range(2):
        expected = generate_plain(twin, inputs, max_new_tokens=8, do_sample=False)
        rows.clear()
        found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, expected)
        if lade.last_stats().fallback_reason is None and family.name not in NO_LINEAR:
            assert inputs["input_ids"].numel() in rows
        assert_same_state(model, twin)


def test_all_weights_or_none_in_16_bits(slow, monkeypatch, caplog):
    for dtype, packs_some in ((torch.bfloat16, False), (torch.float32, True)):
        model = model_of(dtype)
        copies_of(model).num_tokens = packed.TOKENS_BEFORE_FP16
        missing = sum(value.nbytes for value in model.parameters() if value.dim() == 2) - model.lm_head.weight.nbytes
        free = missing + 2 * missing * 4 // dtype.itemsize  # half of which is the scaled weights', and half of the rest
        monkeypatch.setattr(packed, "free_bytes", lambda free=free: free)
        for _ in range(1 if packs_some else 2):
            model.generate(**prompt(), max_new_tokens=NEW)
            assert bool(lade.last_stats().packed_weights) == packs_some
            assert "too little" in lade.last_stats().reasons["packed"]
    assert caplog.text.count("texts may differ") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_that_runs_out_while_packing(slow, monkeypatch, dtype):
    """As it does under `ulimit -v`. It is not tried again in each call."""
    model, run_out = model_of(dtype), mock.Mock(side_effect=lambda scaled: torch.empty(1 << 60))
    lade.config_lade(PACK=1)
    monkeypatch.setattr(fp16_weights, "_packed_part", run_out)
    for _ in range(2):
        compare(model, prompt(), max_new_tokens=NEW)
        assert lade.last_stats().packed_weights == 0
        assert "memory ran out" in lade.last_stats().reasons["packed"]
        assert 0 < run_out.call_count <= fp16_weights.PARTS_AT_ONCE


def test_deterministic_texts_do_not_depend_on_earlier_calls(slow):
    model = model_of(torch.bfloat16)
    copies_of(model).num_tokens = packed.TOKENS_BEFORE_FP16
    for settings, count in (({"DETERMINISTIC": 1}, 0), ({"DETERMINISTIC": 1, "PACK": 1}, 15)):
        lade.config_lade(**settings)
        model.generate(**prompt(), max_new_tokens=NEW)
        assert lade.last_stats().packed_weights == count
        assert ("DETERMINISTIC=1" in lade.last_stats().reasons.get("packed", "")) == (not count)
    assert packed.begin_packing(call_of(model_of(), deterministic=True)) is not None


def call_of(model, **settings):
    config = LookaheadConfig(**settings)
    return BlockCall(adapter=adapter_for(model), config=config, device=torch.device("cpu"), num_new=300)


def test_where_it_is_used(monkeypatch):
    others = (torch.float64, torch.float8_e4m3fn)
    for has_bfloat16 in (True, False):  # beside AVX-512
        fast = (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)
        monkeypatch.setattr(fp16_weights, "has_fast_products", lambda dtype, fast=fast: dtype in fast)
        assert [packs_fp16(dtype) for dtype in (*DTYPES, *others)] == [True, not has_bfloat16, True, False, False]
    has_fbgemm = fp16_weights.has_fbgemm.__wrapped__
    assert not has_fbgemm("qnnpack")
    for results in ([torch.zeros(16, 16)] * 9, AttributeError("there is no linear_dynamic_fp16")):
        monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", mock.Mock(side_effect=results))
        assert not has_fbgemm("x86")
