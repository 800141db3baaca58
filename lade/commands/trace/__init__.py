"""`lade trace`: one generation, replayed step by step in a page or in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lade
from lade.commands.model import add_model_arguments, how_to_choose, load, parse
from lade.commands.trace.recorder import record
from lade.commands.trace.replay import replay

PROMPT = '''import os


def find_files(root, pattern="*", recursive=True):
    """Return a sorted list of the files below root whose names match pattern."""
'''
TEMPLATE = Path(__file__).with_name("page.html")
# The page is there to show the window: without a word on who guesses, it is the one that does.
WINDOW: dict[str, Any] = {"LEVEL": 5, "WINDOW_SIZE": 2, "GUESS_SET_SIZE": 4}
PLACE = "/*TRACE*/null"  # where the page expects its data


def main(arguments: list[str]) -> int:
    """Record, then write the page or replay."""
    parser = argparse.ArgumentParser("lade trace", description="Watch one generation step by step.")
    parser.add_argument("--prompt", default=PROMPT, help="text to go on with")
    parser.add_argument("--question", help="asked through the model's chat template, in place of --prompt")
    parser.add_argument("--out", type=Path, default=Path("trace.html"), help="the page: one file, no network")
    parser.add_argument("--terminal", action="store_true", help="replay in the terminal and write no page")
    parser.add_argument("--speed", type=float, default=1.0, help="of --terminal: 1 as it was, 0 without waiting")
    add_model_arguments(parser, max_new_tokens=128)
    args = parse(parser, arguments)
    os.environ["USE_LADE"] = "1"
    if args.mode is None and not args.config and not lade.current_config().uses_window:
        lade.config_lade(**WINDOW)
    lade.config_lade(ADAPTIVE=0)
    model, tokenizer = load(args)
    try:
        trace = record(
            model, tokenizer, prompt_ids(tokenizer, args), max_new_tokens=args.max_new_tokens, **how_to_choose(args)
        )
    except RuntimeError as error:
        sys.stderr.write(f"lade trace: {error}\n")
        return 1
    if args.terminal:
        replay(trace, show, args.speed)
    else:
        args.out.write_text(page(trace), encoding="utf-8")
        show(f"{args.out}: {len(trace['ids'])} tokens in {len(trace['steps']) + 1} steps\n")
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
