"""USE_FLASH and CUDA_GRAPH as lade chooses them by itself: where, why not, and what a wrong graph or kernel leads to.

CUDA is stood in for by the CPU, graphs by traces (support/graphs.py), the Triton kernel by plain torch.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import compare, generate_plain, note_calls, prompt, tiny_llama
from support.attention import BF16, F32, F64, Case, tensors_of
from support.graphs import kept_buffers
from torch.utils._pytree import tree_map
from transformers import BloomConfig

import lade
from lade import decoding
from lade.common.state import forget_all
from lade.config import LookaheadConfig
from lade.drafting.step_costs import StepCosts
from lade.forward import base as forward_base
from lade.forward.cuda import kernel as kernels
from lade.forward.cuda import path as cuda_path
from lade.forward.cuda import proof
from lade.forward.cuda import static_inputs as fixed_inputs
from lade.forward.cuda import static_shapes as fixed
from lade.forward.cuda.kernel import reference_block_attention, self_check
from lade.forward.cuda.path import largest_head_dim, slow_kernel_reason
from lade.models import base
from lade.switch import current_config

NEW = {"max_new_tokens": 40, "do_sample": False}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AUTOMATIC = LookaheadConfig()


@pytest.fixture(scope="module")
def model():
    """One layer is traced in half the time of two, which tests/test_static_shapes.py takes."""
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture(autouse=True)
def automatic(lade_on, monkeypatch):
    monkeypatch.setattr(fixed, "MIN_NEW_TOKENS", 32)  # so that calls of these tests are long ones
    lade.config_lade(
        MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=2, ADAPTIVE=1, USE_FLASH="auto", CUDA_GRAPH="auto"
    )
    yield
    forget_all()
    self_check._trial.__init__()


@pytest.fixture
def kernel(monkeypatch):
    """Plain torch as the kernel, in float64 too. The list has one entry per call; what is in `error` is added to its
    results."""
    calls, error = [], []

    def served(query, *args, **named):
        calls.append(query.shape)
        return reference_block_attention(query, *args, **named) + sum(error)

    served.error = error
    monkeypatch.setattr(kernels, "_kernel_for", lambda *_: served)
    monkeypatch.setattr(cuda_path, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cuda_path, "FAST_KERNEL_DTYPES", (F64,))
    served.calls = calls
    return served


def run(model, inputs=None, **arguments):
    """Figures of a call whose output is plain generate()'s."""
    return compare(model, inputs, **NEW | arguments)


@pytest.mark.parametrize(("keyword", "field"), [("USE_FLASH", "use_flash"), ("CUDA_GRAPH", "cuda_graph")])
def test_settings(keyword, field):
    assert getattr(AUTOMATIC, field) is None
    for value, expected in [(0, False), (None, False), (True, True), ("auto", None), (1, True), (None, True)]:
        lade.config_lade(**{keyword: value})
        assert getattr(current_config(), field) is expected
    for wrong in (2, "on", 0.0, "AUTO"):
        with pytest.raises(ValueError, match=f"{keyword} must be 0, 1 or 'auto', got {wrong!r}"):
            lade.config_lade(**{keyword: wrong})
    assert getattr(current_config(), field) is True


def test_nothing_changes_on_a_cpu(model, kernel):
    for settings in ({}, {"MODE": "tree"}):
        lade.config_lade(**settings)
        stats = run(model)
        assert (stats.captured_steps, stats.reasons.get("graph")) == (0, None)
        assert (stats.used_kernel, stats.reasons.get("kernel")) == (False, None)
    assert not kernel.calls
    assert not kept_buffers(model)


ONE_SHAPE = {"MODE": "tree", "MAX_BLOCK": 8, "ADAPTIVE": 0}


