"""Attention spans of a model's layers, by its configuration."""

from __future__ import annotations

import inspect
from typing import Any

from lade.block.mask import EVERYWHERE, AttentionSpan

# By layer type in transformers' configurations.
LAYER_SPANS = {
    "full_attention": lambda config: EVERYWHERE,
    "sliding_attention": lambda config: AttentionSpan(window=config.sliding_window),
    "chunked_attention": lambda config: AttentionSpan(chunk=config.attention_chunk_size),
}


def layer_spans(config: Any) -> AttentionSpan | dict[str, AttentionSpan]:
    """The span of each layer, as the model takes its masks: one for all layers, or a dict by layer type.

    Same rule as `transformers.masking_utils.create_masks_for_generate`. Raises KeyError for an unknown layer type.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return {layer_type: LAYER_SPANS[layer_type](config) for layer_type in sorted(set(layer_types))}
    if getattr(config, "sliding_window", None) is not None:
        return AttentionSpan(window=config.sliding_window)
    if getattr(config, "attention_chunk_size", None) is not None:
        return AttentionSpan(chunk=config.attention_chunk_size)
    return EVERYWHERE


def declares_layer_types(kind: Any) -> bool:
    """Whether models with this class of configuration take masks by layer type, by transformers' configurations.

    Any configuration keeps a `layer_types` from a config.json, and a model of another class ignores it. Configurations
    from outside of transformers count as declaring it; their models are tried out.
    """
    if hasattr(kind, "layer_types") or not kind.__module__.startswith("transformers."):
        return True
    return "layer_types" in {*inspect.signature(kind).parameters, *kind.attribute_map}
