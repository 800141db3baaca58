"""Compile the kernels ahead of time for GPUs that need not be there, with the launch settings of the library.

Takes a JSON list of [dtype, head dim, query rows, compute capability] and writes one JSON line for each: registers, and
bytes of shared memory and of stack (spilled registers). A process of its own, because triton must not be interpreting
here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lade.forward.cuda.kernel import triton_attention as ours

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def source(kernel, dtype: str, constants: dict) -> ASTSource:
    """As a launch would see it: pointers and strides of keys, values and queries divisible by 16."""
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("query", "keys", "values", "output", "sinks"):
            signature[name] = f"*{dtype}"
        elif name in ("partial", "log_sums"):
            signature[name] = "*fp32"
        elif name == "packed":
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name.endswith("_scale") else "i32"
        if signature[name].startswith("*") or re.match(r"(query|key|value)_stride", name):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout + report.stderr)
    return int(found[1]), int(found[2])


def compile_pair(dtype: str, dim: int, rows: int, capability: int) -> list[dict]:
    tiles = ours.choose_tiles(rows, dim, dim, DTYPES[dtype])
    width = ours.block_size(dim)
    shared = {"GROUP": 4 if rows > 64 else 1, "VALUE_DIM": dim, "VALUE_BLOCK": width}
    split_constants = shared | {"KEY_DIM": dim, "KEY_BLOCK": width, "HAS_SOFTCAP": rows > 64, "UPCAST": False}
    split_constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    splits = ours.MIN_SPLIT_BLOCK
    merge_constants = shared | {"BLOCK_S": splits, "HAS_SINKS": rows > 64}
    merge_constants |= {"BLOCK_M": max(1, ours.MERGE_TILE // (splits * width))}
    split_options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    results = []
    for kernel, constants, options in (
        (ours.split_kernel, split_constants, split_options),
        (ours.merge_kernel, merge_constants, {"num_warps": 4}),
    ):
        compiled = triton.compile(
            source(kernel, dtype, constants), target=GPUTarget("cuda", capability, 32), options=options
        )
        registers, stack = resources(compiled.asm["cubin"])
        block = [constants["BLOCK_M"], constants.get("BLOCK_N", constants.get("BLOCK_S"))]
        found = {"kernel": kernel.__name__, "dtype": dtype, "head_dim": dim, "rows": rows, "sm": capability}
        found |= {"block": block, "shared_bytes": compiled.metadata.shared}
        results.append(found | {"registers": registers, "stack_bytes": stack})
    return results


if __name__ == "__main__":
    for task in json.loads(sys.argv[1]):
        for result in compile_pair(*task):
            print(json.dumps(result), flush=True)
