"""Hazards of captured graphs, each in a process of its own: other recordings, eviction, threads, missing
memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import shapes
import torch
from torch import Tensor

import lade
from lade.common.state import forget_all
from lade.forward.cuda import buffer_pool, static_shapes

SIZES = {"LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 2, "ADAPTIVE": 0}
CAPTURED = SIZES | {"CUDA_GRAPH": 1, "MODE": "tree"}
Row = dict[str, Any]


def figures() -> Row:
    """Statistics of the latest call."""
    stats = lade.last_stats()
    assert stats is not None
    names = ("steps", "captured_steps", "used_kernel", "fallback_reason", "reasons")
    return {name: getattr(stats, name) for name in names}


def generate(model: Any, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, 24), generator=numbers).to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)


def plain(model: Any, seed: int = 0) -> Tensor:
    with lade.enabled(False):
        return generate(model, seed)


def after_a_recording(model: Any, num_replays: int) -> Row:
    """Torch's own graph trees clear cuBLAS's workspaces when they record, and empty_cache() unmaps what is
    free then."""
    expected, wrong, replays = plain(model), 0, 0
    with lade.enabled(**CAPTURED):
        generate(model)
        record_something(model.device)
        while replays < num_replays:
            wrong += not torch.equal(generate(model), expected)
            row = figures()
            if row["captured_steps"] < row["steps"] - 1:
                return {"passed": False, "error": "blocks were no longer captured"} | row
            replays += row["captured_steps"]
    return {"passed": not wrong, "wrong_texts": wrong, "replays": replays} | row


def record_something(device: torch.device) -> None:
    """A forward that torch records as a graph of its own; then memory that was free is unmapped, and written by
    others."""
    if device.type != "cuda":
        return
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(device)
    rows = torch.randn(32, 256, device=device)
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


def captures_with_eviction(model: Any, count: int) -> Row:
    """Each of another shape of block, so that each is captured anew; there is room for three of the largest."""
    wrong, room, pool = 0, inf, buffer_pool._pool.of(model)
    for place in range(count):
        sizes = {"MODE": "lookahead", "WINDOW_SIZE": 1 + place % 20, "GUESS_SET_SIZE": 1 + place // 20}
        bounded = mock.patch.object(buffer_pool, "kept_bytes", lambda _, room=room: room)
        with bounded, lade.enabled(**CAPTURED | sizes):
            wrong += not torch.equal(generate(model, seed=place), plain(model, seed=place))
        room = 3 * max((buffers.num_bytes for buffers in pool), default=0)
    return {"passed": not wrong and 0 < len(pool) < count, "wrong_texts": wrong, "kept": len(pool)}


def after_its_thread(model: Any) -> Row:
    """A graph after the thread that captured it has ended."""
    expected = [plain(model, seed=seed) for seed in (0, 1, 0)]
    with lade.enabled(**CAPTURED):
        found = in_threads([partial(generate, model, 0)])
        gc.collect()
        texts = [*found, generate(model, seed=1), generate(model, seed=0)]
    return {"passed": all(map(torch.equal, texts, expected))} | figures()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that run at once, each in a thread. Raises the first exception."""
    results: dict[int, Any] = {}

    def work(place: int, call: Callable[[], Any]) -> None:
        try:
            with lade.enabled(**CAPTURED):
                results[place] = call()
        except BaseException as problem:
            results[place] = problem

    threads = [threading.Thread(target=work, args=case) for case in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[place] for place in range(len(calls))]


def without_memory(model: Any) -> Row:
    """The capture finds no memory: the text is right, and the next call captures again."""
    expected, original = plain(model), static_shapes.capture

    def fail(forward: Callable[[], Any]) -> Any:
        def hungry_forward() -> Any:
            output = forward()
            if torch.cuda.is_current_stream_capturing():  # not in the warm-ups before it
                torch.empty(2**50, dtype=torch.uint8, device=model.device)
            return output

        if model.device.type == "cpu":
            forward()
            raise torch.OutOfMemoryError("stood in for: no memory")
        return original(hungry_forward)

    with lade.enabled(**CAPTURED):
        with mock.patch.object(static_shapes, "capture", fail):
            first = generate(model)
        missed = figures()
        second = generate(model)
    row = figures()
    is_right = torch.equal(first, expected) and torch.equal(second, expected)
    is_captured = missed["captured_steps"] == 0 and row["captured_steps"] == row["steps"] - 1
    return {"passed": is_right and is_captured} | row | {"reason": missed["reasons"].get("graph")}


def at_once(model: Any, rounds: int) -> Row:
    """Two threads. Both capture in the first round; afterwards one captures while the other replays."""
    wrong = 0
    lade.log_history(clear=True)
    for place in range(0, 2 * rounds, 2):
        if place % 4:
            forget_all()
        expected = [plain(model, seed) for seed in (place, place + 1)]
        found = in_threads([partial(generate, model, seed) for seed in (place, place + 1)])
        wrong += sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    calls = [stats for stats in lade.log_history() if stats.fallback_reason is None]
    missed = sum(stats.captured_steps < stats.steps - 1 for stats in calls)
    return {"passed": bool(calls) and not wrong + missed, "wrong_texts": wrong, "not_captured": missed}


def stage(check: Callable[..., Row], on_gpu: int | None = None, on_cpu: int | None = None) -> Any:
    """on_gpu, on_cpu: how often the check tries."""

    def rows(device: str) -> dict[str, Callable[[], Row]]:
        count = on_cpu if device == "cpu" else on_gpu
        model = shapes.random_model("tiny", device, torch.float32, 4096)
        return {check.__name__: partial(check, model, *([] if count is None else [count]))}

    return rows


STAGES = {
    "recording": stage(after_a_recording, 100, 10),
    "eviction": stage(captures_with_eviction, 40, 4),
    "ended_thread": stage(after_its_thread),
    "out_of_memory": stage(without_memory),
    "two_threads": stage(at_once, 10, 2),
}
