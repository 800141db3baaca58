"""Copies between the host and a device that do not make the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device. CUDA copies it from pinned memory, in the order of the current stream, while the host goes on.

    For tensors of one step, not for those that outlive it: on another stream the copy may not have arrived. `host` itself on a CPU.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
