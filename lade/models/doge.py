"""Doge: attention that selects its keys, which rules blocks out."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class DogeAdapter(ModelAdapter):
    """Doge: each query keeps the keys that it finds best, which guesses would crowd out."""

    def unsupported_layers(self) -> str | None:
        return "each query of the model selects its keys, guesses among them, in a mask of its own"
