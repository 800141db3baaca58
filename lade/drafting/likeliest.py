"""The likeliest tokens of rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.common.transfer import on_host
from lade.drafting.top_k_table import ROW_LENGTH, Packed, packed

LEAST_GROUPED = 16 * ROW_LENGTH  # tokens of a vocabulary in which looking for groups first pays
# Up to so many tokens: the size of a group that is fastest, and about how many times its largest probability all of it
# has together, in groups without likely tokens. Probabilities of 4,586 rows of the bundled checkpoint (4,096 tokens)
# are within 4 % of the exact ones at temperatures of 0.4 and 0.7; at 1 the median is right and one row in a hundred is
# 10 % too high, at 1.5 13 % and 44 %. The error is one factor for a row: the order of its tokens stays.
GROUPS = ((2**13, 8, 1.25), (2**16, 16, 1.5), (2**62, 32, 2.0))

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # ids and probabilities of M rows


def most_likely(logits: Tensor, temperature: float = 1.0) -> Packed:
    """The ROW_LENGTH most likely tokens of each row, with their probabilities, [M, ROW_LENGTH]. logits: [M, V]."""
    return packed(*likeliest_on_host(logits, temperature))


def likeliest_on_host(logits: Tensor, temperature: float = 1.0) -> Rows:
    """Ids and probabilities of the ROW_LENGTH most likely tokens of each row, or of all, [M, K]. logits: [M, V].

    On a CPU, in a vocabulary of LEAST_GROUPED tokens or more, the probabilities are relative to an estimate of the sum
    over all tokens, which takes a fraction of that sum's time: see GROUPS. They are cut to the first 12 bits or more
    after their first one (to 10 in the choice among groups of tokens, where the vocabulary has more than 131,072):
    tokens that are equal in these are in any order.
    """
    logits = logits.detach()
    if not on_host(logits):
        values, ids = likeliest(logits, temperature)
        # Both in one copy to the host, which would otherwise wait twice.
        found, bits = torch.stack([ids, values.view(torch.int32).long()]).cpu().numpy()
        return found, bits.astype(np.int32).view(np.float32)
    if logits.shape[1] < LEAST_GROUPED:
        values, ids = likeliest(logits, temperature)
        return ids.numpy(), values.numpy()
    with np.errstate(all="ignore"):  # even if numpy is set to raise
        return _likeliest_by_groups(logits, temperature)


def likeliest(logits: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the ROW_LENGTH most likely tokens of each row, or of all, by torch. logits: [M, V].

    temperature: a tensor [] in a captured forward, where its value may change.
    """
    chances = (logits.detach().float() / temperature).softmax(dim=-1)
    values, ids = chances.topk(min(ROW_LENGTH, chances.shape[1]))
    return values, ids


def _likeliest_by_groups(logits: Tensor, temperature: float) -> Rows:
    """`likeliest_on_host` in a large vocabulary. logits: [M, V]. Only maxima over groups read all of it.

    Group g holds the ids g, g + G, ..; what is left over behind the last groups is looked at with the likeliest ones.
    """
    num_rows, num_tokens = logits.shape
    group_size, total_of_largest = next((size, total) for up_to, size, total in GROUPS if num_tokens <= up_to)
    num_groups = num_tokens // group_size
    end = group_size * num_groups
    maxima = logits[:, :end].reshape(num_rows, group_size, num_groups).amax(dim=1).float().numpy()
    largest = np.maximum.reduce(maxima, axis=1, keepdims=True)
    weights = _weights(maxima, largest, temperature)
    sums = np.add.reduce(weights, axis=1)
    groups, found = _largest(weights.view(np.int32))
    sums -= np.add.reduce(found.view(np.float32), axis=1)
    sums *= total_of_largest  # what the other groups have together
    ids = (groups[:, None] + np.arange(0, end, num_groups, dtype=np.int32)[:, None]).reshape(num_rows, -1)
    if end < num_tokens:
        rest = np.arange(end, num_tokens, dtype=np.int32)
        ids = np.concatenate([ids, np.broadcast_to(rest, (num_rows, len(rest)))], axis=1)
    candidates = logits.gather(1, torch.from_numpy(ids.astype(np.int64))).float().numpy()
    weights = _weights(candidates, largest, temperature)
    sums += np.add.reduce(weights, axis=1)
    places, found = _largest(weights.view(np.int32))
    places += np.arange(0, ids.size, ids.shape[1], dtype=np.int32)[:, None]
    return ids.take(places), found.view(np.float32) / sums[:, None]


def _weights(logits: npt.NDArray[np.float32], largest: npt.NDArray[Any], temperature: float) -> npt.NDArray[Any]:
    """Probabilities up to a factor, in place of the logits [M, N]. largest: [M, 1]."""
    logits -= largest
    if temperature != 1.0:
        logits /= temperature
    return np.exp(logits, out=logits)


def _largest(bits: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Indices and values of the ROW_LENGTH largest numbers of each row, largest first, [M, ROW_LENGTH] each.

    bits: [M, N] of float32 numbers, and overwritten. numpy sorts numbers with fast instructions, but does not return
    their indices: so each number's index replaces its last bits. As integers they keep their order, NaN included.
    """
    num_columns = bits.shape[1]
    place = (1 << (num_columns - 1).bit_length()) - 1
    bits &= ~place
    bits |= np.arange(num_columns, dtype=np.int32)
    bits.partition(num_columns - ROW_LENGTH, axis=1)
    found = bits[:, num_columns - ROW_LENGTH :]
    found.sort(axis=1)
    found = found[:, ::-1]
    return found & place, found
