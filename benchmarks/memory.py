"""The cost of lade's memory by itself, without a model: rows per microsecond while it is empty, half full and full;
loading and saving.

    python benchmarks/memory.py
    python benchmarks/memory.py --rows 500000 --trials 5

Rows are written to a `TopKTable` of the default memory's size in calls of --batch, as a decoding step does, each with a
key that the table does not have. Prints a table and ends with one JSON line: medians with p20/p80 over the trials.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from lade.drafting.memory import MAX_BYTES, Memory
from lade.drafting.top_k_table import BYTES_PER_ROW, ROW_LENGTH, TopKTable

FILLINGS = {"empty": 0.0, "half full": 0.5, "full": 1.0, "full, all rows replaced once": 2.0}


def write(table: TopKTable, first_key: int, num_rows: int, batch: int) -> float:
    """Rows per microsecond of this thread's time, keys counting up."""
    rows = np.arange(batch * ROW_LENGTH, dtype=np.int32).reshape(batch, ROW_LENGTH)
    calls = [list(range(key, key + batch)) for key in range(first_key, first_key + num_rows - batch + 1, batch)]
    started = time.thread_time()
    for keys in calls:
        table.put(keys, rows)
    return batch * len(calls) / (time.thread_time() - started) / 1e6


def write_speeds(capacity: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {name: [] for name in FILLINGS}
    for _ in range(args.trials):
        for name, filling in FILLINGS.items():
            table, num_rows = TopKTable(capacity), int(filling * capacity)
            write(table, 0, num_rows, args.batch)
            found[name].append(write(table, num_rows, args.writes, args.batch))
    return {name: harness.spread(speeds) for name, speeds in found.items()}


def file_seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Saving a memory with so many rows, and loading it again."""
    keys = np.arange(args.rows)
    rows = np.zeros((len(keys), ROW_LENGTH), dtype=np.int32)
    max_bytes = 4 * args.rows * BYTES_PER_ROW  # most of it is for rows by context
    memory = Memory(max_bytes)
    memory.identity = {"model_type": "none", "vocab_size": 1, "hidden_size": 1, "signs": ""}
    memory.table.put(keys.tolist(), rows)
    saving, loading = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "memory.safetensors")
        for _ in range(args.trials):
            started = time.perf_counter()
            memory.save(path)
            saving.append(time.perf_counter() - started)
            started = time.perf_counter()
            loaded = Memory(max_bytes, path=path)
            loading.append(time.perf_counter() - started)
    return {"rows": len(loaded), "save": harness.spread(saving), "load": harness.spread(loading)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_bytes", type=int, default=MAX_BYTES, help="of the memory whose table is written to")
    parser.add_argument("--writes", type=int, default=4096, help="rows whose time is taken")
    parser.add_argument("--batch", type=int, default=16, help="rows of a call")
    parser.add_argument("--rows", type=int, default=500_000, help="of the file, both tables together")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()

    capacity = args.max_bytes // (4 * BYTES_PER_ROW)
    figures: dict[str, Any] = {
        "benchmark": "memory",
        "environment": harness.machine(torch.device("cpu"), torch.float32),
        "capacity": capacity,
        "batch": args.batch,
        "writes": args.writes,
        "trials": args.trials,
    }
    with harness.reporting(figures, args.out):
        speeds = figures["rows_per_microsecond"] = write_speeds(capacity, args)
        print(f"a table of {capacity} rows, {args.batch} new ones a call: rows per microsecond")
        for name, speed in speeds.items():
            print(f"  {name:<30} {speed['median']:>7.3f}")
        seconds = figures["file"] = file_seconds(args)
        print(
            f"a file of {seconds['rows']} rows: {seconds['save']['median']:.2f} s to save, {seconds['load']['median']:.2f} s to load"
        )


if __name__ == "__main__":
    main()
