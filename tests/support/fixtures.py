"""Fixtures that several test files take. tests/conftest.py makes them known to all."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import lade
from lade import augment, switch
from lade.common import notices
from lade.common.compat import require_names
from lade.config import MODES, LookaheadConfig
from lade.models import eligibility, foreign, self_check
from support.comparison import note_calls
from support.graphs import graphs, on_cuda, static_blocks  # noqa: F401
from support.models import tiny_llama
from support.processes import BUNDLED, ROOT

for kind in (torch.cuda, torch.xpu, torch.mtia):  # not where forked processes import it: asking spoils CUDA for them
    if not kind.is_available():  # torch would keep each seed until there is one, with a stack trace: a millisecond
        kind.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def no_drafter_stays():
    """Drafters that a test registers are gone after it."""
    before = dict(MODES)
    yield
    for mode in MODES.keys() - before.keys():
        del MODES[mode]


@pytest.fixture
def modes_of_tests(monkeypatch):
    """Modes of torch that count operations, or stand in for a device, are not a user's."""
    monkeypatch.setattr(foreign, "torch_modes", list)


@pytest.fixture
def new_settings(monkeypatch):
    """Settings as in a new process, with nothing said yet; those before are put back."""
    monkeypatch.setattr(switch, "_default", LookaheadConfig())
    monkeypatch.setattr(switch, "_environment_is_read", False)
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.delenv("LADE_CONFIG", raising=False)


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Of the bundled model."""
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="session")
def random_model() -> LlamaForCausalLM:
    """Of the bundled tokenizer. Writes nonsense that is split into other tokens when it is read as text."""
    return tiny_llama(vocab_size=4096)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> str:
    """A folder with a random model and the bundled tokenizer, for commands whose figures are not looked at."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 4096, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    tiny_llama(torch.float32, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def module(monkeypatch):
    """Imports a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@functools.cache
def names_are_there():
    """What each patch checks, for 4 ms: here once."""
    require_names()


@pytest.fixture
def lade_on(monkeypatch):
    """lade patched in and switched on; everything is put back afterwards."""
    monkeypatch.setenv("USE_LADE", "1")
    monkeypatch.setattr(eligibility, "LEAST_TOKENS", 1)  # the loop must be right at any length
    monkeypatch.setattr(self_check, "PAYS", 0)  # and unknown code is tried out at once
    monkeypatch.setattr(switch, "_default", switch._default)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "require_names", names_are_there)
        lade.augment_all()
    lade.config_lade(ADAPTIVE=0)  # what pays is a matter of time, and tests are to do the same each time
    yield
    lade.restore_all()


@pytest.fixture
def trials(monkeypatch):
    """What was tried out."""
    return note_calls(monkeypatch, self_check, "trial_errors")


@pytest.fixture
def small_block(lade_on):
    """Steps of few tokens."""
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)
