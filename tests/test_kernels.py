"""The block attention against its definition, written down slot by slot in float64: plain torch, and the Triton kernel.

The kernel's tests run natively where a GPU is there. Elsewhere one test runs this file again in Triton's interpreter,
which must be chosen before triton is imported. LADE_LONG_TESTS=1 adds the large grid and the remaining compilations.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import beside, forked, python
from support.attention import BF16, F16, F32, F64, Case, tensors_of

from lade.common.trial import Trial
from lade.forward.cuda import kernel as kernels
from lade.forward.cuda.kernel import self_check

LONG = os.environ.get("LADE_LONG_TESTS") == "1"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = "not installed" not in (kernels.unavailable_reason() or "")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
runs_kernel = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=f"no kernel here: {kernels.unavailable_reason()}"
)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRIED = (F16, BF16, F32)
MISMATCH = "the interpreter of this triton does not go with this numpy"
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 4e-6, F64: 1e-13}


CASES = [
    Case(1, (0,)),
    Case(1, (130,), heads=8, dtype=F16, dim=128, splits=3),
    Case(2, (5,), splits=16),  # more splits than tiles
    Case(3, (10,), spare=2000, dtype=F16),  # a large cache, hardly used
    Case(5, (1030,), heads=8, dtype=F16, splits=4),
    Case(7, (65, 3), heads=8, kv_heads=2, window=20, softcap=3.0, has_sinks=True, padding=2),
    Case(9, (40,), heads=2, kv_heads=2, dim=256, dtype=BF16),
    Case(17, (500,), window=64, dtype=F16),  # most of the prefix is out of sight and must not be read
    Case(31, (8,), dim=192, value_dim=128, dtype=F16, padding=8),  # nothing but padding behind the block
    Case(33, (40,), dim=80, value_dim=96, window=2, splits=4),
    Case(56, (100,), heads=4, has_sinks=True, dtype=BF16),
    Case(56, (300,), dim=128, dtype=BF16, splits=2),
    Case(64, (64,), dtype=F16, softcap=50.0),
    Case(257, (1,), dtype=F16),
]


def grid() -> list[Case]:
    """All sizes, each with options drawn for it."""
    draw = random.Random(0)
    cases = []
    lengths = (0, 1, 63, 64, 65, 1000, 4097)
    for q, length, group in itertools.product((1, 2, 31, 33, 56, 128, 257), lengths, (1, 4, 8)):
        dtype, dim = draw.choice((F16, BF16, F32)), draw.choice((64, 80, 96, 128, 256))
        window, softcap = draw.choice((None, 4, 100)), draw.choice((None, 4.0))
        options = {"has_sinks": draw.random() < 0.3, "padding": min(length, draw.choice((0, 5)))}
        options |= {"heads": group, "splits": draw.choice((None, 1, 7))}
        cases.append(Case(q, (length,), dtype=dtype, dim=dim, window=window, softcap=softcap, **options))
    # The largest would take Triton's interpreter minutes each.
    return [case for case in cases if DEVICE == "cuda" or case.q * case.heads * case.lengths[0] < 1.1e6]


GRID = grid()


def make(case: Case, unused: float) -> tuple[dict, torch.Tensor]:
    """Arguments of block_attention, and the expected result in float64, [B, q, H, D_v].

    unused: what the slots hold that no token sees.
    """
    arguments, visible, offsets = tensors_of(case)
    query, keys, values, sinks = (arguments[name] for name in ("query", "keys", "values", "sinks"))
    batch_size, _, capacity, value_dim = values.shape
    expected = torch.zeros(batch_size, case.q, case.heads, value_dim, dtype=F64)
    is_seen = torch.zeros(batch_size, capacity, dtype=torch.bool)
    for row, token in itertools.product(range(batch_size), range(case.q)):
        length, offset = case.lengths[row], offsets[row, token].item()
        slots = [slot for slot in range(case.padding, length) if length + offset - slot < case.reach]
        slots += [length + other for other in range(case.q) if visible[row, token, other]]
        is_seen[row, slots] = True
        for head in range(case.heads):
            kv_head = head * case.kv_heads // case.heads
            scores = keys[row, kv_head, slots].double() @ query[row, head, token].double() / 9
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].double()])
            weights = torch.softmax(scores, dim=0)[: len(slots)]
            expected[row, token, head] = weights @ values[row, kv_head, slots].double()
    for states in (keys, values):
        states.masked_fill_(~is_seen[:, None, :, None], unused)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(DEVICE)
    return arguments, expected


def assert_close(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert (output.cpu().double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("case", CASES + [replace(case, dtype=F64) for case in CASES[5:9]], ids=str)
def test_reference_is_the_definition(case):
    arguments, expected = make(case, unused=1e3)
    assert_close(kernels.reference_block_attention(**arguments), expected, case.dtype)


@pytest.fixture
def triton_block_attention():
    from lade.forward.cuda.kernel import triton_attention

    return triton_attention.triton_block_attention


@runs_kernel
@pytest.mark.parametrize("case", CASES + GRID * LONG, ids=str)
def test_kernel_is_the_definition(case, triton_block_attention):
    arguments, expected = make(case, unused=float("nan"))  # what nobody sees is not even read
    assert_close(triton_block_attention(**arguments, num_splits=case.splits), expected, case.dtype)


@runs_kernel
@pytest.mark.parametrize("dtype", TRIED, ids=str)
def test_kernel_passes_its_self_check(dtype, triton_block_attention, monkeypatch):
    """Which comes before its use; with another scale it would not."""
    monkeypatch.setattr(self_check, "_trial", Trial())
    case = Case(7, (65, 3), heads=8, kv_heads=2, window=20, softcap=3.0, has_sinks=True, padding=2, dtype=dtype)
    arguments, expected = make(case, unused=1e3)
    assert_close(self_check.checked(triton_block_attention, **arguments), expected, dtype)
    assert list(self_check._trial._num_passed.values()) == [1]
    wrong = triton_block_attention(**arguments | {"scale": 1 / 5})
    assert "off by" in self_check.problem_of(wrong, **arguments)


@runs_kernel
def test_kernel_on_hidden_tokens_and_small_scores(triton_block_attention):
    """A token that sees nothing gets zeros; the soft cap keeps float32's digits near zero."""
    case = Case(4, (20,), softcap=50.0)
    arguments, _ = make(case, unused=0.0)
    arguments["packed"][0, 0, 2] = torch.tensor([20, 20, 0])  # no slot of the prefix, no block token
    arguments["scale"] = 1e-3
    output = triton_block_attention(**arguments).cpu()
    assert output[0, 2].abs().max() == 0
    doubles = {name: arg.double() if name in ("query", "keys", "values") else arg for name, arg in arguments.items()}
    assert_close(output, kernels.reference_block_attention(**doubles).cpu(), F32)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_one_captured_graph_serves_all_lengths(triton_block_attention):
    case = Case(8, (900,), heads=4, dim=128, dtype=F16)
    arguments, _ = make(case, unused=0.0)
    triton_block_attention(**arguments)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = triton_block_attention(**arguments)
    for length in (900, 0, 77):
        arguments["packed"][..., 0] = length
        graph.replay()
        assert_close(output, kernels.reference_block_attention(**arguments).double().cpu(), F16)


