"""Drafters propose guesses: their interface, and a registry by the name that MODE selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from lade.common.notices import notify_once
from lade.config import MODES, LookaheadConfig
from lade.drafting.base import Draft, Drafter, DraftRequest, Explanation, Outcome
from lade.drafting.checked import CheckedDrafter
from lade.drafting.step_costs import MOST_PAPER_COST, assumed_costs, interpolated

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "Explanation",
    "Outcome",
    "drafts_from",
    "make_drafter",
    "register_drafter",
    "with_mode",
]

Maker = Callable[[DraftRequest], Drafter]
_instead: ContextVar[Maker | None] = ContextVar("_instead", default=None)


def register_drafter(mode: str, make: Maker) -> None:
    """Let `config_lade(MODE=mode)` choose a drafter of yours.

    make: called once for each call of generate(); returns a `Drafter`. A drafter may propose any tokens that the model
    knows: wrong ones only cost time. In half precision guesses can change the text at near ties, so there they must
    follow from the call alone, not from a clock, or the text may differ between runs. Raises TypeError for a mode that
    is not a string or a `make` that cannot be called, and ValueError for a mode of lade's own.
    """
    if not isinstance(mode, str):
        raise TypeError(f"mode must be a string, got {mode!r}")
    if not callable(make):
        raise TypeError(f"make must be callable, got {make!r}")
    built_in = [name for name, maker in MODES.items() if isinstance(maker, str)]
    if mode in built_in:
        raise ValueError(f"mode must not be one of {', '.join(map(repr, built_in))}, got {mode!r}")
    MODES[mode] = make


@contextmanager
def drafts_from(make: Maker) -> Iterator[None]:
    """Let this thread's calls have a drafter of `make` instead of the one that the settings select."""
    token = _instead.set(make)
    try:
        yield
    finally:
        _instead.reset(token)


def with_mode(config: LookaheadConfig, model: Any, num_rows: int) -> LookaheadConfig:
    """The settings with the mode that a call has where MODE leaves it open.

    If the window's sizes were given, as all scripts of the original do: the paper's window where its block is expected
    to pay, and the tree elsewhere.
    """
    if config.mode != "auto" or not config.prefers_window:
        return config
    window = replace(config, mode="lookahead")
    costs = assumed_costs(model, (), num_rows)
    pays = config.num_workers > 1 or interpolated(costs, window.max_block_tokens) <= MOST_PAPER_COST
    notify_once(
        "LEVEL, WINDOW_SIZE and GUESS_SET_SIZE were given without MODE: %s here (MODE='lookahead' and MODE='tree' choose)",
        "the paper's window runs" if pays else "the window's block would cost more than it yields, so the tree runs",
    )
    return window if pays else config


def make_drafter(request: DraftRequest) -> Drafter:
    """The drafter that the settings select. Drafts of users' drafters are checked."""
    instead, make = _instead.get(), MODES[request.config.mode]
    if instead is not None:
        return instead(request)
    return resolve_name(make)(request) if isinstance(make, str) else CheckedDrafter(make(request), request)
