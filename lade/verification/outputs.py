"""The outputs of `return_dict_in_generate`, restricted to the committed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lade.common.compat import CACHE_NAME, GenerateDecoderOnlyOutput

RECORDED = ("scores", "logits", "attentions", "hidden_states")


class OutputRecorder:
    """Collects scores, logits, attentions and hidden states of committed tokens, in plain generate()'s shapes."""

    def __init__(self, generation_config: GenerationConfig) -> None:
        self._returns_dict = bool(generation_config.return_dict_in_generate)
        wanted = [name for name in RECORDED if self._returns_dict and getattr(generation_config, f"output_{name}")]
        self.collected: dict[str, tuple[Any, ...]] = dict.fromkeys(wanted, ())  # one entry per token
        self._outputs: Any = None
        self._prefix_length: int | None = None
        self._root = 0

    @property
    def model_arguments(self) -> dict[str, bool]:
        """Keyword arguments for the model's forward."""
        return {f"output_{name}": True for name in ("attentions", "hidden_states") if name in self.collected}

    def begin_step(self, outputs: Any, prefix_length: int | None, root: int = 0) -> None:
        """Set the forward that `record` reads.

        prefix_length: committed slots before the root; None: prefill. root: the root's row in the block.
        """
        self._outputs, self._prefix_length, self._root = outputs, prefix_length, root

    def record(self, nodes: list[int], paths: list[list[int]], scores: Tensor, logits: Tensor) -> None:
        """Record one more token of every row.

        nodes: the node (-1 = root) after which each row's token was chosen. paths: nodes accepted so far.
        """
        found: dict[str, Any] = {"scores": scores, "logits": logits}
        for name, choose in (("attentions", self._cells), ("hidden_states", self._rows)):
            if name in self.collected:
                layers = getattr(self._outputs, name)
                found[name] = layers if self._prefix_length is None else choose(layers, nodes, paths)
        for name in self.collected:
            self.collected[name] += (found[name],)

    def result(self, sequences: Any, cache: Any) -> Any:
        """The return value of generate(): the ids, or the dictionary around them."""
        if not self._returns_dict:
            return sequences
        fields: dict[str, Any] = {CACHE_NAME: cache, **self.collected}
        return GenerateDecoderOnlyOutput(sequences=sequences, **fields)

    def _rows(self, layers: tuple[Tensor, ...], nodes: list[int], _: list[list[int]]) -> tuple[Tensor, ...]:
        """layers: [..., B, q, D] each. Returns [..., B, 1, D] each: the state of each row's chosen block token."""
        rows = [(row, self._root + 1 + node) for row, node in enumerate(nodes)]
        return tuple(
            torch.stack([states[..., row, place, :] for row, place in rows], dim=-2)[..., None, :] for states in layers
        )

    def _cells(self, layers: tuple[Tensor | None, ...], nodes: list[int], paths: list[list[int]]) -> tuple[Any, ...]:
        """layers: [B, H, q, slots] each. Returns [B, H, 1, length] each: weights on the text's own keys, in order."""
        prefix = list(range(self._prefix_length or 0))
        cells = [
            (row, slice(None), self._root + 1 + node, [*prefix, len(prefix), *[len(prefix) + 1 + n for n in path]])
            for row, (node, path) in enumerate(zip(nodes, paths, strict=True))
        ]
        return tuple(
            None if weights is None else torch.stack([weights[cell] for cell in cells])[:, :, None]
            for weights in layers
        )
