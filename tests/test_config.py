"""Settings: what is accepted, what is refused and how, and that nothing is half-applied."""

import inspect
import json
import threading
from pathlib import Path

import pytest
from support import is_patched
from transformers import GenerationMixin

import lade
from lade import augment, config
from lade.config import LookaheadConfig
from lade.switch import current_config

pytestmark = pytest.mark.usefixtures("new_settings")


def test_only_what_is_given_changes():
    lade.config_lade(LEVEL=4)
    assert current_config() == LookaheadConfig(ngram_size=4, prefers_window=True)
    lade.config_lade(WINDOW_SIZE=3, GUESS_SET_SIZE=-1, DEBUG=1)
    assert current_config() == LookaheadConfig(4, 3, -1, 1, prefers_window=True)
    assert current_config().num_guesses == config.UNLIMITED_GUESSES
    lade.config_lade()
    assert current_config().window_size == 3
    lade.config_lade(
        **dict.fromkeys(config.IGNORED, 1), DIST_WORKERS=1, backend="nccl", USE_FLASH=0
    )  # the original's, too
    assert current_config() == LookaheadConfig(
        4, 3, -1, 1, prefers_window=True, dist_workers=1, backend="nccl", use_flash=False
    )


def test_sizes_leave_the_choice_to_the_call_unless_a_mode_is_named():
    assert current_config().mode == "auto"
    assert not current_config().prefers_window
    lade.config_lade(GUESS_SET_SIZE=3)
    assert (current_config().mode, current_config().prefers_window) == ("auto", True)
    assert current_config().max_block_tokens == 64  # of the window's and the tree's the larger one
    lade.config_lade(MODE="auto")
    assert not current_config().prefers_window
    lade.config_lade(LEVEL=4, MODE="tree", MAX_BLOCK=2, ADAPTIVE=0, SHARE=0)
    config = current_config()
    assert (config.mode, config.max_block, config.adaptive, config.share) == ("tree", 2, False, False)
    assert config.max_block_tokens == 2


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
    + [("MODE", "trees", "'lookahead', 'tree', 'auto'"), ("MAX_BLOCK", 1, "2 to 512"), ("MAX_BLOCK", 513, "2 to 512")]
    + [("ADAPTIVE", "1", "0 or 1"), ("SHARE", 3, "0 or 1")]
    + [("ADAPTIVE", 2, "0 or 1"), ("SHARE", "on", "0 or 1"), ("backend", "mpi", "nccl")],
)
def test_wrong_values_name_parameter_rule_and_value(name, value, rule):
    """Nothing is half applied."""
    with pytest.raises(ValueError, match=name) as error:
        lade.config_lade(**{"LEVEL": 7, "WINDOW_SIZE": 2, name: value})
    assert rule in str(error.value)
    assert repr(value) in str(error.value)
    assert current_config() == LookaheadConfig()


@pytest.mark.parametrize(
    ("name", "meant"), [("LEVELS", "LEVEL"), ("Window_Size", "WINDOW_SIZE"), ("BACKEND", "backend")]
)
def test_a_keyword_that_does_not_exist_suggests_the_right_one(name, meant):
    with pytest.raises(TypeError, match=f"no keyword '{name}'; did you mean {meant}\\?"):
        lade.config_lade(**{"DEBUG": 1, name: 4})
    with pytest.raises(TypeError, match="it has LEVEL, WINDOW_SIZE, "):
        lade.config_lade(nothing_like_it=4)
    with pytest.raises(TypeError, match="positional"):
        lade.config_lade(5, 7, 7)  # which would be another order in each version
    assert current_config() == LookaheadConfig()


def test_help_has_all_keywords_with_their_defaults():
    for name, field in config.SETTINGS.items():
        assert f"    {name}: {field.metadata['meaning'].split()[0]}" in lade.config_lade.__doc__
    assert "MAX_BLOCK: The most tokens that a step of the tree may have. Default: 64." in lade.config_lade.__doc__
    assert [*inspect.signature(lade.config_lade).parameters] == [*config.KEYWORDS]


def test_a_configuration_made_by_hand_is_checked_alike():
    assert LookaheadConfig(use_flash="auto", adaptive=0) == LookaheadConfig(adaptive=False)
    with pytest.raises(ValueError, match="LEVEL must be an integer"):
        LookaheadConfig(ngram_size=None)


@pytest.fixture
def settings_file(tmp_path):
    """Writes a file of settings, from what JSON is to be made of or from text as it is."""

    def write(content) -> Path:
        path = tmp_path / "settings.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def sizes() -> tuple[int, int, int]:
    """N, W, G."""
    return current_config().ngram_size, current_config().window_size, current_config().guess_set_size


