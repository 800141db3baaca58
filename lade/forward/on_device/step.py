"""A whole step of lookahead decoding as tensor operations of static shapes, with the paper's window and pool.

A step reads and writes only tensors at fixed addresses and copies nothing to the host. It can therefore be compiled
once for all lengths of the text, or captured in one CUDA graph. The block is that of the loop in `lade.decoding`,
except that candidates are not merged into a tree, whose shape would vary from step to step.

Shapes: B rows, N, W, G as in the paper, D = N-1, q = (N-1) * (W + G) block tokens, C slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lade.block.kv_cache import LookaheadCache
from lade.block.layout import block_layout
from lade.block.mask import Block, Reach
from lade.drafting.ngram_pool import NGramPool
from lade.drafting.window import JacobiWindow, rolled
from lade.forward.on_device.sampling import ring_size, sample
from lade.forward.race import Sampling
from lade.forward.static_inputs import masks_of, plain_forward, static_view, write_slots
from lade.transfer import HOST, Landing
from lade.verification.logits import best_on_device

NO_TOKEN = -1  # not a token id; the pool ignores n-grams that begin with it


@dataclass(frozen=True, slots=True)
class StepShape:
    """The fixed properties of a step: sizes, settings, and which arguments the forward takes."""

    batch_size: int
    ngram_size: int
    window_size: int
    num_guesses: int  # G, at least 1
    num_tokens: int  # token ids with an embedding
    num_eos_ids: int
    shifts_window: bool  # by the number of accepted tokens, ALWAYS_FWD_ONE=0
    uses_kernel: bool
    keeps_rows: bool  # whether the model takes `logits_to_keep`
    position_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sampling: Sampling | None = None  # None: greedy

    @property
    def depth(self) -> int:
        """D, the length of a candidate."""
        return self.ngram_size - 1

    @property
    def num_nodes(self) -> int:
        return self.num_guesses * self.depth

    @property
    def block_tokens(self) -> int:
        """q, the tokens of a block."""
        return self.num_nodes + self.depth * self.window_size


class StepState:
    """The tensors that steps read and write, for one cache capacity."""

    def __init__(
        self, shape: StepShape, cache: LookaheadCache, reaches: Reach | dict[str, Reach], num_logits: int
    ) -> None:
        """cache: its storage is written by steps. reaches: of the layers. num_logits: V."""
        batch_size, device = shape.batch_size, shape.device
        zeros = partial(torch.zeros, device=device, dtype=torch.long)
        self.shape, self.reaches = shape, reaches
        self.capacity = cache.capacity

        # The text. The last N places take writes beyond the end of the text.
        self.ids = zeros(batch_size, cache.capacity + shape.ngram_size)
        self.lengths = zeros(batch_size)  # of the text
        self.is_finished = zeros(batch_size, dtype=torch.bool)
        self.max_length = zeros(())
        self.eos_ids = zeros(max(1, shape.num_eos_ids))
        self.slot_offset = zeros(())  # slot of a token minus its index in `ids`
        self.position_offset = zeros(shape.position_shape)  # position of a token minus its slot
        self.key_mask = zeros(batch_size, cache.capacity, dtype=torch.bool)  # False for padding
        self.padding = zeros(batch_size, dtype=torch.int32)  # the same for the kernel: left-padding slots per row

        ring = (ring_size(batch_size, shape.ngram_size), batch_size, num_logits)  # [R, B, V]
        self.draws = None if shape.sampling is None else torch.ones(ring, dtype=torch.float32, device=device)
        self.is_refused = zeros((), dtype=torch.bool)  # NaN logits or refused probabilities: stops all rows
        self.witness = zeros(1)  # a logit column that shows NaN, see `lade.spoiled.find_nan_column`
        self.rows = torch.arange(batch_size, device=device)[:, None]

        self.levels = zeros(batch_size, shape.depth, shape.window_size)
        self.pool = NGramPool(shape.ngram_size, shape.num_guesses, shape.num_tokens, device)
        self.pool.clock = zeros(()) + 1

        self.num_steps = zeros(())  # steps that began with an unfinished row
        self.num_proposed = zeros(())
        self.accepted_lengths = zeros(shape.ngram_size)  # [N] how often a row accepted 0 .. N-1 guesses

        layout = block_layout(shape.ngram_size, shape.window_size, shape.num_nodes, device)
        self.offsets, self.visible = chains(layout.offsets, layout.visible, shape)
        self.logit_rows = layout.logit_rows.clone()
        self.column = torch.arange(shape.ngram_size, device=device)  # 0 .. N-1
        self.block_places = torch.arange(shape.block_tokens, device=device)  # 0 .. q-1
        self.slots = zeros(batch_size, shape.block_tokens)  # [B, q] slots of the block
        self.cache = static_view(cache, self.slots)

    def changing(self) -> list[Tensor]:
        """The tensors that a step changes, except keys and values, which it writes after the committed slots."""
        pool = self.pool
        assert isinstance(pool.clock, Tensor)
        counts = [self.num_steps, self.num_proposed, self.accepted_lengths, pool.clock]
        return [self.ids, self.lengths, self.is_finished, self.is_refused, self.levels, pool.ngrams, pool.seen, *counts]

    def save(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.changing()]

    def restore(self, saved: list[Tensor]) -> None:
        for tensor, value in zip(self.changing(), saved, strict=True):
            tensor.copy_(value)


def chains(offsets: Tensor, visible: Tensor, shape: StepShape) -> tuple[Tensor, Tensor]:
    """A layout whose tree is G chains of D tokens after the root. Returns offsets [B, q] and visibility [B, q, q]."""
    node = torch.arange(shape.num_nodes, device=offsets.device)
    chain, place = node // shape.depth, node % shape.depth
    nodes = slice(1, 1 + shape.num_nodes)
    offsets, visible = offsets.repeat(shape.batch_size, 1), visible.repeat(shape.batch_size, 1, 1)
    offsets[:, nodes] = place + 1
    visible[:, nodes, 0] = True
    visible[:, nodes, nodes] = (chain[:, None] == chain) & (place[:, None] >= place)
    return offsets, visible


def lay_out(state: StepState) -> tuple[Block, Tensor, Tensor]:
    """The next block, its candidates [B, G, D], and which of these the pool had [B, G]."""
    roots = state.ids.gather(1, state.lengths[:, None] - 1)[:, 0]  # [B]
    window = JacobiWindow(state.levels)
    window.set_root(roots)
    candidates, is_any = state.pool.newest(roots)
    candidates = candidates.masked_fill(~is_any[..., None], 0)
    starts = state.lengths[:, None] - 1 + state.slot_offset  # [B, 1]
    block = Block(
        tokens=torch.cat([roots[:, None], candidates.flatten(1), window.cells()], dim=1),
        offsets=state.offsets,
        positions=starts + state.position_offset + state.offsets,
        visible=state.visible,
        logit_rows=state.logit_rows,
        lengths=[],
        key_mask=state.key_mask,
        capacity=state.capacity,
        start_slots=starts,
    )
    return block, candidates, is_any


def longest_match(candidates: Tensor, is_any: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The candidate with the longest prefix that the model agrees with, and the model's choices along it.

    candidates: [B, G, D] ids. is_any: [B, G], False for empty places. chosen: [B, 1 + G * D] the model's choices after
    the root and after each candidate token. Returns the candidate's index [B], its number of accepted tokens [B], and
    the choices after the root and after each of its tokens [B, N]. Source: arXiv:2402.02057, verification branch.
    """
    batch_size, num_guesses, depth = candidates.shape
    behind_root = chosen[:, :1, None].expand(-1, num_guesses, -1)
    choices = torch.cat([behind_root, chosen[:, 1:].view(batch_size, num_guesses, depth)], dim=2)  # [B, G, N]
    agrees = (candidates == choices[..., :-1]) & is_any[..., None]
    num_agreed = agrees.long().cumprod(dim=2).sum(dim=2)  # [B, G]
    best = num_agreed.argmax(dim=1)  # [B]
    index = best[:, None]
    return best, num_agreed.gather(1, index)[:, 0], choices.take_along_dim(index[..., None], dim=1)[:, 0]


