"""`python -m lade`: a program cannot tell it from `python`, but generate() runs with lookahead."""

import argparse
import importlib
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from support import BUNDLED, beside, generate_plain, prompt, python
from transformers import AutoModelForCausalLM

import lade
from lade import commands
from lade.commands import env, run
from lade.commands.after_import import call_after_import
from lade.commands.model import add_model_arguments, parse

NOSY = """
import sys, os
print(__name__, __file__, __package__, __doc__, __cached__, __builtins__, __spec__ and __spec__.name)
print(type(__loader__), sorted(globals()), sys.argv, sys.path[0], os.environ.get("USE_LADE") is None)
print(sys.modules["__main__"].__dict__ is globals(), [name for name in ("torch", "transformers") if name in sys.modules])
print(sys.stdin.read())
def fail():
    raise ValueError("as in plain")
"""
PROGRAMS = {
    "ends.py": NOSY,
    "fails.py": NOSY + "fail()",
    "interrupted.py": "raise KeyboardInterrupt",
    "leaves_with_3.py": "import atexit; atexit.register(print, 'the end'); raise SystemExit(3)",
    "broken.py": "def f(:",
    "folder/__main__.py": NOSY + "fail()",
    "package/__init__.py": "import sys; print(sys.argv)",
    "package/__main__.py": NOSY + "fail()",
    "hooked.py": "import sys; sys.excepthook = lambda *args: print(args[1], args[2].tb_frame.f_code.co_name)\n1 / 0",
    "spawns.py": """
import multiprocessing
def work(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
""",
}
COMMANDS = [
    ["ends.py", "-m", "lade", "--level", "3", "--", "-h"],
    ["link.py"],
    ["fails.py", "--debug"],
    ["interrupted.py"],
    ["leaves_with_3.py"],
    ["broken.py"],
    ["folder", "x"],
    ["hooked.py"],
    ["spawns.py"],
    ["-m", "package", "--level", "3"],
    ["-m", "no_such_module"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "link.py").symlink_to(root / "folder" / "__main__.py")
    return root


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_program_sees_what_python_would_show_it(folder, command):
    plain = python(*command, folder=folder)
    ahead = python("-m", "lade", "--window", "3", *command, folder=folder)
    assert ahead.returncode == plain.returncode
    # The switch is the one difference that a program may find.
    assert ahead.stdout == plain.stdout.replace(" True\n", " False\n", 1)
    assert ahead.stderr == plain.stderr


def test_a_missing_script(folder):
    missing = python("-m", "lade", "missing.py", folder=folder)
    assert missing.returncode == python("missing.py", folder=folder).returncode == 2
    assert "can't open file" in missing.stderr
    assert "missing.py" in missing.stderr
    assert "did you mean" not in missing.stderr
    assert "did you mean the command trace?" in python("-m", "lade", "traec", folder=folder).stderr


GENERATES = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.tensor([[int(token) for token in sys.argv[2].split(",")]])
print(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40).tolist())
"""
SUMMARY = re.compile(r"Generated tokens: (\d+) Total steps: (\d+)")
ARGUMENTS = [str(BUNDLED), ",".join(map(str, prompt(24)["input_ids"][0].tolist()))]


def generating(name: str, text: str, *program: str):
    with TemporaryDirectory() as folder:
        Path(folder, name).write_text(text)
        # On a busy machine plain steps may be what pays; and a tree would first run the model on each of its tokens.
        Path(folder, "settings.json").write_text('{"ADAPTIVE": 0, "MODE": "lookahead"}')
        options = ("--config", "settings.json", "--level", "3", "--debug")
        return python("-m", "lade", *options, *program, folder=folder)


@beside
def script():
    return generating("script.py", GENERATES, "script.py", *ARGUMENTS)


@beside
def package():
    """pytest, with the same lines as a test. It imports lade first, which is not whole when transformers is."""
    text = "\n    ".join(["import lade.augment\ndef test_it():", *GENERATES.strip().splitlines()])
    text = text.replace("sys.argv", f"{['', *ARGUMENTS]!r}")
    return generating("test_it.py", text, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_it.py")


def test_unmodified_programs_run_with_lookahead(script, package):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    expected = str(generate_plain(model, prompt(24), max_new_tokens=40).tolist())
    for done in (script, package):
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        tokens, steps = map(int, SUMMARY.search(done.stdout).groups())
        assert tokens == 40
        assert steps < tokens


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--level", "1", "x.py"], 2, "LEVEL must be an integer from 2 to 64, got 1"),
        ([], 2, "must be given"),
        (["--level", "3", "-m"], 2, "must be given"),
        (["--lev", "3", "x.py"], 2, "unrecognized"),
        (["--version"], 0, lade.__version__),
        (["--help"], 0, "sub-commands:"),
    ],
)
def test_options_that_end_the_command(capsys, arguments, status, message):
    with pytest.raises(SystemExit) as end:
        commands.main(arguments)
    assert end.value.code == status
    printed = capsys.readouterr()
    assert message in (printed.err if status else printed.out)


def test_options_end_where_the_program_begins(monkeypatch):
    monkeypatch.setattr(lade.switch, "_default", lade.current_config())
    options, program = run.parse(["--level", "4", "--guess", "-1", "-m", "pkg", "-m", "x", "--window", "9"])
    assert (options.module, program) == (program, ["pkg", "-m", "x", "--window", "9"])
    assert sizes() == (4, 7, -1)


def sizes() -> tuple[int, int, int]:
    """N, W, G."""
    current = lade.current_config()
    return current.ngram_size, current.window_size, current.guess_set_size


@pytest.fixture
def settings(tmp_path, new_settings) -> Path:
    path = tmp_path / "settings.json"
    path.write_text('{"LEVEL": 4, "WINDOW_SIZE": 3}')
    return path


def test_settings_from_a_file(settings):
    run.parse(["--window", "9", "--config", str(settings), "x.py"])
    assert sizes() == (4, 9, 7)


def test_the_environments_file_reaches_the_program(settings):
    (settings.parent / "shows.py").write_text("import lade; print(lade.current_config().ngram_size)")
    shown = [
        python("-m", "lade", *options, "shows.py", folder=settings.parent, LADE_CONFIG="settings.json").stdout
        for options in ([], ["--level", "6"])
    ]
    assert shown == ["4\n", "6\n"]


@pytest.mark.parametrize("variable", [None, "LADE_CONFIG"])
def test_sub_commands_leave_the_users_file_alone(settings, monkeypatch, variable):
    """Their own defaults for the device hold only where no file is given."""
    if variable:
        monkeypatch.setenv(variable, str(settings))
    parser = argparse.ArgumentParser()
    add_model_arguments(parser, 8)
    parse(parser, ["--device", "cpu", "--guess", "5", *([] if variable else ["--config", str(settings)])])
    assert sizes() == (4, 3, 5)


def test_the_environment_can_say_no(tmp_path):
    (tmp_path / "note.py").write_text("import os; print(os.environ['USE_LADE'])")
    for given, expected in (({}, "1\n"), ({"USE_LADE": "0"}, "0\n")):
        assert python("-m", "lade", "note.py", folder=tmp_path, **given).stdout == expected


def test_call_after_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_a", "late_b"):
        (tmp_path / f"{name}.py").write_text("import late_seen\nlate_seen.names.append(__name__)")
    (tmp_path / "late_c.py").write_text("import late_seen\n1 / len(late_seen.names)")
    (tmp_path / "late_seen.py").write_text("names = []")
    before = list(sys.meta_path)
    calls = []
    names = ["late_a", "late_b", "late_c", "sys"]
    call_after_import(names, lambda: calls.append([*sys.modules["late_seen"].names]), needed="other")
    with pytest.raises(ZeroDivisionError):  # a module that fails has not been imported
        importlib.import_module("late_c")
    for name in ("late_c", "late_b", "late_a"):
        importlib.import_module("late_seen").names += ["retry"] if name == "late_c" else []
        assert not calls
        importlib.import_module(name)
    assert calls == [["retry", "late_b", "late_a"]]
    assert sys.meta_path == before
    assert importlib.reload(sys.modules["late_b"]).__loader__.get_source("late_b").startswith("import")
    assert len(calls) == 1
    call_after_import(["late_a"], lambda: calls.append("at once"), needed="other")
    assert calls[1:] == ["at once"]


def test_env(capsys, monkeypatch, lade_on):
    monkeypatch.setenv("LADE_SOMETHING", "seen")
    assert commands.main(["env"]) == 0
    out = capsys.readouterr().out
    assert set(env.PATCHED_METHODS) == set(lade.augment._originals)
    for expected in (
        f"version: {lade.__version__}",
        "patched in this process: yes",
        "USE_LADE=1",
        "LADE_SOMETHING=seen",
        "LEVEL=5",
    ):
        assert expected in out
    lade.restore_all()
    monkeypatch.setattr(env, "PATCHED_METHODS", ("generate", "_sampel"))
    assert "patched in this process: no" in env.report()
    assert "MISSING _sampel" in env.report()


def test_env_says_what_a_gpu_uses_by_default(monkeypatch):
    monkeypatch.setenv("LADE_CACHE", "0")
    found = SimpleNamespace(name="a GPU", total_memory=80 << 30, major=8, minor=0)
    for name, value in (("count", 1), ("name", found.name), ("properties", found), ("capability", (8, 0))):
        function = f"{'' if name == 'count' else 'get_'}device_{name}"
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert "cuda:0: a GPU, 80 GiB, compute capability 8.0; used by default (docs/gpu.md): graph\n" in env.report()
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert "(docs/gpu.md): neither graph nor kernel\n" in env.report()


def test_env_says_what_is_wrong_with_the_settings(settings, monkeypatch):
    monkeypatch.setenv("LADE_CONFIG", str(settings))
    assert "LEVEL=4" in env.report()
    monkeypatch.setattr(lade.switch, "_environment_is_read", False)
    settings.write_text("{")
    assert "WRONG: LADE_CONFIG=" in env.report()


def test_env_does_not_import_transformers():
    """Which takes seconds."""
    program = "import sys; from lade.commands import main; main(['env']); print('transformers' in sys.modules)"
    assert python("-c", program).stdout.endswith("\nFalse\n")
