"""Packed weights, here by oneDNN: blocks multiply with them, texts stay what they were, and no change of a weight or
shortage of memory goes unnoticed."""

import copy
import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from support import assert_same_state, compare, generate_plain, in_threads, note_calls, prompt, run_both, tiny_llama
from support.families import FAMILIES, of_each_class
from torch import nn
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import lade
from lade.commands.env import packing_line
from lade.common import processor, state
from lade.config import LookaheadConfig
from lade.drafting.step_costs import StepCosts
from lade.forward.base import BlockCall, path_for
from lade.forward.cpu import free_memory, packed
from lade.forward.cpu.packed import PackedLinear, PackedWeight, Packing, checksums, copies_of, identity
from lade.models import adapter_for
from lade.models.shadow import shadow_model

pytestmark = pytest.mark.skipif(packed.onednn_error(torch.float32) is not None, reason="oneDNN packs nothing here")
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if packed.onednn_error(dtype) is None and processor.packing_is_needless(dtype) is None
]
DTYPE = DTYPES[-1]  # bfloat16, which is packed for calls of any length and rows of any number, if this processor can
needs_bfloat16 = pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="this processor packs no bfloat16")
NEW = 40
OF_THE_PROCESSOR = (processor.has_amx, processor.has_fast_mkl)


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch):
    """Whatever the processor: copies in float16 have a file of their own."""
    monkeypatch.setattr(packed, "packs_fp16", lambda dtype: False)
    monkeypatch.setattr(processor, "has_amx", lambda: False)
    monkeypatch.setattr(processor, "has_fast_mkl", lambda: False)


@pytest.fixture
def small(monkeypatch):
    """Weights of any size are packed, since those of tests are small."""
    monkeypatch.setattr(packed, "least_elements", lambda dtype: 1)


@pytest.fixture
def products(small, monkeypatch):
    """Notes the rows of each packed product of a model's layers, without those of comparisons."""
    found, is_served = [], PackedLinear._is_served

    def watch(self, input, *arguments):
        is_packed = is_served(self, input, *arguments)
        if is_packed:
            found.append(input.numel() // input.shape[-1])
        return is_packed

    monkeypatch.setattr(PackedLinear, "_is_served", watch)
    return found


@pytest.fixture
def pack_asked(lade_on, products):
    """PACK=1: whatever it costs."""
    lade.config_lade(PACK=1)


def generate(model, inputs, **arguments):
    result = model.generate(**inputs, max_new_tokens=NEW, **arguments)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    return result, stats


@pytest.mark.parametrize(("mode", "do_sample"), [("tree", True), ("lookahead", False)])
def test_float32_texts_are_plain_ones(lade_on, products, mode, do_sample):
    model = tiny_llama(torch.float32)
    lade.config_lade(MODE=mode, PACK=1)
    for seed in range(2):
        stats = compare(model, prompt(seed=seed), max_new_tokens=NEW, do_sample=do_sample)
        assert stats.packed_weights == 15  # seven of each of two layers, and the head
        assert stats.packed_bytes == sum(p.numel() * 4 for p in model.parameters() if p.dim() == 2) - 61 * 48 * 4
        assert stats.reasons.get("packed") is None
    assert max(products) > 1


@needs_bfloat16
@pytest.mark.parametrize("batch_size", [1, 3])
def test_half_precision_texts_do_not_change_by_it(lade_on, products, batch_size, monkeypatch):
    """Bit for bit, and in blocks of the same sizes: what memory happens to be free cannot be seen in a text."""
    model = tiny_llama(torch.bfloat16, vocab_size=256, hidden_size=64, intermediate_size=160)
    lade.config_lade(ADAPTIVE=1, SHARE=0)
    inputs, found = prompt(batch_size=batch_size), []
    for free in (0, 1 << 40):
        monkeypatch.setattr(packed, "free_bytes", lambda free=free: free)
        copies_of(model).num_tokens = packed.TOKENS_BEFORE_PACKING
        text, stats = generate(model, inputs, do_sample=False)
        assert bool(products) == bool(stats.packed_weights) == bool(free)
        found.append((text.tolist(), stats.block_tokens))
    assert found[0] == found[1]
    assert max(found[0][1]) > 1


def test_wrong_products_would_be_seen(pack_asked, products, monkeypatch):
    """The negative control: what packed products say decides."""
    model = tiny_llama(torch.float32)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW)
    multiply = packed.multiply
    monkeypatch.setattr(PackedLinear, "_difference", lambda *_: None)
    monkeypatch.setattr(packed, "multiply", lambda *arguments: -multiply(*arguments))
    found, _ = generate(model, prompt())
    assert not torch.equal(found, expected)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        return 2 * result if function is functional.linear else result


class DoublingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        return 2 * result if function is torch.ops.aten.mm.default else result


def double_linear(*arguments, linear=functional.linear):
    return 2 * linear(*arguments)


def test_modes_of_torch_see_each_product(pack_asked):
    model, inputs = tiny_llama(torch.float32), prompt()
    for _ in range(2):
        assert compare(model, inputs, max_new_tokens=NEW).packed_weights == 15
        with BaseTorchFunctionMode():
            assert compare(model, inputs, max_new_tokens=NEW).packed_weights == 0
    with torch.device("cpu"):  # a mode, too
        assert compare(model, inputs, max_new_tokens=NEW).packed_weights == 15


@pytest.mark.parametrize("mode", [Doubling, DoublingBelow])
def test_modes_of_the_user_see_no_guess(pack_asked, mode):
    model, inputs = tiny_llama(torch.float32), prompt()
    plain = generate_plain(model, inputs, max_new_tokens=NEW)
    with mode():
        compare(model, inputs, "would see guesses that are rejected", max_new_tokens=NEW)
        assert not torch.equal(generate_plain(model, inputs, max_new_tokens=NEW), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_that_differ_are_not_used(lade_on, products, monkeypatch, dtype):
    """In half precision by one bit."""
    model, multiply = tiny_llama(dtype), packed.multiply
    monkeypatch.setattr(packed, "multiply", lambda x, w, b: multiply(x, w, b) * (1 + 2**-7))
    expected = unpacked_text(model)
    lade.config_lade(PACK=1)
    found, stats = generate(model, prompt())
    assert torch.equal(found, expected)
    reason = "is not within rounding of" if dtype == torch.float32 else "differs in its bits from"
    assert reason in stats.reasons.get("packed")


def unpacked_text(model):
    lade.config_lade(PACK=0)
    return generate(model, prompt())[0]


def layer_of(model, dtype, is_exact):
    """The shadow of a model's one layer, packed, and what packs it."""
    call = BlockCall(adapter=adapter_for(tiny_llama(dtype)), device=torch.device("cpu"))
    packing = Packing(call, [model["layer"].weight], is_asked=True)
    packing.is_exact = is_exact
    shadow = shadow_model(model)
    packed.pack_layers(shadow, packing)
    return shadow["layer"], packing


@pytest.mark.parametrize("shape", [(2, 3, 96), (96,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_layer_is_a_linear(small, shape, bias, dtype):
    torch.manual_seed(0)
    # With 64 columns or fewer one element in 10,000 is rounded otherwise in bfloat16, which few comparisons see.
    model = nn.ModuleDict({"layer": nn.Linear(96, 96, bias=bias, dtype=dtype).requires_grad_(False)})
    layer, packing = layer_of(model, dtype, is_exact=dtype == torch.float32)
    assert type(layer) is PackedLinear
    assert type(model["layer"]) is nn.Linear
    assert layer.weight is model["layer"].weight
    with torch.device("meta"):  # products are compared on the host, whatever the default device
        layer(torch.randn(shape, dtype=dtype, device="cpu"))
    assert not packing.shared.trial.reasons
    for input in (torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 192).to(dtype)[..., ::2]):
        expected = model["layer"](input)
        torch.testing.assert_close(layer(input), expected, rtol=1e-5, atol=1e-5) if dtype == torch.float32 else None
        assert layer(input).shape == expected.shape
        assert dtype == torch.float32 or torch.equal(layer(input), expected)
    with pytest.raises(RuntimeError):  # torch's own words
        layer(torch.randn(2, 95, dtype=dtype))
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 96, dtype=torch.float64))
    assert layer(torch.randn(0, 96, dtype=dtype)).shape == (0, 96)


def refuse_bfloat16(monkeypatch):
    def pack(weight, original=packed.pack):
        if weight.dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx512bw\nException raised from ...")
        return original(weight)

    monkeypatch.setattr(packed, "pack", pack)
    monkeypatch.setattr(packed, "_error_of_product", packed._error_of_product.__wrapped__)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setattr(packed, "has_fast_products", lambda dtype: False), "this processor has no instr"),
        (refuse_bfloat16, "oneDNN does not multiply packed bfloat16 weights on this processor (bf16 path needs the "),
    ],
    ids=["slow", "refused"],
)
def test_processors_that_pack_no_bfloat16(pack_asked, products, monkeypatch, change, reason):
    monkeypatch.setattr(packed, "has_fast_products", lambda dtype: True)
    change(monkeypatch)
    found, stats = generate(tiny_llama(torch.bfloat16), prompt())
    assert (stats.packed_weights, products) == (0, [])
    assert stats.reasons.get("packed").startswith(reason)
    assert generate(tiny_llama(torch.float32), prompt())[1].packed_weights == 15
    assert torch.equal(found, unpacked_text(tiny_llama(torch.bfloat16)))


