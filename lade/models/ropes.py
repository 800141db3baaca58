"""Settings of a model's rotary embeddings, and those whose frequencies depend on the sequence length."""

from __future__ import annotations

from typing import Any

MOVING_ROPES = ("dynamic", "longrope")  # types whose frequencies depend on the sequence length


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """One dict per layer type if they differ, else one; none without rotary embeddings."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_type = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return by_type or ([ropes] if ropes else [])


def is_moving_rope(part: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the sequence length."""
    found = vars(part).get("rope_type")
    return any(kind in MOVING_ROPES for kind in (found.values() if isinstance(found, dict) else (found,)))
