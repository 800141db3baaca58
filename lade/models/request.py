"""What of a `generate()` call may matter to a family, and the calls that no family is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lade.block.mask import EVERYWHERE


@dataclass(frozen=True, slots=True)
class Request:
    """What of a `generate()` call may matter to a family. Lengths are in tokens."""

    prompt_length: int
    max_length: int
    cached_length: int  # of the cache that the caller brings along
    has_static_cache: bool
    wants_attentions: bool
    attention_mask: Tensor | None = None  # [B, prompt]
    position_ids: Tensor | None = None  # [B or 1, prompt], or more of these
    batch_size: int = 1
    pad_token: int | None = None  # what a row that ends before the others is filled up with, if a row may

    @property
    def num_slots(self) -> int:
        """How many tokens of a row may go through the model, padding included: all but the last one."""
        return self.max_length - 1


def unsupported_by_any(adapter: Any, request: Request) -> str | None:
    """Why a call cannot be served, as a sentence, judged by what the adapter says of its model; None when it can.

    Plain generate() takes rows that have ended along to the end of the batch, lade as a rule does not: where that may raise, the
    original code is to do so.
    """
    if request.wants_attentions and not sees_everything(adapter):
        return "output_attentions of windowed layers show the window alone, and lade's own cache keeps more"
    if adapter.most_slots is not None and request.num_slots > adapter.most_slots:
        return f"the text may grow over {adapter.most_slots} tokens, padding included, for which the model's code has no room"
    if request.batch_size > 1:
        last = adapter.last_position
        if last is not None and request.num_slots > last + 1 and furthest_position(request) > last:
            return f"rows of the batch may grow over the {last + 1} positions that the model knows"
        if request.pad_token is not None and not 0 <= request.pad_token < adapter.num_tokens:
            return f"pad_token_id={request.pad_token}, with which rows that end early go on, is no token of the model"
    if forgets_nan(adapter, request.attention_mask):
        return "eager attention in float64 makes NaN of padding, which the model's windows forget and lade's own cache keeps"
    return None


def furthest_position(request: Request) -> int:
    """Of all tokens that may go through the model, those of rows that have ended included."""
    if request.position_ids is None:
        return request.num_slots - 1
    return int(request.position_ids[..., -1].max()) + request.num_slots - request.prompt_length


def sees_everything(adapter: Any) -> bool:
    """Whether no layer has a window or chunks."""
    return adapter.reaches in (EVERYWHERE, {"full_attention": EVERYWHERE})


def forgets_nan(adapter: Any, attention_mask: Tensor | None) -> bool:
    """Whether padding leaves NaN in the cache for as long as a window holds it.

    Eager attention takes the softmax in float32, where the minimum of float64, which hides a key, is minus infinity; a token that
    sees no key at all becomes NaN: one at the beginning.
    """
    if adapter.dtype != torch.float64 or adapter.config._attn_implementation != "eager" or attention_mask is None:
        return False
    return not sees_everything(adapter) and not bool(attention_mask[:, 0].all())
