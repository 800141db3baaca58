"""What the processor has for the products of a model on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lade.common.cache_folder import cpu_name

# With a fast MKL and more threads, packed weights gain nothing in float32: tried with 16; with 4 they multiply 4 to 8
# rows 1.7 times as fast.
MOST_THREADS = 8
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
    """Whether MKL, torch's library for products of float32, is fast for a few rows: with AVX-512, but not on AMD's."""
    return has_fast_products(torch.float32) and "Intel" in cpu_name()


def packing_is_needless(dtype: torch.dtype) -> str | None:
    """Why torch's own products of a few rows are as fast as packed ones, as a sentence; None if they are not."""
    if dtype == torch.bfloat16 and has_amx():
        return "this processor has AMX, with which torch's own bfloat16 products are as fast as packed ones"
    if dtype == torch.float32 and has_fast_mkl() and torch.get_num_threads() > MOST_THREADS:
        return f"with more than {MOST_THREADS} threads torch's own float32 products are as fast as packed ones here"
    return None


def _has(feature: str) -> bool:
    is_supported: Callable[[], bool] = getattr(torch.cpu, f"_is_{feature}_supported", lambda: False)
    return is_supported()
