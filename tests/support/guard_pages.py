"""Run the kernel on tensors that lie flush with pages nobody may touch: a stray read or write is a segmentation fault.

A GPU does not survive one either: the error cannot be caught, and the process's CUDA context is gone. Triton's
interpreter loads from and stores to the addresses that the kernel computes, so all it takes is memory with such
neighbours. To be run with TRITON_INTERPRET=1. Each call is a process of its own (a fork), once with all tensors at the
ends of their pages, once at the starts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import traceback
from functools import partial

import torch
from torch import Tensor

from lade.forward.cuda import kernel as kernels
from lade.forward.cuda.kernel import triton_attention as ours
from lade.forward.cuda.kernel.packed_mask import FIRST, LENGTH
from support.attention import BF16, F16, F32, Case, tensors_of

TOLERANCE = {F16: 2e-2, BF16: 1e-1, F32: 1e-4}
LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0
TENSORS = ("query", "keys", "values", "packed", "sinks")
RESULTS = ("partial", "log_sums", "output")  # in the order in which the kernel's caller makes them
# What a mask could say wrongly: the column, and by how much.
MISTAKES = {"one slot more than there is": (LENGTH, 1), "a slot before the first": (FIRST, -1)}
new_empty = torch.Tensor.new_empty

call = partial(Case, dtype=F16, spare=0)  # there is no slot behind the longest row's block
CALLS = [
    call(1, (0,)),
    call(1, (63,), heads=8, dim=128, splits=3),
    call(1, (300,), heads=4, dtype=BF16, window=100, splits=64),
    call(3, (64, 0), heads=4, kv_heads=2, dim=80, has_sinks=True),
    call(3, (1, 65), dim=96, value_dim=64, dtype=F32, padding=1, splits=16),
    call(33, (65,), heads=8, dim=80, value_dim=128, window=2, has_sinks=True),
    call(33, (200, 3), heads=2, kv_heads=2, padding=3, dtype=BF16),
    call(65, (63,), heads=2, dim=96, dtype=F32, splits=2),
    call(65, (1,), dim=256, value_dim=192, has_sinks=True),
    call(257, (64,), dtype=BF16, window=64),
]
FAULTY = call(3, (61,), has_sinks=True, splits=1)


class Guards:
    """Allocates tensors between pages that nobody may touch."""

    def __init__(self, at_end: bool, misplaced: str | None = None) -> None:
        """at_end: flush with the page behind a tensor, else with the one before it. misplaced: name of a tensor that
        lies one element too far, so that its last or first one is out of bounds.
        """
        self.at_end, self.misplaced = at_end, misplaced
        self.mappings: list[mmap.mmap] = []  # which are to outlive the tensors

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Of the same strides. There may be gaps between elements, but nothing lies behind the last one."""
        count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes, page = count * tensor.itemsize, mmap.PAGESIZE
        inner = -(-num_bytes // page) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        self.mappings.append(memory)
        offset = page + inner - num_bytes if self.at_end else page
        if name == self.misplaced:
            offset += tensor.itemsize if self.at_end else -tensor.itemsize
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
        flat.fill_(float("nan") if tensor.is_floating_point() else -1)
        copied = flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for address in (start, start + page + inner):
            if LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        return copied


def run(case: Case, at_end: bool, fault: str | None = None) -> bool:
    """Whether the result is right. fault: a tensor to be misplaced, or one of MISTAKES."""
    arguments, *_ = tensors_of(case)
    expected = kernels.reference_block_attention(**arguments).float()
    if fault in MISTAKES:
        column, change = MISTAKES[fault]
        arguments["packed"][..., column] += change
    guards, results = Guards(at_end, misplaced=fault), iter(RESULTS)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = guards.copy(name, value)

    def new_guarded(tensor: Tensor, *shape: object, **others: object) -> Tensor:
        made = new_empty(tensor, *shape, **others)
        # What is empty is the interpreter's own.
        return guards.copy(next(results), made.fill_(float("nan"))) if made.numel() else made

    torch.Tensor.new_empty = new_guarded
    output = ours.triton_block_attention(**arguments, num_splits=case.splits)
    if next(results, None) is not None:
        raise RuntimeError("not all results were guarded")
    return fault is None and bool((output.float() - expected).abs().max() < TOLERANCE[case.dtype])


def end_of(case: Case, at_end: bool, fault: str | None = None) -> int:
    """What becomes of a process that runs it: 0 where the result is right, 1 where not, minus the signal that ended
    it."""
    process = os.fork()
    if process == 0:
        status = 2
        try:
            status = int(not run(case, at_end, fault))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def found() -> dict:
    """The number of calls, those that died or were wrong; the number of calls made faulty on purpose, and those that
    did not die."""
    ends = [(case, at_end, end_of(case, at_end)) for case in CALLS for at_end in (True, False)]
    unsound = [f"{case}, at_end={at_end}: {end}" for case, at_end, end in ends if end]
    faulty = [(name, at_end) for name in (*TENSORS, *RESULTS) for at_end in (True, False)]
    faulty += [(name, change > 0) for name, (_, change) in MISTAKES.items()]
    missed = [fault for fault in faulty if end_of(FAULTY, fault[1], fault[0]) != -signal.SIGSEGV]
    return {"calls": len(CALLS), "unsound": unsound, "faulty": len(faulty), "missed": missed}
