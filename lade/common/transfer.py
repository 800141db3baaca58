"""Copies from the host to a device that do not make the host wait.

On CUDA they go through pinned memory, in the order of the current stream, while the host continues. `wait_for` waits
until the device has done its work, so that its time can be taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")
ON_HOST = ("cpu",)  # device types whose memory numpy can read


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can read a tensor without a copy."""
    return tensor.device.type in ON_HOST


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; `host` itself on a CPU, or if it is on the device already.

    For tensors of one step, not for those that outlive it: on another stream the copy may not have arrived.
    """
    if device.type != "cuda" or host.device.type != "cpu":  # other memory cannot be pinned
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait for an accelerator, so that the times are those of the forward; verification would wait for it anyway.

    On CUDA only for the current stream: a device-wide wait would abort a graph capture in another thread.
    """
    if device.type == "cpu":
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        torch.accelerator.synchronize(device)
