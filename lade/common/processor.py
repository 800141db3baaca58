"""What the processor has for the products of a model on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

FP16 = "packed in float16"  # the kind of steps whose weights are `lade.forward.cpu.fp16_weights`


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether products of a few rows cost little more than that of one.

    That takes AVX-512 and, in bfloat16, its instructions for bfloat16, which processors with AMX have, too. Otherwise
    each row of 16 bits costs almost as much as the first.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    has_bfloat16: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return dtype.itemsize >= 4 or (dtype == torch.bfloat16 and has_bfloat16())
