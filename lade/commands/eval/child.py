"""The process in which one generated program runs; started by `programs.py` as a file of its own. Floor 8.

Reads a request from standard input as JSON: program, unit_tests (names of test cases in it, or none), seconds, megabytes,
and the file that takes the outcome. Imports nothing of lade, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
import unittest
from typing import Any

MAX_FILE_BYTES = 16 * 2**20
SPARE_BYTES = 64 * 2**20  # address space for the report of a program that has used up its own


def set_limits(seconds: int, megabytes: int) -> None:
    """Processor time, address space and the size of files, for this process and those it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20 + SPARE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(program: str, unit_tests: list[str]) -> tuple[str, str]:
    """Returns the outcome, one of `programs.py`'s, and what went wrong."""
    module = types.ModuleType("program")  # a real one: dataclasses and pickle look themselves up in it
    sys.modules["program"] = module
    try:
        exec(compile(program, "program.py", "exec"), vars(module))
        if unit_tests:
            return run_unit_tests(module, unit_tests)
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


def main() -> None:
    request: dict[str, Any] = json.loads(sys.stdin.read())
    with open(request["outcome_file"], "w", encoding="utf-8") as file:
        set_limits(request["seconds"], request["megabytes"])
        outcome, error = run(request["program"], request["unit_tests"])
        json.dump({"outcome": outcome, "error": error[:300]}, file)
    os._exit(0)  # threads that the program has left running do not matter


if __name__ == "__main__":
    main()
