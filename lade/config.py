"""What the user can set, validated before anything runs.

Knows nothing about models or tensors. Floor 0: imports nothing of lade.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger("lade")

# GUESS_SET_SIZE=-1 asks for every n-gram ever seen; a block that large would never pay, so this many are kept per key.
UNLIMITED_GUESSES = 32
MAX_BLOCK_TOKENS = 8192
MODES = ("lookahead", "tree", "auto")
MAX_WORKERS = 4096
ON_VALUES = ("1", "true", "yes", "on")
NO_SETTINGS = ("note", "measured")  # what a settings file may hold besides: a sentence, and whatever was measured


def _check_integer(name: str, value: object, low: int, high: int, also: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        hint = f" ({also})" if also else ""
        raise ValueError(f"{name} must be an integer from {low} to {high}{hint}, got {value!r}")
    return value


def _check_flag(name: str, value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return bool(value)


def _check_choice(name: str, value: object) -> bool | None:
    """None for "auto": lade decides."""
    if value == "auto":
        return None
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be 0, 1 or 'auto', got {value!r}")
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
    use_flash: bool | None = None  # public name USE_FLASH: blocks go through lade's own attention; None = lade decides
    mode: str = "auto"  # public name MODE: one of MODES
    adaptive: bool = True  # public name ADAPTIVE: each step's block is as large as pays
    max_block: int = 64  # public name MAX_BLOCK: tokens of a step
    share: bool = True  # public name SHARE: calls learn from each other
    deterministic: bool = (
        False  # public name DETERMINISTIC: in half precision sizes follow assumed costs, never measured ones
    )
    dist_workers: int | None = None  # public name DIST_WORKERS; None = what the environment says
    backend: str | None = None  # for keys/values between processes; None = nccl for a model on CUDA, else gloo
    compile: bool = False  # public name COMPILE: blocks of fixed shapes go through torch.compile where they can
    cuda_graph: bool | None = None  # public name CUDA_GRAPH: and are captured; None = lade decides

    def __post_init__(self) -> None:
        _check_integer("LEVEL", self.ngram_size, 2, 64)
        _check_integer("WINDOW_SIZE", self.window_size, 1, 1024)
        _check_integer("GUESS_SET_SIZE", self.guess_set_size, -1, 1024, "-1 for unlimited")
        _check_integer("MAX_BLOCK", self.max_block, 2, 512)
        if self.mode not in MODES:
            raise ValueError(f"MODE must be one of {', '.join(map(repr, MODES))}, got {self.mode!r}")
        if self._full_block_tokens > MAX_BLOCK_TOKENS:
            raise ValueError(
                "(LEVEL - 1) * (WINDOW_SIZE + GUESS_SET_SIZE) is the number of tokens in a step and must be <= "
                f"{MAX_BLOCK_TOKENS}, got {self._full_block_tokens} "
                f"(LEVEL={self.ngram_size}, WINDOW_SIZE={self.window_size}, GUESS_SET_SIZE={self.guess_set_size})"
            )

    @property
    def uses_window(self) -> bool:
        """Whether guesses come from the paper's window and pool."""
        return self.mode == "lookahead"

    @property
    def description(self) -> str:
        """The settings that guesses come from, in a few words."""
        if self.uses_window:
            return f"N={self.ngram_size}, W={self.window_size}, G={self.guess_set_size}"
        return f"a tree, up to {self.max_block} tokens a step"

    @property
    def num_workers(self) -> int:
        """Processes that share each step; 1 for none but this. Raises ValueError for a wrong DIST_WORKERS variable."""
        if self.dist_workers is not None:
            return self.dist_workers
        text = os.environ.get("DIST_WORKERS", "").strip()
        value = int(text) if text.isdecimal() else text
        return _check_integer("DIST_WORKERS in the environment", value, 1, MAX_WORKERS) if text else 1

    @property
    def num_guesses(self) -> int:
        """Candidates kept per key and verified per step, with -1 resolved."""
        return UNLIMITED_GUESSES if self.guess_set_size == -1 else self.guess_set_size

    @property
    def max_block_tokens(self) -> int:
        """Largest number of query tokens a step can have."""
        return self._full_block_tokens if self.uses_window else self.max_block

    @property
    def _full_block_tokens(self) -> int:
        return (self.ngram_size - 1) * (self.window_size + self.num_guesses)


