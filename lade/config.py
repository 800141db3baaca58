"""The user's settings: one table, validated before anything runs.

Each field of `LookaheadConfig` is a row of the table: default, public keyword, rule and documentation. The keywords,
checks, signature and help of `config_lade` are derived from it. Independent of models and tensors.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lade.common.settings_file import read_settings

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
        "1 uses assumed step costs, not stored ones, in half precision, where block sizes can change a text.",
    )

    # Whether the window's sizes were given without MODE, which leaves the choice to each call.
    prefers_window: bool = False

    def __post_init__(self) -> None:
        for keyword, field in SETTINGS.items():
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, field.metadata["check"](keyword, value))
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


# Public keyword -> its row of the table. More keywords are no settings: CONFIG names a file, and what the original
# LookaheadDecoding has besides is ignored, since it changes no output and makes nothing faster.
SETTINGS = {field.metadata["keyword"]: field for field in dataclasses.fields(LookaheadConfig) if field.metadata}
WINDOW_SIZES = ("LEVEL", "WINDOW_SIZE", "GUESS_SET_SIZE")
IGNORED = ("ALWAYS_FWD_ONE", "POOL_FROM_PROMPT", "SPLIT_FLAG")
KEYWORDS = (*SETTINGS, "CONFIG", *IGNORED)


def changed_by(config: LookaheadConfig, keywords: dict[str, Any], function: str) -> LookaheadConfig:
    """Settings with keywords of `config_lade` on top, CONFIG included. function: the name in a TypeError's message."""
    for name in keywords:
        if name not in KEYWORDS:
            raise TypeError(f"{function} has no keyword {name!r}{suggestion(name)}")
    given = {name: value for name, value in keywords.items() if value is not None}
    path = given.pop("CONFIG", None)
    return changed(config if path is None else with_file(config, path), given)


def suggestion(name: str) -> str:
    """A suggestion for a misspelt keyword, as the end of a sentence."""
    if name == "PREDICTION":
        return ": it belongs to a call, give it to lade.enabled()"
    names = {known.lower(): known for known in KEYWORDS}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else f"; it has {', '.join(KEYWORDS)}"


def with_file(config: LookaheadConfig, path: str | os.PathLike[str], source: str = "CONFIG") -> LookaheadConfig:
    """These settings, changed by those of a file. source: what named the file. Raises ValueError, naming it."""
    settings = read_settings(path, source, (*SETTINGS, *IGNORED))
    try:
        return changed(config, settings)
    except ValueError as error:
        raise ValueError(f"{error}, with {source}={os.fspath(path)!r}") from None


def changed(config: LookaheadConfig, given: dict[str, Any]) -> LookaheadConfig:
    """given: public keywords and values other than None."""
    changes = {SETTINGS[name].name: value for name, value in given.items() if name in SETTINGS}
    if "MODE" in given:
        changes["prefers_window"] = False
    elif config.mode == "auto" and any(name in given for name in WINDOW_SIZES):
        changes["prefers_window"] = True
    return dataclasses.replace(config, **changes)
