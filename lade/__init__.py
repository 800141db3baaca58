"""lade: lookahead decoding for Hugging Face `generate()`, with the same output in fewer steps.

import lade
lade.augment_all()
lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)

runs while the environment has USE_LADE=1. Importing lade changes nothing by itself. Floor 6.
"""

from lade.augment import augment_all, augment_generate, augment_llama, restore_all
from lade.config import LookaheadConfig, config_lade, current_config
from lade.models import ModelAdapter, register_adapter
from lade.parallel import distributed, get_device
from lade.stats import GenerationStats, last_stats, log_history, save_log

__version__ = "0.1.0"

__all__ = [
    "GenerationStats",
    "LookaheadConfig",
    "ModelAdapter",
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
]
