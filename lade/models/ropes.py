"""Settings of a model's rotary embeddings, and those whose frequencies depend on the sequence length."""

from __future__ import annotations

from typing import Any


def is_moving(rope_type: Any) -> bool:
    """Whether frequencies of a type depend on the sequence length; transformers looks for "dynamic" in its name."""
    return rope_type == "longrope" or "dynamic" in str(rope_type)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """One dict per layer type if they differ, else one; none without rotary embeddings."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_type = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return by_type or ([ropes] if ropes else [])


def is_moving_rope(part: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the sequence length."""
    found = vars(part).get("rope_type")
    return any(map(is_moving, found.values() if isinstance(found, dict) else (found,)))
