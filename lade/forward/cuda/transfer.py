"""Copies between the host and a captured forward: one for all of a step's inputs, one for what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.common.transfer import HOST, to_device

ALIGNMENT = 16  # bytes: no type of torch needs more


class TensorBuffer:
    """Tensors of fixed shapes on a device: views of one buffer, so that one copy from the host fills all of them."""

    def __init__(self, like: Mapping[str, Tensor], device: torch.device) -> None:
        """like: examples by name, on the host or on the device."""
        self._places: dict[str, tuple[int, int]] = {}  # by name, the first byte and the end
        end = 0
        for name, tensor in like.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + tensor.numel() * tensor.element_size()
            self._places[name] = start, end
        self._num_bytes = end
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self._buffer[slice(*self._places[name])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in like.items()
        }

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """values: tensors of the same names and shapes. One copy if all of them lie on the host."""
        if any(tensor.device.type != "cpu" for tensor in values.values()):
            for name, tensor in values.items():
                self.tensors[name].copy_(to_device(tensor, self._buffer.device))
            return
        packed = np.empty(self._num_bytes, dtype=np.uint8)
        for name, tensor in values.items():
            packed[slice(*self._places[name])] = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
        host = torch.from_numpy(packed)
        if self._buffer.is_cuda:  # a new piece of pinned memory, since the last one may still be read
            host = host.pin_memory()
        self._buffer.copy_(host, non_blocking=self._buffer.is_cuda)


class HostCopy:
    """Host memory for copies of a device's tensors of one shape and dtype, one at a time."""

    def __init__(self, like: Tensor) -> None:
        """like: an example, on the device."""
        is_on_cuda = like.device.type == "cuda"
        self._host = torch.empty(like.shape, dtype=like.dtype, device=HOST, pin_memory=is_on_cuda)
        self._is_done = torch.cuda.Event() if is_on_cuda else None

    def start(self, tensor: Tensor) -> None:
        """Begin to copy a tensor. The host continues."""
        self._host.copy_(tensor, non_blocking=self._is_done is not None)
        if self._is_done is not None:
            self._is_done.record(torch.cuda.current_stream(tensor.device))  # may differ from the current device

    def read(self) -> npt.NDArray[Any]:
        """The latest copy. Waits for it, unless the host has waited for the device meanwhile."""
        if self._is_done is not None:
            self._is_done.synchronize()
        return self._host.numpy().copy()
