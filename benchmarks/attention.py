"""Attention of one block against a long cache: lade's kernel, transformers' sdpa with a 4-D mask, flex attention.

    python benchmarks/attention.py --contexts 512,2048,8192,32768

Shapes of one layer of a 7B model, block of 56 tokens. On a GPU the calls of all "layers" are captured in one CUDA
graph, each layer with keys and values of its own so that none of them come from the L2 cache, and the share of the
memory bandwidth is the bytes of the keys and values that a block has to read, over the time, over the bandwidth
measured with a large copy. No GPU has run this yet. On a CPU it compares the plain-torch form with sdpa on a small
shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lade import kernels
from lade.block.mask import Block, block_mask

GPU_SHAPES = {"7B": (32, 32, 128), "7B, grouped": (32, 8, 128)}  # query heads, key/value heads, head dimension
CPU_SHAPES = {"small": (8, 8, 64), "small, grouped": (8, 2, 64)}
DISTINCT_BYTES = 256 * 2**20  # of keys and values per graph: several times the L2 cache of a data-centre GPU
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem:
    """One block behind `context` committed slots. query: [1, H, q, D]; keys, values: [layers, 1, H_kv, C, D]."""

    def __init__(self, shape: tuple[int, int, int], context: int, block: int, device: str, dtype: torch.dtype) -> None:
        heads, self.kv_heads, dim = shape
        self.group, self.scale, self.context, self.block = heads // self.kv_heads, dim**-0.5, context, block
        torch.manual_seed(0)
        num_slots = context + block
        self.bytes = 2 * self.kv_heads * num_slots * dim * dtype.itemsize
        num_layers = max(1, -(-DISTINCT_BYTES // self.bytes)) if device == "cuda" else 1
        self.query = torch.randn(1, heads, block, dim, device=device, dtype=dtype)
        # Their capacity is larger than what is filled, as in a cache.
        storage = torch.randn(2, num_layers, 1, self.kv_heads, num_slots + 64, dim, device=device, dtype=dtype)
        self.keys, self.values = storage[:, :, :, :, :num_slots]
        # Candidates of 4 tokens each, behind the root: a token tree and a window have masks like this.
        token = torch.arange(block, device=device)
        self.visible = (token[:, None] >= token) & ((token[:, None] // 4 == token // 4) | (token == 0))[None]
        self.packed = kernels.pack_mask(self.visible, torch.tensor([context], device=device))
        offsets = (token % 4)[None]
        rows = Block(
            tokens=offsets,
            offsets=offsets,
            positions=context + offsets,
            visible=self.visible,
            logit_rows=token,
            lengths=[context],
            key_mask=None,
        )
        self.additive = block_mask(rows, dtype)

    def method(self, name: str) -> Attention:
        return {"lade": self.lade, "sdpa": self.sdpa, "flex": self.flex, "torch": self.two_parts}[name]()

    def lade(self) -> Attention:
        return lambda query, keys, values: kernels.block_attention(query, keys, values, self.packed, scale=self.scale)

    def two_parts(self) -> Attention:
        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return kernels.reference_block_attention(query, keys, values, self.packed, scale=self.scale)

        return attend

    def sdpa(self) -> Attention:
        """What a model of transformers calls, `repeat_kv` included."""
        module = SimpleNamespace(num_key_value_groups=self.group, is_causal=True)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return sdpa_attention_forward(module, query, keys, values, self.additive, scaling=self.scale)[0]

        return attend

    def flex(self) -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        visible = self.additive[0, 0] == 0  # [q, slots]
        num_slots = visible.shape[1]
        mask = create_block_mask(
            lambda b, h, q, slot: visible[q, slot], None, None, self.block, num_slots, device=self.query.device
        )
        compiled = torch.compile(flex_attention, dynamic=False)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            output = compiled(query, keys, values, block_mask=mask, scale=self.scale, enable_gqa=self.group > 1)
            return output.transpose(1, 2)

        return attend

    def error(self, attend: Attention) -> float:
        """Largest difference to the definition in float32."""
        states = (x.float() for x in (self.query, self.keys[0], self.values[0]))
        expected = kernels.reference_block_attention(*states, self.packed, scale=self.scale)
        return (attend(self.query, self.keys[0], self.values[0]).float() - expected).abs().max().item()

    def run_layers(self, attend: Attention) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            attend(self.query, keys, values)


def milliseconds(problem: Problem, attend: Attention, trials: int) -> list[float]:
    """Time of one call in each trial."""
    on_gpu = problem.query.is_cuda
    run = captured(problem, attend) if on_gpu else lambda: problem.run_layers(attend)
    run()
    times = []
    for _ in range(trials):
        repeats = 0
        synchronize(on_gpu)
        started = time.perf_counter()
        while repeats < 3 or time.perf_counter() - started < 0.05:
            run()
            synchronize(on_gpu)
            repeats += 1
        times.append((time.perf_counter() - started) * 1e3 / (repeats * len(problem.keys)))
    return times


def captured(problem: Problem, attend: Attention) -> Callable[[], None]:
    """All layers' calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and warm up outside of the capture
        attend(problem.query, problem.keys[0], problem.values[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run_layers(attend)
    return graph.replay


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """Bytes per second that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * 2**31 / statistics.median(times[2:])


def measure(problem: Problem, names: list[str], trials: int, bandwidth: float | None) -> dict[str, Any]:
    """Figures of each method; a method that fails is reported and does not end the run."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            attend = problem.method(name)
            error = problem.error(attend)
            times = harness.spread(milliseconds(problem, attend, trials))
        except Exception as failure:
            found[name] = {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0]}
            continue
        share = problem.bytes / (times["median"] / 1e3) / bandwidth if bandwidth else None
        found[name] = {"milliseconds": times, "share_of_bandwidth": share and round(share, 3), "error": error}
    return found


def show(shape: str, context: int, found: dict[str, Any]) -> None:
    for name, row in found.items():
        if "failed" in row:
            print(f"{shape:<14} {context:>7} {name:<6} {row['failed'][:80]}")
            continue
        share = f"{row['share_of_bandwidth']:>10.0%}" if row["share_of_bandwidth"] else f"{'-':>10}"
        times, base = row["milliseconds"], found.get("sdpa", {}).get("milliseconds")
        ratio = f"{base['median'] / times['median']:>9.2f}" if base else f"{'-':>9}"
        print(
            f"{shape:<14} {context:>7} {name:<6} {times['median']:>9.4f} {times['p20']:>9.4f} {times['p80']:>9.4f}"
            f"{ratio} {share} {row['error']:>9.1e}",
            flush=True,
        )


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contexts = "512,1024,2048,4096,8192,16384,32768" if on_gpu else "512,2048"
    parser.add_argument("--contexts", default=contexts, help="committed slots, separated by commas")
    parser.add_argument("--block", type=int, default=56, help="query tokens: (N-1)(W+G)")
    parser.add_argument(
        "--dtype", default="bfloat16" if on_gpu else "float32", choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument(
        "--methods", default="sdpa,flex,lade" if on_gpu else "sdpa,torch", help="of sdpa,flex,lade,torch"
    )
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    device, dtype = "cuda" if on_gpu else "cpu", getattr(torch, args.dtype)
    names = args.methods.split(",")
    if not kernels.is_available():
        print(f"No kernel is measured: {kernels.unavailable_reason()}. The plain-torch form is compared with sdpa.")
    bandwidth = copy_bandwidth() if on_gpu else None
    if bandwidth:
        print(f"bandwidth of a copy: {bandwidth / 1e9:,.0f} GB/s")
    print(
        f"{'shape':<14} {'context':>7} {'method':<6} {'ms':>9} {'p20':>9} {'p80':>9} {'to sdpa':>8} {'bandwidth':>10} {'error':>9}"
    )
    rows: list[dict[str, Any]] = []
    figures = {
        "benchmark": "attention",
        "environment": harness.machine(torch.device(device), dtype),
        "kernel": kernels.unavailable_reason() or "triton",
        "bytes_per_second_of_a_copy": bandwidth,
        "block": args.block,
        "trials": args.trials,
        "rows": rows,
    }
    with harness.reporting(figures, args.out):
        for label, shape in (GPU_SHAPES if on_gpu else CPU_SHAPES).items():
            for context in map(int, args.contexts.split(",")):
                with torch.no_grad():
                    problem = Problem(shape, context, args.block, device, dtype)
                    found = measure(problem, names, args.trials, bandwidth)
                show(label, context, found)
                heads = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
                rows.append(heads | {"context": context, "bytes": problem.bytes, "methods": found})


if __name__ == "__main__":
    main()
