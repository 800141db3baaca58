"""A trace replayed in the terminal: the text as it grew, guesses in green, one bar per step at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from lade.commands.detokenize import for_terminal

GUESSED, OWN, FAINT, ORDINARY = "\033[30;42m", "\033[1m", "\033[2m", "\033[0m"
BAR_WIDTH = 40


def replay(trace: dict[str, Any], write: Callable[[str], Any], speed: float = 1.0) -> None:
    """write: shows text at once. speed: 1 takes as long as the generation did, 0 does not wait."""
    write(f"{FAINT}{for_terminal(''.join(trace['prompt']))}{ORDINARY}")
    wait(trace["prefill"], speed)
    pieces = map(for_terminal, trace["text"])
    write(f"{OWN}{next(pieces, '')}{ORDINARY}")
    for step in trace["steps"]:
        wait(step["forward"] + step["rest"], speed)
        for index in range(len(step["committed"])):
            is_guess = index < len(step["accepted"])
            write(f"{GUESSED if is_guess else OWN}{next(pieces)}{ORDINARY}")
    write("\n\n" + histogram(trace))


def histogram(trace: dict[str, Any]) -> str:
    """How many steps committed how many tokens, the prompt's own step included."""
    counts = Counter([1, *(len(step["committed"]) for step in trace["steps"])])
    widest = max(counts.values())
    lines = [
        f"{len(trace['ids'])} tokens in {len(trace['steps']) + 1} steps, {trace['tokens_per_step']:.2f} per step\n"
    ]
    for size in range(1, max(counts) + 1):
        bar = "█" * round(BAR_WIDTH * counts[size] / widest)
        lines.append(f"{size:>3} {'token ' if size == 1 else 'tokens'} {bar} {counts[size]}\n")
    return "".join(lines)


def wait(seconds: float, speed: float) -> None:
    if speed > 0:
        time.sleep(seconds / speed)
