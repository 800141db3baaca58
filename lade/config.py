"""The user's settings: one table, validated before anything runs.

Each field of `LookaheadConfig` is a row of the table: default, public keyword, rule and documentation. The keywords,
checks, signature and help of `config_lade` are derived from it. Independent of models and tensors.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import logging
import os
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("lade")

# GUESS_SET_SIZE=-1 means unlimited. So large a block would never pay, so this many n-grams are kept per key.
UNLIMITED_GUESSES = 32
MAX_BLOCK_TOKENS = 8192
# What makes each mode's drafter: lade's own as "module:class", imported by the first call.
# `register_drafter` adds to it.
MODES: dict[str, str | Callable[[Any], Any]] = {
    "lookahead": "lade.drafting.lookahead:LookaheadDrafter",
    "tree": "lade.drafting.tree:TreeDrafter",
    "auto": "lade.drafting.tree:TreeDrafter",
}
MAX_WORKERS = 4096
# Of USE_LADE, in any case.
ON_VALUES = ("1", "true", "yes", "on")
OFF_VALUES = ("0", "false", "no", "off")
NO_SETTINGS = ("note", "measured")  # other keys of a settings file: a sentence, and measurements

Check = Callable[[str, Any], Any]  # public keyword, value as given -> the field's value; raises ValueError


def integer(low: int, high: int, also: str = "", takes_flags: bool = False) -> Check:
    """An integer from `low` to `high`. also: a remark on the range. takes_flags: accept False and True as 0 and 1."""
    rule = f"an integer from {low} to {high}" + (f" ({also})" if also else "")

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) and takes_flags:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be {rule}, got {value!r}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return bool(value)


def flag_or_auto(name: str, value: Any) -> bool | None:
    """0 or 1; None for "auto", where lade decides."""
    try:
        return None if value == "auto" else flag(name, value)
    except ValueError:
        raise ValueError(f"{name} must be 0, 1 or 'auto', got {value!r}") from None


def one_of(values: Collection[str]) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}")
        return str(value)

    return check


def setting(default: Any, keyword: str, check: Check, meaning: str) -> Any:
    """A row of the table. keyword: of `config_lade`. meaning: a sentence for its help."""
    return dataclasses.field(default=default, metadata={"keyword": keyword, "check": check, "meaning": meaning})


def setting_fields(config: Any) -> list[Any]:
    """The fields that are rows of the table. config: the class or an instance."""
    return [field for field in dataclasses.fields(config) if field.metadata]


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Settings of lookahead decoding (arXiv:2402.02057). Sizes are in tokens."""

    ngram_size: int = setting(5, "LEVEL", integer(2, 64), "N of the paper: the length of an n-gram.")
    window_size: int = setting(7, "WINDOW_SIZE", integer(1, 1024), "W: columns of the window.")
    guess_set_size: int = setting(
        7,
        "GUESS_SET_SIZE",
        integer(-1, 1024, f"-1 for {UNLIMITED_GUESSES}"),
        f"G: candidates kept per key and verified per step; -1 for the most, {UNLIMITED_GUESSES}.",
    )
    debug: int = setting(0, "DEBUG", integer(0, 9, takes_flags=True), "1 prints a summary after each call.")
    always_forward_one: bool = setting(
        True, "ALWAYS_FWD_ONE", flag, "0 also shifts the window's columns by the number of accepted guesses."
    )
    pool_from_prompt: bool = setting(
        True, "POOL_FROM_PROMPT", flag, "0 starts with an empty pool; 1 inserts the prompt's n-grams."
    )
    use_flash: bool | None = setting(
        None,
        "USE_FLASH",
        flag_or_auto,
        "1 runs blocks with lade's own attention: a Triton kernel on CUDA, plain torch elsewhere. "
        "'auto' does so on CUDA if it is expected to pay.",
    )
    mode: str = setting(
        "auto",
        "MODE",
        one_of(MODES),
        "The drafter: 'lookahead' is the paper's window and pool, 'tree' builds a tree from the model's earlier "
        "tokens (docs/drafting.md), 'auto' is 'tree'. If LEVEL, WINDOW_SIZE or GUESS_SET_SIZE were given without MODE, "
        "'auto' is 'lookahead' where its block costs little more than a token: on accelerators.",
    )
    adaptive: bool = setting(
        True,
        "ADAPTIVE",
        flag,
        "1 sizes each step's block by what pays on this machine; 0 uses the full block in every step.",
    )
    max_block: int = setting(64, "MAX_BLOCK", integer(2, 512), "The most tokens that a step of the tree may have.")
    share: bool = setting(True, "SHARE", flag, "0 starts each call with empty tables instead of the model's.")
    dist_workers: int | None = setting(
        None,
        "DIST_WORKERS",
        integer(1, MAX_WORKERS),
        "K splits each step over K processes, started by torchrun or accelerate launch. Default: the environment "
        "variable of that name, or 1.",
    )
    backend: str | None = setting(
        None,
        "backend",
        one_of(("nccl", "gloo")),
        "The transport of keys and values between these processes. Default: nccl for a model on CUDA, else gloo.",
    )
    compile: bool = setting(False, "COMPILE", flag, "1 pads blocks to static shapes and compiles their forward.")
    cuda_graph: bool | None = setting(
        None,
        "CUDA_GRAPH",
        flag_or_auto,
        "1 captures forwards of static shapes in CUDA graphs. 'auto' does so on CUDA if it is expected to pay.",
    )
    pack: bool | None = setting(
        None,
        "PACK",
        flag_or_auto,
        "1 keeps a second, packed copy of a CPU model's linear weights, with which blocks cost less. 'auto' does so "
        "if memory is free and the calls are long enough to pay for it.",
    )
    deterministic: bool = setting(
        False,
        "DETERMINISTIC",
        flag,
        "1 uses assumed instead of measured step costs in half precision, where block sizes can change a text.",
    )

    # Whether the window's sizes were given without MODE, which leaves the choice to each call.
    prefers_window: bool = False

    def __post_init__(self) -> None:
        for field in setting_fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                checked = field.metadata["check"](field.metadata["keyword"], value)
                object.__setattr__(self, field.name, checked)
        if self._full_block_tokens > MAX_BLOCK_TOKENS:
            raise ValueError(
                "(LEVEL - 1) * (WINDOW_SIZE + GUESS_SET_SIZE) is the number of tokens in a step and must be <= "
                f"{MAX_BLOCK_TOKENS}, got {self._full_block_tokens} "
                f"(LEVEL={self.ngram_size}, WINDOW_SIZE={self.window_size}, GUESS_SET_SIZE={self.guess_set_size})"
            )

    @property
    def uses_window(self) -> bool:
        """Whether guesses come from the paper's window and n-gram pool."""
        return self.mode == "lookahead"

    @property
    def description(self) -> str:
        """A short description of the drafter's settings."""
        if self.uses_window:
            return f"N={self.ngram_size}, W={self.window_size}, G={self.guess_set_size}"
        return f"a tree, up to {self.max_block} tokens a step"

    @property
    def num_workers(self) -> int:
        """Processes that share each step; 1 for this one alone. Raises ValueError for an invalid DIST_WORKERS."""
        if self.dist_workers is not None:
            return self.dist_workers
        text = os.environ.get("DIST_WORKERS", "").strip()
        value = int(text) if text.isdecimal() else text
        return integer(1, MAX_WORKERS)("DIST_WORKERS in the environment", value) if text else 1

    @property
    def num_guesses(self) -> int:
        """Candidates kept per key and verified per step, with -1 resolved."""
        return UNLIMITED_GUESSES if self.guess_set_size == -1 else self.guess_set_size

    @property
    def max_block_tokens(self) -> int:
        """Largest possible number of query tokens in a step."""
        if self.mode == "auto" and self.prefers_window:  # a call may choose either
            return max(self._full_block_tokens, self.max_block)
        return self._full_block_tokens if self.uses_window else self.max_block

    @property
    def _full_block_tokens(self) -> int:
        return (self.ngram_size - 1) * (self.window_size + self.num_guesses)