def test_settings_from_a_file(settings_file):
    path = settings_file(
        {"LEVEL": 4, "SHARE": False, "POOL_FROM_PROMPT": 1, "backend": "gloo", "measured": {"LEVEL": 9}}
    )
    lade.config_lade(WINDOW_SIZE=2)
    lade.config_lade(CONFIG=str(path), GUESS_SET_SIZE=3)
    assert sizes() == (4, 2, 3)
    assert not current_config().share
    lade.config_lade(CONFIG=path, LEVEL=6)  # what is said in the call wins
    assert sizes() == (6, 2, 3)
    with pytest.raises(ValueError, match="LEVEL must be") as error:
        lade.config_lade(CONFIG=path, LEVEL=1)
    assert "settings.json" not in str(error.value)  # it is not the file that is wrong
    lade.config_lade(LEVEL=7)  # and so does what is said later
    assert sizes() == (7, 2, 3)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "must hold JSON"),
        ("[5, 7, 7]", "one JSON object, found list"),
        ({"CONFIG": "another.json"}, "'CONFIG', which must be one of"),
        ({"LEVEL": 1}, "LEVEL must be an integer from 2 to 64, got 1"),
        ({"LEVEL": 3, "WINDOW_SIZE": "7"}, "WINDOW_SIZE must be an integer from 1 to 1024, got '7'"),
        ({"LEVEL": 64, "WINDOW_SIZE": 1000}, "tokens in a step"),
        ({"LEVEL": None}, "LEVEL=null"),
        (None, "must be a file that can be read: No such file"),
        ("[" * 100_000, "must hold JSON"),
        ({"LEVEL": [5]}, "a list as LEVEL, which must be a single value"),
        ({"LEVELS": 5}, f"which must be one of {', '.join(config.SETTINGS)}"),
    ],
)
@pytest.mark.parametrize("source", ["CONFIG", "LADE_CONFIG"])
def test_wrong_files_are_named_and_change_nothing(settings_file, tmp_path, monkeypatch, content, rule, source):
    path = tmp_path / "missing.json" if content is None else settings_file(content)
    if source == "LADE_CONFIG":
        monkeypatch.setenv("LADE_CONFIG", str(path))
    for attempt in range(2):  # a wrong variable is as wrong the second time
        with pytest.raises(ValueError, match="CONFIG=") as error:
            lade.config_lade(**{"CONFIG": path, "DEBUG": attempt} if source == "CONFIG" else {"DEBUG": attempt})
        assert rule in str(error.value)
        assert f"{source}={str(path)!r}" in str(error.value)
    assert current_config() == LookaheadConfig()


def while_inside(monkeypatch, owner, name, other):
    """A thread that runs `other`. The first call of `owner.name` starts it, and gives it time to end."""
    function, thread = getattr(owner, name), threading.Thread(target=other)

    def watched(*args, **kwargs):
        if thread.ident is None:
            thread.start()
            thread.join(0.3)  # one that waits its turn does not end before this call does
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    return thread


def test_threads_lose_no_setting(monkeypatch):
    thread = while_inside(monkeypatch, config.dataclasses, "replace", lambda: lade.config_lade(WINDOW_SIZE=3))
    lade.config_lade(LEVEL=4)
    thread.join()
    assert sizes()[:2] == (4, 3)


def test_threads_patch_once(monkeypatch):
    originals = {name: vars(GenerationMixin)[name] for name in ("generate", "_sample", "_beam_search")}
    thread = while_inside(monkeypatch, augment, "require_names", lade.augment_all)
    lade.augment_all()
    thread.join()
    assert vars(GenerationMixin)["_sample"].__wrapped__ is originals["_sample"]
    lade.restore_all()
    assert {name: vars(GenerationMixin)[name] for name in originals} == originals


def test_the_file_of_the_environment_replaces_the_defaults(settings_file, monkeypatch):
    monkeypatch.setenv("LADE_CONFIG", str(settings_file({"LEVEL": 4, "WINDOW_SIZE": 3})))
    lade.config_lade(LEVEL=6)
    assert sizes() == (6, 3, 7)
    settings_file("not read again")
    lade.config_lade(GUESS_SET_SIZE=1)
    assert sizes() == (6, 3, 1)


def test_augment_all_reads_the_file_of_the_environment(settings_file, monkeypatch):
    monkeypatch.setenv("LADE_CONFIG", str(settings_file({"LEVEL": 1})))
    lade.restore_all()
    with pytest.raises(ValueError, match="LADE_CONFIG"):
        lade.augment_all()
    assert not is_patched()
    settings_file({"LEVEL": 4})
    lade.augment_all()
    lade.restore_all()
    assert sizes() == (4, 7, 7)


def test_every_public_name_exists():
    for name in lade.__all__:
        assert getattr(lade, name) is not None


def test_wrong_transformers_version(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    with pytest.raises(ImportError, match=r">=5\.8,<6") as error:
        lade.augment_all()
    assert "4.57.0" in str(error.value)
    assert not is_patched()
