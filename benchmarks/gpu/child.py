"""One stage, in this process: `python -m gpu.child STAGE --out DIR --device cuda`, as `gpu_check.py` starts it."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import shapes
import torch

import lade
from gpu import stand_in
from gpu.plan import STAGES
from gpu.record import Record, Row, read_json
from gpu.summary import REASONS
from lade.eligibility import TOO_SHORT

STEADY = {"SHARE": 0}  # no call learns from another


@dataclass
class Run:
    """What a stage works with."""

    record: Record
    out: Path
    device: str
    is_tiny: bool

    @property
    def is_stand_in(self) -> bool:
        return self.device == "cpu"

    def shape(self, name: str) -> str:
        return "tiny" if self.is_tiny else name

    def model(self, name: str, dtype: torch.dtype | None = None, max_positions: int = 8192) -> Any:
        """A random model of that shape; bfloat16 on a GPU."""
        dtype = dtype or (torch.float32 if self.is_stand_in else torch.bfloat16)
        return shapes.random_model(self.shape(name), self.device, dtype, max_positions)

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.is_tiny else real

    @property
    def bytes_per_second(self) -> float | None:
        """Of a copy, as the stage `environment` has found it."""
        found = read_json(self.out / "environment.json") or {}
        return found.get("rows", {}).get("bandwidth", {}).get("bytes_per_second")


def told() -> Row:
    """What the calls since the last row have said about themselves."""
    calls = lade.log_history(clear=True)
    found: Row = {}
    for name in REASONS:
        reasons = {getattr(stats, name) for stats in calls} - {None, TOO_SHORT}
        reasons = {reason for reason in reasons if not reason.startswith("USE_LADE is not set")}  # plain on purpose
        if reasons:
            found[name] = "; ".join(sorted(reasons))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
        stand_in.install()
    lade.augment_all()
    lade.config_lade(**STEADY)
    stage = next(stage for stage in STAGES if stage.name == args.stage)
    module, name = stage.function.split(":")
    run = Run(Record(args.out / f"{stage.name}.json", told), args.out, args.device, args.shape == "tiny")
    with harness.use_lade(True):
        getattr(importlib.import_module(f"gpu.{module}"), name)(run)


if __name__ == "__main__":
    main()
    sys.exit()