def step(model: Any, state: StepState) -> Tensor:
    """One step. Each active row gets 1 to N tokens, the others do not change. Returns logits [B, R, V]."""
    shape = state.shape
    block, candidates, is_any = lay_out(state)
    assert block.start_slots is not None
    state.slots.copy_(block.start_slots + state.block_places)
    masks = masks_of(block, shape.dtype, state.reaches, shape.uses_kernel, state.padding)
    logits = plain_forward(model, shape.keeps_rows, block.tokens, block.positions, masks, state.logit_rows, state.cache)
    tree_logits, behind_window = logits.split([1 + shape.num_nodes, shape.window_size], dim=1)

    chosen, is_active = choose(state, tree_logits)
    best, num_agreed, tokens = longest_match(candidates, is_any, chosen)
    count, has_ended = stop(state, tokens, (num_agreed + 1) * is_active)

    # Slots after the accepted tokens are free, so all D tokens of the candidate may be moved.
    targets = state.slots[:, 1 : 1 + shape.depth]
    move_slots(state.cache, targets + best[:, None] * shape.depth, targets)
    ends = state.lengths[:, None] + state.column  # [B, N]
    is_committed = state.column < count[:, None]  # [B, N]
    state.ids.scatter_(1, ends, torch.where(is_committed, tokens, state.ids.gather(1, ends)))
    learn(state, best_on_device(behind_window[..., : shape.num_tokens]), count)

    state.num_steps += is_active.any()
    state.num_proposed += (is_any.sum(dim=1) * is_active).sum() * shape.depth
    state.accepted_lengths.scatter_add_(0, (count - 1).clamp(min=0), is_active.long())
    state.lengths += count
    state.is_finished |= has_ended
    return logits


