"""Fixtures that several test files take. tests/conftest.py makes them known to all."""

from __future__ import annotations

import functools

import pytest
from transformers import LlamaForCausalLM

import lade
from lade import augment, eligibility
from lade.compat import require_names
from lade.config import MODES, temporary_settings
from support.device_steps import calls  # noqa: F401
from support.graphs import captured, compiled, eager_steps, graphs, on_cuda, static_blocks  # noqa: F401
from support.models import tiny_llama


@pytest.fixture(autouse=True)
def no_drafter_stays():
    """Drafters that a test registers are gone after it."""
    before = dict(MODES)
    yield
    for mode in MODES.keys() - before.keys():
        del MODES[mode]


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@functools.cache
def names_are_there():
    """What each patch checks, for 4 ms: here once."""
    require_names()


@pytest.fixture
def lade_on(monkeypatch):
    """lade patched in and switched on; everything is put back afterwards."""
    monkeypatch.setenv("USE_LADE", "1")
    monkeypatch.setattr(eligibility, "LEAST_TOKENS", 1)  # the loop must be right at any length
    with temporary_settings():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(augment, "require_names", names_are_there)
            lade.augment_all()
        lade.config_lade(ADAPTIVE=0)  # what pays is a matter of time, and tests are to do the same each time
        yield
        lade.restore_all()
