"""A GPU's first ten minutes: is the kernel right, are captures right, and what does a step cost? One command, results
after every row.

    python benchmarks/gpu_check.py --out DIR
    python benchmarks/gpu_check.py --out DIR --seconds 1800 --only costs,speeds,static
    python benchmarks/gpu_check.py --out DIR --device cpu --shape tiny

Each stage is a process of its own with a time limit and a log. DIR/STAGE.json is written after every row;
DIR/summary.json and DIR/summary.md after every stage, with a verdict per claim. A stage that no longer fits into
--seconds is skipped. A second run with the same DIR goes on where the first one stopped: stages that were right are not
repeated, nor are rows. Needs no network. Exits with 1 if a check failed or a stage ran out of time.

On a CPU with --shape tiny every stage runs on small models, and CUDA graphs are stood in for: that tests the command,
not a GPU. This process imports no torch, so that nothing a stage does can end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.plan import STAGES, Stage
from gpu.record import Row, read_json
from gpu.summary import has_failed, stage_rows, write_summary

FOLDER = Path(__file__).resolve().parent
SECONDS_TO_END = 5  # between the request to stop and the end of a stage that does not
PATIENCE = 2  # times as long as planned a stage may take: programs start slowly on a machine that has just started
SLOWER_WITHOUT_GPU = 6  # the same without a GPU


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for the results; one of an earlier run goes on"
    )
    parser.add_argument("--seconds", type=float, default=570, help="for all stages together")
    parser.add_argument("--only", help=f"stages, separated by commas, of {','.join(stage.name for stage in STAGES)}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", choices=["tiny"], help="in place of the models' real shapes")
    args = parser.parse_args()
    if args.seconds <= 0:
        parser.error(f"--seconds must be more than 0, got {args.seconds}")
    names = [stage.name for stage in STAGES]
    args.stages = args.only.split(",") if args.only else names
    unknown = sorted(set(args.stages) - set(names))
    if unknown:
        parser.error(f"--only takes names of {', '.join(names)}, got {unknown[0]!r}")
    if args.device == "cpu" and args.shape != "tiny":
        parser.error("--device cpu needs --shape tiny: the real shapes are for a GPU")
    return args


def environment(out: Path) -> dict[str, str]:
    """Of the stages: no network, and what lade measures is kept with the results."""
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return os.environ | offline | {"PYTHONPATH": path, "LADE_CACHE": str(out / "step-costs"), "PYTHONUNBUFFERED": "1"}


def child_command(stage: Stage, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "gpu.child", stage.name, "--out", str(args.out), "--device", args.device]
    return command + (["--shape", args.shape] if args.shape else [])


def run_stage(stage: Stage, args: argparse.Namespace, limit: float) -> Row:
    """Run a stage in a process of its own. Returns its status and seconds."""
    began = time.monotonic()
    with open(args.out / f"{stage.name}.log", "w", encoding="utf-8") as log:
        # A session of its own: what it starts ends with it.
        process = subprocess.Popen(
            child_command(stage, args), stdout=log, stderr=log, env=environment(args.out), start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    failed = code != 0 or has_failed(stage_rows(args.out)[stage.name].values())
    status = "timeout" if code is None else "failed" if failed else "ok"
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Also what it has started, in the same session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def limit_of(stage: Stage, args: argparse.Namespace, seconds_left: float) -> float | None:
    """How long a stage may take; None where less than half of what is planned for it is left."""
    granted = stage.seconds * (SLOWER_WITHOUT_GPU if args.device == "cpu" else PATIENCE)
    return None if seconds_left < stage.seconds / 2 else min(granted, seconds_left)


def show(name: str, state: Row, content: dict[str, Any]) -> None:
    row = next(row for row in content["stages"] if row["stage"] == name)
    error = f"  {row['first_error']}" if row["first_error"] else ""
    print(f"{name:<18} {state['status']:<8} {state['seconds']:>6.1f} s  {row['rows']:>3} rows{error}", flush=True)


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stop)
    settings = {"seconds": args.seconds, "only": args.only, "device": args.device, "shape": args.shape}
    earlier = read_json(args.out / "summary.json") or {}
    if earlier and any(earlier["settings"][name] != settings[name] for name in ("device", "shape")):
        raise SystemExit(f"--out must be a folder of a run with the same --device and --shape, got {args.out}")
    states: dict[str, Row] = {
        row["stage"]: {"status": row["status"], "seconds": row["seconds"]} for row in earlier.get("stages", ())
    }
    began, content = time.monotonic(), write_summary(args.out, states, settings, args.device == "cpu")
    is_stopped = False
    try:
        for stage in STAGES:
            if stage.name not in args.stages or states.get(stage.name, {}).get("status") == "ok":
                continue
            limit = limit_of(stage, args, args.seconds - (time.monotonic() - began))
            states[stage.name] = {"status": "stopped", "seconds": 0.0}
            states[stage.name] = (
                {"status": "skipped", "seconds": 0.0} if limit is None else run_stage(stage, args, limit)
            )
            content = write_summary(args.out, states, settings, args.device == "cpu")
            show(stage.name, states[stage.name], content)
    except KeyboardInterrupt:
        content = write_summary(args.out, states, settings, args.device == "cpu")
        print("stopped; the same command goes on from here", flush=True)
        is_stopped = True
    for row in content["claims"]:
        print(f"{row['verdict']:<8} {row['claim']} ({row['by']})")
    bad = [name for name, state in states.items() if state["status"] in ("failed", "timeout")]
    print(f"summary: {args.out / 'summary.md'}")
    return 130 if is_stopped else 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
