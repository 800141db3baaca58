"""Block attention as a Triton kernel; see docs/gpu.md.

The only module that imports triton; import it where `unavailable_reason()` is None. Checked on an H200 and an H100,
tested in Triton's interpreter, and compiled for sm_80 and sm_90.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lade.forward.cuda.kernel.packed_mask import FIRST, WORD_BITS, WORDS

LOG2_E = 1.4426950408889634
# Globals that kernels can read.
_FIRST, _WORDS, _WORD_BITS, _LOG2_E = map(tl.constexpr, (FIRST, WORDS, WORD_BITS, LOG2_E))

MAX_SPLITS, MIN_SPLIT_BLOCK = 64, 16
WARPS_PER_SM = 8  # limit of the split kernel's registers and shared memory
MERGE_TILE = 8192  # values per program of the merge: 64 registers in each of 128 threads


@triton.jit
def _tanh(x):
    """tanh, by a series near zero, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    # Where exp2 overflows or underflows, the result is still right: 1 or -1.
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp2(x * (2 * _LOG2_E)) + 1))


# Parameters of one kind share a line.
# fmt: off
@triton.jit
def _attend(
    best, total, output, query,
    keys, values, slot, key_stride_c, value_stride_c, is_key, visible, inner_scale, outer_scale,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):
    """Online softmax over one tile of keys, in slots [N]: updates the maximum [M] (log2), the sum of weights [M] and
    the weighted values [M, D_v].
    """
    key_dim, value_dim = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    key_pointers = keys + slot[:, None] * key_stride_c + key_dim[None, :]
    value_pointers = values + slot[:, None] * value_stride_c + value_dim[None, :]
    key_mask, value_mask = is_key[:, None], is_key[:, None]
    if KEY_BLOCK != KEY_DIM:
        key_mask = key_mask & (key_dim < KEY_DIM)[None, :]
    if VALUE_BLOCK != VALUE_DIM:
        value_mask = value_mask & (value_dim < VALUE_DIM)[None, :]
    keys = tl.load(key_pointers, mask=key_mask, other=0.0)  # [N, D]
    values = tl.load(value_pointers, mask=value_mask, other=0.0)  # [N, D_v]
    if UPCAST:
        keys, values = keys.to(tl.float32), values.to(tl.float32)

    # ieee: tf32 would round float32 to 10 bits.
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * inner_scale  # [M, N]
    if HAS_SOFTCAP:
        scores = _tanh(scores) * outer_scale
    scores = tl.where(visible, scores, float("-inf"))

    new_best = tl.maximum(best, tl.max(scores, axis=1))
    finite_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # no visible key so far
    weights = tl.exp2(scores - finite_best[:, None])
    decay = tl.exp2(best - finite_best)
    total = total * decay + tl.sum(weights, axis=1)
    output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
    return new_best, total, output


