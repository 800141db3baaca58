"""Blocks of static shapes: one compiled or captured forward per shape serves all lengths of the text.

All inputs of the forward are tensors of fixed shape and address: tokens, positions, slots, and masks over the cache's
full capacity. Trees are padded to a few sizes. A graph, with the inputs and the cache that it reads, is reused by
later calls of the same model. After a failure the eager forward is used, and the call's statistics give the reason.
"""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lade.block.kv_cache import LookaheadCache, least_capacity
from lade.block.mask import Block
from lade.common.state import PerModel
from lade.common.tolerance import logits_error
from lade.common.trial import NotUsed, Trial
from lade.config import LookaheadConfig
from lade.forward.base import BlockCall, can_capture
from lade.forward.cuda.buffer_pool import Buffers, CallBuffers, padded_capacity
from lade.forward.cuda.fingerprint import fingerprint, numerics
from lade.forward.cuda.graphs import capture
from lade.forward.cuda.kernel_path import KernelPath
from lade.forward.cuda.proof import UNPROVEN, is_proven
from lade.forward.cuda.static_inputs import (
    NUM_SINGLE,
    Forward,
    Outputs,
    StaticInputs,
    masks_of,
    plain_forward,
)
from lade.verification.logits import LogitsSummary

BACKEND: Any = "inductor"  # backend of torch.compile
# New tokens that calls must have asked for before anything is captured, unless CUDA_GRAPH=1. On an H200, with a 7B
# shape, a capture took at most 0.4 s and saved 19 ms in each later step; a tree has up to four shapes.
MIN_NEW_TOKENS = 128
# Without lade's kernel a captured block attends to the cache's full capacity, and sdpa copies the keys and values of
# grouped heads. Beyond this many slots that should cost more than eager launches. Estimated, not measured.
MOST_SLOTS_WITHOUT_KERNEL = 8192
TOO_MANY_SLOTS = (
    f"without the kernel a captured block reads all slots of the cache, here more than {MOST_SLOTS_WITHOUT_KERNEL} "
    "(CUDA_GRAPH=1 captures all the same)"
)
SMALLEST_TREE = 8  # nodes with the root; larger trees are padded to the next power of two


@dataclass
class ModelTrials:
    """Trials of a model: compiled forwards by shape, and whether its forward can be captured."""

    forwards: dict[Hashable, Forward] = field(default_factory=dict)
    compiled: Trial = field(default_factory=Trial)
    captured: Trial = field(default_factory=Trial)
    compiling: threading.Lock = field(default_factory=threading.Lock)  # torch.compile is not thread-safe
    num_asked: Counter[int] = field(default_factory=Counter)  # new tokens by number of rows, while graphs are automatic


_trials: PerModel[ModelTrials] = PerModel(ModelTrials)


def padded_nodes(num_nodes: int, full: int) -> int:
    """The number of nodes without the root that a tree is padded to. full: the expected largest number."""
    size = SMALLEST_TREE
    while size < num_nodes + 1:
        size *= 2
    return min(size - 1, full) if num_nodes <= full else size - 1


def graph_refusal(config: LookaheadConfig, model: PreTrainedModel, num_new: int, num_rows: int = 1) -> str | None:
    """Why forwards that the settings want captured are not, as a sentence; None if they are. Asked once in a call.

    num_new: the most tokens that the call may generate. num_rows: B. Does not check whether blocks can have static
    shapes.
    """
    if not can_capture(model.device):
        return "CUDA graphs need a model on a CUDA device"
    trials, num_asked = _trials.of(model), num_new
    if config.cuda_graph:
        trials.num_asked[num_rows] += MIN_NEW_TOKENS  # shorter calls use what is captured
        return None
    if not is_proven(model.device, "graph"):
        return UNPROVEN
    if (model.tp_size or 1) > 1:
        return "the model is split over several processes, one of which might fail to capture (CUDA_GRAPH=1 tries it)"
    if num_new < 2:
        return "a call for one token has no blocks"
    if not config.deterministic:  # with DETERMINISTIC=1 a text must not depend on earlier calls
        trials.num_asked[num_rows] += num_new
        num_asked = trials.num_asked[num_rows]
    if num_asked < MIN_NEW_TOKENS:
        return f"capturing pays from {MIN_NEW_TOKENS} new tokens on, over all calls (CUDA_GRAPH=1 captures at once)"
    return trials.captured.reasons.get("forward")


def most_captured_slots(config: LookaheadConfig, uses_kernel: bool) -> float:
    """The most cache slots for which blocks are captured."""
    return inf if uses_kernel or config.cuda_graph else MOST_SLOTS_WITHOUT_KERNEL


