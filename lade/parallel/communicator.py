"""The connection between K processes that decode one text: what they tell each other, and who is to blame when one is gone.

Knows nothing about texts or models. The only file that imports torch.distributed.
"""

from __future__ import annotations

import atexit
import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lade.config import LookaheadConfig

LEADER = 0  # the rank that chooses where choosing is more than an argmax
POLL = datetime.timedelta(seconds=1)  # how often a rank that waits looks whether another one has given up
GRACE = 3.0  # seconds in which the others can say that they are still there


def is_leader(config: LookaheadConfig) -> bool:
    """Whether this process is the one that streams and prints; the only one always is."""
    if config.num_workers == 1:
        return True
    has_group = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if has_group else int(os.environ.get("RANK", "0"))
    return rank % config.num_workers == LEADER


class WorkerError(RuntimeError):
    """Another rank is gone, has raised, or works on something else; the message names it."""


class Communicator:
    """The connection between K ranks, made once and used by all calls until a rank fails.

    Integers travel between hosts through gloo, which notices a dead process at once. Keys/values and logits travel through
    the backend that was asked for.
    """

    def __init__(self, size: int, backend: str, number: int) -> None:
        """number: how many links this process has made before."""
        self._store = world_store(size)
        self.world = dist.group.WORLD
        self.in_call = False
        self.size, self.rank = size, dist.get_rank() % size
        self.first = dist.get_rank() - self.rank  # of the whole world
        self.backend = backend
        self.timeout = world_timeout()
        self._prefix = f"lade/{number}"
        self._meet()
        ranks = list(range(self.first, self.first + size))

        # Groups of its own: what the program does with its group meanwhile cannot get between.
        def group(backend: str) -> Any:
            is_part = size < dist.get_world_size()
            return dist.new_group(ranks, timeout=self.timeout, backend=backend, use_local_synchronization=is_part)

        try:
            self._control = group("gloo")
            self._data = self._control if backend == "gloo" else group(backend)
        except RuntimeError as error:
            raise WorkerError(self._explanation(error)) from error

    def close(self) -> None:
        """End the groups' threads. Only for a link without failure: with messages under way it could wait for ever."""
        groups = {id(group): group for group in (self._control, self._data)}
        del self._control, self._data
        if self.world is not dist.group.WORLD:
            return  # the program has ended all groups itself
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def _meet(self) -> None:
        """Wait until all ranks are here, with the same settings for the link itself."""
        mine = f"DIST_WORKERS={self.size} backend={self.backend!r}"
        self._store.set(self._key("settings", self.rank), mine)
        for rank in range(self.size):
            try:
                self._store.wait([self._key("settings", rank)], self.timeout)
                theirs = self._store.get(self._key("settings", rank)).decode()
            except RuntimeError as error:
                self._store.set(self._key("settings", self.rank), "given up waiting")  # for one that comes too late
                raise WorkerError(
                    f"{mine}: {self._name(rank)} has not come to a generate() call of several processes in {self.timeout}"
                ) from error
            if theirs != mine:
                raise ValueError(f"{mine} on {self._name(self.rank)}, but {theirs} on {self._name(rank)}")

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{self.first + rank}"

    def all_reduce(self, values: Tensor) -> None:
        """Sum over all ranks, in place. values: integers on the host."""
        self._finish(lambda: dist.all_reduce(values, group=self._control, async_op=True))

    def gather(self, values: Tensor) -> list[Tensor]:
        """All ranks' values. values: integers on the host, equally many everywhere."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        self._finish(lambda: dist.all_gather(found, values, group=self._control, async_op=True))
        return found

    def broadcast(self, values: Tensor, source: int) -> None:
        """Make `values`, on the host, what they are on rank `source`."""
        self._finish(lambda: dist.broadcast(values, self.first + source, group=self._control, async_op=True))

    def broadcast_data(self, values: Tensor, source: int) -> Tensor:
        """The same for a lot of data, on any device. Returns it where the backend wants it."""
        if self.backend == "gloo":
            values = values.cpu()
            self.broadcast(values, source)
        else:
            dist.broadcast(values, self.first + source, group=self._data)
        return values

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Let the others know when this rank leaves with an exception."""
        self.in_call = True
        try:
            yield
        except BaseException as error:
            if not isinstance(error, WorkerError):
                self._leave_word(f"raised {type(error).__name__}: {error}")
                self._linger()
            forget(self)
            raise
        finally:
            self.in_call = False

    def _finish(self, start: Callable[[], Any]) -> None:
        """Run one collective; in place of waiting for a rank that is gone, raise."""
        try:
            work = start()
            while not self._is_done(work):
                if self._words():
                    raise RuntimeError("another rank has given up")
        except RuntimeError as error:
            explanation = self._explanation(error)
            self._linger()
            raise WorkerError(explanation) from error

    @staticmethod
    def _is_done(work: Any) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it ended meanwhile; if that was an error, here it comes
        return True

    def _leave_word(self, word: str) -> None:
        try:
            self._store.set(self._key("word", self.rank), word)
        except RuntimeError:
            return  # the store is gone, and with it whoever would have read this

    def _words(self) -> dict[int, str]:
        """What other ranks left behind before they gave up."""
        keys = {rank: self._key("word", rank) for rank in range(self.size) if rank != self.rank}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _explanation(self, cause: RuntimeError) -> str:
        """Who is to blame, as far as the others can tell."""
        self._leave_word("waited")
        try:
            end = time.monotonic() + GRACE
            while True:
                words = self._words()
                raised = {rank: word for rank, word in words.items() if word.startswith("raised")}
                if raised or len(words) == self.size - 1 or time.monotonic() > end:
                    break
                time.sleep(0.05)
        except RuntimeError:
            keeper = "the launcher" if has_agent_store() else "rank 0"
            return f"DIST_WORKERS={self.size}: {keeper}, which keeps the processes together, is gone ({cause})"
        silent = [rank for rank in range(self.size) if rank not in words and rank != self.rank]
        blamed = [f"{self._name(rank)} {word}" for rank, word in raised.items()]
        if not raised:
            blamed = [f"{self._name(rank)} is gone, or has not answered for {self.timeout}" for rank in silent]
        return f"DIST_WORKERS={self.size}: {'; '.join(blamed) or 'the ranks have lost each other'} ({cause})"

    def _linger(self) -> None:
        """Where this process keeps the store: let the others read there what has happened, before it may be gone."""
        if self.first + self.rank > 0 or has_agent_store():
            return
        end = time.monotonic() + GRACE
        while len(self._words()) < self.size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)

    def _name(self, rank: int) -> str:
        world_rank = f" (rank {self.first + rank} of all)" if self.first else ""
        return f"rank {rank}{world_rank}"


