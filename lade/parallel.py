"""Which device this process should use, and whether it is one of several. Floor 3."""

from __future__ import annotations

import os

import torch


def distributed() -> bool:
    """Whether lookahead is split over several processes; not yet, so always False."""
    return False


def get_device() -> int | str:
    """The device for this process's model: the GPU numbered LOCAL_RANK (0 when unset), or "cpu" without a GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else "cpu"
