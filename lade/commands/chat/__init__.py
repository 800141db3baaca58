"""`lade chat`, and what `applications/chatbot.py` runs: loads a model and answers one question or many."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from lade.commands.model import Parser, add_model_arguments, how_to_choose, load, parse
from lade.switch import ON_VALUES

SAMPLE_QUESTION = "What are the arguments of shutil.copytree?"
WITHOUT_MEANING = ("model_type", "quant", "use_ds", "local_rank")  # flags of the original chatbot


def main(arguments: list[str]) -> int:
    """`lade chat`: interactive, and with lookahead unless the environment says otherwise."""
    os.environ.setdefault("USE_LADE", "1")
    return chatbot(["--chat", *arguments], "lade chat")


def chatbot(arguments: list[str], program: str) -> int:
    """The chatbot with these command-line arguments. Returns the exit status."""
    args = parse(make_parser(program), arguments)
    for flag in WITHOUT_MEANING:
        if getattr(args, flag) not in (None, False):
            sys.stderr.write(f"note: --{flag} is ignored\n")
    from lade.commands.chat.conversation import Conversation  # these import torch and transformers
    from lade.commands.chat.terminal import Terminal, line_reader

    model, tokenizer = load(args)
    try:
        conversation = Conversation(model, tokenizer, args.max_new_tokens, args.system)
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    write, color = partial(print, end="", flush=True), args.color and sys.stdout.isatty()
    terminal = Terminal(conversation, write, how_to_choose(args), color, args.debug)
    question = args.question or (None if args.chat else SAMPLE_QUESTION)
    if question:
        terminal.write(f"{question}\n\n")
        terminal.answer(question)
    if args.chat:
        terminal.run(line_reader(terminal.note, args.no_history))
    return 0


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        program, "Chat with a model, with lookahead decoding where USE_LADE=1. /help in the chat lists its commands."
    )
    add, color = parser.add_argument, os.environ.get("COLOR_PRINT", "").lower() in ON_VALUES
    add("--chat", action="store_true", help="talk; without it one question is answered")
    add("--question", help=f"asked first; default without --chat: {SAMPLE_QUESTION}")
    add("--system", help="a system message")
    add("--debug", action="store_true", help="figures after each answer")
    add("--color", action="store_true", default=color, help="accepted guesses in green; or COLOR_PRINT=1")
    add("--no_history", action="store_true", help="keep no messages from one start to the next")
    add_model_arguments(parser, max_new_tokens=256)
    for flag in ("model_type", "quant", "local_rank"):
        add(f"--{flag}", help="ignored")
    add("--use_ds", action="store_true", help="ignored")
    return parser
