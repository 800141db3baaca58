"""Llama: rotary positions per token, one key/value shape for all layers, logits for chosen rows. Nothing differs."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class LlamaAdapter(ModelAdapter):
    """Llama 1 to 3 and everything else whose `model_type` is "llama"."""
