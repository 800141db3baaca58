"""Attention spans of a model's layers, by its configuration."""

from __future__ import annotations

import inspect
from typing import Any

from lade.block.mask import EVERYWHERE, AttentionSpan

# By layer type in transformers' configurations.
LAYER_SPANS = {
    "full_attention": lambda config: EVERYWHERE,
    "sliding_attention": lambda config: AttentionSpan(window=config.sliding_window),
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
    return EVERYWHERE


def declares_layer_types(kind: Any) -> bool:
    """Whether transformers' models with this class of configuration, or one derived from it, take masks by layer type.

    Any configuration keeps the `layer_types` of a config.json; a model whose own class has none ignores them. True for
    classes that derive from none of a model of transformers.
    """
    kinds = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    if not kinds or hasattr(kinds[0], "layer_types"):
        return True
    return "layer_types" in {*inspect.signature(kinds[0]).parameters, *kinds[0].attribute_map}
