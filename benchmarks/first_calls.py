"""A new process and an empty cache folder: every prompt once by each method, from the first call on.

    python benchmarks/first_calls.py --model_path MODEL --dtype float32 --set code=HumanEval.jsonl
    python benchmarks/first_calls.py --model_path MODEL --dtype bfloat16 --set chat=questions.jsonl --temperature 0.7

No call is warmed up but one of plain generate(), no prompt comes up again for the same method, and the prompts of the
sets take turns, the methods a random order. lade packs weights while it is timed, and keeps its memory from call to
call, as in a user's program; `lade_cold` begins each call with an empty memory, and the blocks of `lade_8` have 8
tokens each. Ratios are of tokens per second, to plain generate() on the same prompt, next to it in time: in half
precision a text may diverge and end earlier or later. Also says how much memory the process takes before, after the
calls, and after restore_all(). Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import harness
import torch

import lade

ARGUMENTS = {"prompt_lookup": {"prompt_lookup_num_tokens": 5}}  # of generate()
FIXED: dict[str, dict[str, Any]] = {f"lade_{q}": {"ADAPTIVE": 0, "MAX_BLOCK": q} for q in (4, 8, 16, 32)}
SETTINGS: dict[str, dict[str, Any]] = {"lade": {}, "lade_cold": {"SHARE": 0}} | FIXED  # of lade
# Of lade's calls. The drafter's share is of the time after the prompt's forward.
STATISTICS: dict[str, Callable[[lade.GenerationStats], float]] = {
    "tokens_per_step": lambda stats: stats.tokens_per_step,
    "block_tokens": lambda stats: mean(stats.block_tokens or [1]),
    "drafter_share": lambda stats: (
        stats.draft_seconds / ((stats.draft_seconds + stats.forward_seconds + stats.verify_seconds) or 1.0)
    ),
}


def generate(
    model: Any, inputs: dict[str, torch.Tensor], method: str, common: dict[str, Any], memory: Any = None
) -> tuple[list[int], float]:
    """The new tokens, and seconds. memory: the lade.Memory of this method; None for the model's own."""
    switched = lade.enabled(**SETTINGS[method]) if method in SETTINGS else lade.enabled(False)
    with switched, nullcontext() if memory is None else memory.active():
        torch.manual_seed(0)
        harness.synchronize(model)
        began = time.perf_counter()
        output = model.generate(**inputs, **common, **ARGUMENTS.get(method, {}))
        harness.synchronize(model)
        seconds = time.perf_counter() - began
    return output[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def run(
    model: Any, sets: dict[str, list[Any]], methods: list[str], common: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Append one row per prompt, in the order of the calls."""
    # No method may learn a prompt's text from another.
    memories = {method: lade.Memory() for method in methods if method in FIXED}
    generate(model, {name: part[:, :8] for name, part in next(iter(sets.values()))[0].items()}, "plain", common)
    for place in range(max(map(len, sets.values()))):
        for name, prompts in sets.items():
            if place >= len(prompts):
                continue
            found, own = {}, {}
            # The first call is the one that packs; later no method always follows the same one.
            for method in Random(len(rows)).sample(methods, len(methods)) if rows else methods:
                found[method] = generate(model, prompts[place], method, common, memories.get(method))
                if method in SETTINGS:
                    stats = lade.last_stats()
                    assert stats is not None
                    assert stats.fallback_reason is None, stats.fallback_reason
                    own[method] = {statistic: round(of(stats), 4) for statistic, of in STATISTICS.items()}
            expected, seconds = found["plain"]
            row: dict[str, Any] = {"set": name, "tokens": len(expected), "plain_seconds": round(seconds, 3)}
            for method in methods[1:]:
                tokens, own_seconds = found[method]
                row[f"{method}_tokens"] = len(tokens)
                row[f"{method}_ratio"] = round(len(tokens) / own_seconds / (len(expected) / seconds), 3)
                row[f"{method}_identical"] = tokens == expected
                if method in own:
                    row |= {f"{method}_{statistic}": value for statistic, value in own[method].items()}
            rows.append(row)
            print(row, flush=True)


def summary(rows: list[dict[str, Any]], methods: list[str]) -> dict[str, Any]:
    """By set and for all: mean and worst ratios, tokens per step, identical texts; and the first four calls."""
    figures: dict[str, Any] = {}
    for name in dict.fromkeys([*(row["set"] for row in rows), "all"]):
        chosen = [row for row in rows if name in (row["set"], "all")]
        found: dict[str, Any] = {"prompts": len(chosen)}
        for method in methods[1:]:
            ratios = [row[f"{method}_ratio"] for row in chosen]
            found[method] = {"mean": round(mean(ratios), 2), "worst": min(ratios)}
            found[method]["identical"] = sum(row[f"{method}_identical"] for row in chosen)
            for statistic in STATISTICS if method in SETTINGS else ():
                found[method][statistic] = round(mean(row[f"{method}_{statistic}"] for row in chosen), 3)
        figures[name] = found
        print(f"{name:<10} {found}")
    figures["first_four_lade_ratios"] = [row["lade_ratio"] for row in rows[:4]]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.add_argument(
        "--set", action="append", required=True, help="NAME=FILE of prompts, more than once for several"
    )
    parser.add_argument("--temperature", type=float, help="sample, with seed 0 for each prompt; greedy without it")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    parser.add_argument("--methods", type=lambda text: ["plain", *text.split(",")], default=["plain", "lade"])
    args = parser.parse_args()
    unknown = set(args.methods) - {"plain", *ARGUMENTS, *SETTINGS}
    if unknown or "lade" not in args.methods:
        known = ", ".join([*ARGUMENTS, *SETTINGS])
        parser.error(f"--methods must be of {known}, lade among them, got {','.join(args.methods[1:])}")
    model, tokenizer = harness.load_model(args)
    sets = {}
    for name, file in (given.split("=", 1) for given in args.set):
        args.prompts = Path(file)
        sets[name] = harness.load_prompts(args, tokenizer)
    common: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature is not None}
    if args.temperature is not None:
        common |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    common["repetition_penalty"] = 1.0
    lade.augment_all()
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {
        "benchmark": "first_calls",
        "environment": harness.environment(model),
        "settings": common,
        "rows": rows,
    }
    resident = {"loaded": harness.resident_mib()}
    with tempfile.TemporaryDirectory() as folder, harness.reporting(figures, args.out):
        os.environ["LADE_CACHE"] = folder
        run(model, sets, args.methods, common, rows)
        resident["with lade"] = harness.resident_mib()
        lade.restore_all()
        resident["after restore_all()"] = harness.resident_mib()
        print("resident MiB", resident)
        figures["resident_mib"] = resident
        figures |= summary(rows, args.methods)


if __name__ == "__main__":
    main()
