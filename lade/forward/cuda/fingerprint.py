"""A hash that changes when a model may no longer compute what a CUDA graph captured.

A graph stores addresses and runs no Python. It would keep using weights that have been replaced, and would miss a hook
or an adapter enabled after the capture.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lade.common.compat import HOOKS
from lade.common.tolerance import product_precision

PLAIN_TYPES = (bool, int, float, str, type(None))


def fingerprint(model: PreTrainedModel) -> int:
    """A hash of weight addresses, hooks, module classes, and plain attributes of modules and configurations."""
    seen: list[Any] = [address(tensor) for tensor in chain(model.parameters(), model.buffers())]
    configs: dict[int, Any] = {}
    for module in model.modules():
        seen.append((type(module), type(module).forward))
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            seen.extend((name, repr(value)) for name, value in vars(config).items() if is_plain(value))
        for name, value in vars(module).items():
            if name in HOOKS:
                seen.append(tuple(value))
            elif is_plain(value):
                seen.append((name, repr(value)))
    return hash(tuple(seen))


def numerics(device: torch.device) -> tuple[Any, ...]:
    """Process-wide settings that change the results of the same code."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        product_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor subclass without storage of its own
        return id(tensor)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a collection of these, such as names of active adapters."""
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(part, PLAIN_TYPES) for part in value)
    if isinstance(value, dict):
        return all(isinstance(part, PLAIN_TYPES) for part in value.values())
    return isinstance(value, PLAIN_TYPES)
