"""No operation of lade's mixes devices, and the host reads from a device only where it means to.

There need not be a GPU: a model on torch's "meta" device has shapes and no values, and what the host reads there is
zero, or one for a fraction. An index or a mask that was left on the CPU fails here as it would on a GPU.
"""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support import note_calls, prompt, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

import lade
from lade import decoding
from lade.block.layout import block_layout
from lade.drafting import contexts
from lade.forward import base as forward_base
from lade.forward.cuda import static_shapes as fixed
from lade.forward.cuda.transfer import HostCopy
from lade.models import base

pytestmark = pytest.mark.usefixtures("modes_of_tests")
ATEN, META = torch.ops.aten, torch.device("meta")
LOOKAHEAD = {"MODE": "lookahead", "LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 2}
NEW = 7  # tokens: operations on that device are slow, and a window is full after three steps


class MixedDevices(AssertionError):
    pass


class OtherDevice(TorchDispatchMode):
    """Counts what the host reads and launches there, and raises MixedDevices where a GPU would."""

    is_replaying = False

    def __init__(self):
        super().__init__()
        self.reads, self.launches = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, operation = kwargs or {}, function.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)
        if not (self.is_replaying or function.is_view):
            self.launches[str(operation)] += 1
        if operation is ATEN._local_scalar_dense:
            self.reads["scalar"] += 1
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        # Of tensors made in inference mode `to` comes whole.
        if operation in (ATEN._to_copy, ATEN.to) and torch.device(kwargs.get("device") or META).type == "cpu":
            self.reads["copy"] += 1
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.full(args[0].shape, int(dtype.is_floating_point), dtype=dtype, device="cpu")
        if operation in (ATEN._to_copy, ATEN.copy_):  # from the host
            return function(*args, **kwargs)
        if operation is ATEN.index and args[1][0] is not None and args[1][0].dtype == torch.bool:
            self.reads["mask"] += 1  # as if all of it were true
            return args[0].new_empty(args[1][0].numel(), *args[0].shape[args[1][0].dim() :])
        strangers = [tuple(tensor.shape) for tensor in tensors if not tensor.is_meta and tensor.dim()]
        if strangers:  # a number without dimensions may come from the host
            raise MixedDevices(f"{function} got tensors of other devices, of shapes {strangers}")
        return function(*args, **kwargs)


def layout_there(*sizes):
    """Made on the CPU: how many logits a window needs is read from the device, once per shape."""
    with _disable_current_modes():
        layout = block_layout(*sizes[:3], torch.device("cpu"), *sizes[4:])
        return replace(
            layout, **{name: getattr(layout, name).to(META) for name in ("offsets", "visible", "logit_rows")}
        )


@pytest.fixture
def other_device(lade_on, monkeypatch):
    """lade on, and the switches by which it tells a GPU from a CPU set for the other device."""
    monkeypatch.setattr(decoding, "wait_for", lambda device: None)
    monkeypatch.setattr(decoding, "block_layout", layout_there)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(torch.float32).to(META)


def generate(model, batch_size=1, padding=0, max_new_tokens=NEW, **arguments):
    """What was counted, and the figures."""
    inputs = prompt(24, batch_size=batch_size)
    inputs["attention_mask"][0, :padding] = 0
    inputs = {name: tensor.to(META) for name, tensor in inputs.items()}
    with OtherDevice() as watched:
        model.generate(**inputs, max_new_tokens=max_new_tokens, **arguments)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.generated_tokens == max_new_tokens * batch_size
    assert stats.steps > 1
    return watched, stats


@pytest.mark.parametrize("settings", [{"MODE": "tree"}, LOOKAHEAD], ids=["tree", "lookahead"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "batch_size": 3, "padding": 5},
        {"do_sample": False, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_decoding(settings, arguments, model, other_device):
    lade.config_lade(**settings)
    generate(model, **arguments)


class Done(Exception):
    pass


class Impatient(BaseStreamer):
    """Ends the call: that the texts have reached their end would be read from the device."""

    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count > 5:
            raise Done

    def end(self):
        """Nothing is left to do."""


@pytest.mark.parametrize("settings", [{"MODE": "tree"}, LOOKAHEAD], ids=["tree", "lookahead"])
@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.2}], ids=str)
def test_decoding_in_lockstep(settings, arguments, model, other_device):
    lade.config_lade(**settings)
    with pytest.raises(Done):
        generate(model, streamer=Impatient(), **arguments)


