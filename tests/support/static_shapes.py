"""Calls whose forwards run on fixed shapes beside plain generate()."""

from functools import partial

from support.comparison import compare

NEW = {"max_new_tokens": 32}


def check(model, inputs=None, is_compiled=True, is_captured=False, **arguments):
    """`compare`, with fewer steps than tokens, and every block went the way it was to go."""
    stats = compare(model, inputs, **NEW | arguments)
    assert stats.steps < stats.generated_tokens
    assert stats.compiled_steps == (stats.steps - 1 if is_compiled else 0)
    assert stats.captured_steps == (stats.steps - 1 if is_captured else 0)
    return stats


check_captured = partial(check, is_compiled=False, is_captured=True)
