"""XGLM: a table of sinusoidal positions that grows on demand."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class XGLMAdapter(ModelAdapter):
    """XGLM. A forward beyond the position table replaces it by a larger one, which must not be an inference tensor."""

    leaves_no_tensor = False