@pytest.mark.parametrize("settings", [{"ADAPTIVE": 0}, ONE_SHAPE], ids=["lookahead", "tree"])
def test_captures_by_itself_and_compares_a_graph_once(settings, model, on_cuda, monkeypatch):
    lade.config_lade(**settings)
    compared = note_calls(monkeypatch, fixed, "logits_error")
    for _ in range(2):
        stats = run(model)
        assert (stats.captured_steps, stats.reasons.get("graph")) == (stats.steps - 1, None)
        assert (len(on_cuda), len(compared)) == (1, fixed_inputs.NUM_CHECKS)
    lade.config_lade(CUDA_GRAPH=0)
    stats = run(model)
    assert (stats.captured_steps, stats.reasons.get("graph")) == (0, None)


def test_nothing_runs_untried_on_a_gpu(model, on_cuda, kernel, tmp_path, monkeypatch):
    """Neither graphs nor the kernel before a check has passed on this GPU with these versions; both if asked for."""
    monkeypatch.setenv("LADE_CACHE", str(tmp_path))
    for module in (fixed, cuda_path):
        monkeypatch.setattr(module, "is_proven", proof.is_proven)
    stats = run(model)
    assert (stats.captured_steps, stats.used_kernel) == (0, False)
    assert (stats.reasons["graph"], stats.reasons["kernel"]) == (proof.UNPROVEN, proof.UNPROVEN)
    path = proof.store_proof(CPU, {"graph": True, "kernel": False})
    stats = run(model)
    assert (stats.captured_steps, stats.used_kernel) == (stats.steps - 1, False)
    path.write_text("damaged")
    assert run(model).captured_steps == 0
    proof.store_proof(CPU, {"graph": True, "kernel": True})
    assert run(model).used_kernel
    monkeypatch.setattr(proof, "VERSION", "another")
    assert not run(model).used_kernel
    lade.config_lade(CUDA_GRAPH=1, USE_FLASH=1)
    stats = run(model)
    assert (stats.captured_steps, stats.used_kernel) == (stats.steps - 1, True)


