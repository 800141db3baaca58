"""Sampling after all nodes of a tree at once, while the host would wait for a device at each token.

The draws are those that generate() would use at each depth. Only warpers that give the same bits for many rows as for
one are served. `RacedSelection` takes part in an ordinary call; captured forwards and steps on the device use the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.common.compat import logits_processors
from lade.common.transfer import HOST, on_host, to_device
from lade.verification.draws import gumbel_scores
from lade.verification.logits import BlockLogits
from lade.verification.selection import Accepted, PerRowSelection

# A cumulative sum of a single row is another kernel on CUDA, so top-p is not among them.
BATCHED_WARPERS = logits_processors(("MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"))
# CUDA's softmax reads 16 bytes at a time, from each row's own first multiple of 16: the sum's order is that of a single
# row where all rows begin at such a multiple.
ALIGNED = 4  # float32 numbers
CONSTANTS = (bool, int, float, str, type(None))  # parameter types that can be constants in a compiled or captured step


@dataclass(frozen=True, slots=True)
class Sampling:
    """Warpers of scores [R, V]. Equal if they have the same types and parameters."""

    key: Hashable
    warpers: tuple[Callable[..., Tensor], ...] = field(compare=False)

    @classmethod
    def of(cls, processors: Iterable[Any], kinds: frozenset[type]) -> Sampling | None:
        """Make one of processors that are exactly of these kinds and have only constant parameters; None of others."""
        # Copies, since compiled or captured steps must not change with the caller's objects.
        warpers = tuple(map(copy, processors))
        if not kinds.issuperset(map(type, warpers)):
            return None
        key = tuple((type(warper), *sorted(vars(warper).items())) for warper in warpers)
        is_constant = all(type(value) in CONSTANTS for warper in warpers for value in vars(warper).values())
        return cls(key, warpers) if is_constant else None

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities that generate() computes, in float32. logits: [B, R, V]. Returns the same shape."""
        scores = logits.to(dtype=torch.float32, copy=True).flatten(0, 1)
        for warper in self.warpers:
            scores = warper(None, scores)  # no ids needed: none of the warpers uses them
        return torch.nn.functional.softmax(scores, dim=-1).view(logits.shape)


@dataclass(frozen=True, slots=True)
class Race:
    """Inputs that decide the tokens after all nodes of a step: argmax(p / e), one exponential draw e per token.

    draws:  of consecutive tokens, [B, V] each.
    places: [B, 1 + n] which of them serve the tokens after the root and each node.
    """

    sampling: Sampling
    draws: list[Tensor]
    places: list[list[int]]

    def index(self, num_rows: int) -> Tensor:
        """Rows of the concatenated draws, [B, num_rows] on the host. num_rows: at least 1 + n."""
        batch_size = len(self.places)
        return torch.tensor(
            [
                [place * batch_size + row for place in places] + [row] * (num_rows - len(places))
                for row, places in enumerate(self.places)
            ],
            device=HOST,
        )

    def run(self, logits: Tensor) -> list[list[int]]:
        """As `winners`. logits: [B, R, V]."""
        index = to_device(self.index(logits.shape[1]), logits.device)
        tokens: list[list[int]] = winners(self.sampling, logits, torch.cat(self.draws), index).tolist()
        return tokens


def winners(sampling: Sampling, logits: Tensor, draws: Tensor, index: Tensor) -> Tensor:
    """The tokens that generate() would sample, [B, R]; -1 where a probability is NaN.

    logits: [B, R, V]. draws: [D, V]. index: [B, R] rows of the draws.
    """
    probabilities = sampling.probabilities(logits)
    scores = gumbel_scores(probabilities, draws.index_select(0, index.flatten()).view(logits.shape))
    is_nan = probabilities[..., 0].isnan()  # softmax makes the whole row NaN
    return scores.argmax(dim=-1).masked_fill_(is_nan, -1)


class RacedSelection(PerRowSelection):
    """`PerRowSelection` in one process, which samples after all nodes of a step at once on a device.

    One by one where that would not give generate()'s tokens.
    """

    _race: Race | None = None  # of the step under way

    def begin_race(self, tree: TokenTree, vocab_size: int) -> Race | None:
        sequences, rests, first = self.sequences, self._rests, self._shortest
        is_served = not (sequences.device.type == "cuda" and vocab_size % ALIGNED)
        if self.draws is None or not self.draws.reads_ahead or self._batched is None or all(rests) or not is_served:
            return None
        # The number of each row's next token, counted from the first one of all rows.
        leads = [0 if rest else length - first for length, rest in zip(sequences.lengths, rests, strict=True)]
        depths = tree.padded_depths(tree.num_nodes)
        places = [[lead + depth for depth in (0, *row)] for lead, row in zip(leads, depths, strict=True)]
        draws = self.draws.ahead(first - sequences.prompt_length, 1 + max(map(max, places)), vocab_size)
        self._race = Race(self._batched, draws, places)
        return self._race

    @cached_property
    def _batched(self) -> Sampling | None:
        """The warpers, if they can be applied to many rows at once."""
        return Sampling.of(self.processor, BATCHED_WARPERS) if self._is_direct else None

    def verify(self, tree: TokenTree, block_logits: BlockLogits) -> Accepted:
        self._sampled = None if self.draws is None else self._sample_ahead(tree, block_logits)
        accepted = super().verify(tree, block_logits)
        self._race = None
        return accepted

    def _sample_ahead(self, tree: TokenTree, block_logits: BlockLogits) -> list[list[int]] | None:
        """The tokens after the root and all nodes, [B, 1 + n], as `winners`; None to choose one by one, as on a CPU."""
        logits, summary = block_logits.logits, block_logits.summary
        if summary is not None and self._race is not None:
            tokens: list[list[int]] = summary.sampled[:, : logits.shape[1]].tolist()
            return tokens
        if on_host(logits) or logits.device != self.sequences.device:
            return None
        race = self._race or self.begin_race(tree, logits.shape[-1])
        return None if race is None else race.run(logits)

    def _choose(self, rows: slice, nodes: list[int], paths: list[list[int]]) -> list[int]:
        if self._sampled is not None and self._race is not None and self.draws is not None:
            row, place = rows.start, nodes[0] + 1
            token, draws = self._sampled[row][place], self._race.draws[self._race.places[row][place]]
            if token >= 0 and self.draws.draw(len(self.sequences.generated[row]), draws.shape[1]) is draws:
                return [token]
        return super()._choose(rows, nodes, paths)
