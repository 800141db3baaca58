"""Blocks of fixed shapes: their forward is compiled once, or captured in a CUDA graph, and serves every length of the text.

What a forward depends on lies in tensors whose shapes and addresses stay: tokens, positions, slots, and masks over all of the
cache's capacity. A token tree is padded to one of a few sizes. A graph serves later calls of the same model, together with the
inputs and the cache that it reads. Where anything fails, the ordinary forward goes on, and the call's figures say why.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache, least_capacity
from lade.block.mask import Block
from lade.compat import is_out_of_memory
from lade.config import LookaheadConfig
from lade.forward.buffer_pool import PooledBuffers, acquire, has_captured, release
from lade.forward.fingerprint import fingerprint, numerics
from lade.forward.graphs import NotCompiled, capture, refuse_waiting
from lade.forward.static_inputs import Forward, Masks, StaticInputs, mask_shapes, plain_forward
from lade.state import PerModel
from lade.stats import GenerationStats
from lade.tolerance import logits_error

BACKEND: Any = "inductor"  # of torch.compile
GRAPH_DEVICES = ("cuda",)  # whose forwards can be captured
# Fewer tokens than these do not pay for capturing what has not been captured yet, unless CUDA_GRAPH=1: a graph costs some eight forwards,
# a tree has up to four shapes, and the first call also compiles the kernel. Estimated, not measured.
MIN_NEW_TOKENS = 128
# Without lade's own attention a captured block attends to the cache's whole capacity, and sdpa copies the keys and values of grouped heads
# for it. Beyond so many slots that is taken to cost more than launching each operation from Python. Estimated, not measured.
MOST_SLOTS_WITHOUT_KERNEL = 8192
TOO_MANY_SLOTS = (
    f"without the kernel a captured block reads all slots of the cache, here more than {MOST_SLOTS_WITHOUT_KERNEL} "
    "(CUDA_GRAPH=1 captures all the same)"
)
KEPT_SHAPES = 8  # graphs of one cache that wait for another call, those used last
SMALLEST_TREE = 8  # nodes, the root included, that a smaller tree is padded to; larger ones to the next power of two

# What has been compiled for each model, by shape; a sentence where that failed.
_compiled: PerModel[dict[Hashable, Forward | str]] = PerModel(dict)
compiling = threading.Lock()  # is not for two threads at once
# Why a model's forwards ("forward") or steps ("step") could not be captured: lade does not choose by itself to try again.
_not_capturable: PerModel[dict[str, str]] = PerModel(dict)


def padded_nodes(num_nodes: int, full: int) -> int:
    """How many nodes a tree is padded to, the root not counted. full: as many as a tree is expected to have at most."""
    size = SMALLEST_TREE
    while size < num_nodes + 1:
        size *= 2
    return min(size - 1, full) if num_nodes <= full else size - 1


def padded_capacity(num_slots: int) -> int:
    """A power of two, so that calls of similar length share what is compiled."""
    return 1 << (num_slots - 1).bit_length()


def can_capture(device: torch.device) -> bool:
    return device.type in GRAPH_DEVICES


def asks_for_graphs(config: LookaheadConfig, device: torch.device) -> bool:
    """Whether blocks are to be captured, if nothing is against it; otherwise the call's figures say nothing about graphs."""
    return can_capture(device) if config.cuda_graph is None else config.cuda_graph


def graph_refusal(config: LookaheadConfig, model: PreTrainedModel, num_new: int, num_rows: int = 1) -> str | None:
    """Why forwards that `asks_for_graphs` holds for are not captured, as a sentence; None where they are.

    num_new: tokens that the call may generate. num_rows: B. Whether blocks can have fixed shapes is another question.
    """
    if not can_capture(model.device):
        return "CUDA graphs need a model on a CUDA device"
    if config.cuda_graph:
        return None
    # With DETERMINISTIC=1 a text must not depend on earlier calls.
    is_cold = config.deterministic or not has_captured(model, num_rows)
    if num_new < MIN_NEW_TOKENS and is_cold:
        return f"a call for fewer than {MIN_NEW_TOKENS} tokens does not pay for capturing (CUDA_GRAPH=1 captures all the same)"
    if (model.tp_size or 1) > 1:
        return "the model is split over several processes, one of which might fail to capture (CUDA_GRAPH=1 tries it)"
    return capture_failure(model, "forward")


