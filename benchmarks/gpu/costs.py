"""What does it cost? Steps of a 7B shape beside the bytes that they have to read, and real text with the bundled
checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any
from unittest import mock

import decode
import harness
import parts
import shapes
import step_cost
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import lade
from gpu.child import Run
from gpu.plan import PAPER
from gpu.record import Row
from lade.config import temporary_settings

FORMS: dict[str, dict[str, Any]] = {  # what decides most comes first: a stage may run out of time
    "kernel": {"CUDA_GRAPH": 1, "USE_FLASH": 1},
    "captured": {"CUDA_GRAPH": 1, "USE_FLASH": 0},
    "eager": {"CUDA_GRAPH": 0, "USE_FLASH": 0},
}
CAPTURED = {"CUDA_GRAPH": 1}
TOKENS = (1, 2, 4, 8, 16, 32, 56, 64, 128)
SECONDS_OF_CALLS = 0.1  # per figure and trial: a GPU's times vary little


def bytes_of_step(model: Any, context: int, batch: int = 1) -> int:
    """What a step has to read: the weights, but of the embedding only some rows, and the cached keys and values."""
    config, embedding = model.config, model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    weights = sum(weight.nbytes for weight in model.parameters()) - (0 if is_tied else embedding.nbytes)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_slot = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.itemsize
    return weights + batch * context * per_slot


def table(
    run: Run,
    model: Any,
    contexts: Iterable[int],
    forms: Iterable[str],
    prefix: str = "",
    tokens: tuple[int, ...] = TOKENS,
) -> None:
    """A row for each form, context and number of tokens: the first table of step_cost.py."""
    tokens = run.pick(tokens, (1, 12))
    for form in forms:
        for context in contexts:
            keys = {count: f"{prefix}{form}, context {context}, {count} tokens" for count in tokens}
            missing = [count for count in tokens if keys[count] not in run.record.rows]
            if not missing:
                continue
            args = argparse.Namespace(
                contexts=[context], tokens=missing, batch=1, trials=run.pick(3, 1), max_new_tokens=256
            )
            note = partial(note_cost, run, model, keys)
            try:
                with (
                    mock.patch.object(step_cost, "LEAST_SECONDS", SECONDS_OF_CALLS),
                    temporary_settings(**FORMS.get(form) or compiled_form(form)),
                ):
                    step_cost.forward_costs(model, args, partial(harness.synchronize, model), note)
            except (Exception, SystemExit) as problem:
                run.record.add(
                    f"{prefix}{form}, context {context}",
                    error=f"{type(problem).__name__}: {problem}"[:300],
                    passed=False,
                )
                if isinstance(problem, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()


def compiled_form(form: str) -> dict[str, Any]:
    return FORMS[form.removeprefix("compiled ")] | {"COMPILE": 1}


def note_cost(run: Run, model: Any, keys: dict[int, str], row: Row) -> None:
    num_bytes, speed = bytes_of_step(model, row["context"]), run.bytes_per_second
    floor = num_bytes / speed * 1e3 if speed else None
    to_floor = round(row["milliseconds"]["median"] / floor, 3) if floor else None
    run.record.add(keys[row["tokens"]], **row, bytes=num_bytes, floor_milliseconds=floor, to_floor=to_floor)


def step_costs(run: Run) -> None:
    model = run.model("7b")
    table(run, model, run.pick((512, 4096), (64,)), FORMS)


def long_contexts(run: Run) -> None:
    contexts = run.pick((8192, 16_384, 32_768), (128,))
    model = run.model("7b", max_positions=max(contexts) + 1024)
    table(run, model, contexts, ("kernel", "captured"), tokens=(1, 16, 56))


def other_shapes(run: Run) -> None:
    for name in ("1b", "8b"):
        model = run.model(name)
        table(run, model, run.pick((512, 4096), (64,)), FORMS, f"{name}, ", tokens=(1, 8, 16, 56))
        del model


def compiled(run: Run) -> None:
    """Does a compiler fuse what is launched in between the matrix products? It compiles each size of block anew."""
    forms = ("kernel", "compiled kernel", "captured", "compiled captured")
    table(run, run.model("7b"), run.pick((512,), (64,)), forms, tokens=(56, 1))


def per_step(run: Run, model: Any, name: str, key: str, context: int, batch: int = 1, **arguments: Any) -> Row:
    """Milliseconds of a step of one method, as `decode.py --shape` finds them."""
    settings: dict[str, Any] = CAPTURED if name in decode.OWN else {}
    inputs = shapes.random_prompts(model, run.pick(2, 1), batch, context)
    common = {"max_new_tokens": run.pick(64, 12), "do_sample": False} | arguments
    with temporary_settings(**settings):
        method = decode.METHODS[name]
        row: Row = decode.compare_steps(model, inputs, {name: method}, run.pick(2, 1), common)["steps"][name]
    calls = lade.log_history()  # some are for one token alone
    told = {count: max(getattr(stats, count) for stats in calls) for count in ("captured_steps",)}
    return row | {"context": context, "batch": batch} | (told if name in decode.OWN else {})


def set_up_methods() -> None:
    for name, size in (("lookahead", 7), (PAPER, 15)):
        decode.METHODS[name] = {}
        decode.OWN[name] = {"MODE": "lookahead", "LEVEL": 5, "WINDOW_SIZE": size, "GUESS_SET_SIZE": size}


def speeds(run: Run) -> None:
    set_up_methods()
    model, context = run.model("7b"), run.pick(1000, 40)
    methods = {"tree": "lade", "plain": "plain", "lookahead": "lookahead", PAPER: PAPER}
    for key, name in methods.items():
        run.record.measure(key, partial(per_step, run, model, name, key, context))
    run.record.measure("tree, by parts", partial(by_parts, run, model, context))
    for key, name in methods.items():
        run.record.measure(f"{key}, device and host", partial(device_and_host, run, model, name, key, context))


def device_and_host(run: Run, model: Any, name: str, key: str, context: int) -> Row:
    """Milliseconds of a step in which the device works, and the rest of the step that `key` has found."""
    inputs = shapes.random_prompts(model, 1, 1, context)[0]
    with temporary_settings(**CAPTURED if name in decode.OWN else {}):
        decode.generate(model, inputs, name, decode.Trial(), max_new_tokens=64, do_sample=False)  # captures
        prompt, _ = busy_milliseconds(model, inputs, name, 1)
        whole, num_steps = busy_milliseconds(model, inputs, name, run.pick(24, 12))
    device = (whole - prompt) / max(1, num_steps - 1)
    step = run.record.rows[key]["milliseconds_per_step"]["median"]
    return {"device_milliseconds": device, "host_milliseconds": step - device}


def busy_milliseconds(model: Any, inputs: dict[str, Any], name: str, max_new_tokens: int) -> tuple[float, int]:
    """Of a call: the sum of the times of what a GPU has run, or of a CPU's operators; and its steps."""
    trial, is_cuda = decode.Trial(), model.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        decode.generate(model, inputs, name, trial, max_new_tokens=max_new_tokens, do_sample=False)
    events = profile.key_averages()
    if is_cuda:
        found = [event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA]
    else:
        found = [event.self_cpu_time_total for event in events]
    if not sum(found):
        raise RuntimeError("the profiler has seen nothing on the device")
    return sum(found) / 1e3, trial.steps[0] if trial.steps else max_new_tokens