def test_a_kind_of_gpu_that_has_been_checked(monkeypatch, tmp_path):
    """The check has passed on one of compute capability 9.0 with torch 2.11; what it finds here counts for more."""
    monkeypatch.setenv("LADE_CACHE", str(tmp_path))
    capability = [(9, 0)]
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")

    def proven(device=CUDA):
        return proof.is_proven(device, "graph"), proof.is_proven(device, "kernel")

    assert (proven(), proven(CPU)) == ((True, True), (False, False))
    proof.store_proof(CUDA, {"graph": False, "kernel": True})
    assert proven() == (False, True)
    monkeypatch.setenv("LADE_CACHE", "0")
    for number, uses in {
        (10, 0): (True, False),
        (8, 0): (True, False),
        (7, 5): (False, False),
        (9, 0): (True, True),
    }.items():
        capability[0] = number
        assert proven() == uses
    for owner, name, value in (
        (torch.version, "hip", "7.0"),
        (torch, "__version__", "2.10.1"),
        (torch, "__version__", "ours"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert proven() == (False, False)


def test_short_calls_capture_once_they_have_asked_for_enough(model, on_cuda):
    """Together, where their batches have as many rows; each by itself with DETERMINISTIC=1."""
    half = fixed.MIN_NEW_TOKENS // 2
    for inputs in (None, prompt(batch_size=2)):
        stats = run(model, inputs, max_new_tokens=half)
        assert (stats.captured_steps, len(on_cuda)) == (0, 0)
        assert stats.reasons.get("graph").startswith("capturing pays from ")
    with lade.enabled(DETERMINISTIC=1):
        assert run(model, max_new_tokens=half).captured_steps == 0
    assert run(model, max_new_tokens=half).captured_steps > 0


MODES = pytest.mark.parametrize("mode", ["lookahead", "tree"])


@MODES
def test_a_short_call_has_what_a_long_one_has_captured(mode, model, on_cuda):
    """Where the batch has as many rows; with DETERMINISTIC=1 no call depends on another."""
    short = fixed.MIN_NEW_TOKENS - 1
    lade.config_lade(MODE=mode)
    assert run(model, max_new_tokens=fixed.MIN_NEW_TOKENS).captured_steps > 0
    assert run(model, max_new_tokens=short).captured_steps > 0
    assert run(model, prompt(batch_size=2), max_new_tokens=short).captured_steps == 0
    lade.config_lade(DETERMINISTIC=1)
    assert run(model, max_new_tokens=short).captured_steps == 0


@MODES
def test_a_short_call_has_what_was_asked_for(mode, model, on_cuda):
    """As after a warm-up, which captures at once."""
    lade.config_lade(MODE=mode)
    assert run(model, max_new_tokens=12).captured_steps == 0
    with lade.enabled(CUDA_GRAPH=1):
        run(model, max_new_tokens=12)
    assert run(model, max_new_tokens=12).captured_steps > 0


@MODES
def test_not_in_a_long_cache_without_the_kernel(mode, model, on_cuda, kernel, monkeypatch):
    """Neither from the beginning nor when the cache grows. With the kernel a block reads what the text has."""
    monkeypatch.setattr(fixed, "MOST_SLOTS_WITHOUT_KERNEL", 256)
    lade.config_lade(MODE=mode, USE_FLASH=0)
    stats = run(model, prompt(300))
    assert (stats.captured_steps, stats.reasons.get("graph")) == (0, fixed.TOO_MANY_SLOTS)
    monkeypatch.setattr(decoding, "FIRST_CAPACITY", 1)
    stats = run(model, prompt(150), max_new_tokens=150)
    assert stats.reasons.get("graph") == fixed.TOO_MANY_SLOTS
    assert 0 < stats.captured_steps < stats.steps - 1
    lade.config_lade(CUDA_GRAPH=1)
    stats = run(model, prompt(300))
    assert stats.captured_steps == stats.steps - 1
    lade.config_lade(USE_FLASH="auto", CUDA_GRAPH="auto")
    stats = run(model, prompt(300))
    assert (stats.used_kernel, stats.captured_steps) == (True, stats.steps - 1)


def test_not_where_another_process_might_fail(on_cuda, monkeypatch):
    model = tiny_llama(num_hidden_layers=1)
    assert fixed.graph_refusal(AUTOMATIC, model, 100) is None
    model._tp_size = 2
    assert "several processes" in fixed.graph_refusal(AUTOMATIC, model, 100)
    assert fixed.graph_refusal(replace(AUTOMATIC, cuda_graph=True), model, 100) is None
    monkeypatch.setattr(forward_base, "GRAPH_DEVICES", ("cuda",))
    assert (
        fixed.graph_refusal(replace(AUTOMATIC, cuda_graph=True), model, 100)
        == "CUDA graphs need a model on a CUDA device"
    )


def test_a_failure_is_not_tried_again(model, on_cuda, monkeypatch):
    """Unless it is asked for."""
    tried = []

    def refuse(forward):
        tried.append(forward)
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(fixed, "capture", refuse)
    for _ in range(2):
        stats = run(model)
        assert (stats.captured_steps, len(tried)) == (0, 1)
        assert stats.reasons.get("graph") == "RuntimeError: operation not permitted"
    lade.config_lade(CUDA_GRAPH=1)
    run(model)
    assert len(tried) > 1


@pytest.mark.parametrize("good_uses", [1, 2], ids=["the-first", "and-the-second"])
def test_a_graph_that_remembers_its_first_inputs(good_uses, model, on_cuda, monkeypatch):
    """As if the model had baked them in as numbers; good_uses: blocks that it computes."""
    lade.config_lade(**ONE_SHAPE)

    def stale(forward):
        count, output = iter(range(100)), tree_map(torch.clone, forward())

        def replay():
            is_good = next(count) < 2 * good_uses  # two replays a block
            return tree_map(torch.Tensor.copy_, output, forward()) if is_good else output

        return replay

    monkeypatch.setattr(fixed, "capture", stale)
    expected = generate_plain(model, prompt(), **NEW)
    found = model.generate(**prompt(), **NEW)
    stats = lade.last_stats()
    if good_uses == 1:
        assert torch.equal(found, expected)
        assert stats.captured_steps == 1
        assert stats.reasons.get("graph").startswith("the captured forward was off by ")
    else:  # the control: nobody looks any more, and such a graph would be seen in the text
        assert stats.reasons.get("graph") is None
        assert not torch.equal(found, expected)


def test_what_a_step_costs_depends_on_the_way(on_cuda, kernel, monkeypatch):
    model = tiny_llama(num_key_value_heads=4)  # one each, or some blocks are "grouped"
    kinds = note_calls(monkeypatch, StepCosts, "at", lambda costs, kind, *_: kind)
    for settings, kind in (
        ({}, ("kernel", "graph")),
        ({"USE_FLASH": 0}, ("graph",)),
        ({"CUDA_GRAPH": 0}, ()),
        ({"USE_FLASH": 1}, ("kernel",)),
    ):
        kinds.clear()
        lade.config_lade(**settings)
        run(model)
        assert set(kinds) == {(), kind}


def test_the_kernel_by_itself(model, on_cuda, kernel):
    stats = run(model)
    assert (stats.used_kernel, stats.reasons.get("kernel")) == (True, None)
    assert stats.captured_steps == stats.steps - 1
    assert kernel.calls
    assert self_check._trial._num_passed
    assert not self_check._trial.reasons
    kernel.calls.clear()
    lade.config_lade(USE_FLASH=0)
    stats = run(model)
    assert (stats.used_kernel, stats.reasons.get("kernel")) == (False, None)
    assert not kernel.calls


def test_not_the_kernel_by_itself(on_cuda, kernel):
    lade.config_lade(CUDA_GRAPH=0)
    stats = run(tiny_llama(attention="eager", dtype=F32))
    assert not stats.used_kernel
    assert stats.reasons.get("kernel").startswith("blocks are not captured")
    assert not kernel.calls


def test_reasons_against_the_kernel(model, kernel, monkeypatch):
    adapter = base.ModelAdapter(model)
    monkeypatch.setattr(cuda_path, "is_proven", lambda *_: True)
    assert slow_kernel_reason(adapter, True) is None
    with monkeypatch.context() as patch:
        patch.setattr(cuda_path, "unavailable_reason", lambda: "triton is not installed")
        assert slow_kernel_reason(adapter, True) == "triton is not installed"
    with monkeypatch.context() as patch:
        patch.setattr(cuda_path, "MAX_HEAD_DIM", 8)
        assert slow_kernel_reason(adapter, True) == "the kernel takes heads of up to 8, this model has some of 12"
    self_check._trial.reasons[CPU, F32, ()] = "of another dtype"
    assert slow_kernel_reason(adapter, True) is None
    self_check._trial.reasons[CPU, F64, ()] = "of this one"
    assert slow_kernel_reason(adapter, True) == "of this one"
    monkeypatch.undo()
    monkeypatch.setattr(cuda_path, "is_proven", lambda *_: True)
    assert slow_kernel_reason(adapter, True) == "the kernel is not known to pay in float64"
    assert largest_head_dim(BloomConfig(hidden_size=48, n_head=4)) == 12
    assert largest_head_dim(SimpleNamespace(num_attention_heads=[4, 8])) == 0


@pytest.mark.parametrize(
    ("wrong", "mode"), [(1.0, "lookahead"), (1.0, "tree"), (torch.nan, "tree"), ("fails", "lookahead")]
)
def test_a_wrong_kernel_serves_nobody(wrong, mode, model, on_cuda, kernel, monkeypatch):
    """The text is plain generate()'s, the figures say why, and later calls do not try."""
    lade.config_lade(MODE=mode)
    if wrong == "fails":
        monkeypatch.setattr(kernels, "_kernel_for", lambda *_: lambda *args, **named: [][1])
        reason = "the kernel failed: IndexError: list index out of range"
    else:
        kernel.error.append(wrong)
        reason = "the kernel was off by " if wrong == wrong else "the kernel returned NaN or infinity"
    num_tried = []
    for _ in range(2):
        stats = run(model)
        assert not stats.used_kernel
        assert stats.reasons.get("kernel").startswith(reason)
        assert stats.captured_steps > 0
        num_tried.append(len(kernel.calls))
    assert num_tried[0] == num_tried[1] <= num_kinds()  # once for each kind of call
    assert stats.captured_steps == stats.steps - 1
    lade.config_lade(USE_FLASH=0)
    assert run(model).reasons.get("kernel") is None  # which was not asked for


def test_a_wrong_kernel_would_be_seen(model, on_cuda, kernel, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(kernels, "checked", lambda kernel, *args, **named: kernel(*args, **named))
    kernel.error.append(1.0)
    expected = generate_plain(model, prompt(), **NEW)
    assert not torch.equal(model.generate(**prompt(), **NEW), expected)


def num_kinds():
    """Of calls of the kernel that were tried."""
    return len(self_check._trial._num_passed) + len(self_check._trial.reasons)


def attention_inputs(q=5, group=2, dim=16, dtype=F32, **options):
    """Arguments of the block attention, for 30 tokens in a cache of 64."""
    return tensors_of(Case(q, (30,), 2 * group, 2, dim, dtype=dtype, spare=34 - q, **options))[0]


def test_each_kind_of_call_is_tried(kernel):
    """Also larger tiles: each is another kernel to Triton, and may be one too large for this GPU. The capacity of a
    cache, or the part of it that an ordinary forward sees, makes no other kind."""
    calls = [{}, {"q": 7}, {"q": 9}, {"group": 4}, {"dim": 32}, {"dtype": BF16}, {"softcap": 5.0}, {"has_sinks": True}]
    for options in calls * 2:
        assert self_check.checked(kernel, **attention_inputs(**options)).isfinite().all()
    assert num_kinds() == len(calls) - 1  # 5 and 7 tokens have the same tile
    assert len(kernel.calls) == 2 * len(calls) + num_kinds()  # and the self-checks
    inputs = attention_inputs()
    for size in (50, 35, 512):
        states = {name: inputs[name].repeat(1, 1, 8, 1)[:, :, :size] for name in ("keys", "values")}
        self_check.checked(kernel, **inputs | states)
    assert num_kinds() == len(calls) - 1


def test_nothing_is_tried_during_a_capture(kernel, monkeypatch):
    """What was tried before serves; the definition stands in for what was not."""
    inputs = attention_inputs()
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "is_capturing", lambda device: True)
        assert torch.equal(self_check.checked(kernel, **inputs), reference_block_attention(**inputs))
        assert not kernel.calls
        assert kernels.kernel_problem(CPU, F32) is None
    self_check.checked(kernel, **inputs)
    monkeypatch.setattr(self_check, "is_capturing", lambda device: True)
    kernel.calls.clear()
    self_check.checked(kernel, **inputs)
    assert len(kernel.calls) == 1
    monkeypatch.undo()
    assert not self_check.is_capturing(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@MODES
def test_on_cuda(mode, monkeypatch):
    """float32 equals plain generate() by graphs alone; 16 bits take the kernel as well, where it is available."""
    for module in (fixed, cuda_path):  # as after a check on this GPU
        monkeypatch.setattr(module, "is_proven", lambda *_: True)
    lade.config_lade(MODE=mode)
    model = tiny_llama(F32).cuda()
    for seed in range(3):
        stats = run(model, {name: tensor.cuda() for name, tensor in prompt(seed=seed).items()})
        assert (stats.captured_steps, stats.reasons.get("graph")) == (stats.steps - 1, None)
        assert stats.reasons.get("kernel") == "the kernel is not known to pay in float32"
    model = tiny_llama(BF16).cuda()
    model.generate(**{name: tensor.cuda() for name, tensor in prompt().items()}, **NEW)
    stats = lade.last_stats()
    assert (stats.captured_steps, stats.reasons.get("graph")) == (stats.steps - 1, None)
    assert stats.reasons.get("kernel") == kernels.unavailable_reason()
    assert stats.used_kernel == (kernels.unavailable_reason() is None)
