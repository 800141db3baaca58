"""`lade chat`, and what `applications/chatbot.py` runs: loads a model and answers one question or many."""

from __future__ import annotations

import argparse
import os
import sys

from lade.commands.model import add_model_arguments, how_to_choose, load, parse
from lade.config import ON_VALUES

SAMPLE_QUESTION = "What are the arguments of shutil.copytree?"
# Flags of the original chatbot that mean nothing here -> why.
WITHOUT_MEANING = {
    "model_type": "the model's own configuration says it",
    "quant": "load a checkpoint that is quantised already",
    "use_ds": "generate() runs without DeepSpeed",
    "local_rank": "the chatbot is one process; --device chooses the device",
}


def main(arguments: list[str]) -> int:
    """`lade chat`: interactive, and with lookahead unless the environment says otherwise."""
    os.environ.setdefault("USE_LADE", "1")
    return chatbot(["--chat", *arguments], "lade chat")


def chatbot(arguments: list[str], program: str) -> int:
    """The chatbot with these command-line arguments. Returns the exit status."""
    args = parse(make_parser(program), arguments)
    for flag, reason in WITHOUT_MEANING.items():
        if getattr(args, flag) not in (None, False):
            sys.stderr.write(f"note: --{flag} is ignored: {reason}\n")
    from lade.commands.chat.conversation import Conversation  # these import torch and transformers
    from lade.commands.chat.line_reader import history_file
    from lade.commands.chat.terminal import Terminal

    model, tokenizer = load(args)
    try:
        conversation = Conversation(model, tokenizer, args.max_new_tokens, args.system)
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    color = args.color and sys.stdout.isatty()
    history = None if args.no_history else history_file()
    terminal = Terminal(conversation, show, how_to_choose(args), color, args.debug, history)
    if not tokenizer.chat_template:
        terminal.note("the tokenizer has no chat template; 'User:' and 'Assistant:' stand in")
    question = args.question or (None if args.chat else SAMPLE_QUESTION)
    if question:
        terminal.write(f"{question}\n\n")
        terminal.answer(question)
    if args.chat:
        terminal.run()
    return 0


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        description="Chat with a model, with lookahead decoding where USE_LADE=1. /help in the chat lists its commands.",
    )
    parser.add_argument("--chat", action="store_true", help="talk; without it one question is answered")
    parser.add_argument("--question", help=f"asked first; default without --chat: {SAMPLE_QUESTION}")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--debug", action="store_true", help="figures after each answer")
    color = os.environ.get("COLOR_PRINT", "").lower() in ON_VALUES
    parser.add_argument("--color", action="store_true", default=color, help="guesses in green; or COLOR_PRINT=1")
    parser.add_argument("--no_history", action="store_true", help="keep no messages from one start to the next")
    add_model_arguments(parser, max_new_tokens=256)
    for flag in ("model_type", "quant", "local_rank"):
        parser.add_argument(f"--{flag}", help="ignored")
    parser.add_argument("--use_ds", action="store_true", help="ignored")
    return parser


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
