"""Is it right? Every mode beside plain `generate()`, the kernel beside float64, the GPU's own tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attention
import harness
import shapes
import torch
from torch import Tensor

import lade
from gpu.child import Run
from gpu.record import Row
from gpu.stand_in import Tape
from lade import kernels
from lade.forward.graphs import capture
from lade.kernels.packed_mask import FIRST, LENGTH
from lade.tolerance import TOLERANCE

TESTS = Path(__file__).resolve().parents[2] / "tests"
SIZES = {"LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 2, "ADAPTIVE": 0}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"CUDA_GRAPH": 0, "USE_FLASH": 0},
    "captured": {"CUDA_GRAPH": 1, "USE_FLASH": 0},
    "captured with the kernel": {"CUDA_GRAPH": 1, "USE_FLASH": 1},
    "left to lade": {"CUDA_GRAPH": "auto", "USE_FLASH": "auto"},
}
# What some families' attention has besides, and a batch's shorter rows.
VARIANTS: dict[str, dict[str, Any]] = {
    "soft cap": {"softcap": 3.0},
    "sinks": {"has_sinks": True},
    "padding": {"first_slot": 5},
}
CHOICES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20}}


def environment(run: Run) -> None:
    device = torch.device(run.device)
    record = run.record
    record.measure(
        "environment", lambda: {"environment": harness.machine(device, torch.float32) | {"cuda": torch.version.cuda}}
    )
    content = record.rows["environment"].get("environment", {})
    for name, value in content.items():  # the summary shows them
        record.rows["environment"][name] = value
    if run.is_stand_in:
        record.add("bandwidth", bytes_per_second=None)
    else:
        record.measure("bandwidth", lambda: {"bytes_per_second": attention.copy_bandwidth()})
    for name, action in small_actions(device):
        record.measure(name, partial(microseconds, action, device))


def small_actions(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a step on the host is made of."""
    row, is_cuda = torch.zeros(64, device=device), device.type == "cuda"
    host = torch.zeros(64, pin_memory=is_cuda)
    yield "launch of a small kernel", lambda: row.add_(1)
    yield "copy to the device, pageable", lambda: row.copy_(torch.zeros(64))
    yield "copy to the device, pinned", lambda: row.copy_(host, non_blocking=True)
    yield "copy to the host and wait", row.tolist
    replay = (capture if is_cuda else Tape)(lambda: row * 2)
    yield "replay of a small graph", replay


def microseconds(action: Callable[[], Any], device: torch.device, repeats: int = 300) -> Row:
    """Host time of one call, and the time of one in a row of them."""
    for _ in range(10):
        action()
    harness.cost.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    returned = time.perf_counter()
    harness.cost.synchronize(device)
    ended = time.perf_counter()
    return {"host_microseconds": (returned - began) * 1e6 / repeats, "microseconds": (ended - began) * 1e6 / repeats}


def modes(run: Run) -> None:
    """float32 equals plain generate() token for token; bfloat16 gives the same text twice."""
    model = shapes.random_model("tiny", run.device, torch.float32, 1024)
    for mode in ("tree", "lookahead"):
        for way, settings in WAYS.items():
            for choice, arguments in CHOICES.items():
                for batch in run.pick((1, 3), (2,)):
                    key = f"{mode}, {way}, {choice}, batch {batch}"
                    prompt = shapes.random_prompts(model, 1, batch, 24)[0]
                    case = settings | SIZES | {"MODE": mode}
                    run.record.measure(key, partial(same_text, model, prompt, case, arguments))
    model = shapes.random_model("tiny", run.device, torch.bfloat16, 1024)
    prompt = shapes.random_prompts(model, 1, 1, 24)[0]
    for mode in ("tree", "lookahead"):
        case = WAYS["captured with the kernel"] | SIZES | {"MODE": mode}
        run.record.measure(f"{mode}, bfloat16 twice", partial(same_twice, model, prompt, case))


def seeded(model: Any, prompt: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)
    return model.generate(**prompt, max_new_tokens=40, **arguments)


def figures() -> Row:
    stats = lade.last_stats()
    assert stats is not None
    names = ("steps", "captured_steps", "compiled_steps", "used_kernel")
    return {name: getattr(stats, name) for name in names}


