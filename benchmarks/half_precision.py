"""Differences of outputs in 16 bits from plain generate()'s: how often, where, and by how little.

    python benchmarks/half_precision.py --dtype bfloat16 --limit 37
    python benchmarks/half_precision.py --dtype bfloat16 --limit 37 --temperature 0.7

A forward over q rows rounds differently from one over one row, so two tokens that nearly tie may swap. For each method
this reports: identical outputs, the position of the first difference, and the margin there between plain generate()'s
two best tokens, in units of the dtype's rounding (the spacing of its numbers at the size of the logit): logits for
greedy, for sampling log(p / e) times the temperature, where e are the draws. Greedy outputs are also fed back in one
plain forward pass, which says how far the worst token lies below the argmax. Speed is tokens per second beside plain
generate()'s, the methods in turn on each prompt; each call begins with an empty memory.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from lade.commands.measure import Method, Run, run_methods, spread

F = torch.nn.functional
METHODS = {
    "plain": Method(),
    "lade": Method(settings={}),
    "prompt_lookup": Method({"prompt_lookup_num_tokens": 5}),
}


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at the size of each value."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * torch.exp2(exponent)


def margin(ranks: Tensor, logits: Tensor, temperature: float) -> float:
    """Between the two best of `ranks`, in units of rounding of the larger of their logits.

    ranks: [V], the logits for greedy, log(p / e) for sampling, where a logit counts by 1 / temperature.
    """
    values, tokens = ranks.topk(2)
    unit = spacing(logits[tokens].float().abs().max(), logits.dtype) / temperature
    return float((values[0] - values[1]) / unit)


@torch.no_grad()
def teacher_forced(model: Any, inputs: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits [T, V] behind each prefix of the answer, from one plain pass over all of it."""
    answer = torch.tensor([tokens], device=model.device)
    ids = torch.cat([inputs["input_ids"], answer], dim=1)
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, inputs["input_ids"].shape[1] - 1 : -1]


def shortfall(logits: Tensor, tokens: list[int]) -> float:
    """Distance of the worst token's logit from the best one, in units of rounding; 0 = every token is the argmax."""
    best = logits.float().max(dim=1).values
    chosen = logits.float().gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float(((best - chosen) / spacing(best, logits.dtype)).max())


def margin_at(logits: Tensor, position: int, temperature: float | None) -> float:
    """The margin at one token of an answer with seed 0. logits: [V] there."""
    if temperature is None:
        return margin(logits.float(), logits, 1.0)
    torch.manual_seed(0)
    for _ in range(position + 1):
        draws = torch.empty(1, len(logits)).exponential_(1)
    ranks = F.log_softmax(logits.float() / temperature, dim=-1) - draws[0].log()
    return margin(ranks, logits, temperature)


def first_difference(one: list[int], other: list[int]) -> int:
    return next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])


def row_of(
    model: Any, prompts: list[Any], runs: list[Run], plain: list[Run], temperature: float | None
) -> dict[str, Any]:
    """Figures of one method."""
    positions, margins, worst = [], [], []
    for inputs, answer, expected in zip(prompts, runs[0].outputs, plain[0].outputs, strict=True):
        if temperature is None:
            worst.append(shortfall(teacher_forced(model, inputs, answer), answer))
        if answer != expected:
            positions.append(first_difference(answer, expected))
            logits = teacher_forced(model, inputs, expected)[positions[-1]]
            margins.append(margin_at(logits, positions[-1], temperature))
    ratios = [
        statistics.median(
            base.seconds[i] / len(base.outputs[i]) / (run.seconds[i] / len(run.outputs[i]))
            for run, base in zip(runs, plain, strict=True)
        )
        for i in range(len(prompts))
    ]
    return {
        "identical": len(prompts) - len(positions),
        "first_differences": positions,
        "margins_in_units_of_rounding": [round(m, 2) for m in margins],
        "worst_token_in_units_of_rounding": round(max(worst), 2) if worst else None,
        "speed_to_plain": spread([run.speed() / base.speed() for run, base in zip(runs, plain, strict=True)]),
        "speed_to_plain_by_prompt": [round(ratio, 4) for ratio in ratios],
        "tokens_per_step": runs[0].tokens_per_step(),
        "same_in_every_trial": all(run.outputs == runs[0].outputs for run in runs),
    }


def compare_methods(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    harness.set_up_lade(args)
    common: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    if args.temperature is not None:
        common |= {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    figures |= {
        "benchmark": "half_precision",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common,
        "trials": args.trials,
        "prompts": len(prompts),
    }
    chosen = {name: METHODS[name] for name in args.methods}
    runs = run_methods(model, prompts, chosen, args.trials, common)
    rows = {name: row_of(model, prompts, found, runs["plain"], args.temperature) for name, found in runs.items()}
    print(
        f"{'method':<14} {'identical':>10} {'first differences':>18} {'margin there':>13} {'to plain':>9} {'tokens/step':>12}"
    )
    for name, row in rows.items():
        places, margins = row["first_differences"], row["margins_in_units_of_rounding"]
        print(
            f"{name:<14} {row['identical']:>4} of {len(prompts):<3} "
            f"{f'{min(places)} to {max(places)}' if places else '-':>17} {f'{max(margins):.2f} at most' if margins else '-':>13} "
            f"{row['speed_to_plain']['median']:>9.3f} {row['tokens_per_step'] or 1:>12}"
        )
    figures["methods"] = rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    names = list(METHODS)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=names, help=",".join(names))
    parser.add_argument("--temperature", type=float, help="sample, with seed 0 for each prompt; greedy without it")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    unknown = sorted(set(args.methods) - set(names))
    if unknown or "plain" not in args.methods:
        parser.error(f"--methods must have plain, and others of {', '.join(names)}; got {','.join(args.methods)}")
    figures: dict[str, Any] = {}
    with harness.reporting(figures, args.out):
        compare_methods(args, figures)


if __name__ == "__main__":
    main()
