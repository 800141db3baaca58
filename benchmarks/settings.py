"""Which (N, W, G) pays on this machine: tokens per second of lade over a grid, as a ratio to plain generate().

python benchmarks/settings.py --levels 3,4,5 --windows 1,2,4 --guesses 1,2,4 --limit 10
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import harness

import lade


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.add_argument("--levels", type=integers, default=[3, 4, 5])
    parser.add_argument("--windows", type=integers, default=[1, 2, 4, 7])
    parser.add_argument("--guesses", type=integers, default=[1, 2, 4, 7])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    lade.augment_all()
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    rows: list[dict[str, Any]] = []
    figures = {
        "benchmark": "settings",
        "environment": harness.environment(model),
        "prompts": len(prompts),
        "rows": rows,
    }
    with harness.reporting(figures, args.out):
        measure_rows(model, prompts, args, common, rows)
        rows.sort(key=lambda row: -row["ratio_to_plain"]["median"])


def measure_rows(
    model: Any, prompts: list[Any], args: argparse.Namespace, common: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """A row for each setting, added to `rows`."""
    print(f"{'N':>3} {'W':>3} {'G':>3} {'block':>6} {'tokens/step':>12} {'ratio':>7}")
    for level, window, guess in itertools.product(args.levels, args.windows, args.guesses):
        lade.config_lade(LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guess)
        runs = harness.run_methods(model, prompts, {"plain": {}, "lade": {}}, args.trials, common)
        found = harness.compare(runs["lade"], runs["plain"])
        run, ratio = runs["lade"][0], found["ratio_to_plain"]
        row = {
            "LEVEL": level,
            "WINDOW_SIZE": window,
            "GUESS_SET_SIZE": guess,
            "mean_block_tokens": round(run.block_tokens / max(1, sum(run.steps) - len(prompts)), 2),
            "tokens_per_step": found["tokens_per_step"],
            "ratio_to_plain": ratio,
        }
        rows.append(row)
        print(
            f"{level:>3} {window:>3} {guess:>3} {row['mean_block_tokens']:>6.1f} {row['tokens_per_step']:>12.3f} "
            f"{ratio['median']:>7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
