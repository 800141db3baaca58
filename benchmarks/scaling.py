"""Cost model of lookahead parallelism: milliseconds of a step against the number of GPUs. Theory, not a measurement.

    python benchmarks/scaling.py --shape 7b --settings 5,15,15
    python benchmarks/scaling.py --shape 7b --curve costs.json --context 1000 --link pcie --tokens_per_step 2.3

    step(K) = forward(q(K)) + integers + latency + accepted keys/values / bandwidth

q(K) is the block of the rank with most tokens, from the code that splits it, for a full tree without common prefixes.
forward(q) is interpolated in a measured curve: a JSON file whose "forward" lists {"context", "tokens", "milliseconds":
{"median"}}. Without one it is a roof line: the larger of weights and keys/values over the memory's bandwidth, and the
arithmetic over the peak, both at --efficiency. "to plain" is the step over one GPU's forward of one token: as many
tokens per step pay just even. Links and devices are data-sheet figures with guessed latencies; each can be overridden.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lade.block.token_tree import TokenTree
from lade.parallel.partition import num_window_tokens, split


@dataclass(frozen=True)
class Shape:
    """Of a decoder in 16 bits."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """Keys and values."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "7b": Shape(6.74e9, 32, 32, 128),  # Llama-2
    "13b": Shape(13.0e9, 40, 40, 128),
    "70b": Shape(69.0e9, 80, 8, 128),
}
DEVICES = {  # bytes/s, 16-bit operations/s, bytes; data sheets, dense
    "a100": (2.0e12, 312e12, 80e9),
    "h100": (3.35e12, 989e12, 80e9),
    "h200": (4.8e12, 989e12, 141e9),
}
LINKS = {  # bytes/s in one direction, seconds of a broadcast's latency (a guess)
    "nvlink": (300e9, 30e-6),
    "pcie": (25e9, 50e-6),
    "ethernet100": (12e9, 100e-6),
    "ethernet10": (1.2e9, 200e-6),
}


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def largest_block(ngram_size: int, window_size: int, num_guesses: int, num_ranks: int) -> int:
    """Tokens of the rank that has most."""
    depth = ngram_size - 1
    parents = [node - 1 if node % depth else -1 for node in range(depth * num_guesses)]
    tree = TokenTree([list(range(len(parents)))], [parents])
    shares = split(tree, (ngram_size, window_size), num_ranks)
    return max(
        share.tree.num_nodes + num_window_tokens(ngram_size, share.columns)
        for share in shares
        if share.columns is not None
    )


def roof_line(args: argparse.Namespace, num_tokens: int) -> float:
    """Milliseconds of a forward, in theory."""
    shape, (bandwidth, peak, _) = SHAPES[args.shape], DEVICES[args.gpu]
    read = 2 * shape.parameters + shape.bytes_per_token * (args.context + num_tokens)
    return 1e3 / args.efficiency * max(read / bandwidth, 2 * shape.parameters * num_tokens / peak)


def measured_points(args: argparse.Namespace) -> list[tuple[int, float]]:
    """(tokens, milliseconds) of the curve at the context closest to the one asked for."""
    rows = json.loads(args.curve.read_text(encoding="utf-8")).get("forward", [])
    if not rows:
        raise SystemExit(f"--curve must be a JSON file with a list 'forward', got {args.curve}")
    closest = min({row["context"] for row in rows}, key=lambda context: abs(context - args.context))
    return sorted((row["tokens"], row["milliseconds"]["median"]) for row in rows if row["context"] == closest)


