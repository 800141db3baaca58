"""Settings files: one JSON object of keywords of `config_lade`, such as `lade bench --tune` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lade.common.notices import notify_once

NO_SETTINGS = ("note", "measured")  # keys that are no settings: a sentence, and measurements


def read_settings(path: str | os.PathLike[str], source: str, keywords: Collection[str]) -> dict[str, Any]:
    """The settings in a file, by keyword. Values are not checked. The note of a file without settings is logged.

    source: what named the file. keywords: those allowed. Raises ValueError, naming the file and the problem.
    """
    name, known = f"{source}={os.fspath(path)!r}", (*keywords, *NO_SETTINGS)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad JSON or encoding, or nesting too deep
        raise ValueError(f"{name} must hold JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold one JSON object, found {type(content).__name__}")
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"{name} has {key!r}, which must be one of {', '.join(known)}")
        if value is None:
            raise ValueError(f"{name} has {key}=null, which must have a value or be left out")
        if isinstance(value, (list, dict)) and key not in NO_SETTINGS:  # not shown: it may be nested too deeply
            raise ValueError(f"{name} has a {type(value).__name__} as {key}, which must be a single value")
    settings = {key: value for key, value in content.items() if key not in NO_SETTINGS}
    if not settings and isinstance(content.get("note"), str):
        notify_once("%s %s has no settings: %s", source, os.fspath(path), content["note"])
    return settings
