"""The settings that `lade tune` tries, by drafter. A drafter without an entry here is tried with its defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lade.config import MODES, WINDOW_SIZES, LookaheadConfig

Settings = dict[str, Any]  # keywords of config_lade, on top of its defaults

DEFAULT: Settings = {}
TREE: Settings = {"MODE": "tree"}
ANCHORS = (DEFAULT, TREE)  # always timed, whatever is predicted for them


def lookahead_settings(levels: Iterable[int], shapes: Iterable[tuple[int, int]]) -> list[Settings]:
    """Every N of `levels` with every (W, G) of `shapes`."""
    shapes = list(shapes)
    return [{"LEVEL": n, "WINDOW_SIZE": w, "GUESS_SET_SIZE": g} for n in levels for w, g in shapes]


# Mode -> what is tried, and what is tried with --quick.
CANDIDATES: dict[str, tuple[list[Settings], list[Settings]]] = {
    "auto": ([], []),  # the default is an anchor
    "tree": ([{**TREE, "MAX_BLOCK": size} for size in (8, 16, 32, 128)], [{**TREE, "MAX_BLOCK": 16}]),
    "lookahead": (
        lookahead_settings((3, 5, 7), ((1, 3), (2, 4), (4, 4), (7, 7), (10, 10), (15, 15), (20, 20))),
        lookahead_settings((3, 5), ((1, 3), (2, 4), (7, 7))) + lookahead_settings((5,), ((15, 15),)),
    ),
}


def candidates(is_quick: bool) -> tuple[Settings, ...]:
    """All that are tried besides the anchors."""
    found: list[Settings] = []
    for mode in MODES:
        full, quick = CANDIDATES.get(mode) or ([{"MODE": mode}],) * 2
        found += quick if is_quick else full
    return tuple(found)


def mode_of(settings: Settings) -> str:
    """The drafter that `config_lade` selects for these settings."""
    given = "lookahead" if any(name in settings for name in WINDOW_SIZES) else LookaheadConfig().mode
    return str(settings.get("MODE", given))