@beside
def interpreted():
    if not HAS_TRITON or (kernels.unavailable_reason() is None):
        return None
    chosen = "test_kernel_is or test_kernel_on or test_kernel_passes or test_kernel_touches"
    arguments = ("-m", "pytest", "-rs", "-p", "no:cacheprovider", "-k", chosen, __file__)
    return python(*arguments, TRITON_INTERPRET="1", LADE_LONG_TESTS=str(int(LONG)))


@needs_triton
@pytest.mark.skipif(kernels.unavailable_reason() is None, reason="the kernel's tests run by themselves")
def test_kernel_in_the_interpreter(interpreted):
    passed = re.search(r"(\d+) passed", interpreted.stdout)
    assert interpreted.returncode == 0, interpreted.stdout[-5000:]
    is_mismatch = MISMATCH in interpreted.stdout
    assert is_mismatch or "skipped" not in interpreted.stdout
    assert int(passed[1]) == len(CASES + GRID * LONG) + len(TRIED) + 2 - is_mismatch


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter's accesses are guarded, not a GPU's")
def test_kernel_touches_nothing_but_its_tensors(monkeypatch, capfd):
    """A GPU's context does not survive a stray access. Those made on purpose show that the guards would catch one."""
    from support import guard_pages
    from triton.runtime import interpreter

    # It would copy what it has run on back to the device, here onto itself; only the kernel is to touch what is
    # misplaced.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)
    found = guard_pages.found()
    if "only 0-dimensional arrays can be converted" in capfd.readouterr().err:
        pytest.skip(MISMATCH)
    assert found["calls"] >= 10
    assert found["unsound"] == []
    assert found["faulty"] == 18  # each of eight tensors at both ends, and two wrong masks
    assert found["missed"] == []


