"""Lines about work that takes a while: off with LADE_QUIET=1, or by the level of the logger "lade"."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("lade")


def notify(message: str, *args: object) -> None:
    """Say something in one line. message, args: as for the logger's methods."""
    if os.environ.get("LADE_QUIET", "").strip() != "1":
        logger.warning("lade: " + message, *args)


_said: set[str] = set()


def notify_once(message: str, *args: object) -> None:
    """`notify`, once per process and message."""
    text = message % args
    if text not in _said:
        _said.add(text)
        notify("%s", text)