_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = threading.RLock()  # of the settings and the patch


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """For functions that look at the settings or the patch and then change them: threads take turns."""

    @functools.wraps(function)
    def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _lock:
            return function(*args, **kwargs)

    return locked


_default = LookaheadConfig()
_environment_is_read = False
_warned: set[str] = set()


def current_config() -> LookaheadConfig:
    """The settings the next `generate()` will use."""
    return _default


def is_enabled() -> bool:
    """Whether the environment asks for lookahead: USE_LADE is 1, true, yes or on (any case)."""
    return os.environ.get("USE_LADE", "").strip().lower() in ON_VALUES


@one_at_a_time
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
    CONFIG: str | os.PathLike[str] | None = None,
    USE_FLASH: int | bool | str | None = None,
    MODE: str | None = None,
    ADAPTIVE: int | bool | None = None,
    MAX_BLOCK: int | None = None,
    SHARE: int | bool | None = None,
    COMPILE: int | bool | None = None,
    CUDA_GRAPH: int | bool | str | None = None,
    DETERMINISTIC: int | bool | None = None,
) -> None:
    """Change the settings of all later `generate()` calls; what is not given keeps its value.

    LEVEL, WINDOW_SIZE, GUESS_SET_SIZE are N, W, G of the paper: the length of an n-gram (2 to 64), the columns of the
    window (1 to 1024) and the candidates per key (0 to 1024; -1 for as many as lade keeps, UNLIMITED_GUESSES).
    DEBUG=1 prints a summary after each call. ALWAYS_FWD_ONE=0 rolls the window by as many columns as were accepted.
    POOL_FROM_PROMPT=0 starts with an empty pool. USE_FLASH=1 sends blocks through lade's own attention: a Triton kernel on
    CUDA, plain torch elsewhere. COMPILE=1 pads blocks to fixed shapes and compiles their forward; CUDA_GRAPH=1 captures it.
    USE_FLASH="auto" and CUDA_GRAPH="auto", the defaults, leave both to lade, which does so on CUDA where it pays.
    DIST_WORKERS=K splits each step over K processes, which `torchrun` or `accelerate launch`
    start; backend ("nccl", "gloo") is how keys/values travel between them. SPLIT_FLAG is accepted and ignored.

    MODE says who guesses: "lookahead" is the paper's window and pool, "tree" grows a tree from everything the model has said
    before (docs/drafting.md), and "auto", the default, leaves the choice to lade: today that is the tree. Giving LEVEL,
    WINDOW_SIZE or GUESS_SET_SIZE without MODE means "lookahead". ADAPTIVE=0 lays out the whole block in every step instead of as
    much of it as pays on this machine. MAX_BLOCK is the most tokens that a step of the tree may have (2 to 512). SHARE=0 lets no
    call learn from another. DETERMINISTIC=1 measures no step costs where they could change a text, in half precision.

    Raises ValueError, naming the parameter, the rule and the value, before anything has changed.

    CONFIG is a JSON file of these keywords, such as `lade tune` writes: as if they were given in a call of their own before
    this one.
    """
    given = dict(locals())  # the keywords; must stay the first statement
    apply_environment()
    if CONFIG is not None:
        _config_from_file(CONFIG, given)
        return
    changes: dict[str, Any] = {}
    for field, value in (("window_size", WINDOW_SIZE), ("ngram_size", LEVEL), ("guess_set_size", GUESS_SET_SIZE)):
        if value is not None:
            changes[field] = value
    if MODE is not None:
        changes["mode"] = MODE
    elif changes:
        changes["mode"] = "lookahead"
    if ADAPTIVE is not None:
        changes["adaptive"] = _check_flag("ADAPTIVE", ADAPTIVE)
    if MAX_BLOCK is not None:
        changes["max_block"] = MAX_BLOCK
    if SHARE is not None:
        changes["share"] = _check_flag("SHARE", SHARE)
    if DETERMINISTIC is not None:
        changes["deterministic"] = _check_flag("DETERMINISTIC", DETERMINISTIC)
    if DEBUG is not None:
        changes["debug"] = _check_integer("DEBUG", int(DEBUG) if isinstance(DEBUG, bool) else DEBUG, 0, 9)
    if ALWAYS_FWD_ONE is not None:
        changes["always_forward_one"] = _check_flag("ALWAYS_FWD_ONE", ALWAYS_FWD_ONE)
    if POOL_FROM_PROMPT is not None:
        changes["pool_from_prompt"] = _check_flag("POOL_FROM_PROMPT", POOL_FROM_PROMPT)
    if backend is not None:
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"backend must be 'nccl' or 'gloo', got {backend!r}")
        changes["backend"] = backend
    if USE_FLASH is not None:
        changes["use_flash"] = _check_choice("USE_FLASH", USE_FLASH)
    if DIST_WORKERS is not None:
        changes["dist_workers"] = _check_integer("DIST_WORKERS", DIST_WORKERS, 1, MAX_WORKERS)
    if COMPILE is not None:
        changes["compile"] = _check_flag("COMPILE", COMPILE)
    if CUDA_GRAPH is not None:
        changes["cuda_graph"] = _check_choice("CUDA_GRAPH", CUDA_GRAPH)

    global _default
    _default = dataclasses.replace(_default, **changes)