def same_text(model: Any, prompt: dict[str, Tensor], case: dict[str, Any], arguments: dict[str, Any]) -> Row:
    """With lade and without. What is captured by wish has to be captured."""
    with harness.use_lade(False):
        expected = seeded(model, prompt, arguments)
    with lade.config.temporary_settings(**case):
        found = seeded(model, prompt, arguments)
    row, stats = figures(), lade.last_stats()
    is_equal = torch.equal(found, expected)
    went = stats.fallback_reason is None and (case["CUDA_GRAPH"] != 1 or row["captured_steps"] == row["steps"] - 1)
    return {"passed": is_equal and went, "equal": is_equal} | row


def same_twice(model: Any, prompt: dict[str, Tensor], case: dict[str, Any]) -> Row:
    with lade.config.temporary_settings(**case):
        texts = [seeded(model, prompt, {"do_sample": False}) for _ in range(2)]
    return {"passed": torch.equal(*texts)} | figures()


def kernel(run: Run) -> None:
    """On a CPU the plain-torch form."""
    dtypes = run.pick((torch.bfloat16, torch.float16, torch.float32), (torch.float32,))
    heads = run.pick([(32, 32, 128), (32, 8, 128), (32, 4, 64), (8, 1, 256)], [(4, 2, 16)])
    for dtype in dtypes:
        for shape in heads:
            for block in run.pick((1, 8, 56, 128), (1, 12)):
                key = f"{str(dtype)[6:]}, heads {shape}, {block} tokens"
                run.record.measure(key, partial(kernel_row, run, shape, block, dtype))
        if dtype == dtypes[0]:
            for name, variant in VARIANTS.items():
                key = f"{str(dtype)[6:]}, {name}"
                run.record.measure(key, partial(kernel_row, run, heads[-1], 12, dtype, **variant))


@torch.no_grad()
def kernel_row(
    run: Run,
    shape: tuple[int, int, int],
    block: int,
    dtype: torch.dtype,
    softcap: float | None = None,
    has_sinks: bool = False,
    first_slot: int = 0,
) -> Row:
    """Called once for each length, and captured once for all."""
    context = run.pick(4096, 128)  # no length may exceed it
    problem = attention.Problem(shape, context, block, run.device, dtype)
    states = problem.query, problem.keys[0], problem.values[0]
    problem.packed[..., FIRST] = first_slot
    sinks = torch.linspace(-3, 3, shape[0], device=run.device) if has_sinks else None
    named: dict[str, Any] = {"scale": problem.scale, "softcap": softcap, "sinks": sinks}
    attend = partial(kernels.block_attention, packed=problem.packed, **named)
    replay = (capture if states[0].is_cuda else Tape)(partial(attend, *states))
    errors: dict[str, float] = {"called": 0.0, "captured": 0.0}
    for length in (context, 0, 1, 63, 64, 65, context // 2 + 1):
        problem.packed[..., LENGTH] = length
        exact = (x.double() for x in states)
        expected = kernels.reference_block_attention(*exact, problem.packed, **named)
        for way, found in (("called", attend(*states)), ("captured", replay())):
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            errors[way] = max(errors[way], error if error == error else float("inf"))
    device = states[0].device  # with its index, by which problems are stored
    problem_found = kernels.kernel_problem(device, dtype)
    return {
        "passed": max(errors.values()) <= TOLERANCE["attention"][dtype] and problem_found is None,
        "errors": errors,
        "used_kernel": kernels.is_available() and device.type == "cuda" and problem_found is None,
        "problem": problem_found or kernels.unavailable_reason(),
    }


def gpu_tests(run: Run) -> None:
    files = [path for path in sorted(TESTS.glob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    for path in run.pick(files, [path for path in files if path.name == "test_graphs.py"]):
        run.record.measure(path.name, partial(tested, path, not run.is_stand_in))


def tested(path: Path, must_run: bool) -> Row:
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")  # of pytest itself: it may have no plugins
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
    )
    print(done.stdout[-8000:], done.stderr[-2000:], flush=True)
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    end = next((line for line in reversed(lines) if " in " in line), lines[-1] if lines else "no output")
    is_right = done.returncode == 0 and (not must_run or "passed" in end)
    return {"passed": is_right, "end": end, "failed": failed} | ({} if is_right else {"error": (failed or [end])[0]})
