"""Progress on standard error: a bar at a terminal, occasional lines in a file or pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

LINE_EVERY = 10.0  # seconds between lines in a file or pipe


@contextmanager
def progress(total: int, done: int, label: str, stays: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of `total` parts; `done` of them are finished already.

    The function's argument is a text to show next to the bar. stays: whether the bar stays visible at the end.
    """
    if not sys.stderr.isatty():
        yield _Lines(total, done, label).advance
        return
    from tqdm import tqdm  # comes with transformers

    with tqdm(total=total, initial=done, desc=label, dynamic_ncols=True, leave=stays) as bar:

        def advance(text: str = "") -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield advance


def progress_bar(label: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A function that wraps a list and shows the progress of a loop over it."""
    return partial(_over, label)


def _over(label: str, items: Iterable[Any]) -> Iterator[Any]:
    items = list(items)
    with progress(len(items), 0, label, stays=False) as advance:
        for item in items:
            yield item
            advance("")


class _Lines:
    """A line after the first part, after the last, and every few seconds between."""

    def __init__(self, total: int, done: int, label: str) -> None:
        self._total, self._done, self._label = total, done, label
        self._began, self._shown = time.monotonic(), float("-inf")

    def advance(self, text: str = "") -> None:
        self._done += 1
        now = time.monotonic()
        if self._done < self._total and now - self._shown < LINE_EVERY:
            return
        self._shown = now
        sys.stderr.write(f"{self._label}: {self._done} of {self._total}, {now - self._began:.0f} s\n")
        sys.stderr.flush()
