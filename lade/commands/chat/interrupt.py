"""Ctrl-C ends an answer, not the program."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class StopOnInterrupt(StoppingCriteria):
    """While entered, the first SIGINT ends generate() after the token under way; a second one raises KeyboardInterrupt.

    Must be entered in the main thread, the only one that may handle signals.
    """

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> StopOnInterrupt:
        self.is_set = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """input_ids: [B, length]. Returns [B] bool."""
        return torch.full((len(input_ids),), self.is_set, dtype=torch.bool, device=input_ids.device)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
