"""Phi-3 and Phi-3.5-MoE: longrope frequencies switch at a length."""

from __future__ import annotations

from lade.common.compat import CALLERS_CACHE_MARK
from lade.common.request import Request
from lade.models.base import ModelAdapter


class Phi3Adapter(ModelAdapter):
    """Phi-3. Where the longrope frequencies switch, plain generate() recomputes the whole cache."""

    safe_hooks = ("prepare_inputs_for_generation",)

    def unsupported_request(self, request: Request) -> str | None:
        if not any(rope.get("rope_type") == "longrope" for rope in self._ropes):
            return super().unsupported_request(request)
        boundary, length = self.config.original_max_position_embeddings, request.prompt_length
        if length <= boundary < request.max_length - 1:
            return f"the text may grow over {boundary} tokens, where the model's frequencies and its whole cache change"
        # generate()'s own cache is empty, and nobody sees which one is filled instead.
        is_seen = request.cached_length > 0 or (
            getattr(request.cache, CALLERS_CACHE_MARK, False) and request.cache.layers
        )
        if length > boundary >= request.cached_length and is_seen:
            return f"the cache ends below {boundary} tokens and the prompt above, so that the model computes it anew"
        if length > boundary and (self.config.sliding_window or length) < length:
            return "beyond its boundary the model replaces the prompt's cache by one that holds only the window"
        return super().unsupported_request(request)
