"""Who proposes guesses: one contract, a registry of drafters by the name that MODE selects them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lade.config import MODES
from lade.drafting.base import Draft, Drafter, DraftRequest, Outcome
from lade.drafting.lookahead import LookaheadDrafter, lookahead_drafter
from lade.drafting.tree import TreeDrafter, tree_drafter

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "LookaheadDrafter",
    "Outcome",
    "TreeDrafter",
    "drafts_from",
    "make_drafter",
    "register_drafter",
]

_drafters: dict[str, Callable[[DraftRequest], Drafter]] = {}
_instead: ContextVar[Callable[[DraftRequest], Drafter] | None] = ContextVar("_instead", default=None)


def register_drafter(mode: str, make: Callable[[DraftRequest], Drafter]) -> None:
    """Let `config_lade(MODE=mode)` choose a drafter. make: called once for each call of generate().

    A drafter may propose any tokens: wrong ones cost time and never change an output. Raises TypeError for a mode that is no string.
    """
    if not isinstance(mode, str):
        raise TypeError(f"mode must be a string, got {mode!r}")
    MODES[mode] = None
    _drafters[mode] = make


register_drafter("lookahead", lookahead_drafter)
register_drafter("tree", tree_drafter)
register_drafter("auto", tree_drafter)


@contextmanager
def drafts_from(make: Callable[[DraftRequest], Drafter]) -> Iterator[None]:
    """Let this thread's calls have a drafter of `make` in place of the one that the settings ask for."""
    token = _instead.set(make)
    try:
        yield
    finally:
        _instead.reset(token)


def make_drafter(request: DraftRequest) -> Drafter:
    """The drafter that the settings ask for."""
    return (_instead.get() or _drafters[request.config.mode])(request)