_links: dict[tuple[int, str], Communicator] = {}
_num_links = 0


def communicator_for(config: LookaheadConfig, device: torch.device) -> Communicator:
    """The link for these settings, made by the first call that needs it. device: the prompt's."""
    backend = config.backend or ("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend must be 'gloo' for prompts on {device.type}, got 'nccl'")
    key = (config.num_workers, backend)
    if key in _links and _links[key].world is not dist.group.WORLD:  # the program has made another group since
        del _links[key]
    if key not in _links:
        global _num_links
        _num_links += 1
        _links[key] = Communicator(*key, _num_links)
    return _links[key]


@atexit.register
def close_links() -> None:
    """A thread of gloo that lets go of a tensor while the interpreter ends brings the process down (SIGABRT)."""
    while _links:
        _links.popitem()[1].close()


def forget(link: Communicator) -> None:
    """The next call makes a new link: after a failure, messages of the old one may still be under way."""
    for key in [key for key, known in _links.items() if known is link]:
        del _links[key]


def num_processes() -> int:
    """Of the program's process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_store(size: int) -> Any:
    """torch.distributed's store, after it has been initialised with a number of processes that `size` divides."""
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
    """Whether the store is kept by the launcher, and not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_world_size(size: int, world_size: int) -> None:
    if world_size % size:
        raise ValueError(f"DIST_WORKERS must divide the number of processes, {world_size}, got {size}")


def world_timeout() -> datetime.timedelta:
    """How long the program's own process group waits."""
    world = dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            timeout: datetime.timedelta = world._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):  # not for this device, or not so in this version
            continue
        return timeout
    return dist.distributed_c10d.default_pg_timeout
