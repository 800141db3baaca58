"""Files that outlive a process: tables of step costs, in the user's cache folder.

One file per machine, shape of model, dtype and number of threads holds the tables of all kinds of steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("lade")

FORMAT = 3


def folder() -> Path | None:
    """LADE_CACHE, by default `lade` in the user's cache folder.

    None (store nothing) if LADE_CACHE is 0 or empty, or if there is no home directory.
    """
    chosen = os.environ.get("LADE_CACHE")
    if chosen is not None:
        return None if chosen.strip() in ("", "0") else Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lade"
    except RuntimeError:  # no home directory
        return None


def stored_files() -> list[Path]:
    """The files of stored tables."""
    path = folder()
    return [] if path is None else sorted(path.glob("step-costs-*.json"))


def load_table(model: Any, name: str) -> dict[int, float] | None:
    """A stored table, costs by size. None if there is none that can be read."""
    path = _path_of(model)
    content = None if path is None else _content(path)
    table = None if content is None else content["tables"].get(name)
    return None if table is None else {int(size): float(cost) for size, cost in table.items()}


def store_table(model: Any, name: str, costs: Mapping[int, float]) -> None:
    """Add a table to the model's file, unless one of that name is there.

    Does nothing where nothing can be written: a full disk, a folder of another user.
    """
    path = _path_of(model)
    if path is None:
        return
    content = _content(path) or {"format": FORMAT, "model": model_name(model), "tables": {}}
    if name in content["tables"]:
        return
    content["tables"][name] = {str(size): round(cost, 4) for size, cost in costs.items()}
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            temporary.chmod(0o644)  # other users of a shared folder read it as well
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def model_name(model: Any) -> str:
    """Identifies a file's content: the machine, the model's shape and dtype, and the threads."""
    device = model.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"
    size = sum(weight.numel() for weight in model.parameters())
    kind = f"{type(model).__name__} of {size} parameters in {model.dtype} on {device}"
    return f"{machine}, {torch.get_num_threads()} threads; torch {torch.__version__}; {kind}"


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The CPU's name from /proc/cpuinfo, else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _path_of(model: Any) -> Path | None:
    path = folder()
    if path is None:
        return None
    return path / f"step-costs-{hashlib.sha256(model_name(model).encode()).hexdigest()[:24]}.json"


def _content(path: Path) -> dict[str, Any] | None:
    """A file's content, checked; None if there is none that can be used."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        for table in found["tables"].values():
            costs = {int(size): float(cost) for size, cost in table.items()}
            ordered = [costs[size] for size in sorted(costs)]
            if min(costs) < 1 or ordered[0] != 1 or ordered != sorted(ordered) or not ordered[-1] < 1e6:
                raise ValueError("its costs do not rise from 1 with the size")
    except OSError:  # missing, or not readable
        return None
    except Exception as error:  # whatever a damaged file may lead to
        logger.warning("lade: the step costs in %s cannot be used: %s", path, error)
        return None
    return found