class StaticPath(KernelPath):
    """Runs one call's blocks by compiled or captured forwards of static shapes, by the ordinary one once that fails."""

    def __init__(self, call: BlockCall, uses_kernel: bool, padding: Tensor | None, captures: bool) -> None:
        """uses_kernel, padding: as for `KernelPath`. captures: whether blocks are captured."""
        super().__init__(call, uses_kernel, padding)
        config, self.stats = call.config, call.stats
        self.trials = _trials.of(self.adapter.model)
        self.compiles, self.captures = config.compile, captures
        # The usual largest number of tree nodes.
        self.full_tree = (config.ngram_size - 1) * config.num_guesses if config.uses_window else config.max_block - 1
        # Ids that have an embedding, of which a captured forward summarises the logits; None for logits alone.
        self.num_tokens = None if config.uses_window else self.adapter.num_tokens
        self.most_slots = most_captured_slots(config, uses_kernel)
        self.temperature, self.nan_column = 1.0, 0  # of the summary, known after the prompt
        self._buffers = CallBuffers(self.adapter.model)
        self._summary_at: StaticInputs | None = None  # where the summary of the latest block arrives

    @property
    def is_on(self) -> bool:
        return self.compiles or self.captures

    @property
    def kind(self) -> tuple[str, ...]:
        return (*super().kind, *("graph",) * self.captures)

    @property
    def sizes(self) -> tuple[int, ...] | None:  # type: ignore[override]
        if self.call.config.uses_window:
            return None
        return tuple(sorted({1 + padded_nodes(count, self.full_tree) for count in range(1 + self.full_tree)}))

    @property
    def summary(self) -> LogitsSummary | None:  # type: ignore[override]
        return None if self._summary_at is None else self._summary_at.read_summary()

    def take_cache(self, most_slots: int) -> LookaheadCache:
        adapter, model, num_slots = self.adapter, self.model, self.call.num_slots
        if (adapter.model.tp_size or 1) > 1:  # its ranks would have to agree on the pooled caches
            return adapter.make_cache(padded_capacity(num_slots))
        key = None
        if self.captures:
            device = adapter.model.device
            code = (model.dtype, model.config._attn_implementation, self.compiles, fingerprint(adapter.model))
            key = (self.call.num_rows, repr(adapter.attention_spans), self.num_tokens, device, numerics(device), *code)
        least, most = (padded_capacity(least_capacity(count)) for count in (num_slots, max(num_slots, most_slots)))
        if self.call.config.deterministic:  # earlier calls must not decide how much a block reads, nor its rounding
            most = least
        # With the kernel a block reads what the text has, whatever the capacity.
        return self._buffers.begin(key, least, inf if self.uses_kernel else most, adapter.make_cache)

    def use_summaries(self, nan_column: int | None, temperature: float) -> None:
        self.nan_column, self.temperature = nan_column or 0, temperature

    def padded_nodes(self, num_nodes: int) -> int:
        return padded_nodes(num_nodes, self.full_tree) if self.is_on else num_nodes

    def close(self, num_generated: int) -> None:
        self._buffers.end()
        super().close(num_generated)

    def forward(self, block: Block, cache: LookaheadCache) -> Tensor:
        self._summary_at = None
        ordinary = partial(super().forward, block, cache)
        logits = self._logits(block, cache, ordinary) if self.is_on else None
        return ordinary() if logits is None else logits

    def _logits(self, block: Block, cache: LookaheadCache, ordinary: Callable[[], Tensor]) -> Tensor | None:
        """Logits [B, R, V] of a block; None if the ordinary forward must run. `cache` then has room for the block.

        ordinary: that forward, run for comparison on the first blocks of each new shape.
        """
        buffers = self._buffers.with_room(cache, max(cache.lengths) + block.tokens.shape[1])
        if self.captures and cache.capacity > self.most_slots:
            self.captures, self.stats.reasons["graph"] = False, TOO_MANY_SLOTS
        if not self.is_on:
            return None
        inputs = self._fixed_inputs(buffers, block)
        forward = self._compiled(inputs, ordinary) if self.compiles else plain_forward
        logits = self._captured(inputs, forward, ordinary) if self.captures else None
        self.stats.captured_steps += logits is not None
        if logits is None and self.compiles:
            logits = self._run_compiled(inputs, forward)
        self.stats.compiled_steps += logits is not None and self.compiles
        return logits

    def run(self, inputs: StaticInputs, forward: Forward) -> Tensor:
        """Run the forward without a graph."""
        block, adapter = inputs.block, self.adapter
        masks = masks_of(block, adapter.dtype, adapter.attention_spans, self.uses_kernel, inputs.padding)
        return forward(
            self.model, adapter.keeps_rows, block.tokens, block.positions, masks, block.logit_rows, inputs.cache
        )

    def with_summary(self, inputs: StaticInputs, forward: Forward) -> Outputs:
        """The captured function: forward, and summary of the logits if it is wanted."""
        logits = self.run(inputs, forward)
        return (logits,) if self.num_tokens is None else (logits, inputs.packed_summary(logits, self.num_tokens))

    def replay(self, inputs: StaticInputs) -> Outputs:
        """Run the forward by its CUDA graph. The next replay overwrites the result."""
        assert inputs.replay is not None
        return inputs.replay()

    def _fixed_inputs(self, buffers: Buffers, block: Block) -> StaticInputs:
        """The static inputs of this shape, filled with this block."""
        buffers.drop_stale()
        shape = shape_of(block)
        inputs = buffers.inputs.pop(shape, None) or StaticInputs(block, buffers.cache, self.adapter.model.device)
        inputs.begin_call(block.key_mask, self.padding)
        inputs.fill(block, buffers.cache, self.nan_column, self.temperature)
        buffers.inputs[shape] = inputs
        return inputs

    def _key(self, inputs: StaticInputs) -> Hashable:
        block, attention = inputs.block, self.model.config._attn_implementation
        return (*shape_of(block), block.capacity, self.model.dtype, block.tokens.device, attention)

    def _compiled(self, inputs: StaticInputs, ordinary: Callable[[], Tensor]) -> Forward:
        """The forward compiled for this shape and compared with the eager one; that one after a failure."""
        key, trials = self._key(inputs), self.trials
        with trials.compiling:
            problem = trials.compiled.reason(key, partial(self._compile, key, inputs, ordinary))
        if problem is None:
            return trials.forwards[key]
        self.compiles, self.stats.reasons["compile"] = False, problem
        return plain_forward

    def _run_compiled(self, inputs: StaticInputs, forward: Forward) -> Tensor | None:
        try:
            return self.run(inputs, forward)
        except Exception as error:  # remembered, so that no later call retries
            self.stats.reasons["compile"] = self.trials.compiled.refuse(self._key(inputs), error)
            self.compiles = False
            return None

    def _compile(self, key: Hashable, inputs: StaticInputs, ordinary: Callable[[], Tensor]) -> str | None:
        """Compile by running once. The cache ends as the eager forward leaves it, up to rounding."""
        forward: Forward = compile_copy(plain_forward)
        error = logits_error(self.run(inputs, forward), ordinary())
        self.trials.forwards[key] = forward
        return None if error is None else f"the compiled forward was off by {error:.2g} of the largest logit"

    def _captured(self, inputs: StaticInputs, forward: Forward, ordinary: Callable[[], Tensor]) -> Tensor | None:
        """Logits by a CUDA graph, captured at a call's first block of the shape; None if that is not possible.

        The second block is compared as well, since only different inputs reveal values that the capture froze as
        constants. After a mismatch the cache is right: the eager forward has overwritten the graph's keys and values
        in the same slots.
        """
        try:
            problem = inputs.trial.reason("graph", partial(self._check_graph, inputs, forward, ordinary))
            if problem is not None:
                raise NotUsed(problem)
            logits, *summary = self.replay(inputs)
            if summary:
                inputs.start_summary(*summary)
                self._summary_at = inputs
            return logits
        except Exception as error:
            self.stats.reasons["graph"] = self.trials.captured.refuse("forward", error)
            self.captures = False
            self._buffers.drop()
            return None

    def _check_graph(self, inputs: StaticInputs, forward: Forward, ordinary: Callable[[], Tensor]) -> str | None:
        """Capture the forward if needed and compare it with the eager one. Returns how they differ, or None."""
        if inputs.replay is None:
            with torch.cuda.device_of(inputs.block.tokens):
                inputs.replay = capture(partial(self.with_summary, inputs, forward))
        logits, *summary = self.replay(inputs)
        error = logits_error(logits, ordinary())
        if error is not None:
            return f"the captured forward was off by {error:.2g} of the largest logit"
        # Of what is read from logits only the first columns choose tokens; the others order guesses.
        found = [part[..., :NUM_SINGLE] for part in summary]
        expected = [inputs.packed_summary(logits, self.num_tokens)[..., :NUM_SINGLE] for _ in summary]
        is_same = all(map(torch.equal, found, expected))
        return None if is_same else "the captured summary is not that of the captured logits"


def shape_of(block: Block) -> tuple[torch.Size, ...]:
    return block.positions.shape, block.logit_rows.shape


def compile_copy(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A compiled copy. Torch limits recompilations per code object, so each shape of each model gets its own."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copy, fullgraph=True, dynamic=False, backend=BACKEND)