def interpolate(points: list[tuple[int, float]], num_tokens: int) -> float:
    """Milliseconds between measured points. Raises SystemExit beyond the last one."""
    if num_tokens > points[-1][0]:
        raise SystemExit(
            f"the curve ends at {points[-1][0]} tokens, and a block has {num_tokens}: measure more, or choose less"
        )
    for (low, start), (high, end) in itertools.pairwise(points):
        if num_tokens <= high:
            return start + (end - start) * max(0, num_tokens - low) / (high - low)
    return points[0][1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--settings", type=integers, default=[5, 15, 15], help="N,W,G")
    parser.add_argument("--workers", type=integers, default=[1, 2, 4, 8], help="K, separated by commas")
    parser.add_argument("--curve", type=Path, help="measured cost of a forward; without it a roof line")
    parser.add_argument("--context", type=int, default=1000, help="committed tokens")
    parser.add_argument("--gpu", choices=list(DEVICES), default="a100", help="for the roof line")
    parser.add_argument("--efficiency", type=float, default=0.7, help="share of the roof line that is reached, a guess")
    parser.add_argument("--link", choices=list(LINKS), default="nvlink")
    parser.add_argument("--bandwidth", type=float, help="of the link in GB/s, in place of its data sheet's")
    parser.add_argument("--latency", type=float, help="of a broadcast in microseconds, in place of a guess")
    parser.add_argument(
        "--integers", type=float, default=150, help="microseconds of the step's sum over hosts, a guess"
    )
    parser.add_argument("--tokens_per_step", type=float, help="what these settings reach; adds the speed over plain")
    parser.add_argument("--plot", type=Path, help="draw it there; needs matplotlib")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    if len(args.settings) != 3 or args.settings[0] < 2 or args.settings[1] < 1 or args.settings[2] < 0:
        parser.error(f"--settings must be N,W,G with N >= 2, W >= 1, G >= 0, got {args.settings}")
    if min(args.workers) < 1:
        parser.error(f"--workers must be integers of at least 1, got {args.workers}")
    if not 0 < args.efficiency <= 1:
        parser.error(f"--efficiency must be more than 0 and at most 1, got {args.efficiency}")
    return args


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    shape, (bandwidth, latency) = SHAPES[args.shape], LINKS[args.link]
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else bandwidth
    latency = args.latency * 1e-6 if args.latency is not None else latency
    points = measured_points(args) if args.curve else []

    def forward(num_tokens: int) -> float:
        return interpolate(points, num_tokens) if points else roof_line(args, num_tokens)

    plain, rows = forward(1), []
    for workers in args.workers:
        block = largest_block(*args.settings, workers)
        sent = shape.bytes_per_token * (args.tokens_per_step or args.settings[0])  # at most N tokens are accepted
        exchange = 0.0 if workers == 1 else args.integers * 1e-3 + 1e3 * (latency + sent / bandwidth)
        step = forward(block) + exchange
        row = {"workers": workers, "block_tokens": block, "forward_ms": forward(block), "exchange_ms": exchange}
        row |= {"step_ms": step, "to_plain": step / plain}
        if args.tokens_per_step:
            row["speed"] = args.tokens_per_step * plain / step
        rows.append({name: round(value, 4) for name, value in row.items()})
    return rows


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    workers = [row["workers"] for row in rows]
    axes.bar([str(count) for count in workers], [row["forward_ms"] for row in rows], label="forward")
    exchange = [row["exchange_ms"] for row in rows]
    axes.bar([str(count) for count in workers], exchange, bottom=[row["forward_ms"] for row in rows], label="exchange")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("milliseconds per step")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    args = parse()
    level, window, guess = args.settings
    source = (
        f"forward measured ({args.curve.name})" if args.curve else f"roof line of {args.gpu} at {args.efficiency:.0%}"
    )
    title = f"theory: {args.shape}, N={level} W={window} G={guess}, context {args.context}, {source}, {args.link}"
    rows = rows_of(args)
    print(title)
    if not args.curve and 2 * SHAPES[args.shape].parameters > DEVICES[args.gpu][2]:
        print(f"every rank holds the whole model: 16 bits of {args.shape} do not fit into one {args.gpu}")
    print(f"{'K':>3} {'block':>6} {'forward ms':>11} {'exchange ms':>12} {'step ms':>8} {'to plain':>9} {'speed':>6}")
    for row in rows:
        speed = f"{row['speed']:.2f}" if "speed" in row else "-"
        print(
            f"{row['workers']:>3} {row['block_tokens']:>6} {row['forward_ms']:>11.2f} {row['exchange_ms']:>12.3f} "
            f"{row['step_ms']:>8.2f} {row['to_plain']:>9.2f} {speed:>6}"
        )
    if args.plot:
        draw(rows, title, args.plot)
    figures = {"benchmark": "scaling", "is_theory": True, "title": title, "settings": args.settings, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
