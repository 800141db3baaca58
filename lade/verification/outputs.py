"""The outputs of `return_dict_in_generate`, restricted to the committed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lade.compat import GenerateDecoderOnlyOutput


class OutputRecorder:
    """Collects scores, logits, attentions and hidden states of committed tokens, in plain generate()'s shapes."""

    def __init__(self, generation_config: GenerationConfig) -> None:
        is_on = bool(generation_config.return_dict_in_generate)
        self.returns_dict = is_on
        self.scores: Any = () if is_on and generation_config.output_scores else None
        self.logits: Any = () if is_on and generation_config.output_logits else None
        self.attentions: Any = () if is_on and generation_config.output_attentions else None
        self.hidden_states: Any = () if is_on and generation_config.output_hidden_states else None
        self._outputs: Any = None
        self._prefix_length: int | None = None

    @property
    def is_recording(self) -> bool:
        """Whether anything besides the tokens and the cache is requested."""
        return any(x is not None for x in (self.scores, self.logits, self.attentions, self.hidden_states))

    @property
    def model_arguments(self) -> dict[str, bool]:
        """Keyword arguments for the model's forward."""
        wanted = {"output_attentions": self.attentions, "output_hidden_states": self.hidden_states}
        return {name: True for name, collected in wanted.items() if collected is not None}

    def begin_step(self, outputs: Any, prefix_length: int | None) -> None:
        """Set the forward that `record` reads. prefix_length: committed slots before its block; None: prefill."""
        self._outputs, self._prefix_length = outputs, prefix_length

    def record(self, nodes: list[int], paths: list[list[int]], scores: Tensor, logits: Tensor) -> None:
        """Record one more token of every row.

        nodes: the node (-1 = root) after which each row's token was chosen. paths: nodes accepted so far.
        """
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.hidden_states is not None:
            states = self._outputs.hidden_states
            self.hidden_states += (states if self._prefix_length is None else self._rows(states, nodes),)
        if self.attentions is not None:
            weights = self._outputs.attentions
            self.attentions += (weights if self._prefix_length is None else self._cells(weights, nodes, paths),)

    def result(self, sequences: Any, cache: Any) -> Any:
        """What generate() returns: the ids, or the dictionary around them."""
        if not self.returns_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            past_key_values=cache,
        )

    @staticmethod
    def _rows(layers: tuple[Tensor, ...], nodes: list[int]) -> tuple[Tensor, ...]:
        """layers: [B, q, D] each. Returns [B, 1, D] each: the state of each row's chosen block token."""
        return tuple(
            torch.stack([states[row, node + 1] for row, node in enumerate(nodes)])[:, None] for states in layers
        )

    def _cells(self, layers: tuple[Tensor | None, ...], nodes: list[int], paths: list[list[int]]) -> tuple[Any, ...]:
        """layers: [B, H, q, slots] each. Returns [B, H, 1, length] each: weights on the text's own keys, in order."""
        prefix = list(range(self._prefix_length or 0))
        found: list[Tensor | None] = []
        for weights in layers:
            if weights is None:
                found.append(None)
                continue
            rows = [
                weights[row, :, node + 1, [*prefix, len(prefix), *[len(prefix) + 1 + n for n in path]]]
                for row, (node, path) in enumerate(zip(nodes, paths, strict=True))
            ]
            found.append(torch.stack(rows)[:, :, None])
        return tuple(found)
