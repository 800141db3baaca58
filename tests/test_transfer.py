"""Copies to a device: on CUDA from pinned memory without a wait, elsewhere as torch makes them; and how few waits are left in a step."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from support import prompt, tiny_llama
from support.static_shapes import both, check

import lade
from lade import transfer
from lade.drafting.memory import most_likely
from lade.transfer import to_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_a_cpu_nothing_is_copied():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor
    assert to_device(tensor, torch.device("meta")).device.type == "meta"


def test_cuda_copies_from_pinned_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **named: calls.append((args, named)) or self)
    to_device(torch.arange(3), CUDA)
    assert calls == ["pin", ((CUDA,), {"non_blocking": True})]


@pytest.mark.parametrize("vocab_size", [3, 61, 4097])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_one_copy_of_the_likeliest_tokens_is_as_good_as_two(vocab_size, temperature, monkeypatch):
    """What devices other than the CPU do."""
    scores = 5 * torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0))
    expected = most_likely(scores, temperature)
    monkeypatch.setattr(transfer, "ON_HOST", ())
    for found, wanted in zip(most_likely(scores, temperature), expected, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.usefixtures("static_blocks")
def test_waits_of_a_captured_step(graphs, monkeypatch):
    """Of a tree, greedy: the choices and, every few steps, the likeliest tokens. The loop waits for the device once more, to take the time."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    step_profile = importlib.import_module("step_profile")
    model, waits = tiny_llama(num_hidden_layers=1), step_profile.Waits()
    lade.config_lade(MODE="tree", MAX_BLOCK=16, ADAPTIVE=0, SHARE=0)
    check(*both(model, prompt(), do_sample=False), compiled=False, captured=True)
    with lade.stats.tracing(waits.end_step), step_profile.counted_on_cpu(waits):
        model.generate(**prompt(), do_sample=False, max_new_tokens=100)
    assert lade.last_stats().captured_steps == lade.last_stats().steps - 1
    assert waits.num_steps > 2
    found = {row["where"].split(":")[0]: row["per_step"] for row in waits.per_step()}
    assert set(found) <= {"lade/verification/logits.py", "lade/drafting/likeliest.py"}, found
    assert sum(found.values()) <= 2