@pytest.fixture
def captures(other_device, monkeypatch):
    """What a CUDA graph would capture runs as it is: the host must not wait in it. A replay is no launch."""

    def capture(forward):
        def replay():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OtherDevice, "is_replaying", True)
                return forward()

        return replay

    monkeypatch.setattr(forward_base, "GRAPH_DEVICES", ("meta",))
    monkeypatch.setattr(fixed, "capture", capture)
    monkeypatch.setattr(fixed, "numerics", lambda device: ())  # torch knows no autocast for that device
    contexts.projection.cache_clear()  # as in a new process: a capture must not wait for the copy to the device


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        (LOOKAHEAD, {"do_sample": False}),
        (LOOKAHEAD | {"USE_FLASH": 1}, {"do_sample": False}),
        ({"MODE": "tree", "ADAPTIVE": 1}, {"do_sample": True, "temperature": 0.8, "top_k": 20}),
    ],
    ids=["lookahead", "kernel", "tree"],
)
def test_blocks_of_fixed_shapes(settings, sampling, model, captures, monkeypatch):
    """By tensors of that device alone; no rows by context in so small a model."""
    if sampling["do_sample"]:  # comparisons need values, which there are none of
        monkeypatch.setattr(torch, "equal", lambda *tensors: True)
        monkeypatch.setattr(HostCopy, "start", lambda self, tensor: self._host.zero_())
    lade.config_lade(CUDA_GRAPH=1, **settings)
    for arguments in ({}, {"batch_size": 2, "padding": 5}):
        _, stats = generate(model, **sampling, **arguments)
        assert (stats.reasons.get("graph"), stats.used_kernel) == (None, "USE_FLASH" in settings)
        assert stats.captured_steps == stats.steps - 1


def test_waits_of_a_captured_greedy_step(model, captures, monkeypatch):
    """Of a tree: none but the one for the forward. A copy there, and the keys and values of a moved path."""
    monkeypatch.setattr(torch, "equal", lambda *tensors: True)
    monkeypatch.setattr(HostCopy, "start", lambda self, tensor: self._host.zero_())
    waits = note_calls(monkeypatch, decoding, "wait_for")

    def made_by(*_, device=None, **__):
        return sys._getframe(2).f_globals["__name__"].partition(".")[0], device

    made = note_calls(monkeypatch, torch, "tensor", made_by)  # from memory that is not pinned
    lade.config_lade(MODE="tree", MAX_BLOCK=16, CUDA_GRAPH=1, SHARE=0)
    calls = (generate(model, do_sample=False, max_new_tokens=num_new) for num_new in (90, 20, 90))
    (_, first), (short, few), (long, many) = calls  # the first one captures
    assert len(waits) == sum(stats.steps - 1 for stats in (first, few, many))
    num_steps, launched = many.steps - few.steps, long.launches - short.launches
    assert many.captured_steps == many.steps - 1 > few.steps
    assert long.reads == short.reads
    assert ("lade", META) not in made
    assert launched == {"aten.copy_": (1 + 2 * 2 * 2) * num_steps}  # of two layers, out of their slots and in


@pytest.mark.parametrize("owner", [decoding, base], ids=["index", "mask"])
def test_what_is_left_on_the_cpu_is_noticed(owner, model, other_device, monkeypatch):
    if owner is decoding:
        monkeypatch.setattr(decoding, "block_layout", lambda *sizes: block_layout(*sizes[:3], torch.device("cpu")))
    else:
        monkeypatch.setattr(base, "block_mask", lambda *args, made=base.block_mask: made(*args).to("cpu"))
    lade.config_lade(**LOOKAHEAD)
    with pytest.raises(MixedDevices):
        generate(model, do_sample=False)
