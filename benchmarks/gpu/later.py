"""What a longer run shows: mixed lengths, a first call, memory over many calls, a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import shapes
import step_profile
import torch

from gpu.child import Run
from gpu.hazards import generate, reserved
from gpu.record import Row
from lade.config import temporary_settings
from lade.forward import static_shapes

CAPTURED = {"CUDA_GRAPH": 1}


def mixed_lengths(run: Run) -> None:
    model = run.model("1b")
    for mode in ("tree", "lookahead"):
        run.record.measure(mode, partial(captures_of_mixed_calls, run, model, mode))


def captures_of_mixed_calls(run: Run, model: Any, mode: str) -> Row:
    """24 calls whose lengths alternate: no shape is captured twice at one capacity."""
    lengths = run.pick((100, 900, 2500, 300), (20, 300))
    seconds, counts = [], []
    with counting_captures() as captures, temporary_settings(**CAPTURED, MODE=mode):
        for place in range(run.pick(24, 6)):
            began = time.perf_counter()
            generate(model, place, lengths[place % len(lengths)], max_new_tokens=run.pick(64, 8))
            seconds.append(round(time.perf_counter() - began, 3))
            counts.append(len(captures))
    most = max(Counter(captures).values(), default=0)
    return {"passed": most <= 1, "captures": len(captures), "captures_by_call": counts, "seconds_by_call": seconds}


class counting_captures:
    """The list has one entry per capture: the shape of its logits and the number of slots. Of forwards and of steps."""

    def __enter__(self) -> list[Any]:
        self.found: list[Any] = []
        self._patches = [
            mock.patch.object(owner, "capture", partial(self._capture, owner.capture)) for owner in (static_shapes,)
        ]
        for patch in self._patches:
            patch.start()
        return self.found

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _capture(self, original: Any, run: Any) -> Any:
        replay = original(run)
        of = next(x for x in (*run.args, *run.keywords.values()) if hasattr(x, "slots"))
        self.found.append((tuple(of.slots.shape), max(layer.get_max_length() for layer in of.cache.layers)))
        return replay


COLD = """
import json, sys, time
from gpu import child, hazards, stand_in
import lade, torch, shapes
shape, device, warms = sys.argv[1:]
if device == "cpu":
    stand_in.install()
lade.augment_all()
lade.config_lade(SHARE=0)
model = shapes.random_model(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
found = {}
def timed(name, call):
    began = time.perf_counter()
    call()
    found[name] = time.perf_counter() - began
if warms == "1":
    timed("warmup", lambda: lade.warmup(model))
for name in ("first", "second"):
    timed(name, lambda: hazards.generate(model, length=100, max_new_tokens=200))
print(json.dumps(found))
"""


def cold_call(run: Run) -> None:
    for warms in ("0", "1"):
        run.record.measure(("without", "after")[int(warms)] + " lade.warmup()", partial(cold_process, run, warms))


def cold_process(run: Run, warms: str) -> Row:
    """Seconds of a first and a second call of a process whose compilers have nothing stored."""
    folder = run.out / f"cold-{warms}-{os.getpid()}"
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-c", COLD, run.shape("1b"), run.device, warms]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | caches | {"USE_LADE": "1"}
    )
    if done.returncode:
        print(done.stderr, flush=True)
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return {f"{name}_seconds": round(value, 3) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def memory(run: Run) -> None:
    run.record.measure("calls", partial(memory_of_calls, run, run.pick(30, 4)))


def memory_of_calls(run: Run, count: int) -> Row:
    """Half of them are of lengths that come again, half of new ones."""
    model, found = run.model("1b"), []
    with temporary_settings(**CAPTURED):
        for place in range(count):
            generate(model, place, 100 if place % 2 else 40 + 60 * place, max_new_tokens=run.pick(64, 8))
            found.append(reserved(run.device))
    return {"reserved_bytes": found, "allocated_bytes": torch.cuda.memory_allocated() if run.device == "cuda" else 0}


def trace(run: Run) -> None:
    run.record.measure("steps", partial(traced_steps, run))


def traced_steps(run: Run) -> Row:
    model, common = run.model("7b"), {"max_new_tokens": run.pick(64, 300), "do_sample": False}
    prompts = shapes.random_prompts(model, 1, 1, run.pick(1000, 40))
    with temporary_settings(**CAPTURED):
        waits = step_profile.count_waits(model, prompts, common)
        found = step_profile.profile_steps(model, prompts[0], run.pick(8, 2), common)
    path = run.out / "trace-steps.json"
    found.profile.export_chrome_trace(str(path))
    rows = step_profile.operators(found, run.device == "cuda")
    return {"trace": path.name, "operators": rows} | waits.figures()