def by_parts(run: Run, model: Any, context: int) -> Row:
    """The device is waited for around each part, so that "forward" is the device's share and the rest the host's."""
    args = argparse.Namespace(max_new_tokens=run.pick(64, 12), trials=run.pick(2, 1))
    inputs = shapes.random_prompts(model, 1, 1, context)
    with temporary_settings(**CAPTURED):
        found: Row = step_cost.part_costs(model, inputs, args, partial(harness.synchronize, model))
    device = sum(found["parts"][part]["milliseconds"]["median"] for part in ("forward",))
    host = sum(row["milliseconds"]["median"] for part, row in found["parts"].items() if part != "forward")
    return {"device_milliseconds": device, "host_milliseconds": host} | found


def static(run: Run) -> None:
    """Nothing of lade runs in this process."""
    model, context = run.model("7b"), run.pick(1000, 40)
    run.record.measure("static", partial(per_step, run, model, "static", "static", context))


def sampling(run: Run) -> None:
    set_up_methods()
    model, context = run.model("7b"), run.pick(1000, 40)
    for key, name in {"plain": "plain", "tree": "lade", "lookahead": "lookahead"}.items():
        arguments = {"do_sample": True, "temperature": 0.7}
        run.record.measure(key, partial(per_step, run, model, name, key, context, **arguments))


def batch(run: Run) -> None:
    set_up_methods()
    model, context = run.model("7b"), run.pick(1000, 40)
    for key, name in {"plain": "plain", "tree": "lade", "lookahead": "lookahead"}.items():
        run.record.measure(key, partial(per_step, run, model, name, key, context, batch=4))


def real_text(run: Run, names: Iterable[str]) -> None:
    set_up_methods()
    for dtype in ("bfloat16", "float32"):
        limit, tokens = run.pick((4, 256), (1, 12))
        args = argparse.Namespace(
            model_path=str(harness.BUNDLED), device=run.device, dtype=dtype, prompts=harness.PROMPTS, limit=limit
        )
        model, tokenizer = harness.load_model(args)
        inputs = [dict(prompt) for prompt in harness.load_prompts(args, tokenizer)]
        trials = cache(partial(trials_of, run, model, inputs, tokens))
        for name in names:
            run.record.measure(f"{dtype}, {name}", partial(speed_of, model, len(inputs), name, trials))


def trials_of(
    run: Run, model: Any, inputs: list[dict[str, torch.Tensor]], max_new_tokens: int, name: str
) -> list[decode.Trial]:
    common = {"max_new_tokens": max_new_tokens, "do_sample": False}
    return decode.run_methods(model, inputs, {name: decode.METHODS[name]}, run.pick(2, 1), common)[name]


def speed_of(model: Any, num_inputs: int, name: str, trials: Callable[[str], list[decode.Trial]]) -> Row:
    """Beside plain generate(), which runs once for all methods: it takes longest."""
    plain, found = trials("plain"), trials(name)
    same = sum(map(list.__eq__, decode.rows_of(found[0]), decode.rows_of(plain[0]))) / num_inputs
    row = decode.compare(found, plain, list(range(num_inputs))) | {"identical_outputs": same}
    if name in decode.OWN and model.dtype == torch.float32:
        row["passed"] = same == 1.0
    return row | {"reasons": sorted(parts.reasons(lade.last_stats())) if name in decode.OWN else []}


def bundled(run: Run) -> None:
    real_text(run, ("plain", "lade", "lade_kept", "lookahead", "prompt_lookup"))


def bundled_static(run: Run) -> None:
    real_text(run, ("static",))
