"""Calls whose steps run on the device beside plain generate() and the ordinary loop."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

import lade
from lade.block.kv_cache import LookaheadCache
from lade.block.layout import block_layout
from lade.block.mask import Reach
from lade.config import current_config
from lade.forward import static_shapes as fixed
from lade.forward.on_device import loop as device_loop
from lade.forward.on_device import step as device_step
from lade.forward.on_device.step import StepShape, StepState
from support.models import generate_plain, tiny_llama

GREEDY = {"max_new_tokens": 40, "do_sample": False}
known = WeakKeyDictionary()  # by unchanged model and call


def ordinary_stats(model, inputs, **arguments):
    """Figures of the same call by the loop on the host and the model's own forward."""
    compiles = current_config().compile
    lade.config_lade(COMPILE=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loop, "is_wanted", lambda *_: False)
        patch.setattr(fixed, "GRAPH_DEVICES", ())
        seeded(model.generate, **inputs, **arguments)
    lade.config_lade(COMPILE=compiles)
    return lade.last_stats()


def unchanged(model):
    """A model that no test changes: plain generate() is run once for each of its calls that `check` makes."""
    known[model] = {}
    return model


def plain(model, inputs, arguments):
    """Plain generate()'s result, and the generators' states."""
    is_known = model in known and all(type(value) in (bool, int, float, list) for value in arguments.values())
    found = known[model] if is_known else {}
    key = repr((torch.get_default_dtype(), [value.tolist() for value in inputs.values()], sorted(arguments.items())))
    if key not in found:
        found[key] = seeded(generate_plain, model, inputs, **arguments)
    return found[key]


def seeded(generate, *args, **arguments):
    """Its result, always from the same seed, and the states of torch's generators afterwards."""
    torch.manual_seed(3)
    result = generate(*args, **arguments)
    return result, [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def check(model, inputs, compiled=False, captured=False, **arguments):
    """Plain generate()'s text and random numbers by the steps of the ordinary loop, each on the device. Returns the
    call's figures."""
    arguments = GREEDY | arguments
    expected, plain_states = plain(model, inputs, arguments)
    ordinary = ordinary_stats(model, inputs, **arguments)
    found, states = seeded(model.generate, **inputs, **arguments)
    stats = lade.last_stats()
    assert torch.equal(found, expected)
    assert all(map(torch.equal, states, plain_states))
    assert ordinary.device_steps == 0
    assert (stats.fallback_reason, stats.device_reason) == (None, None)
    assert stats.steps == ordinary.steps
    assert stats.device_steps == stats.steps - 1
    assert stats.generated_tokens == ordinary.generated_tokens
    assert stats.accepted_lengths == ordinary.accepted_lengths
    # Candidates that begin alike are not merged: each counts with all its tokens.
    assert stats.sources["pool"][1] == ordinary.sources["pool"][1]
    assert stats.sources["pool"][0] >= ordinary.sources["pool"][0]
    assert stats.compiled_steps == (stats.device_steps if compiled else 0)
    assert stats.captured_steps == (stats.device_steps if captured else 0)
    return stats


@pytest.fixture
def calls(monkeypatch):
    """One entry per step: the lengths of the texts and the ids behind it."""
    seen = []

    def spy(model, state, original=device_step.step):
        logits = original(model, state)
        seen.append((state.lengths.tolist(), state.ids.clone()))
        return logits

    monkeypatch.setattr(device_loop, "step", spy)
    return seen


def fake_step(sampling=None):
    """A step of tensors that have shapes and no values."""
    shape = StepShape(
        batch_size=2,
        ngram_size=4,
        window_size=3,
        num_guesses=2,
        num_tokens=61,
        num_eos_ids=2,
        shifts_window=True,
        uses_kernel=False,
        keeps_rows=True,
        position_shape=(2, 1),
        dtype=torch.float32,
        device=torch.device("cpu"),
        sampling=sampling,
    )
    config, layout = tiny_llama().config, block_layout(4, 3, 2 * 3, shape.device)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as mode, torch.no_grad():
        parts = ("offsets", "visible", "logit_rows")
        layout = replace(layout, **{part: mode.from_tensor(getattr(layout, part)) for part in parts})
        patch.setattr(device_step, "block_layout", lambda *sizes: layout)
        model = LlamaForCausalLM(config).eval()
        cache = LookaheadCache(2, 64)
        for layer in range(2):
            states = torch.zeros(2, 2, 8, 12)
            cache.update(states, states, layer)
        return device_step.step(model, StepState(shape, cache, Reach(), num_logits=61))
