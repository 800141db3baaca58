"""Lookahead parallelism: each of K processes holds the whole model and computes its part of every block.

After the forward, the ranks all-reduce a table of integers, to which each has added the choices of its own part. The
rank that owns the accepted path broadcasts its keys/values. Then all ranks have the same sequences, pools and caches.
Selection that needs more than integers (processors, samplers, stopping criteria) runs on rank 0, which broadcasts the
result.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.token_tree import BlockPart, TokenTree
from lade.common.request import Request
from lade.config import LookaheadConfig
from lade.parallel.checksums import checksum_of, model_checksum, plain_values
from lade.parallel.communicator import LEADER, Communicator, communicator_for
from lade.parallel.partition import split
from lade.stats import GenerationStats
from lade.switch import current_config
from lade.verification.draws import READABLE, generator_state, set_generator_state
from lade.verification.logits import BlockLogits
from lade.verification.outputs import OutputRecorder
from lade.verification.selection import (
    Accepted,
    GreedySelection,
    LockstepSelection,
    PerRowSelection,
    Selection,
)
from lade.verification.single_process import SingleProcess

KINDS: tuple[type[Selection], ...] = (GreedySelection, PerRowSelection, LockstepSelection)


def distributed() -> bool:
    """Whether lookahead is split over several processes (DIST_WORKERS > 1)."""
    return current_config().num_workers > 1


def get_device() -> int | str:
    """The device for this process's model: the GPU numbered LOCAL_RANK (default 0), or "cpu" without a GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else "cpu"


@contextmanager
def open_group(config: LookaheadConfig, device: torch.device, stats: GenerationStats) -> Iterator[SingleProcess]:
    """The K processes that take part in a call."""
    communicator = communicator_for(config, device)
    if communicator.in_call:  # a nested generate() call by a processor, which only the leader runs
        yield SingleProcess(config)
        return
    with communicator.guarding():
        yield ProcessGroup(communicator, config, stats)


