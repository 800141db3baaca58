"""Stand-ins for CUDA graphs and for what compiles: fixtures, which tests/conftest.py makes known to all tests.

A CUDA graph remembers operations and addresses, and no Python. So does a `Tape`: a replay that should read a tensor made after the
capture, or that depends on what Python does in a step, gives a wrong result here as it would there. What only a device can show is
in tests marked `gpu`.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import lade
from lade.forward import buffer_pool
from lade.forward import static_shapes as fixed
from lade.forward.on_device import loop as device_loop
from lade.state import forget_all

NOT_HERE = "CUDA graphs need a model on a CUDA device"
is_wanted = device_loop.is_wanted


def kept_buffers(model):
    """What waits for another call of the model, the oldest first: the list itself."""
    return buffer_pool._pool.of(model)


class Tape(TorchDispatchMode):
    """Records the operations of a forward, with the tensors that they read and write; a call runs them again."""

    def __init__(self, forward):
        super().__init__()
        self.operations = []
        with self:
            self.output = forward()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        new = [tensor for tensor in tensors_in(result) if tensor.untyped_storage().data_ptr() not in known]
        if new or operation._schema.is_mutable:  # a view stays one of the same memory
            # What it reads later lies where it lay, also where a weight's `.data` is another one by then.
            read = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.operations.append((operation, *read, tensors_in(result) if new else []))
        return result

    def __call__(self):
        """Every result is written where it was at the capture. Returns the output."""
        for operation, args, kwargs, results in self.operations:
            found = operation(*args, **kwargs)
            for old, new in zip(results, tensors_in(found), strict=False):
                old.copy_(new)
        return self.output


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


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
