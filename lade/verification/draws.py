"""The exponential draws of sampling, and the state of the generators that they come from.

For one sample `torch.multinomial` returns argmax(p / e), with one exponential draw e per token (the Gumbel-max trick).
Rows of a batch that are at different lengths must still use the draws that plain generate() makes for all of them at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

READABLE = ("cpu", "cuda")  # devices whose generators' states can be read
# Threads share a device's generator. Without this lock a call would draw what `keeping_generators` in another thread
# takes back afterwards, and the next call would draw the same.
drawing = threading.RLock()


class ExponentialDraws:
    """The exponential draws of a call, [B, V] per generated token, kept until all rows have used them."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self._batch_size, self._device = batch_size, device
        self._draws: dict[int, Tensor] = {}  # by token number

    def draw(self, index: int, vocab_size: int) -> Tensor:
        """The draws for generated token number `index`, made when they are first asked for.

        vocab_size: width of the scores. Returns [B, V].
        """
        if index not in self._draws:
            # float32, in which generate() samples, whatever the default dtype is.
            draws = torch.empty(self._batch_size, vocab_size, dtype=torch.float32, device=self._device)
            with drawing:
                self._draws[index] = draws.exponential_(1)
        return self._draws[index]

    def forget(self, index: int) -> None:
        """Drop the draws of tokens before `index`."""
        self._draws = {number: draws for number, draws in self._draws.items() if number >= index}


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
