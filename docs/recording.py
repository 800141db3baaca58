"""Records `lade chat` at a terminal, typed by a program: python docs/recording.py chat.cast [--model_path MODEL]

The file is an asciicast, which `asciinema play chat.cast` shows as it was, colours and pauses included.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 100, 30
QUESTIONS = ("What are the arguments of shutil.copytree?", "And of shutil.move?", "/quit")
QUIET = 2.0  # seconds without output after which the chat waits for a question
LONGEST = 300  # seconds that one answer may take


def record(command: list[str], questions: tuple[str, ...], quiet: float = QUIET) -> list[tuple[float, str]]:
    """What a program shows at a terminal while lines are typed to it, with the seconds since its start.

    The next line is typed when the program has shown something and then nothing for `quiet` seconds.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.environ |= {"USE_LADE": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
        os.execvp(command[0], command)
    began, events, waiting = time.monotonic(), [], list(questions)
    while True:
        is_ready = select.select([terminal], [], [], quiet if events else LONGEST)[0]
        if not is_ready and not waiting:
            is_ready = select.select([terminal], [], [], LONGEST)[0]
        if not is_ready and waiting:
            os.write(terminal, f"{waiting.pop(0)}\n".encode())
            is_ready = select.select([terminal], [], [], LONGEST)[0]
        try:
            data = os.read(terminal, 4096) if is_ready else b""
        except OSError:  # Linux says so at the end
            data = b""
        if not data:
            os.close(terminal)
            os.waitpid(process, 0)
            return events
        events.append((round(time.monotonic() - began, 3), data.decode(errors="replace")))


def as_cast(events: list[tuple[float, str]]) -> str:
    """An asciicast, version 2: a line of JSON for the terminal, and one for each output."""
    head = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "lade chat"}
    return "".join(json.dumps(line) + "\n" for line in (head, *([seconds, "o", text] for seconds, text in events)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--model_path", default=str(ROOT / "models" / "stdlib-9m"), help="a hub name or a folder")
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "lade",
        "chat",
        "--chat",
        "--color",
        "--no_history",
        "--model_path",
        args.model_path,
    ]
    args.out.write_text(as_cast(record(command, QUESTIONS)), encoding="utf-8")


if __name__ == "__main__":
    main()
