"""Families that take a block of guesses in some texts only, or in none. Floor 3."""

from __future__ import annotations

from lade.models.base import ModelAdapter


class Phi3Adapter(ModelAdapter):
    """Phi-3 and Phi-3.5-MoE: where rotary frequencies switch, plain generate() computes the whole cache anew."""

    safe_hooks = ("prepare_inputs_for_generation",)

    def unsupported_length(self, prompt_length: int, max_length: int) -> str | None:
        if not any(rope.get("rope_type") == "longrope" for rope in self._ropes):
            return None
        boundary = self.config.original_max_position_embeddings
        if prompt_length <= boundary < max_length - 1:
            return f"the text may grow over {boundary} tokens, where the model's frequencies and its whole cache change"
        return None


class DogeAdapter(ModelAdapter):
    """Doge: each query keeps the keys that it finds best, which guesses would crowd out."""

    def unsupported_layers(self) -> str | None:
        return "each query of the model selects its keys, guesses among them, in a mask of its own"
