"""Tolerances of all self-checks: the differences allowed between two computations of the same numbers.

Differences are relative to the largest expected value. The bounds lie well above what another order of summation
changes, and well below what a wrong mask, position or cache slot changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, backends

TOLERANCE = {
    # The attention kernel's output, against its definition computed in a wider type.
    "attention": {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    # Logits of an inlined, compiled or captured forward, against those of the ordinary one. In float32 at most 1.5e-6
    # was seen, in models of 24 layers.
    "logits": {torch.float64: 1e-9, torch.float32: 5e-5, torch.float16: 0.05, torch.bfloat16: 0.1},
}
# The trial block of an unknown model has no exact counterpart: its error must be so many times smaller than what an
# ignored mask causes. Correct models of 24 and 18 layers were 5 to 80 times below it in bfloat16, after 64 to 2,048
# tokens.
MASK_EFFECT_RATIO = {torch.float64: 1000.0, torch.float32: 1000.0, torch.float16: 2.5, torch.bfloat16: 2.5}
# The same where the effect is that of a rejected guess in a recurrent state. Most families compute their states in
# float32 whatever the dtype: 2e-6 of the effect was seen, and 2e-4 in one whose two ways to compute a state differ.
STATE_EFFECT_RATIO = {torch.float64: 1e5, torch.float32: 1e5, torch.float16: 10.0, torch.bfloat16: 10.0}

REDUCED_TOLERANCE = 1e-3  # of float32 whose products are computed with fewer bits
EXACT_PRODUCTS = ("highest", "ieee", "none")  # what torch calls products of float32 that are not cut to fewer bits


def product_precision() -> tuple[str, ...]:
    """torch's present settings for the precision of float32 products, on CUDA and on a CPU."""
    found = [
        getattr(getattr(device, "matmul", None), "fp32_precision", None) for device in (backends.cuda, backends.mkldnn)
    ]
    if None not in found:  # the older setting changes these too, and cannot be read once one of them has been set
        return tuple(map(str, found))
    return (torch.get_float32_matmul_precision(),)


def has_exact_products() -> bool:
    """Whether products of float32 have all its bits now."""
    return all(precision in EXACT_PRODUCTS for precision in product_precision())


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference. Equal entries count as 0, infinite ones too: some models make a logit -inf."""
    return float((found - expected).abs().masked_fill(found == expected, 0).max())


def largest_value(expected: Tensor) -> float:
    """The largest absolute value that is finite."""
    return float(expected.abs().masked_fill(expected.isinf(), 0).max())


def excess(difference: float, scale: float, what: str, dtype: torch.dtype) -> float | None:
    """The relative error where it is more than rounding, NaN included; otherwise None. what: a key of `TOLERANCE`."""
    error, bound = difference / max(scale, torch.finfo(torch.float32).tiny), TOLERANCE[what].get(dtype, 0.0)
    if dtype == torch.float32 and not has_exact_products():
        bound = max(bound, REDUCED_TOLERANCE)
    return None if error <= bound else error


def logits_error(found: Tensor, expected: Tensor) -> float | None:
    """The largest difference from the expected logits, relative to the largest of them; None if it is rounding."""
    return excess(largest_difference(found, expected), largest_value(expected), "logits", expected.dtype)
