"""lade's version, and the versions of transformers and torch that it is made for. Imports neither of them."""

from __future__ import annotations

import functools

from packaging.version import Version

VERSION = "0.2.0"
OLDEST, NEWEST, FIRST_UNSUPPORTED = "5.8", "5.24", "6"  # of transformers; tested with the first two
TESTED = f"{OLDEST} to {NEWEST}"
TESTED_TORCH = "2.13"


def version_problem(found: str) -> str | None:
    """Why lade does not support this version of transformers, as a sentence; None if it does."""
    if Version(OLDEST) <= Version(found) < Version(FIRST_UNSUPPORTED):
        return None
    return f"lade needs transformers >={OLDEST},<{FIRST_UNSUPPORTED}, found {found}"


@functools.cache
def is_newer_than_tested(found: str) -> bool:
    """Whether this version of transformers is a later minor release than those tested."""
    return Version(found).release[:2] > Version(NEWEST).release[:2]
