"""Who guesses best: tokens per step of each drafter at the same block size, and tokens per second where lade chooses it.

    python benchmarks/drafters.py --limit 37 --temperature 0.4           # tokens per step at q = 8, 16, 64
    python benchmarks/drafters.py --speed --limit 37 --chat --random     # tokens per second

All drafters go through the same loop and verification. Looping outputs, on which any drafter shines, are counted apart: more
than 30 % of the last 64 tokens are one repeated n-gram. "Cold" begins each prompt with empty tables, "warm" goes through the
prompts in their order with one memory. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import harness
import torch

import lade
from lade.block.token_tree import TokenTree
from lade.drafting import register_drafter
from lade.drafting.base import ROOT_ALONE, Draft
from lade.drafting.likeliest import most_likely
from lade.drafting.memory import Memory

# The best (N, W, G) found for blocks of at most q tokens.
LOOKAHEAD = {8: (4, 1, 1), 16: (4, 2, 3), 64: (5, 8, 8)}
# Share of accepted guesses by rank, roughly; it shapes the static tree.
RANK_CHANCES = (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)


class SuffixOnly(Memory):
    """A memory that keeps no rows: what is left of the tree is the suffix match."""

    def learn(self, *_) -> None:
        pass


class StaticRecycling:
    """Token Recycling as published (arXiv:2408.08696): one table by token, one tree of ranks for all steps."""

    def __init__(self, size: int, input_ids: torch.Tensor) -> None:
        self.rows: dict[int, list[int]] = {}
        self.template = static_tree(size)
        self.cells = input_ids.new_empty(1, 0)
        self.root = None

    def propose(self, texts, is_finished, max_offset) -> Draft:
        self.root = texts.roots()[0]
        tokens, parents, places = [], [], {-1: -1}
        for index, (parent, rank) in enumerate(self.template):
            place = places.get(parent)
            row = None if place is None else self.rows.get(self.root if place < 0 else tokens[place])
            if row is not None:
                places[index] = len(tokens)
                tokens.append(row[rank])
                parents.append(place)
        return Draft(TokenTree([tokens], [parents]), 1 if tokens else 0, ROOT_ALONE, self.cells)

    def learn(self, outcome) -> None:
        if self.root is None:
            return
        ids = most_likely(outcome.logits[0])[0].tolist()
        keys = [self.root, *outcome.tree.tokens[0]]
        path = [0, *(node + 1 for node in outcome.accepted[0] or [])]
        for index in [*(i for i in range(len(keys)) if i not in path), *path]:
            self.rows[keys[index]] = ids[index]

    def spent(self, *_) -> None:
        pass

    def finish(self) -> None:
        pass

    def sources(self) -> dict[str, list[int]]:
        return {}


def static_tree(size: int) -> list[tuple[int, int]]:
    """The `size` most probable nodes by RANK_CHANCES, as parent (-1 for the root) and rank."""
    nodes: list[tuple[int, int]] = []
    frontier = [(-chance, -1, rank) for rank, chance in enumerate(RANK_CHANCES)]
    heapq.heapify(frontier)
    while len(nodes) < size:
        chance, parent, rank = heapq.heappop(frontier)
        nodes.append((parent, rank))
        for next_rank, next_chance in enumerate(RANK_CHANCES):
            heapq.heappush(frontier, (chance * next_chance, len(nodes) - 1, next_rank))
    return nodes


@contextmanager
def counting_forwards(model, on: bool) -> Iterator[Counter]:
    counts: Counter = Counter()
    hook = model.register_forward_hook(lambda *_: counts.update(forwards=1)) if on else None
    try:
        yield counts
    finally:
        if hook is not None:
            hook.remove()


def tokens_per_step(model, prompts, method: str, q: int, common: dict) -> tuple[list[int], list[int], list[bool]]:
    """New tokens and forward passes of each prompt, and whether its output loops."""
    tokens, steps, loops = [], [], []
    warm = Memory()
    if method == "lookahead":
        level, window, guess = LOOKAHEAD[q]
        lade.config_lade(MODE="lookahead", LEVEL=level, WINDOW_SIZE=window, GUESS_SET_SIZE=guess, ADAPTIVE=0)
    else:
        lade.config_lade(MODE="static" if method == "recycling, static" else "tree", MAX_BLOCK=q, ADAPTIVE=0)
    arguments = common | ({"prompt_lookup_num_tokens": q - 1} if method == "prompt lookup" else {})
    for inputs in prompts:
        memory = warm if method == "tree, warm" else SuffixOnly() if method == "suffix" else Memory()
        static = StaticRecycling(q - 1, inputs["input_ids"])
        register_drafter("static", lambda _, static=static: static)
        with (
            harness.use_lade(method != "prompt lookup"),
            memory.active(),
            counting_forwards(model, method == "prompt lookup") as counts,
        ):
            output, _ = harness.generate_timed(model, inputs, **arguments)
        stats = lade.last_stats()
        assert method == "prompt lookup" or stats.fallback_reason is None, stats.fallback_reason
        tokens.append(len(output))
        steps.append(counts["forwards"] if method == "prompt lookup" else stats.steps)
        loops.append(harness.is_looping(output))
    return tokens, steps, loops


METHODS = ("lookahead", "prompt lookup", "suffix", "recycling, static", "tree, cold", "tree, warm")


def equal_sizes(model, prompts, args, common, figures: dict) -> None:
    """Fills `figures`: tokens per step by method and size."""
    print(f"{'method':<20}" + "".join(f" q={q:<3} all  no loops |" for q in args.sizes))
    for method in METHODS:
        line = f"{method:<20}"
        for q in args.sizes:
            tokens, steps, loops = tokens_per_step(model, prompts, method, q, common)
            varied = [i for i, loop in enumerate(loops) if not loop]
            s_all = sum(tokens) / sum(steps)
            s_varied = sum(tokens[i] for i in varied) / max(1, sum(steps[i] for i in varied))
            figures.setdefault(method, {})[str(q)] = {
                "tokens_per_step": round(s_all, 4),
                "tokens_per_step_without_loops": round(s_varied, 4),
                "looping_outputs": sum(loops),
            }
            line += f"   {s_all:5.2f}  {s_varied:8.2f} |"
        print(line, flush=True)


def speeds(model, groups, args, figures: dict) -> None:
    """Fills `figures`: tokens per second as ratios to plain generate(), by prompt group and by how tokens are chosen."""
    methods = {"plain": {}, "prompt_lookup": {"prompt_lookup_num_tokens": 5}, "lade": {}}
    lade.config_lade(MODE="auto", ADAPTIVE=1, MAX_BLOCK=64)
    print(
        f"{'group':<8} {'temperature':>11} {'lade':>7} {'prompt lookup':>14} {'tokens/step':>12} {'slowest prompt':>15} {'(of plain)':>11} {'identical':>10}"
    )
    for name, prompts in groups.items():
        for temperature in args.temperatures:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            common = {"max_new_tokens": args.max_new_tokens, **sampling}
            runs = harness.run_methods(model, prompts, methods, args.trials, common)
            plain = runs["plain"]
            found = {method: harness.compare(runs[method], plain) for method in ("lade", "prompt_lookup")}
            slowest, noise = slowest_prompt(model, prompts, runs, args, common)
            same = sum(a == b for a, b in zip(runs["lade"][0].outputs, plain[0].outputs, strict=True)) / len(prompts)
            varied = [i for i, output in enumerate(plain[0].outputs) if not harness.is_looping(output)]
            figures.setdefault(name, {})[str(temperature)] = found | {
                "slowest_prompt": round(slowest, 4),
                "plain_again_on_that_prompt": round(noise, 4),
                "identical": round(same, 4),
                "without_loops": {m: harness.compare(runs[m], plain, varied) for m in found} if varied else None,
            }
            ratio = {method: found[method]["ratio_to_plain"]["median"] for method in found}
            print(
                f"{name:<8} {temperature:>11} {ratio['lade']:>6.2f}x {ratio['prompt_lookup']:>13.2f}x "
                f"{found['lade']['tokens_per_step']:>12.2f} {slowest:>14.2f}x {noise:>10.2f}x {same:>10.0%}",
                flush=True,
            )


def slowest_prompt(model, prompts, runs, args, common) -> tuple[float, float]:
    """The ratio to plain of lade's slowest prompt, and plain's own to itself on the same one.

    Of several prompts the slowest is partly the one with the worst luck, so it is run again by itself: these are medians of the new
    trials. By tokens per second: in 16 bits rounding makes outputs differ, and then they may end at different lengths.
    """
    lade_runs, plain_runs = runs["lade"], runs["plain"]
    slowest = min(range(len(prompts)), key=lambda i: ratio_of(lade_runs, plain_runs, i))
    methods = {"plain": {}, "plain_again": {}, "lade": {}}
    again = harness.run_methods(model, [prompts[slowest]], methods, args.slowest_trials, common)
    return ratio_of(again["lade"], again["plain"], 0), ratio_of(again["plain_again"], again["plain"], 0)


def ratio_of(runs, plain, i: int) -> float:
    """Of one prompt, the median over the trials."""
    return median(run.speed([i]) / base.speed([i]) for run, base in zip(runs, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.add_argument("--sizes", type=lambda text: [int(q) for q in text.split(",")], default=[8, 16, 64])
    parser.add_argument("--temperature", type=float, default=0.4, help="of the comparison at equal sizes; 0 for greedy")
    parser.add_argument("--speed", action="store_true", help="measure tokens per second instead")
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0, 0.7])
    parser.add_argument("--chat", action="store_true", help="with --speed: questions through the chat template, too")
    parser.add_argument("--random", action="store_true", help="with --speed: prompts of random tokens, too")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--slowest_trials", type=int, default=25, help="of the slowest prompt of each group, by itself")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    lade.augment_all()
    figures: dict = {
        "benchmark": "drafters",
        "environment": harness.environment(model),
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
    }
    if args.speed:
        groups = {"file": prompts}
        if args.chat:
            args.prompts = Path(__file__).parent / "chat.jsonl"
            groups["chat"] = harness.load_prompts(args, tokenizer)
        if args.random:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, len(tokenizer), (10, 1, 64), generator=generator).to(args.device)
            groups["random"] = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        figures |= {"trials": args.trials, "slowest_trials": args.slowest_trials, "speed": {}}
        with harness.reporting(figures, args.out):
            speeds(model, groups, args, figures["speed"])
    else:
        sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
        common = {"max_new_tokens": args.max_new_tokens, **sampling}
        figures |= {"temperature": args.temperature, "methods": {}}
        with harness.reporting(figures, args.out):
            equal_sizes(model, prompts, args, common, figures["methods"])


if __name__ == "__main__":
    main()
