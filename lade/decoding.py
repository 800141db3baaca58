"""The lookahead decoding loop, for greedy decoding and sampling: propose, lay out, forward, verify, commit, learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import MAX_WAITING, LookaheadCache
from lade.block.layout import BlockLayout, block_layout
from lade.block.mask import Block
from lade.block.token_tree import BlockPart, TokenTree
from lade.common.request import Request, whole_length
from lade.common.transfer import HOST, to_device, wait_for
from lade.drafting import DraftRequest, Outcome, make_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter
from lade.drafting.prediction import predictions_for
from lade.drafting.step_costs import StepCosts
from lade.forward.base import BlockCall, path_for
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.stats import GenerationStats
from lade.verification.logits import BlockLogits, best_tokens
from lade.verification.nan_guard import find_nan_column
from lade.verification.selection import Accepted, selection_for
from lade.verification.single_process import SingleProcess

FIRST_CAPACITY = 1024  # most slots allocated for new tokens at first


# The loop's shapes change in every step, so tracing it under a compiled generate() does not pay.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def lookahead_decode(request: Request, adapter: ModelAdapter, stats: GenerationStats, group: SingleProcess) -> Any:
    """Decode with lookahead; returns what `GenerationMixin._sample` returns for the request.

    group: the processes that share each step.

    Source: arXiv:2402.02057, algorithm 2.
    """
    call, is_synced = DecodingCall(request, adapter, stats, group), request.synced_gpus
    selection, drafter = call.selection, call.drafter
    logits = call.prefill()
    # Mixture-of-experts layers use another implementation, with other rounding, while decoding.
    with adapter.block_model._optimize_model_for_decode(), call.reporting():
        call.take_first_token(logits)
        del logits  # which may be of all tokens of the prompt
        while call.model._has_unfinished_sequences(all(selection.is_finished), is_synced, device=call.device):
            began = perf_counter()
            draft = call.propose()
            drafted = perf_counter()
            step = call.lay_out(draft)
            logits = call.forward(step)
            ran = perf_counter()
            if all(selection.is_finished):  # synced_gpus: other processes still need this one's forward
                call.cache.commit([None] * len(call.cache.lengths))
                continue
            outcome = call.verify(step, logits)
            call.commit(step, outcome.accepted)
            verified = perf_counter()
            drafter.learn(outcome)
            stats.draft_seconds += drafted - began + perf_counter() - verified
            stats.forward_seconds += ran - drafted
            stats.verify_seconds += verified - ran
            if stats.on_step is not None:
                stats.on_step(step, outcome)
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
    num_tokens: int  # q, and the tokens that run again


class DecodingCall:
    """The state of one call: token selection, forward path, step costs, drafter and key/value cache."""

    cache: LookaheadCache

    def __init__(self, request: Request, adapter: ModelAdapter, stats: GenerationStats, group: SingleProcess) -> None:
        """Arguments as for `lookahead_decode`."""
        config, predictions = group.config, predictions_for(request, adapter.num_tokens)
        self.request, self.adapter, self.stats, self.group = request, adapter, stats, group
        self.device = request.input_ids.device
        self.callers_cache = request.callers_cache  # must hold the whole sequence afterwards
        self.key_mask, self.positions = prompt_key_mask(request.attention_mask), request.position_ids
        adapter.carry(request.model_kwargs)

        kind = selection_for(request, self.callers_cache is not None or adapter.needs_equal_lengths)
        self.selection = group.selection(kind, request)
        self.nan_guard = self.selection.nan_guard

        batch_size, prompt_length = request.input_ids.shape
        num_new = max(1, whole_length(request.stopping_criteria.max_length or 0) - prompt_length)
        call = BlockCall(
            adapter=adapter,
            config=config,
            stats=stats,
            device=self.device,
            key_mask=self.key_mask,
            num_rows=batch_size,
            num_prompt=batch_size * request.num_uncached,
            num_new=num_new,
            num_slots=prompt_length + min(num_new, FIRST_CAPACITY) + config.max_block_tokens,
        )
        self.path = path_for(call)
        self.model = self.path.prompt_model
        self.costs = StepCosts.of_call(adapter, config, batch_size, self.path.sizes)
        self.drafter: Drafter = make_drafter(
            DraftRequest(
                config=config,
                model=adapter.model,
                num_tokens=adapter.num_tokens,
                prompt_ids=request.input_ids,
                key_mask=self.key_mask,
                temperature=self.selection.temperature if self.selection.do_sample else None,
                costs=self.costs,
                is_exact=adapter.is_exact,
                takes_chains=adapter.takes_chains,
                predictions=predictions,
            )
        )
        self.cache = self.path.take_cache(prompt_length + num_new + config.max_block_tokens)

    def prefill(self) -> Tensor:
        """Run the prompt's forward. Returns logits [B, 1 or more, V]."""
        request, model_kwargs = self.request, self.request.model_kwargs
        name = self.adapter.cache_name
        self.cache.adopt(model_kwargs[name])
        model_kwargs[name] = self.cache
        outputs = self.model._prefill(request.input_ids, request.generation_config, model_kwargs)
        if (returned := getattr(outputs, name)) is not self.cache:  # the model replaced it during the prompt
            self.cache = self.adapter.make_cache(self.cache.capacity)
            self.cache.adopt(returned)
        self.cache.end_prefill(len(request.input_ids))
        # Offset of positions from slots, [..., B or 1, 1], read once, so that no step waits.
        positions, length = self.positions, self.cache.lengths[0]
        none = torch.zeros((1, 1), dtype=torch.long, device=HOST)
        offset = none if positions is None else positions[..., -1:].to(HOST) + 1 - length
        self.position_offset, self.max_position_offset = offset, int(offset.max())
        self.stats.batch_size, self.stats.steps = len(request.input_ids), 1
        return outputs.logits

    def take_first_token(self, logits: Tensor) -> None:
        """Choose the first token from the prompt's logits: a step with an empty tree."""
        tree, logits = TokenTree.empty(len(self.cache.lengths)), logits[:, -1:]
        self.nan_column = find_nan_column(logits[:, 0])
        part = self.group.partition(tree, ROOT_ALONE)
        block_logits, _ = self.group.exchange(part, BlockLogits(logits, self.nan_column), None)
        accepted = self.selection.verify(tree, block_logits)
        self.drafter.learn(Outcome(tree, logits, accepted, None, self.selection.sequences))
        self.path.use_summaries(self.nan_column, self.selection.temperature)

    def propose(self) -> Draft:
        """The drafter's guesses after each row's root."""
        limits = [
            self.adapter.max_guess_offset(max(self.cache.lengths) + self.max_position_offset),
            0 if self.nan_guard.has_tripped or self.cache.num_waiting >= MAX_WAITING else None,
        ]
        if self.adapter.takes_chains:  # what waits counts for MAX_BLOCK
            limits.append(max(0, self.group.config.max_block_tokens - 1 - self.cache.num_waiting))
        max_offset = min((limit for limit in limits if limit is not None), default=None)
        if self.costs is not None:
            self.costs.at(self.path.kind, self.cache.num_waiting)
        is_idle = self.selection.is_idle
        draft = self.drafter.propose(self.selection.sequences, is_idle, max_offset)
        return draft.as_chains(is_idle) if self.adapter.takes_chains else draft

    def lay_out(self, draft: Draft, roots: list[int] | None = None) -> Step:
        """Compute the block's tokens, positions, visibility and logit rows. roots: by default the last of each text."""
        selection, lengths, roots = self.selection, self.cache.lengths, roots or self.selection.sequences.roots()
        tree = selection.without_finished(draft.tree, draft.max_depth)
        part = self.group.partition(tree, draft.window_shape)
        num_nodes = self.path.padded_nodes(part.tree.num_nodes)
        device = self.device if draft.has_window else HOST  # where the window's cells lie
        layout = block_layout(*draft.window_shape, num_nodes, device, part.columns)
        is_ragged = min(lengths) != max(lengths)
        # One less for a finished row: its output is not read, and its position must not exceed the model's limit.
        ended = [is_ragged and has_ended for has_ended in selection.is_finished]
        counted = [length - has_ended for length, has_ended in zip(lengths, ended, strict=True)]
        starts = self.position_offset + torch.tensor(counted, device=HOST)[:, None]  # [..., B, 1]
        offsets, visible = layout.offsets_and_visibility(part.tree)
        block = Block(
            tokens=self.nan_guard.without_guesses(layout.tokens(roots, part.tree, draft.window_cells)),
            offsets=offsets,
            positions=offsets + to_device(starts, device),
            visible=visible,
            logit_rows=layout.logit_rows if draft.has_window else layout.logit_rows[: 1 + num_nodes],
            lengths=lengths,
            key_mask=self.key_mask,
        )
        return Step(roots, draft, tree, part, layout, block, layout.num_tokens + self.cache.num_waiting)

    def forward(self, step: Step) -> Tensor:
        """Run the model over the block. Returns logits [B, R, V]."""
        logits = self.path.forward(step.block, self.cache)
        wait_for(self.device)
        self.stats.steps += 1
        self.stats.block_tokens.append(step.num_tokens)
        return logits

    def verify(self, step: Step, logits: Tensor) -> Outcome:
        """Choose and commit tokens along the tree."""
        logits, behind_window = step.layout.split(logits, step.part.tree)
        choices, summary = None, self.path.summary
        if step.draft.has_window:
            choices = best_tokens(behind_window[..., : self.adapter.num_tokens]).to(self.device)
        own = BlockLogits(logits, self.nan_column, summary)
        block_logits, choices = self.group.exchange(step.part, own, choices)
        accepted = self.selection.verify(step.tree, block_logits)
        return Outcome(step.tree, logits, accepted, choices, self.selection.sequences, summary)

    def commit(self, step: Step, accepted: Accepted) -> None:
        """Keep the keys/values of the accepted tokens and drop the rest."""
        self.group.commit(self.cache, step.part, accepted)
        self.nan_guard.clear(self.cache)
        self.stats.accepted_lengths.update(len(path) for path in accepted if path is not None)

    def run_waiting(self) -> None:
        """One more forward where tokens wait, so that the cache holds the text up to its last token."""
        if self.cache.num_waiting:
            roots = self.cache.unwait()
            tree = TokenTree.empty(len(roots))
            step = self.lay_out(Draft(tree, 0, ROOT_ALONE, self.request.input_ids[:, :0]), roots)
            self.forward(step)
            self.cache.commit([[] for _ in roots])

    def finish(self) -> Any:
        """Release the buffers. Returns what generate() returns."""
        selection = self.selection
        if selection.streamer is not None:
            selection.streamer.end()
        self.group.end(selection.do_sample, self.device)
        self.drafter.finish()
        if self.callers_cache is not None:
            self.run_waiting()
            self.cache.hand_over(self.callers_cache)
        self.path.close(selection.num_generated)
        return selection.recorder.result(selection.sequences.padded(selection.pad_token), self.callers_cache)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Fill in the statistics, also when a streamer, a processor or an interrupt ends the call."""
        try:
            yield
        finally:
            self.stats.generated_tokens, self.stats.sources = self.selection.num_generated, self.drafter.sources()