class ProcessGroup(SingleProcess):
    """One of K ranks in one call."""

    def __init__(self, communicator: Communicator, config: LookaheadConfig, stats: GenerationStats) -> None:
        super().__init__(shared_settings(config))
        self._communicator, self._rank, self._stats = communicator, communicator.rank, stats
        self._max_nodes = max(1, config.num_guesses) * (config.ngram_size - 1)
        self._sums_choices = False

    # Before the first forward.

    def agree(self, reason: str | None, request: Request) -> str | None:
        reason = reason or unsupported_reason(self.config, request)
        names = ("settings of config_lade", "model", "prompt", "generation settings")
        mine = torch.zeros(1 + len(names), dtype=torch.long)
        if reason is not None:
            mine[0] = 1
        else:
            # Without what may differ, and what the communicator has compared.
            settings = dataclasses.replace(self.config, debug=0, backend=None, dist_workers=None)
            inputs = request.input_ids, request.attention_mask, request.model_kwargs.get("inputs_embeds")
            mine[1:] = torch.tensor(
                [
                    checksum_of(dataclasses.asdict(settings)),
                    model_checksum(request.model),
                    checksum_of(*inputs),
                    checksum_of(plain_values(request.generation_config.to_dict())),
                ]
            )
        everyones = torch.stack(self._communicator.gather(mine))  # [K, 5]
        self._count("integers", mine)
        unable = everyones[:, 0].nonzero()[:, 0].tolist()
        if unable:
            return reason or f"rank {unable[0]} cannot take part, see its own fallback_reason"
        wrong = [
            f"{name} of rank {', '.join(map(str, ranks))}"
            for name, column in zip(names, everyones.T[1:], strict=True)
            if (ranks := (column != column[LEADER]).nonzero()[:, 0].tolist())
        ]
        if wrong:
            raise ValueError(f"DIST_WORKERS={self._communicator.size}: not as on rank 0: {'; '.join(wrong)}")
        return None

    def selection(self, kind: type[Selection], request: Request) -> Selection:
        """The leader's kind on all ranks: only the leader may have streamers, processors and criteria."""
        self._stats.num_workers = self._communicator.size
        index = torch.tensor([KINDS.index(kind)])
        self._broadcast("integers", index, LEADER)
        kind = KINDS[int(index)]
        self._sums_choices = kind is GreedySelection
        if self._sums_choices:
            return kind(request)
        per_row, lockstep = LEADERS if self._rank == LEADER else FOLLOWERS
        return (per_row if kind is PerRowSelection else lockstep)(request, self)

    # In each step.

    def partition(self, tree: TokenTree, window_shape: tuple[int, int]) -> BlockPart:
        self._tree = tree
        return split(tree, window_shape, self._communicator.size)[self._rank]

    def exchange(
        self, part: BlockPart, block_logits: BlockLogits, choices: Tensor | None
    ) -> tuple[BlockLogits, Tensor | None]:
        logits, size = block_logits.logits, self._communicator.size
        window_size = self.config.window_size
        # The same length in all steps and on all ranks, so that ranks that diverge are detected instead of hanging.
        values = torch.zeros(len(logits) * (1 + self._max_nodes + window_size) + size, dtype=torch.int32)
        table, states = values[:-size].view(len(logits), -1), values[-size:]
        guesses = table[:, 1 + self._max_nodes :]
        self._write_choices(table, part, block_logits)
        if choices is not None and part.columns is not None:
            guesses[:, slice(*part.columns)] = choices.cpu()
        states[self._rank] = zlib.crc32(repr(self._tree).encode()) & 0x7FFFFFFF
        self._communicator.all_reduce(values)
        self._count("integers", values)
        diverged = (states != states[LEADER]).nonzero()[:, 0].tolist()
        if diverged:
            raise RuntimeError(f"DIST_WORKERS={size}: rank {diverged} guesses something else than rank 0 does")
        shared = SharedLogits(self, part, logits, table[:, : 1 + self._max_nodes])
        return shared, None if choices is None else guesses.long().to(choices.device)

    def _write_choices(self, table: Tensor, part: BlockPart, block_logits: BlockLogits) -> None:
        """Write the choices that this rank owns into the table, [B, 1 + n or more]: ~token, negative, where it is NaN.

        Unless the choices themselves are summed, the table only tells where logits are NaN.
        """
        choices = block_logits.best() if self._sums_choices else None
        for row, nodes in enumerate(part.nodes):
            for place, node in enumerate((-1, *nodes)):
                if owner_of(part, row, node) == self._rank:
                    token = 0 if choices is None else choices(row, place - 1)
                    table[row, 1 + node] = token if block_logits.is_number(row, place - 1) else ~token

    def commit(self, cache: LookaheadCache, part: BlockPart, accepted: Accepted) -> None:
        """The owner of each path's last node broadcasts the path's keys/values; the leader those of a root alone."""
        paths = {row: path for row, path in enumerate(accepted) if path is not None}
        holders = {row: part.owners[row][path[-1]] if path else LEADER for row, path in paths.items()}
        if paths:
            cache.ensure_capacity(max(cache.lengths) + 1 + max(map(len, paths.values())))
        received: list[tuple[int, int, list[Tensor]]] = []  # row, its length, what follows it
        for holder in sorted(set(holders.values())):
            rows = [row for row in paths if holders[row] == holder]
            if holder == self._rank:
                parts = [cache.read(row, [0, *block_indices(part, row, paths[row])]) for row in rows]
                self._broadcast_data("keys/values", pack(parts), holder)
                continue
            like = [cache.read(row, [0] * (1 + len(paths[row]))) for row in rows]
            found = unpack(self._broadcast_data("keys/values", pack(like), holder), like)
            received += [(row, cache.lengths[row], part) for row, part in zip(rows, found, strict=True)]
        kept: Accepted = [None] * len(accepted)
        for row, path in paths.items():
            is_here = holders[row] == self._rank
            kept[row] = block_indices(part, row, path) if is_here else list(range(1, 1 + len(path)))
        cache.commit(kept)
        for row, start, values in received:
            cache.write(row, start, values)

    # At the end.

    def end(self, do_sample: bool, device: torch.device) -> None:
        """Set every rank's random generator to the leader's state, which is as in plain generate()."""
        if not do_sample or device.type not in READABLE:
            return
        state = generator_state(device)
        self._broadcast("generator", state, LEADER)
        if self._rank != LEADER:
            set_generator_state(device, state)

    def send_tokens(self, tokens: list[int], ended: list[bool]) -> None:
        """Tell the followers the token of each row, and which rows have ended with it."""
        self._broadcast("integers", torch.tensor([*tokens, *ended]), LEADER)

    def receive_tokens(self, num_rows: int) -> tuple[list[int], list[bool]]:
        """The tokens that the leader has passed to `send_tokens`."""
        values = torch.zeros(2 * num_rows, dtype=torch.long)
        self._broadcast("integers", values, LEADER)
        return values[:num_rows].tolist(), values[num_rows:].bool().tolist()

    def logits_of(self, owner: int, logits: Tensor) -> Tensor:
        """Logits of `owner`, broadcast unless it is the leader. logits: [k, V], any of that shape on other ranks."""
        if owner == LEADER:
            return logits
        return self._broadcast_data("logits", logits.contiguous(), owner)

    def _broadcast(self, what: str, values: Tensor, source: int) -> None:
        if source == self._rank:
            self._count(what, values)
        self._communicator.broadcast(values, source)

    def _broadcast_data(self, what: str, values: Tensor, source: int) -> Tensor:
        if source == self._rank:
            self._count(what, values)
        return self._communicator.broadcast_data(values, source)

    def _count(self, what: str, values: Tensor) -> None:
        self._stats.sent_bytes[what] += values.numel() * values.element_size()


