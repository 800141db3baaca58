"""The cost of a decoding step: the forward over q tokens behind L committed ones, and the share of each part of a step.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --shape 7b --contexts 1000,4000,16000 --mode lookahead --level 5 --window 7 --guess 7

First table: milliseconds of the model's forward through lade's cache and masks, their ratio to q = 1 at that length,
and their ratio to one token on the model as it is, without packed weights, compiled or captured forwards or lade's
attention. Logits are computed for all q tokens; a step of lade needs fewer. Second table: real decoding with lade, its
functions timed one by one; on a GPU the device is synchronised around each of them, so that the sum is more than an
undisturbed step, whose time stands beside it. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import parts
import shapes
import torch

import lade
from lade.block.kv_cache import LookaheadCache, cache_arguments
from lade.block.mask import Block
from lade.common.transfer import HOST
from lade.forward.base import BlockCall, ForwardPath, path_for
from lade.forward.cuda.buffer_pool import padded_capacity
from lade.models import ModelAdapter, adapter_for
from lade.stats import GenerationStats
from lade.switch import current_config

LEAST_SECONDS = 0.2  # of calls per figure and trial
PREFILL_CHUNK = 1024  # prompt tokens of one forward


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_block(adapter: ModelAdapter, cache: LookaheadCache, num_tokens: int, batch_size: int) -> Block:
    """A block of q random tokens, one behind the other, all of whose logits are wanted."""
    # On the host, as the loop lays out blocks without a window.
    device = adapter.model.device if current_config().uses_window else HOST
    length = cache.lengths[0]
    offsets = torch.arange(num_tokens, device=device).repeat(batch_size, 1)
    numbers = torch.Generator().manual_seed(0)
    return Block(
        tokens=torch.randint(3, adapter.num_tokens, offsets.shape, generator=numbers).to(device),
        offsets=offsets,
        positions=length + offsets,
        visible=torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril().repeat(batch_size, 1, 1),
        logit_rows=torch.arange(num_tokens, device=device),
        lengths=cache.lengths,
        key_mask=None,
    )


def filled_cache(path: ForwardPath, context: int, room: int, batch_size: int) -> LookaheadCache:
    """A cache with `context` committed random tokens in each row, and room for a block."""
    adapter = path.adapter
    cache, device = adapter.make_cache(padded_capacity(context + room)), adapter.model.device
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, adapter.num_tokens, (batch_size, context), generator=numbers).to(device)
    for start in range(0, context, PREFILL_CHUNK):
        chunk = ids[:, start : start + PREFILL_CHUNK]
        places = torch.arange(start, start + chunk.shape[1], device=device)[None]
        arguments: dict[str, Any] = {"position_ids": places} if adapter.takes_positions else {}
        adapter.model(input_ids=chunk, **cache_arguments(cache), **arguments)
    cache.end_prefill(batch_size)
    return cache


def milliseconds(
    calls: Sequence[Callable[[], Any]], synchronize: Callable[[], None], trials: int
) -> list[dict[str, float]]:
    """Spread over the trials of each call's time. The calls take turns, so that a busy machine slows all of them."""
    for call in [*calls, *calls]:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(trials):
        repeats, seconds = 0, [0.0] * len(calls)
        while repeats < 3 or sum(seconds) < LEAST_SECONDS * len(calls):
            for place, call in enumerate(calls):
                synchronize()
                started = time.perf_counter()
                call()
                synchronize()
                seconds[place] += time.perf_counter() - started
            repeats += 1
        for found, spent in zip(times, seconds, strict=True):
            found.append(spent * 1e3 / repeats)
    return [harness.spread(found) for found in times]


@torch.no_grad()
def forward_costs(
    model: Any,
    args: argparse.Namespace,
    synchronize: Callable[[], None],
    note: Callable[[dict[str, Any]], None],
) -> None:
    """The first table. note: is given each row as soon as it is there."""
    print(f"{'context':>8} {'q':>5} {'ms':>9} {'p20':>9} {'p80':>9} {'to q=1':>8} {'to plain':>9}")
    for context in args.contexts:
        first = None
        for num_tokens in args.tokens:
            adapter, told = adapter_for(model), GenerationStats()
            call = BlockCall(
                adapter=adapter, config=current_config(), stats=told, device=model.device, num_rows=args.batch,
                num_new=args.max_new_tokens, num_slots=context + max(args.tokens),
            )  # fmt: skip
            path = path_for(call)
            cache = filled_cache(path, context, max(args.tokens), args.batch)
            block = make_block(adapter, cache, num_tokens, args.batch)
            started = time.perf_counter()
            path.forward(block, cache)
            synchronize()
            first_call = time.perf_counter() - started  # compiles, captures and compares, where that is due
            # One token on the model as it is, as plain generate() computes it, measured next to the block.
            one = make_block(adapter, cache, 1, args.batch).to(model.device)
            forwards = partial(path.forward, block, cache), partial(adapter.forward_block, one, cache)
            times, plain = milliseconds(forwards, synchronize, args.trials)
            path.close(0)  # the kernel may have failed in its first call, and plain torch served in its place
            to_plain = round(times["median"] / plain["median"], 3)
            if parts.broken_wishes(told):
                raise SystemExit(f"blocks cannot go through the model as asked for: {min(parts.broken_wishes(told))}")
            first = first or (times["median"] if num_tokens == 1 else None)
            ratio = round(times["median"] / first, 3) if first else None
            row = {"context": context, "tokens": num_tokens, "milliseconds": times, "ratio_to_one": ratio}
            row |= {"ratio_to_plain_token": to_plain, "plain_token_milliseconds": plain}
            row["first_call_seconds"] = round(first_call, 3)
            note(row | {"packed_weights": told.packed_weights, "packed_bytes": told.packed_bytes})
            print(
                f"{context:>8} {num_tokens:>5} {times['median']:>9.3f} {times['p20']:>9.3f} {times['p80']:>9.3f} "
                f"{ratio or '-':>8} {to_plain:>9}",
                flush=True,
            )


