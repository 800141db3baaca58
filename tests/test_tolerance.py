"""The comparison behind all self-checks: rounding passes, anything else is told by its size."""

import pytest
import torch
from support import prompt

import lade
from lade.common.tolerance import TOLERANCE, excess, logits_error
from lade.models import adapter_for


def test_logits_error():
    expected = torch.tensor([[1.0, -4.0, -torch.inf]])
    assert logits_error(expected.clone(), expected) is None
    assert logits_error(expected + 2e-5, expected) is None
    assert logits_error(expected + 0.4, expected) == pytest.approx(0.1)
    assert logits_error(expected.nan_to_num(neginf=0), expected) == torch.inf
    assert logits_error(expected * torch.nan, expected) is not None


@pytest.mark.parametrize("what", TOLERANCE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_relative_to_the_largest_value(what, dtype):
    bound = TOLERANCE[what][dtype]
    assert excess(50 * bound, 100.0, what, dtype) is None
    assert excess(200 * bound, 100.0, what, dtype) == pytest.approx(2 * bound)
    assert excess(float("nan"), 100.0, what, dtype) is not None
    assert excess(0.0, 0.0, what, dtype) is None


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has no such setting")
def test_products_of_fewer_bits_by_the_newer_setting(lade_on, model):
    """Once it is set, torch refuses to read the older one."""
    assert adapter_for(model).is_exact
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        model.generate(**prompt(9), max_new_tokens=20)
        assert lade.last_stats().fallback_reason is None
        assert not adapter_for(model).is_exact
    finally:
        matmul.fp32_precision = before
    assert adapter_for(model).is_exact
