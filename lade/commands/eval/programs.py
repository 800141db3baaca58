"""Generated programs: extracted from answers, joined with their tests, and run in a separate process with limits.

The limits bound time and memory. They are no sandbox: a program can read, write and connect wherever the user can. On
Linux all processes that it has started end with it; elsewhere those of its own session.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lade.commands.eval.tasks import Question, class_opening

WARNING = """warning: --run_code runs programs that the model wrote, with limits of time and memory but with your rights:
they can read and change your files and use the network. Do it in a container or in a virtual machine.
"""
CHILD = Path(__file__).with_name("child.py")
GRACE_SECONDS = 30  # for the child to begin, and to end what a program has started
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread's stack counts as memory
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program."""

    seconds: int = 10
    megabytes: int = 2048

    def __post_init__(self) -> None:
        if self.seconds < 1:
            raise ValueError(f"--code_seconds must be at least 1, got {self.seconds}")
        if self.megabytes < 128:
            raise ValueError(f"--code_megabytes must be at least 128, got {self.megabytes}")


@dataclass(frozen=True, slots=True)
class Program:
    """A program that ends without an exception where the answer is right."""

    source: str
    unit_tests: tuple[str, ...] = ()  # test cases in it that are to be run


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: passed, failed (an exception or a test), timeout, memory, or crashed."""

    kind: str
    error: str = ""


def problem() -> str | None:
    """Why programs cannot be run with limits here; None where they can."""
    return None if os.name == "posix" else "limits of time and memory need a POSIX system"


def run_program(program: Program, limits: Limits) -> Outcome:
    """Run it in an empty folder, without input, output and most of the environment."""
    request = {
        "program": program.source,
        "unit_tests": program.unit_tests,
        "seconds": limits.seconds,
        "megabytes": limits.megabytes,
        "parent": os.getpid(),
    }
    with tempfile.TemporaryDirectory(prefix="lade-eval-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        try:
            answer, _ = process.communicate(json.dumps(request).encode(), timeout=limits.seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome("crashed", "the process that watches over the program did not answer")
        finally:
            _end(process)
    return _outcome(answer, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the child end all that the program has started, and wait for it."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:  # the program has stopped it
        process.kill()
        process.wait()


def _outcome(answer: bytes, status: int) -> Outcome:
    try:
        if status == 0:
            return Outcome(**json.loads(answer))
    except (ValueError, TypeError):
        pass
    return Outcome("crashed", f"the process that watches over the program ended with status {status}")


def program_of(task_name: str, question: Question, answer: str, is_continuation: bool) -> Program:
    """The answer with what its task puts around it. is_continuation: the answer goes on with the question's text."""
    return {"humaneval": _humaneval, "mbpp": _mbpp, "classeval": _classeval}[task_name](
        question, answer, is_continuation
    )


def _humaneval(question: Question, answer: str, is_continuation: bool) -> Program:
    prompt, name = question.row["prompt"], question.row["entry_point"]
    header = re.compile(rf"^def\s+{re.escape(name)}\b", re.MULTILINE)
    code = answer if is_continuation else code_in(answer, header)
    if not is_continuation and header.search(code):
        before = header.search(prompt)
        prompt = prompt[: before.start()] if before else ""  # imports and helpers, which an answer may leave out
    return Program(f"{prompt}{code}\n{question.row['test']}\ncheck({name})\n")


def _mbpp(question: Question, answer: str, is_continuation: bool) -> Program:
    row = question.row
    before = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    code = answer if is_continuation else code_in(answer)
    return Program("\n".join([before, code, *row["test_list"], ""]))


def _classeval(question: Question, answer: str, is_continuation: bool) -> Program:
    row = question.row
    if is_continuation:
        code = class_opening(row) + answer
    else:
        header = re.compile(rf"^class\s+{re.escape(row['class_name'])}\b", re.MULTILINE)
        code = "\n".join([*row.get("import_statement", ()), code_in(answer, header)])
    return Program(f"{code}\n{row['test']}\n", tuple(row["test_classes"]))


def code_in(answer: str, wanted: re.Pattern[str] | None = None) -> str:
    """The code of an answer: its first code block in which `wanted` is found, else its first one, else all of it."""
    blocks = [body for _, body in FENCE.findall(answer)]
    if not blocks:
        return answer
    return next((body for body in blocks if wanted is None or wanted.search(body)), blocks[0])
