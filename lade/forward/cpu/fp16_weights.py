"""Weights in float16 that FBGEMM multiplies with rows in float32, for processors without fast products of a few rows.

Most checkpoints are in 16 bits. Scaled by a power of two, such a weight is the same number in float16, also where the
model was loaded in float32, of which a product then reads half as many bytes. Products are summed in float32 and
rounded once, as torch's own are.

Source: the operators of torch's dynamic quantization, `quantized::linear_prepack_fp16` and `linear_dynamic_fp16`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import frexp, isfinite
from typing import Any

import torch
from torch import Tensor

from lade.common.processor import has_fast_products

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENGINES = ("fbgemm", "x86")  # of torch.backends.quantized
# Elements are scaled to less than 2 to this power, since float16 holds numbers below 2**16. Small ones are rounded to
# multiples of 2**-24. The error, at most 2**-39 of the largest element, is far below a float32 product's own.
LARGEST_EXPONENT = 15
MOST_SCALED = 120  # the exponent of a scale, which a float32 must hold, and its inverse
MORE_BITS = (1 << 13) - 1  # of a float32's mantissa, than float16 has
PART_ELEMENTS = 1 << 23  # of a weight, packed at once by one thread from a scaled copy


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
        return product.to(input.dtype).view(*input.shape[:-1], -1)


def pack_fp16(weights: Sequence[Tensor]) -> list[Fp16Weight | None]:
    """Weights [N, K] in float16; None for one whose elements are not float16 numbers times a power of two.

    By as many threads as torch uses, because FBGEMM packs with one.
    """
    with torch.inference_mode(False), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        exponents = [_exponent(weight.detach()) for weight in weights]
        begun = [
            [pool.submit(_packed_part, rows, exponent) for rows in _split(weight.detach())]
            for weight, exponent in zip(weights, exponents, strict=True)
        ]
        packed = [[part.result() for part in parts] for parts in begun]
    return [
        None if exponent is None or any(part is None for part in parts) else Fp16Weight(parts, 2.0**-exponent)
        for parts, exponent in zip(packed, exponents, strict=True)
    ]


def _split(weight: Tensor) -> Sequence[Tensor]:
    return weight.split(max(1, PART_ELEMENTS // weight.shape[1]))


def _exponent(weight: Tensor) -> int | None:
    """The power of two to scale a weight by; None if not all elements are finite, or float32 does not hold it."""
    largest = max(abs(float(end)) for end in torch.aminmax(weight))
    if not isfinite(largest):
        return None
    exponent = LARGEST_EXPONENT - frexp(largest)[1]
    return exponent if abs(exponent) <= MOST_SCALED else None


def _packed_part(rows: Tensor, exponent: int | None) -> Any:
    """Some rows of a weight in FBGEMM's layout; None if float16 does not hold them."""
    if exponent is None or (rows.dtype == torch.float32 and (rows.view(torch.int32) & MORE_BITS).max()):
        return None
    scaled = torch.mul(rows, 2.0**exponent, out=torch.empty(rows.shape, dtype=torch.float32, device=rows.device))
    return torch.ops.quantized.linear_prepack_fp16(scaled, None)


def packs_fp16(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are packed in float16: where the processor's own products of a few rows are slow, and
    FBGEMM is there.
    """
    return dtype in DTYPES and not has_fast_products(dtype) and has_fbgemm(torch.backends.quantized.engine)


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
