"""Progress on standard error: a bar at a terminal, occasional lines in a file or pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

LINE_EVERY = 10.0  # seconds between lines in a file or pipe


def progress_bar(label: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A function that wraps a list and shows the progress of a loop over it."""
    return partial(_bar if sys.stderr.isatty() else _lines, label)


def _bar(label: str, items: Iterable[Any]) -> Iterator[Any]:
    from tqdm import tqdm  # comes with transformers

    yield from tqdm(list(items), desc=label, dynamic_ncols=True, leave=False)


def _lines(label: str, items: Iterable[Any]) -> Iterator[Any]:
    """A line after the first item, after the last, and every few seconds between."""
    items = list(items)
    began, shown = time.monotonic(), float("-inf")
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if done == len(items) or now - shown >= LINE_EVERY:
            shown = now
            sys.stderr.write(f"{label}: {done} of {len(items)}, {now - began:.0f} s\n")
            sys.stderr.flush()
