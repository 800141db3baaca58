"""The host's part of steps that run on the device: their initial state, when to stop, and buffers for later calls.

Steps are compiled (COMPILE=1), captured (CUDA_GRAPH), or both. Each step is launched before the last one's result is
read. A graph and the buffers that it reads are reused by later calls of the same model. After any failure the loop of
`lade.decoding` continues from the texts as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.config import LookaheadConfig
from lade.drafting.ngram_pool import copy_pool
from lade.forward.buffer_pool import Lease, PooledBuffers
from lade.forward.fingerprint import fingerprint, numerics
from lade.forward.graphs import NotCompiled, capture, refuse_waiting
from lade.forward.on_device.sampling import REFUSED, DrawRing, hand_back, sampling_of
from lade.forward.on_device.step import NO_TOKEN, StepShape, StepState, fill, lay_out, progress, step
from lade.forward.runner import BlockRunner
from lade.forward.static_shapes import (
    TOO_MANY_SLOTS,
    can_capture,
    capture_failure,
    compile_copy,
    compiled_once,
    in_short,
    most_captured_slots,
    remember_failure,
)
from lade.stats import GenerationStats
from lade.tolerance import logits_error
from lade.transfer import Landing
from lade.verification.selection import GreedySelection, Selection

# Block tokens of all rows for which a GPU takes hardly longer than for one: it is bound by reading the weights.
FREE_TOKENS = {torch.float16: 512, torch.bfloat16: 512}
FREE_TOKENS_OTHERWISE = 64
TRIAL_STEPS = 3  # the most steps that preparation runs before it restores the state


@dataclass(slots=True, eq=False)
class Buffers(PooledBuffers):
    """The buffers of steps. state: None until a call's first step. replay: None without a CUDA graph."""

    state: StepState | None = None
    replay: Callable[[], Tensor] | None = None

    def replays(self) -> list[Any]:
        return [] if self.replay is None else [self.replay]


def runs_on_device(
    runner: BlockRunner, config: LookaheadConfig, selection: Selection, stats: GenerationStats, positions: Tensor | None
) -> bool:
    """Whether a call does not need the host between steps, and is expected to gain. positions: as for `DeviceLoop`."""
    adapter, sequences = runner.adapter, selection.sequences
    device = adapter.model.device
    is_served = (
        is_wanted(config, device, adapter.dtype, len(sequences.lengths), captures_steps(config, runner))
        and config.uses_window
        and config.num_guesses > 0
        and (type(selection) is GreedySelection or sampling_of(selection) is not None)
        and stats.on_step is None
        and sequences.device == device
        and (adapter.model.tp_size or 1) == 1
        and runner.static_shapes_reason() is None
    )
    if not is_served or adapter.last_position is None or positions is None:
        return is_served
    # Blocks are always full, so every text must end well before the model's last position.
    max_offset = max(config.ngram_size + config.window_size - 3, config.ngram_size - 1)
    largest = int(positions[..., -1].max()) + selection.max_length - sequences.prompt_length
    return largest + max_offset <= int(adapter.last_position)


def is_wanted(config: LookaheadConfig, device: torch.device, dtype: torch.dtype, num_rows: int, captures: bool) -> bool:
    """Whether steps on the device are expected to pay. Their blocks are always full.

    On a GPU they save host synchronisation; unless the settings ask for them, full blocks must cost hardly more than
    one token. On a CPU they need COMPILE=1 and fixed block sizes. dtype: the model's. num_rows: B. captures: whether
    steps would be captured.
    """
    if not can_capture(device):
        return config.compile and not config.adaptive
    if config.compile or config.cuda_graph or not config.adaptive:
        return True
    return captures and num_rows * config.max_block_tokens <= FREE_TOKENS.get(dtype, FREE_TOKENS_OTHERWISE)


def captures_steps(config: LookaheadConfig, runner: BlockRunner) -> bool:
    """Whether whole steps are to be captured. Automatic settings do not retry after a failed capture."""
    return runner.captures and (bool(config.cuda_graph) or capture_failure(runner.adapter.model, "step") is None)


