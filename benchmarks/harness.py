"""What the benchmarks share: prompts, timing, the methods compared, and the closing JSON line.

Every figure is taken in one process, the methods in turn on the same prompts, after a warm-up that does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade

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
    parser.add_argument("--level", type=int, default=5, help="N")
    parser.add_argument("--window", type=int, default=2, help="W")
    parser.add_argument("--guess", type=int, default=4, help="G")


def lookahead_settings(args: argparse.Namespace) -> dict[str, int]:
    return {"LEVEL": args.level, "WINDOW_SIZE": args.window, "GUESS_SET_SIZE": args.guess}


def set_up_lade(args: argparse.Namespace) -> None:
    lade.augment_all()
    lade.config_lade(**lookahead_settings(args))


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype))
    return model.to(args.device).eval(), tokenizer


def load_prompts(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Model inputs, one batch row each. `turns` are put through the chat template where there is one."""
    inputs = []
    for line in args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]:
        row = json.loads(line)
        if "prompt" in row:
            text = row["prompt"]
        elif tokenizer.chat_template:
            turn = [{"role": "user", "content": row["turns"][0]}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        else:
            text = row["turns"][0]
        inputs.append(tokenizer(text, return_tensors="pt").to(args.device))
    return inputs


@contextmanager
def use_lade(on: bool) -> Iterator[None]:
    before = os.environ.get("USE_LADE")
    os.environ["USE_LADE"] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["USE_LADE"]
        else:
            os.environ["USE_LADE"] = before


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Run:
    """One method over all prompts, once; one entry per prompt in each list."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # of lade only
    block_tokens: int = 0  # over all prompts

    def speed(self, chosen: list[int] | None = None) -> float:
        """Tokens per second over all prompts, or over the chosen ones."""
        chosen = list(range(len(self.outputs))) if chosen is None else chosen
        return sum(len(self.outputs[i]) for i in chosen) / sum(self.seconds[i] for i in chosen)

    def tokens_per_step(self, chosen: list[int] | None = None) -> float | None:
        chosen = list(range(len(self.outputs))) if chosen is None else chosen
        if not self.steps:
            return None
        return round(sum(len(self.outputs[i]) for i in chosen) / sum(self.steps[i] for i in chosen), 4)


def generate_timed(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> tuple[list[int], float]:
    """New token ids of one prompt, and seconds."""
    torch.manual_seed(0)
    synchronize(model)
    started = time.perf_counter()
    output = model.generate(**inputs, **arguments)
    synchronize(model)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started


def run_methods(
    model: Any,
    prompts: list[dict[str, torch.Tensor]],
    methods: dict[str, dict[str, Any]],
    trials: int,
    common: dict[str, Any],
) -> dict[str, list[Run]]:
    """Each trial takes every prompt through every method in turn. methods: name -> arguments of generate().

    The method named "lade" runs with lookahead on, all others with it off.
    """
    for name, arguments in methods.items():
        for inputs in prompts[:3]:
            with use_lade(name == "lade"):
                generate_timed(model, inputs, **common, **arguments)
    runs: dict[str, list[Run]] = {name: [Run() for _ in range(trials)] for name in methods}
    for trial in range(trials):
        for inputs in prompts:
            for name, arguments in methods.items():
                run = runs[name][trial]
                with use_lade(name == "lade"):
                    tokens, seconds = generate_timed(model, inputs, **common, **arguments)
                run.seconds.append(seconds)
                run.outputs.append(tokens)
                if name == "lade":
                    stats = lade.last_stats()
                    if stats is None or stats.fallback_reason is not None:
                        raise RuntimeError(f"lookahead did not run: {stats}")
                    run.steps.append(stats.steps)
                    run.block_tokens += sum(stats.block_tokens)
    return runs


def is_looping(tokens: list[int], last: int = 64, share: float = 0.3) -> bool:
    """Whether more than 30 % of the last 64 tokens are one repeated n-gram of at least three tokens."""
    tail = tokens[-last:]
    for size in range(3, len(tail) // 2 + 1):
        ngrams = Counter(tuple(tail[i : i + size]) for i in range(len(tail) - size + 1))
        ngram, _ = ngrams.most_common(1)[0]
        count, i = 0, 0
        while i + size <= len(tail):  # occurrences that do not overlap
            found = tuple(tail[i : i + size]) == ngram
            count += found
            i += size if found else 1
        if count > 1 and count * size > share * len(tail):
            return True
    return False


def compare(runs: list[Run], plain: list[Run], chosen: list[int] | None = None) -> dict[str, Any]:
    """A method's figures beside plain generate()'s in the same trials."""
    ratios = [run.speed(chosen) / base.speed(chosen) for run, base in zip(runs, plain, strict=True)]
    return {
        "tokens_per_second": spread([run.speed(chosen) for run in runs]),
        "ratio_to_plain": spread(ratios),
        "tokens_per_step": runs[0].tokens_per_step(chosen),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median with the 20th and 80th percentile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {"median": round(statistics.median(ordered), 4), "p20": round(at(0.2), 4), "p80": round(at(0.8), 4)}


def environment(model: Any) -> dict[str, Any]:
    parameters = {"parameters": sum(p.numel() for p in model.parameters())}
    return machine(model.device, model.dtype) | parameters


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lade": lade.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def finish(figures: dict[str, Any], path: Path | None) -> None:
    """The closing JSON line, and the same in a file where one is asked for."""
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
