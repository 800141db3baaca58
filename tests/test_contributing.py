"""CONTRIBUTING.md: its setting and its command, put into a copy of lade, work, and its drafter as one of lade's own.
All of the page's drafter runs in test_docs.py."""

import re
import shutil
import subprocess
import sys

import pytest
from support import compare, prompt
from support.processes import ENVIRONMENT, ROOT

import lade
from lade.config import MODES

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block_after(heading):
    """The first block of code that is not run where it stands."""
    section = PAGE.partition(f"## {heading}\n")[2]
    return re.search(r"^```python no-run\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def lade_with(tmp_path_factory):
    """Runs `python -m lade` of a copy with both changes made. Returns its status, stdout and stderr."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "lade", folder / "lade", ignore=shutil.ignore_patterns("__pycache__"))
    setting, end = block_after("Adding a setting"), "    def __post_init__"
    change(folder / "lade" / "config.py", end, f"{setting}\n{end}")
    commands = folder / "lade" / "commands"
    (commands / "echo.py").write_text(block_after("Adding a command"), encoding="utf-8")
    change(commands / "__init__.py", "COMMANDS = {\n", 'COMMANDS = {\n    "echo": "say something",\n')

    def run(*arguments, program=("-m", "lade")):
        command, environment = [sys.executable, *program, *arguments], ENVIRONMENT | {"PYTHONPATH": str(folder)}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    return run


def test_the_command(lade_with):
    done = lade_with("echo", "one", "two")
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr
    assert re.search(r"echo +say something", lade_with("--help").stdout)


def test_the_setting(lade_with):
    program = """
import lade
from lade.commands import echo
lade.config_lade(NUM_ECHOES=2)
echo.main(["a"])
for wrong in ({"NUM_ECHOES": 10}, {"num_echoes": 1}):
    try:
        lade.config_lade(**wrong)
    except (TypeError, ValueError) as error:
        print(error)
"""
    done = lade_with(program=("-c", program))
    assert done.stdout.splitlines()[:2] == ["a", "a"], done.stderr
    assert "NUM_ECHOES must be an integer from 1 to 9, got 10" in done.stdout
    assert "'num_echoes'" in done.stdout
    assert "NUM_ECHOES" in done.stdout.splitlines()[3]


def test_a_drafter_of_lades_own(model, lade_on, monkeypatch, tmp_path):
    """A file, and a line in the table of modes."""
    section = PAGE.partition("## Adding a drafter\n")[2].partition("```python\n")[2]
    code = section.partition("from lade.drafting import register_drafter\n")[0]
    (tmp_path / "lookup_drafter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(MODES, "lookup", "lookup_drafter:LookupDrafter")
    lade.config_lade(MODE="lookup", MAX_BLOCK=8)
    assert compare(model, prompt(9), max_new_tokens=60).steps < 60
