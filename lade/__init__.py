"""lade: lookahead decoding for Hugging Face `generate()`, with the same output in fewer steps.

import lade
lade.augment_all()

runs while the environment has USE_LADE=1; `with lade.enabled():` switches it on for a block of code. Importing lade
changes nothing by itself, and imports neither torch nor transformers: that happens when the first name that needs them
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lade.common.version import VERSION
from lade.config import LookaheadConfig
from lade.stats import GenerationStats, last_stats, log_history, save_log
from lade.switch import config_lade, current_config

if TYPE_CHECKING:
    from lade.augment import augment_all, augment_generate, augment_llama, enabled, restore_all
    from lade.drafting import register_drafter
    from lade.drafting.memory import Memory
    from lade.models import ModelAdapter, allow_hook, register_adapter
    from lade.parallel.group import distributed, get_device
    from lade.preparation import warmup

__version__ = VERSION

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
    "enabled",
    "get_device",
    "last_stats",
    "log_history",
    "register_adapter",
    "register_drafter",
    "restore_all",
    "save_log",
    "warmup",
]

# Modules that import torch and transformers -> the public names from there.
_LAZY = {
    "lade.augment": ("augment_all", "augment_generate", "augment_llama", "enabled", "restore_all"),
    "lade.drafting": ("register_drafter",),
    "lade.drafting.memory": ("Memory",),
    "lade.models": ("ModelAdapter", "allow_hook", "register_adapter"),
    "lade.parallel.group": ("distributed", "get_device"),
    "lade.preparation": ("warmup",),
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("lade.common.compat")  # first, because its ImportError says what does not fit
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
