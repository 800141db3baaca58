"""A GPU's first ten minutes: are kernel, CUDA graphs and static shapes right, and is lade faster than plain generate()?

    python benchmarks/gpu_check.py --out gpu_check.json
    python benchmarks/gpu_check.py --out gpu_check.json --only kernel,speed

Each stage is a process of its own with a time limit and a log beside the result. The JSON file is written after every
stage: environment, a verdict per question (true, false, or null where that was not measured), and the rows of each
stage. What has passed is stored in lade's cache folder, and "auto" then uses it on this GPU. Needs no network. Exits
with 1 if a check failed or a stage ran out of time.

With --device cpu every stage runs on small models, and CUDA graphs are stood in for: that tests the command, not a GPU.
This process imports no torch, so that nothing a stage does can end it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
HAZARDS = ("recording", "eviction", "ended_thread", "out_of_memory", "two_threads")
STAGES = {  # -> seconds that it may take on a GPU
    "environment": 60,
    "modes": 120,
    "kernel": 120,
    **dict.fromkeys(HAZARDS, 60),
    "tests": 300,
    "speed": 240,
    "text": 240,
}
SLOWER_ON_CPU = 6  # times as long a stage may take there
SECONDS_TO_END = 5  # between the request to stop and the end of a stage that does not
Row = dict[str, Any]  # `passed`: whether a check held; `error`: why there are no figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="default: %(default)s")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, separated by commas; default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: %(default)s")
    args = parser.parse_args()
    args.stages = args.only.split(",")
    unknown = sorted(set(args.stages) - set(STAGES))
    if unknown:
        parser.error(f"--only takes names of {', '.join(STAGES)}, got {unknown[0]!r}")
    if not args.out.parent.is_dir():
        parser.error(f"--out must lie in a folder that exists, got {str(args.out)!r}")
    return args


def command_of(stage: str, args: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", "gpu.stages", stage, "--device", args.device]


def run_stage(stage: str, args: argparse.Namespace, seconds: float, *options: str) -> dict[str, Any]:
    """Run a stage in a process of its own. Returns its status, seconds and rows."""
    began, path = time.monotonic(), args.out.with_suffix(f".{stage}.log")
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    with open(path, "w", encoding="utf-8") as log:
        # A session of its own: what it starts ends with it.
        process = subprocess.Popen(
            [*command_of(stage, args), *options], stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[str, Row] = {}
    for line in lines:
        if line.startswith('{"row": '):
            row = json.loads(line)
            rows[row.pop("row")] = row
    failed = [f"{key}: {row.get('error', 'check failed')}" for key, row in rows.items() if row.get("passed") is False]
    if code:
        failed.append(next((line for line in reversed(lines) if line and not line[0].isspace()), f"exit status {code}"))
    status = "timeout" if code is None else "failed" if failed else "ok"
    found = {"status": status, "seconds": round(time.monotonic() - began, 1), "rows": rows}
    return found | ({"error": failed[0][:300]} if failed else {})


def end(process: subprocess.Popen[bytes]) -> None:
    """End the stage and its own child processes, which are in the same session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def is_right(stages: dict[str, Any], *names: str, proof: str | None = None) -> bool | None:
    """True if these stages passed, None if they have not all run. proof: a figure that one row must have."""
    found = [stages[name] for name in names if name in stages]
    if any(stage["status"] == "failed" for stage in found):
        return False
    rows = [row for stage in found for row in stage["rows"].values()]
    is_whole = len(found) == len(names) and all(stage["status"] == "ok" for stage in found)
    return True if is_whole and (proof is None or any(row.get(proof) for row in rows)) else None


def is_faster(stages: dict[str, Any], stage: str, name: str, other: str, figure: str) -> bool | None:
    """True if a method has the lower median of a figure, None if only one was measured."""
    rows = stages.get(stage, {}).get("rows", {})
    medians = [rows.get(key, {}).get(figure, {}).get("median") for key in (name, other)]
    return None if None in medians else medians[0] < medians[1]


def verdicts(stages: dict[str, Any], is_stand_in: bool) -> dict[str, bool | None]:
    """is_stand_in: graphs were stood in for, so that times and skipped tests say nothing about a GPU."""
    found = {
        "every mode gives plain generate()'s tokens": is_right(stages, "modes"),
        "the kernel is right": is_right(stages, "kernel", proof="used_kernel"),
        "CUDA graphs are right": is_right(stages, "modes", *HAZARDS, proof="captured_steps"),
    }
    step, token = "milliseconds_per_step", "milliseconds_per_token"
    timed = {
        "the GPU's own tests pass": is_right(stages, "tests"),
        "7B: the kernel makes a captured step faster": is_faster(stages, "speed", "captured, kernel", "captured", step),
        "7B: capturing makes a step faster": is_faster(stages, "speed", "captured", "eager", step),
        "7B: a step of the tree is faster than one of plain": is_faster(
            stages, "speed", "captured, kernel", "plain", step
        ),
        "text: lade is faster than plain": is_faster(stages, "text", "lade", "plain", token),
        "text: lade is faster than a static cache under compile": is_faster(stages, "text", "lade", "static", token),
    }
    return found | (dict.fromkeys(timed) if is_stand_in else timed)


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def proof_of(found: dict[str, bool | None]) -> dict[str, bool]:
    """What lade may use on this GPU by default: right, and not slower than without; empty where that is not known.

    What is missing beside a failure counts as one.
    """
    proof = {}
    for name, right, faster in (
        ("graph", "CUDA graphs are right", "7B: capturing makes a step faster"),
        ("kernel", "the kernel is right", "7B: the kernel makes a captured step faster"),
    ):
        if found[right] is not None:
            proof[name] = bool(found[right]) and found[faster] is not False
    return proof if len(proof) == 2 or False in proof.values() else {}


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, stop)
    stages: dict[str, Any] = {}
    content: dict[str, Any] = {"benchmark": "gpu_check", "is_stand_in": args.device == "cpu"}
    is_stopped = False
    try:
        for stage in args.stages:
            stages[stage] = run_stage(stage, args, STAGES[stage] * (SLOWER_ON_CPU if args.device == "cpu" else 1))
            content |= {"environment": stages.get("environment", {}).get("rows", {}).get("environment")}
            content |= {"verdicts": verdicts(stages, args.device == "cpu"), "stages": stages}
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            error = stages[stage].get("error", "")
            print(f"{stage:<14} {stages[stage]['status']:<8} {stages[stage]['seconds']:>6.1f} s  {error}", flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)
        is_stopped = True
    found = content.get("verdicts", {})
    if found and args.device == "cuda" and (proof := proof_of(found)):
        stages["proof"] = run_stage("proof", args, STAGES["environment"], "--proof", json.dumps(proof))
    for question, verdict in found.items():
        print(f"{ {True: 'yes', False: 'NO', None: 'unknown'}[verdict]:<8} {question}")
    print(f"result: {args.out}")
    return 130 if is_stopped else int(any(found["status"] != "ok" for found in stages.values()))


if __name__ == "__main__":
    sys.exit(main())
