"""Statistics of each `generate()` call: what ran, how many steps it took, and why lookahead did not run."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

HISTORY_LENGTH = 10_000  # calls


@dataclass(slots=True)
class GenerationStats:
    """Statistics of one `generate()` call. Reasons are sentences, None when there is nothing to explain."""

    steps: int = 0  # forward passes, including the prefill
    generated_tokens: int = 0  # over all rows of the batch
    batch_size: int = 1
    block_tokens: list[int] = field(default_factory=list)  # query tokens (q) of each step after the prefill
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # accepted guesses of a step -> number of steps
    fallback_reason: str | None = None  # why the original path ran; None when lookahead did
    # Why a faster way was asked for and not used, or not by all steps: "compile", "graph", "kernel", "packed".
    reasons: dict[str, str] = field(default_factory=dict)
    used_kernel: bool = False  # blocks used lade's own attention (USE_FLASH)
    sources: dict[str, list[int]] = field(default_factory=dict)  # source of guesses -> [proposed, accepted]
    draft_seconds: float = 0.0  # proposing and learning, without drawing random numbers
    forward_seconds: float = 0.0  # laying out and running the blocks, without the prefill
    verify_seconds: float = 0.0  # drawing, choosing and committing, including user code
    num_workers: int = 1  # processes that shared each step; block_tokens are this one's
    sent_bytes: Counter[str] = field(default_factory=Counter)  # from this process to the others, by kind of data
    compiled_steps: int = 0  # steps whose forward was compiled (COMPILE=1)
    captured_steps: int = 0  # steps that replayed a CUDA graph (CUDA_GRAPH)
    packed_weights: int = 0  # weights whose packed copy the blocks used (PACK)
    packed_bytes: int = 0  # of these copies, which stay with the model
    on_step: Callable[..., None] | None = field(default=None, repr=False, compare=False)  # see tracing()

    def __str__(self) -> str:
        """One line: passes, tokens per pass, block sizes, or why lookahead did not run. `as_dict()` has all figures."""
        if self.fallback_reason is not None:
            return f"lookahead did not run: {self.fallback_reason}"
        rows = "" if self.batch_size == 1 else f" in {self.batch_size} rows"
        text = (
            f"{self.generated_tokens} tokens{rows} in {self.steps} forward passes, "
            f"{self.tokens_per_step:.2f} tokens per pass{' and row' if rows else ''}"
        )
        if not self.block_tokens:
            return text
        smallest, largest = min(self.block_tokens), max(self.block_tokens)
        mean = sum(self.block_tokens) / len(self.block_tokens)
        return f"{text}; blocks of {smallest} to {largest} tokens, {mean:.1f} on average"

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per forward pass and row: 1.0 for plain decoding, less if some rows of a batch end early."""
        return self.generated_tokens / (self.steps * self.batch_size) if self.steps else 0.0

    @property
    def plain_step_share(self) -> float:
        """Share of the steps after the prefill that had no guesses."""
        return self.block_tokens.count(1) / len(self.block_tokens) if self.block_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All statistics, those computed from others included, in types of JSON."""
        found = {part.name: deepcopy(getattr(self, part.name)) for part in fields(self) if part.compare}
        return found | {
            "tokens_per_step": self.tokens_per_step,
            "plain_step_share": self.plain_step_share,
            "accepted_lengths": {str(length): count for length, count in sorted(self.accepted_lengths.items())},
            "sent_bytes": dict(self.sent_bytes),
        }


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.open: list[GenerationStats] = []  # current calls; an assistant model's call is nested
        self.last: GenerationStats | None = None
        self.on_step: Callable[..., None] | None = None


_per_thread = _PerThread()
_history: deque[GenerationStats] = deque(maxlen=HISTORY_LENGTH)


@contextmanager
def recording() -> Iterator[GenerationStats]:
    """Record the statistics of one call, also if it raises."""
    stats = GenerationStats(on_step=_per_thread.on_step)
    _per_thread.open.append(stats)
    try:
        yield stats
    finally:
        _per_thread.open.pop()
        stats.on_step = None  # the history must not keep it alive
        _per_thread.last = stats
        _history.append(stats)


@contextmanager
def tracing(on_step: Callable[..., None]) -> Iterator[None]:
    """Call `on_step` after each step, except the prefill, of this thread's `generate()` calls.

    Arguments: the step's `lade.decoding.Step` (roots, draft, tree, layout) and its `lade.drafting.base.Outcome`
    (accepted, choices, sequences, logits). The next step may change all of it, so copy what is to be kept.
    """
    before, _per_thread.on_step = _per_thread.on_step, on_step
    try:
        yield
    finally:
        _per_thread.on_step = before


def open_stats() -> GenerationStats:
    """Statistics of this thread's current call; a new object when `_sample` is called directly."""
    return _per_thread.open[-1] if _per_thread.open else GenerationStats()


def last_stats() -> GenerationStats | None:
    """Statistics of this thread's latest `generate()` call; None before the first."""
    return _per_thread.last


def log_history(clear: bool = False) -> list[GenerationStats]:
    """Statistics of all threads' calls, oldest first, at most HISTORY_LENGTH. clear: remove them afterwards."""
    history = list(_history)
    if clear:
        _history.clear()
    return history


def save_log(path: str | Path) -> None:
    """Write `log_history()` as a JSON list to `path`."""
    Path(path).write_text(json.dumps([stats.as_dict() for stats in log_history()], indent=1) + "\n", encoding="utf-8")