PROCESSORS = {  # torch's name for what it has, bfloat16, AMX; what packing gains nothing for, with 8 threads and with 9
    "Intel Core": ("AVX2", False, False, [], []),
    "Intel Ice Lake": ("AVX512", False, False, [], [torch.float32]),
    "AMD Zen 4": ("AVX512", True, False, [], []),
    "Intel Sapphire Rapids": ("AVX512", True, True, [torch.bfloat16], [torch.bfloat16, torch.float32]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_where_packing_gains_nothing(monkeypatch, name):
    capability, has_bfloat16, has_tiles, *needless = PROCESSORS[name]
    for function in OF_THE_PROCESSOR:
        monkeypatch.setattr(processor, function.__name__, function)
    monkeypatch.setattr(processor, "cpu_name", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert processor.has_slow_mkl() == name.startswith("AMD")
    for threads, expected in zip((8, 9), needless, strict=True):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
        assert [dtype for dtype in dtypes if processor.packing_is_needless(dtype)] == expected
        assert packing_line().count("gain nothing") == len(expected)


def test_what_gains_nothing_is_packed_if_asked(pack_asked, monkeypatch):
    model = tiny_llama(torch.float32)
    monkeypatch.setattr(packed, "packing_is_needless", lambda dtype: "it gains nothing")
    assert generate(model, prompt())[1].packed_weights == 15
    lade.config_lade(PACK="auto")
    _, stats = generate(model, prompt())
    assert (stats.packed_weights, stats.reasons["packed"]) == (0, "it gains nothing")


OFTEN = "llama mixtral phi3 gpt2 falcon bloom gemma2 deepseek_v2 qwen2_moe gpt_oss opt"


@pytest.mark.parametrize("family", of_each_class(FAMILIES, OFTEN))
def test_every_family_in_float32(lade_on, products, family):
    if not family.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_class}")
    model = family.build().float()
    lade.config_lade(PACK=1, LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)
    twin = copy.deepcopy(model)
    stats = run_both(model, max_new_tokens=12)
    assert bool(products) == bool(stats.packed_weights)
    assert stats.packed_weights or stats.fallback_reason or stats.reasons.get("packed")
    assert_same_state(model, twin)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, _: model.to(torch.float64), "float64 weights are not packed"),
        (lambda model, _: model.lm_head.register_forward_hook(lade.allow_hook(lambda *_: None)), "hooks"),
        (lambda model, _: setattr(model.lm_head, "forward", model.lm_head.forward), "patched"),
        (lambda model, _: setattr(model, "__class__", type("Mine", (LlamaForCausalLM,), {})), "not torch's and transf"),
        (lambda _, patch: patch.setattr(functional, "linear", double_linear), "not torch's and transf"),
    ],
    ids=["float64", "hook", "forward", "subclass", "function"],
)
def test_models_that_are_not_packed(pack_asked, products, monkeypatch, change, reason):
    model = tiny_llama(torch.float32)
    change(model, monkeypatch)
    found, stats = generate(model, prompt())
    assert torch.equal(found, unpacked_text(model))
    assert reason in stats.reasons.get("packed")
    assert (stats.packed_weights, stats.packed_bytes, products) == (0, 0, [])


