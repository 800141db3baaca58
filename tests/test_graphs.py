"""A capture in a CUDA graph that fails leaves torch usable."""

import gc
from contextlib import nullcontext

import pytest
import torch
from support import compare, prompt, tiny_llama

import lade
from lade.common.trial import NotUsed
from lade.forward.cuda import graphs as ours
from lade.forward.cuda.graphs import capture, free_generator, repaired

pytestmark = pytest.mark.usefixtures("static_blocks")
CPU = torch.device("cpu")
ROW = torch.arange(4.0)


def test_autocast_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    with pytest.raises(NotUsed, match="autocast"):
        capture(lambda: ROW)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Captures on a CPU that note what they ask of CUDA, in order."""
    calls = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            calls.append(("begin", capture_error_mode))

        def capture_end(self):
            calls.append("end")

        def replay(self):
            calls.append("replay")

    class Stream:
        def __init__(self, device=0):
            calls.append("stream")

        def wait_stream(self, other):
            calls.append("wait for the capture" if self is current else "wait")

    current = Stream()
    reserved = iter(range(0, 10_000, 1000))
    fakes = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda: current,
        "graph_pool_handle": lambda: (0, 7),
        "stream": lambda stream: nullcontext(),
        "memory_reserved": lambda device: next(reserved),
        "mem_get_info": lambda device: (10, 100),
        "synchronize": lambda *_: calls.append("synchronize"),
        "empty_cache": lambda: calls.append("empty_cache"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear"), raising=False)
    ours.capture_stream.cache_clear()
    yield calls
    ours.capture_stream.cache_clear()


def test_a_graph_has_workspaces_of_its_own(fake_cuda):
    """They are cleared behind the warm-up, so that the capture takes one from its pool, and behind the capture."""
    fake_cuda.clear()
    replay = capture(lambda: fake_cuda.append("forward") or ROW)
    order = ["wait", "forward", "forward", "clear", ("begin", "thread_local"), "forward", "end", "clear"]
    order.append("wait for the capture")
    assert fake_cuda == ["stream", *order]
    assert replay.num_bytes == 1000
    assert replay() is ROW
    capture(lambda: fake_cuda.append("forward") or ROW)
    assert fake_cuda == ["stream", *order, "replay", *order]  # one stream, and no wait for all of the device


def test_memory_is_given_back_where_little_is_left(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 100))
    capture(lambda: ROW)
    assert fake_cuda.index("empty_cache") < fake_cuda.index("clear")


def test_what_went_wrong_in_a_capture_is_told(fake_cuda, monkeypatch):
    """Not what torch says when the broken capture ends."""
    monkeypatch.setattr(ours, "repaired", lambda pool: nullcontext())
    count = iter(range(10))

    def forward():
        if next(count) == 2:
            raise torch.OutOfMemoryError("no memory")
        return ROW

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture(forward)
    assert fake_cuda[-3:] == ["end", "clear", "wait for the capture"]  # whose warm-ups have written to the cache
    assert gc.isenabled()


def test_a_failed_capture_is_put_right(monkeypatch):
    """What is put right is told in the order of the calls; the error is the capture's own."""
    calls = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", ("zero", "one"))
    monkeypatch.setattr(ours, "free_generator", calls.append)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, args)), raising=False)
    with repaired((0, 7)):
        pass
    assert calls == []
    with pytest.raises(RuntimeError, match="capturing"), repaired((0, 7)):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert calls == [("_cuda_endAllocateToPool", (1, (0, 7))), ("_cuda_releasePool", (1, (0, 7))), "one"]


def test_a_generator_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    expected = torch.rand(5, generator=generator.clone_state())
    free_generator(generator)
    assert torch.equal(torch.rand(5, generator=generator), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_on_cuda():
    """A copy to the host ends it; up to torch 2.11, sampling and the allocator were broken for the process."""
    row, stream = torch.arange(4.0, device="cuda"), torch.cuda.current_stream()
    torch.manual_seed(0)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="captur"):
        capture(lambda: row * row.sum().item())
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    torch.cuda.empty_cache()
    row.add_(1)  # on the stream that it was made on
    replay = capture(lambda: row * 2)
    row.add_(1)
    assert replay().tolist() == [4.0, 6.0, 8.0, 10.0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_that_is_not_on_the_current_device(lade_on):
    model = tiny_llama(torch.float32).to("cuda:1")
    lade.config_lade(MODE="lookahead", CUDA_GRAPH=1, LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=2)
    for seed in range(2):
        inputs = {name: tensor.to("cuda:1") for name, tensor in prompt(seed=seed).items()}
        compare(model, inputs, do_sample=False, max_new_tokens=32)
        assert lade.last_stats().captured_steps == lade.last_stats().steps - 1
