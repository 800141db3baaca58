"""The exponential draws of sampling, read ahead on a copy of the random generator.

For one sample `torch.multinomial` returns argmax(p / e), with one exponential draw e per token (the Gumbel-max trick).
The draws of the next tokens follow from the generator's state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

READABLE = ("cpu", "cuda")  # devices whose generators can be copied
# Threads share a device's generator, whose state `ExponentialDraws` reads and sets later. Without this lock,
# two calls could get the same draws.
drawing = threading.RLock()


Numbers = TypeVar("Numbers", Tensor, npt.NDArray[Any])


def gumbel_scores(probabilities: Numbers, draws: Numbers) -> Numbers:
    """Scores p / e of tokens; sampling takes the token with the largest one (the Gumbel-max trick)."""
    return probabilities / draws


class ExponentialDraws:
    """The exponential draws of a call, [B, V] per generated token.

    `ahead` reads those of tokens to come. `draw` consumes them in the order of the text and advances the device's
    generator.
    """

    def __init__(self, device: torch.device, batch_size: int) -> None:
        """Must be created before the call's first draw."""
        self._batch_size, self._device = batch_size, device
        self._draws: deque[Tensor] = deque()  # [B, V] each
        self.first = 0  # token number of the first draws that are not forgotten
        self._num_drawn = 0  # tokens for which the device's generator has advanced
        self._copy = torch.Generator(device) if device.type in READABLE else None
        self._states: deque[Tensor] = deque()  # of the generator: before the first of `_draws`, and after each
        if self._copy is not None:
            self._states.append(generator_state(self._device))
            self._copy.set_state(self._states[0])

    @property
    def reads_ahead(self) -> bool:
        """Whether `ahead` may be asked: the generator can be copied, and no other code is known to draw from it."""
        return self._copy is not None

    def ahead(self, index: int, count: int, vocab_size: int) -> list[Tensor]:
        """The draws that `draw` will return for `count` tokens from number `index` (from 0) on, if no other code draws.

        vocab_size: width of the logits. Returns [B, V] each.
        """
        return [self._of(i, vocab_size) for i in range(index, index + count)]

    def draw(self, index: int, vocab_size: int) -> Tensor:
        """The draws for generated token number `index`, which advance the generator as in plain generate().

        Tokens must be asked for in order. Draws that were not forgotten can be asked for again. vocab_size: width of
        the scores; if processors have changed it, what was read ahead is drawn again. Returns [B, V].
        """
        place = index - self.first
        if self._num_drawn <= index < self.first + len(self._draws) and self._draws[place].shape[1] != vocab_size:
            self._drop(place)
        draws = self._of(index, vocab_size)
        if index >= self._num_drawn and self._copy is not None:
            with drawing:
                now = generator_state(self._device)
                if same_state(now, self._states[place]):
                    set_generator_state(self._device, self._states[place + 1])
                else:
                    self._stop_reading_ahead(place)
                    draws = self._of(index, vocab_size)
        self._num_drawn = max(self._num_drawn, index + 1)
        return draws

    def forget(self, index: int) -> None:
        """Drop the draws of tokens before `index`."""
        while self.first < index and self._draws:
            self._draws.popleft()
            self.first += 1
            if self._states:
                self._states.popleft()
        if self._copy is None:  # do not draw again for tokens that were drawn elsewhere
            self.first = max(self.first, index)

    def _of(self, index: int, vocab_size: int) -> Tensor:
        while index >= self.first + len(self._draws):
            # float32, in which generate() samples, whatever the default dtype is.
            draws = torch.empty(self._batch_size, vocab_size, dtype=torch.float32, device=self._device)
            if self._copy is None:
                with drawing:
                    draws.exponential_(1)
            else:
                draws.exponential_(1, generator=self._copy)
                self._states.append(self._copy.get_state())
            self._draws.append(draws)
        return self._draws[index - self.first]

    def _drop(self, place: int) -> None:
        """Forget the draws from this place on, and read ahead anew from the generator's state before them."""
        while len(self._draws) > place:
            self._draws.pop()
            self._states.pop()
        assert self._copy is not None  # otherwise nothing is read ahead
        self._copy.set_state(self._states[-1])

    def _stop_reading_ahead(self, place: int) -> None:
        """Other code draws from the generator: from this place on, draw each token's numbers only when it is sampled.

        Setting the generator's state now could undo a draw made by another thread.
        """
        while len(self._draws) > place:
            self._draws.pop()
        self._copy = None
        self._states.clear()


def same_state(one: Tensor, other: Tensor) -> bool:
    """Whether two generator states are equal. They are a few kB on the host, where numpy compares faster than torch."""
    return bool(one.numpy().tobytes() == other.numpy().tobytes())


def generator_state(device: torch.device) -> Tensor:
    """State of the default generator. device: its type is one of READABLE."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def keeping_generators(model: nn.Module) -> Iterator[None]:
    """Restore torch's random generators afterwards, whatever foreign code draws from them inside."""
    devices = {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}
    kind = min((device.type for device in devices), default="cuda")
    with drawing, torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind):
        yield
