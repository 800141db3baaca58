"""Results of `benchmarks/gpu_check.py`: which GPUs use graphs and the kernel by default ("auto").

It has passed on an H200 and an H100 with torch 2.11. From that torch on, graphs are used on GPUs since Ampere, because
each graph is compared with the ordinary forward, and the kernel on GPUs of their compute capability. On any GPU the
check stores its result in the cache folder, for these versions of torch and lade, and that result then decides.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

from lade.common.cache_folder import folder
from lade.common.version import VERSION

UNPROVEN = (
    "the check has not passed here, nor on such a GPU with such a torch: python benchmarks/gpu_check.py runs it, and "
    "switches on what is right"
)
CHECKED_TORCH = (2, 11)
OLDEST_FOR_GRAPHS = (8, 0)  # compute capability: Ampere
CHECKED = (9, 0)  # compute capability of H100 and H200


def is_proven(device: torch.device, what: str) -> bool:
    """Whether the check has passed on this GPU, or if it has not been run here, on one like it.

    what: "graph" or "kernel".
    """
    path = path_of(device)
    try:
        if path is not None:
            return json.loads(path.read_text(encoding="utf-8"))[what] is True
    except (ValueError, LookupError, TypeError):
        return False
    except OSError:
        pass  # there is no result, or it cannot be read
    if device.type != "cuda" or torch.version.hip or torch_release() < CHECKED_TORCH:
        return False  # AMD's GPUs are of type cuda, too, and number their capabilities in another way
    capability = torch.cuda.get_device_capability(device)
    return capability >= OLDEST_FOR_GRAPHS if what == "graph" else capability == CHECKED


def torch_release() -> tuple[int, ...]:
    """Major and minor version of torch; empty if unknown."""
    try:
        return Version(torch.__version__).release[:2]
    except InvalidVersion:  # a build that somebody has named
        return ()


def store_proof(device: torch.device, has_passed: dict[str, bool]) -> Path | None:
    """Record what has passed, by "graph" and "kernel". Returns the file; None where none can be written."""
    path = path_of(device)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"gpu": name_of(device)} | has_passed), encoding="utf-8")
    return path


def name_of(device: torch.device) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{gpu}; torch {torch.__version__}; lade {VERSION}"


def path_of(device: torch.device) -> Path | None:
    found = folder()
    return None if found is None else found / f"gpu-{hashlib.sha256(name_of(device).encode()).hexdigest()[:24]}.json"
