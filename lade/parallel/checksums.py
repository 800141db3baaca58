"""Checksums that tell whether all processes were given the same model, prompt and settings."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor

SAMPLED_PARAMETERS, SAMPLED_VALUES = 8, 16  # of a model's weights


def model_checksum(model: Any) -> int:
    """Checksum of the model's settings, its parameters' shapes, and a sample of their values."""
    parameters = list(model.named_parameters())
    names = [(name, tuple(part.shape), str(part.dtype)) for name, part in parameters]
    step = max(1, len(parameters) // SAMPLED_PARAMETERS)
    samples = []
    for _, part in parameters[::step]:
        if part.device.type != "meta":  # offloaded
            flat = part.detach().reshape(-1)
            samples.append(flat[:: max(1, math.ceil(flat.numel() / SAMPLED_VALUES))])
    return checksum_of(names, plain_values(model.config.to_dict()), *samples)


def plain_values(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings whose values mean the same in every process."""
    kinds = (bool, int, float, str, list)
    return {name: value for name, value in settings.items() if isinstance(value, kinds) and name != "_name_or_path"}


def checksum_of(*subjects: Any) -> int:
    """63-bit checksum of tensors or JSON-compatible values."""
    digest = hashlib.sha256()
    for subject in subjects:
        if isinstance(subject, Tensor):
            digest.update(f"{subject.dtype}{tuple(subject.shape)}".encode())
            digest.update(subject.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        else:
            digest.update(json.dumps(subject, sort_keys=True, default=str).encode())
        digest.update(b"|")
    return int.from_bytes(digest.digest()[:8], "little") >> 1