def part_costs(
    model: Any,
    prompts: list[dict[str, torch.Tensor]],
    args: argparse.Namespace,
    synchronize: Callable[[], None],
) -> dict[str, Any]:
    """The second table: each trial decodes all prompts once watched and once undisturbed."""
    common = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    timer = parts.PartTimer(synchronize)

    def decode() -> None:
        for prompt in prompts:
            timer.begin()
            harness.generate_timed(model, prompt, **common)
            stats = lade.last_stats()
            if stats is None or stats.fallback_reason is not None or parts.broken_wishes(stats):
                raise RuntimeError(f"lookahead did not run, or not as asked for: {stats}")

    per_step: dict[str, list[float]] = {part: [] for part in parts.PARTS}  # milliseconds, one entry per trial
    undisturbed = []
    with lade.enabled():
        decode()
        for _ in range(args.trials):
            undisturbed.append(undisturbed_step(model, prompts, common) * 1e3)
            timer.steps.clear()
            with timer.running():
                decode()
            for part, times in per_step.items():
                times.append(sum(step[part] for step in timer.steps) * 1e3 / max(1, len(timer.steps)))
    return show_parts(per_step, undisturbed)


def undisturbed_step(model: Any, prompts: list[dict[str, torch.Tensor]], common: dict[str, Any]) -> float:
    """Mean seconds of a step after the first one of each call; nothing is watched but the end of each step."""
    ends: list[float] = []
    seconds, steps = 0.0, 0
    for prompt in prompts:
        ends.clear()
        with lade.stats.tracing(lambda *_: ends.append(time.perf_counter())):
            harness.generate_timed(model, prompt, **common)
        if len(ends) > 1:
            seconds, steps = seconds + ends[-1] - ends[0], steps + len(ends) - 1
    if not steps:
        raise SystemExit(f"no prompt took more than one step; --max_new_tokens is {common['max_new_tokens']}")
    return seconds / steps


def show_parts(per_step: dict[str, list[float]], undisturbed: list[float]) -> dict[str, Any]:
    """Prints the second table. per_step, undisturbed: milliseconds of a step in each trial."""
    totals = [sum(trial) for trial in zip(*per_step.values(), strict=True)]
    figures: dict[str, Any] = {}
    print(f"\n{'part':<10} {'ms/step':>9} {'p20':>9} {'p80':>9} {'share':>7}")
    for part, times in per_step.items():
        spread = harness.spread(times)
        share = harness.spread([time / total for time, total in zip(times, totals, strict=True)])["median"]
        figures[part] = {"milliseconds": spread, "share": share}
        print(f"{part:<10} {spread['median']:>9.4f} {spread['p20']:>9.4f} {spread['p80']:>9.4f} {share:>7.1%}")
    overhead = round(1 - figures["forward"]["share"], 4)
    undisturbed_spread = harness.spread(undisturbed)
    print(
        f"outside of the model's forward: {overhead:.1%} of a watched step; "
        f"a step that is not watched: {undisturbed_spread['median']:.3f} ms"
    )
    return {
        "parts": figures,
        "host_overhead": overhead,
        "milliseconds_per_step": undisturbed_spread,
        "milliseconds_per_watched_step": harness.spread(totals),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    harness.add_lookahead_arguments(parser)
    parts.add_forward_arguments(parser)
    shapes.add_shape_argument(parser, "the shares are then those of a text that nobody wrote")
    parser.add_argument("--tokens", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128], help="q, separated by commas")
    parser.add_argument("--contexts", type=integers, default=[256, 1024], help="L, separated by commas")
    parser.add_argument("--batch", type=int, default=1, help="rows of the first table's blocks")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    for name in ("tokens", "contexts"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be integers of at least 1, got {min(getattr(args, name))}")
    for name in ("batch", "trials", "limit"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def load(args: argparse.Namespace) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model, and prompts for the second table."""
    longest = max(args.contexts) + max(args.tokens)
    if args.shape:
        length = min(args.contexts)
        longest = max(longest, length + args.max_new_tokens + 256)  # and a block behind it
        model = shapes.random_model(args.shape, args.device, getattr(torch, args.dtype), longest)
        return model, shapes.random_prompts(model, args.limit, 1, length)
    model, tokenizer = harness.load_model(args)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise SystemExit(f"--contexts and --tokens must end within the model's {limit} positions, got {longest}")
    return model, harness.load_prompts(args, tokenizer)


def main() -> None:
    args = parse()
    model, prompts = load(args)
    harness.set_up_lade(args)
    parts.set_up_forward(args)
    synchronize = partial(harness.synchronize, model)
    figures: dict[str, Any] = {
        "benchmark": "step_cost",
        "environment": harness.environment(model),
        "settings": harness.lookahead_settings(args)
        | {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        | parts.forward_settings(args),
        "model": args.shape or Path(args.model_path).name,
        "batch": args.batch,
        "prompts": len(prompts),
        "trials": args.trials,
    }
    rows: list[dict[str, Any]] = []
    figures["forward"] = rows
    with harness.reporting(figures, args.out):
        forward_costs(model, args, synchronize, rows.append)
        figures |= part_costs(model, prompts, args, synchronize)


if __name__ == "__main__":
    main()
