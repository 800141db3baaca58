"""Cases of the block attention, and the tensors of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lade.forward.cuda import kernel as kernels

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    q: int
    lengths: tuple[int, ...]
    heads: int = 1
    kv_heads: int = 1
    dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = F32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    padding: int = 0
    spare: int = 3  # slots of capacity that nothing has been written to
    splits: int | None = None

    @property
    def reach(self) -> int:
        """Keys this many positions or more before a token are hidden."""
        return self.window or 10**9


def tensors_of(case: Case) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Arguments of block_attention; which tokens of the block each may see, [B, q, q]; positions after the root's,
    [B, q]. Keys and values lie strided, as in a cache, each in its own way."""
    generator = torch.Generator().manual_seed(case.q)
    batch_size, capacity = len(case.lengths), max(case.lengths) + case.q + case.spare

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    query = normal(batch_size, case.q, case.heads, case.dim).transpose(1, 2)
    keys = normal(batch_size, case.kv_heads, capacity, case.dim + 16)[..., : case.dim]
    values = normal(batch_size, capacity, case.kv_heads, case.value_dim or case.dim).transpose(1, 2)
    sinks = normal(case.heads) if case.has_sinks else None
    offsets = torch.randint(0, 8, (batch_size, case.q), generator=generator)
    offsets[:, 0] = 0
    visible = torch.rand(batch_size, case.q, case.q, generator=generator) < 0.3
    visible |= torch.eye(case.q, dtype=torch.bool)
    visible &= offsets[:, :, None] - offsets[:, None] < case.reach
    lengths = torch.tensor(case.lengths)
    first_slots = torch.maximum(lengths.clamp(max=case.padding)[:, None], lengths[:, None] + offsets - case.reach + 1)
    packed = kernels.pack_mask(visible, lengths, first_slots)
    arguments = {"query": query, "keys": keys, "values": values, "packed": packed, "sinks": sinks}
    return arguments | {"scale": 1 / 9, "softcap": case.softcap}, visible, offsets
