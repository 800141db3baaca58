"""Runs one generated program in a child process and supervises it; `programs.py` starts this file by itself.

Reads a request from standard input as JSON: program, unit_tests (names of test cases in it, or none), seconds,
megabytes. Writes the outcome to standard output as JSON when the program and every process it started have ended.
Imports nothing of lade, to start fast.

The program runs in a process of its own, which reports the end of the tests through a pipe together with a secret word
that only the code around the program knows. A program cannot fake the outcome by writing to open files or by replacing
functions of the standard library; it could by searching the interpreter's memory for the word.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import signal
import sys
import types
import unittest
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

MAX_FILE_BYTES = 16 * 2**20
SPARE_BYTES = 64 * 2**20  # address space for the report of a program that has used up its own
REPORT_BYTES = 2**16  # what a pipe takes at least before a writer waits
KINDS = ("passed", "failed", "memory")  # what the program's process may report
MAX_ROUNDS = 1000  # of ending processes that start new ones
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux' prctl


def set_limits(seconds: int, megabytes: int) -> None:
    """Processor time, address space and the size of files, for this process and those it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20 + SPARE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(program: str, unit_tests: list[str]) -> tuple[str, str]:
    """Returns the outcome, one of KINDS, and what went wrong."""
    test = run_unit_tests  # as it is now
    module = types.ModuleType("program")  # a real one: dataclasses and pickle look themselves up in it
    sys.modules["program"] = sys.modules["__main__"] = module
    try:
        exec(compile(program, "program.py", "exec"), vars(module))
        if unit_tests:
            return test(module, unit_tests)
    except MemoryError:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        vars(module).clear()
        return "memory", "MemoryError"
    except BaseException as error:  # SystemExit as well: a program must not end before its tests
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def run_unit_tests(module: types.ModuleType, names: list[str]) -> tuple[str, str]:
    """Every test of these test cases has to pass, and there has to be one."""
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromTestCase(getattr(module, name)) for name in names)
    result = unittest.TestResult()
    suite.run(result)
    problems = result.failures + result.errors
    if any("MemoryError" in text.rsplit("\n", 2)[-2] for _, text in problems):
        return "memory", "MemoryError"
    if problems:
        return "failed", f"{len(problems)} of {result.testsRun} unit tests: {problems[0][1].strip().splitlines()[-1]}"
    return ("passed", "") if result.testsRun else ("failed", "no unit test was found")


def run_and_report(request: dict[str, Any], pipe: int, word: bytes) -> NoReturn:
    """Runs in the program's process. Threads that the program has left running are ignored."""
    write, leave, whoami = os.write, os._exit, os.getpid  # as they are now
    process = whoami()
    os.setsid()  # a signal to its own group does not reach the process that watches
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    set_limits(request["seconds"], request["megabytes"])
    outcome, error = run(request["program"], request["unit_tests"])
    if whoami() == process:  # and not a fork of it that the program has made
        write(pipe, word + outcome.encode() + b"\n" + error[:300].encode("utf-8", "replace"))
    leave(0)


def read_report(pipe: int, word: bytes) -> tuple[str, str] | None:
    """What the program's process said when its tests had ended; None when it did not get that far."""
    os.set_blocking(pipe, False)
    try:
        data = os.read(pipe, REPORT_BYTES)
    except BlockingIOError:  # nothing, and something that it has started keeps the pipe open
        return None
    _, found, report = data.rpartition(word)
    kind, _, error = report.decode("utf-8", "replace").partition("\n")
    return (kind, error) if found and kind in KINDS else None


def watch(request: dict[str, Any]) -> tuple[str, str]:
    """Run the program in a process of its own. Returns its outcome, one of `programs.py`'s, and what went wrong."""
    timeout = "timeout", f"not finished after {request['seconds']} s"
    reading, writing = os.pipe()
    word = secrets.token_bytes(32)
    program = os.fork()
    if program == 0:
        try:
            os.close(reading)
            run_and_report(request, writing, word)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        status = wait_for(program, request["seconds"])
    finally:
        end_all(program)
    if status in (None, -signal.SIGXCPU):  # the second: its threads together took longer than the clock
        return timeout
    report = read_report(reading, word) if status == 0 else None
    return report or ("crashed", f"the process ended with status {status} before its tests did")


def wait_for(process: int, seconds: float) -> int | None:
    """The exit status of a process, a signal's number below zero; None when it has not ended in time."""

    def expired(*_: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status)
    except TimeoutError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def end_all(program: int) -> None:
    """End the program's process and those that it has started; on Linux also those that have left its session.

    On Linux orphaned processes become children of this one, so all of them are found; elsewhere the group is killed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which asks for no more than this
    for _ in range(MAX_ROUNDS):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants(ancestor: int) -> list[int]:
    """All descendants of a process, from /proc; none without it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    found = {ancestor}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {ancestor})


def prctl(option: int, value: int) -> None:
    """Linux only; does nothing elsewhere."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    request: dict[str, Any] = json.loads(sys.stdin.read())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # watch() then ends what it has started
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != request["parent"]:  # it has ended before it could be waited for
        sys.exit(1)
    outcome, error = watch(request)
    json.dump({"kind": outcome, "error": error}, sys.stdout)


if __name__ == "__main__":
    main()
