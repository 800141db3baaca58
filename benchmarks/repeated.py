"""Tokens per step of calls that repeat earlier work, with the texts of earlier calls (`Memory(texts=...)`) and without.

    python benchmarks/repeated.py --trace retries --prompts questions.jsonl --temperature 0.7 --sizes 16,64
    python benchmarks/repeated.py --trace sessions --limit 12 --max_new_tokens 96 --temperature 0

Traces, made from a file of prompts: "retries" asks each prompt three times, in rounds, with other seeds, as programs do
that choose among several answers. "sessions" has four calls for each unfinished function: as it is; again under a line
that says that the tests failed, without the first answer; with the first answer, to write the function once more with
checks of its arguments; and, after all other sessions, under another name.

Plain `generate()` gives the texts in float32, and the tree takes the steps of `replay.py`, with one memory for all
calls of a trace. "Cold" begins each call with an empty one. --loop: `generate()` itself takes the calls too. Ratios are
texts over warm, as means over calls with standard errors, of all texts and of those that are no loop. Ends with one
JSON line.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import harness
import replay
import torch
from replay import Recording

import lade
from lade.commands.prompts import as_inputs, read_prompts
from lade.drafting.memory import Memory
from lade.switch import current_config

FAILED = "# The tests failed. Another attempt:\n"
CHECKED = "\n\n\n# The same function with its arguments checked.\n"
MEMORIES = ("cold", "warm", "texts")


def retries(rows: list[dict[str, Any]], model: Any, tokenizer: Any, args: argparse.Namespace) -> list[Recording]:
    inputs = as_inputs(rows, tokenizer, args.device)
    return [
        replay.record(model, one, args.temperature, args.max_new_tokens, seed) for seed in range(3) for one in inputs
    ]


def sessions(rows: list[dict[str, Any]], model: Any, tokenizer: Any, args: argparse.Namespace) -> list[Recording]:
    def call(text: str, seed: int) -> Recording:
        [inputs] = as_inputs([{"prompt": text}], tokenizer, args.device)
        return replay.record(model, inputs, args.temperature, args.max_new_tokens, seed)

    found, renamed = [], []
    for row in rows:
        text = row["prompt"]
        name = re.findall(r"def (\w+)", text)[-1]
        first = call(text, 0)
        head = text[text.rfind(f"def {name}") :].replace(name, f"{name}_checked")
        answer = tokenizer.decode(first.tokens)
        found += [first, call(FAILED + text, 1), call(text + answer + CHECKED + head, 2)]
        renamed.append(text.replace(name, f"{name}_2"))
    return found + [call(text, 3) for text in renamed]


TRACES = {"retries": retries, "sessions": sessions}


def loop(model: Any, recording: Recording, memory: Memory) -> replay.Replay:
    """The same by `generate()`."""
    ids = torch.tensor([recording.prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with lade.enabled(), memory.active():
        tokens, seconds = harness.generate_timed(
            model, inputs, recording.seed, max_new_tokens=len(recording.tokens), **recording.arguments
        )
    stats = lade.last_stats()
    if tokens != recording.tokens or stats is None or stats.fallback_reason is not None:
        raise SystemExit(f"the loop's text is not the recorded one: {stats and stats.fallback_reason}")
    return replay.Replay(len(tokens), stats.steps, stats.sources, seconds)


def take(model: Any, recordings: list[Recording], kind: str, num_texts: int, is_loop: bool) -> list[replay.Replay]:
    shared, found = Memory(texts=num_texts if kind == "texts" else 0), []
    for recording in recordings:
        memory = Memory() if kind == "cold" else shared
        found.append(
            loop(model, recording, memory) if is_loop else replay.replay(model, recording, current_config(), memory)
        )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.set_defaults(dtype="float32", limit=12, device="cpu")
    parser.add_argument("--trace", choices=TRACES, default="retries")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 for greedy")
    parser.add_argument("--sizes", type=lambda text: [int(q) for q in text.split(",")], default=[16])
    parser.add_argument("--texts", type=int, default=100_000, help="tokens of texts kept")
    parser.add_argument("--loop", action="store_true", help="generate() takes the calls as well, to compare")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    model, tokenizer = harness.load_model(args)
    lade.augment_all()
    args.temperature = args.temperature or None
    recordings = TRACES[args.trace](read_prompts(args.prompts, args.limit), model, tokenizer, args)
    figures: dict[str, Any] = {}
    for q in args.sizes:
        with lade.enabled(MODE="tree", MAX_BLOCK=q, ADAPTIVE=0):
            taken = {kind: take(model, recordings, kind, args.texts, False) for kind in MEMORIES}
            looped = {kind: take(model, recordings, kind, args.texts, True) for kind in MEMORIES} if args.loop else {}
        one = {kind: replay.summary(found, recordings) for kind, found in taken.items()}
        each = [(a.tokens_per_step, b.tokens_per_step) for a, b in zip(taken["texts"], taken["warm"], strict=True)]
        one["ratio_without_loops"] = replay.compared(one["texts"], one["warm"])
        one["ratio"] = [round(x, 4) for x in replay.ratio(*map(list, zip(*each, strict=True)))]
        one["steps"] = {kind: sum(r.num_steps for r in found) for kind, found in taken.items()}
        one["steps_of_loop"] = {kind: sum(r.num_steps for r in found) for kind, found in looped.items()}
        figures[f"q={q}"] = one
        line = "  ".join(f"{kind} {one[kind]['S']:.3f}" for kind in MEMORIES)
        print(f"{args.trace} q={q}: tokens per step {line}; texts / warm {one['ratio'][0]:.3f} +- {one['ratio'][1]:.3f}, "
              "without loops {:.3f} +- {:.3f}".format(*one["ratio_without_loops"]),
              f"steps {one['steps']}, by the loop {one['steps_of_loop']}", flush=True)  # fmt: skip
    harness.finish(
        {
            "benchmark": "repeated",
            "environment": harness.environment(model),
            "trace": args.trace,
            "temperature": args.temperature,
            "replays": figures,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
