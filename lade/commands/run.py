"""The launcher: runs an unmodified Python program with lade switched on, as `python` itself would run it.

The program is `__main__`, finds its own `sys.argv`, `sys.path` and `__file__`, and ends with its own exit status and
traceback. transformers is patched when the program has imported it, and not imported if the program does not.
"""

from __future__ import annotations

import argparse
import builtins
import difflib
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import lade
from lade.commands import COMMANDS
from lade.commands.after_import import call_after_import
from lade.commands.model import Parser

# Nothing can call generate() before both of these are there, and the patch needs no more than them.
PATCHED_MODULES = ("transformers.generation.utils", "transformers.modeling_utils")
USAGE = f"""lade [options] script.py [arguments]
       lade [options] -m package [arguments]
       lade {{{",".join(COMMANDS)}}} [arguments]"""
EPILOG = """The program runs with USE_LADE=1 unless the environment sets it; USE_LADE=0 lade script.py runs plain.
Processes that it starts inherit the environment, but not the patch unless they are forks; to start several workers, let
their launcher start lade: torchrun -m lade script.py.

sub-commands:
""" + "\n".join(f"  {name:<8}{text}" for name, text in COMMANDS.items())


def main(arguments: list[str]) -> int:
    """Run the program that `arguments` name after the options. Returns 0 when it has run to its end."""
    options, program = parse(arguments)
    os.environ.setdefault("USE_LADE", "1")
    call_after_import(PATCHED_MODULES, lambda: lade.augment_all(), needed="lade")
    try:
        if options.module:
            run_module(program[0], program[1:])
        else:
            run_script(program[0], program[1:])
    except BaseException as error:
        _leave_out_own_frames(error)
        raise
    return 0


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's options, applied, and the program with its arguments."""
    parser = Parser(
        "lade",
        "Run an unmodified Python program with lade switched on.",
        usage=USAGE,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lade {lade.__version__}")
    parser.add_argument("--level", type=int, metavar="N", help="length of an n-gram")
    parser.add_argument("--window", type=int, metavar="W", help="columns of the window")
    parser.add_argument("--guess", type=int, metavar="G", help="candidates per step")
    parser.add_argument("--config", metavar="FILE", help="settings in JSON, such as lade bench --tune writes")
    parser.add_argument(
        "--debug", action="store_true", help="print tokens, steps and their ratio after each generate()"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a package or module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    program = options.module or options.script
    if not program:
        parser.error("a script, -m package or a sub-command must be given")
    try:
        lade.config_lade(
            CONFIG=options.config,
            LEVEL=options.level,
            WINDOW_SIZE=options.window,
            GUESS_SET_SIZE=options.guess,
            DEBUG=1 if options.debug else None,
        )
    except ValueError as error:
        parser.error(str(error))
    return options, program


def run_module(name: str, arguments: list[str]) -> None:
    """`python -m name arguments`, by the function that the interpreter itself calls for it."""
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    _new_main()
    _RUN_AS_MAIN(name)


def run_script(path: str, arguments: list[str]) -> None:
    """`python path arguments`; path is a file, or a folder or archive with a `__main__.py` in it."""
    sys.argv = [path, *arguments]
    main_module = _new_main()
    full_path = os.path.join(os.getcwd(), path)  # not tidied up, as the interpreter leaves it
    if pkgutil.get_importer(full_path) is not None:  # a folder or an archive
        _set_first_path(full_path)
        if sys.path[0] != full_path:
            sys.path.insert(0, full_path)
        _RUN_AS_MAIN("__main__", alter_argv=False)
        return
    try:
        with io.open_code(full_path) as file:
            source = file.read()
    except OSError as error:
        close = difflib.get_close_matches(path, COMMANDS, n=1)
        meant = f"; did you mean the command {close[0]}?" if close else ""
        sys.stderr.write(f"lade: can't open file {full_path!r}: [Errno {error.errno}] {error.strerror}{meant}\n")
        sys.exit(2)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", full_path)
    vars(main_module).update(__file__=full_path, __cached__=None, __loader__=loader)
    exec(compile(source, full_path, "exec", dont_inherit=True), vars(main_module))


# What the interpreter itself calls for -m, folders and archives.
_RUN_AS_MAIN: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]


def _new_main() -> ModuleType:
    """Put an empty `__main__` in place of this program's, with the names that the interpreter puts there."""
    main_module = ModuleType("__main__")
    vars(main_module)["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):  # no longer from Python 3.14 on
        main_module.__annotations__ = {}
    sys.modules["__main__"] = main_module
    return main_module


def _set_first_path(folder: str) -> None:
    """Put the program's folder where the interpreter has put this one's, if it was not told to leave that out."""
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _leave_out_own_frames(error: BaseException) -> None:
    """Let the traceback that ends this process begin with the program's own frames."""
    hook, traceback = sys.excepthook, error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next

    def excepthook(kind: type[BaseException], value: BaseException, full: TracebackType | None) -> None:
        is_ours = value is error
        hook(kind, value.with_traceback(traceback) if is_ours else value, traceback if is_ours else full)

    sys.excepthook = excepthook
