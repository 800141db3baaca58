"""`lade bench`: tokens per second of plain generate(), a static cache, prompt lookup and lade, on the same prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lade.commands.measure import (
    MEMORY_NOTE,
    Inputs,
    Method,
    Run,
    compare,
    environment,
    is_looping,
    run_methods,
    run_once,
    share_identical,
)
from lade.commands.model import Parser, add_model_arguments, check_out, how_to_choose, load, parse
from lade.commands.progress import progress_bar
from lade.commands.prompts import as_inputs, read_prompts
from lade.commands.tune import check_prompts, report, tune
from lade.switch import current_config

HALF_NOTE = "16 bits: outputs differ where two tokens are almost equally likely; --dtype float32 compares exactly"
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C

METHODS = {
    "plain": Method(),
    "static": Method({"cache_implementation": "static"}),  # transformers compiles this one on a GPU
    "prompt_lookup": Method({"prompt_lookup_num_tokens": 5}),
    "lade": Method(settings={}),
}


def main(arguments: list[str]) -> int:
    """Measure, and print the table; with --tune find settings and write them to a file."""
    parser = Parser(
        "lade bench",
        description="Speed and identity of texts of plain generate(), a static cache, prompt lookup and lade, batch size 1.",
    )
    add = parser.add_argument
    add("--prompts", type=Path, help="JSON lines with `prompt`, `question` or `turns`; default: lade's own")
    add("--limit", type=int, help="how many of the prompts, from the first; default: all")
    add("--methods", default=",".join(METHODS), help="plain always runs")
    add("--trials", type=int, default=5, help="runs of every prompt by every method")
    add("--out", type=Path, help="write the figures there, as JSON; default with --tune: lade.json")
    add("--tune", action="store_true", help="find settings faster than lade's default, and write them to --out")
    add_model_arguments(parser, max_new_tokens=128)
    if "--tune" in arguments:
        os.environ.pop("LADE_CONFIG", None)  # candidates are tried on top of lade's defaults
    args = parse(parser, arguments)
    try:
        methods = chosen_methods(args.methods)
        rows = read_prompts(args.prompts, args.limit)
        if args.trials < 1:
            raise ValueError(f"--trials must be 1 or more, got {args.trials}")
        if args.tune:
            check_tuning(args, rows)
        if args.out:
            check_out(args.out)
    except ValueError as error:
        parser.error(str(error))
    model, tokenizer = load(args)
    common = {"max_new_tokens": args.max_new_tokens, "seed": args.seed, **how_to_choose(args)}
    prompts = as_inputs(rows, tokenizer, args.device)
    try:
        if args.tune:
            found = tune(model, prompts, common, args.trials, progress_bar)
            found["measured"] |= {"model": args.model_path, "prompt_file": str(args.prompts), "arguments": common}
            write_json(args.out, found)
            sys.stdout.write(f"{report(found, str(args.out))}{MEMORY_NOTE}\n")
            return 0
        for name, reason in refusals(model, prompts[0], methods, common).items():
            sys.stderr.write(f"note: {name} is left out, this model refuses it: {reason}\n")
            del methods[name]
        figures = benchmark(model, prompts, methods, args.trials, common, progress_bar("prompts"))
    except RuntimeError as error:
        sys.stderr.write(f"lade bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nlade bench: stopped, nothing was written\n")
        return INTERRUPTED
    sys.stdout.write(table(figures))
    if args.out:
        settings = {"model": args.model_path, "lade": str(current_config()), **common}
        write_json(args.out, figures | {"settings": settings})
    return 0


def check_tuning(args: argparse.Namespace, rows: list[Any]) -> None:
    """Raises ValueError for arguments that --tune has no use for."""
    given = [name for name in ("config", "mode", "level", "window", "guess") if getattr(args, name) is not None]
    if given:
        raise ValueError(f"--tune tries settings of its own: --{given[0]} must not be given")
    check_prompts(rows)
    args.out = args.out or Path("lade.json")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def chosen_methods(names: str) -> dict[str, Method]:
    """names: of METHODS, separated by commas. Plain generate() is always among them, as the baseline."""
    chosen = list(dict.fromkeys(["plain", *names.split(",")]))
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods must be of {', '.join(METHODS)}, got {unknown[0]!r}")
    return {name: METHODS[name] for name in chosen}


def refusals(model: Any, inputs: Inputs, methods: dict[str, Method], common: dict[str, Any]) -> dict[str, str]:
    """Methods of transformers that do not work with this model -> what they raised."""
    found = {}
    for name, method in methods.items():
        if method.arguments:
            try:
                run_once(model, inputs, method, Run(), common)
            except Exception as error:  # a model's own code may raise anything
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def benchmark(
    model: Any,
    prompts: list[Inputs],
    methods: dict[str, Method],
    trials: int,
    common: dict[str, Any],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> dict[str, Any]:
    """Figures of each method relative to "plain", over all prompts, and over those whose plain output is no loop.

    Raises RuntimeError when lookahead did not run.
    """
    runs = run_methods(model, prompts, methods, trials, common, progress)
    plain = runs["plain"]
    varied = [i for i, output in enumerate(plain[0].outputs) if not is_looping(output)]
    return {
        "environment": environment(model),
        "prompts": len(prompts),
        "trials": trials,
        "memory": MEMORY_NOTE,
        "looping_outputs": len(prompts) - len(varied),
        "methods": {name: _row(of_method, plain) for name, of_method in runs.items()},
        "methods_without_looping_outputs": {
            name: compare(of_method, plain, varied) if varied else None for name, of_method in runs.items()
        },
    }


def _row(runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    return {**compare(runs, plain), "identical_outputs": share_identical(runs[0], plain[0])}


def table(figures: dict[str, Any]) -> str:
    """`benchmark`'s result as text: medians, and the 20th to 80th percentile over the trials."""
    lines = [
        f"{'method':<14} {'tokens/s':>9} {'p20':>8} {'p80':>8} {'ratio':>7} {'tokens/step':>12} {'identical':>10}  "
        "no loops: ratio, tokens/step"
    ]
    for name, row in figures["methods"].items():
        speed, apart = row["tokens_per_second"], figures["methods_without_looping_outputs"][name]
        lines.append(
            f"{name:<14} {speed['median']:>9.1f} {speed['p20']:>8.1f} {speed['p80']:>8.1f} "
            f"{row['ratio_to_plain']['median']:>7.3f} {row['tokens_per_step'] or '':>12} {row['identical_outputs']:>10.0%}"
            + (f"  {apart['ratio_to_plain']['median']:.3f}, {apart['tokens_per_step'] or '-'}" if apart else "")
        )
    lines.append(
        f"outputs of plain generate() that end in a loop: {figures['looping_outputs']} of {figures['prompts']}"
    )
    is_exact = figures["environment"]["dtype"] in ("float32", "float64")
    if not is_exact and any(row["identical_outputs"] < 1 for row in figures["methods"].values()):
        lines.append(HALF_NOTE)
    lines.append(MEMORY_NOTE)
    return "\n".join(lines) + "\n"
