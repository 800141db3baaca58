"""XGLM: a table of sinusoidal positions that grows."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class XGLMAdapter(ModelAdapter):
    """XGLM: beyond its table of positions it makes a larger one, in whatever forward that happens."""

    leaves_no_tensor = False