# Public keyword -> its row of the table. Two more keywords are not settings: CONFIG names a file, and SPLIT_FLAG, which
# the original LookaheadDecoding has, is ignored.
SETTINGS = {field.metadata["keyword"]: field for field in setting_fields(LookaheadConfig)}
WINDOW_SIZES = ("LEVEL", "WINDOW_SIZE", "GUESS_SET_SIZE")
KEYWORDS = (*SETTINGS, "CONFIG", "SPLIT_FLAG")

lock = threading.RLock()  # guards the settings and the patch
_default = LookaheadConfig()
_environment_is_read = False
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Switch:
    """Replaces USE_LADE and the settings of the process for one thread or task."""

    is_on: bool
    config: LookaheadConfig


_switch: ContextVar[Switch | None] = ContextVar("lade_switch", default=None)


def current_config() -> LookaheadConfig:
    """The settings the next `generate()` of this thread or task will use."""
    switch = _switch.get()
    return _default if switch is None else switch.config


def is_enabled() -> bool:
    """Whether lookahead is on: the innermost `lade.enabled()` decides, else USE_LADE (1, true, yes or on, any case)."""
    switch = _switch.get()
    return switch.is_on if switch is not None else environment_switch() in ON_VALUES


def environment_switch() -> str:
    """USE_LADE in lower case, without spaces; empty if it is not set."""
    return os.environ.get("USE_LADE", "").strip().lower()


