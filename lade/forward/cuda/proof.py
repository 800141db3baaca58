"""Results of `benchmarks/gpu_check.py`: where it has not passed, "auto" uses neither graphs nor kernel.

It has passed on an H200 with torch 2.11. From that torch on, this speaks for graphs on GPUs since Ampere, as each graph
is compared with the ordinary forward, and for the kernel on GPUs of the same compute capability. On any GPU the check
stores its result in the cache folder, for these versions of torch and lade, and that result then decides.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from packaging.version import Version

from lade.common.cache_folder import folder
from lade.common.version import VERSION

UNPROVEN = "it has not been checked on such a GPU: python benchmarks/gpu_check.py does so, and switches it on"


CHECKED_TORCH = (2, 11)
OLDEST_FOR_GRAPHS = (8, 0)  # compute capability: Ampere
CHECKED = (9, 0)  # compute capability of the H200


def is_proven(device: torch.device, what: str) -> bool:
    """Whether the check has passed on this GPU, else on one that speaks for it. what: "graph" or "kernel"."""
    path = path_of(device)
    if path is not None and path.exists():
        try:
            return json.loads(path.read_text(encoding="utf-8"))[what] is True
        except (OSError, ValueError, LookupError, TypeError):
            return False
    if device.type != "cuda" or Version(torch.__version__).release[:2] < CHECKED_TORCH:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= OLDEST_FOR_GRAPHS if what == "graph" else capability == CHECKED


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