def test_layers_that_are_not_packed(small):
    class Own(nn.Linear):
        """A subclass may compute anything."""

    hooked, strided = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_forward_pre_hook(lambda *_: None)
    strided.weight = nn.Parameter(torch.randn(8, 8).T)
    for layer in (
        nn.Conv1d(8, 8, 1),
        Own(8, 8),
        hooked,
        strided,
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    ):
        assert not packed.is_plain(layer)
    assert packed.is_plain(nn.Linear(8, 8))
    model = tiny_llama(torch.float32)
    model.lm_head.half()
    assert len(packed.weights_to_pack(adapter_for(model))) == 14  # not the head


def test_small_weights_in_float32(lade_on):
    lade.config_lade(PACK=1)
    model = tiny_llama(torch.float32, hidden_size=512, intermediate_size=192, num_key_value_heads=1)
    layer = model.model.layers[0]
    assert layer.self_attn.k_proj.weight.numel() < packed.LEAST_ELEMENTS == layer.mlp.up_proj.weight.numel()
    assert compare(model, max_new_tokens=NEW).packed_weights == 10  # of each of two layers all but k and v
    stats = compare(tiny_llama(torch.float32), max_new_tokens=NEW)
    assert stats.packed_weights == 0
    assert stats.reasons.get("packed") == "the model has no linear layers that gain by it"


def test_without_onednn(pack_asked):
    model = tiny_llama(torch.float32)
    generate(model, prompt())
    assert copies_of(model).copies
    with torch.backends.mkldnn.flags(enabled=False):
        _, stats = generate(model, prompt())
    assert stats.reasons.get("packed") == "oneDNN is not in this build of torch, or is switched off"
    assert not copies_of(model).copies  # the memory is free again


@pytest.mark.parametrize("settings", [{"PACK": 0}, {"PACK": 1, "COMPILE": 1}], ids=str)
def test_settings_that_rule_it_out(lade_on, products, settings, monkeypatch):
    monkeypatch.setattr("lade.forward.cuda.static_shapes.BACKEND", "eager")
    lade.config_lade(**settings)
    _, stats = generate(tiny_llama(torch.float32, num_hidden_layers=1), prompt())
    assert (stats.packed_weights, products) == (0, [])
    reason = "blocks have static shapes or lade's own attention" if settings["PACK"] else None
    assert stats.reasons.get("packed") == reason


def test_packed_when_calls_pay_for_it(lade_on, products, monkeypatch):
    """Once enough tokens are generated or asked for."""
    monkeypatch.setattr(packed, "PACKING_STEPS", 1)
    model = tiny_llama(DTYPE)
    counts = []
    for length in (20, 20, 60, 20):
        products.clear()
        model.generate(**prompt(), max_new_tokens=length)
        counts.append((lade.last_stats().packed_weights, bool(products)))
    assert counts == [(0, False), (0, False), (15, True), (15, True)]
    model.generate(**prompt(), max_new_tokens=packed.LEAST_NEW_TOKENS)
    assert lade.last_stats().packed_weights == 15
    model.generate(**prompt(), max_new_tokens=packed.LEAST_NEW_TOKENS - 1)
    assert lade.last_stats().reasons.get("packed").startswith("a call for fewer than 4 tokens")


