"""The versions of transformers that lade was tested with. Imports neither torch nor transformers. Floor 0."""

from __future__ import annotations

from packaging.version import Version

OLDEST, FIRST_UNSUPPORTED = "5.8", "6"


def version_problem(found: str) -> str | None:
    """What is wrong with this version of transformers, as a sentence; None for one that lade was made for."""
    if Version(OLDEST) <= Version(found) < Version(FIRST_UNSUPPORTED):
        return None
    return f"lade needs transformers >={OLDEST},<{FIRST_UNSUPPORTED}, found {found}"
