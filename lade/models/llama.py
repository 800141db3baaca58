"""Llama, and the families whose layers compute what Llama's do: Mistral, Qwen 2 and 3, which add biases, norms
or windows.

They follow transformers' conventions in full, so the base adapter serves them: one additive mask of window, candidates
and cached prefix for each kind of layer, positions passed to the forward, keys and values in slots.
"""

from __future__ import annotations

from lade.models.base import ModelAdapter


class LlamaAdapter(ModelAdapter):
    """Llama 1 to 3, Mistral, Qwen 2 and 3."""
