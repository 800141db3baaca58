"""What may go wrong under a captured graph, each in a process of its own: other recordings, eviction, threads, missing
memory."""

from __future__ import annotations

import gc
import threading
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import harness
import shapes
import torch
from torch import Tensor

import lade
from gpu.checks import SIZES, figures
from gpu.child import Run
from gpu.record import Row
from lade.forward import buffer_pool, static_shapes
from lade.state import forget_all

CAPTURED = SIZES | {"CUDA_GRAPH": 1, "MODE": "lookahead"}
GREEDY = {"do_sample": False, "max_new_tokens": 40}


def generate(model: Any, seed: int = 0, length: int = 24, **arguments: Any) -> Tensor:
    prompt = random_prompt(model, seed, length)
    return model.generate(**prompt, **GREEDY | arguments)


def random_prompt(model: Any, seed: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=numbers).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plain(model: Any, *args: Any, **arguments: Any) -> Tensor:
    with harness.use_lade(False):
        return generate(model, *args, **arguments)


def tiny_model(run: Run) -> Any:
    return shapes.random_model("tiny", run.device, torch.float32, 4096)


def recording(run: Run) -> None:
    """Torch's own graph trees clear cuBLAS's workspaces when they record, and empty_cache() unmaps what is free
    then."""
    for mode in ("tree", "lookahead"):
        run.record.measure(mode, partial(after_a_recording, run, mode))


def after_a_recording(run: Run, mode: str) -> Row:
    model = tiny_model(run)
    expected = plain(model)
    with lade.config.temporary_settings(**CAPTURED | {"MODE": mode}):
        equal = [torch.equal(generate(model), expected)]
        record_something(run.device)
        wrong = replays = 0
        while replays < run.pick(100, 10):
            wrong += not torch.equal(generate(model), expected)
            row = figures()
            if row["captured_steps"] < row["steps"] - 1:
                return {"passed": False, "error": "blocks were no longer captured"} | row
            replays += row["captured_steps"]
    return {"passed": all(equal) and not wrong, "wrong_texts": wrong, "replays": replays} | row


def record_something(device: str) -> None:
    """A forward that torch records as a graph of its own; then memory that was free is unmapped, and written by
    others."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(device)
    rows = torch.randn(32, 256, device=device)
    if device == "cuda":
        compiled = torch.compile(layers, mode="reduce-overhead")
        with torch.no_grad():
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(rows)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        noise = [torch.full((2**22,), torch.nan, device=device) for _ in range(32)]
        del noise
        torch.cuda.empty_cache()
    else:
        layers(rows)


def eviction(run: Run) -> None:
    run.record.measure("captures", partial(captures_with_eviction, run, run.pick(40, 4)))


def captures_with_eviction(run: Run, count: int) -> Row:
    """Each of another shape of block, so that each is captured anew; there is room for three of the largest."""
    model, wrong, memory, room = tiny_model(run), 0, [], inf
    pool = buffer_pool._pool.of(model)
    for place in range(count):
        settings = CAPTURED | {"WINDOW_SIZE": 1 + place % 20, "GUESS_SET_SIZE": 1 + place // 20}
        bounded = mock.patch.object(buffer_pool, "kept_bytes", lambda _, room=room: room)
        with bounded, lade.config.temporary_settings(**settings):
            wrong += not torch.equal(generate(model, seed=place), plain(model, seed=place))
        room = 3 * max((buffers.num_bytes for buffers in pool), default=0)
        memory.append(reserved(run.device))
    half = len(memory) // 2
    return {
        "passed": not wrong and 0 < len(pool) < count,
        "wrong_texts": wrong,
        "kept": len(pool),
        "reserved_bytes": memory,
        "growth_in_the_second_half": max(memory[half:]) - max(memory[:half]),
    }


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def ended_thread(run: Run) -> None:
    run.record.measure("graph", partial(after_its_thread, run))


def after_its_thread(run: Run) -> Row:
    model = tiny_model(run)
    expected, texts = [plain(model, seed=seed) for seed in range(2)], []
    with lade.config.temporary_settings(**CAPTURED):
        found = in_threads([partial(generate, model, 0)])
        gc.collect()
        texts = [*found, generate(model, seed=1), generate(model, seed=0)]
    rows = [expected[0], expected[1], expected[0]]
    return {"passed": all(map(torch.equal, texts, rows))} | figures()


def in_threads(calls: list[Any]) -> list[Any]:
    """What each returns, all at once. The first exception is raised here."""
    results: dict[int, Any] = {}

    def work(place: int, call: Any) -> None:
        try:
            results[place] = call()
        except BaseException as problem:
            results[place] = problem

    threads = [threading.Thread(target=work, args=case) for case in enumerate(calls)]
    with lade.config.temporary_settings(**CAPTURED):  # of all threads
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[place] for place in range(len(calls))]


def out_of_memory(run: Run) -> None:
    run.record.measure("capture", partial(without_memory, run))


def without_memory(run: Run) -> Row:
    """The capture finds no memory: the text is right, and the next call captures again."""
    model = tiny_model(run)
    expected = plain(model)

    def fail(forward: Any) -> Any:
        def hungry_forward() -> Tensor:
            output: Tensor = forward()
            if torch.cuda.is_current_stream_capturing():  # not in the warm-ups before it
                torch.empty(2**50, dtype=torch.uint8, device=run.device)
            return output

        if run.is_stand_in:
            forward()
            raise torch.OutOfMemoryError("stood in for: no memory")
        return original(hungry_forward)

    original = static_shapes.capture
    with lade.config.temporary_settings(**CAPTURED):
        with mock.patch.object(static_shapes, "capture", fail):
            first = generate(model)
        missed = figures()["captured_steps"]
        second = generate(model)
    row = figures()
    is_right = torch.equal(first, expected) and torch.equal(second, expected)
    return {"passed": is_right and missed == 0 and row["captured_steps"] == row["steps"] - 1} | row


def two_threads(run: Run) -> None:
    run.record.measure("texts", partial(at_once, run, run.pick(10, 2)))


def at_once(run: Run, rounds: int) -> Row:
    """Both capture in the first round; afterwards one captures while the other replays."""
    model, wrong = tiny_model(run), 0
    for place in range(rounds):
        if place % 2:
            forget_all()
        expected = [plain(model, seed=2 * place + seed) for seed in range(2)]
        found = in_threads([partial(generate, model, 2 * place + seed) for seed in range(2)])
        wrong += sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    calls = [stats for stats in lade.log_history() if stats.fallback_reason is None]
    missed = sum(stats.captured_steps < stats.steps - 1 for stats in calls)
    return {"passed": bool(calls) and not wrong + missed, "wrong_texts": wrong, "not_captured": missed}
