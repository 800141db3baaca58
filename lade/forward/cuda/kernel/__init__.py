"""Attention of a block of q query tokens over a long key/value cache, by a Triton kernel or plain torch.

The cache is preallocated, [B, H_kv, C, D]: L committed slots, then the block's own keys and values. The prefix is dense
and read once for all query heads that share a key/value head. Visibility inside the block is a bit mask
(`packed_mask`). Importing this module does not import triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lade.forward.cuda.kernel.packed_mask import is_packed, left_padding, pack_mask, unpack_mask
from lade.forward.cuda.kernel.reference import reference_block_attention
from lade.forward.cuda.kernel.self_check import checked, kernel_problem

__all__ = [
    "block_attention",
    "is_packed",
    "kernel_problem",
    "left_padding",
    "pack_mask",
    "reference_block_attention",
    "unavailable_reason",
    "unpack_mask",
]

MAX_HEAD_DIM = 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Why the Triton kernel cannot run in this process, as a sentence; None when it can. Cached."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install lade[triton])"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.cuda is None:
        return "the kernel was written for NVIDIA GPUs, and this torch is not built for CUDA"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the kernel needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}"
    return None


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each block token over the prefix and the block tokens visible to it. Returns [B, q, H, D_v].

    query:   [B, H, q, D].
    keys, values: [B, H_kv, C, D] and [B, H_kv, C, D_v] with C >= L + q slots, any strides; unused slots must be finite.
    packed:  from `pack_mask`.
    scale:   factor of the scores.
    softcap: scores become softcap * tanh(score / softcap).
    sinks:   [H], an additional score per head whose weight is dropped (attention sink).

    The Triton kernel runs on CUDA if it supports the dtype and head size and passed its self-check (`kernel_problem`);
    otherwise plain torch. A token without visible keys gets zeros.
    """
    if torch.compiler.is_compiling():
        return _compiled_block_attention(query, keys, values, packed, scale, softcap, sinks)
    named: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    kernel = _kernel_for(query, keys, values)
    if kernel is None:
        return reference_block_attention(query, keys, values, packed, **named)
    return checked(kernel, query, keys, values, packed, **named)


def _kernel_for(query: Tensor, keys: Tensor, values: Tensor) -> Callable[..., Tensor] | None:
    """The Triton kernel if it supports these inputs, else None. Imports triton only if it does."""
    is_served = query.dtype == keys.dtype == values.dtype and query.dtype in KERNEL_DTYPES
    is_served = is_served and max(keys.shape[3], values.shape[3]) <= MAX_HEAD_DIM
    if not (query.is_cuda and is_served and unavailable_reason() is None):
        return None
    from lade.forward.cuda.kernel.triton_attention import triton_block_attention

    return triton_block_attention


@torch.library.custom_op("lade::block_attention", mutates_args=())
def _compiled_block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One opaque operation for torch.compile, which need not trace how a kernel is chosen and launched."""
    return block_attention(query, keys, values, packed, scale=scale, softcap=softcap, sinks=sinks)


@_compiled_block_attention.register_fake
def _result_like(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    batch_size, num_heads, num_queries, _ = query.shape
    return query.new_empty((batch_size, num_queries, num_heads, values.shape[3]))