def off_reason() -> str:
    """Why lookahead is off, as the end of a sentence."""
    return "USE_LADE is not set to 1, true, yes or on" if _switch.get() is None else "lade.enabled(False) is in force"


def off_hint() -> str | None:
    """How to switch lookahead on; None where it is on, or off on purpose."""
    value = environment_switch()
    if _switch.get() is not None or value in (*ON_VALUES, *OFF_VALUES):
        return None
    if value:
        return (
            f"USE_LADE={os.environ['USE_LADE']!r} means nothing: {', '.join(ON_VALUES)} switch lookahead on, "
            f"{', '.join(OFF_VALUES)} off; plain generate() runs"
        )
    return (
        "the patch is on and lookahead is off: set USE_LADE=1 in the environment, or call generate() in "
        "`with lade.enabled():`; plain generate() runs (USE_LADE=0 says so without this line)"
    )


@contextmanager
def switched(on: bool, **keywords: Any) -> Iterator[None]:
    """Lookahead on or off for this thread or task, with settings on top of the current ones.

    keywords: as for config_lade, which also says what is raised.
    """
    token = _switch.set(Switch(bool(on), changed_by(current_config(), keywords, "enabled()")))
    try:
        yield
    finally:
        _switch.reset(token)


def config_lade(**keywords: Any) -> None:
    """Change the settings of all later `generate()` calls; a setting that is not given, or None, keeps its value.

    Raises ValueError, naming the keyword, the rule and the value, and TypeError for an unknown keyword. Then nothing
    has changed.
    """
    global _default
    apply_environment()
    with lock:  # assigned once, because other threads read it without the lock
        _default = changed_by(_default, keywords, "config_lade()")


def changed_by(config: LookaheadConfig, keywords: dict[str, Any], function: str) -> LookaheadConfig:
    """Settings with keywords of `config_lade` on top, CONFIG included. function: the name in a TypeError's message."""
    for name in keywords:
        if name not in KEYWORDS:
            raise TypeError(f"{function} has no keyword {name!r}{suggestion(name)}")
    given = {name: value for name, value in keywords.items() if value is not None}
    path = given.pop("CONFIG", None)
    return _changed(config if path is None else _with_file(config, path), given)


def suggestion(name: str) -> str:
    """A suggestion for a misspelt keyword, as the end of a sentence."""
    if name == "PREDICTION":
        return ": it belongs to a call, give it to lade.enabled() or lade.generate"
    names = {known.lower(): known for known in KEYWORDS}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else f"; it has {', '.join(KEYWORDS)}"


