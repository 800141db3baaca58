"""Copies to a device: on CUDA from pinned memory without a wait, elsewhere as torch makes them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lade.common import transfer
from lade.common.transfer import to_device
from lade.drafting.likeliest import LEAST_GROUPED, most_likely
from lade.drafting.top_k_table import BIN_BITS, NUM_BINS
from lade.forward.cuda.transfer import HostCopy, TensorBuffer

pytestmark = pytest.mark.usefixtures("modes_of_tests")
CPU, CUDA, META = map(torch.device, ("cpu", "cuda", "meta"))


def test_cuda_copies_from_pinned_memory(monkeypatch):
    """Elsewhere nothing is pinned, nor is what is on a GPU already, which would raise."""
    tensor, calls = torch.arange(3), []
    assert to_device(tensor, CPU) is tensor
    assert to_device(tensor, META).device.type == "meta"
    there = SimpleNamespace(device=CUDA, to=lambda device: f"on {device}", pin_memory=None)
    assert to_device(there, CUDA) == "on cuda"
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **named: calls.append((args, named)) or self)
    to_device(tensor, CUDA)
    assert calls == ["pin", ((CUDA,), {"non_blocking": True})]


def parts(offset):
    return {
        "flag": torch.tensor([True, False, True]),
        "ids": torch.arange(4)[None] + offset,
        "one": torch.tensor(0.5 + offset),
        "turned": (torch.arange(6).view(2, 3) + offset).T,
        "none": torch.zeros(2, 0, dtype=torch.long),
    }


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_buffer(device):
    """All parts in one copy, to the same addresses each time."""
    buffer = TensorBuffer(parts(0), torch.device(device))
    views = dict(buffer.tensors)
    for offset in range(3):
        buffer.fill(parts(offset))
        for name, part in parts(offset).items():
            assert buffer.tensors[name] is views[name]
            assert torch.equal(views[name].cpu(), part)
    assert len({view.untyped_storage().data_ptr() for view in views.values() if view.numel()}) == 1


def test_a_host_copy_keeps_what_it_was_given():
    values = torch.arange(3)
    host_copy = HostCopy(values)
    host_copy.start(values)
    found = host_copy.read()
    values += 1
    host_copy.start(values)
    assert (found.tolist(), host_copy.read().tolist()) == ([0, 1, 2], [1, 2, 3])


def split(rows):
    """Ids, and logarithms of probabilities in steps."""
    return rows >> BIN_BITS, rows & (NUM_BINS - 1)


@pytest.mark.parametrize("vocab_size", [3, 61, 20_000])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_one_copy_of_the_likeliest_tokens_is_as_good_as_two(vocab_size, temperature, monkeypatch):
    """What devices other than the CPU do."""
    scores = 5 * torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0))
    ids, bins = split(most_likely(scores, temperature))
    monkeypatch.setattr(transfer, "ON_HOST", ())
    found, exact = split(most_likely(scores, temperature))
    assert np.array_equal(found, ids)
    assert np.abs(exact - bins).max() <= int(vocab_size >= LEAST_GROUPED)  # the host estimates the sum of many
