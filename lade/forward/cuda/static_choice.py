"""Sampling after a captured forward, by a second graph that reads the first one's logits.

The parameters of sampling are constants of this small graph alone, so that new ones do not capture the forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lade.common.trial import Trial
from lade.forward.cuda.buffer_pool import padded_capacity
from lade.forward.cuda.static_inputs import NUM_CHECKS, SAMPLED, Outputs
from lade.verification.race import Race, winners

LEAST_PLACES = 16  # tokens that a graph has room for the draws of; the next power of two where a step needs more


class StaticChoice:
    """The tokens sampled after all rows of one captured forward, with one kind of warpers.

    They replace what the packed summary says in the column for them.
    """

    def __init__(self, outputs: Outputs, draw_rows: Tensor, race: Race) -> None:
        """outputs: of the captured forward. draw_rows: [B, R] where `Race.index` arrives. race: the first one."""
        logits, packed = outputs
        num_places = padded_capacity(max(LEAST_PLACES, len(race.draws)))
        shape = (num_places * len(logits), logits.shape[-1])
        self.draws = torch.ones(shape, dtype=torch.float32, device=logits.device)
        self._sampled, self._parts = packed[..., SAMPLED], (race.sampling, logits, self.draws, draw_rows)
        self.graph: Callable[[], Any] | None = None
        self.trial = Trial(NUM_CHECKS)

    @property
    def num_bytes(self) -> int:
        """Bytes of the draws and of the memory reserved by capturing the graph."""
        return self.draws.nbytes + getattr(self.graph, "num_bytes", 0)

    def has_room(self, race: Race) -> bool:
        return sum(map(len, race.draws)) <= len(self.draws)

    def fill(self, race: Race) -> None:
        torch.cat(race.draws, out=self.draws[: sum(map(len, race.draws))])

    def call(self) -> None:
        """The captured function: sample all rows."""
        self._sampled.copy_(winners(*self._parts))

    def replay(self) -> None:
        assert self.graph is not None
        self.graph()

    def difference(self) -> str | None:
        """How a replay differs from the ordinary computation, as a sentence; None if it does not."""
        self.replay()
        is_same = torch.equal(self._sampled, winners(*self._parts).to(torch.int32))
        return None if is_same else "the captured choice is not that of the captured logits"
