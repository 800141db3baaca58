"""The random numbers that sampling is about to draw, read ahead on a copy of the generator. Floor 1.

`torch.multinomial` for one sample is a race: token v arrives at time e_v / p_v, e_v drawn from an exponential distribution, and
the first to arrive is chosen. The e of the next tokens follow from the generator's state. Who knows them and roughly knows the
probabilities, knows roughly what will be chosen; what is chosen, and the generator itself, stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp
from typing import Any

import numpy.typing as npt
import torch

Draws = npt.NDArray[Any]  # [V]

# How much the order of arrival tells: everything where probabilities are exact, less where they come from another context.
SHARPNESS = 0.75
READABLE = ("cpu", "cuda")  # devices whose generators can be copied


class NoiseAhead:
    """The draws for each token that a call generates, as long as nothing else draws from the generator."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        """To be made before the call's first draw."""
        self._generator = torch.Generator(device)
        self._generator.set_state(generator_state(device))
        self._batch_size, self._device = batch_size, device
        self._draws: deque[npt.NDArray[Any]] = deque()  # [B, V] each
        self._first = 0  # token that the first of them is for

    def of(self, row: int, index: int, vocab_size: int) -> Draws:
        """Draws for one row's token number `index`, the first one generated being 0. Returns [V].

        vocab_size: width of the logits.
        """
        while index >= self._first + len(self._draws):
            # In the dtype that generate() samples in, whatever the default is.
            draws = torch.empty(self._batch_size, vocab_size, dtype=torch.float32, device=self._device)
            self._draws.append(draws.exponential_(1, generator=self._generator).cpu().numpy())
        return self._draws[index - self._first][row]

    def forget(self, index: int) -> None:
        """Tokens before this one will not be asked for again."""
        while self._first < index and self._draws:
            self._draws.popleft()
            self._first += 1


def noise_ahead(device: torch.device, batch_size: int) -> NoiseAhead | None:
    """None where the device's generator cannot be copied."""
    return NoiseAhead(device, batch_size) if device.type in READABLE else None


def generator_state(device: torch.device) -> torch.Tensor:
    """Of the generator that generate() draws from. device: its type is one of READABLE."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def win_chances(ids: Sequence[int], chances: Sequence[float], draws: Draws) -> list[float]:
    """How likely each of some tokens is to be the one chosen, given the draws.

    chances: about how probable the model finds them; other tokens share what is left to 1. draws: [V].
    """
    times = [draw / chance for draw, chance in zip(draws[ids].tolist(), chances, strict=True)]
    first = min(times)
    weights = [(first / time) ** SHARPNESS for time in times]
    rest, total = max(0.0, 1.0 - sum(chances)), sum(weights)
    return [weight / total * exp(-rest * time) for weight, time in zip(weights, times, strict=True)]
