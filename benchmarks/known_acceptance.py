"""Speed of generate() at given tokens per step, on a model of any shape.

    python benchmarks/known_acceptance.py --shape 1b --dtype bfloat16
    python benchmarks/known_acceptance.py --shape 1b --dtype float32 --tokens_per_step 2 --block 8

What a large model would say is not needed for this, so weights are random; only the embeddings are large, which makes
the model say its last token again, by a margin that no rounding reaches. A stand-in for the drafter knows that. Each of
its guesses is right with the chance that gives the wanted tokens per step, and all guesses after a wrong one are wrong.
The rest is lade as it is: layout, forward, verification, cache. Methods take turns, and each ratio is to the plain
generate() of its own trial:

    lade S          lade with S tokens per step in blocks of --block tokens, on packed weights
    unpacked S      the same on the weights as they are

Prints medians over the trials, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
from harness import Method, Run

import lade
from lade.block.token_tree import TokenTree
from lade.drafting.base import ROOT_ALONE, Draft, Drafter, DraftRequest
from lade.verification.sequences import TokenSequences

LARGE = (
    200.0  # times the usual deviation of embeddings: the last token's logit is then some 30 deviations above the others
)


def chance_of(tokens_per_step: float, num_guesses: int) -> float:
    """The chance p of each guess of a chain for which 1 + p + p^2 + ... + p^num_guesses is `tokens_per_step`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_less = sum(middle**i for i in range(num_guesses + 1)) < tokens_per_step
        low, high = (middle, high) if is_less else (low, middle)
    return low


class KnownText(Drafter):
    """Knows that the text goes on with its last token; guesses a chain of which so much is right."""

    def __init__(self, request: DraftRequest, tokens_per_step: float, block: int) -> None:
        self._num_tokens, self._num_guesses = request.num_tokens, block - 1
        self._chance = chance_of(tokens_per_step, self._num_guesses)
        self._numbers = random.Random(0)

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        count = self._num_guesses if max_offset is None else min(self._num_guesses, max_offset)
        right = sequences.roots()[0]
        hits = 0
        while hits < count and self._numbers.random() < self._chance:
            hits += 1
        wrong = (right + 1) % self._num_tokens
        chain = [right] * hits + [wrong] * (count - hits)
        tree = TokenTree([chain], [list(range(-1, count - 1))])
        return Draft(tree, count, ROOT_ALONE, torch.empty(1, 1, dtype=torch.long))


def model_of(args: argparse.Namespace) -> Any:
    model = shapes.repeating_model(
        args.shape, getattr(torch, args.dtype), args.context + args.max_new_tokens + args.block
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(LARGE)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
        model.model.norm.weight.fill_(1.0)  # so that the head sees the embedding as it went in
    return model


def methods_of(args: argparse.Namespace) -> dict[str, Method]:
    methods = {"plain": Method()}
    for wanted in args.tokens_per_step:
        mode = f"known text, {wanted:g}"
        lade.register_drafter(mode, lambda request, wanted=wanted: KnownText(request, wanted, args.block))
        for name, pack in (("lade", 1), ("unpacked", 0)):
            methods[f"{name} {wanted:g}"] = Method(settings={"MODE": mode, "MAX_BLOCK": args.block, "PACK": pack})
    return methods


def measure(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    prompts = shapes.random_prompts(model, args.prompts, 1, args.context)
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    methods = methods_of(args)
    names = list(methods)
    runs: dict[str, list[Run]] = {name: [Run() for _ in range(args.trials)] for name in names}

    def run(name: str, inputs: dict[str, Any], into: Run) -> None:
        harness.measure.run_once(model, inputs, methods[name], into, common)

    for name in names:
        run(name, prompts[0], Run())
    for trial in range(args.trials):
        for inputs in prompts:
            for name in names:
                run(name, inputs, runs[name][trial])
    plain = runs["plain"]
    rows = {}
    print(f"{'method':<14} {'tokens/step':>12} {'to plain':>9}")
    for name, found in runs.items():
        rows[name] = harness.compare(found, plain) | {
            "identical": sum(
                a == b
                for run, base in zip(found, plain, strict=True)
                for a, b in zip(run.outputs, base.outputs, strict=True)
            )
        }
        print(
            f"{name:<14} {rows[name]['tokens_per_step'] or 1:>12} {rows[name]['ratio_to_plain']['median']:>9.3f}",
            flush=True,
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser, block: int) -> None:
    """The arguments of `measure`. block: the default size."""
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens_per_step", type=numbers, default=[1.5, 2.0, 3.0], help="S, separated by commas")
    parser.add_argument("--block", type=int, default=block, help="q, the tokens of a block")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes.add_shape_argument(parser, "the text is known")
    parser.set_defaults(shape="1b6")
    add_arguments(parser, block=16)
    args = parser.parse_args()
    if args.block < 2 or not all(1 < wanted < args.block for wanted in args.tokens_per_step):
        parser.error(f"--tokens_per_step must lie between 1 and --block, got {args.tokens_per_step} and {args.block}")
    lade.augment_all()
    model = model_of(args)
    figures: dict[str, Any] = {
        "benchmark": "known_acceptance",
        "environment": harness.environment(model),
        "shape": args.shape,
        "block": args.block,
        "context": args.context,
        "max_new_tokens": args.max_new_tokens,
        "trials": args.trials,
        "prompts": args.prompts,
    }
    with harness.reporting(figures, args.out):
        figures["methods"] = measure(model, args)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
