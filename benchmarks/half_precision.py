"""How often outputs in 16 bits part from plain generate()'s, where, by how little, and what would bring them closer.

    python benchmarks/half_precision.py --dtype bfloat16 --limit 37
    python benchmarks/half_precision.py --dtype bfloat16 --limit 37 --temperature 0.7
    python benchmarks/half_precision.py --study attention

A forward over q rows rounds differently from one over one row, so two tokens that nearly tie may swap. For each method
this reports: identical outputs, the position of the first difference, and the margin there between plain generate()'s
two best tokens, in units of the dtype's rounding (the spacing of its numbers at the size of the logit): logits for
greedy, for sampling log(p / e) times the temperature, where e are the draws. Greedy outputs are also fed back in one
plain forward pass, which says how far the worst token lies below the argmax. Speed is tokens per second beside plain
generate()'s, the methods in turn on each prompt; each call begins with an empty memory.

Three methods are studies of how lade could come closer to plain generate(), and exist in this file only:

    retake_1, retake_2   a token whose margin in a block of several tokens is at most 1 or 2 units is not decided there,
    but
                         by a forward over that token alone, as plain generate() makes it
    own_keys             each token of a block attends to exactly its own keys, in their order, in a call of its own

--study attention compares rows of a block with the same rows alone, for linear layers and for attention by themselves.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import harness
import torch
from torch import Tensor

from lade import spoiled
from lade.commands.measure import Method, Run, for_warm_up, run_once, spread
from lade.forward.runner import BlockRunner
from lade.verification.selection import GreedySelection, PerRowSelection

F = torch.nn.functional
LANES = (
    16  # float32 numbers that sdpa's kernel for CPUs with AVX-512 sums at once; what is left over is summed one by one
)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at the size of each value."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * torch.exp2(exponent)


# Studies.


def margin(ranks: Tensor, logits: Tensor, temperature: float) -> float:
    """Between the two best of `ranks`, in units of rounding of the larger of their logits.

    ranks: [V], the logits for greedy, log(p / e) for sampling, where a logit counts by 1 / temperature.
    """
    values, tokens = ranks.topk(2)
    unit = spacing(logits[tokens].float().abs().max(), logits.dtype) / temperature
    return float((values[0] - values[1]) / unit)


@contextmanager
def retaking(units: float, temperature: float | None, tally: Counter[str]) -> Iterator[None]:
    """Tokens whose margin in a block is at most so many units are decided by a forward over their root alone.

    The way of a step that a guess has spoiled: nothing behind the undecided token is committed, and the next step has
    no guesses.
    """
    scale = 1.0 if temperature is None else temperature

    def is_near_tie(selection: Any, ranks: Tensor, logits: Tensor) -> bool:
        tally["tokens"] += 1
        if margin(ranks, logits, scale) > units:
            return False
        tally["retaken"] += 1
        selection.spoiled.next_is_plain = True
        return True

    def greedy(self: Any, rows: slice, nodes: list[int], _: Any) -> list[int] | None:
        [logits] = self._block_logits.of(rows, nodes)
        is_alone = self._block_logits.logits.shape[1] == 1
        return None if not is_alone and is_near_tie(self, logits.float(), logits) else [int(logits.float().argmax())]

    def sampled(self: Any, rows: slice, nodes: list[int], _: Any) -> list[int] | None:
        logits, ids = self._block_logits.of(rows, nodes), self.sequences.texts(rows)
        probabilities = F.softmax(self._scores(ids, logits.to(torch.float32, copy=True)), dim=-1)
        index = len(self.sequences.generated[rows.start])
        draws = self.draws.draw(index, probabilities.shape[1])[rows]
        arrivals = (probabilities / draws)[0]
        is_alone = self._block_logits.logits.shape[1] == 1
        if not is_alone and is_near_tie(self, arrivals.log(), logits[0]):
            return None
        return [int(arrivals.argmax())]

    with (
        replaced(GreedySelection, "_choose", greedy),
        replaced(PerRowSelection, "_choose", sampled),
        replaced(spoiled, "clear_guesses", lambda *_: (set(), set())),  # nothing is spoiled here
    ):
        yield


@contextmanager
def own_keys(tally: Counter[str]) -> Iterator[None]:
    """Each token of a block attends in a call of its own, to the keys that it sees and no masked ones behind them."""
    forward, attention = BlockRunner.eager_forward, F.scaled_dot_product_attention

    def rowwise(
        start: int, paths: list[list[int]], query: Tensor, key: Tensor, value: Tensor, **arguments: Any
    ) -> Tensor:
        """start: L. paths: of each row the block tokens that it sees, depth first, so that each row writes but its own
        slot."""
        arguments["attn_mask"] = None
        block_keys, block_values = key[:, :, start:].clone(), value[:, :, start:].clone()
        found, held = [query] * len(paths), list(range(len(paths)))  # held: the block token whose keys a slot has
        for row in sorted(held, key=paths.__getitem__):
            end = start + len(paths[row])
            if held[end - start - 1] != row:
                held[end - start - 1] = row
                key[:, :, end - 1], value[:, :, end - 1] = block_keys[:, :, row], block_values[:, :, row]
            found[row] = attention(query[:, :, row : row + 1], key[:, :, :end], value[:, :, :end], **arguments)
        key[:, :, start:], value[:, :, start:] = block_keys, block_values
        return torch.cat(found, dim=2)

    def run(self: Any, block: Any, cache: Any, **wanted: Any) -> Any:
        if block.tokens.shape[1] == 1:
            return forward(self, block, cache, **wanted)
        tally["blocks"] += 1
        paths = [row.nonzero()[:, 0].tolist() for row in block.visible[0]]
        with replaced(F, "scaled_dot_product_attention", partial(rowwise, block.lengths[0], paths)):
            return forward(self, block, cache, **wanted)

    with replaced(BlockRunner, "eager_forward", run):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def methods(
    temperature: float | None,
) -> dict[str, tuple[Method, Callable[[Counter[str]], AbstractContextManager[None]]]]:
    """By name: how to decode, and around what change of lade."""
    ahead = Method(settings={})
    return {
        "plain": (Method(), nullcontext),
        "lade": (ahead, nullcontext),
        "prompt_lookup": (Method({"prompt_lookup_num_tokens": 5}), nullcontext),
        "retake_1": (ahead, partial(retaking, 1, temperature)),
        "retake_2": (ahead, partial(retaking, 2, temperature)),
        "own_keys": (ahead, own_keys),
    }


# Figures.


@torch.no_grad()
def teacher_forced(model: Any, inputs: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits [T, V] behind each prefix of the answer, from one plain pass over all of it."""
    answer = torch.tensor([tokens], device=model.device)
    ids = torch.cat([inputs["input_ids"], answer], dim=1)
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, inputs["input_ids"].shape[1] - 1 : -1]


