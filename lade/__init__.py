"""lade: lookahead decoding for Hugging Face `generate()`, with the same output in fewer steps.

import lade
lade.augment_all()
lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)

runs while the environment has USE_LADE=1. Importing lade changes nothing by itself, and imports neither torch nor
transformers: that happens when the first name that needs them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lade.compat import require_names
from lade.config import LookaheadConfig, config_lade, current_config
from lade.stats import GenerationStats, last_stats, log_history, save_log

if TYPE_CHECKING:
    from lade.augment import augment_all, augment_generate, augment_llama, restore_all
    from lade.drafting.memory import Memory
    from lade.models import ModelAdapter, allow_hook, register_adapter
    from lade.parallel.group import distributed, get_device
    from lade.preparation import warmup

__version__ = "0.1.0"

__all__ = [
    "GenerationStats",
    "LookaheadConfig",
    "Memory",
    "ModelAdapter",
    "allow_hook",
    "augment_all",
    "augment_generate",
    "augment_llama",
    "config_lade",
    "current_config",
    "distributed",
    "get_device",
    "last_stats",
    "log_history",
    "register_adapter",
    "restore_all",
    "save_log",
    "warmup",
]

# Public names whose modules import torch and transformers -> those modules.
_LAZY = {
    "Memory": "lade.drafting.memory",
    "ModelAdapter": "lade.models",
    "allow_hook": "lade.models",
    "augment_all": "lade.augment",
    "augment_generate": "lade.augment",
    "augment_llama": "lade.augment",
    "distributed": "lade.parallel.group",
    "get_device": "lade.parallel.group",
    "register_adapter": "lade.models",
    "restore_all": "lade.augment",
    "warmup": "lade.preparation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ImportError:
        require_names()  # says more, where transformers or torch lacks something
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
