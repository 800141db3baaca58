"""Shared by the benchmarks: arguments, prompts, and the closing JSON line; the timing is that of `lade bench`.

Every figure is taken in one process, the methods in turn on the same prompts, after a warm-up that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.commands import measure
from lade.commands.measure import (  # noqa: F401  what the benchmarks take from here
    Method,
    Run,
    compare,
    environment,
    generate_timed,
    is_looping,
    machine,
    spread,
)
from lade.commands.prompts import as_inputs, read_prompts
from lade.config import MODES

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "models" / "stdlib-9m"
PROMPTS = Path(__file__).parent / "prompts.jsonl"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_path", default=str(BUNDLED), help="a hub name or a folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--limit", type=int, default=20, help="how many of the prompts, from the first")
    parser.add_argument("--max_new_tokens", type=int, default=128)


def add_lookahead_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", default="auto", choices=MODES)
    parser.add_argument("--level", type=int, default=5, help="N, with --mode lookahead")
    parser.add_argument("--window", type=int, default=2, help="W")
    parser.add_argument("--guess", type=int, default=4, help="G")


def lookahead_settings(args: argparse.Namespace) -> dict[str, Any]:
    if args.mode != "lookahead":
        return {"MODE": args.mode}
    return {"MODE": args.mode, "ADAPTIVE": 0, **sizes(args)}


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """N, W, G."""
    return {"LEVEL": args.level, "WINDOW_SIZE": args.window, "GUESS_SET_SIZE": args.guess}


def set_up_lade(args: argparse.Namespace) -> None:
    lade.augment_all()
    lade.config_lade(**lookahead_settings(args))


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype))
    return model.to(args.device).eval(), tokenizer


def load_prompts(args: argparse.Namespace, tokenizer: Any) -> list[measure.Inputs]:
    """Model inputs, one batch row each. `turns` are put through the chat template where there is one."""
    return as_inputs(read_prompts(args.prompts, args.limit), tokenizer, args.device)


def run_methods(
    model: Any,
    prompts: list[measure.Inputs],
    methods: dict[str, dict[str, Any]],
    trials: int,
    common: dict[str, Any],
) -> dict[str, list[Run]]:
    """`measure.run_methods` with methods given as name -> arguments of generate().

    The method named "lade" runs with lookahead on, all others with it off.
    """
    made = {name: Method(arguments, {} if name == "lade" else None) for name, arguments in methods.items()}
    return measure.run_methods(model, prompts, made, trials, common)


def synchronize(model: Any) -> None:
    measure.synchronize(model.device)


@contextmanager
def reporting(figures: dict[str, Any], path: Path | None) -> Iterator[None]:
    """The closing JSON line, also of what there is by then where Ctrl-C or SIGTERM ends the run: `stopped` says so.

    figures: is filled inside. The program then ends with status 130.
    """
    with stopping_like_ctrl_c():
        try:
            yield
        except KeyboardInterrupt:
            finish(figures | {"stopped": True}, path)
            raise SystemExit(130) from None
    finish(figures, path)


@contextmanager
def stopping_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def resident_mib() -> int | None:
    """The memory of this process, in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def finish(figures: dict[str, Any], path: Path | None) -> None:
    """The closing JSON line, and the same in a file where one is asked for."""
    figures["clock"] = "cpu" if time.perf_counter is time.process_time else "wall"  # cpu_time.py
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
