"""Communication between K processes that decode together, and error reports when one fails.

Independent of token sequences and models. The only module that imports torch.distributed.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lade.config import LookaheadConfig

LEADER = 0  # the rank that runs processors, samplers and stopping criteria
POLL = datetime.timedelta(seconds=1)  # between a waiting rank's checks for failures
GRACE = 3.0  # seconds for the others to respond after a failure


def is_leader(config: LookaheadConfig) -> bool:
    """Whether this process streams and prints; always true without other processes."""
    if config.num_workers == 1:
        return True
    rank = dist.get_rank() if has_group() else int(os.environ.get("RANK", "0"))
    return rank % config.num_workers == LEADER


class WorkerError(RuntimeError):
    """Another rank is gone, raised, or does something else; the message names it."""


class Communicator:
    """The connection between K ranks, created once and shared by all calls until a rank fails.

    Integers travel between hosts through gloo, which notices a dead process at once. Keys/values and logits travel
    through the configured backend.
    """

    def __init__(self, size: int, backend: str, number: int) -> None:
        """number: how many communicators this process has created, this one included."""
        self._store = world_store(size)
        self.world = dist.group.WORLD
        self.in_call = False
        self.size, self.rank = size, dist.get_rank() % size
        self.first = dist.get_rank() - self.rank  # world rank of rank 0
        self.backend = backend
        self.timeout = world_timeout()
        self._prefix = f"lade/{number}"
        self._handshake()
        ranks = list(range(self.first, self.first + size))

        # Own groups, independent of the program's collectives in its default group.
        def group(backend: str) -> Any:
            is_part = size < dist.get_world_size()
            return dist.new_group(ranks, timeout=self.timeout, backend=backend, use_local_synchronization=is_part)

        try:
            self._control = group("gloo")
            self._data = self._control if backend == "gloo" else group(backend)
        except RuntimeError as error:
            raise WorkerError(self._explanation(error)) from error

    def close(self) -> None:
        """End the groups' threads. Only without a failure: with pending messages it could hang."""
        groups = {id(group): group for group in (self._control, self._data)}
        del self._control, self._data
        if self.world is not dist.group.WORLD:
            return  # the program has destroyed all groups itself
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def _handshake(self) -> None:
        """Wait until all ranks are here, and compare their DIST_WORKERS and backend."""
        mine = f"DIST_WORKERS={self.size} backend={self.backend!r}"
        self._store.set(self._key("settings", self.rank), mine)
        for rank in range(self.size):
            try:
                self._store.wait([self._key("settings", rank)], self.timeout)
                theirs = self._store.get(self._key("settings", rank)).decode()
            except RuntimeError as error:
                self._store.set(self._key("settings", self.rank), "given up waiting")  # for a rank that comes too late
                raise WorkerError(
                    f"{mine}: {self._name(rank)} has not come to a generate() call of several processes "
                    f"in {self.timeout}"
                ) from error
            if theirs != mine:
                raise ValueError(f"{mine} on {self._name(self.rank)}, but {theirs} on {self._name(rank)}")

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{self.first + rank}"

    def all_reduce(self, values: Tensor) -> None:
        """Sum over all ranks, in place. values: integers on the host."""
        self._finish(lambda: dist.all_reduce(values, group=self._control, async_op=True))

    def gather(self, values: Tensor) -> list[Tensor]:
        """All ranks' values. values: integers on the host, of the same shape on every rank."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        self._finish(lambda: dist.all_gather(found, values, group=self._control, async_op=True))
        return found

    def broadcast(self, values: Tensor, source: int) -> None:
        """Overwrite `values`, on the host, with those of rank `source`."""
        self._finish(lambda: dist.broadcast(values, self.first + source, group=self._control, async_op=True))

    def broadcast_data(self, values: Tensor, source: int) -> Tensor:
        """Broadcast of large tensors on any device. Returns the result, on the device that the backend uses."""
        if self.backend == "gloo":
            values = values.cpu()
            self.broadcast(values, source)
        else:
            dist.broadcast(values, self.first + source, group=self._data)
        return values

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Tell the other ranks when this rank leaves with an exception."""
        self.in_call = True
        try:
            yield
        except BaseException as error:
            if not isinstance(error, WorkerError):
                self._store_reason(f"raised {type(error).__name__}: {error}")
                self._keep_store_alive()
            # A new one for the next call: this one may have pending messages.
            _communicators.pop((self.size, self.backend), None)
            raise
        finally:
            self.in_call = False

    def _finish(self, start: Callable[[], Any]) -> None:
        """Run one collective; raise WorkerError instead of waiting for a rank that has failed."""
        try:
            work = start()
            while not self._is_done(work):
                if self._reasons():
                    raise RuntimeError("another rank has given up")
        except RuntimeError as error:
            explanation = self._explanation(error)
            self._keep_store_alive()
            raise WorkerError(explanation) from error

    @staticmethod
    def _is_done(work: Any) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # completed meanwhile; raises its error, if any
        return True

    def _store_reason(self, reason: str) -> None:
        try:
            self._store.set(self._key("reason", self.rank), reason)
        except RuntimeError:
            return  # the store is gone: nobody can read this

    def _reasons(self) -> dict[int, str]:
        """The reasons that other ranks stored before they gave up."""
        keys = {rank: self._key("reason", rank) for rank in range(self.size) if rank != self.rank}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _await_reasons(self, until_raised: bool) -> dict[int, str]:
        """The reasons of all other ranks, or of those that have stored one within GRACE.

        until_raised: one of a rank that has raised an error is enough.
        """
        end = time.monotonic() + GRACE
        while len(reasons := self._reasons()) < self.size - 1 and time.monotonic() < end:
            if until_raised and any(reason.startswith("raised") for reason in reasons.values()):
                break
            time.sleep(0.05)
        return reasons

    def _explanation(self, cause: RuntimeError) -> str:
        """An error message that names the failed ranks, as far as the others can tell."""
        self._store_reason("waited")
        try:
            reasons = self._await_reasons(until_raised=True)
        except RuntimeError:
            keeper = "the launcher" if has_agent_store() else "rank 0"
            return f"DIST_WORKERS={self.size}: {keeper}, which keeps the processes together, is gone ({cause})"
        blamed = [f"{self._name(rank)} {reason}" for rank, reason in reasons.items() if reason.startswith("raised")]
        if not blamed:
            silent = [rank for rank in range(self.size) if rank not in reasons and rank != self.rank]
            blamed = [f"{self._name(rank)} is gone, or has not answered for {self.timeout}" for rank in silent]
        return f"DIST_WORKERS={self.size}: {'; '.join(blamed) or 'the ranks have lost each other'} ({cause})"

    def _keep_store_alive(self) -> None:
        """If this process hosts the store, keep it alive until the others have read the reasons."""
        if self.first + self.rank > 0 or has_agent_store():
            return
        self._await_reasons(until_raised=False)
        time.sleep(0.5)

    def _name(self, rank: int) -> str:
        world_rank = f" (rank {self.first + rank} of all)" if self.first else ""
        return f"rank {rank}{world_rank}"


