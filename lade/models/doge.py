"""Doge: not supported, since each query selects its keys dynamically."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class DogeAdapter(ModelAdapter):
    """Doge: each query keeps its highest-scoring keys, so guesses would displace keys of the text."""

    def unsupported_layers(self) -> str | None:
        return "each query of the model selects its keys, guesses among them, in a mask of its own"
