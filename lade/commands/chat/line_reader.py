"""Messages typed at a terminal: several lines in one message, and a history that outlives the program.

With GNU readline, pasted lines are one message (bracketed paste), Alt-Enter begins a new line and Ctrl-X Ctrl-E opens
an editor. Without it, three double quotes around several lines make them one message.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import readline
except ImportError:  # on Windows, and in some builds
    readline = None  # type: ignore[assignment]

HISTORY_LENGTH = 1000  # messages
QUOTES = '"""'  # around a message of several lines, as ollama has it
EDIT = "/edit"  # the command that Ctrl-X Ctrl-E types in front of what is there
BINDINGS = (
    "set enable-bracketed-paste on",
    r'"\e\C-m": "\C-v\C-j"',  # Alt-Enter: a line feed, as if it were quoted
    rf'"\C-x\C-e": "\C-a{EDIT} \C-m"',
)
LIBEDIT_BINDINGS = (rf"bind -s ^X^E ^A{EDIT}\040^M",)


class LineReader:
    """Reads messages from standard input."""

    def __init__(self, history: Path | None) -> None:
        """history: a file of earlier messages, made where there is none; None keeps nothing."""
        self._history = history if sys.stdin.isatty() else None
        if readline is None or not sys.stdin.isatty():
            return
        is_libedit = "libedit" in (readline.__doc__ or "")
        for binding in LIBEDIT_BINDINGS if is_libedit else BINDINGS:
            readline.parse_and_bind(binding)
        readline.set_auto_history(False)  # a message of several lines is one entry
        for message in read_history(self._history):
            readline.add_history(message)

    def read(self, prompt: str) -> str:
        """The next message, without blanks around it. Raises EOFError and KeyboardInterrupt as input() does."""
        text = input(prompt).strip()
        if text.startswith(QUOTES):
            text = text[len(QUOTES) :]
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + input("... " if sys.stdin.isatty() else "")
            text = text.rstrip().removesuffix(QUOTES).strip()
        if text:
            self._remember(text)
        return text

    def _remember(self, message: str) -> None:
        if readline is not None and sys.stdin.isatty():
            readline.add_history(message)
        if self._history is not None:
            with suppress(OSError):  # the chat works without a history
                self._history.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                with open(descriptor, "a", encoding="utf-8") as file:
                    file.write(json.dumps(message) + "\n")


def history_file() -> Path:
    """Where messages are kept from one start to the next."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "lade" / "chat_history.jsonl"


def read_history(path: Path | None) -> list[str]:
    """The latest messages of a history file, which is cut down to them. What cannot be read is left out."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    messages: list[Any] = []
    for line in lines[-HISTORY_LENGTH:]:
        with suppress(ValueError):
            messages.append(json.loads(line))
    if len(lines) > 2 * HISTORY_LENGTH:
        with suppress(OSError):
            path.write_text("".join(line + "\n" for line in lines[-HISTORY_LENGTH:]), encoding="utf-8")
    return [message for message in messages if isinstance(message, str)]


def edited(text: str, run: Callable[[list[str]], Any] = subprocess.call) -> str:
    """Let the user edit a text in $VISUAL, $EDITOR or vi. Raises OSError when that cannot be started."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="lade-chat-") as folder:
        path = Path(folder, "message.md")
        path.write_text(text, encoding="utf-8")
        run([*shlex.split(editor), str(path)])
        return path.read_text(encoding="utf-8", errors="replace").strip()