_communicators: dict[tuple[int, str], Communicator] = {}
_numbers = itertools.count(1)


def communicator_for(config: LookaheadConfig, device: torch.device) -> Communicator:
    """The communicator for these settings, created at the first call. device: the prompt's."""
    backend = config.backend or ("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend must be 'gloo' for prompts on {device.type}, got 'nccl'")
    key = (config.num_workers, backend)
    known = _communicators.get(key)
    if known is None or known.world is not dist.group.WORLD:  # the program may have made a new default group since
        _communicators.pop(key, None)
        known = _communicators[key] = Communicator(*key, next(_numbers))
    return known


@atexit.register
def close_all() -> None:
    """Close all communicators: a gloo thread that frees a tensor at interpreter exit aborts the process (SIGABRT)."""
    while _communicators:
        _communicators.popitem()[1].close()


def has_group() -> bool:
    """Whether the program has a process group."""
    return dist.is_available() and dist.is_initialized()


def world_store(size: int) -> Any:
    """torch.distributed's store. Initialises it if needed, with a number of processes that `size` divides."""
    if not dist.is_available():
        raise RuntimeError(f"DIST_WORKERS={size} needs torch.distributed, which this build of torch does not have")
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"DIST_WORKERS must be 1 in a process that no launcher started, got {size}: "
                f"use torchrun --nproc_per_node={size} ({missing[0]} is not set)"
            )
        check_world_size(size, int(os.environ["WORLD_SIZE"]))
        dist.init_process_group("gloo")
    check_world_size(size, dist.get_world_size())
    return dist.distributed_c10d._get_default_store()


def has_agent_store() -> bool:
    """Whether the launcher hosts the store, instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_world_size(size: int, world_size: int) -> None:
    if world_size % size:
        raise ValueError(f"DIST_WORKERS must divide the number of processes, {world_size}, got {size}")


def world_timeout() -> datetime.timedelta:
    """Timeout of the program's own process group."""
    world = dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            timeout: datetime.timedelta = world._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):  # no such backend, or no such attribute in this version
            continue
        return timeout
    return dist.distributed_c10d.default_pg_timeout
