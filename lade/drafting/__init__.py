"""Who proposes guesses: one contract, several drafters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lade.block_size import BlockModePolicy, StepCostsByLength
from lade.config import LookaheadConfig
from lade.drafting.base import Draft, Drafter, Outcome
from lade.drafting.lookahead import LookaheadDrafter
from lade.drafting.memory import memory_for
from lade.drafting.tree import TreeDrafter
from lade.verification.draws import ExponentialDraws

__all__ = ["Draft", "Drafter", "LookaheadDrafter", "Outcome", "TreeDrafter", "make_drafter"]


BLIND_BLOCK = 16  # tokens of a tree's block whose price cannot be known: they pay on most devices

# What the modes of lookahead's blocks have been worth, by model, settings and what else changes a step's cost.
_mode_policies: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], BlockModePolicy]] = weakref.WeakKeyDictionary()


def make_drafter(
    config: LookaheadConfig,
    model: Any,
    num_tokens: int,
    prompt_ids: Tensor,
    key_mask: Tensor | None,
    temperature: float | None,
    draws: ExponentialDraws | None = None,
    forward_kind: tuple[str, ...] = (),
    is_exact: bool = True,
) -> Drafter:
    """The drafter that the settings ask for. Arguments as for the drafters.

    forward_kind: what else changes a step's cost. is_exact: no block's size can change a text, so that sizes may follow live costs.
    """
    kind = (model.dtype, model.device, torch.get_num_threads(), len(prompt_ids), config.compile, *forward_kind)
    kind += ("window",) * config.uses_window  # whose search counts as part of the cost
    # Processes that compute one forward together must lay out the same block, whatever each one's clock says.
    is_split = (model.tp_size or 1) > 1
    memory = None if config.uses_window else memory_for(model, config.share)
    saved = None if memory is None else memory.step_costs
    costs = None
    if config.adaptive and not is_split:
        may_measure = not (config.deterministic or torch.are_deterministic_algorithms_enabled())
        costs = StepCostsByLength(
            model, kind, saved, None if is_exact else len(prompt_ids), may_measure, config.max_block_tokens
        )
    if memory is None:
        sizes = (config.ngram_size, config.window_size, config.num_guesses)
        policies = _mode_policies.setdefault(model, {}) if config.share else {}
        policy = None if costs is None else policies.setdefault((*kind, *sizes, costs.way), BlockModePolicy())
        return LookaheadDrafter(config, num_tokens, prompt_ids, key_mask, costs, policy)
    max_block = min(config.max_block, BLIND_BLOCK) if config.adaptive and is_split else config.max_block
    return TreeDrafter(memory, num_tokens, prompt_ids, key_mask, temperature, max_block, costs, draws)
