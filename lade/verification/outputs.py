"""The outputs of `return_dict_in_generate`, restricted to the committed tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from lade.common.compat import CACHE_NAME, GenerateDecoderOnlyOutput

RECORDED = ("scores", "logits")


class OutputRecorder:
    """Collects scores and logits of committed tokens, in plain generate()'s shapes."""

    def __init__(self, generation_config: GenerationConfig) -> None:
        self._returns_dict = bool(generation_config.return_dict_in_generate)
        wanted = [name for name in RECORDED if self._returns_dict and getattr(generation_config, f"output_{name}")]
        self.collected: dict[str, tuple[Tensor, ...]] = dict.fromkeys(wanted, ())  # one entry per token

    def record(self, **found: Tensor) -> None:
        """Record one more token of every row: its scores and logits, [B, V] each."""
        for name in self.collected:
            self.collected[name] += (found[name],)

    def result(self, sequences: Any, cache: Any) -> Any:
        """The return value of generate(): the ids, or the dictionary around them."""
        if not self._returns_dict:
            return sequences
        fields: dict[str, Any] = {CACHE_NAME: cache, **self.collected}
        return GenerateDecoderOnlyOutput(sequences=sequences, **fields)
