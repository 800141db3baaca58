"""A trace replayed in the terminal: the text as it grew, guesses in green, and bars of tokens per step at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from lade.commands.detokenize import for_terminal

GUESSED, OWN, FAINT, ORDINARY = "\033[30;42m", "\033[1m", "\033[2m", "\033[0m"
BAR_WIDTH = 40
MAX_SINGLE = 8  # tokens; larger steps share bars, each twice as wide as the one before


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
    """A bar chart of steps by the number of tokens they committed, the prompt's own step included."""
    sizes = [1, *(len(step["committed"]) for step in trace["steps"])]
    counts = Counter(map(bin_of, sizes))
    widest = max(counts.values())
    lines = [
        f"{len(trace['ids'])} tokens in {len(sizes)} steps, {trace['tokens_per_step']:.2f} per step: {trace['headline']}\n{trace['speed']}\n"
    ]
    bins = sorted({*counts, *map(bin_of, range(1, max(sizes)))})
    labels = [f"{low}" if low == high else f"{low} to {high}" for low, high in bins]
    width = max(map(len, labels))
    for (_, high), label in zip(bins, labels, strict=True):
        count = counts[bin_of(high)]
        bar = "█" * round(BAR_WIDTH * count / widest)
        lines.append(f"{label:>{width}} {'token ' if high == 1 else 'tokens'} {bar} {count}\n")
    return "".join(lines)


def bin_of(size: int) -> tuple[int, int]:
    """The smallest and the largest number of tokens that share a bar with `size`."""
    if size <= MAX_SINGLE:
        return size, size
    high = 2 * MAX_SINGLE
    while size > high:
        high *= 2
    return high // 2 + 1, high


def wait(seconds: float, speed: float) -> None:
    if speed > 0:
        time.sleep(seconds / speed)