def choose(state: StepState, tree_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The model's choices after the root and each candidate token [B, 1 + n], and which rows are active [B].

    tree_logits: the logits there, [B, 1 + n, V]. A NaN logit sets `is_refused` and stops all rows; the host loop takes
    over.
    """
    is_number = ~tree_logits.index_select(2, state.witness).isnan().flatten(1).any(dim=1)  # [B]
    state.is_refused |= ~(is_number | state.is_finished).all()
    if state.shape.sampling is None:
        return best_on_device(tree_logits), ~(state.is_finished | state.is_refused)
    return sample(state, state.shape.sampling, tree_logits)


def stop(state: StepState, tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Limit a step's tokens per row by the first end-of-sequence id and by the maximum length.

    tokens: [B, N] ids, of which the first `count` [B] are the model's, 0 in inactive rows. Returns the number of
    committed tokens [B] and which rows have ended [B].
    """
    is_eos = (tokens[..., None] == state.eos_ids).any(dim=-1)  # [B, N]
    up_to_eos = (is_eos.long().cumsum(dim=1) == 0).sum(dim=1) + 1
    room = state.max_length - state.lengths
    count = torch.minimum(torch.minimum(count, up_to_eos), room)
    return count, (is_eos & (state.column < count[:, None])).any(dim=1) | (count >= room)


def learn(state: StepState, chosen: Tensor, count: Tensor) -> None:
    """Insert the window's n-grams and those of the text that end in a new token into the pool, then roll the window.

    chosen: [B, W] the model's choices after the last level. count: [B] tokens just committed, which `lengths` do not
    include yet. Nothing changes if no row got a token.
    """
    shape, column = state.shape, state.column
    is_step = (count > 0).any()
    is_ready = is_step & (state.num_steps >= shape.depth)  # each cell is the model's choice
    of_window = JacobiWindow(state.levels).ngrams(chosen).where(is_ready, NO_TOKEN)  # [B * W, N]
    first = state.lengths[:, None] + column - shape.depth  # [B, N] start of the n-gram that ends in each new token
    places = (first[..., None] + column).clamp(min=0)  # [B, N, N]
    of_text = state.ids.gather(1, places.flatten(1)).view_as(places)
    is_new = (column < count[:, None]) & (first >= 0)
    of_text = of_text.where(is_new[..., None], NO_TOKEN).flatten(0, 1)  # [B * N, N]
    ngrams = torch.cat([of_window, of_text])
    is_known = ((ngrams >= 0) & (ngrams < shape.num_tokens)).all(dim=1, keepdim=True)
    state.pool.insert(ngrams.where(is_known, NO_TOKEN))
    levels = rolled(state.levels, chosen, (count - 1).clamp(min=0) if shape.shifts_window else None)
    state.levels.copy_(levels.where(is_step, state.levels))


def move_slots(cache: Cache, source: Tensor, target: Tensor) -> None:
    """Copy keys and values of all layers between slots. source, target: [B, D] slots."""
    layers: list[Any] = cache.layers
    for layer in layers:
        for states in (layer.keys, layer.values):  # [B, H, C, size]
            if states is None:
                continue
            if len(source) == 1:
                moved = states.index_select(2, source[0])
            else:
                moved = states.take_along_dim(source[:, None, :, None], dim=2)
            write_slots(states, target, moved)


def progress(state: StepState) -> Landing:
    """Start copying to the host, [3, B]: lengths of the texts, which rows have ended, whether the step was refused."""
    found = torch.stack([state.lengths, state.is_finished, state.is_refused.expand_as(state.lengths)])
    landing = Landing(found)
    landing.start(found)
    return landing


def fill(tensor: Tensor, values: list[Any]) -> None:
    tensor.copy_(torch.tensor(values, device=HOST))
