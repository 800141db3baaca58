"""Whether lookahead is on, and with which settings: of the process, or of one thread or task. Imports no torch."""

from __future__ import annotations

import inspect
import os
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lade.config import IGNORED, KEYWORDS, SETTINGS, LookaheadConfig, changed_by, with_file

# Values of USE_LADE, in any case.
ON_VALUES = ("1", "true", "yes", "on")
OFF_VALUES = ("0", "false", "no", "off")

lock = threading.RLock()  # guards the settings and the patch
_default = LookaheadConfig()
_environment_is_read = False


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
    """Instructions to switch lookahead on, as a sentence; None if it is on, or off on purpose."""
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


def apply_environment() -> None:
    """Apply the settings file named by LADE_CONFIG, once per process, before any other change.

    Raises ValueError as config_lade(CONFIG=...) does. Then nothing has changed, and the next call tries again.
    """
    global _environment_is_read, _default
    path = os.environ.get("LADE_CONFIG", "")
    with lock:
        if path and not _environment_is_read:
            _default = with_file(_default, path, "LADE_CONFIG")
            _environment_is_read = True


def _help() -> Iterator[str]:
    """One entry per keyword, with its default."""
    for name, field in SETTINGS.items():
        value = int(field.default) if isinstance(field.default, bool) else field.default
        yield f"{name}: {field.metadata['meaning']}" + ("" if value is None else f" Default: {value!r}.")
    yield (
        "CONFIG: a JSON file of these keywords, such as `lade bench --tune` writes. It is applied before the other "
        "keywords of the call."
    )
    yield from (f"{name}: accepted and ignored." for name in IGNORED)


_entries = [textwrap.fill(entry, 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in _help()]
config_lade.__doc__ = f"{(config_lade.__doc__ or '').rstrip()}\n\n" + "\n".join(_entries) + "\n"
config_lade.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for help() and editors
    [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any) for name in KEYWORDS],
    return_annotation=None,
)
