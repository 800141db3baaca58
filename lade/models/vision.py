"""Vision-language models, whose images belong to the prompt."""

from __future__ import annotations

from lade.compat import PROMPT_ARGUMENTS
from lade.models.base import ModelAdapter


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
