"""Several processes that share each step: tokens per step, each rank's block, bytes sent, and whether outputs stay
identical.

    python benchmarks/parallel.py --workers 1,2,3,4 --settings 5,7,7:3,2,4

Starts K processes for each K, on a CPU with gloo, on GPUs with nccl where there are K of them. Each setting (N,W,G)
decodes every prompt greedily and once per seed with sampling. "identical" compares all ranks' tokens with plain
generate() in one process. "block" is the mean over steps of a rank's query tokens, that of the rank with most of them
first. Bytes are payloads that a rank hands to the network, over all ranks, per step after the first. Speed on a CPU
that all processes share says nothing. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import torch

import lade


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def triples(text: str) -> list[list[int]]:
    found = [integers(part) for part in text.split(":")]
    if any(len(part) != 3 for part in found):
        raise argparse.ArgumentTypeError(f"settings must be N,W,G joined by colons, got {text!r}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.set_defaults(dtype="float32", limit=4, max_new_tokens=64)
    parser.add_argument(
        "--workers", type=integers, default=[1, 2, 3, 4], help="K, separated by commas; 1 is always run"
    )
    parser.add_argument("--settings", type=triples, default=[[5, 7, 7], [5, 15, 15], [3, 2, 4]], help="N,W,G:N,W,G:...")
    parser.add_argument("--seeds", type=integers, default=[0, 1], help="for sampling at --temperature")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="as in config_lade")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # this process is one of the ranks
    return parser.parse_args()


def run_rank(args: argparse.Namespace) -> None:
    """Decode everything as one of the ranks, and write down what came out."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.device == "cuda":
        args.device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    if torch.device(args.device).type == "cuda" and torch.cuda.device_count() < workers:
        args.backend = "gloo"  # nccl does not take two ranks on one card
    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    lade.augment_all()
    ways: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}}
    ways |= {f"seed {seed}": {"do_sample": True, "temperature": args.temperature} for seed in args.seeds}
    calls = []
    for level, window, guess in args.settings:
        lade.config_lade(
            LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guess, DIST_WORKERS=workers, backend=args.backend
        )
        for way, arguments in ways.items():
            for index, inputs in enumerate(prompts):
                call = {"settings": [level, window, guess], "way": way, "prompt": index}
                calls.append(call | one_call(model, inputs, way, arguments | {"max_new_tokens": args.max_new_tokens}))
                if workers == 1:
                    with harness.use_lade(False):
                        seed_for(way)
                        output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **arguments)
                    calls[-1]["plain"] = output[0, inputs["input_ids"].shape[1] :].tolist()
    result = {"calls": calls, "environment": harness.environment(model)}
    (args.results / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def seed_for(way: str) -> None:
    torch.manual_seed(int(way.split()[-1]) if way.startswith("seed") else 0)


def one_call(model: Any, inputs: Any, way: str, arguments: dict[str, Any]) -> dict[str, Any]:
    with harness.use_lade(True):
        seed_for(way)
        harness.synchronize(model)
        started = time.perf_counter()
        output = model.generate(**inputs, **arguments)
        harness.synchronize(model)
        seconds = time.perf_counter() - started
    stats = lade.last_stats()
    if stats is None or stats.fallback_reason is not None:
        raise RuntimeError(f"lookahead did not run: {stats}")
    return {
        "tokens": output[0, inputs["input_ids"].shape[1] :].tolist(),
        "steps": stats.steps,
        "block_tokens": sum(stats.block_tokens),
        "sent": dict(stats.sent_bytes),
        "seconds": seconds,
    }


def run_ranks(workers: int) -> list[dict[str, Any]]:
    """Results of `workers` processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
        command = [sys.executable, *launcher, __file__, *sys.argv[1:], "--results", folder]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1"} | os.environ)
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]


def figures_of(
    by_rank: list[list[dict[str, Any]]], alone: list[dict[str, Any]], has_own_devices: bool
) -> dict[str, Any]:
    """One line of the table. by_rank: the same calls on each rank. alone: in one process."""
    first, size = by_rank[0], len(by_rank)
    steps = sum(call["steps"] for call in first)
    later_steps = max(1, steps - len(first))
    sent: Counter[str] = Counter()
    for calls in by_rank:
        for call in calls:
            sent.update(call["sent"])
    tokens = sum(len(call["tokens"]) for call in first)
    steps_alone = sum(call["steps"] for call in alone)
    is_same = [all(calls[i]["tokens"] == call["plain"] for calls in by_rank) for i, call in enumerate(alone)]
    speed = tokens / sum(call["seconds"] for call in first)
    blocks = sorted((sum(call["block_tokens"] for call in calls) / later_steps for calls in by_rank), reverse=True)
    return {
        "workers": size,
        "calls": len(first),
        "identical": sum(is_same) / len(is_same),
        "tokens_per_step": round(tokens / steps, 4),
        "tokens_per_step_to_one_process": round(steps_alone / steps, 4),
        "block_tokens_by_rank": [round(mean, 2) for mean in blocks],
        "bytes_per_step": {what: round(count / later_steps, 1) for what, count in sorted(sent.items())},
        # Processes that share a CPU's cores have no speed worth writing down.
        **({"tokens_per_second": round(speed, 2)} if has_own_devices else {}),
    }


def calls_of(result: dict[str, Any], settings: list[int], way: str) -> list[dict[str, Any]]:
    is_greedy = way == "greedy"
    return [c for c in result["calls"] if c["settings"] == settings and (c["way"] == "greedy") == is_greedy]


def main() -> None:
    args = parse()
    if args.results:
        run_rank(args)
        return
    results = {workers: run_ranks(workers) for workers in sorted({1, *args.workers})}
    rows = []
    print(
        f"{'N,W,G':>9} {'way':>7} {'K':>2} {'identical':>9} {'tokens/step':>11} {'to K=1':>7} {'block':>6} "
        f"{'even':>6}  bytes per step"
    )
    for settings in args.settings:
        for way in ("greedy", "sampled"):
            for workers, ranks in results.items():
                chosen = [calls_of(rank, settings, way) for rank in [*ranks, results[1][0]]]
                if not chosen[0]:
                    continue
                row = {"settings": settings, "way": way, **figures_of(chosen[:-1], chosen[-1], args.device != "cpu")}
                level, window, guess = settings
                row["even_share"] = round((level - 1) * (window + guess) / workers, 2)
                rows.append(row)
                sent = ", ".join(f"{what} {count:,.0f}" for what, count in row["bytes_per_step"].items())
                print(
                    f"{level},{window},{guess}".rjust(9)
                    + f" {way:>7} {workers:>2} {row['identical']:>9.0%} {row['tokens_per_step']:>11.3f} "
                    f"{row['tokens_per_step_to_one_process']:>7.3f} {row['block_tokens_by_rank'][0]:>6.1f} "
                    f"{row['even_share']:>6.1f}  {sent or '-'}"
                )
    figures = {"benchmark": "parallel", "environment": results[1][0]["environment"], "prompts": args.limit}
    figures |= {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "rows": rows}
    harness.finish(figures, args.out)


if __name__ == "__main__":
    main()
