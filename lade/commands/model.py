"""What sub-commands that load a model share: its arguments, the settings of lade, and the bundled checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.config import MODES

BUNDLED = Path(lade.__file__).resolve().parents[1] / "models" / "stdlib-9m"
DTYPES = ["auto", "float16", "bfloat16", "float32", "float64"]

# For a tokenizer without a chat template; an answer ends where the model goes on to speak for the user.
FALLBACK_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOP = "\nUser:"


def add_model_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """The model, how it chooses tokens, and the settings of lade."""
    add_decoding_arguments(parser, max_new_tokens)
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings of lade in JSON, such as lade tune writes")
    add("--mode", choices=MODES, help="who guesses; default: lookahead where N, W or G is given, else auto")
    add("--level", type=int, metavar="N", help="length of an n-gram")
    add("--window", type=int, metavar="W", help="columns of the window")
    add("--guess", type=int, metavar="G", help="candidates per step")


def add_decoding_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """The model, and how it chooses tokens."""
    add = parser.add_argument
    add("--model_path", default=str(BUNDLED), help="a hub name or a folder; default: the bundled checkpoint")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="auto", choices=DTYPES, help="default: the checkpoint's")
    add("--cache_dir", help="where downloads are kept")
    add("--max_new_tokens", type=int, default=max_new_tokens)
    add("--temperature", type=float, help="0 is greedy; default: what the checkpoint's generation_config says")
    add("--top_p", type=float)
    add("--seed", type=int, default=0)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The arguments of `add_model_arguments`; the settings of lade among them are applied."""
    args = parser.parse_args(arguments)
    check_model_path(parser, args)
    try:
        lade.config_lade(
            CONFIG=args.config, MODE=args.mode, LEVEL=args.level, WINDOW_SIZE=args.window, GUESS_SET_SIZE=args.guess
        )
    except ValueError as error:
        parser.error(str(error))
    return args


def check_model_path(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program where the model is the bundled one and that is not there."""
    if args.model_path == str(BUNDLED) and not BUNDLED.is_dir():
        parser.error("--model_path must be given: the bundled checkpoint comes only with the source of lade")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer; lade is patched in and torch's generator seeded."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_path, cache_dir=args.cache_dir)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=args.dtype, cache_dir=args.cache_dir)
    lade.augment_all()
    torch.manual_seed(args.seed)
    return model.to(args.device).eval(), tokenizer


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
