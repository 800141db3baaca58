"""Blocks that run inlined: by a family's single function (`ModelAdapter.inlined`) instead of the model's modules.

It must compute the same. When a model first runs a kind of block, the block runs both ways, and the results are
compared: bit for bit in half precision, within rounding otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lade.block.kv_cache import LookaheadCache
from lade.block.mask import Block
from lade.compat import is_out_of_memory
from lade.models.base import ModelAdapter
from lade.state import PerModel
from lade.tolerance import logits_error

# By the code of the modules, then by kind of block: why it must not run inlined, as a sentence; None if it may.
_verdicts: PerModel[dict[Hashable, dict[Hashable, str | None]]] = PerModel(dict)


def inlining_reason(adapter: ModelAdapter) -> str | None:
    """Why a model's blocks cannot run inlined, as a sentence; None if they can, given the expected modules."""
    if type(adapter).inlined is ModelAdapter.inlined:
        return "lade has no inlined forward for this family"
    if adapter.config._attn_implementation != "sdpa":
        return "blocks run inlined with the attention sdpa only"
    if adapter.unusual_parts or not adapter.leaves_no_tensor:
        return "the model is in training mode, compiled, under autocast, or not as transformers made it"
    if (adapter.model.tp_size or 1) > 1:  # a rank that ran a block again, after a comparison, would wait for the others
        return "the model is split over several processes"
    return None


class InlinedForward:
    """One call's inlined blocks."""

    def __init__(self, adapter: ModelAdapter, run: Callable[..., Tensor]) -> None:
        """run: the adapter's `inlined` of the model that the blocks run on."""
        self.num_steps = 0
        self.refusal: str | None = None  # why some blocks did not run inlined, as a sentence
        self.seconds = 0.0  # spent on comparing since it was last set to 0
        self._run = run
        self._is_exact = adapter.is_exact
        # A class may get another forward, which `run` would not call.
        code = (adapter.dtype, *((type(part), type(part).forward) for part in adapter.parts))
        self._verdicts = _verdicts.of(adapter.model).setdefault(code, {})

    def logits(self, block: Block, cache: LookaheadCache, masks: Any, ordinary: Callable[[], Tensor]) -> Tensor:
        """Logits of a block, [B, R, V]. ordinary: computes them through the model's modules."""
        # Attention and packed products treat a single token differently.
        batch_size, num_tokens = block.tokens.shape
        kind = (batch_size > 1, num_tokens > 1, cache.slots is None, block.needs_all_rows)
        if kind not in self._verdicts:
            expected, began = ordinary(), perf_counter()
            difference = self._difference(expected, block, cache, masks)
            self._verdicts[kind] = difference
            self.seconds = perf_counter() - began
            if difference is None:
                return expected
        refusal = self._verdicts[kind]
        if refusal is not None:
            self.refusal = refusal
            return ordinary()  # again after a comparison, which has written other keys and values
        self.num_steps += 1
        return self.run(block, cache, masks)

    def run(self, block: Block, cache: LookaheadCache, masks: Any) -> Tensor:
        """The inlined forward itself, without a comparison. Arguments as for `logits`."""
        with torch.inference_mode():
            return self._run(block, cache, masks)

    def _difference(self, expected: Tensor, *arguments: Any) -> str | None:
        """How inlined logits differ, as a sentence; None if they do not."""
        try:
            found = self.run(*arguments)
        except Exception as error:  # modules of another version of transformers may have other interfaces
            if is_out_of_memory(error):
                raise
            return f"the model cannot run inlined ({type(error).__name__}: {error})"
        if torch.equal(found, expected) or (self._is_exact and logits_error(found, expected) is None):
            return None
        return "the inlined forward differs from the model's own by more than rounding"
