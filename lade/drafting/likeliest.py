"""The likeliest tokens of rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.common.transfer import on_host
from lade.drafting.top_k_table import ROW_LENGTH, Packed, packed

LEAST_GROUPED = 2**14  # tokens of a vocabulary in which looking for groups first pays
GROUP_SIZE = 32  # tokens
# About how many times its largest probability a group without likely tokens has together.
TOTAL_OF_LARGEST = 2.0

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # ids and probabilities of M rows


def most_likely(logits: Tensor, temperature: float = 1.0) -> Packed:
    """The ROW_LENGTH most likely tokens of each row, with their probabilities, [M, ROW_LENGTH]. logits: [M, V]."""
    return packed(*likeliest_on_host(logits, temperature))


def likeliest_on_host(logits: Tensor, temperature: float = 1.0) -> Rows:
    """Ids and probabilities of the ROW_LENGTH most likely tokens of each row, or of all, [M, K]. logits: [M, V].

    On a CPU, in a vocabulary of LEAST_GROUPED tokens or more, the probabilities are relative to an estimate of the sum
    over all tokens: one factor for a row, which takes a fraction of that sum's time.
    """
    logits = logits.detach()
    if not on_host(logits):
        values, ids = likeliest(logits, temperature)
        # Both in one copy to the host, which would otherwise wait twice.
        found, bits = torch.stack([ids, values.view(torch.int32).long()]).cpu().numpy()
        return found, bits.astype(np.int32).view(np.float32)
    is_large = logits.shape[1] >= LEAST_GROUPED
    values, ids = (_likeliest_by_groups if is_large else likeliest)(logits, temperature)
    return ids.numpy(), values.numpy()


def likeliest(logits: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the ROW_LENGTH most likely tokens of each row, or of all, [M, K] each. logits: [M, V].

    temperature: a tensor [] in a captured forward, where its value may change.
    """
    chances = (logits.detach().float() / temperature).softmax(dim=-1)
    values, ids = chances.topk(min(ROW_LENGTH, chances.shape[1]))
    return values, ids


def _likeliest_by_groups(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`likeliest` in a large vocabulary, where torch takes long to select among all tokens on a CPU.

    Group g holds the ids g, g + G, ..; what is left over behind the last groups is looked at with the likeliest ones.
    Only maxima over groups read all logits.
    """
    num_tokens, device = logits.shape[1], logits.device
    num_groups = num_tokens // GROUP_SIZE
    end = GROUP_SIZE * num_groups
    steps, rest = torch.arange(0, end, num_groups, device=device), torch.arange(end, num_tokens, device=device)
    maxima = logits[:, :end].unflatten(1, (GROUP_SIZE, num_groups)).amax(dim=1).float()
    best, groups = maxima.topk(ROW_LENGTH)
    ids = (groups[:, None] + steps[:, None]).flatten(1)
    ids = torch.cat([ids, rest.expand(len(ids), -1)], dim=1)
    candidates = logits.gather(1, ids).float()
    largest = candidates.amax(dim=1, keepdim=True)
    maxima, best, candidates = (((part - largest) / temperature).exp_() for part in (maxima, best, candidates))
    others = maxima.sum(dim=1, keepdim=True) - best.sum(dim=1, keepdim=True)
    total = candidates.sum(dim=1, keepdim=True) + TOTAL_OF_LARGEST * others
    values, places = candidates.topk(ROW_LENGTH)
    return values / total, ids.gather(1, places)
