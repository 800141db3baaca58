"""One stage of `gpu_check.py`, in this process: `python -m gpu.stages STAGE --device cuda`.

Prints a line of JSON for each row: its key as `row`, and its figures.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import decode
import harness
import shapes
import torch
from torch import Tensor

import lade
from gpu import hazards, stand_in
from gpu.hazards import SIZES, figures
from lade.common.tolerance import TOLERANCE
from lade.forward.cuda import kernel as kernels
from lade.forward.cuda.graphs import capture
from lade.forward.cuda.kernel.packed_mask import FIRST, LENGTH
from lade.forward.cuda.proof import store_proof

TESTS = Path(__file__).resolve().parents[2] / "tests"
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"CUDA_GRAPH": 0, "USE_FLASH": 0},
    "captured": {"CUDA_GRAPH": 1, "USE_FLASH": 0},
    "captured, kernel": {"CUDA_GRAPH": 1, "USE_FLASH": 1},
    "left to lade": {"CUDA_GRAPH": "auto", "USE_FLASH": "auto"},
}
CHOICES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20}}
# What some families' attention has besides, and a batch's shorter rows.
VARIANTS: dict[str, dict[str, Any]] = {
    "soft cap": {"softcap": 3.0},
    "sinks": {"has_sinks": True},
    "padding": {"first_slot": 5},
}
Row = dict[str, Any]
Rows = dict[str, Callable[[], Row]]  # key of a row -> what makes it


def environment(device: str) -> Rows:
    return {"environment": lambda: harness.machine(torch.device(device), torch.float32) | {"cuda": torch.version.cuda}}


def modes(device: str) -> Rows:
    """float32 equals plain generate() token for token; bfloat16 gives the same text twice."""
    rows: Rows = {}
    model = shapes.random_model("tiny", device, torch.float32, 1024)
    for mode in ("tree", "lookahead"):
        for way, settings in WAYS.items():
            for choice, arguments in CHOICES.items():
                for batch in (2,) if device == "cpu" else (1, 3):
                    prompt = shapes.random_prompts(model, 1, batch, 24)[0]
                    case = settings | SIZES | {"MODE": mode}
                    rows[f"{mode}, {way}, {choice}, batch {batch}"] = partial(same_text, model, prompt, case, arguments)
    half = shapes.random_model("tiny", device, torch.bfloat16, 1024)
    case = WAYS["captured, kernel"] | SIZES | {"MODE": "tree"}
    rows["bfloat16 twice"] = partial(same_twice, half, shapes.random_prompts(half, 1, 1, 24)[0], case)
    return rows


def seeded(model: Any, prompt: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)
    return model.generate(**prompt, max_new_tokens=40, **arguments)


def same_text(model: Any, prompt: dict[str, Tensor], case: dict[str, Any], arguments: dict[str, Any]) -> Row:
    """With lade and without. What is asked to be captured has to be captured."""
    with lade.enabled(False):
        expected = seeded(model, prompt, arguments)
    with lade.enabled(**case):
        found = seeded(model, prompt, arguments)
    row, is_equal = figures(), torch.equal(found, expected)
    is_captured = case["CUDA_GRAPH"] != 1 or row["captured_steps"] == row["steps"] - 1
    return {"passed": is_equal and is_captured and row["fallback_reason"] is None, "equal": is_equal} | row


def same_twice(model: Any, prompt: dict[str, Tensor], case: dict[str, Any]) -> Row:
    with lade.enabled(**case):
        texts = [seeded(model, prompt, {"do_sample": False}) for _ in range(2)]
    return {"passed": torch.equal(*texts)} | figures()


def kernel(device: str) -> Rows:
    """The kernel against float64; on a CPU the plain-torch form."""
    is_small, rows = device == "cpu", {}
    dtypes = (torch.float32,) if is_small else (torch.bfloat16, torch.float16, torch.float32)
    heads = [(4, 2, 16)] if is_small else [(32, 32, 128), (32, 8, 128), (32, 4, 64), (8, 1, 256)]
    for dtype in dtypes:
        for shape in heads:
            for block in (1, 12) if is_small else (1, 8, 56, 128):
                rows[f"{dtype}, heads {shape}, {block} tokens"] = partial(kernel_row, device, shape, block, dtype)
        for name, variant in VARIANTS.items():
            rows[f"{dtype}, {name}"] = partial(kernel_row, device, heads[-1], 12, dtype, **variant)
    return rows


@torch.no_grad()
def kernel_row(
    device: str,
    shape: tuple[int, int, int],
    block: int,
    dtype: torch.dtype,
    softcap: float | None = None,
    has_sinks: bool = False,
    first_slot: int = 0,
) -> Row:
    """One block behind up to `context` committed slots, called for each length, and captured once for all.

    shape: query heads, key/value heads, head dimension.
    """
    context, (heads, kv_heads, dim) = 128 if device.startswith("cpu") else 4096, shape
    torch.manual_seed(0)
    query = torch.randn(1, heads, block, dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, 1, kv_heads, context + block, dim, device=device, dtype=dtype)
    # Candidates of 4 tokens each, behind the root: a token tree and a window have masks like this.
    token = torch.arange(block, device=device)
    visible = (token[:, None] >= token) & ((token[:, None] // 4 == token // 4) | (token == 0))
    packed = kernels.pack_mask(visible[None], torch.tensor([context], device=device))
    packed[..., FIRST] = first_slot
    sinks = torch.linspace(-3, 3, heads, device=device) if has_sinks else None
    named: dict[str, Any] = {"packed": packed, "scale": dim**-0.5, "softcap": softcap, "sinks": sinks}
    states = query, keys, values
    attend = partial(kernels.block_attention, *states, **named)
    replay = (capture if query.is_cuda else stand_in.Tape)(attend)
    errors = {"called": 0.0, "captured": 0.0}
    for length in (context, 0, 1, 63, 64, 65, context // 2 + 1):
        packed[..., LENGTH] = length
        expected = kernels.reference_block_attention(*(x.double() for x in states), **named)
        for way, found in (("called", attend()), ("captured", replay())):
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            errors[way] = max(errors[way], error if error == error else float("inf"))
    problem = kernels.kernel_problem(query.device, dtype)  # by the device with its index
    return {
        "passed": max(errors.values()) <= TOLERANCE["attention"][dtype] and problem is None,
        "errors": errors,
        "used_kernel": (kernels.unavailable_reason() is None) and query.is_cuda and problem is None,
        "problem": problem or kernels.unavailable_reason(),
    }


def tests(device: str) -> Rows:
    files = [path for path in sorted(TESTS.glob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    files = [path for path in files if device != "cpu" or path.name == "test_graphs.py"]
    return {"pytest -m gpu": partial(tested, files, device != "cpu")}


def tested(files: list[Path], must_run: bool) -> Row:
    options = ("-m", "gpu", "-p", "no:cacheprovider", "--tb=short")
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *files], capture_output=True, text=True)
    print(done.stdout[-8000:], done.stderr[-2000:], flush=True)
    end = [line for line in done.stdout.splitlines() if re.search(r"\d (passed|failed|skipped|error)", line)][-1:]
    end = end or (done.stdout + done.stderr).strip().splitlines()[-1:]
    is_right = done.returncode == 0 and (not must_run or "passed" in "".join(end))
    return {"passed": is_right, "end": end} | ({} if is_right else {"error": end})


def speed(device: str) -> Rows:
    """Milliseconds of a step on a 7B shape with random weights, by plain generate() and by the tree."""
    name, dtype = ("tiny", torch.float32) if device == "cpu" else ("7b", torch.bfloat16)
    model = shapes.random_model(name, device, dtype)
    prompts = shapes.random_prompts(model, 1, 1, 40 if device == "cpu" else 1000)
    rows: Rows = {"plain": partial(step_time, model, prompts, "plain", {})}
    ways = {way: settings for way, settings in WAYS.items() if way != "left to lade"}  # which is one of the others
    return rows | {way: partial(step_time, model, prompts, "lade", settings) for way, settings in ways.items()}


def step_time(model: Any, prompts: list[dict[str, Tensor]], name: str, settings: dict[str, Any]) -> Row:
    is_small = model.device.type == "cpu"
    common = {"max_new_tokens": 12 if is_small else 96, "do_sample": False}
    lade.log_history(clear=True)
    with lade.enabled(MODE="tree", ADAPTIVE=0, MAX_BLOCK=64, **settings):
        found = decode.compare_steps(model, prompts, {name: {}}, 1 if is_small else 3, common)
        row = found["steps"][name]
    captured = [stats.captured_steps for stats in lade.log_history()]  # some calls are for one token alone
    return row | {"reasons": found["reasons"], "captured_steps": max(captured, default=0)}


def text(device: str) -> Rows:
    """Milliseconds per token on real text, with the bundled checkpoint; lade as after this check has passed."""
    rows: Rows = {}
    dtype, limit = ("float32", 1) if device == "cpu" else ("bfloat16", 8)
    args = argparse.Namespace(
        model_path=str(harness.BUNDLED), device=device, dtype=dtype, prompts=harness.PROMPTS, limit=limit
    )
    model, tokenizer = harness.load_model(args)
    prompts = [dict(prompt) for prompt in harness.load_prompts(args, tokenizer)]
    for name in ("plain", "lade") if device == "cpu" else ("plain", "lade", "prompt_lookup", "static"):
        rows[name] = partial(token_time, model, prompts, name)
    return rows


def token_time(model: Any, prompts: list[dict[str, Tensor]], name: str) -> Row:
    is_small = model.device.type == "cpu"
    common = {"max_new_tokens": 12 if is_small else 256, "do_sample": False}
    with lade.enabled(**({} if is_small else WAYS["captured, kernel"])):
        trials = decode.run_methods(model, prompts, {name: decode.METHODS[name]}, 1 if is_small else 3, common)[name]
    everything = list(range(len(prompts)))
    per_token = harness.spread([1e3 / trial.speed(everything) for trial in trials])
    return {"milliseconds_per_token": per_token, "tokens_per_step": trials[0].tokens_per_step(everything)}


def measure(key: str, function: Callable[[], Row]) -> None:
    """Print a row: what `function` returns, or what it raises."""
    try:
        row = function()
    except (Exception, SystemExit) as problem:  # the second is how a benchmark refuses
        traceback.print_exception(problem)
        row = {"passed": False, "error": f"{type(problem).__name__}: {problem}".split("\n", 1)[0][:300]}
    print(json.dumps({"row": key} | row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage")
    parser.add_argument("--device", required=True)
    parser.add_argument("--proof", type=json.loads, help="what has passed, as JSON: stored for later calls on this GPU")
    args = parser.parse_args()
    if args.stage == "proof":
        path = store_proof(torch.device(args.device), args.proof)
        print(json.dumps({"row": "proof", "stored": str(path)} | args.proof))
        return
    if args.device == "cpu":
        torch.set_num_threads(1)
        stand_in.install()
    lade.augment_all()
    lade.config_lade(SHARE=0)  # no call learns from another
    rows_of: Any = globals().get(args.stage) or hazards.STAGES[args.stage]
    with lade.enabled():
        for key, function in rows_of(args.device).items():
            measure(key, function)


if __name__ == "__main__":
    main()
