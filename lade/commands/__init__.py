"""The command line, as `python -m lade` and as `lade`. Imports only the sub-command that is asked for."""

from __future__ import annotations

import importlib
import sys

# Sub-command -> what `lade --help` says of it. Each is a module of this package with a `main(arguments)`.
COMMANDS = {
    "bench": "speed and texts of plain generate(), its rivals and lade; --tune finds faster settings",
    "chat": "talk with a model in the terminal",
    "env": "versions, devices and settings, as text for a bug report",
    "trace": "watch one generation step by step, in a page or in the terminal",
    "warmup": "compile ahead what a model's calls need",
}
LAUNCHER = "run"


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command, or an unmodified program with lade switched on. Returns the exit status.

    arguments: what follows the program's name; those of this process when None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    is_command = bool(arguments) and arguments[0] in COMMANDS
    name, rest = (arguments[0], arguments[1:]) if is_command else (LAUNCHER, arguments)
    return int(importlib.import_module(f"lade.commands.{name}").main(rest))
