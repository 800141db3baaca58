"""Calls whose forwards run on fixed shapes beside plain generate()."""

import torch

import lade
from support.models import generate_plain

NEW = {"max_new_tokens": 32}


def both(model, inputs, **arguments):
    """The output without lade and with it, sampled ones from the same seed."""
    torch.manual_seed(3)
    expected = generate_plain(model, inputs, **NEW | arguments)
    torch.manual_seed(3)
    return expected, model.generate(**inputs, **NEW | arguments)


def check(expected, found, compiled=True, captured=False):
    """Equal, with fewer steps than tokens, and every block went the way it was to go."""
    stats = lade.last_stats()
    assert torch.equal(expected, found)
    assert stats.fallback_reason is None
    assert stats.steps < expected.shape[1]
    assert stats.compiled_steps == (stats.steps - 1 if compiled else 0)
    assert stats.captured_steps == (stats.steps - 1 if captured else 0)
    return stats
