"""Packed weights on a CPU (PACK): the forward over q tokens, and single products, with them and without, in turn.

    python benchmarks/packed.py --dtype float32
    python benchmarks/packed.py --shape 1b --seconds 120

First table: the forward of a block of q tokens behind L committed ones, on the model as it is and on its packed
weights, beside the former's forward over one token. Second table: products of q rows with one weight of each shape,
likewise; several weights of a shape take turns, so that they come from memory. All of a table's entries take turns in
one process. Prints medians, and ends with one JSON line, which has the 20th percentiles as well; with what packing,
comparing weights and making the shadow model took, once per process or call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
from step_cost import filled_cache, integers, make_block
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lade.forward import packed
from lade.forward.runner import BlockRunner
from lade.models import adapter_for
from lade.stats import GenerationStats

WAYS = ("plain", "packed")


def random_model(name: str, dtype: torch.dtype, max_positions: int) -> Any:
    """A model of that shape whose weights repeat 4 million drawn numbers: drawing all takes minutes on a CPU."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(shapes.shape_config(name, max_positions), dtype=dtype)
    model = model.to_empty(device="cpu").eval()
    drawn = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    for weight in model.parameters():
        for part in weight.data.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # whose frequencies are not among the weights
    model.tie_weights()
    return model


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turn(calls: dict[tuple[str, Any], Callable[[], Any]], seconds: float) -> dict[tuple[str, Any], list[float]]:
    """Seconds of each call, all in turn for that long, at least three times; a first round does not count."""
    for call in calls.values():
        call()
    found: dict[tuple[str, Any], list[float]] = {key: [] for key in calls}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(next(iter(found.values()))) < 3:
        for key, call in calls.items():
            found[key].append(seconds_of(call))
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def as_ratios(found: dict[tuple[str, Any], list[float]], tokens: list[int]) -> dict[str, Any]:
    """Medians and 20th percentiles beside those of one plain token; the first of `tokens` is 1."""
    figures: dict[str, Any] = {"rounds": len(found["plain", 1])}
    for name, share in (("median", 0.5), ("p20", 0.2)):
        one = percentile(found["plain", 1], share)
        figures[f"plain_token_milliseconds_{name}"] = round(one * 1e3, 4)
        for way in WAYS:
            figures[f"{way}_{name}"] = {q: round(percentile(found[way, q], share) / one, 3) for q in tokens}
    return figures


def show(title: str, figures: dict[str, Any], tokens: list[int]) -> None:
    print(f"{title}: one plain token takes {figures['plain_token_milliseconds_median']:.3f} ms")
    print(f"{'q':>8} " + " ".join(f"{q:>7}" for q in tokens))
    for way in WAYS:
        print(f"{way:>8} " + " ".join(f"{figures[f'{way}_median'][q]:>7.2f}" for q in tokens), flush=True)


@torch.no_grad()
def forwards(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The first table."""
    adapter = adapter_for(model)
    runners = {"plain": BlockRunner(adapter), "packed": BlockRunner(adapter)}
    cache = filled_cache(runners["plain"], args.context, max(args.tokens), 1)
    weights = packed.weights_to_pack(adapter)
    once = {"checksums": seconds_of(lambda: [packed.checksums(weight) for group in weights for weight in group])}
    reasons: list[str | None] = []
    once["pack_and_checksums"] = seconds_of(
        lambda: reasons.append(runners["packed"].use_packed_weights(0, is_asked=True))
    )
    if reasons[0] is not None:
        raise SystemExit(f"this model cannot be packed here: {reasons[0]}")
    once["checksums"] = min(
        seconds_of(lambda: [packed.checksums(weight) for group in weights for weight in group]) for _ in range(5)
    )
    once["shadow_model"] = seconds_of(lambda: runners["packed"].model)
    blocks = {q: make_block(adapter, cache, q, 1) for q in args.tokens}
    comparing = 0.0
    for block in blocks.values():
        runners["packed"].forward(block, cache)
        comparing += runners["packed"].preparing_seconds
    once["compare_products"] = comparing
    calls = {(way, q): partial(runners[way].forward, blocks[q], cache) for q in args.tokens for way in WAYS}
    figures = as_ratios(in_turn(calls, args.seconds), args.tokens)
    show(f"forward behind {args.context} tokens", figures, args.tokens)
    stats = GenerationStats()
    runners["packed"].finish(stats)
    count, num_bytes = runners["packed"].num_packed
    figures |= {"packed_weights": count, "packed_bytes": num_bytes, "refused": stats.packing_reason}
    return figures | {"seconds_once": {name: round(value, 5) for name, value in once.items()}}


@torch.no_grad()
def products(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The second table."""
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    for part in model.modules():
        if type(part) is torch.nn.Linear:
            by_shape.setdefault(tuple(part.weight.shape), []).append(part.weight)
    rows = []
    for (outputs, inputs), weights in by_shape.items():
        copies = [packed.pack([weight]) for weight in weights]
        calls: dict[tuple[str, Any], Callable[[], Any]] = {}
        for q in args.tokens:
            rows_in = torch.randn(1, q, inputs).to(weights[0].dtype)
            calls["plain", q] = partial(lambda x, weights: [linear(x, weight) for weight in weights], rows_in, weights)
            calls["packed", q] = partial(
                lambda x, copies: [packed.multiply(x, copy, None) for copy in copies], rows_in, copies
            )
        figures = as_ratios(in_turn(calls, args.seconds / len(by_shape)), args.tokens)
        show(f"{len(weights)} products, {inputs} to {outputs}", figures, args.tokens)
        rows.append({"inputs": inputs, "outputs": outputs, "weights": len(weights), **figures})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    shapes.add_shape_argument(parser, "only the cost of a forward is measured")
    parser.add_argument(
        "--tokens", type=integers, default=[1, 4, 8, 16, 32, 64], help="q, separated by commas, 1 first"
    )
    parser.add_argument("--context", type=int, default=256, help="L")
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each of the tables")
    parser.add_argument("--products", action="store_true", help="the second table, too")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    if args.tokens[0] != 1 or min(args.tokens) < 1:
        parser.error(f"--tokens must be integers of at least 1, the first of them 1, got {args.tokens}")
    return args


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.shape:
        model = random_model(args.shape, dtype, args.context + max(args.tokens))
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=dtype).eval()
    figures: dict[str, Any] = {
        "benchmark": "packed",
        "environment": harness.environment(model),
        "model": args.shape or Path(args.model_path).name,
        "context": args.context,
        "forward": forwards(model, args),
    }
    if args.products:
        figures["products"] = products(model, args)
    harness.finish(figures, args.out)


if __name__ == "__main__":
    main()
