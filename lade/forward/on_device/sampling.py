"""Sampling inside a step on the device, with transformers' own warpers and a ring of exponential draws.

For one sample `torch.multinomial` chooses the largest p / e, with e exponential draws [B, V] for each token that
generate() adds (the Gumbel-max trick). The host draws these ahead, from generate()'s own generator and in the same
order. A step divides by them wherever it samples. Afterwards the generator is reset to the state in which plain
generate() leaves it.

Shapes: B rows, V logits, R places in the ring. Place T modulo R holds the draws for the token after a text of T
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from lade.compat import logits_processors
from lade.forward.race import RacedSelection, Sampling, winners
from lade.verification.draws import READABLE, drawing, generator_state, set_generator_state
from lade.verification.selection import MAX_LEAD, Selection

if TYPE_CHECKING:
    from lade.forward.on_device.step import StepState

# Warpers that use only the scores, row by row, without host synchronisation; eta and top-h sampling do synchronise.
WARPERS = logits_processors(
    (
        "EpsilonLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
MAX_UNSEEN = 2  # unread steps in flight, the next one included
NEVER = 2**62  # longer than any text, in tokens
REFUSED = "NaN in logits or probabilities; the host loop continued"


def sampling_of(selection: Selection) -> Sampling | None:
    """The device's equivalent of a selection's sampling; None if it needs the host."""
    is_served = (
        type(selection) is RacedSelection
        and selection.do_sample
        and not selection.stop_strings
        and type(selection.processor) is LogitsProcessorList
        and selection.sequences.device.type in READABLE
    )
    return Sampling.of(selection.processor, WARPERS) if is_served else None


def max_row_lead(batch_size: int) -> int:
    """The lead over the slowest row, in tokens, at which a row waits, as in `PerRowSelection`."""
    return 1 if batch_size == 1 else MAX_LEAD


def ring_size(batch_size: int, ngram_size: int) -> int:
    """R, the tokens for which steps may need draws, counted from the slowest row's length as last read by the host.

    A row is active while its lead is below `max_row_lead`. It may get N tokens in that step and use N more draws in
    the next.
    """
    return max_row_lead(batch_size) + MAX_UNSEEN * ngram_size


def sample(state: StepState, sampling: Sampling, tree_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that generate() would sample after the root and after each candidate token.

    tree_logits: [B, 1 + n, V]. Returns ids [B, 1 + n] and which rows are active in this step [B]: neither ended nor
    waiting. A probability that `torch.multinomial` would refuse sets `is_refused` and stops all rows.
    """
    assert state.draws is not None
    is_active = ~state.is_finished & ~is_far_ahead(state)
    # The length of the text up to each token, [B, 1 + n].
    lengths = state.lengths[:, None] + state.offsets[:, : tree_logits.shape[1]]
    index = lengths % len(state.draws) * len(state.rows) + state.rows
    chosen = winners(sampling, tree_logits, state.draws.flatten(0, 1), index)
    state.is_refused |= (is_active & (chosen < 0).any(dim=1)).any()
    return chosen, is_active & ~state.is_refused


def is_far_ahead(state: StepState) -> Tensor:
    """Which rows wait for the slowest unfinished one. Returns [B]."""
    slowest = state.lengths.masked_fill(state.is_finished, NEVER).min()
    return state.lengths >= slowest + max_row_lead(len(state.lengths))


class DrawRing:
    """Fills the ring of draws for one call, ahead of its texts.

    It draws from the generator itself, not from a copy, so threads that share the generator never get the same draws.
    """

    def __init__(self, draws: Tensor, length: int) -> None:
        """draws: [R, B, V]. length: of the texts in tokens; the draws for the token after it come first."""
        self.draws, self._end = draws, length
        self._states: dict[int, Tensor] = {}  # generator state before the draws for each length
        self._left = generator_state(draws.device)  # generator state after the last draws
        self._is_sole = True  # whether no other code has drawn from the generator

    def fill(self, lengths: list[int], is_finished: list[bool]) -> None:
        """Fill the free places of the ring before the next step. lengths, is_finished: [B], as the host last saw."""
        size = len(self.draws)
        slowest = min(length for length, done in zip(lengths, is_finished, strict=True) if not done)
        while self._end < slowest + size:
            with drawing:
                self._states[self._end] = self._read()
                self.draws[self._end % size].exponential_(1)
                self._left = generator_state(self.draws.device)
            self._states.pop(self._end - size - 1, None)
            self._end += 1

    def move_to(self, draws: Tensor) -> None:
        """Continue in another ring of the same shape."""
        draws.copy_(self.draws)
        self.draws = draws

    def of(self, length: int) -> Tensor:
        """A copy [B, V] of the draws for the token after texts of a length, one of the last R."""
        return self.draws[length % len(self.draws)].clone()

    def put_back(self, length: int) -> None:
        """Reset the generator to before the draws for `length`, unless other code has drawn from it."""
        with drawing:
            self._read()
            if self._is_sole and length < self._end:
                set_generator_state(self.draws.device, self._states[length])

    def _read(self) -> Tensor:
        state = generator_state(self.draws.device)
        self._is_sole = self._is_sole and torch.equal(state, self._left)
        return state


def hand_back(ring: DrawRing, selection: Selection) -> None:
    """Hand over to the host loop: reset the generator, and pass on draws that only some rows have used."""
    lengths, is_finished = selection.sequences.lengths, selection.is_finished
    longest = max(lengths)
    ring.put_back(longest)
    if selection.draws is not None:
        slowest = min((length for length, done in zip(lengths, is_finished, strict=True) if not done), default=longest)
        selection.draws.take_over(
            slowest - selection.sequences.prompt_length, [ring.of(length) for length in range(slowest, longest)]
        )
