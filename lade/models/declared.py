"""Families whose adapters only declare how they differ."""

from __future__ import annotations

from lade.common.compat import PROMPT_ARGUMENTS
from lade.models.base import ModelAdapter


class DogeAdapter(ModelAdapter):
    """Doge: each query keeps its highest-scoring keys, so guesses would displace keys of the text."""

    def unsupported_layers(self) -> str | None:
        return "each query of the model selects its keys, which may include guesses"


class GPT2Adapter(ModelAdapter):
    """GPT-2, GPT-J, CodeGen and GPTBigCode embed and add `token_type_ids`, which some tokenizers return.

    A token type affects only its own token, so guesses can carry one.
    """

    carried_arguments = frozenset({"token_type_ids"})


class GemmaVisionAdapter(ModelAdapter):
    """Gemma 3 and later: image tokens of the prompt attend to each other in both directions; text is causal."""

    safe_hooks = ("prepare_inputs_for_generation",)
    prompt_arguments = PROMPT_ARGUMENTS | {"token_type_ids", "mm_token_type_ids"}


class QwenVisionAdapter(ModelAdapter):
    """Qwen-VL and GLM-V: three position ids per token (M-RoPE), which advance together after the prompt."""

    prompt_arguments = PROMPT_ARGUMENTS | {
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "mm_token_type_ids",
    }
