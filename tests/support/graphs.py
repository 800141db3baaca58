"""Stand-ins for CUDA graphs (`Tape`) and for what compiles: with their fixtures.

What only a device can show is in tests marked `gpu`.
"""

import sys

import pytest
import torch

import lade
from lade import preparation
from lade.common.state import forget_all
from lade.forward import base as forward_base
from lade.forward.cuda import buffer_pool, path
from lade.forward.cuda import static_shapes as fixed
from support.processes import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from gpu.stand_in import Tape


def kept_buffers(model):
    """What waits for another call of the model, the oldest first: the list itself."""
    return buffer_pool._pool.of(model)


@pytest.fixture
def static_blocks(lade_on, monkeypatch):
    """One size of tree: (N-1) * G is less than the smallest size to pad to."""
    monkeypatch.setattr(fixed, "BACKEND", "eager")
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=2, COMPILE=1)
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

    monkeypatch.setattr(forward_base, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(fixed, "capture", trace)
    for module in (fixed, path, preparation):  # as after a check on this GPU
        monkeypatch.setattr(module, "is_proven", lambda *_: True)
    lade.config_lade(COMPILE=0, CUDA_GRAPH=1)
    return captured


@pytest.fixture
def on_cuda(graphs, monkeypatch):
    """The CPU counts as CUDA, with a first forward before each capture; nothing is asked for. One entry per capture."""
    trace = fixed.capture

    def warmed_up(forward):
        forward()
        return trace(forward)

    monkeypatch.setattr(fixed, "capture", warmed_up)
    lade.config_lade(CUDA_GRAPH="auto")
    return graphs
