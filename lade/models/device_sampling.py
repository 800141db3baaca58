"""Sampling inside a step on the device: transformers' own warpers, and a ring of the draws that decide. Floor 3.

`torch.multinomial` for one sample chooses the largest p / e, with e drawn from an exponential distribution, [B, V] for each token
that generate() adds to the rows. The host draws these ahead, from generate()'s own generator and in its order; a step divides by
them wherever it may sample. Afterwards the generator is put back to where plain generate() leaves it.

Shapes: B rows, V logits, R places in the ring. A row's token number c, the first generated one being 0, is chosen by draws c.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from lade.noise import READABLE, generator_state, set_generator_state
from lade.rules import MAX_LEAD, LockstepRules, RowRules, Rules, ends_apart

if TYPE_CHECKING:
    from lade.models.device_step import StepState

# They look at nothing but the scores, each row by itself, and the host reads none of these. Eta and top-h sampling do read some.
WARPERS = {
    getattr(processors, name)
    for name in (
        "EpsilonLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(processors, name)
}
CONSTANTS = (bool, int, float, str, type(None))  # what a warper's parameters may be, to be part of what is compiled
MAX_UNSEEN = (
    2  # steps that may have been started since the last one whose result the host has read, the next one included
)
REFUSED = "a token's probabilities are no numbers: the ordinary loop says what generate() would"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a step samples. Two are equal where warpers of the same types have the same parameters."""

    key: Hashable
    warpers: tuple[Callable[..., Tensor], ...] = field(compare=False)


def sampling_of(rules: Rules) -> Sampling | None:
    """How a step on the device chooses what these rules choose; None where they need the host."""
    is_alone = type(rules) is LockstepRules and len(rules.texts.ids) == 1
    is_served = (
        (is_alone or type(rules) is RowRules)
        and rules.do_sample
        and rules.streamer is None
        and rules.announce is None
        and not rules.recorder.is_recording
        and ends_apart(rules.criteria)
        and type(rules.processor) is LogitsProcessorList
        and all(map(is_warper, rules.processor))
        and rules.texts.ids.device.type in READABLE
    )
    if not is_served:
        return None
    # Copies: what is compiled or captured may not change when the caller's own objects do.
    warpers = tuple(map(copy, rules.processor))
    return Sampling(tuple((type(warper), *sorted(vars(warper).items())) for warper in warpers), warpers)


def is_warper(processor: Any) -> bool:
    """Whether it is one of the known ones, and not a subclass, with nothing but plain parameters."""
    return type(processor) in WARPERS and all(type(value) in CONSTANTS for value in vars(processor).values())


def largest_lead(batch_size: int) -> int:
    """A row that is so many tokens ahead of the slowest one waits, as in `RowRules`."""
    return 1 if batch_size == 1 else MAX_LEAD


def ring_size(batch_size: int, ngram_size: int) -> int:
    """R: what steps may look at from the slowest row's next token on, at the last time that the host has seen it.

    A row that does not wait is less than the lead ahead of the slowest and gets up to N tokens more, in each step that is not seen yet.
    """
    return largest_lead(batch_size) + MAX_UNSEEN * ngram_size


def sample(state: StepState, sampling: Sampling, answers: Tensor) -> tuple[Tensor, Tensor]:
    """What generate() samples behind the root and behind each candidate token, if its turn comes there.

    answers: logits [B, 1 + n, V]. Returns ids [B, 1 + n], and which rows go on in this step [B]: not those that have ended or wait.
    No row does from the first probability on that `torch.multinomial` refuses.
    """
    assert state.draws is not None
    is_active = ~state.is_finished & ~is_far_ahead(state)
    probabilities = probabilities_of(sampling, answers)
    depths = state.offsets[:, : answers.shape[1]]
    numbers = (state.lengths - state.prompt_length)[:, None] + depths  # [B, 1 + n] of the token behind each
    draws = state.draws[numbers % len(state.draws), state.rows]  # [B, 1 + n, V]
    chosen = (probabilities / draws).argmax(dim=-1)
    is_valid = (probabilities >= 0).all(dim=-1).all(dim=-1)  # [B]; softmax gives nothing else that is refused than nan
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
    slowest = state.lengths.masked_fill(state.is_finished, torch.iinfo(torch.long).max // 2).min()
    return state.lengths >= slowest + largest_lead(len(state.lengths))


class DrawRing:
    """Fills a ring of draws for one call, a little ahead of its text.

    The draws are taken from the generator itself, not from a copy: of threads that share it, no two get the same.
    """

    def __init__(self, draws: Tensor, num_drawn: int) -> None:
        """draws: [R, B, V]. num_drawn: tokens per row that generate() has drawn for so far."""
        self.draws, self._end = draws, num_drawn
        self._states: dict[int, Tensor] = {}  # of the generator, before it drew for a token
        self._left = generator_state(draws.device)  # after the last draws
        self._is_sole = True  # nobody else has drawn from the generator meanwhile

    def fill(self, first: int) -> None:
        """Draw as far ahead as there is room. first: number of the earliest token still to be chosen."""
        size = len(self.draws)
        while self._end < first + size:
            self._states[self._end] = self._read()
            self._states.pop(self._end - size - 1, None)
            self.draws[self._end % size].exponential_(1)
            self._left = generator_state(self.draws.device)
            self._end += 1

    def of(self, number: int) -> Tensor:
        """One of the last R that were drawn. Returns [B, V], a copy."""
        return self.draws[number % len(self.draws)].clone()

    def put_back(self, num_drawn: int) -> None:
        """Leave the generator as if it had drawn for so many tokens only, unless somebody else has drawn from it."""
        self._read()
        if self._is_sole and num_drawn < self._end:
            set_generator_state(self.draws.device, self._states[num_drawn])

    def _read(self) -> Tensor:
        state = generator_state(self.draws.device)
        self._is_sole = self._is_sole and torch.equal(state, self._left)
        return state


def hand_back(ring: DrawRing, rules: Rules) -> None:
    """Leave the generator, and draws that some rows have used and others will, to the ordinary loop."""
    start, lengths = rules.texts.prompt_length, rules.texts.lengths
    longest = max(lengths)
    if isinstance(rules, RowRules):
        unfinished = [length for length, done in zip(lengths, rules.is_finished, strict=True) if not done]
        rules.take_over(
            {length: ring.of(length - start) for length in range(min(unfinished, default=longest), longest)}
        )
    ring.put_back(longest - start)
