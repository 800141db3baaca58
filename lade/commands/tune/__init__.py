"""`lade tune`: the settings that pay for a model, on this device and on the user's prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from lade.commands.model import add_decoding_arguments, check_decoding_arguments, how_to_choose, load
from lade.commands.progress import progress_bar
from lade.commands.prompts import as_inputs, read_prompts

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


def main(arguments: list[str]) -> int:
    """Measure, print what was found, and write the file of settings."""
    parser = argparse.ArgumentParser(
        "lade tune",
        description="Find out whether other settings are faster than lade's default for a model on this device, batch size 1. "
        "Those that are go to a file for config_lade(CONFIG=file), LADE_CONFIG=file or lade --config file. Ctrl-C ends it early "
        "and keeps what was found.",
    )
    add = parser.add_argument
    add("--prompts", type=Path, help="JSON lines with `prompt`, `question` or `turns`; default: lade's own")
    add("--limit", type=int, help="how many of the prompts, from the first; default: all, 4 with --quick")
    add("--out", type=Path, default=Path("lade.json"), help="the file of settings; default: %(default)s")
    add("--quick", action="store_true", help="few candidates, trials and tokens")
    add_decoding_arguments(parser, max_new_tokens=96)
    parser.set_defaults(max_new_tokens=None)
    args = parser.parse_args(arguments)
    check_decoding_arguments(parser, args)
    from lade.commands.tune.report import as_text, settings_file  # which import torch
    from lade.commands.tune.search import PLAN, QUICK_PLAN, tune
    from lade.drafting.vocabulary import prepare_vocabulary

    plan = QUICK_PLAN if args.quick else PLAN
    new_tokens = plan.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    try:
        if new_tokens < 8:
            raise ValueError(f"max_new_tokens must be 8 or more for a ratio to mean anything, got {new_tokens}")
        if not args.out.parent.is_dir():
            raise ValueError(f"out must lie in a folder that exists, got {str(args.out)!r}")
        rows = read_prompts(args.prompts, args.limit or (4 if args.quick else None))
        if len(rows) < 2:
            raise ValueError("prompts must be two or more, some to choose by and some to judge by, got 1")
    except ValueError as error:
        parser.error(str(error))
    os.environ.pop("LADE_CONFIG", None)  # candidates are tried on top of the defaults
    model, tokenizer = load(args)
    prepare_vocabulary(model)  # later processes find it in the cache folder
    common = {"max_new_tokens": new_tokens, "seed": args.seed, **how_to_choose(args)}
    try:
        findings = tune(model, as_inputs(rows, tokenizer, args.device), common, plan, progress_bar)
    except RuntimeError as error:
        sys.stderr.write(f"lade tune: {error}\n")
        return 1
    if findings.is_stopped and not findings.rows:
        sys.stderr.write(f"\nlade tune: stopped before anything was found; {args.out} was not written\n")
        return INTERRUPTED
    prompt_file = str(args.prompts) if args.prompts else "lade's own"
    content = settings_file(findings, {"model": args.model_path, "prompt_file": prompt_file, "arguments": common})
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(as_text(findings, args.out))
    if findings.is_stopped:
        sys.stderr.write("lade tune: stopped; what was found until then is above and in the file\n")
    return INTERRUPTED if findings.is_stopped else 0