@pytest.mark.parametrize("room", [2**40, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_waits_for_the_first_tokens_and_takes_several_steps(lade_on, products, monkeypatch, dtype, room):
    """The same ones whatever memory is free. In half precision the costs that follow are, too: they may change a
    text."""
    monkeypatch.setattr(packed, "free_bytes", lambda: room)
    model, lengths = tiny_llama(dtype), note_calls(monkeypatch, Packing, "begin_step", lambda _, length: length)
    at = note_calls(monkeypatch, PackedWeight, "fill", lambda *_: len(lengths))
    packs = note_calls(monkeypatch, Packing, "_pack", lambda *_: len(lengths))
    kinds = note_calls(monkeypatch, StepCosts, "at", lambda costs, kind, *_: kind)
    lade.config_lade(ADAPTIVE=1, MODE="tree", MAX_BLOCK=4)
    expected = generate_plain(model, prompt(), max_new_tokens=80)
    found = model.generate(**prompt(), max_new_tokens=80)
    assert torch.bfloat16 == dtype or torch.equal(found, expected)
    due = next(i for i, length in enumerate(lengths) if length - lengths[0] >= packed.FIRST_TOKENS)
    assert packs == list(range(due + 1, due + 1 + len(packs)))
    assert 1 < len(packs) <= packed.PACKING_STEPS
    assert len(at) == (15 if room else 0)
    assert not room or (set(at) == set(packs) and lade.last_stats().packed_weights == 15)
    assert all("packed" not in kind for kind in kinds[: packs[-1] + 1])  # the first kind is of no step
    assert ("packed" in kinds[packs[-1] + 1]) == bool(room or torch.bfloat16 == dtype)


def test_large_models_say_it(pack_asked, monkeypatch, caplog):
    monkeypatch.setattr(packed, "LARGE_BYTES", 1)
    for quiet, count in (("1", 0), ("", 1)):
        monkeypatch.setenv("LADE_QUIET", quiet)
        generate(tiny_llama(DTYPE), prompt())
        assert caplog.text.count("once per model") == count


def test_calls_share_the_copies(pack_asked, monkeypatch):
    model, packs = tiny_llama(DTYPE), note_calls(monkeypatch, packed, "pack")
    texts = in_threads(lambda inputs: generate(model, inputs)[0], *[prompt()] * 4)
    assert len(packs) == 15
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_tied_weights_are_packed_once(pack_asked):
    model = tiny_llama(torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert compare(model, max_new_tokens=NEW).packed_weights == 15


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = prompt()["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def merge_adapter(model):
    """As peft does it: neither the address nor the version counter of the weight shows it."""
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        before = identity(weight)
        weight.data += torch.randn(48, 4).to(weight) @ torch.randn(4, 48).to(weight)
        assert identity(weight) == before


def assign(model):
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) * 0.2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swap_tensors(model):
    """Refused where anybody holds a weak reference to either."""
    weight = model.lm_head.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))


CHANGES = {
    "training": train,
    "adapter": merge_adapter,
    "assign": assign,
    "swap": swap_tensors,
    "data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0)),
    "replaced": lambda model: setattr(model, "lm_head", nn.Linear(48, 61, bias=False, dtype=model.dtype)),
}


@pytest.mark.parametrize(
    ("change", "dtype"), [*((change, torch.float32) for change in CHANGES), ("adapter", DTYPE)], ids=str
)
def test_changed_weights_are_packed_anew(lade_on, products, change, dtype):
    model = tiny_llama(dtype, vocab_size=61)
    lade.config_lade(PACK=1, SHARE=0)
    before, _ = generate(model, prompt())
    CHANGES[change](model)
    expected = unpacked_text(model)
    lade.config_lade(PACK=1)
    products.clear()
    found, stats = generate(model, prompt())
    assert products
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)
    assert stats.packed_weights == 15


SHAPES = {torch.float32: [(5, 7), (9, 8)], torch.bfloat16: [(5, 7), (5, 6), (3, 1), (520, 2064)]}


