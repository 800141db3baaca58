"""Tokens per second where lade chooses each block, by kind of prompt and temperature, beside transformers' prompt
lookup.

    python benchmarks/drafters.py --limit 37 --chat --random

Tokens per step at equal block size, of these and of others: replay.py. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import harness
import torch

import lade


def speeds(model, groups, args, figures: dict) -> None:
    """Fills `figures`: tokens per second as ratios to plain generate(), by prompt group and by how tokens are
    chosen."""
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

    Of several prompts the slowest is partly the one with the worst luck, so it is run again by itself: these are
    medians of the new trials. By tokens per second: in 16 bits rounding makes outputs differ, and then they may end at
    different lengths.
    """
    lade_runs, plain_runs = runs["lade"], runs["plain"]
    slowest = min(range(len(prompts)), key=lambda i: ratio_of(lade_runs, plain_runs, i))
    methods = {"plain": {}, "plain_again": {}, "lade": {}}
    again = harness.run_methods(model, [prompts[slowest]], methods, args.slowest_trials, common)
    return ratio_of(again["lade"], again["plain"], 0), ratio_of(again["plain_again"], again["plain"], 0)


def ratio_of(runs, plain, i: int) -> float:
    """Ratio to plain generate() on one prompt, the median over the trials."""
    return median(run.speed([i]) / base.speed([i]) for run, base in zip(runs, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0, 0.7])
    parser.add_argument("--chat", action="store_true", help="questions through the chat template, too")
    parser.add_argument("--random", action="store_true", help="prompts of random tokens, too")
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


if __name__ == "__main__":
    main()
