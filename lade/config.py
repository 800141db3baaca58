"""What the user can set, validated before anything runs.

Knows nothing about models or tensors. Floor 0: imports nothing of lade.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

# GUESS_SET_SIZE=-1 asks for every n-gram ever seen; a block that large would never pay, so this many are kept per key.
UNLIMITED_GUESSES = 32
MAX_BLOCK_TOKENS = 8192
ON_VALUES = ("1", "true", "yes", "on")


def _check_integer(name: str, value: object, low: int, high: int, also: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        hint = f" ({also})" if also else ""
        raise ValueError(f"{name} must be an integer from {low} to {high}{hint}, got {value!r}")
    return value


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return bool(value)


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Settings of lookahead decoding (arXiv:2402.02057). Sizes are in tokens."""

    ngram_size: int = 5  # N, public name LEVEL
    window_size: int = 7  # W, public name WINDOW_SIZE
    guess_set_size: int = 7  # G, public name GUESS_SET_SIZE; -1 = UNLIMITED_GUESSES
    debug: int = 0  # public name DEBUG
    always_forward_one: bool = True  # public name ALWAYS_FWD_ONE; False rolls the window by what was accepted
    pool_from_prompt: bool = True  # public name POOL_FROM_PROMPT
    use_flash: bool = False  # public name USE_FLASH: blocks go through lade's own attention where they can
    compile: bool = False  # public name COMPILE: blocks of fixed shapes go through torch.compile where they can
    cuda_graph: bool | None = None  # public name CUDA_GRAPH: and are captured; None, for now, is off

    def __post_init__(self) -> None:
        _check_integer("LEVEL", self.ngram_size, 2, 64)
        _check_integer("WINDOW_SIZE", self.window_size, 1, 1024)
        _check_integer("GUESS_SET_SIZE", self.guess_set_size, -1, 1024, "-1 for unlimited")
        if self.max_block_tokens > MAX_BLOCK_TOKENS:
            raise ValueError(
                "(LEVEL - 1) * (WINDOW_SIZE + GUESS_SET_SIZE) is the number of tokens in a step and must be <= "
                f"{MAX_BLOCK_TOKENS}, got {self.max_block_tokens} "
                f"(LEVEL={self.ngram_size}, WINDOW_SIZE={self.window_size}, GUESS_SET_SIZE={self.guess_set_size})"
            )

    @property
    def num_guesses(self) -> int:
        """Candidates kept per key and verified per step, with -1 resolved."""
        return UNLIMITED_GUESSES if self.guess_set_size == -1 else self.guess_set_size

    @property
    def max_block_tokens(self) -> int:
        """Largest number of query tokens a step can have."""
        return (self.ngram_size - 1) * (self.window_size + self.num_guesses)


_default = LookaheadConfig()


def current_config() -> LookaheadConfig:
    """The settings the next `generate()` will use."""
    return _default


def is_enabled() -> bool:
    """Whether the environment asks for lookahead: USE_LADE is 1, true, yes or on (any case)."""
    return os.environ.get("USE_LADE", "").strip().lower() in ON_VALUES


def config_lade(
    WINDOW_SIZE: int | None = None,
    LEVEL: int | None = None,
    DEBUG: int | None = None,
    GUESS_SET_SIZE: int | None = None,
    ALWAYS_FWD_ONE: int | bool | None = None,
    SPLIT_FLAG: object = None,
    DIST_WORKERS: int | None = None,
    POOL_FROM_PROMPT: int | bool | None = None,
    backend: str | None = None,
    USE_FLASH: int | bool | None = None,
    COMPILE: int | bool | None = None,
    CUDA_GRAPH: int | bool | None = None,
) -> None:
    """Change the settings of all later `generate()` calls; what is not given keeps its value.

    LEVEL, WINDOW_SIZE, GUESS_SET_SIZE are N, W, G of the paper: the length of an n-gram (2 to 64), the columns of the
    window (1 to 1024) and the candidates per key (0 to 1024; -1 for as many as lade keeps, UNLIMITED_GUESSES).
    DEBUG=1 prints a summary after each call. ALWAYS_FWD_ONE=0 rolls the window by as many columns as were accepted.
    POOL_FROM_PROMPT=0 starts with an empty pool. USE_FLASH=1 sends blocks through lade's own attention: a Triton kernel on
    CUDA, plain torch elsewhere. COMPILE=1 pads blocks to fixed shapes and compiles their forward; CUDA_GRAPH=1 captures it.
    SPLIT_FLAG is accepted and ignored.

    Raises ValueError, naming the parameter, the rule and the value, before anything has changed.
    """
    changes: dict[str, Any] = {}
    for field, value in (("window_size", WINDOW_SIZE), ("ngram_size", LEVEL), ("guess_set_size", GUESS_SET_SIZE)):
        if value is not None:
            changes[field] = value
    if DEBUG is not None:
        changes["debug"] = _check_integer("DEBUG", int(DEBUG) if isinstance(DEBUG, bool) else DEBUG, 0, 9)
    if ALWAYS_FWD_ONE is not None:
        changes["always_forward_one"] = _check_flag("ALWAYS_FWD_ONE", ALWAYS_FWD_ONE)
    if POOL_FROM_PROMPT is not None:
        changes["pool_from_prompt"] = _check_flag("POOL_FROM_PROMPT", POOL_FROM_PROMPT)
    if backend is not None and backend not in ("nccl", "gloo"):
        raise ValueError(f"backend must be 'nccl' or 'gloo', got {backend!r}")
    if USE_FLASH is not None:
        changes["use_flash"] = _check_flag("USE_FLASH", USE_FLASH)
    if COMPILE is not None:
        changes["compile"] = _check_flag("COMPILE", COMPILE)
    if CUDA_GRAPH is not None:
        changes["cuda_graph"] = _check_flag("CUDA_GRAPH", CUDA_GRAPH)
    if DIST_WORKERS is not None and _check_integer("DIST_WORKERS", DIST_WORKERS, 1, 4096) > 1:
        raise NotImplementedError(
            f"DIST_WORKERS must be 1: lookahead parallelism over several processes is not there yet, got {DIST_WORKERS}"
        )

    global _default
    _default = dataclasses.replace(_default, **changes)