# No specialisation on values that change between steps, which would trigger recompilation.
@triton.jit(do_not_specialize=["packed_stride_b", "packed_stride_q", "num_queries", "num_splits"])
def split_kernel(
    query, keys, values, packed, partial, log_sums,
    query_stride_b, query_stride_h, query_stride_q,
    key_stride_b, key_stride_h, key_stride_c,
    value_stride_b, value_stride_h, value_stride_c,
    packed_stride_b, packed_stride_q,
    num_queries, num_kv_heads, num_splits, inner_scale, outer_scale,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):
    """Attention over one split of the keys. Grid: (tiles of M query rows, splits, batch rows * key/value heads).

    Row r of a key/value head is query token r // GROUP of its query head r % GROUP. Writes partial [B*H_kv, splits,
    rows, D_v], float32, and log_sums [B*H_kv, splits, rows], log2; -inf for a split without visible keys.
    """
    split, head = tl.program_id(1), tl.program_id(2)
    batch = (head // num_kv_heads).to(tl.int64)
    kv_head = (head % num_kv_heads).to(tl.int64)
    num_rows = num_queries * GROUP
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    token = row // GROUP
    out_row = (head.to(tl.int64) * num_splits + split) * num_rows + row

    packed += batch * packed_stride_b
    packed_row = packed + token * packed_stride_q
    length = tl.load(packed)
    first = tl.load(packed_row + _FIRST, mask=is_row, other=0)  # [M] first slot of the prefix that each row sees

    # The prefix's tiles, from the first visible slot on, then the block's, divided evenly among the splits.
    first_slot = tl.min(tl.where(is_row, tl.minimum(first, length), length), axis=0)
    prefix_tiles = tl.cdiv(length - first_slot, BLOCK_N)
    num_tiles = prefix_tiles + tl.cdiv(num_queries, BLOCK_N)
    share = tl.cdiv(num_tiles, num_splits)
    begin = split * share
    end = tl.minimum(begin + share, num_tiles)
    if begin >= end:
        tl.store(log_sums + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
        return

    key_dim, value_dim = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    query += batch * query_stride_b + kv_head * GROUP * query_stride_h
    query_pointers = query + ((row % GROUP) * query_stride_h + token * query_stride_q)[:, None] + key_dim[None, :]
    tile = tl.load(query_pointers, mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)  # [M, D]
    if UPCAST:
        tile = tile.to(tl.float32)
    keys += batch * key_stride_b + kv_head * key_stride_h
    values += batch * value_stride_b + kv_head * value_stride_h

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for index in range(begin, tl.minimum(end, prefix_tiles)):
        slot = first_slot + index * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = slot < length
        visible = is_key[None, :] & (slot[None, :] >= first[:, None])
        best, total, output = _attend(
            best, total, output, tile, keys, values, slot, key_stride_c, value_stride_c, is_key, visible,
            inner_scale, outer_scale, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, HAS_SOFTCAP, UPCAST,
        )
    for index in range(tl.maximum(begin, prefix_tiles), end):
        other = (index - prefix_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)  # block tokens
        is_key = other < num_queries
        first_word = (index - prefix_tiles) * BLOCK_N // _WORD_BITS
        last_word = (num_queries - 1) // _WORD_BITS
        word = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for i in tl.static_range((BLOCK_N + _WORD_BITS - 1) // _WORD_BITS):
            column = tl.load(packed_row + _WORDS + tl.minimum(first_word + i, last_word), mask=is_row, other=0)
            word = tl.where((other // _WORD_BITS == first_word + i)[None, :], column[:, None], word)
        visible = ((word >> (other % _WORD_BITS)[None, :]) & 1 == 1) & is_key[None, :]
        slot = length + other
        best, total, output = _attend(
            best, total, output, tile, keys, values, slot, key_stride_c, value_stride_c, is_key, visible,
            inner_scale, outer_scale, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, HAS_SOFTCAP, UPCAST,
        )

    has_seen = total > 0
    output = output / tl.where(has_seen, total, 1.0)[:, None]
    log_sum = tl.where(has_seen, best + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    tl.store(log_sums + out_row, log_sum, mask=is_row)
    out_mask = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(partial + out_row[:, None] * VALUE_DIM + value_dim[None, :], output, mask=out_mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    partial, log_sums, sinks, output, num_rows, num_kv_heads, num_splits,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    # fmt: on
    """Merge the splits by their log-sums. Grid: (tiles of query rows, batch rows * key/value heads).

    Writes output [B, q, H, D_v].
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, VALUE_BLOCK)
    is_row, is_dim = row < num_rows, dim < VALUE_DIM
    query_head = (head % num_kv_heads) * GROUP + row % GROUP
    at = (head.to(tl.int64) * num_splits + split)[None, :] * num_rows + row[:, None]  # [M, S]
    is_split = is_row[:, None] & (split < num_splits)[None, :]
    log_sum = tl.load(log_sums + at, mask=is_split, other=float("-inf"))

    best = tl.max(log_sum, axis=1)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        best = tl.maximum(best, sink)
    best = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(log_sum - best[:, None])
    total = tl.sum(weights, axis=1)
    if HAS_SINKS:
        total += tl.exp2(sink - best)

    # Splits without visible keys have written no partial result.
    is_written = (log_sum > float("-inf"))[:, :, None] & is_dim[None, None, :]
    parts = tl.load(
        partial + at[:, :, None] * VALUE_DIM + dim[None, None, :], mask=is_written, other=0.0
    )  # [M, S, D_v]
    result = tl.sum(parts * weights[:, :, None], axis=1) / tl.where(total > 0, total, 1.0)[:, None]
    batch, token = (head // num_kv_heads).to(tl.int64), row // GROUP
    out_row = (batch * (num_rows // GROUP) + token) * (num_kv_heads * GROUP) + query_head
    out_mask = is_row[:, None] & is_dim[None, :]
    tl.store(output + out_row[:, None] * VALUE_DIM + dim[None, :], result.to(output.dtype.element_ty), mask=out_mask)


class Tiles(NamedTuple):
    """Tile sizes of a program: M query rows by N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles without register spills that leave room for two programs of 4 warps on an SM, for sm_80 and sm_90.

    num_rows: q times the query heads per key/value head. Chosen from the compiler's reports.
    """
    dim = triton.next_power_of_2(max(key_dim, value_dim, 64))
    rows = max(16, triton.next_power_of_2(num_rows))
    if dtype.itemsize == 4:  # float32 products do not use tensor cores; operands fill the registers
        largest, block_n = (32, 32) if dim == 64 else (16, 16)
        return Tiles(min(rows, largest), block_n, num_warps=4, num_stages=2)
    if dim > 128:
        return Tiles(min(rows, 64), block_n=32, num_warps=8 if rows >= 64 else 4, num_stages=2)
    block_m = min(rows, 128)
    num_stages = 2 if (block_m, dim) == (64, 128) else 3
    return Tiles(block_m, block_n=64, num_warps=8 if block_m == 128 else 4, num_stages=num_stages)


def choose_splits(num_programs: int, tiles: Tiles, num_sms: int) -> int:
    """Number of splits that fills the device once, whatever the length: under a CUDA graph it changes.

    Splits without keys exit. num_programs: programs without splits.
    """
    fill = num_sms * WARPS_PER_SM // (tiles.num_warps * num_programs)
    return max(1, min(fill, MAX_SPLITS))


@lru_cache(maxsize=16)
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def triton_block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As `lade.forward.cuda.kernel.block_attention`, without float64. num_splits: None for `choose_splits`."""
    query, keys, values, packed = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values, packed))
    batch_size, num_heads, num_queries, key_dim = query.shape
    num_kv_heads, value_dim = keys.shape[1], values.shape[3]
    group, num_programs = num_heads // num_kv_heads, batch_size * num_kv_heads
    num_rows = num_queries * group

    tiles = choose_tiles(num_rows, key_dim, value_dim, query.dtype)
    row_tiles = triton.cdiv(num_rows, tiles.block_m)
    if num_splits is None:
        num_splits = choose_splits(row_tiles * num_programs, tiles, _num_sms(query.device))
    partial = query.new_empty((num_programs, num_splits, num_rows, value_dim), dtype=torch.float32)
    log_sums = query.new_empty((num_programs, num_splits, num_rows), dtype=torch.float32)
    output = query.new_empty((batch_size, num_queries, num_heads, value_dim))
    # Few kinds of the merge: one more for each size of block would have to be compiled.
    value_block, split_block = block_size(value_dim), max(MIN_SPLIT_BLOCK, triton.next_power_of_2(num_splits))
    merge_rows = max(1, MERGE_TILE // (split_block * value_block))

    # fmt: off
    with torch.cuda.device_of(query):  # the model may span several GPUs
        split_kernel[(row_tiles, num_splits, num_programs)](
            query, keys, values, packed, partial, log_sums,
            *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], packed.stride(0), packed.stride(2),
            num_queries, num_kv_heads, num_splits, *kernel_scales(scale, softcap),
            GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_BLOCK=block_size(key_dim), VALUE_BLOCK=value_block,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, HAS_SOFTCAP=softcap is not None,
            UPCAST=query.device.type == "cpu",  # Triton's interpreter multiplies the bit patterns of bfloat16
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )
        merge_kernel[(triton.cdiv(num_rows, merge_rows), num_programs)](
            partial, log_sums, log_sums if sinks is None else sinks.contiguous(), output,
            num_rows, num_kv_heads, num_splits, GROUP=group, VALUE_DIM=value_dim, VALUE_BLOCK=value_block,
            BLOCK_M=merge_rows, BLOCK_S=split_block, HAS_SINKS=sinks is not None, num_warps=4,
        )
    # fmt: on
    return output


def block_size(head_dim: int) -> int:
    """Head dimension padded to a power of 2 that tensor cores accept; the padding is masked."""
    return max(16, triton.next_power_of_2(head_dim))


def kernel_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factors before and after the soft cap, such that scores are in log2."""
    return (scale * LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2_E)
