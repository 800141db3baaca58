"""The size of a step's block: what blocks cost on this machine, and which size pays."""

from __future__ import annotations

from lade.block_size.costs import (
    SIZES,
    FixedCosts,
    LiveCosts,
    Offers,
    SavedCosts,
    StepCosts,
    StepCostsByLength,
    saved_costs,
)
from lade.block_size.policy import BlockMode, BlockModePolicy, EarlyStop, SpeculationBackoff, choose_size

__all__ = [
    "SIZES",
    "BlockMode",
    "BlockModePolicy",
    "EarlyStop",
    "FixedCosts",
    "LiveCosts",
    "Offers",
    "SavedCosts",
    "SpeculationBackoff",
    "StepCosts",
    "StepCostsByLength",
    "choose_size",
    "saved_costs",
]
