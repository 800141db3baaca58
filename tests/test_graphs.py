"""A capture in a CUDA graph that fails leaves torch usable."""

import gc
from contextlib import nullcontext
from unittest.mock import MagicMock

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
def cuda(monkeypatch):
    """Captures on a CPU: what they ask of CUDA is noted."""
    noted = MagicMock()
    noted.mem_get_info.return_value = (10, 100)
    noted.memory_reserved.side_effect = [0, 1000]
    noted.forward.return_value = ROW
    monkeypatch.setattr(torch, "cuda", noted)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", noted.clear, raising=False)
    ours.capture_stream.cache_clear()
    yield noted
    ours.capture_stream.cache_clear()


WARM_UP = ["Stream().wait_stream", "forward", "forward", "clear"]
CAPTURE = ["CUDAGraph().capture_begin", "forward", "CUDAGraph().capture_end", "clear", "current_stream().wait_stream"]


def order(cuda):
    return [name for name, *_ in cuda.mock_calls if name in WARM_UP + CAPTURE]


def test_a_graph_has_workspaces_of_its_own(cuda):
    """They are cleared behind the warm-up, so that the capture takes one from its pool, and behind the capture."""
    replay = capture(cuda.forward)
    assert order(cuda) == WARM_UP + CAPTURE
    assert replay.num_bytes == 1000
    assert replay() is ROW
    assert not {"synchronize", "empty_cache"} & {name for name, *_ in cuda.mock_calls}


def test_memory_is_given_back_where_little_is_left(cuda):
    cuda.mem_get_info.return_value = (3, 100)
    capture(cuda.forward)
    cuda.empty_cache.assert_called_once()


def test_what_went_wrong_in_a_capture_is_told(cuda, monkeypatch):
    """Not what torch says when the broken capture ends."""
    monkeypatch.setattr(ours, "repaired", lambda pool: nullcontext())
    cuda.forward.side_effect = [ROW, ROW, torch.OutOfMemoryError("no memory")]
    cuda.CUDAGraph().capture_end.side_effect = RuntimeError("the capture is broken")
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture(cuda.forward)
    assert order(cuda) == WARM_UP + CAPTURE  # whose warm-ups have written to the cache
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