def capture_failure(model: PreTrainedModel, what: str) -> str | None:
    """Why the model's forwards or steps could not be captured earlier in this process. what: "forward" or "step"."""
    return _not_capturable.of(model).get(what)


def remember_failure(model: PreTrainedModel, what: str, problem: Exception) -> str:
    """Returns the problem as a sentence. Memory may be there again next time."""
    reason = in_short(problem)
    if not is_out_of_memory(problem):
        _not_capturable.of(model)[what] = reason
    return reason


@dataclass(slots=True, eq=False)
class Buffers(PooledBuffers):
    """What one call's blocks work on. inputs: by shape, the ones used last at the end; they read the cache at this capacity."""

    capacity: int = 0
    inputs: dict[Hashable, StaticInputs] = field(default_factory=dict)

    def replays(self) -> Iterable[Any]:
        return [inputs.replay for inputs in self.inputs.values() if inputs.replay is not None]

    def drop_stale(self) -> None:
        """A cache that has grown lies elsewhere, and what reads the old storage holds on to it."""
        if self.capacity != self.cache.capacity:
            self.inputs.clear()
            self.capacity = self.cache.capacity


class StaticForward:
    """Runs one call's blocks through compiled or captured forwards, as long as that works."""

    def __init__(
        self,
        owner: PreTrainedModel,
        model: Any,
        stats: GenerationStats,
        *,
        keeps_rows: bool,
        full_tree: int,
        compiles: bool,
        captures: bool,
        follows_length: bool = False,
        most_slots: int | None = None,
    ) -> None:
        """owner: the user's model. model: what runs the blocks, that one or a view of it. stats: are told what happened.

        keeps_rows: whether the model takes `logits_to_keep`. full_tree: nodes that a tree has at most, as a rule. follows_length: whether
        a block's cost follows the length of the text and not the cache's capacity. most_slots: of a cache, beyond which nothing is captured.
        """
        self.owner, self.model, self.stats = owner, model, stats
        self.keeps_rows, self.full_tree = keeps_rows, full_tree
        self.compiles, self.captures = compiles, captures
        self.follows_length, self.most_slots = follows_length, most_slots
        self.preparing_seconds = 0.0  # of the latest block's time: what capturing and comparing took
        self._buffers: Buffers | None = None
        self._most_capacity: int | None = None

    @property
    def is_on(self) -> bool:
        return self.compiles or self.captures

    def turn_off(self, reason: str) -> None:
        """For the rest of this call. reason: a sentence."""
        if self.compiles:
            self.stats.compile_reason = reason
        if self.captures:
            self.stats.cuda_graph_reason = reason
        self.compiles = self.captures = False

    def take_cache(
        self, traits: Hashable, num_slots: int, most_slots: int, new_cache: Callable[[int], LookaheadCache]
    ) -> LookaheadCache:
        """An empty cache for a call: an earlier one's, where CUDA graphs read it and it suits this call; a new one otherwise.

        traits: what else decides about a graph. num_slots, most_slots: what the call begins with, and may come to need.
        """
        least, most = (padded_capacity(least_capacity(count)) for count in (num_slots, max(num_slots, most_slots)))
        if not self.captures:
            return new_cache(least)
        model, device = self.model, self.owner.device
        attention = model.config._attn_implementation
        code = (self.keeps_rows, model.dtype, attention, self.compiles, BACKEND if self.compiles else None)
        key = (traits, *code, device, numerics(device), fingerprint(self.owner))
        self._most_capacity = None if self.follows_length else most
        self._buffers = acquire(Buffers, self.owner, key, least, self._most_capacity)
        if self._buffers is None:
            self._buffers = Buffers(key, new_cache(least))
        return self._buffers.cache

    def make_room(self, cache: LookaheadCache, num_slots: int) -> None:
        """Before `cache` grows: its memory and the graphs that read it are left to calls that need no more, and this one goes on in other
        memory, that of an earlier call if there is one. num_slots: what the next block needs.
        """
        buffers = self._buffers
        if num_slots <= cache.capacity or buffers is None or buffers.cache is not cache:
            return
        if buffers.key is None or not buffers.replays():
            return
        capacity = padded_capacity(num_slots)
        larger = acquire(Buffers, self.owner, buffers.key, capacity, self._most_capacity)
        if larger is None:
            larger = Buffers(buffers.key, cache.like(capacity), capacity=capacity)
        cache.exchange(larger.cache)
        buffers.inputs, larger.inputs = larger.inputs, buffers.inputs
        buffers.capacity, larger.capacity = cache.capacity, larger.cache.capacity
        self._keep(larger)

    def release(self) -> None:
        """The call is over: a later one may have its graphs, and the cache and the inputs that they read."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None and buffers.key is not None:
            self._keep(buffers)

    def _keep(self, buffers: Buffers) -> None:
        buffers.drop_stale()
        captured = [(shape, inputs) for shape, inputs in buffers.inputs.items() if inputs.replay is not None]
        buffers.inputs = dict(captured[-KEPT_SHAPES:])
        if buffers.inputs:
            release(self.owner, buffers)

    def padded_nodes(self, num_nodes: int) -> int:
        """How many nodes a tree takes up in the block."""
        return padded_nodes(num_nodes, self.full_tree) if self.is_on else num_nodes

    def logits(
        self, block: Block, cache: LookaheadCache, masks: Masks, ordinary: Callable[[], Tensor]
    ) -> Tensor | None:
        """Logits [B, R, V] of a block for which `cache` has room; None where the ordinary forward has to run.

        masks: over all of the cache's slots. ordinary: that forward; run beside the first blocks of each new shape, to compare.
        """
        self.preparing_seconds = 0.0
        if self.captures and self.most_slots is not None and cache.capacity > self.most_slots:
            self.captures, self.stats.cuda_graph_reason = False, TOO_MANY_SLOTS
        if not self.is_on:
            return None
        inputs = self._fixed_inputs(block, cache, masks)
        forward = self._compiled(inputs, ordinary) if self.compiles else plain_forward
        logits = self._captured(inputs, forward, ordinary) if self.captures else None
        self.stats.captured_steps += logits is not None
        if logits is None and self.compiles:
            logits = self._run_compiled(inputs, forward)
        self.stats.compiled_steps += logits is not None and self.compiles
        return logits

    def call(self, inputs: StaticInputs, forward: Forward) -> Tensor:
        """The forward itself, and nothing else."""
        return inputs.call(forward, self.model, self.keeps_rows)

    def replay(self, inputs: StaticInputs) -> Tensor:
        """The same by a CUDA graph. The result is overwritten by the next replay."""
        assert inputs.replay is not None
        return inputs.replay()

    def _fixed_inputs(self, block: Block, cache: LookaheadCache, masks: Masks) -> StaticInputs:
        """The buffers of this shape, with this block in them."""
        if self._buffers is None or self._buffers.cache is not cache:
            self._buffers = Buffers(None, cache)
        self._buffers.drop_stale()
        slots = cache.block_slots(block.tokens.shape[1], block.tokens.device)
        known = self._buffers.inputs
        shape = (block.positions.shape, block.logit_rows.shape, mask_shapes(masks))
        inputs = known.pop(shape, None)
        if inputs is None:
            inputs = StaticInputs(block, masks, slots, cache)
        else:
            inputs.fill(block, masks, slots)
        known[shape] = inputs
        return inputs

    def _key(self, inputs: StaticInputs) -> Hashable:
        assert self._buffers is not None
        return (
            inputs.positions.shape,
            inputs.logit_rows.shape,
            self._buffers.capacity,
            self.model.dtype,
            inputs.tokens.device,
            self.model.config._attn_implementation,
            BACKEND,
        )

    def _compiled(self, inputs: StaticInputs, ordinary: Callable[[], Tensor]) -> Forward:
        """Compiled for this shape, now or before, and found to agree with the ordinary forward; that one after a failure."""
        key = self._key(inputs)
        try:
            with compiling:
                known = _compiled.of(self.owner)
                found = known.get(key)
                if found is None:
                    found = known[key] = self._compile(inputs, ordinary)
            if isinstance(found, str):
                raise NotCompiled(found)
        except Exception as problem:  # whatever a compiler raises; the model's own errors will come up without it too
            self._not_compiled(inputs, problem)
            return plain_forward
        return found

    def _run_compiled(self, inputs: StaticInputs, forward: Forward) -> Tensor | None:
        try:
            return self.call(inputs, forward)
        except Exception as problem:
            self._not_compiled(inputs, problem)
            return None

    def _not_compiled(self, inputs: StaticInputs, problem: Exception) -> None:
        """Remember the failure, so that no later call tries again."""
        self.stats.compile_reason = _compiled.of(self.owner)[self._key(inputs)] = in_short(problem)
        self.compiles = False

    def _compile(self, inputs: StaticInputs, ordinary: Callable[[], Tensor]) -> Forward:
        """Compiles by running once. The cache is left as the ordinary forward leaves it, up to rounding."""
        forward: Forward = compile_copy(plain_forward)
        error = logits_error(self.call(inputs, forward), ordinary())
        if error is not None:
            raise NotCompiled(f"the compiled forward was off by {error:.2g} of the largest logit")
        return forward

    def _captured(self, inputs: StaticInputs, forward: Forward, ordinary: Callable[[], Tensor]) -> Tensor | None:
        """Logits by a CUDA graph, captured when a call first meets the shape; None where that is not possible.

        The second block is compared too: only then would show what the model had baked in as a number. Where that is found out,
        the ordinary forward's keys and values have replaced the graph's: which slots they go to is a tensor of lade's own.
        """
        try:
            if inputs.checks_left:
                began = perf_counter()
                self._check_graph(inputs, forward, ordinary)
                self.preparing_seconds = perf_counter() - began
            return self.replay(inputs)
        except Exception as problem:
            self.stats.cuda_graph_reason = remember_failure(self.owner, "forward", problem)
            self.captures = False
            if self._buffers is not None:
                self._buffers.key = None  # no later call is to meet this
            return None

    def _check_graph(self, inputs: StaticInputs, forward: Forward, ordinary: Callable[[], Tensor]) -> None:
        """Capture it where that has not been done, and compare it with the ordinary forward. Raises NotCompiled if it differs."""
        if inputs.replay is None:
            run = partial(self.call, inputs, forward)
            if forward is plain_forward:
                refuse_waiting(run, inputs.tokens.device)
            with torch.cuda.device_of(inputs.tokens):
                inputs.replay = capture(run)
        error = logits_error(self.replay(inputs), ordinary())
        if error is not None:
            raise NotCompiled(f"the captured forward was off by {error:.2g} of the largest logit")
        inputs.checks_left -= 1


def in_short(problem: Exception) -> str:
    """One line for the figures: torch's errors go on for pages, and say in the second line what the first one announces."""
    if isinstance(problem, NotCompiled):
        return str(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split(chr(10))[:2]).strip()}"[:300]


def compile_copy(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A compiled copy: torch counts compilations per code object, and each shape of each model is to have one of its own."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    compiled: Callable[..., Tensor] = torch.compile(copy, fullgraph=True, dynamic=False, backend=BACKEND)
    return compiled