def _changed(config: LookaheadConfig, given: dict[str, Any]) -> LookaheadConfig:
    """given: public keywords and values other than None."""
    changes = {SETTINGS[name].name: value for name, value in given.items() if name in SETTINGS}
    if "MODE" in given:
        changes["prefers_window"] = False
    elif config.mode == "auto" and any(name in given for name in WINDOW_SIZES):
        changes["prefers_window"] = True
    return dataclasses.replace(config, **changes)


def _help() -> str:
    """One entry per keyword, with its default."""
    meanings = {name: (field.metadata["meaning"], field.default) for name, field in SETTINGS.items()}
    lines = [
        f"{name}: {meaning}"
        + ("" if default is None else f" Default: {int(default) if isinstance(default, bool) else default!r}.")
        for name, (meaning, default) in meanings.items()
    ]
    lines.append(
        "CONFIG: a JSON file of these keywords, such as `lade bench --tune` writes. It is applied before the other keywords of "
        "the call."
    )
    lines.append("SPLIT_FLAG: accepted and ignored.")
    return "\n".join(textwrap.fill(line, 110, initial_indent="    ", subsequent_indent="        ") for line in lines)


config_lade.__doc__ = f"{(config_lade.__doc__ or '').rstrip()}\n\n{_help()}\n"
config_lade.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for help() and editors
    [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any) for name in KEYWORDS],
    return_annotation=None,
)


def apply_environment() -> None:
    """Apply the settings file named by LADE_CONFIG, once per process, before any other change.

    Raises ValueError as config_lade(CONFIG=...) does. Then nothing has changed, and the next call tries again.
    """
    global _environment_is_read, _default
    path = os.environ.get("LADE_CONFIG", "")
    with lock:
        if path and not _environment_is_read:
            _default = _with_file(_default, path, "LADE_CONFIG")
            _environment_is_read = True


@contextmanager
def temporary_settings(**keywords: Any) -> Iterator[None]:
    """Change settings within a `with` block. keywords: of `config_lade`."""
    global _default
    before = _default
    try:
        config_lade(**keywords)
        yield
    finally:
        _default = before


def _with_file(config: LookaheadConfig, path: str | os.PathLike[str], source: str = "CONFIG") -> LookaheadConfig:
    """These settings, changed by those of a file. source: what named the file. Raises ValueError, naming it."""
    settings, note = read_settings(path, source)
    try:
        changed = _changed(config, settings)
    except ValueError as error:
        raise ValueError(f"{error}, with {source}={os.fspath(path)!r}") from None
    if not settings and note and note not in _warned:
        _warned.add(note)
        logger.warning("lade: %s %s has no settings: %s", source, os.fspath(path), note)
    return changed


def read_settings(path: str | os.PathLike[str], source: str = "CONFIG") -> tuple[dict[str, Any], str | None]:
    """The settings in a JSON file, by keyword of `config_lade`, and its note. Values are not checked.

    source: what named the file. Raises ValueError, naming the file and the problem.
    """
    name = f"{source}={os.fspath(path)!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad JSON or encoding, or nesting too deep
        raise ValueError(f"{name} must hold JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold one JSON object, found {type(content).__name__}")
    known = [*(keyword for keyword in KEYWORDS if keyword != "CONFIG"), *NO_SETTINGS]
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"{name} has {key!r}, which must be one of {', '.join(known)}")
        if value is None:
            raise ValueError(f"{name} has {key}=null, which must have a value or be left out")
        if isinstance(value, (list, dict)) and key not in NO_SETTINGS:  # not shown: it may be nested too deeply
            raise ValueError(f"{name} has a {type(value).__name__} as {key}, which must be a single value")
    settings = {key: value for key, value in content.items() if key not in NO_SETTINGS}
    note = content.get("note")
    return settings, note if isinstance(note, str) else None