def runs_ahead(device: torch.device) -> bool:
    """Whether the device works asynchronously to the host."""
    return device.type == "cuda"


class DeviceLoop:
    """Decodes one call by steps on the device until all rows end or something fails."""

    def __init__(
        self,
        runner: BlockRunner,
        config: LookaheadConfig,
        selection: Selection,
        drafter: Any,
        stats: GenerationStats,
        key_mask: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        """For a call that `runs_on_device`.

        drafter: that of the settings. key_mask: [B, P] bool, False for padding. positions: of the prompt,
        [B or 1, P], or several such along a first dimension.
        """
        adapter = runner.adapter
        self.runner, self.selection, self.drafter, self.stats = runner, selection, drafter, stats
        self.owner, self.model, self.key_mask, self.positions = adapter.model, runner.model, key_mask, positions
        self.shape = StepShape(
            batch_size=len(selection.sequences.lengths),
            ngram_size=config.ngram_size,
            window_size=config.window_size,
            num_guesses=config.num_guesses,
            num_tokens=adapter.num_tokens,
            num_eos_ids=len(selection.eos_ids),
            shifts_window=not config.always_forward_one,
            uses_kernel=runner.uses_kernel,
            keeps_rows=adapter.keeps_rows,
            position_shape=(1, 1) if positions is None else tuple(positions[..., -1:].shape),
            dtype=adapter.dtype,
            device=selection.sequences.device,
            sampling=sampling_of(selection),
        )
        self.compiles = config.compile
        self.captures = captures_steps(config, runner)
        self._key = (
            self.shape,
            repr(adapter.reaches),
            self.model.config._attn_implementation,
            numerics(self.shape.device),
        )
        self._most_slots = most_captured_slots(config, runner.uses_kernel)
        self._lease = Lease(Buffers, self.owner, runner.uses_kernel)
        self._slot_offset = 0  # slot of a token minus its index in the text
        self._position_offset: Tensor | None = None  # position of a token minus its slot; None for 0
        self._ring: DrawRing | None = None  # None for greedy

    def take_cache(self, num_slots: int, most_slots: int) -> LookaheadCache:
        """An empty cache for the call: a pooled one that a graph reads and that fits, or a new one.

        num_slots: the slots that the call starts with. most_slots: the most that it may need.
        """
        key = (*self._key, self.compiles, fingerprint(self.owner)) if self.captures else None
        return self._lease.begin(key, num_slots, most_slots, self.runner.make_cache)

    def release(self) -> None:
        """Return the call's buffers to the pool if a graph reads them."""
        self._lease.end()

    def run(self, cache: LookaheadCache, num_logits: int, witness: int | None) -> None:
        """Decode until all rows have ended, or until something fails; the host loop then continues.

        cache: contains the prompt, after which each row has one token. num_logits: V. witness: the `nan_column` of
        `lade.verification.logits.BlockLogits`.
        """
        sequences = self.selection.sequences
        if all(self.selection.is_finished) or not self._lease.holds(cache):
            return
        if witness is None:
            self.stats.device_reason = REFUSED
            return
        began = perf_counter()
        self._slot_offset = cache.lengths[0] - (sequences.lengths[0] - 1)
        self._position_offset = None if self.positions is None else self.positions[..., -1:] + 1 - cache.lengths[0]
        try:
            while self._slot_offset >= 0 and not all(self.selection.is_finished):
                if self._ring is not None:
                    self._ring.draws = self._ring.draws.clone()  # other calls may use the buffers that are left here
                buffers = self._lease.with_room(cache, self._num_slots(max(sequences.lengths), TRIAL_STEPS))
                if self.captures and cache.capacity > self._most_slots:
                    self.stats.cuda_graph_reason = TOO_MANY_SLOTS
                    break
                state = self._fill(buffers, num_logits, witness)
                run = self._prepare(buffers, state)
                if run is None:
                    break  # the statistics give the reason
                if not self._decode(cache, state, run):
                    self.stats.device_reason = REFUSED
                    break
        except Exception as problem:  # compilers and graphs raise anything; the model's own errors recur
            self._fail(problem)
        finally:
            if self._ring is not None:
                hand_back(self._ring, self.selection)
        self.stats.add_times(0.0, perf_counter() - began, 0.0)

    def _num_slots(self, longest: int, steps_before: int) -> int:
        """Slots that a step may need. longest: tokens of the longest text, steps_before steps earlier."""
        longest = min(longest + steps_before * self.shape.ngram_size, self.selection.max_length)
        return longest - 1 + self._slot_offset + self.shape.block_tokens

    def _fill(self, buffers: Buffers, num_logits: int, witness: int) -> StepState:
        """The state of the next steps, as the host has it."""
        cache, selection, sequences = buffers.cache, self.selection, self.selection.sequences
        if buffers.state is None or buffers.state.capacity != cache.capacity:
            buffers.state = StepState(self.shape, cache, self.runner.adapter.reaches, num_logits)
            buffers.replay = None  # it reads the old state
        state, longest = buffers.state, max(sequences.lengths)
        if state.draws is not None:
            if self._ring is None:
                self._ring = DrawRing(state.draws, longest)
            self._ring.move_to(state.draws)
        state.ids[:, :longest] = sequences.padded(0)
        fill(state.lengths, sequences.lengths)
        fill(state.is_finished, selection.is_finished)
        fill(state.eos_ids, sorted(selection.eos_ids) or [NO_TOKEN])
        state.is_refused.fill_(False)
        state.witness.fill_(witness)
        state.max_length.fill_(selection.max_length)
        state.slot_offset.fill_(self._slot_offset)
        state.position_offset.zero_()
        if self._position_offset is not None:
            state.position_offset.copy_(self._position_offset)
        state.key_mask.fill_(True)
        if self.key_mask is not None:
            state.key_mask[:, : self.key_mask.shape[1]] = self.key_mask
        state.padding.zero_()
        if self.runner.padding is not None:
            state.padding.copy_(self.runner.padding)
        state.levels.copy_(self.drafter.window.levels)
        copy_pool(self.drafter.pool, state.pool)
        state.num_steps.fill_(self.drafter.window.num_updates)
        state.num_proposed.zero_()
        state.accepted_lengths.zero_()
        return state

    def _prepare(self, buffers: Buffers, state: StepState) -> Callable[[], Tensor] | None:
        """A function that runs one step; None if compilation and capture were wanted and both failed."""
        run: Callable[[], Tensor] = partial(step, self.model, state)
        if not (self.compiles or self.captures):
            return run
        if self.compiles:
            try:
                make = partial(self._compile, buffers.cache, state)
                run = partial(compiled_once(self.owner, (*self._key, state.capacity), make), self.model, state)
            except NotCompiled as problem:
                self.compiles, self.stats.compile_reason = False, str(problem)
        if self.captures:
            try:
                if buffers.replay is None:
                    buffers.replay = self._capture(buffers.cache, state, run)
                run = buffers.replay
            except Exception as problem:
                self.captures, self.stats.cuda_graph_reason = False, remember_failure(self.owner, "step", problem)
        return run if self.compiles or self.captures else None

    def _compile(self, cache: LookaheadCache, state: StepState) -> Callable[..., Tensor]:
        """The step compiled for this shape and capacity. Raises NotCompiled if it differs from the eager forward."""
        compiled = compile_copy(step)
        self._check(cache, state, partial(compiled, self.model, state), "compiled")
        return compiled

    def _capture(self, cache: LookaheadCache, state: StepState, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A CUDA graph of the step. Raises NotCompiled if it differs from the eager forward."""
        saved = state.save()
        try:
            if not self.compiles:
                refuse_waiting(run, self.shape.device)
                state.restore(saved)
            with torch.cuda.device_of(state.ids):
                replay = capture(run)
            state.restore(saved)
            self._check(cache, state, replay, "captured")
            run()  # one step later: reveals values that the capture froze as constants
            self._check(cache, state, replay, "captured")
        finally:
            state.restore(saved)
        return replay

    def _check(self, cache: LookaheadCache, state: StepState, run: Callable[[], Tensor], kind: str) -> None:
        """Run a step, compare its logits with the eager forward's, restore the state.

        Raises NotCompiled on a difference.
        """
        saved, committed = state.save(), cache.lengths
        cache.lengths = (state.lengths - 1 + state.slot_offset).tolist()
        try:
            logits = run().clone()
            state.restore(saved)
            block = replace(
                lay_out(state)[0], lengths=cache.lengths, key_mask=self.key_mask, capacity=None, start_slots=None
            )
            error = logits_error(logits, self.runner.eager_forward(block, cache).logits)
        finally:
            state.restore(saved)
            cache.lengths = committed
        if error is not None:
            raise NotCompiled(f"the {kind} step was off by {error:.2g} of the largest logit")

    def _decode(self, cache: LookaheadCache, state: StepState, run: Callable[[], Tensor]) -> bool:
        """Run steps until all rows have ended or the cache is full, then copy the texts to the selection.

        Returns False if a step was refused because of NaN logits or invalid probabilities.

        On an asynchronous device the next step is launched before the last one's result is read. The surplus step at
        the end finds all rows ended and changes none.
        """
        results: deque[Landing] = deque()
        num_ahead = int(runs_ahead(self.shape.device))
        lengths, is_finished, is_refused = self.selection.sequences.lengths, self.selection.is_finished, [False]
        try:
            while not (all(is_finished) or any(is_refused)):
                has_room = self._num_slots(max(lengths), len(results)) <= state.capacity
                if has_room:
                    if self._ring is not None:
                        self._ring.fill(lengths, is_finished)
                    run()
                    results.append(progress(state))
                if len(results) > num_ahead or (results and not has_room):
                    lengths, is_finished, is_refused = results.popleft().read().tolist()
                elif not has_room:
                    break
        finally:
            self._hand_back(cache, state)
        return not any(is_refused)

    def _hand_back(self, cache: LookaheadCache, state: StepState) -> None:
        """Update selection, cache, statistics and drafter on the host with all steps since `_fill`."""
        selection, stats, drafter = self.selection, self.stats, self.drafter
        before, after = selection.sequences.lengths, state.lengths.tolist()
        added = [new - old for new, old in zip(after, before, strict=True)]
        for row, (start, end) in enumerate(zip(list(before), after, strict=True)):
            if start < end:
                selection.sequences.append(state.ids[row, start:end].tolist(), row)
        selection.num_generated += sum(added)
        selection.is_finished = state.is_finished.tolist()
        cache.lengths = [slot + count for slot, count in zip(cache.lengths, added, strict=True)]

        num_steps = int(state.num_steps) - drafter.window.num_updates
        histogram = dict(enumerate(state.accepted_lengths.tolist()))
        stats.steps += num_steps
        stats.device_steps += num_steps
        stats.block_tokens += [self.shape.block_tokens] * num_steps
        stats.accepted_lengths.update({length: count for length, count in histogram.items() if count})
        stats.compiled_steps += num_steps * self.compiles
        stats.captured_steps += num_steps * self.captures
        num_accepted = sum(length * count for length, count in histogram.items())
        drafter.take_over(state.levels.clone(), num_steps, int(state.num_proposed), num_accepted)
        copy_pool(state.pool, drafter.pool)

    def _fail(self, problem: Exception) -> None:
        """Record a failure after successful preparation. The host loop continues and meets the model's own errors."""
        self.stats.device_reason = in_short(problem)
        if self.captures:
            self.stats.cuda_graph_reason = remember_failure(self.owner, "step", problem)
        elif self.compiles:
            self.stats.compile_reason = in_short(problem)
        self.compiles = self.captures = False
        self._lease.drop()