class SharedLogits(BlockLogits):
    """The logits of one step's block, split over the ranks; the most likely tokens are known for all nodes.

    `of` is collective: every rank calls it, and only the leader's result is meaningful.
    """

    def __init__(self, group: ProcessGroup, part: BlockPart, logits: Tensor, best: Tensor) -> None:
        """best: [B, 1 + n or more], written by `ProcessGroup._write_choices`."""
        super().__init__(logits)
        self._group, self._part, self._best = group, part, best

    def best(self) -> Callable[[int, int], int]:
        return self._best_known

    def is_number(self, row: int, node: int) -> bool:
        return bool(self._best[row, 1 + node] >= 0)

    def of(self, rows: slice, nodes: list[int]) -> Tensor:
        found = list(zip(range(rows.start, rows.stop), nodes, strict=True))
        owners = [owner_of(self._part, row, node) for row, node in found]
        logits = super().of(rows, [self._place(row, node) for row, node in found]).clone()
        for owner in sorted(set(owners)):
            places = torch.tensor([place for place, known in enumerate(owners) if known == owner], device=logits.device)
            logits[places] = self._group.logits_of(owner, logits[places]).to(logits.device)
        return logits

    def _best_known(self, row: int, node: int) -> int:
        token = int(self._best[row, 1 + node])
        return token if token >= 0 else ~token

    def _place(self, row: int, node: int) -> int:
        """Index of a node in this rank's tree; -1, the root's, for nodes of other ranks."""
        nodes = self._part.nodes[row]
        return nodes.index(node) if node in nodes else -1


class SharedSelection(Selection):
    """Tokens that one rank chooses for all."""

    def __init__(self, request: Request, group: ProcessGroup) -> None:
        super().__init__(request)
        self._group = group


class Leader(SharedSelection):
    """Chooses."""

    def _ended(self, rows: slice, tokens: list[int], were_guessed: bool) -> list[bool]:
        ended = super()._ended(rows, tokens, were_guessed)
        self._group.send_tokens(tokens, ended)
        return ended


class Follower(SharedSelection):
    """Takes over what the leader has chosen."""

    def _choose(self, rows: slice, nodes: list[int]) -> list[int]:
        self._block_logits.of(rows, nodes)
        tokens, self._received = self._group.receive_tokens(len(nodes))
        return tokens

    def _ended(self, rows: slice, tokens: list[int], were_guessed: bool) -> list[bool]:
        return self._received


class PerRowLeader(Leader, PerRowSelection):
    pass


class LockstepLeader(Leader, LockstepSelection):
    pass


class PerRowFollower(Follower, PerRowSelection):
    pass


class LockstepFollower(Follower, LockstepSelection):
    pass


LEADERS, FOLLOWERS = (PerRowLeader, LockstepLeader), (PerRowFollower, LockstepFollower)


def owner_of(part: BlockPart, row: int, node: int) -> int:
    """The rank whose result counts after a node (-1 = root)."""
    return LEADER if node < 0 else part.owners[row][node]


def block_indices(part: BlockPart, row: int, path: list[int]) -> list[int]:
    """Indices of a path's nodes in this rank's block."""
    place = {node: index for index, node in enumerate(part.nodes[row])}
    return [1 + place[node] for node in path]


def pack(rows: list[list[Tensor]]) -> Tensor:
    """Concatenate the bytes of tensors of any shape, dtype and device, on the device of the first."""
    parts = [part for row in rows for part in row]
    return torch.cat([part.reshape(-1).view(torch.uint8).to(parts[0].device) for part in parts])


def unpack(data: Tensor, like: list[list[Tensor]]) -> list[list[Tensor]]:
    """The inverse of `pack`. like: tensors with the shapes, dtypes and devices of the result."""
    sizes = [part.numel() * part.element_size() for row in like for part in row]
    pieces = iter(data.split(sizes))
    # A copy of its own for each piece, because another type's may begin at any byte.
    return [[next(pieces).clone().view(part.dtype).view(part.shape).to(part.device) for part in row] for row in like]


def shared_settings(config: LookaheadConfig) -> LookaheadConfig:
    """The settings for several processes: block sizes that follow what each rank has stored or packed would make them
    diverge.
    """
    mode = "lookahead" if config.mode == "auto" else config.mode
    return dataclasses.replace(config, adaptive=False, mode=mode)


def unsupported_reason(config: LookaheadConfig, request: Request) -> str | None:
    """Why a request is not split over several processes, as a sentence; None if it can be."""
    if not config.uses_window:
        return "guesses that come from all logits of a step are not shared (DIST_WORKERS); MODE='lookahead' is"
    recorded = OutputRecorder(request.generation_config).collected
    if recorded:
        return f"output_{next(iter(recorded))} is not collected from several processes (DIST_WORKERS)"
    if request.synced_gpus:
        return "synced_gpus says that no process has the whole model, which DIST_WORKERS needs"
    if (request.model.tp_size or 1) > 1:
        return "a model whose layers are split over processes (tp_plan) is not whole on each, which DIST_WORKERS needs"
    return None
