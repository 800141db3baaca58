"""The Triton kernel's self-check: its first call of each kind is compared with the reference.

Where they differ, or the kernel raises, the reference is used for that kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lade.common.tolerance import excess, largest_difference, largest_value
from lade.common.trial import Trial
from lade.forward.cuda.kernel.reference import reference_block_attention

MOST_ROWS, LEAST_ROWS = 128, 16  # query rows of a tile

_trial = Trial()  # by device, dtype and variant


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel failed its self-check in this process, as a sentence; None if it did not."""
    found: list[Any] = list(_trial.reasons.items())
    return next((problem for (*place, _), problem in found if place == [device, dtype]), None)


def checked(
    kernel: Callable[..., Tensor], query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, **named: Any
) -> Tensor:
    """The kernel's output, or the reference's where the kernel failed its self-check.

    Arguments as for `block_attention`.
    """
    inputs = (query, keys, values, packed)
    kind = (query.device, query.dtype, variant_of(query, keys, values, **named))
    if not _trial.is_over(kind) and is_capturing(query.device):  # nothing can be compared during capture
        return reference_block_attention(*inputs, **named)

    def compare() -> str | None:
        return problem_of(kernel(*inputs, **named), *inputs, **named)

    is_wrong = _trial.reason(kind, compare, failure="the kernel failed: ") is not None
    return (reference_block_attention if is_wrong else kernel)(*inputs, **named)


def variant_of(
    query: Tensor, keys: Tensor, values: Tensor, *, softcap: float | None, sinks: Tensor | None, **_: Any
) -> Hashable:
    """Everything by which Triton compiles another kernel, and the number of splits; without the cache's capacity."""
    group = query.shape[1] // keys.shape[1]
    rows = min(max(power_of_2(group * query.shape[2]), LEAST_ROWS), MOST_ROWS)
    sizes = (keys.shape[0] * keys.shape[1], keys.shape[3], values.shape[3])
    return (group, rows, *sizes, softcap is None, sinks is None)


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def problem_of(
    found: Tensor, query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, sinks: Tensor | None, **named: Any
) -> str | None:
    """How the kernel's output is wrong, as a sentence; None if it is right up to rounding.

    float32 is compared in float64, because torch may round float32 products to tf32. One key/value head at a time, to
    limit the memory for the reference's scores.
    """
    dtype, group = query.dtype, query.shape[1] // keys.shape[1]
    exact = torch.float64 if dtype.itemsize >= 4 else torch.float32
    error = scale = 0.0
    for head in range(keys.shape[1]):
        rows, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        inputs = (query[:, rows].to(exact), keys[:, one].to(exact), values[:, one].to(exact), packed)
        expected = reference_block_attention(*inputs, sinks=None if sinks is None else sinks[rows], **named)
        difference = largest_difference(found[:, :, rows].to(exact), expected)
        if not isfinite(difference):
            return "the kernel returned NaN or infinity"
        error, scale = max(error, difference), max(scale, largest_value(expected))
    off = excess(error, scale, "attention", dtype)
    return None if off is None else f"the kernel was off by {off:.2g} of the largest value"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, during which nothing can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