def shortfall(logits: Tensor, tokens: list[int]) -> float:
    """How far the worst token's logit is below the best one, in units of rounding; 0 = every token is the argmax."""
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
    model: Any, prompts: list[Any], runs: list[Run], plain: list[Run], tally: Counter[str], temperature: float | None
) -> dict[str, Any]:
    """What is reported of one method."""
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
        **tally,
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
    chosen = {name: made for name, made in methods(args.temperature).items() if name in args.methods}
    tallies = {name: Counter[str]() for name in chosen}
    runs = {name: [Run() for _ in range(args.trials)] for name in chosen}

    def run(name: str, inputs: Any, into: Run) -> None:
        method, change = chosen[name]
        with nullcontext() if change is nullcontext else change(tallies[name]):
            run_once(model, inputs, method, into, common)

    for name in chosen:
        for inputs in for_warm_up(prompts):
            run(name, inputs, Run())
        tallies[name].clear()
    for trial in range(args.trials):
        for inputs in prompts:
            for name in chosen:
                run(name, inputs, runs[name][trial])
    rows = {
        name: row_of(model, prompts, found, runs["plain"], tallies[name], args.temperature)
        for name, found in runs.items()
    }
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


# Where bits differ.


def study_attention(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Rows of a block against the same rows alone: how many elements differ, for linear layers and for attention."""
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    linear: dict[str, dict[int, float]] = {}
    for inputs, outputs in ((320, 880), (880, 320), (1024, 1024), (2048, 2048), (2048, 8192), (8192, 2048)):
        weight, states = torch.randn(outputs, inputs).mul(0.02).to(dtype), torch.randn(64, inputs).to(dtype)
        alone = torch.cat([F.linear(row, weight) for row in states[:, None]])
        linear[f"{inputs} to {outputs}"] = {
            rows: unequal(F.linear(states[:rows], weight), alone[:rows]) for rows in (2, 4, 8, 16, 32, 33, 48, 64)
        }
    print("linear layers: share of elements in which a row among so many differs from the same row alone")
    for name, by_rows in linear.items():
        print(f"  {name:<14}", *(f"{rows}: {share:.3%}" for rows, share in by_rows.items()))

    attention: dict[str, dict[str, list[float]]] = {}
    for heads, width in ((5, 64), (32, 64), (32, 128)):
        found: dict[str, list[float]] = defaultdict(list)
        for length in (100, 250, 256, 257, 500, 520, 1000):
            for size in (2, 4, 8, 16, 32):
                end = length + size
                query, key, value = (torch.randn(1, heads, n, width).to(dtype) for n in (size, end, end))
                mask = torch.full((size, end), torch.finfo(dtype).min).triu(length + 1).to(dtype)
                block = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
                for row in range(size):
                    seen = length + row + 1
                    alone = F.scaled_dot_product_attention(
                        query[:, :, row : row + 1], key[:, :, :seen], value[:, :, :seen]
                    )
                    kind = "none of its own" if seen // LANES == end // LANES else "one or more"
                    found[kind].append(unequal(block[:, :, row : row + 1], alone))
        attention[f"{heads} heads of {width}"] = found
    print(
        f"sdpa: the same, by whether the masked keys behind a row's own fill another group of {LANES}; in brackets: rows that are equal"
    )
    for name, kinds in attention.items():
        for kind, shares in sorted(kinds.items()):
            equal = shares.count(0.0)
            print(f"  {name:<16} {kind:<16} {statistics.mean(shares):.3%} ({equal} of {len(shares)})")
    price = {}
    for heads, width in ((5, 64), (32, 64)):
        for length in (256, 1000):
            price[f"{heads} heads of {width}, {length} tokens before"] = price_of_own_keys(heads, width, length, dtype)
    print("time of 8 calls of sdpa, each for one token and its own keys, beside the one call for a block of 8")
    for name, ratio in price.items():
        print(f"  {name:<32} {ratio:.2f}")
    figures |= {
        "benchmark": "half_precision_attention",
        "price_of_own_keys": price,
        "environment": harness.machine(torch.device("cpu"), dtype),
        "linear": linear,
        "attention": {
            name: {
                kind: {"unequal": statistics.mean(shares), "rows": len(shares), "equal_rows": shares.count(0.0)}
                for kind, shares in kinds.items()
            }
            for name, kinds in attention.items()
        },
    }


def price_of_own_keys(
    heads: int, width: int, length: int, dtype: torch.dtype, size: int = 8, trials: int = 40
) -> float:
    """Median time of a call for each row of a chain beside that of one call for all of them, in turn."""
    end = length + size
    query, key, value = (torch.randn(1, heads, n, width).to(dtype) for n in (size, end, end))
    mask = torch.zeros(size, end, dtype=dtype)
    seconds: list[list[float]] = [[], []]
    for _ in range(trials):
        began = perf_counter()
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        between = perf_counter()
        for row in range(size):
            seen = length + row + 1
            F.scaled_dot_product_attention(query[:, :, row : row + 1], key[:, :, :seen], value[:, :, :seen])
        seconds[0].append(between - began)
        seconds[1].append(perf_counter() - between)
    return round(statistics.median(seconds[1]) / statistics.median(seconds[0]), 2)


def unequal(one: Tensor, other: Tensor) -> float:
    return float((one != other).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    names = list(methods(None))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=names, help=",".join(names))
    parser.add_argument("--temperature", type=float, help="sample, with seed 0 for each prompt; greedy without it")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--study", choices=["attention"], help="compare layers by themselves instead")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    unknown = sorted(set(args.methods) - set(names))
    if unknown or "plain" not in args.methods:
        parser.error(f"--methods must have plain, and others of {', '.join(names)}; got {','.join(args.methods)}")
    figures: dict[str, Any] = {}
    with harness.reporting(figures, args.out):
        (study_attention if args.study else compare_methods)(args, figures)


if __name__ == "__main__":
    main()
