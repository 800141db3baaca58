"""Programs in processes of their own, beside the tests where that saves time."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

import lade

ROOT = Path(lade.__file__).parent.parent
BUNDLED = ROOT / "models" / "stdlib-9m"
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("USE_LADE", "LOAD_LADE", "LADE_"))
}
ENVIRONMENT["LADE_CACHE"] = "0"
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
# Children are forked from a process that has imported these once and does nothing else.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed.run", "transformers.models.llama.modeling_llama", "lade.augment", "support"]
)
programs, results = {}, {}  # by name; tests/conftest.py starts those that the chosen tests need


def beside(program):
    """A fixture: what program() returns. It runs in a thread, one after another, while the tests before it go on.

    For programs in processes of their own, which take seconds to import torch and transformers. What they do in this
    process must not depend on what a test has changed, nor change anything itself. A worker of pytest-xdist does not
    know which tests will be its own: there they run when they are needed.
    """
    assert program.__name__ not in programs, f"two programs are called {program.__name__}"
    programs[program.__name__] = program

    @pytest.fixture(name=program.__name__, scope="session")
    def result():
        return results[program.__name__].result() if program.__name__ in results else program()

    return result


def python(*arguments: str, folder: str | Path = "/", **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, without lade's variables."""
    command, environment = [sys.executable, *arguments], ENVIRONMENT | environment
    return subprocess.run(
        command, input="typed", capture_output=True, text=True, check=False, env=environment, cwd=folder
    )


def forked(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `python("-c", program)`, in a process that finds torch, transformers, lade and `support` imported, but not
    used."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("out", "err")]
        process = SERVER.Process(target=_run, args=(program, ENVIRONMENT | environment, *map(str, paths)))
        process.start()
        process.join()
        return subprocess.CompletedProcess(program, process.exitcode, *(path.read_text() for path in paths))


def forked_twice(program: str) -> list[tuple[str, str]]:
    """What a program prints in two processes, one after the other, with one new cache folder: stdout, stderr."""
    with tempfile.TemporaryDirectory() as folder:
        found = [forked(program, USE_LADE="1", LADE_CACHE=folder) for _ in range(2)]
        return [(one.stdout, one.stderr) for one in found]


class AtTerminal:
    """A forked program behind a pseudo-terminal, read until something has appeared.

    terminal: the file descriptor of this end. seen: what was read and not yet asked for.
    """

    SET_UP = """
import os, signal, sys
os.setsid()  # so that the terminal becomes its own, with the signals of its keys
for number in range(3):
    os.dup2(os.open({name!r}, os.O_RDWR), number)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
"""

    def __init__(self, program: str, **environment: str) -> None:
        self.seen = ""
        self.terminal, theirs = os.openpty()
        program = self.SET_UP.format(name=os.ttyname(theirs)) + program
        self.process = SERVER.Process(target=_run, args=(program, ENVIRONMENT | environment))
        self.process.start()
        select.select([self.terminal], [], [], 300)  # before it has opened its end, ours must not be the only one
        os.close(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        os.close(self.terminal)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def press_until(self, key: str, pattern: str) -> str:
        """Press a key until the pattern appears: Ctrl-C is lost where it comes just before readline listens."""
        for _ in range(300):
            self.type(key)
            try:
                return self.read_until(pattern, seconds=1)
            except AssertionError:
                self.type(" ")  # wakes a readline that waits for a key and not for signals
                time.sleep(0.1)
        return self.read_until(pattern, seconds=1)

    def read_until(self, pattern: str, seconds: float = 300) -> str:
        """Everything up to the end of what matches, which is then taken as read."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not appear in {self.seen!r}"
            try:
                data = os.read(self.terminal, 4096)
            except OSError:  # Linux says so at the end
                data = b""
            assert data, f"the program ended before {pattern!r} appeared: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def wait(self, seconds: float = 300) -> int:
        """Its exit status. seen: everything up to its end."""
        with suppress(OSError):  # Linux says so at the end
            while select.select([self.terminal], [], [], seconds)[0] and (data := os.read(self.terminal, 4096)):
                self.seen += data.decode(errors="replace")
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"the program did not end: {self.seen!r}"
        return self.process.exitcode


def _run(program: str, environment: dict[str, str], *outputs: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    exec(compile(program, "<forked>", "exec"), {"__name__": "__main__"})
