"""The Triton kernel's first use for each kind of call runs beside the definition; where they differ, the definition serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lade.kernels.reference import reference_block_attention

# How far the kernel may be from the definition, relative to the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
MOST_ROWS, LEAST_ROWS = 128, 16  # of a tile

_problems: dict[tuple[torch.device, torch.dtype, Hashable], str | None] = {}  # None: the kernel was right


class _PerThread(threading.local):
    is_trying = False


_per_thread = _PerThread()


def is_trying() -> bool:
    """Whether this thread is trying out the kernel, for which the host waits as it does at no other time."""
    return _per_thread.is_trying


def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """What was wrong with the kernel in this process, as a sentence; None as long as nothing was."""
    found = list(_problems.items())
    return next((problem for key, problem in found if problem and key[:2] == (device, dtype)), None)


def tried(
    kernel: Callable[..., Tensor], query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, **named: Any
) -> Tensor:
    """What `kernel` returns, or the definition where the kernel failed at this kind of call. Arguments as `block_attention`'s."""
    key = (query.device, query.dtype, kind_of(query, keys, values, **named))
    if key not in _problems:
        if is_capturing(query.device):  # nothing can be compared now
            return reference_block_attention(query, keys, values, packed, **named)
        _per_thread.is_trying = True
        try:
            _problems[key] = problem_of(
                kernel(query, keys, values, packed, **named), query, keys, values, packed, **named
            )
        except Exception as problem:  # whatever Triton raises
            first_line = str(problem).partition("\n")[0]
            _problems[key] = f"the kernel failed: {type(problem).__name__}: {first_line}"[:300]
        finally:
            _per_thread.is_trying = False
    serves = reference_block_attention if _problems[key] else kernel
    return serves(query, keys, values, packed, **named)


def kind_of(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    **_: Any,
) -> Hashable:
    """All by which Triton compiles another kernel, and the number of splits: neither follows from the cache's capacity."""
    group = query.shape[1] // keys.shape[1]
    rows = min(max(power_of_2(group * query.shape[2]), LEAST_ROWS), MOST_ROWS)
    sizes = (keys.shape[0] * keys.shape[1], keys.shape[3], values.shape[3])
    return (group, rows, *sizes, softcap is None, sinks is None, window is None)


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def problem_of(
    found: Tensor, query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, sinks: Tensor | None, **named: Any
) -> str | None:
    """How the kernel's output is wrong, as a sentence; None where it is right up to rounding.

    float32 is compared in float64, because its own products may be rounded to tf32. One key/value head at a time: the definition
    takes memory for all of its scores.
    """
    dtype, group = query.dtype, query.shape[1] // keys.shape[1]
    exact = torch.float64 if dtype.itemsize >= 4 else torch.float32
    error = scale = 0.0
    for head in range(keys.shape[1]):
        rows, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        inputs = (query[:, rows].to(exact), keys[:, one].to(exact), values[:, one].to(exact), packed)
        expected = reference_block_attention(*inputs, sinks=None if sinks is None else sinks[rows], **named)
        difference = (found[:, :, rows].to(exact) - expected).abs().max()
        if not difference.isfinite():
            return "the kernel gave what is no number"
        error, scale = max(error, float(difference)), max(scale, float(expected.abs().max()))
    error /= max(scale, torch.finfo(torch.float32).tiny)
    return None if error <= TOLERANCE[dtype] else f"the kernel was off by {error:.2g} of the largest value"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, during which nothing can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
