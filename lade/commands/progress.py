"""A progress bar, where somebody is watching."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


def progress_bar(label: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """What to wrap a list in to see on standard error how far a loop over it has come; nothing is shown in a file or pipe."""
    from tqdm import tqdm  # comes with transformers

    return partial(tqdm, desc=label, leave=False, disable=None)
