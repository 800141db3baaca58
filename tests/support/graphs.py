"""Stand-ins for CUDA graphs (`Tape`) and for what compiles: with their fixtures.

What only a device can show is in tests marked `gpu`.
"""

import sys

import pytest
import torch

import lade
from lade.forward import buffer_pool
from lade.forward import static_shapes as fixed
from lade.forward.on_device import loop as device_loop
from lade.state import forget_all
from support.processes import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from gpu.stand_in import Tape

NOT_HERE = "CUDA graphs need a model on a CUDA device"
is_wanted = device_loop.is_wanted


def kept_buffers(model):
    """What waits for another call of the model, the oldest first: the list itself."""
    return buffer_pool._pool.of(model)


@pytest.fixture
def static_blocks(lade_on, monkeypatch):
    """One size of tree: (N-1) * G is less than the smallest size to pad to."""
    monkeypatch.setattr(fixed, "BACKEND", "eager")
    monkeypatch.setattr(device_loop, "is_wanted", lambda *_: False)  # tested apart: here, forwards alone
    lade.config_lade(LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=2, COMPILE=1)
    yield
    torch._dynamo.reset()
    forget_all()


@pytest.fixture
def eager_steps(lade_on, monkeypatch):
    """Steps on the device without compiling them, which are not wanted on a CPU otherwise."""
    monkeypatch.setattr(device_loop, "is_wanted", lambda *_: True)
    monkeypatch.setattr(fixed, "BACKEND", "eager")
    lade.config_lade(LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=2, COMPILE=0)
    yield
    torch._dynamo.reset()
    forget_all()


@pytest.fixture
def graphs(monkeypatch):
    """Captures work on the CPU. The list has one entry per capture."""
    captured = []

    def trace(forward):
        captured.append(Tape(forward))
        return captured[-1]

    monkeypatch.setattr(fixed, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(fixed, "capture", trace)
    lade.config_lade(COMPILE=0, CUDA_GRAPH=1)
    return captured


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(device_loop, "is_wanted", is_wanted)
    lade.config_lade(COMPILE=1)
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def captured(graphs, monkeypatch):
    """The list has one entry per capture."""
    monkeypatch.setattr(device_loop, "is_wanted", is_wanted)
    monkeypatch.setattr(device_loop, "capture", fixed.capture)
    return graphs


@pytest.fixture
def on_cuda(captured, monkeypatch):
    """The CPU counts as CUDA, with a first forward before each capture; nothing is asked for. One entry per capture."""
    trace = fixed.capture

    def warmed_up(forward):
        forward()
        return trace(forward)

    for module in (fixed, device_loop):
        monkeypatch.setattr(module, "capture", warmed_up)
    lade.config_lade(CUDA_GRAPH="auto")
    return captured
