"""One gate for every faster way of computing something: run both ways, compare, remember, and say why not."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

# Messages of torch's plain RuntimeErrors when an allocation on a CPU fails.
NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "ALLOC_FAILED", "bad_alloc")


class NotUsed(RuntimeError):
    """Raised where a faster way cannot be used. The message is a sentence for the user."""


class Trial:
    """Whether a fast way may replace the ordinary one, by kind of computation.

    Each kind is compared with the ordinary way before it is used. Where the results differ, or the fast way raises, the
    ordinary one is used from then on.
    """

    def __init__(self, times: int = 1) -> None:
        """times: comparisons that each kind must pass."""
        self._times = times
        self._num_passed: dict[Hashable, int] = {}
        self.reasons: dict[Hashable, str] = {}  # by kind, why it is not used, as a sentence

    def reason(self, kind: Hashable, compare: Callable[[], str | None], failure: str = "") -> str | None:
        """Why the fast way does not serve a kind, as a sentence; None if it does.

        compare: runs both ways and returns how they differ, as a sentence, None if they do not. Called until the kind
        has passed or failed; what it raises is a reason, too, remembered unless memory ran out, which may pass.
        failure: what such a reason begins with.
        """
        if kind in self.reasons:
            return self.reasons[kind]
        if self.is_over(kind):
            return None
        try:
            problem = compare()
        except Exception as error:  # compilers and foreign code raise anything
            return self.refuse(kind, error, failure)
        if problem is None:
            self._num_passed[kind] = self._num_passed.get(kind, 0) + 1
        else:
            self.reasons[kind] = problem
        return problem

    def is_over(self, kind: Hashable) -> bool:
        """Whether a kind has passed all its comparisons."""
        return self._num_passed.get(kind, 0) >= self._times

    def refuse(self, kind: Hashable, error: Exception, failure: str = "") -> str:
        """Record that the fast way has failed after all. Returns the reason as a sentence. failure: its beginning."""
        reason = failure + in_short(error)
        if not is_out_of_memory(error):
            self.reasons[kind] = reason
        return reason

    @property
    def num_kinds(self) -> int:
        """Kinds with a verdict, or on the way to one."""
        return len({*self.reasons, *self._num_passed})

    @property
    def refusal(self) -> str | None:
        """Why some kind is not served, as a sentence; None if none was refused."""
        return next(iter(list(self.reasons.values())), None)


def in_short(error: Exception) -> str:
    """One line for the statistics: the first two lines of an error; torch's often give the cause in the second."""
    if isinstance(error, NotUsed):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2]).strip()}"[:300]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
