"""Shared by commands that load a model: arguments, the settings of lade, and the bundled checkpoint.

Imports torch and transformers only to load a model, so that `--help` and wrong arguments are answered at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import lade
from lade.config import MODES, LookaheadConfig

BUNDLED = Path(lade.__file__).resolve().parents[1] / "models" / "stdlib-9m"
DTYPES = ["auto", "float16", "bfloat16", "float32", "float64"]


class _Defaults(argparse.HelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_shown = action.default is not None and action.nargs != 0 and "default" not in text
        return f"{text}; default: %(default)s" if is_shown else text


class Parser(argparse.ArgumentParser):
    """Help with defaults, and errors before the usage."""

    def __init__(self, program: str, description: str, formatter_class: Any = _Defaults, **named: Any) -> None:
        super().__init__(program, description=description, formatter_class=formatter_class, **named)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n\n{self.format_usage()}")


def add_model_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Arguments for the model, the selection of tokens, and the settings of lade."""
    add = parser.add_argument
    add("--model_path", default=str(BUNDLED), help="a hub name or a folder; default: the bundled checkpoint")
    add("--device", help="default: cuda where there is one, else cpu")
    add("--dtype", default="auto", choices=DTYPES, help="auto is the checkpoint's")
    add("--cache_dir", metavar="FOLDER", help="where downloads are kept; default: Hugging Face's folder")
    add("--max_new_tokens", type=int, default=max_new_tokens, metavar="TOKENS", help="of an answer, at most")
    add("--temperature", type=float, help="0 is greedy; default: what the checkpoint's generation_config says")
    add("--top_p", type=float, help="sample from the likeliest tokens with this probability; default: see temperature")
    add("--seed", type=int, default=0, help="of sampling")
    add("--config", metavar="FILE", help="settings of lade in JSON, such as lade bench --tune writes; default: none")
    add("--mode", choices=MODES, help="the drafter; default: lade's choice")
    default = LookaheadConfig()
    add("--level", type=int, metavar="N", help=f"length of an n-gram; default: {default.ngram_size}")
    add("--window", type=int, metavar="W", help=f"columns of the window; default: {default.window_size}")
    add("--guess", type=int, metavar="G", help=f"candidates per step; default: {default.guess_set_size}")


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The arguments of `add_model_arguments`; the settings of lade among them are applied."""
    args = parser.parse_args(arguments)
    try:
        check_numbers(args)
        lade.config_lade(
            CONFIG=args.config, MODE=args.mode, LEVEL=args.level, WINDOW_SIZE=args.window, GUESS_SET_SIZE=args.guess
        )
    except ValueError as error:
        parser.error(str(error))
    check_model_path(parser, args)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError naming the argument, the rule and the value."""
    for name, rule, is_allowed in (
        ("max_new_tokens", "1 or more", lambda value: value >= 1),
        ("temperature", "0, which is greedy, or above", lambda value: 0 <= value < float("inf")),
        ("top_p", "above 0 and at most 1", lambda value: 0 < value <= 1),
        ("seed", "an integer of 64 bits", lambda value: -(2**63) <= value < 2**63),
    ):
        value = getattr(args, name)
        if value is not None and not is_allowed(value):
            raise ValueError(f"--{name} must be {rule}, got {value}")
    if args.top_p is not None and args.temperature == 0:
        raise ValueError("--top_p must come with sampling: --temperature 0 is greedy")


def check_out(path: Path) -> None:
    """Raises ValueError where no file of this name can be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that exists, got {str(path)!r}")


def check_model_path(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program when --model_path names a folder that is none."""
    path, is_bundled = Path(args.model_path).expanduser(), args.model_path == str(BUNDLED)
    is_folder = path.is_absolute() or args.model_path.startswith((".", "~")) or args.model_path.count("/") > 1
    problem = None
    if is_bundled and not path.is_dir():
        problem = "must be given: the bundled checkpoint comes only with the source of lade"
    elif is_folder and not path.is_dir():
        problem = f"must be a folder with a checkpoint or a hub name, found no folder {args.model_path!r}"
    elif path.is_dir():
        args.model_path = str(path)
        if not (path / "config.json").is_file():
            problem = f"must be a folder with a checkpoint, found no config.json in {args.model_path!r}"
    if problem:  # without the usage, which says nothing about it
        parser.exit(2, f"{parser.prog}: --model_path {problem}\n")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns model and tokenizer, with lade patched in and torch seeded. Ends the program when loading fails."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # of loading, which would fill a log
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_path, cache_dir=args.cache_dir)
        model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=args.dtype, cache_dir=args.cache_dir)
    except (OSError, ValueError, KeyError, ImportError) as error:
        # transformers' messages have up to a page; their first sentence says what is wrong.
        reason = re.split(r"(?<=[^.]{2}[.:])\s|\n", str(error).strip())[0].rstrip(".:")
        sys.stderr.write(f"lade: --model_path {args.model_path!r} cannot be loaded: {reason}.\n")
        sys.exit(2)
    lade.augment_all()
    torch.manual_seed(args.seed)
    try:
        model = model.to(args.device).eval()
    except (RuntimeError, AssertionError) as error:  # how torch says that there is no such device, or no room on it
        sys.stderr.write(f"lade: --device {args.device!r} cannot be used: {str(error).splitlines()[0]}\n")
        sys.exit(2)
    return model, tokenizer


def how_to_choose(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of generate(); empty leaves it to the checkpoint's generation_config."""
    choice: dict[str, Any] = {}
    if args.temperature is not None:
        choice = {"do_sample": args.temperature > 0}
        if args.temperature > 0:
            choice["temperature"] = args.temperature
    if args.top_p is not None:
        choice |= {"do_sample": True, "top_p": args.top_p}
    return choice
