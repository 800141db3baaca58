"""`lade chat`, and what `applications/chatbot.py` runs: loads a model and answers one question or many. Floor 8."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.commands.chat.conversation import Conversation
from lade.commands.chat.terminal import Terminal
from lade.config import ON_VALUES

BUNDLED = Path(__file__).resolve().parents[3] / "models" / "stdlib-9m"
SAMPLE_QUESTION = "What are the arguments of shutil.copytree?"
# N, W, G that pay: a small block where arithmetic is dear, a large one where it is nearly free.
ON_CPU: dict[str, Any] = {"LEVEL": 5, "WINDOW_SIZE": 2, "GUESS_SET_SIZE": 4}
ON_GPU: dict[str, Any] = {"LEVEL": 5, "WINDOW_SIZE": 7, "GUESS_SET_SIZE": 7}
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
    args = parse(arguments, program)
    for flag, reason in WITHOUT_MEANING.items():
        if getattr(args, flag) not in (None, False):
            sys.stderr.write(f"note: --{flag} is ignored: {reason}\n")
    tokenizer = AutoTokenizer.from_pretrained(args.model_path, cache_dir=args.cache_dir)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=args.dtype, cache_dir=args.cache_dir)
    model = model.to(args.device).eval()
    lade.augment_all()
    try:
        conversation = Conversation(model, tokenizer, args.max_new_tokens, args.system)
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    terminal = Terminal(conversation, show, how_to_choose(args), args.color, args.debug)
    if not tokenizer.chat_template:
        terminal.note("the tokenizer has no chat template; 'User:' and 'Assistant:' stand in")
    torch.manual_seed(args.seed)
    if args.chat:
        terminal.run()
    else:
        terminal.write(f"{args.question}\n\n")
        terminal.answer(args.question)
    return 0


def parse(arguments: list[str], program: str) -> argparse.Namespace:
    """The arguments; those that are settings of lade are applied."""
    parser = argparse.ArgumentParser(
        program, description="Chat with a model, with lookahead decoding where USE_LADE=1."
    )
    parser.add_argument(
        "--model_path", default=str(BUNDLED), help="a hub name or a folder; default: the bundled checkpoint"
    )
    parser.add_argument("--chat", action="store_true", help="talk; without it one question is answered")
    parser.add_argument("--question", default=SAMPLE_QUESTION, help="the one that is answered without --chat")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--debug", action="store_true", help="figures after each answer")
    color = os.environ.get("COLOR_PRINT", "").lower() in ON_VALUES
    parser.add_argument(
        "--color", action="store_true", default=color, help="accepted guesses in green; or COLOR_PRINT=1"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float16", "bfloat16", "float32", "float64"],
        help="default: the checkpoint's",
    )
    parser.add_argument("--cache_dir", help="where downloads are kept")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--temperature", type=float, help="0 is greedy; default: what the checkpoint's generation_config says"
    )
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, metavar="N", help="length of an n-gram")
    parser.add_argument("--window", type=int, metavar="W", help="columns of the window")
    parser.add_argument("--guess", type=int, metavar="G", help="candidates per step")
    for flag in ("model_type", "quant", "local_rank"):
        parser.add_argument(f"--{flag}", help="ignored")
    parser.add_argument("--use_ds", action="store_true", help="ignored")
    args = parser.parse_args(arguments)
    if args.model_path == str(BUNDLED) and not BUNDLED.is_dir():
        parser.error("--model_path must be given: the bundled checkpoint comes only with the source of lade")
    try:
        lade.config_lade(**(ON_CPU if args.device.startswith("cpu") else ON_GPU))
        lade.config_lade(LEVEL=args.level, WINDOW_SIZE=args.window, GUESS_SET_SIZE=args.guess)
    except ValueError as error:
        parser.error(str(error))
    return args


def how_to_choose(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of generate(); empty leaves it to the checkpoint's generation_config."""
    choice: dict[str, Any] = {}
    if args.temperature is not None:
        choice = {"do_sample": args.temperature > 0}
        if args.temperature > 0:
            choice["temperature"] = args.temperature
    if args.top_p is not None:
        choice["top_p"] = args.top_p
    return choice


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
