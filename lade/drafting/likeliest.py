"""The likeliest tokens of rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.drafting.top_k_table import BIN_EDGES, ROW_LENGTH
from lade.transfer import on_host

MAX_SORTED = 2**15  # probabilities that are sorted as they are: for so few of them nothing is faster

_BIN_EDGES = np.array(BIN_EDGES, dtype=np.float32)

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

    temperature: a tensor [] to leave its value open.
    """
    scores = logits.detach().float()
    is_one = not isinstance(temperature, Tensor) and temperature == 1.0
    chances = (scores if is_one else scores / temperature).softmax(dim=-1)
    if chances.numel() > MAX_SORTED:
        return _top(chances)
    values, ids = chances.topk(min(ROW_LENGTH, chances.shape[1]))
    return values, ids


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


def _top(chances: Tensor) -> tuple[Tensor, Tensor]:
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
    groups = maxima.topk(min(ROW_LENGTH, num_groups), sorted=False).indices
    members = torch.arange(group_size, device=chances.device)[:, None] * num_groups
    ids = (groups[:, None] + members).flatten(1)  # [M, group_size * ROW_LENGTH]
    values, places = chances.gather(1, ids).topk(ROW_LENGTH, dim=-1)
    return values, ids.gather(1, places)
