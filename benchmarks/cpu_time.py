"""Runs another benchmark with seconds of CPU time in place of the clock's, for a machine that other programs use as
well.

    OMP_NUM_THREADS=1 python benchmarks/cpu_time.py benchmarks/decode.py --dtype float32

With one thread this is the time that the benchmark would have taken alone, but for caches and memory that it has
shared. lade's own measurements of step costs go by it as well. Ends with an error where torch uses more threads: their
waiting counts as work.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    time.perf_counter = time.process_time  # before anything imports it by name
    import torch

    if torch.get_num_threads() != 1:
        raise SystemExit(f"OMP_NUM_THREADS must be 1, torch uses {torch.get_num_threads()} threads")
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
