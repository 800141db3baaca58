"""Texts up to the last token that a family's limit allows, and one more."""

import pytest
from support import prompt, run_both
from support.families import FAMILIES
from transformers import DynamicCache

import lade

FAMILY = next(family for family in FAMILIES if family.name == "phi3-longrope-across")
BOUNDARY = 40  # where the model's frequencies switch


@pytest.mark.skipif(not FAMILY.exists, reason="this transformers has no Phi-3")
@pytest.mark.parametrize("num_slots", [BOUNDARY - 1, BOUNDARY, BOUNDARY + 1])
def test_up_to_the_boundary(num_slots, lade_on):
    """The last token of a text never goes through the model, so that a text may be one token longer than the
    boundary."""
    model, inputs = FAMILY.build(), prompt()
    assert model.config.original_max_position_embeddings == BOUNDARY
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)
    num_new = num_slots + 1 - inputs["input_ids"].shape[1]
    reason = run_both(model, inputs, max_new_tokens=num_new).fallback_reason
    if num_slots <= BOUNDARY:
        assert reason is None
    else:
        assert "whole cache change" in reason


@pytest.mark.skipif(not FAMILY.exists, reason="this transformers has no Phi-3")
def test_a_callers_empty_cache_stays_empty_behind_the_boundary(lade_on):
    """The model makes another one, unless the caller's has no layers yet."""
    model = FAMILY.build()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    stats = run_both(model, prompt(BOUNDARY + 8), cache=iter(caches).__next__, max_new_tokens=12)
    assert "computes it anew" in stats.fallback_reason
    assert [cache.get_seq_length() for cache in caches] == [0, 0]
    for cache in (None, DynamicCache):
        assert run_both(model, prompt(BOUNDARY + 8), cache=cache, max_new_tokens=12).steps < 12
