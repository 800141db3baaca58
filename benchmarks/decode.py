"""Tokens per second of plain generate(), transformers' prompt lookup, and lade, on the same prompts in one process.

    python benchmarks/decode.py --level 5 --window 2 --guess 4
    python benchmarks/decode.py --dtype float32 --sample --methods plain,lade

Prints a table and ends with one JSON line: hardware, versions, settings, medians with p20/p80 over the trials, share of
prompts whose output equals plain generate()'s, and how many of those outputs are loops.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import harness

METHODS = {
    "plain": {},
    "static": {"cache_implementation": "static"},  # transformers compiles this one on a GPU
    "prompt_lookup": {"prompt_lookup_num_tokens": 5},
    "lade": {},
}


def measure_overhead(model, prompts, common) -> float:
    """Share of a lookahead step that is not spent in the model's forward; from the prefill's end to the last forward's.

    CPU only: elsewhere a forward returns before it is done.
    """
    spans: list[tuple[float, float]] = []  # of each forward
    started = 0.0

    def before(*_):
        nonlocal started
        started = time.perf_counter()

    hooks = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(lambda *_: spans.append((started, time.perf_counter()))),
    ]
    inside = total = 0.0
    with harness.use_lade(True):
        for inputs in prompts:
            spans.clear()
            harness.generate_timed(model, inputs, **common)
            inside += sum(end - start for start, end in spans[1:])
            total += spans[-1][1] - spans[0][1]
    for hook in hooks:
        hook.remove()
    return 1 - inside / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parser.add_argument("--sample", action="store_true", help="sample at --temperature instead of greedy")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--methods", default="plain,prompt_lookup,lade", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    model, tokenizer = harness.load_model(args)
    prompts = harness.load_prompts(args, tokenizer)
    harness.set_up_lade(args)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.sample else {"do_sample": False}
    common = {"max_new_tokens": args.max_new_tokens, **sampling}

    methods = {name: METHODS[name] for name in args.methods.split(",")}
    runs = harness.run_methods(model, prompts, methods, args.trials, common)

    plain = runs["plain"]
    varied = [i for i, output in enumerate(plain[0].outputs) if not harness.is_looping(output)]
    figures: dict = {
        "benchmark": "decode",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common,
        "prompts": len(prompts),
        "prompt_file": args.prompts.name,
        "trials": args.trials,
        "looping_outputs": len(prompts) - len(varied),
        "methods": {},
        "methods_without_looping_outputs": {},
    }
    print(
        f"{'method':<14} {'tokens/s':>9} {'p20':>8} {'p80':>8} {'ratio':>7} {'tokens/step':>12} {'identical':>10}  no loops: ratio, tokens/step"
    )
    for name, trials in runs.items():
        row = harness.compare(trials, plain)
        row["identical_outputs"] = sum(a == b for a, b in zip(trials[0].outputs, plain[0].outputs, strict=True)) / len(
            prompts
        )
        apart = harness.compare(trials, plain, varied) if varied else None
        figures["methods"][name], figures["methods_without_looping_outputs"][name] = row, apart
        speed = row["tokens_per_second"]
        print(
            f"{name:<14} {speed['median']:>9.1f} {speed['p20']:>8.1f} {speed['p80']:>8.1f} "
            f"{row['ratio_to_plain']['median']:>7.3f} {row['tokens_per_step'] or '':>12} {row['identical_outputs']:>10.0%}"
            + (f"  {apart['ratio_to_plain']['median']:.3f}, {apart['tokens_per_step'] or '-'}" if apart else "")
        )
    if "lade" in runs and model.device.type == "cpu":
        figures["host_overhead"] = round(measure_overhead(model, prompts, common), 4)
        print(f"share of a lookahead step outside of the model's forward: {figures['host_overhead']:.1%}")
    print(f"outputs of plain generate() that end in a loop: {len(prompts) - len(varied)} of {len(prompts)}")
    harness.finish(figures, args.out)


if __name__ == "__main__":
    main()
