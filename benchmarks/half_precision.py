"""How often outputs in 16 bits part from plain generate(), where, and by how little.

    python benchmarks/half_precision.py --dtype bfloat16

A matrix product over q rows rounds differently from one over one row, so two tokens whose logits nearly tie may swap.
For lade and for transformers' prompt lookup this reports: the share of identical outputs, the position of the first
difference, and the margin there between plain generate()'s two best logits, in units of the dtype's rounding (the
spacing of its numbers at that size). Each output is then fed back in one plain forward pass: every token must be that
pass's argmax, or lie within --ties units of it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import harness
import torch

import lade

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lade": {},
    "prompt_lookup": {"prompt_lookup_num_tokens": 5},
}


def spacing(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of `dtype` at the size of each value."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * torch.exp2(exponent)


@torch.no_grad()
def teacher_forced(model: Any, inputs: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] behind each prefix of the answer, from one plain pass over all of it."""
    answer = torch.tensor([tokens], device=model.device)
    ids = torch.cat([inputs["input_ids"], answer], dim=1)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, inputs["input_ids"].shape[1] - 1 : -1].float()


def shortfall(logits: torch.Tensor, tokens: list[int], dtype: torch.dtype) -> float:
    """How far the worst token's logit is below the best one, in units of rounding; 0 = every token is the argmax."""
    best = logits.max(dim=1).values
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float(((best - chosen) / spacing(best, dtype)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parser.add_argument("--ties", type=float, default=4.0, help="units of rounding within which two logits tie")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    harness.set_up_lade(args)
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    figures: dict[str, Any] = {
        "benchmark": "half_precision",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common,
        "prompts": len(prompts),
        "tie_width": args.ties,
        "methods": {},
    }
    with harness.reporting(figures, args.out):
        outputs: dict[str, list[list[int]]] = {}
        for name, arguments in METHODS.items():
            with harness.use_lade(name == "lade"):
                outputs[name] = [harness.generate_timed(model, p, **common, **arguments)[0] for p in prompts]
                if name == "lade" and lade.last_stats().fallback_reason:
                    raise RuntimeError(lade.last_stats().fallback_reason)

        print(
            f"{'method':<14} {'identical':>10} {'first difference':>17} {'margin there':>13} {'worst token':>12} {'within ties':>12}"
        )
        for name, answers in outputs.items():
            positions, margins, worst = [], [], []
            for inputs, answer, plain in zip(prompts, answers, outputs["plain"], strict=True):
                logits = teacher_forced(model, inputs, answer)
                worst.append(shortfall(logits, answer, model.dtype))
                if answer == plain:
                    continue
                position = next(i for i, pair in enumerate(zip(answer, plain, strict=False)) if pair[0] != pair[1])
                top = logits[position].topk(2).values
                positions.append(position)
                margins.append(float((top[0] - top[1]) / spacing(top[0], model.dtype)))
            row = {
                "identical_outputs": 1 - len(positions) / len(prompts),
                "first_differences": sorted(positions),
                "margins_in_units_of_rounding": [round(m, 2) for m in sorted(margins)],
                "worst_token_in_units_of_rounding": round(max(worst), 2),
                "within_tie_width": sum(w <= args.ties for w in worst) / len(prompts),
            }
            figures["methods"][name] = row
            middle = f"{statistics.median(positions):.0f}" if positions else "-"
            margin = f"{max(margins):.2f} at most" if margins else "-"
            print(
                f"{name:<14} {row['identical_outputs']:>10.0%} {middle:>17} {margin:>13} "
                f"{row['worst_token_in_units_of_rounding']:>12} {row['within_tie_width']:>12.0%}"
            )


if __name__ == "__main__":
    main()
