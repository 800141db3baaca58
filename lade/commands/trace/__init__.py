"""`lade trace`: one generation, replayed step by step in a page or in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lade
from lade.commands.model import Parser, add_model_arguments, check_out, how_to_choose, load, parse

PROMPT = '''import os


def find_files(root, pattern="*", recursive=True):
    """Return a sorted list of the files below root whose names match pattern."""
'''
TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*TRACE*/null"  # where the page expects its data


def main(arguments: list[str]) -> int:
    """Record, then write the page or replay."""
    parser = Parser(
        "lade trace",
        description="Watch one generation step by step: what was guessed, what the model accepted, what each step cost. "
        "It runs with the settings that generate() would use; --mode lookahead shows the paper's window.",
    )
    add, text = parser.add_argument, parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", default=PROMPT, help="text to continue; default: the head of a Python function")
    text.add_argument("--question", help="asked through the model's chat template; default: none")
    add("--out", type=Path, default=Path("trace.html"), help="the page, one file without network")
    add("--terminal", action="store_true", help="replay in the terminal and write no page")
    add("--speed", type=float, default=1.0, help="of --terminal: 1 as it was, 0 without waiting")
    add("--cold", action="store_true", help="no warm-up: show the first call of a new process")
    add("--whole", action="store_true", help="the whole block in every step, whatever it costs (ADAPTIVE=0)")
    add_model_arguments(parser, max_new_tokens=128)
    args = parse(parser, arguments)
    try:
        if not args.terminal:
            check_out(args.out)
        if not (args.prompt if args.question is None else args.question).strip():
            raise ValueError("--prompt and --question must not be empty")
    except ValueError as error:
        parser.error(str(error))
    from lade.commands.trace.recorder import record, warm_up  # which import torch
    from lade.commands.trace.replay import replay

    os.environ["USE_LADE"] = "1"
    if args.whole:
        lade.config_lade(ADAPTIVE=0)
    model, tokenizer = load(args)
    ids, choice = prompt_ids(tokenizer, args), {"max_new_tokens": args.max_new_tokens, **how_to_choose(args)}
    try:
        if not args.cold:
            warm_up(model, ids, **choice)
        trace = record(model, tokenizer, ids, **choice)
    except RuntimeError as error:
        sys.stderr.write(f"lade trace: {error}\n")
        return 1
    if args.terminal:
        replay(trace, show, args.speed)
    else:
        args.out.write_text(page(trace), encoding="utf-8")
        show(f"{args.out}: {trace['headline']}. {trace['speed']}\n")
    return 0


def prompt_ids(tokenizer: Any, args: argparse.Namespace) -> list[int]:
    if args.question is None:
        return list(tokenizer(args.prompt)["input_ids"])
    question = [{"role": "user", "content": args.question}]
    return list(tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"])


def page(trace: dict[str, Any]) -> str:
    """One self-contained HTML file."""
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")  # the text may hold a closing script tag
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
