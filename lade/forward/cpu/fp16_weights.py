"""Weights in float16 that FBGEMM multiplies with rows in float32.

Most checkpoints are in 16 bits. Scaled by a power of two, such a weight is the same in float16 within float32's
rounding, also where the model was loaded in float32, of which a product then reads half as many bytes. Products are
summed in float32, in another order than torch's, and rounded once.

Source: the operators of torch's dynamic quantization, `quantized::linear_prepack_fp16` and `linear_dynamic_fp16`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import frexp, isfinite
from typing import Any

import torch
from torch import Tensor

from lade.common.processor import has_fast_products
from lade.common.trial import is_out_of_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENGINES = ("fbgemm", "x86")  # of torch.backends.quantized
# Elements are scaled to less than 2 to this power, since float16 holds numbers below 2**16. Small ones are rounded to
# multiples of 2**-24, if their row has a larger one than this: the error is then at most 2**-24 of that, a float32's.
LARGEST_EXPONENT, SMALL_ROW = 15, 0.5
MOST_SCALED = 60  # the exponent of a scale, with which inputs are multiplied
MORE_BITS = (1 << 13) - 1  # of a float32's mantissa, than float16 has
PART_ELEMENTS = 1 << 23  # of a weight, packed by one thread from a scaled copy
PARTS_AT_ONCE = 8
SCALED_BYTES = PARTS_AT_ONCE * PART_ELEMENTS * torch.float32.itemsize  # at most, while weights are packed


@dataclass(frozen=True, slots=True)
class Fp16Weight:
    """A scaled weight [N, K] in FBGEMM's opaque layout: parts of some rows each. scale: undoes the scaling."""

    parts: list[Any]
    scale: float

    def multiply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """input @ weight.T + bias, rounded once. input: [..., K]. Returns [..., N]."""
        rows = input.reshape(-1, input.shape[-1]).float() * self.scale
        products = [torch.ops.quantized.linear_dynamic_fp16(rows, part) for part in self.parts]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        if bias is not None:
            product += bias
        return product.to(input.dtype).view(*input.shape[:-1], product.shape[-1])


def pack_fp16(weights: Sequence[Tensor]) -> list[Fp16Weight | None]:
    """Weights [N, K] in float16; None for one that float16, times a power of two, does not hold."""
    with torch.inference_mode(False), torch.no_grad():
        exponents = [_exponent(weight) for weight in weights]
        parts = [
            (place, rows, exponent)
            for place, (weight, exponent) in enumerate(zip(weights, exponents, strict=True))
            if exponent is not None
            for rows in weight.detach().split(max(1, PART_ELEMENTS // weight.shape[1]))
        ]
        packed: list[list[Any]] = [[] for _ in weights]
        for start in range(0, len(parts), PARTS_AT_ONCE):
            some = parts[start : start + PARTS_AT_ONCE]
            scaled = [_scaled(rows, exponent) for _, rows, exponent in some]
            for (place, *_), part in zip(some, _in_threads(_packed_part, scaled), strict=True):
                packed[place].append(part)
    return [
        None if exponent is None or any(part is None for part in found) else Fp16Weight(found, 2.0**-exponent)
        for found, exponent in zip(packed, exponents, strict=True)
    ]


def _in_threads(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """The results of a function, which FBGEMM runs in one thread, by as many threads as torch uses."""
    try:
        with ThreadPoolExecutor(min(len(items), torch.get_num_threads())) as pool:
            return list(pool.map(function, items))
    except RuntimeError as error:  # no further threads: their number is limited, or the program is ending
        if is_out_of_memory(error):
            raise
        return list(map(function, items))


def _exponent(weight: Tensor) -> int | None:
    """The power of two to scale a weight by; None if not all elements are finite, or it is too large."""
    largest = max(abs(float(end)) for end in torch.aminmax(weight.detach()))
    if not isfinite(largest):
        return None
    exponent = LARGEST_EXPONENT - frexp(largest)[1]
    return exponent if abs(exponent) <= MOST_SCALED else None


def _scaled(rows: Tensor, exponent: int) -> Tensor | None:
    """Some rows of a weight times a power of two, in float32; None if float16 does not hold them."""
    if rows.dtype == torch.float32 and (rows.view(torch.int32) & MORE_BITS).max():
        return None
    scaled = torch.mul(rows, 2.0**exponent, out=torch.empty(rows.shape, dtype=torch.float32, device=rows.device))
    low, high = scaled.aminmax(dim=1)
    small = scaled[torch.maximum(-low, high) < SMALL_ROW]
    return scaled if torch.equal(small.half().float(), small) else None


def _packed_part(scaled: Tensor | None) -> Any:
    return None if scaled is None else torch.ops.quantized.linear_prepack_fp16(scaled, None)


def packs_fp16(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are packed in float16, if FBGEMM is there: those of float32, since half as many bytes
    are read, and those of 16 bits where the processor has no fast products of them.
    """
    is_slow = dtype in DTYPES and (dtype == torch.float32 or not has_fast_products(dtype))
    return is_slow and has_fbgemm(torch.backends.quantized.engine)


@functools.cache
def has_fbgemm(engine: str) -> bool:
    """Whether FBGEMM multiplies weights in float16 here, tried out. engine: of torch.backends.quantized."""
    if engine not in ENGINES:
        return False
    with torch.inference_mode():
        input = torch.eye(16, dtype=torch.float32, device="cpu")
        try:
            (packed,) = pack_fp16([input])
            return packed is not None and torch.equal(packed.multiply(input, None), input)
        except (RuntimeError, AttributeError):  # another processor, or a torch without the operators
            return False
