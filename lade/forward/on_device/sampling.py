"""Sampling inside a step on the device: transformers' own warpers, and a ring of the draws that decide.

`torch.multinomial` for one sample chooses the largest p / e, with e drawn from an exponential distribution, [B, V] for each token
that generate() adds to the rows. The host draws these ahead, from generate()'s own generator and in its order; a step divides by
them wherever it may sample. Afterwards the generator is put back to where plain generate() leaves it.

Shapes: B rows, V logits, R places in the ring. What follows a text of T tokens is chosen by the draws in place T modulo R.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from lade.compat import logits_processors
from lade.verification.draws import READABLE, drawing, generator_state, set_generator_state
from lade.verification.selection import MAX_LEAD, PerRowSelection, Selection

if TYPE_CHECKING:
    from lade.forward.on_device.step import StepShape, StepState

# They look at nothing but the scores, each row by itself, and the host reads none of these. Eta and top-h sampling do read some.
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
CONSTANTS = (bool, int, float, str, type(None))  # what a warper's parameters may be, to be part of what is compiled
MAX_UNSEEN = 2  # steps under way whose results the host has not read, the next one included
NEVER = 2**62  # tokens, more than any text has
REFUSED = "logits or probabilities that are not numbers: the ordinary loop finds out what generate() makes of them"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a step samples. Two are equal where warpers of the same types have the same parameters."""

    key: Hashable
    warpers: tuple[Callable[..., Tensor], ...] = field(compare=False)


def sampling_of(selection: Selection) -> Sampling | None:
    """How a step on the device chooses what these rules choose; None where they need the host."""
    is_served = (
        type(selection) is PerRowSelection
        and selection.do_sample
        and selection.on_commit is None
        and not selection.stop_strings
        and type(selection.processor) is LogitsProcessorList
        and all(map(is_warper, selection.processor))
        and selection.sequences.ids.device.type in READABLE
    )
    if not is_served:
        return None
    # Copies: what is compiled or captured may not change when the caller's own objects do.
    warpers = tuple(map(copy, selection.processor))
    return Sampling(tuple((type(warper), *sorted(vars(warper).items())) for warper in warpers), warpers)


def is_warper(processor: Any) -> bool:
    """Whether it is one of the known ones, and not a subclass, with nothing but plain parameters."""
    return type(processor) in WARPERS and all(type(value) in CONSTANTS for value in vars(processor).values())


def max_row_lead(batch_size: int) -> int:
    """A row that is so many tokens ahead of the slowest one waits, as in `PerRowSelection`."""
    return 1 if batch_size == 1 else MAX_LEAD


def ring_size(batch_size: int, ngram_size: int) -> int:
    """R: for how many tokens steps may need draws, from the one behind the slowest row's text on, as the host last saw it.

    A row goes on while it is less than the lead ahead; it may get N tokens in that step, and look N further in the one after.
    """
    return max_row_lead(batch_size) + MAX_UNSEEN * ngram_size


def empty_draws(shape: StepShape, num_logits: int) -> Tensor:
    """A ring for steps of one shape, [R, B, V]."""
    size = (ring_size(shape.batch_size, shape.ngram_size), shape.batch_size, num_logits)
    return torch.ones(size, dtype=torch.float32, device=shape.device)


def sample(state: StepState, sampling: Sampling, tree_logits: Tensor) -> tuple[Tensor, Tensor]:
    """What generate() samples behind the root and behind each candidate token, if its turn comes there.

    tree_logits: [B, 1 + n, V]. Returns ids [B, 1 + n], and which rows go on in this step [B]: not those that have ended or wait.
    No row does from the first probability on that `torch.multinomial` refuses.
    """
    assert state.draws is not None
    is_active = ~state.is_finished & ~is_far_ahead(state)
    probabilities = probabilities_of(sampling, tree_logits)
    lengths = (
        state.lengths[:, None] + state.offsets[:, : tree_logits.shape[1]]
    )  # [B, 1 + n] of the text up to each of them
    draws = state.draws[lengths % len(state.draws), state.rows]  # [B, 1 + n, V]
    chosen = (probabilities / draws).argmax(dim=-1)
    is_valid = (probabilities >= 0).flatten(1).all(dim=1)  # [B]; of what is refused, softmax gives only nan
    state.is_refused |= (is_active & ~is_valid).any()
    return chosen, is_active & ~state.is_refused


def probabilities_of(sampling: Sampling, logits: Tensor) -> Tensor:
    """As generate() makes them, in float32. logits: [B, 1 + n, V]. Returns the same shape."""
    scores = logits.to(dtype=torch.float32, copy=True).flatten(0, 1)
    for warper in sampling.warpers:
        scores = warper(None, scores)  # without a text: none of them looks at it
    return torch.nn.functional.softmax(scores, dim=-1).view(logits.shape)


def is_far_ahead(state: StepState) -> Tensor:
    """Which rows wait for the slowest one. Returns [B]."""
    slowest = state.lengths.masked_fill(state.is_finished, NEVER).min()
    return state.lengths >= slowest + max_row_lead(len(state.lengths))


class DrawRing:
    """Fills a ring of draws for one call, a little ahead of its texts.

    The draws are taken from the generator itself, not from a copy: of threads that share it, no two get the same.
    """

    def __init__(self, draws: Tensor, length: int) -> None:
        """draws: [R, B, V]. length: of the texts; what follows them is to be drawn first."""
        self.draws, self._end = draws, length
        self._states: dict[int, Tensor] = {}  # of the generator, before it drew for texts of a length
        self._left = generator_state(draws.device)  # after the last draws
        self._is_sole = True  # nobody else has drawn from the generator meanwhile

    def fill(self, lengths: list[int], is_finished: list[bool]) -> None:
        """Draw as far ahead as there is room, before the next step. lengths, is_finished: as far as the host has seen."""
        size = len(self.draws)
        slowest = min(length for length, done in zip(lengths, is_finished, strict=True) if not done)
        while self._end < slowest + size:
            with drawing:
                self._states[self._end] = self._read()
                self.draws[self._end % size].exponential_(1)
                self._left = generator_state(self.draws.device)
            self._states.pop(self._end - size - 1, None)
            self._end += 1

    def move_to(self, draws: Tensor | None) -> Tensor:
        """Go on in another ring of this shape, or in a new one where there is none. Returns that one."""
        draws = torch.empty_like(self.draws) if draws is None else draws
        draws.copy_(self.draws)
        self.draws = draws
        return draws

    def of(self, length: int) -> Tensor:
        """What was drawn for the token behind texts of a length, one of the last R. Returns [B, V], a copy."""
        return self.draws[length % len(self.draws)].clone()

    def put_back(self, length: int) -> None:
        """Leave the generator as if it had drawn for shorter texts only, unless somebody else has drawn from it."""
        with drawing:
            self._read()
            if self._is_sole and length < self._end:
                set_generator_state(self.draws.device, self._states[length])

    def _read(self) -> Tensor:
        state = generator_state(self.draws.device)
        self._is_sole = self._is_sole and torch.equal(state, self._left)
        return state


def hand_back(ring: DrawRing, selection: Selection) -> None:
    """Leave the generator, and draws that some rows have used and others will, to the ordinary loop."""
    lengths, is_finished = selection.sequences.lengths, selection.is_finished
    longest = max(lengths)
    ring.put_back(longest)
    if selection.draws is not None:
        slowest = min((length for length, done in zip(lengths, is_finished, strict=True) if not done), default=longest)
        selection.draws.take_over(
            slowest - selection.sequences.prompt_length, [ring.of(length) for length in range(slowest, longest)]
        )
