"""Tokens per second of plain generate(), static cache under compile, transformers' prompt lookup, and lade.

    python benchmarks/decode.py --mode lookahead --level 5 --window 2 --guess 4
    python benchmarks/decode.py --dtype float32 --sample --methods plain,lade
    python benchmarks/decode.py --batch 4
    python benchmarks/decode.py --shape 7b --context 1000 --mode lookahead --level 5 --window 7 --guess 7

All methods take the same batches in one process. Prints a table and ends with one JSON line: hardware, versions,
settings, medians with p20/p80 over the trials, share of prompts whose output equals plain generate()'s, and how many of
those outputs are loops. With --shape the weights are random: then it reports how long a step takes, and no speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import parts
import shapes
import torch
from transformers import CompileConfig

import lade
from lade.models.eligibility import TOO_SHORT
from lade.switch import current_config

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "prompt_lookup": {"prompt_lookup_num_tokens": 5},
    "lade": {},  # each call with an empty memory
    "lade_unpacked": {},  # the same without packed weights
    "lade_kept": {},  # as by default: what one prompt has taught serves the next ones; forgotten before each trial
    "lookahead": {},  # lade with the paper's window and pool, of the sizes in --level --window --guess
}
# Settings of lade on top of the command line's, for the methods that are its own.
OWN: dict[str, dict[str, Any]] = {
    "lade": {},
    "lade_unpacked": {"PACK": 0},
    "lade_kept": {},
    "lookahead": {},
}
STUDIES = {"lade_unpacked"}  # what one part gives: run when named
kept = lade.Memory()  # of "lade_kept"


@dataclass
class Trial:
    """One method over all batches, once; one entry per batch in each list."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)  # of each row, without padding
    steps: list[int] = field(default_factory=list)  # of lade only
    block_tokens: list[int] = field(default_factory=list)  # of lade only, one entry per step after the prefill
    reasons: set[str] = field(default_factory=set)  # why blocks did not go through the forward that was asked for

    def num_tokens(self, chosen: list[int]) -> int:
        return sum(len(row) for i in chosen for row in self.outputs[i])

    def speed(self, chosen: list[int]) -> float:
        """Tokens per second over the chosen batches."""
        return self.num_tokens(chosen) / sum(self.seconds[i] for i in chosen)

    def tokens_per_step(self, chosen: list[int]) -> float | None:
        """Per row, the prefill counted as a step."""
        if not self.steps:
            return None
        return round(self.num_tokens(chosen) / sum(self.steps[i] * len(self.outputs[i]) for i in chosen), 4)


