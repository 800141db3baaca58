"""The lookahead decoding loop, for greedy decoding and sampling: propose, lay out, forward, verify, commit, learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lade.block.kv_cache import LookaheadCache, slots_of_static
from lade.block.layout import BlockLayout, block_layout
from lade.block.mask import Block
from lade.block.token_tree import TokenTree
from lade.config import LookaheadConfig
from lade.drafting import DraftRequest, Outcome, make_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter
from lade.forward.choice import choose_forward
from lade.forward.on_device.loop import DeviceLoop, runs_on_device
from lade.forward.runner import BlockRunner
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.parallel.group import SingleProcess
from lade.parallel.partition import BlockPart
from lade.stats import GenerationStats
from lade.transfer import HOST, to_device
from lade.verification.logits import find_nan_column
from lade.verification.outputs import OutputRecorder
from lade.verification.selection import Accepted, Selection, SelectionRequest, selection_for

FIRST_CAPACITY = 1024  # most slots allocated for new tokens at first


# The loop's shapes change in every step, so tracing it under a compiled generate() does not pay.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def lookahead_decode(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    config: LookaheadConfig,
    adapter: ModelAdapter,
    stats: GenerationStats,
    callers_cache: Cache | None,
    group: SingleProcess,
    **model_kwargs: Any,
) -> Any:
    """Decode with lookahead; returns what `GenerationMixin._sample` returns for these arguments.

    input_ids: [B, P] prompts; P is 0 with inputs_embeds alone. callers_cache: a cache passed to generate(), which must
    hold the whole sequence afterwards. group: the processes that share each step.

    Source: arXiv:2402.02057, algorithm 2.
    """
    recorder = OutputRecorder(generation_config)
    request = SelectionRequest(input_ids, logits_processor, stopping_criteria, generation_config, streamer, recorder)
    call = DecodingCall(request, config, adapter, stats, callers_cache, group, synced_gpus, model_kwargs)
    selection, drafter, timer = call.selection, call.drafter, StepTimer(call)
    outputs = call.prefill(input_ids, generation_config, model_kwargs)
    # Mixture-of-experts layers use another implementation, with other rounding, while decoding.
    with adapter.block_model._optimize_model_for_decode(), call.reporting():
        call.take_first_token(outputs)
        del outputs  # frees the hidden states and attentions of the whole prompt
        if call.on_device:  # the same loop on the device; rows that it leaves unfinished continue below
            call.on_device.run(call.cache, call.vocab_size, call.nan_column)
        while call.model._has_unfinished_sequences(all(selection.is_finished), synced_gpus, device=input_ids.device):
            timer.begin()
            draft = call.propose()
            timer.end_draft()
            step = call.lay_out(draft)
            outputs = call.forward(step)
            timer.end_forward()
            if all(selection.is_finished):  # synced_gpus: other processes still need this one's forward
                continue
            logits, accepted, choices = call.verify(step, outputs)
            call.commit(step, accepted)
            timer.end_verify()
            drafter.learn(Outcome(step.tree, logits, accepted, choices, selection.sequences, call.runner.digest))
            timer.end_learn(step.layout.num_tokens)
            if stats.on_step is not None:
                stats.on_step(step.roots, draft, step.tree, step.layout, accepted, choices, selection.sequences)
    return call.finish()


@dataclass(slots=True)
class Step:
    """One block: the draft and its layout."""

    roots: list[int]
    draft: Draft
    tree: TokenTree  # the whole tree
    part: BlockPart  # what this process computes of it
    layout: BlockLayout
    block: Block


class DecodingCall:
    """The state of one call: token selection, drafter, runner and key/value cache."""

    cache: LookaheadCache

    def __init__(
        self,
        request: SelectionRequest,
        config: LookaheadConfig,
        adapter: ModelAdapter,
        stats: GenerationStats,
        callers_cache: Cache | None,
        group: SingleProcess,
        is_synced: bool,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Arguments as for `lookahead_decode`. is_synced: its synced_gpus."""
        input_ids, generation_config = request.input_ids, request.generation_config
        self.streamer, self.recorder = request.streamer, request.recorder
        self.adapter, self.stats, self.group, self.callers_cache = adapter, stats, group, callers_cache
        self.model, self.runner = adapter.prompt_model, BlockRunner(adapter, input_ids.device)
        self.device, self.do_sample = input_ids.device, bool(generation_config.do_sample)
        needs_equal_lengths = callers_cache is not None or adapter.needs_equal_lengths
        self.selection: Selection = group.selection(selection_for(request, needs_equal_lengths), request)
        self.temperature = (generation_config.temperature or 1.0) if self.do_sample else 1.0
        self.key_mask = prompt_key_mask(model_kwargs.get("attention_mask"))
        # [B or 1, P], or [k, B or 1, P]; None if the model takes none.
        self.positions: Tensor | None = model_kwargs.get("position_ids")
        num_new = max(1, (request.stopping_criteria.max_length or 0) - input_ids.shape[1])
        adapter.carry(model_kwargs)
        num_slots = input_ids.shape[1] + min(num_new, FIRST_CAPACITY) + config.max_block_tokens
        sizes = {"num_rows": len(input_ids), "num_slots": num_slots}
        choose_forward(self.runner, config, stats, self.key_mask, num_new, self.recorder.model_arguments, **sizes)
        group.num_tokens = adapter.num_tokens
        self.drafter: Drafter = make_drafter(
            DraftRequest(
                config=config,
                model=adapter.model,
                num_tokens=adapter.num_tokens,
                prompt_ids=input_ids,
                key_mask=self.key_mask,
                temperature=self.temperature if self.do_sample else None,
                top_k=generation_config.top_k if self.do_sample else None,
                top_p=generation_config.top_p if self.do_sample else None,
                draws=self.selection.draws,
                forward_kind=self.runner.kind,
                is_exact=adapter.is_exact,
                block_sizes=self.runner.block_sizes(config),
                may_measure=not is_synced,  # other processes' waits distort the times
            )
        )
        self.most_slots = slots_of_static(callers_cache)
        is_alone = type(group) is SingleProcess and not is_synced and self.most_slots is None
        on_device = is_alone and runs_on_device(self.runner, config, self.selection, stats, self.positions)
        parts = (self.runner, config, self.selection, self.drafter, stats, self.key_mask, self.positions)
        self.on_device = DeviceLoop(*parts) if on_device else None
        most = input_ids.shape[1] + num_new + config.max_block_tokens
        if self.on_device:
            self.cache = self.on_device.take_cache(num_slots, most)
        else:
            self.cache = self.runner.take_cache(num_slots, most, len(input_ids))
        self.cache.most_slots = self.most_slots

    def prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
        """Run the prompt's forward. Returns the model's output."""
        self.cache.adopt(model_kwargs["past_key_values"])
        model_kwargs["past_key_values"] = self.cache
        outputs = self.model._prefill(input_ids, generation_config, model_kwargs)
        if outputs.past_key_values is not self.cache:  # the model replaced it during the prompt
            self.cache = self.runner.make_cache(self.cache.capacity)
            self.cache.most_slots = self.most_slots
            self.cache.adopt(outputs.past_key_values)
        self.cache.end_prefill(len(input_ids))
        # Offset of positions from slots, [..., B or 1, 1], read once, so that no step waits.
        positions, length = self.positions, self.cache.lengths[0]
        none = torch.zeros((1, 1), dtype=torch.long, device=HOST)
        offset = none if positions is None else positions[..., -1:].to(HOST) + 1 - length
        self.max_position_offset = int(offset.max())
        # Adding an int is cheaper than adding a tensor.
        self.position_offset: Tensor | int = self.max_position_offset if offset.shape[:-1] == (1,) else offset
        self.stats.batch_size, self.stats.steps = len(input_ids), 1
        return outputs

    def take_first_token(self, outputs: Any) -> None:
        """Choose the first token from the prompt's logits: a step with an empty tree."""
        self.recorder.begin_step(outputs, None)
        tree, logits = TokenTree.empty(len(self.cache.lengths)), outputs.logits[:, -1:]
        self.vocab_size, self.nan_column = logits.shape[-1], find_nan_column(logits[:, 0])
        self.group.nan_column = self.nan_column
        block_logits, _ = self.group.exchange(self.group.partition(tree, ROOT_ALONE), logits, has_window=False)
        accepted = self.selection.verify(tree, block_logits)
        self.drafter.learn(Outcome(tree, logits, accepted, None, self.selection.sequences))
        self.runner.use_digests(self.nan_column, self.temperature)

    def propose(self) -> Draft:
        """The drafter's guesses after each row's root."""
        allowed = self.adapter.max_guess_offset(max(self.cache.lengths) + self.max_position_offset)
        max_offset = 0 if self.selection.next_is_plain else self.cache.max_guess_offset(allowed)
        draft = self.drafter.propose(self.selection.sequences, self.selection.is_idle, max_offset)
        if self.runner.samples and type(self.group) is SingleProcess:  # here, since draws do not count as the forward
            self.selection.begin_race(self.selection.without_finished(draft.tree, draft.max_depth), self.vocab_size)
        return draft

    def lay_out(self, draft: Draft) -> Step:
        """Compute the block's tokens, positions, visibility and logit rows."""
        selection, lengths, roots = self.selection, self.cache.lengths, self.selection.sequences.roots()
        tree = selection.without_finished(draft.tree, draft.max_depth)
        part = self.group.partition(tree, draft.window_shape)
        num_nodes = self.runner.padded_nodes(part.tree.num_nodes)
        device = self.device if draft.has_window else HOST  # where the window's cells lie
        layout = block_layout(*draft.window_shape, num_nodes, device, part.columns)
        starts: int | Tensor = lengths[0]
        if min(lengths) != max(lengths):
            # One less for a finished row: its output is not read, and its position must not exceed the model's limit.
            counted = [length - has_ended for length, has_ended in zip(lengths, selection.is_finished, strict=True)]
            starts = torch.tensor(counted, device=HOST)[:, None]  # [B, 1]
        starts = self.position_offset + starts
        offsets, visible = layout.offsets_and_visibility(part.tree)
        block = Block(
            tokens=selection.without_avoided(layout.tokens(roots, part.tree, draft.window_cells)),
            offsets=offsets,
            positions=offsets + (to_device(starts, device) if isinstance(starts, Tensor) else starts),
            visible=visible,
            logit_rows=layout.logit_rows if draft.has_window else layout.tree_rows,
            lengths=lengths,
            key_mask=self.key_mask,
        )
        return Step(roots, draft, tree, part, layout, block)

    def forward(self, step: Step) -> Any:
        """Run the model over the block. Returns the model's output."""
        outputs = self.runner.forward(step.block, self.cache, self.selection.race, **self.recorder.model_arguments)
        wait_for(self.device)
        self.stats.steps += 1
        self.stats.block_tokens.append(step.layout.num_tokens)
        return outputs

    def verify(self, step: Step, outputs: Any) -> tuple[Tensor, Accepted, Tensor | None]:
        """Choose tokens along the tree.

        Returns the logits after the root and each node, [B, 1 + n, V]; the accepted nodes of each row; and the model's
        choices after the window's last level, [B, W], None without a window.
        """
        self.recorder.begin_step(outputs, self.cache.lengths[0])
        logits = step.layout.without_padding(outputs.logits, step.part.tree)
        block_logits, choices = self.group.exchange(step.part, logits, step.draft.has_window, self.runner.digest)
        return logits[:, : 1 + step.tree.num_nodes], self.selection.verify(step.tree, block_logits), choices

    def commit(self, step: Step, accepted: Accepted) -> None:
        """Keep the keys/values of the accepted tokens and drop the rest."""
        self.group.commit(self.cache, step.part, accepted)
        if self.selection.next_is_plain:  # a guess with a NaN key or value has spoiled the step
            self.group.recover(self.selection, *self.cache.clear_guesses(step.block.tokens, accepted))
        for path in accepted:
            if path is not None:
                self.stats.accepted_lengths[len(path)] += 1

    def finish(self) -> Any:
        """Release the buffers. Returns what generate() returns."""
        if self.streamer is not None:
            self.streamer.end()
        self.group.end(self.do_sample, self.device)
        self.drafter.finish()
        if self.callers_cache is not None:
            self.cache.hand_over(self.callers_cache)
        if self.on_device:
            self.on_device.release()
        self.runner.finish(self.stats)
        return self.recorder.result(self.selection.sequences.padded(self.selection.pad_token), self.callers_cache)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Fill in the statistics, also when a streamer, a processor or an interrupt ends the call."""
        try:
            yield
        finally:
            self.stats.generated_tokens, self.stats.sources = self.selection.num_generated, self.drafter.sources()


class StepTimer:
    """Reports the times of each step to the statistics and the drafter.

    The drafter's cost leaves out verification, whose user code runs once per token whatever the block's size, and the
    preparation of later steps. Drawing random numbers always counts as verification.
    """

    def __init__(self, call: DecodingCall) -> None:
        self._call, self._selection = call, call.selection

    def begin(self) -> None:
        self._began, self._drawn = perf_counter(), self._selection.drawing_seconds

    def end_draft(self) -> None:
        self._drafted = perf_counter()
        self._drawing = self._selection.drawing_seconds - self._drawn

    def end_forward(self) -> None:
        self._forwarded = perf_counter()

    def end_verify(self) -> None:
        self._verified = perf_counter()

    def end_learn(self, num_tokens: int) -> None:
        """num_tokens: q."""
        call, learning = self._call, perf_counter() - self._verified
        searching = self._drafted - self._began - self._drawing
        forward = self._forwarded - self._drafted
        # What took no time counts for nothing.
        cost = forward - call.runner.preparing_seconds + learning if call.runner.is_typical else 0.0
        call.drafter.spent(max(self._selection.sequences.lengths), num_tokens, cost, searching)
        call.stats.add_times(searching + learning, forward, self._verified - self._forwarded + self._drawing)


def wait_for(device: torch.device) -> None:
    """Wait for an accelerator, so that the times are those of the forward; verification would wait for it anyway.

    On CUDA only for the current stream: a device-wide wait would abort a graph capture in another thread.
    """
    if device.type == "cpu":
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        torch.accelerator.synchronize(device)
