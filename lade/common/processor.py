"""What the processor has for the products of a model on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lade.common.cache_folder import cpu_name

MANY_THREADS = 9  # with which MKL is fast: tried with 16; with 4 it takes 1.7 times as long as packed weights
FP16 = "packed in float16"  # the kind of steps whose weights are `lade.forward.cpu.fp16_weights`


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether products of a few rows cost little more than that of one.

    That takes AVX-512 and, in bfloat16, its instructions for bfloat16, which processors with AMX have, too. Otherwise
    each row of 16 bits costs almost as much as the first.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return dtype.itemsize >= 4 or (dtype == torch.bfloat16 and _has("avx512_bf16"))


def has_amx() -> bool:
    """Whether products of bfloat16 are computed in tiles, by AMX."""
    return has_fast_products(torch.bfloat16) and _has("amx_tile")


def has_fast_mkl() -> bool:
    """Whether MKL, torch's library for products of float32, is fast for a few rows: with AVX-512 and many threads, but
    not on AMD's processors.
    """
    is_there = has_fast_products(torch.float32) and torch.backends.mkl.is_available() and "Intel" in cpu_name()
    return is_there and torch.get_num_threads() >= MANY_THREADS


def has_slow_mkl() -> bool:
    """Whether MKL takes longer for a prompt in float32 than FBGEMM: on AMD's processors, by half for 128 tokens."""
    return torch.backends.mkl.is_available() and "AMD" in cpu_name()


def packing_is_needless(dtype: torch.dtype) -> str | None:
    """Why packed weights of a dtype gain nothing over torch's own products, as a sentence; None if they do."""
    if dtype == torch.bfloat16 and has_amx():
        return "this processor has AMX, with which packed weights gain nothing in bfloat16"
    if dtype == torch.float32 and has_fast_mkl():
        return f"on this processor packed weights gain nothing in float32 with {MANY_THREADS} threads or more"
    return None


def _has(feature: str) -> bool:
    is_supported: Callable[[], bool] = getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)
    return is_supported()
