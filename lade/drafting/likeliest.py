"""The likeliest tokens of rows of logits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.drafting.top_k_table import BIN_EDGES, ROW_LENGTH
from lade.transfer import HOST, on_host

MAX_SORTED = 2**15  # probabilities that are sorted as they are: for so few of them nothing is faster
MAX_SCRATCH = 2**20  # of a thread, numbers that memory is kept for

_BIN_EDGES = np.array(BIN_EDGES, dtype=np.float32)

_scratch = threading.local()

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # ids and bins, or ids and probabilities, of M rows


def most_likely(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Rows:
    """The ROW_LENGTH most likely tokens of each row and the bins of their probabilities. logits: [M, V].

    top_k, top_p: of sampling, None for all. What they rule out is replaced by the likeliest token, in the rarest bin.
    """
    return with_bins(*likeliest_on_host(logits, temperature), top_k, top_p)


def likeliest_on_host(logits: Tensor, temperature: float = 1.0) -> Rows:
    """Ids and probabilities of the ROW_LENGTH most likely tokens of each row, or of all, [M, K]. logits: [M, V]."""
    values, ids = likeliest(logits, temperature)
    if on_host(ids):
        return ids.numpy(), values.numpy()
    # Both in one copy to the host, which would wait for each.
    found, bits = torch.stack([ids, values.view(torch.int32).long()]).cpu().numpy()
    return found, bits.astype(np.int32).view(np.float32)


def with_bins(found: npt.NDArray[Any], chances: npt.NDArray[Any], top_k: int | None, top_p: float | None) -> Rows:
    """`most_likely` of rows that are known: their ids and probabilities, [M, K] each."""
    if (top_k and top_k < ROW_LENGTH) or (top_p and top_p < 1.0):
        found, chances = _cut(found, chances, top_k or ROW_LENGTH, top_p or 1.0)
    bins = np.searchsorted(_BIN_EDGES, chances)
    missing = ROW_LENGTH - found.shape[1]
    if missing:  # a vocabulary of fewer tokens, or all others are cut off
        found = np.concatenate([found, np.repeat(found[:, :1], missing, axis=1)], axis=1)
        bins = np.concatenate([bins, np.zeros((len(bins), missing), dtype=bins.dtype)], axis=1)
    return found, bins


def likeliest(logits: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the ROW_LENGTH most likely tokens of each row, or of all. logits: [M, V].

    temperature: a tensor [] to leave its value open, in a forward that is captured: all operations are then torch's.
    """
    logits = logits.detach()
    is_captured = isinstance(temperature, Tensor)
    if isinstance(temperature, Tensor) or not on_host(logits) or logits.numel() > MAX_SCRATCH:
        chances = (logits.float() / temperature).softmax(dim=-1)
    else:
        chances = _chances_on_host(logits, temperature)
    if chances.numel() > MAX_SORTED:
        return _top(chances, by_numpy=on_host(chances) and not is_captured)
    values, ids = chances.topk(min(ROW_LENGTH, chances.shape[1]))
    return values, ids


def _chances_on_host(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities in float32, in memory that the next call of this thread overwrites."""
    # The first writes to new memory take as long as the softmax does.
    buffers: list[Tensor] | None = getattr(_scratch, "buffers", None)
    if buffers is None or buffers[0].numel() < logits.numel():
        with torch.inference_mode(False):
            buffers = _scratch.buffers = [
                torch.empty(logits.numel(), dtype=torch.float32, device=HOST) for _ in range(2)
            ]
    scores, chances = (buffer[: logits.numel()].view(logits.shape) for buffer in buffers)
    if temperature == 1.0 and logits.dtype == torch.float32:
        scores = logits
    elif logits.dtype == torch.float32:
        torch.div(logits, temperature, out=scores)
    else:
        scores.copy_(logits).div_(temperature)
    return torch.softmax(scores, dim=-1, out=chances)


def _cut(ids: npt.NDArray[Any], chances: npt.NDArray[Any], top_k: int, top_p: float) -> Rows:
    """What top-k and then top-p sampling leave of rows [M, K] that are sorted by chance."""
    if top_k < ROW_LENGTH:
        chances = chances[:, :top_k]
        chances = chances / np.maximum(chances.sum(1, keepdims=True), np.finfo(chances.dtype).tiny)  # of NaN logits: 0
    before = chances.cumsum(1) - chances
    is_left = before < top_p
    chances = np.where(is_left, chances, 0.0)
    if top_p < 1.0:
        chances = chances / np.maximum(chances.sum(1, keepdims=True), top_p)
    return np.where(is_left, ids[:, :top_k], ids[:, :1]), chances


def _top(chances: Tensor, by_numpy: bool) -> tuple[Tensor, Tensor]:
    """`topk(ROW_LENGTH)` in two rounds: the largest ones lie in the groups with the largest maxima. chances: [M, V].

    A maximum over groups is several times as fast as a sort, and leaves little to sort.
    """
    num_rows, num_tokens = chances.shape
    if num_tokens < 16 * ROW_LENGTH:
        return chances.topk(min(ROW_LENGTH, num_tokens), dim=-1)
    group_size = 8 if num_tokens <= 2**13 else 32 if num_tokens <= 2**15 else 64
    num_groups = -(-num_tokens // group_size)  # group g holds the ids g, g + num_groups, ...
    if num_groups * group_size > num_tokens:
        chances = torch.nn.functional.pad(chances, (0, num_groups * group_size - num_tokens), value=-1.0)
    maxima = chances.view(num_rows, group_size, num_groups).amax(dim=1)
    if by_numpy:
        found = _top_on_host(chances.view(num_rows, group_size, num_groups).numpy(), maxima.numpy())
        if found is not None:
            return found
    groups = maxima.topk(min(ROW_LENGTH, num_groups), sorted=False).indices
    members = torch.arange(group_size, device=chances.device)[:, None] * num_groups
    ids = (groups[:, None] + members).flatten(1)  # [M, group_size * ROW_LENGTH]
    values, places = chances.gather(1, ids).topk(ROW_LENGTH, dim=-1)
    return values, ids.gather(1, places)


def _top_on_host(chances: npt.NDArray[Any], maxima: npt.NDArray[Any]) -> tuple[Tensor, Tensor] | None:
    """The same with numpy, whose partition and sort take half of torch's time; None where groups are equally likely, or NaN.

    chances: [M, group_size, G]. maxima: [M, G].
    """
    num_rows, group_size, num_groups = chances.shape
    least = np.partition(maxima, num_groups - ROW_LENGTH, axis=1)[:, num_groups - ROW_LENGTH, None]
    is_top = maxima >= least
    if (is_top.sum(axis=1) != ROW_LENGTH).any():
        return None
    groups = np.flatnonzero(is_top)  # in all rows
    # A group's first member lies group_size - 1 times a row's groups further in `chances` for each row before.
    row_starts = np.arange(0, num_rows * num_groups, num_groups)[:, None]
    groups = groups.reshape(num_rows, ROW_LENGTH) - row_starts
    ids = (groups[:, None] + np.arange(0, group_size * num_groups, num_groups)[:, None]).reshape(num_rows, -1)
    values = chances.take(ids + row_starts * group_size)
    order = values.argsort(axis=1)[:, : -ROW_LENGTH - 1 : -1] + np.arange(0, ids.size, ids.shape[1])[:, None]
    return torch.from_numpy(values.take(order)), torch.from_numpy(ids.take(order))
