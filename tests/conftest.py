"""How the suite runs. The fixtures that several test files take are in tests/support/fixtures.py."""

from __future__ import annotations

import atexit
import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ["LADE_CACHE"] = "0"  # no test depends on what this machine has measured before, nor leaves anything behind
LEFT_OUT = pytest.StashKey[bool]()
FORKS = {"AtTerminal", "forked", "ranks"}  # what test files import from support
pytest.register_assert_rewrite("support")  # before it is imported


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite is run by a process per core, two to eight; a run of some tests is not, and starts at once."""
    options = config.option
    narrowing = ("keyword", "markexpr", "lf", "failedfirst")  # the last two are not there without the cache plugin
    chosen = any(getattr(options, name, False) for name in narrowing)
    is_whole = config.args_source is config.ArgsSource.TESTPATHS and not (chosen or options.collectonly)
    is_watched = options.usepdb or options.capture == "no"
    is_decided = getattr(options, "numprocesses", 0) is not None or hasattr(config, "workerinput")
    if is_whole and not (is_watched or is_decided):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
        options.numprocesses, options.dist = min(8, max(2, cores)), "worksteal"


def pytest_configure(config):
    """Not where tests are only handed out: importing torch and transformers takes seconds."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until everything is imported: see `pytest_collection_finish`
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(config, items):
    """Long tests are chosen with LADE_LONG_TESTS=1, clients with -m: elsewhere they are not collected, and what is
    skipped is what cannot run here."""
    if "clients" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("clients")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("clients")]
    if os.environ.get("LADE_LONG_TESTS") != "1":
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = bool(left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    # The process that others are forked from takes seconds to start: one worker gets all the files that need it.
    items.sort(key=lambda item: FORKS.isdisjoint(vars(item.module)))


def pytest_collection_finish():
    """What torch and transformers have imported is never garbage, and a full collection that looks through it takes 0.3
    s."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or triton's bindings complain at the end
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_terminal_summary(terminalreporter, config):
    is_divided = getattr(config.option, "numprocesses", None)  # and collected elsewhere
    if config.stash.get(LEFT_OUT, is_divided and os.environ.get("LADE_LONG_TESTS") != "1"):
        terminalreporter.write_line("long tests were left out; LADE_LONG_TESTS=1 runs them")


def pytest_runtestloop(session):
    """Start the programs that the chosen tests need, in the order of the tests."""
    if session.config.option.collectonly:
        return
    from support import processes

    thread = ThreadPoolExecutor(1)
    session.config.add_cleanup(lambda: thread.shutdown(wait=False, cancel_futures=True))  # the tests may end early
    for item in session.items:
        for name in getattr(item, "fixturenames", ()):
            if name in processes.programs and name not in processes.results:
                processes.results[name] = thread.submit(processes.programs[name])