COMPILED = [("bf16", 128, 56, 80), ("bf16", 128, 56, 90)]
ALL_COMPILED = list(itertools.product(("fp16", "bf16", "fp32"), (64, 80, 128, 256), (1, 56, 224), (80, 90)))


@beside
def compiled_kernel():
    """The kernel, compiled for sm_80 and sm_90."""
    program = Path(__file__).parent / "support" / "compile_kernels.py"
    return python(str(program), json.dumps(ALL_COMPILED if LONG else COMPILED), TRITON_INTERPRET="0")


@needs_triton
def test_compiles_for_gpus_that_are_not_there(compiled_kernel):
    """The launch settings fit sm_80 and sm_90: shared memory, and (almost) no registers spilled to memory."""
    assert compiled_kernel.returncode == 0, compiled_kernel.stderr[-5000:]
    for line in compiled_kernel.stdout.splitlines():
        print(line)
        found = json.loads(line)
        assert found["shared_bytes"] <= 160 * 1024, found  # sm_80 has 163 KiB for a program
        assert found["stack_bytes"] <= (32 if found["dtype"] == "fp32" else 8), found  # 8: Triton 3.6 on sm_80


@needs_triton
def test_few_kernels_for_one_model():
    """Of a 7B model, with and without grouped heads, on 132 multiprocessors: what Triton compiles for blocks of 1 to
    128 tokens."""
    from lade.forward.cuda.kernel import triton_attention as ours

    for heads, kv_heads in ((32, 32), (32, 8)):
        splits, merges = set(), set()
        for block in range(1, 129):
            num_rows = block * heads // kv_heads
            tiles = ours.choose_tiles(num_rows, 128, 128, torch.bfloat16)
            num_splits = ours.choose_splits(-(-num_rows // tiles.block_m) * kv_heads, tiles, 132)
            splits.add(tiles)
            merges.add(max(ours.MIN_SPLIT_BLOCK, self_check.power_of_2(num_splits)))
        assert len(splits) <= 4
        assert len(merges) <= 2


def test_mask_round_trip():
    generator = torch.Generator().manual_seed(0)
    for num_queries in (1, 31, 32, 33, 64, 100):
        visible = torch.rand(2, num_queries, num_queries, generator=generator) < 0.5
        lengths, first = torch.tensor([7, 2]), torch.tensor([0, 2])
        packed = kernels.pack_mask(visible, lengths, first)
        assert packed.shape == (2, 1, num_queries, 2 + (num_queries + 31) // 32)
        assert kernels.is_packed(packed)
        found = kernels.unpack_mask(packed)
        assert torch.equal(found.visible, visible)
        assert torch.equal(found.lengths, lengths.int())
        assert torch.equal(found.first_slots, first.int()[:, None].expand(2, num_queries))
    assert not kernels.is_packed(packed.float())
    assert not kernels.is_packed(None)


def test_left_padding():
    key_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    assert kernels.left_padding(key_mask).tolist() == [0, 2, 4]
    for holes in ([1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]):
        assert kernels.left_padding(torch.tensor([[1, 1, 1, 1], holes]).bool()) is None


@beside
def without_triton():
    return forked("""
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("lade.forward.cuda.kernel")]:
    del sys.modules[name]
sys.modules["triton"] = None  # an import of it now raises ImportError
import torch, lade.forward.cuda.kernel.interface
from lade.forward.cuda import kernel as kernels
assert kernels.unavailable_reason().startswith("triton is not installed"), kernels.unavailable_reason()
x = torch.ones(1, 1, 2, 8)
packed = kernels.pack_mask(torch.eye(2).bool()[None], torch.tensor([0]))
assert torch.equal(kernels.block_attention(x, x, x, packed, scale=1.0), x.transpose(1, 2))
assert "lade.forward.cuda.kernel.triton_attention" not in sys.modules
""")


def test_everything_but_the_kernel_works_without_triton(without_triton):
    assert without_triton.returncode == 0, without_triton.stderr