@one_at_a_time
def apply_environment() -> None:
    """Let the file that LADE_CONFIG names replace the defaults, once in a process. Called before anything else is set.

    Raises ValueError as config_lade(CONFIG=...) does; then nothing has changed, and the next call tries again.
    """
    global _environment_is_read
    path = os.environ.get("LADE_CONFIG", "")
    if _environment_is_read or not path:
        return
    _environment_is_read = True
    try:
        _config_from_file(path, {}, "LADE_CONFIG")
    except BaseException:
        _environment_is_read = False
        raise


@contextmanager
def temporary_settings(**keywords: Any) -> Iterator[None]:
    """Other settings within a block, on top of the current ones. keywords: of `config_lade`."""
    global _default
    before = _default
    try:
        config_lade(**keywords)
        yield
    finally:
        _default = before


def _config_from_file(path: str | os.PathLike[str], given: dict[str, Any], source: str = "CONFIG") -> None:
    """Set what the file says, then the keywords `given`: all of it or nothing. source: what named the file."""
    global _default
    settings, note = read_settings(path, source)
    before = _default
    try:
        try:
            config_lade(**settings)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{error}, with {source}={os.fspath(path)!r}") from None
        config_lade(**{**given, "CONFIG": None})
    except BaseException:
        _default = before
        raise
    if not settings and note and note not in _warned:
        _warned.add(note)
        logger.warning("lade: %s %s has no settings: %s", source, os.fspath(path), note)


def read_settings(path: str | os.PathLike[str], source: str = "CONFIG") -> tuple[dict[str, Any], str | None]:
    """The keywords of `config_lade` that a JSON file gives, and its note. Their values are not checked yet.

    source: what named the file. Raises ValueError, naming the file and what is wrong with it.
    """
    name = f"{source}={os.fspath(path)!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # of the encoding too, and of nesting that Python's stack has no room for
        raise ValueError(f"{name} must hold JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold one JSON object, found {type(content).__name__}")
    known = [keyword for keyword in inspect.signature(config_lade).parameters if keyword != "CONFIG"]
    settings = {key: value for key, value in content.items() if key not in NO_SETTINGS}
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r}, which must be one of {', '.join([*known, *NO_SETTINGS])}")
    empty = [key for key, value in settings.items() if value is None]
    if empty:
        raise ValueError(f"{name} has {empty[0]}=null, which must have a value or be left out")
    nested = [key for key, value in settings.items() if isinstance(value, (list, dict))]
    if nested:  # which may be too deep to be shown in a message
        raise ValueError(
            f"{name} has a {type(settings[nested[0]]).__name__} as {nested[0]}, which must be a single value"
        )
    note = content.get("note")
    return settings, note if isinstance(note, str) else None
