"""What proposes guesses: one interface, and a registry of drafters by the name that MODE selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pkgutil import resolve_name

from lade.config import MODES
from lade.drafting.base import Draft, Drafter, DraftRequest, Explanation, Outcome
from lade.drafting.checked import CheckedDrafter

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "Explanation",
    "Outcome",
    "drafts_from",
    "make_drafter",
    "register_drafter",
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


def make_drafter(request: DraftRequest) -> Drafter:
    """The drafter that the settings select. Drafts of users' drafters are checked."""
    instead, make = _instead.get(), MODES[request.config.mode]
    if instead is not None:
        return instead(request)
    return resolve_name(make)(request) if isinstance(make, str) else CheckedDrafter(make(request), request)