def batches(prompts: list[dict[str, torch.Tensor]], size: int, pad_token: int) -> list[dict[str, torch.Tensor]]:
    """Prompts of similar length together, padded on the left. Each batch is full: the longest prompts may be left
    over."""
    if size == 1:
        return prompts
    ordered = sorted((prompt["input_ids"][0] for prompt in prompts), key=len)
    found = []
    for start in range(0, len(ordered) - size + 1, size):
        rows = ordered[start : start + size]
        ids = torch.full((size, len(rows[-1])), pad_token, device=rows[0].device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def end_ids(model: Any) -> set[int]:
    ids = model.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def without_padding(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to the first end-of-sequence token, that one included."""
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def generate(model: Any, inputs: dict[str, torch.Tensor], name: str, trial: Trial, **arguments: Any) -> None:
    """One batch by one method; what came of it is added to the trial. lade is on for its own methods alone."""
    is_ahead = name in OWN
    memory = kept.active() if name == "lade_kept" else nullcontext()
    with lade.enabled(is_ahead, **OWN.get(name, {})), memory:
        torch.manual_seed(0)
        harness.synchronize(model)
        started = time.perf_counter()
        output = model.generate(**inputs, **arguments)
        harness.synchronize(model)
        trial.seconds.append(time.perf_counter() - started)
    ends = end_ids(model)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    trial.outputs.append([without_padding(row, ends) for row in rows])
    if is_ahead:
        stats = lade.last_stats()
        if stats is None or stats.fallback_reason not in (None, TOO_SHORT):
            raise RuntimeError(f"lookahead did not run: {stats}")
        trial.steps.append(stats.steps)
        trial.block_tokens += stats.block_tokens
        trial.reasons |= parts.reasons(stats)


def run_methods(
    model: Any,
    inputs: list[dict[str, torch.Tensor]],
    methods: dict[str, dict[str, Any]],
    trials: int,
    common: dict[str, Any],
) -> dict[str, list[Trial]]:
    """Each trial takes every batch through every method in turn. methods: name -> arguments of generate().

    A run that is stopped returns the trials that are complete, if there are any.
    """
    kept.clear()
    warm_up(model, inputs, methods, common)
    if current_config().compile or model.device.type == "cuda":  # every shape that will come, compiled or captured
        for name in OWN.keys() & methods.keys():
            for batch in inputs:
                generate(model, batch, name, Trial(), **common)
    found: dict[str, list[Trial]] = {name: [Trial() for _ in range(trials)] for name in methods}
    for i in range(trials):
        kept.clear()  # no trial has seen the prompts before
        try:
            for batch in inputs:
                for name, arguments in methods.items():
                    generate(model, batch, name, found[name][i], **common, **arguments)
        except KeyboardInterrupt:
            if not i:
                raise
            print(f"stopped: {i} of {trials} trials are complete")
            return {name: complete[:i] for name, complete in found.items()}
    return found


def warm_up(model: Any, inputs: list[dict[str, torch.Tensor]], methods: dict[str, Any], common: dict[str, Any]) -> None:
    """The longest batch first: a static cache keeps its largest size, and a new size would be compiled anew."""
    longest = max(inputs, key=lambda batch: batch["input_ids"].shape[1])
    for name, arguments in methods.items():
        for batch in (longest, *inputs[:3]):
            generate(model, batch, name, Trial(), **common, **arguments)


def chosen_methods(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> arguments of generate()."""
    on_gpu = torch.device(args.device).type == "cuda"
    left_out = STUDIES | {None if on_gpu else "static", "lade_kept" if args.shape else None}
    names = args.methods.split(",") if args.methods else [name for name in METHODS if name not in left_out]
    OWN["lookahead"] = {"MODE": "lookahead"} | harness.sizes(args)
    unknown = set(names) - set(METHODS)
    if unknown:
        raise SystemExit(f"--methods takes names of {', '.join(METHODS)}, got {min(unknown)!r}")
    if args.methods and "prompt_lookup" in names and (args.batch > 1 or args.shape):
        raise SystemExit(
            "--methods prompt_lookup needs --batch 1 and no --shape: transformers' takes one prompt at a time"
        )
    names = [name for name in names if name != "prompt_lookup" or (args.batch == 1 and not args.shape)]
    if "plain" not in names:
        names.insert(0, "plain")  # the others are compared with it
    methods = {name: dict(METHODS[name]) for name in names}
    if "static" in methods and not on_gpu:  # transformers compiles by itself on a GPU
        methods["static"]["compile_config"] = CompileConfig(mode="default")
        methods["static"]["compile_config"]._compile_all_devices = True
    return methods


def compare(trials: list[Trial], plain: list[Trial], chosen: list[int]) -> dict[str, Any]:
    """A method's figures beside plain generate()'s in the same trials. chosen: batches."""
    ratios = [trial.speed(chosen) / base.speed(chosen) for trial, base in zip(trials, plain, strict=True)]
    return {
        "tokens_per_second": harness.spread([trial.speed(chosen) for trial in trials]),
        "ratio_to_plain": harness.spread(ratios),
        "tokens_per_step": trials[0].tokens_per_step(chosen),
    }


def rows_of(trial: Trial) -> list[list[int]]:
    return [row for batch in trial.outputs for row in batch]


def measure_overhead(model: Any, inputs: list[dict[str, torch.Tensor]], common: dict[str, Any]) -> float:
    """Share of a lookahead step that is not spent in the model's forward; from the first block's end to the last one's.

    CPU only: elsewhere a forward returns before it is done. Of the loop on the host: watching keeps steps from the
    device.
    """
    spans: list[tuple[float, float]] = []  # of each forward

    @contextmanager
    def timed(_: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        spans.append((started, time.perf_counter()))

    inside = total = 0.0
    with parts.watched(timed, ("forward",)), lade.stats.tracing(lambda *_: None):
        for batch in inputs:
            spans.clear()
            generate(model, batch, "lade", Trial(), **common)
            inside += sum(end - start for start, end in spans[1:])
            total += spans[-1][1] - spans[0][1]
    return 1 - inside / total if total else 0.0


def compare_speeds(
    model: Any, inputs: list[dict[str, torch.Tensor]], found: dict[str, list[Trial]], common: dict[str, Any]
) -> dict[str, Any]:
    """The table of a model with real weights, and its figures."""
    plain, everything = found["plain"], list(range(len(inputs)))
    expected = rows_of(plain[0])
    varied = [i for i in everything if not any(map(harness.is_looping, plain[0].outputs[i]))]
    num_loops = sum(map(harness.is_looping, expected))
    figures: dict[str, Any] = {"looping_outputs": num_loops, "methods": {}, "methods_without_looping_outputs": {}}
    print(
        f"{'method':<14} {'tokens/s':>9} {'p20':>8} {'p80':>8} {'ratio':>7} {'tokens/step':>12} {'identical':>10}  no loops: ratio, tokens/step"
    )
    for name, trials in found.items():
        row = compare(trials, plain, everything)
        row["identical_outputs"] = sum(map(list.__eq__, rows_of(trials[0]), expected)) / len(expected)
        apart = compare(trials, plain, varied) if varied else None
        figures["methods"][name], figures["methods_without_looping_outputs"][name] = row, apart
        speed = row["tokens_per_second"]
        print(
            f"{name:<14} {speed['median']:>9.1f} {speed['p20']:>8.1f} {speed['p80']:>8.1f} "
            f"{row['ratio_to_plain']['median']:>7.3f} {row['tokens_per_step'] or '':>12} {row['identical_outputs']:>10.0%}"
            + (f"  {apart['ratio_to_plain']['median']:.3f}, {apart['tokens_per_step'] or '-'}" if apart else "")
        )
    if "lade" in found:
        figures["reasons"] = parts.show_reasons(found["lade"][0].reasons)
    if "lade" in found and model.device.type == "cpu":
        figures["host_overhead"] = round(measure_overhead(model, inputs, common), 4)
        print(f"share of a lookahead step outside of the model's forward: {figures['host_overhead']:.1%}")
    print(f"outputs of plain generate() that end in a loop: {num_loops} of {len(expected)}")
    return figures


def compare_steps(
    model: Any,
    inputs: list[dict[str, torch.Tensor]],
    methods: dict[str, dict[str, Any]],
    trials: int,
    common: dict[str, Any],
) -> dict[str, Any]:
    """The table of a model with random weights, and its figures: what a step after the prompt's takes, and no speed.

    It is the time of a whole call less that of a call for one token, over the steps between: all but the prompt's own.
    """
    short = common | {"max_new_tokens": 1}
    long_runs = run_methods(model, inputs, methods, trials, common)
    short_runs = run_methods(model, inputs, methods, trials, short)
    figures: dict[str, Any] = {}
    print(f"{'method':<14} {'ms/step':>9} {'p20':>8} {'p80':>8} {'tokens/block':>13}")
    for name in methods:
        times = []
        for long, prompt in zip(long_runs[name], short_runs[name], strict=True):
            steps = sum(long.steps) if long.steps else len(inputs) * common["max_new_tokens"]
            times.append((sum(long.seconds) - sum(prompt.seconds)) * 1e3 / (steps - len(inputs)))
        block = long_runs[name][0].block_tokens
        mean_block = round(sum(block) / len(block), 2) if block else 1.0
        figures[name] = {"milliseconds_per_step": harness.spread(times), "mean_block_tokens": mean_block}
        time_ = figures[name]["milliseconds_per_step"]
        print(f"{name:<14} {time_['median']:>9.3f} {time_['p20']:>8.3f} {time_['p80']:>8.3f} {mean_block:>13}")
    reasons = parts.show_reasons(long_runs["lade"][0].reasons) if "lade" in long_runs else []
    print("random weights: their text is nobody's, so no speed follows from these times")
    return {"steps": figures, "reasons": reasons}


def load(args: argparse.Namespace) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model and the batches."""
    if args.shape:
        longest = args.context + args.max_new_tokens + 256  # and a block behind it
        model = shapes.random_model(args.shape, args.device, getattr(torch, args.dtype), longest)
        return model, shapes.random_prompts(model, args.limit, args.batch, args.context)
    model, tokenizer = harness.load_model(args)
    prompts = [dict(prompt) for prompt in harness.load_prompts(args, tokenizer)]
    if len(prompts) < args.batch:
        raise SystemExit(f"--batch must be at most the number of prompts, {len(prompts)}, got {args.batch}")
    pad_token = tokenizer.pad_token_id
    if pad_token is None:
        pad_token = model.generation_config.pad_token_id or 0  # masked: any id will do
    return model, batches(prompts, args.batch, pad_token)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parts.add_forward_arguments(parser)
    shapes.add_shape_argument(parser, "reports the time of a step, never a speed")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt with --shape")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together, padded on the left")
    parser.add_argument("--sample", action="store_true", help="sample at --temperature instead of greedy")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--methods",
        help=f"of {','.join(METHODS)}; by default all that can run, static on a GPU only, without {', '.join(sorted(STUDIES))}",
    )
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    for name, low in (("batch", 1), ("trials", 1), ("limit", 1), ("context", 1), ("max_new_tokens", 2)):
        if getattr(args, name) < low:
            parser.error(f"--{name} must be at least {low}, got {getattr(args, name)}")
    return args


def main() -> None:
    args = parse()
    methods = chosen_methods(args)
    model, inputs = load(args)
    harness.set_up_lade(args)
    parts.set_up_forward(args)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.sample else {"do_sample": False}
    common = {"max_new_tokens": args.max_new_tokens, **sampling}
    figures: dict[str, Any] = {
        "benchmark": "decode",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args) | common | parts.forward_settings(args),
        "batch": args.batch,
        "prompts": len(inputs) * args.batch,
        "trials": args.trials,
    }
    with harness.reporting(figures, args.out):
        if args.shape:
            figures |= {"shape": args.shape, "context": args.context}
            figures |= compare_steps(model, inputs, methods, args.trials, common)
        else:
            figures["prompt_file"] = args.prompts.name
            found = run_methods(model, inputs, methods, args.trials, common)
            figures["trials"] = len(found["plain"])
            figures |= compare_speeds(model, inputs, found, common)


if __name__ == "__main__":
    main()
