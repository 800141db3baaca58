"""The random numbers that sampling is about to draw, read ahead on a copy of the generator.

`torch.multinomial` for one sample is a race: token v arrives at time e_v / p_v, e_v drawn from an exponential distribution, and
the first to arrive is chosen. The e of the next tokens follow from the generator's state. Who knows them and roughly knows the
probabilities, knows roughly what will be chosen; what is chosen stays as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Draws = npt.NDArray[Any]  # [V]

# How much the order of arrival tells: everything where probabilities are exact, less where they come from another context.
SHARPNESS = 0.75
TINY = 1e-30  # in place of 0 where something is divided by it
READABLE = ("cpu", "cuda")  # devices whose generators can be copied
# Calls in several threads share a device's generator, and no two may get the same draws: whoever draws holds this, since
# `ExponentialDraws` and `DrawRing` read a generator's state and set it later.
drawing = threading.RLock()


class ExponentialDraws:
    """The draws for each token that a call samples: read ahead for guesses, and drawn for good in the order of the text."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        """To be made before the call's first draw."""
        self._batch_size, self._device = batch_size, device
        self._draws: deque[Tensor] = deque()  # [B, V] each
        self._on_host: dict[int, npt.NDArray[Any]] = {}  # [B, V] by token, for guesses: many of a step ask for the same
        self._first = 0  # token that the first of them is for
        self._num_drawn = 0  # tokens that the generator itself has drawn for
        self.seconds = 0.0  # that drawing has taken so far
        self._copy = torch.Generator(device) if device.type in READABLE else None
        self._states: deque[Tensor] = deque()  # of the generator: before the first draws, and after each
        if self._copy is not None:
            self._states.append(generator_state(self._device))
            self._copy.set_state(self._states[0])

    def peek(self, row: int, index: int, vocab_size: int) -> Draws | None:
        """What one row's token number `index`, the first one generated being 0, will be drawn with, if nothing else draws.

        vocab_size: width of the logits. Returns [V], None where the device's generator cannot be copied, or others draw from it.
        """
        if self._copy is None:
            return None
        if index not in self._on_host:
            self._on_host[index] = self._of(index, vocab_size).cpu().numpy()
        draws: Draws = self._on_host[index][row]
        return draws

    def draw(self, index: int, vocab_size: int) -> Tensor:
        """The draws for token number `index`; the generator moves on as plain generate()'s does. Returns [B, V].

        To be asked for one token after the other. What was drawn, and not forgotten, can be asked for again.
        """
        draws = self._of(index, vocab_size)
        if index >= self._num_drawn and self._copy is not None:
            place = index - self._first
            with drawing:
                now = generator_state(self._device)
                if same_state(now, self._states[place]):
                    set_generator_state(self._device, self._states[place + 1])
                else:
                    self._stop_reading_ahead(place)
                    draws = self._of(index, vocab_size)
        self._num_drawn = max(self._num_drawn, index + 1)
        return draws

    def take_over(self, index: int, draws: list[Tensor]) -> None:
        """Go on with what the generator has drawn elsewhere for some tokens, the last it has drawn for. index: the first of them."""
        self._first, self._draws = index, deque(draws)
        self._on_host.clear()
        self._num_drawn = index + len(draws)
        if self._copy is not None:
            state = generator_state(self._device)
            self._states = deque([state] * (len(draws) + 1))
            self._copy.set_state(state)

    def forget(self, index: int) -> None:
        """Tokens before this one will not be asked for again."""
        while self._first < index and self._draws:
            self._draws.popleft()
            self._on_host.pop(self._first, None)
            self._first += 1
            if self._states:
                self._states.popleft()
        if self._copy is None:  # nothing is to be drawn for tokens that something else has drawn for
            self._first = max(self._first, index)

    def _of(self, index: int, vocab_size: int) -> Tensor:
        began = perf_counter()
        while index >= self._first + len(self._draws):
            # In the dtype that generate() samples in, whatever the default is.
            draws = torch.empty(self._batch_size, vocab_size, dtype=torch.float32, device=self._device)
            if self._copy is None:
                with drawing:
                    draws.exponential_(1)
            else:
                draws.exponential_(1, generator=self._copy)
                self._states.append(self._copy.get_state())
            self._draws.append(draws)
        self.seconds += perf_counter() - began
        return self._draws[index - self._first]

    def _stop_reading_ahead(self, place: int) -> None:
        """Something else draws from the generator: from this place on, draws are its own, made when a token's turn has come.

        To set its state again could take back what a thread that knows nothing of lade has drawn in between.
        """
        while len(self._draws) > place:
            self._draws.pop()
        self._copy = None
        self._states.clear()
        self._on_host.clear()


def same_state(one: Tensor, other: Tensor) -> bool:
    """Whether two generators' states are equal; kilobytes on the host, which numpy compares in a fraction of torch's time."""
    return bool(one.numpy().tobytes() == other.numpy().tobytes())


def generator_state(device: torch.device) -> Tensor:
    """Of the generator that generate() draws from. device: its type is one of READABLE."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def win_chances(
    ids: npt.NDArray[Any] | list[int], chances: npt.NDArray[Any] | list[float], draws: Draws
) -> npt.NDArray[Any]:
    """How likely each of some tokens is to be the one chosen, given the draws.

    ids, chances: [..., K] tokens, and about how probable the model finds them (0 for never); other tokens share what is left to 1.
    draws: [V]. Returns [..., K].
    """
    chances = np.asarray(chances)
    with np.errstate(all="ignore"):  # whatever numpy has been told to raise
        arrivals = chances / draws.take(ids)  # the larger, the sooner
        weights = (arrivals / np.maximum(arrivals.max(axis=-1, keepdims=True), TINY)) ** SHARPNESS
        rest = np.maximum(0.0, 1.0 - chances.sum(axis=-1, keepdims=True))
        others = np.exp(-rest / np.maximum(arrivals, TINY))  # that none of them comes first
        found: npt.NDArray[Any] = weights / np.maximum(weights.sum(axis=-1, keepdims=True), TINY) * others
    return found
