"""Llama: the base adapter's conventions apply unchanged."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class LlamaAdapter(ModelAdapter):
    """Llama 1 to 3 and all other models whose `model_type` is "llama"."""