@pytest.mark.parametrize(("dtype", "shape"), [(dtype, shape) for dtype, shapes in SHAPES.items() for shape in shapes])
def test_a_checksum_sees_single_bits_and_places(dtype, shape):
    """Columns that change places show if there are as many rows as are summed words."""
    num_rows, num_columns = shape
    weight = torch.randn(num_rows, num_columns).to(dtype)
    before, kind = checksums(weight), torch.int32 if dtype == torch.float32 else torch.int16
    for row, column in ((0, 0), (num_rows - 1, num_columns - 1), (num_rows // 2, num_columns // 2)):
        changed = weight.clone()
        changed.view(kind)[row, column] ^= 1
        assert (checksums(changed) != before).sum() == 1
    assert not torch.equal(checksums(weight.flip(0)), before)
    for first in {0, num_columns // 2, max(0, num_columns - 8)}:  # neighbours, by words of up to 8 bytes
        size = 8 // weight.element_size()
        if first + 2 * size <= num_columns:
            order = torch.arange(num_columns)
            order[first : first + 2 * size] = order[first : first + 2 * size].roll(size)
            assert not torch.equal(checksums(weight[:, order]), before)


@pytest.mark.parametrize(("dtype", "shape"), [(dtype, (40, 64)) for dtype in SHAPES] + [(torch.float32, (600, 2048))])
def test_a_checksum_sees_changes_that_cancel_in_a_sum(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    before, last = checksums(weight), shape[1] - 1

    def is_seen(*place, to):
        changed = weight.clone()
        changed[place] = to
        return not torch.equal(checksums(changed), before)

    for rows, columns in (((3, 3), (1, 3)), ((3, 3), (3, last)), ((0, 5), (7, 7)), ((2, shape[0] - 1), (last, last))):
        assert is_seen(rows, columns, to=weight[rows, columns].flip(0))
        assert is_seen(rows, columns, to=-weight[rows, columns])
    for each in (slice(step - 1, None, step) for step in (1, 2, 4, 8)):
        assert is_seen(slice(None), each, to=-weight[:, each])
        assert is_seen(each, to=-weight[each])
    assert is_seen(..., to=weight.roll(8, 1))
    assert is_seen(..., to=weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])
    assert not is_seen(..., to=weight)


def test_a_checksum_at_an_odd_address():
    weight = torch.randn(5, 8).to(torch.bfloat16)
    shared = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(5, 8)
    before = checksums(shared)
    shared[4, 7] += 1
    assert (checksums(shared) != before).sum() == 1


@pytest.fixture
def files(tmp_path):
    def write(available, groups="", contents=None):
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available} kB\n", encoding="utf-8")
        (tmp_path / "proc/self/cgroup").write_text(groups, encoding="utf-8")
        for path, text in (contents or {}).items():
            place = tmp_path / "sys/fs/cgroup" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return free_memory.free_bytes(tmp_path)

    return write


def test_a_limited_address_space(files, tmp_path, monkeypatch):
    assert free_memory.free_bytes(tmp_path) is None  # not Linux
    assert files(1000, "0::/\n") == 1000 * 1024
    (tmp_path / "proc/self/status").write_text("Name: x\nVmSize:      100 kB\n", encoding="utf-8")
    for limit, expected in ((resource.RLIM_INFINITY, 1000 * 1024), (150 * 1024, 50 * 1024), (1, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert files(1000) == expected


def test_limits_of_groups_count(files):
    group = "0::/user/job\n"
    limit = {"user/job/memory.max": "5000\n", "user/job/memory.current": "2000\n"}
    assert files(1000, group, limit) == 3000
    limit["user/job/memory.stat"] = "anon 9\ninactive_file 500\n"
    assert files(1000, group, limit) == 3500
    assert files(1, group, limit) == 1024
    limit |= {"user/memory.max": "4000\n", "user/memory.current": "2100\n"}  # the group around it
    assert files(1000, group, limit) == 1900
    assert files(1000, group, limit | {"user/memory.max": "max\n"}) == 3500
    assert files(1000, group, limit | {"user/job/memory.current": "9000\n"}) == 0
    # Of the first version:
    limit = {"limit_in_bytes": "5000", "usage_in_bytes": "1000", "stat": "total_inactive_file 10\n"}
    limit = {f"memory/memory.{name}": text for name, text in limit.items()}
    # The path is the host's; in the container the group is the one at the top.
    assert files(1000, "5:cpu:/docker/x\n4:memory:/docker/x\n", limit) == 4010


def test_what_does_not_fit_is_not_packed(lade_on, products, monkeypatch):
    model = tiny_llama(DTYPE)
    copies_of(model).num_tokens = packed.TOKENS_BEFORE_PACKING
    largest, smallest = 64 * 48 * DTYPE.itemsize, 48 * 24 * DTYPE.itemsize  # of the MLP, of keys
    monkeypatch.setattr(packed, "free_bytes", lambda: 2 * (largest + smallest + 1))
    _, stats = generate(model, prompt())
    sizes = [copy.num_bytes for copy in copies_of(model).copies.values() if copy.num_bytes]
    assert sizes == [largest, smallest]
    assert (stats.packed_weights, stats.packed_bytes) == (2, largest + smallest)
    assert "13 weights are not packed" in stats.reasons.get("packed")
    monkeypatch.setattr(packed, "free_bytes", lambda: largest + smallest + 2)  # what is left of it
    assert generate(model, prompt())[1].packed_weights == 2  # not half of that as well
    monkeypatch.setattr(packed, "free_bytes", lambda: 1 << 30)
    _, stats = generate(model, prompt())
    assert stats.packed_weights == 15
    assert "memory" not in (stats.reasons.get("packed") or "")  # on some machines the bits of one product differ


@pytest.mark.parametrize(("free", "pack", "count"), [(0, "auto", 0), (0, 1, 0), (None, "auto", 0), (None, 1, 15)])
def test_no_memory_or_not_known(lade_on, products, monkeypatch, free, pack, count):
    model = tiny_llama(DTYPE)
    copies_of(model).num_tokens = packed.TOKENS_BEFORE_PACKING
    monkeypatch.setattr(packed, "free_bytes", lambda: free)
    lade.config_lade(PACK=pack)
    _, stats = generate(model, prompt())
    # With packed weights there may be another reason: on some machines the bits of one product differ.
    assert (stats.packed_weights, "memory" in (stats.reasons.get("packed") or "")) == (count, count == 0)


@pytest.mark.parametrize("pack", [None, True])
def test_several_processes_of_a_machine_do_not_pack_by_themselves(small, pack):
    config = LookaheadConfig(pack=pack, dist_workers=2)
    adapter = adapter_for(tiny_llama(torch.float32))
    call = BlockCall(adapter=adapter, config=config, device=torch.device("cpu"), num_new=100)
    assert ("packed" in path_for(call).kind) == bool(pack)
    assert ("packed" in call.stats.reasons) != bool(pack)


def test_the_copies_go_with_the_model(pack_asked):
    model = tiny_llama(torch.float32)
    generate(model, prompt())
    copy = weakref.ref(next(iter(copies_of(model).copies.values())).packed)
    known = weakref.ref(model)
    assert copy() is not None
    del model
    gc.collect()
    assert known() is None
    assert copy() is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_restore_all_gives_the_memory_back_to_the_system(lade_on, monkeypatch):
    """Copies of many small weights, which the C library would keep for itself."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    monkeypatch.setattr(packed, "least_elements", lambda dtype: 1)
    settings = {"hidden_size": 96, "intermediate_size": 512, "num_hidden_layers": 48, "num_key_value_heads": 4}
    model = tiny_llama(torch.float32, **settings)
    lade.config_lade(PACK=1)
    gc.collect()
    state.return_memory()  # of earlier tests, in whose place the copies would not show
    before = resident()
    _, stats = generate(model, prompt())
    assert stats.packed_bytes > 30e6
    during = resident()
    lade.restore_all()
    assert model not in state._states
    assert resident() < during - 0.7 * stats.packed_bytes
    assert before < during


def test_nothing_of_the_model_has_changed(pack_asked):
    model = tiny_llama(torch.float32)
    twin, weights = copy.deepcopy(model), list(model.parameters())
    generate(model, prompt())
    assert_same_state(model, twin)
    assert all(weight is before for weight, before in zip(model.parameters(), weights, strict=True))
    train(model)  # nothing was made in inference mode
