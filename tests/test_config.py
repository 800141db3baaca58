"""Settings: what is accepted, what is refused and how, and that nothing is half-applied."""

import subprocess
import sys

import pytest

import lade
from lade import config
from lade.config import LookaheadConfig, current_config, is_enabled


@pytest.fixture(autouse=True)
def keep_config(monkeypatch):
    monkeypatch.setattr(config, "_default", LookaheadConfig())


def test_only_what_is_given_changes():
    lade.config_lade(LEVEL=4)
    assert current_config() == LookaheadConfig(ngram_size=4)
    lade.config_lade(WINDOW_SIZE=3, GUESS_SET_SIZE=-1, DEBUG=1, ALWAYS_FWD_ONE=0, POOL_FROM_PROMPT=False)
    assert current_config() == LookaheadConfig(4, 3, -1, 1, False, False)
    assert current_config().num_guesses == config.UNLIMITED_GUESSES
    lade.config_lade()
    assert current_config().window_size == 3


def test_the_originals_keywords_are_taken():
    lade.config_lade(SPLIT_FLAG=1, DIST_WORKERS=1, backend="nccl", USE_FLASH=0)
    assert current_config() == LookaheadConfig(dist_workers=1, backend="nccl")


def test_workers_of_the_environment(monkeypatch):
    assert current_config().num_workers == 1
    monkeypatch.setenv("DIST_WORKERS", "3")
    assert current_config().num_workers == 3
    assert lade.distributed()
    lade.config_lade(DIST_WORKERS=1)  # what the program says wins
    assert current_config().num_workers == 1
    assert not lade.distributed()


@pytest.mark.parametrize("value", ["0", "two", "-1", "2.5", "5000"])
def test_wrong_workers_of_the_environment(monkeypatch, value):
    monkeypatch.setenv("DIST_WORKERS", value)
    with pytest.raises(ValueError, match="DIST_WORKERS in the environment must be an integer from 1 to 4096") as error:
        lade.distributed()
    assert value in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [(name, value, "integer from") for name in ("LEVEL", "WINDOW_SIZE") for value in (0, -1, "5", 2.0, 10**9, True)]
    + [("LEVEL", 1, "2 to 64"), ("GUESS_SET_SIZE", -2, "-1"), ("GUESS_SET_SIZE", "all", "-1")]
    + [("DEBUG", -1, "integer"), ("DEBUG", "yes", "integer"), ("DIST_WORKERS", 0, "integer")]
    + [("ALWAYS_FWD_ONE", 2, "0 or 1"), ("POOL_FROM_PROMPT", "on", "0 or 1"), ("backend", "mpi", "nccl")],
)
def test_wrong_values_name_parameter_rule_and_value(name, value, rule):
    with pytest.raises(ValueError, match=name) as error:
        lade.config_lade(**{name: value})
    assert rule in str(error.value)
    assert repr(value) in str(error.value)


def test_nothing_is_half_applied():
    with pytest.raises(ValueError, match="GUESS_SET_SIZE"):
        lade.config_lade(LEVEL=7, WINDOW_SIZE=2, GUESS_SET_SIZE=-7)
    with pytest.raises(ValueError, match="tokens in a step"):
        lade.config_lade(LEVEL=64, WINDOW_SIZE=1000)
    with pytest.raises(ValueError, match="DIST_WORKERS"):
        lade.config_lade(LEVEL=7, DIST_WORKERS=0)
    with pytest.raises(TypeError, match="LEVELS"):
        lade.config_lade(LEVELS=7)
    assert current_config() == LookaheadConfig()


@pytest.mark.parametrize("value", ["1", "true", "YES", "On", " 1 "])
def test_switched_on(monkeypatch, value):
    monkeypatch.setenv("USE_LADE", value)
    assert is_enabled()


@pytest.mark.parametrize("value", ["0", "", "no", "off", "false", "2"])
def test_switched_off(monkeypatch, value):
    monkeypatch.setenv("USE_LADE", value)
    assert not is_enabled()


def test_every_public_name_exists():
    for name in lade.__all__:
        assert getattr(lade, name) is not None
    assert lade.distributed() is False


def test_wrong_transformers_version():
    code = "import transformers; transformers.__version__ = '4.57.0'; import lade; lade.augment_all()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError" in done.stderr
    assert ">=5.8,<6" in done.stderr
    assert "4.57.0" in done.stderr
