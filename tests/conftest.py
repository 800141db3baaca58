"""Tiny random models, the switch that puts lade on for one test, and programs that run beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import lade
from lade import augment
from lade import config as lade_config

torch.set_num_threads(1)  # tiny models gain nothing from more
os.environ["LADE_CACHE"] = "0"  # no test depends on what this machine has measured before, nor leaves anything behind
VOCAB = 61
ROOT = Path(lade.__file__).parent.parent
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("USE_LADE", "LOAD_LADE", "LADE_"))
}
ENVIRONMENT["LADE_CACHE"] = "0"
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
_programs, _results = {}, {}
LEFT_OUT = pytest.StashKey[bool]()


def beside(program):
    """A fixture: what program() returns. It runs in a thread, one after another, while the tests before it go on.

    For programs in processes of their own, which take seconds to import torch and transformers. What they do in this process must
    not depend on what a test has changed, nor change anything itself. A worker of pytest-xdist does not know which tests will be
    its own: there they run when they are needed.
    """
    _programs[program.__name__] = program

    @pytest.fixture(name=program.__name__, scope="session")
    def result():
        return _results[program.__name__].result() if program.__name__ in _results else program()

    return result


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite is run by two processes; a run of some tests is not, and starts at once."""
    options = config.option
    narrowing = ("keyword", "markexpr", "lf", "failedfirst")  # the last two are not there without the cache plugin
    chosen = any(getattr(options, name, False) for name in narrowing)
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and not (chosen or options.collectonly)
    is_watched = options.usepdb or options.capture == "no"
    is_decided = getattr(options, "numprocesses", 0) is not None or hasattr(config, "workerinput")
    if is_whole and not (is_watched or is_decided):
        options.numprocesses, options.dist = 2, "worksteal"


def pytest_collection_modifyitems(config, items):
    """Long tests are chosen with LADE_LONG_TESTS=1, clients with -m: elsewhere they are not collected, and what is skipped is what
    cannot run here."""
    if "clients" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("clients")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("clients")]
    if os.environ.get("LADE_LONG_TESTS") != "1":
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = bool(left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_terminal_summary(terminalreporter, config):
    is_divided = getattr(config.option, "numprocesses", None)  # and collected elsewhere
    if config.stash.get(LEFT_OUT, is_divided and os.environ.get("LADE_LONG_TESTS") != "1"):
        terminalreporter.write_line("long tests were left out; LADE_LONG_TESTS=1 runs them")


def pytest_runtestloop(session):
    """Start the programs that the chosen tests need, in the order of the tests."""
    if session.config.option.collectonly:
        return
    thread = ThreadPoolExecutor(1)
    for item in session.items:
        for name in getattr(item, "fixturenames", ()):
            if name in _programs and name not in _results:
                _results[name] = thread.submit(_programs[name])


def pytest_sessionfinish(session):
    for result in _results.values():
        result.cancel()  # where the tests have ended early


def python(*arguments: str, folder: str | Path = "/", **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, without lade's variables."""
    command, environment = [sys.executable, *arguments], ENVIRONMENT | environment
    return subprocess.run(
        command, input="typed", capture_output=True, text=True, check=False, env=environment, cwd=folder
    )


def tiny_llama(dtype: torch.dtype = torch.float64, attention: str = "sdpa", **changes) -> LlamaForCausalLM:
    """A random Llama; hidden size, layers and heads of Llama-2-7B are 4096, 32 and 32."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = LlamaConfig(**settings | changes)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(dtype).eval()
    model.generation_config.eos_token_id = None  # random models would stop anywhere; tests that need an end say so
    return model


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def lade_on(monkeypatch):
    """lade patched in and switched on; everything is put back afterwards."""
    before = lade_config.current_config()
    monkeypatch.setenv("USE_LADE", "1")
    monkeypatch.setattr(augment, "LEAST_TOKENS", 1)  # the loop must be right at any length
    lade.augment_all()
    lade.config_lade(ADAPTIVE=0)  # what pays is a matter of time, and tests are to do the same each time
    yield
    lade.restore_all()
    lade_config._default = before


def prompt(length: int = 24, batch_size: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids without special ones, and the mask that generate() would otherwise guess."""
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate_plain(model, inputs, **arguments):
    """generate() with lade switched off; lade's own switch, so the patch stays where it is."""
    before = os.environ.get("USE_LADE")
    os.environ["USE_LADE"] = "0"
    try:
        return model.generate(**inputs, **arguments)
    finally:
        if before is None:
            del os.environ["USE_LADE"]
        else:
            os.environ["USE_LADE"] = before


def inference_tensors(model) -> list[str]:
    """What a model or a part of it holds that was made in torch's inference mode, and could not be trained with."""

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from tensors(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from tensors(item)

    return [
        f"{part}.{name}"
        for part, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "_modules" and any(tensor.is_inference() for tensor in tensors(value))
    ]


class Recorder(BaseStreamer):
    """Remembers what it is given, shapes included."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")
