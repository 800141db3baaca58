"""A cache for models that take chains of guesses alone: those with a recurrent state, which cannot drop a token, and
those whose queries select keys. States are put back instead.

Before each block the states are copied. If not all of its guesses are accepted, the copies are put back, and the
committed tokens of the block wait: they run again in front of the next block, in the same slots. Nothing else is
computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lade.block.kv_cache import LookaheadCache, SlotLayer
from lade.block.mask import Block
from lade.common.compat import (
    BOTH_LAYER,
    INDEXED_LAYER,
    NO_LAYER,
    STATE_LAYER,
    WINDOWED_BOTH_LAYER,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

STATE_AND_SLOT_LAYERS = (BOTH_LAYER, WINDOWED_BOTH_LAYER)
SLOT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, INDEXED_LAYER, *STATE_AND_SLOT_LAYERS)
KEPT_LAYERS = (*SLOT_LAYERS, STATE_LAYER, NO_LAYER)
INDEX = ("indexer_keys", "indexer_position_ids")  # of an indexed layer, [B, T, D] and [3, B, T]
OWN_TENSORS = ("slots", "_waiting", "_tokens")  # of RecurrentCache


class StateAndSlotLayer(*filter(None, [STATE_LAYER]), SlotLayer):  # type: ignore[misc]
    """A layer with both a state and keys and values."""

    is_compileable = False

    def __init__(self, cache: LookaheadCache, **settings: Any) -> None:
        SlotLayer.__init__(self, cache)
        STATE_LAYER.__init__(self, **settings)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate slots if keys and values are given, else a state."""
        (SlotLayer if args else STATE_LAYER).lazy_initialization(self, *args, **kwargs)


class IndexedSlotLayer(SlotLayer, *filter(None, [INDEXED_LAYER])):  # type: ignore[misc]
    """A layer with keys by which each query selects those that it attends to. They grow as a state does."""

    def get_seq_length(self) -> int:
        """Tokens of the layer's index, which some models ask for between its update and the end of their forward."""
        return super().get_seq_length() if self.indexer_keys is None else self.indexer_keys.shape[1]


def unknown_layer(layers: Iterable[Any]) -> str | None:
    """The name of a layer's class whose tokens or states `RecurrentCache` cannot keep; None if it keeps all."""
    for layer in layers:
        is_known = type(layer) in KEPT_LAYERS
        # Before there were several states in a layer, they were no dictionaries.
        if not is_known or not isinstance(getattr(layer, "conv_states", {}), dict):
            return type(layer).__name__
    return None


def index_of(layer: Any) -> dict[str, Tensor]:
    """The keys by which queries select keys, and their positions, by name. They grow by concatenation."""
    return {name: value for name in INDEX if (value := vars(layer).get(name)) is not None}


def added_to(cache: Cache) -> dict[str, Tensor]:
    """The tensors that a model keeps on the cache itself, by name: Qwen4's positions, in transformers 5.18."""
    found = vars(cache).items()
    return {name: value for name, value in found if isinstance(value, Tensor) and name not in OWN_TENSORS}


def copy_states(source: Cache, target: Cache) -> None:
    """Copy the states of each layer into its own memory in `target`."""
    layers: Iterable[tuple[Any, Any]] = zip(source.layers, target.layers, strict=True)
    for mine, theirs in layers:
        for number in (number for number, has_state in getattr(mine, "has_previous_state", {}).items() if has_state):
            if (state := mine.conv_states[number]) is not None:
                theirs.update_conv_state(state, number)
            if (state := mine.recurrent_states[number]) is not None:
                theirs.update_recurrent_state(state, number)
        if getattr(mine, INDEX[0], None) is not None:
            theirs.lazy_initialization_indexer(mine.indexer_keys)
            vars(theirs).update(index_of(mine))
    vars(target).update(added_to(source))


class RecurrentCache(LookaheadCache):
    """Slots for the layers that attend, states for those that keep one. All rows have the same length.

    `lengths` counts committed tokens as everywhere; the last `num_waiting` of them are not in the states.
    """

    def __init__(self, layers: list[Any], capacity: int, uniform: bool = True) -> None:
        """layers: of the cache that generate() would use."""
        super().__init__(sum(type(layer) in SLOT_LAYERS for layer in layers), capacity, uniform)
        places = iter(range(len(self.slot_layers)))
        self.layers: list[Any] = []
        for layer in layers:
            states = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
            if type(layer) not in SLOT_LAYERS:
                self.layers.append(type(layer)(**states))
                continue
            place = next(places)
            if type(layer) in STATE_AND_SLOT_LAYERS:
                self.slot_layers[place] = StateAndSlotLayer(self, **states)
            elif type(layer) is INDEXED_LAYER:
                self.slot_layers[place] = IndexedSlotLayer(self)
            self.layers.append(self.slot_layers[place])
        self._waiting: Tensor | None = None  # [B, w] ids
        self._tokens: Tensor  # [B, w + q] of the current block
        self._copies: list[tuple[dict[Any, Any], Any, Tensor]] = []

    @property
    def num_waiting(self) -> int:
        return 0 if self._waiting is None else self._waiting.shape[1]

    def adopt(self, cache: Any) -> None:
        if self.slot_layers:
            super().adopt(cache)
        copy_states(cache, self)

    def hand_over(self, cache: Cache) -> None:
        if self.slot_layers:
            super().hand_over(cache)
        copy_states(self, cache)

    def with_waiting(self, block: Block) -> Block:
        """The block that runs: the waiting tokens in front."""
        count, waiting = self.num_waiting, self._waiting
        if waiting is not None:
            before = torch.arange(-count, 0, device=block.positions.device)
            block = replace(
                block,
                tokens=torch.cat([waiting.to(block.tokens.device), block.tokens], dim=1),
                offsets=torch.cat([before.expand(len(block.offsets), -1), block.offsets], dim=1),
                positions=torch.cat([block.positions[..., :1] + before, block.positions], dim=-1),
                logit_rows=block.logit_rows + count,
                lengths=[length - count for length in block.lengths],
            )
        self._tokens = block.tokens
        return block

    def unwait(self) -> list[int]:
        assert self._waiting is not None
        roots: list[int] = self._waiting[:, -1].tolist()
        self._waiting = self._waiting[:, :-1] if self.num_waiting > 1 else None
        self.lengths = [length - 1 for length in self.lengths]
        return roots

    def begin_block(self, num_tokens: int, device: torch.device) -> None:
        super().begin_block(num_tokens, device)
        self._copies = [(states, name, state.clone()) for states, name, state in self._states()]
        for layer in self.layers:
            self._copies += [(vars(layer), name, keys) for name, keys in index_of(layer).items()]

    def commit(self, accepted: list[list[int] | None]) -> None:
        super().commit(accepted)
        path = accepted[0]  # the same for all rows
        num_done = self.num_waiting + (0 if path is None else 1 + len(path))
        self._waiting = None
        if num_done < self._tokens.shape[1]:
            for states, name, copy in self._copies:
                states[name] = copy
            self._waiting = self._tokens[:, :num_done] if num_done else None
        self._copies = []

    def _states(self) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
        """All states that forwards write to, each with the dictionary and the key where it lies."""
        for layer in self.layers:
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, {})
                yield from ((states, number, state) for number, state in states.items() if state is not None)
        yield from ((vars(self), name, value) for name, value in added_to(self).items())
