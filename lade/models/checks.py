"""The checks of a `generate()` call that apply to every family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lade.block.mask import EVERYWHERE
from lade.common.request import Request


def unsupported_by_any(adapter: Any, request: Request) -> str | None:
    """Why a call cannot be served, as a sentence; None if it can. adapter: the model's `ModelAdapter`.

    Plain generate() keeps finished rows in the batch until the last row ends; lade usually drops them. Where keeping
    them may raise an error, the call goes to plain generate(), so that the error is the same.
    """
    if request.wants_attentions and not sees_everything(adapter):
        return "output_attentions of windowed layers show the window alone, and lade's own cache keeps more"
    if adapter.most_slots is not None and request.num_slots > adapter.most_slots:
        return f"the text may grow over {adapter.most_slots} tokens, padding included, for which the model's code has no room"
    # By the criteria, which a caller may bring, and with the token that generate() takes if it is given none.
    has_end = any(hasattr(criterion, "eos_token_id") for criterion in request.stopping_criteria)
    pad_token = request.generation_config._pad_token_tensor
    if has_end and pad_token is None:
        return "a stopping criterion knows how a text ends, and there is no token to pad with"
    if request.batch_size > 1:
        last = adapter.last_position
        if last is not None and request.num_slots > last + 1 and furthest_position(request) > last:
            return f"rows of the batch may grow over the {last + 1} positions that the model knows"
        if has_end and not 0 <= int(pad_token) < adapter.num_tokens:
            return f"token {int(pad_token)}, which pads rows that end early, is not a token of the model"
    if forgets_nan(adapter, request.attention_mask):
        return "eager attention in float64 makes padding NaN, which leaves the model's windows but not lade's own cache"
    return None


def furthest_position(request: Request) -> int:
    """The largest position that may go through the model in plain generate(), finished rows included."""
    if request.position_ids is None:
        return request.num_slots - 1
    return int(request.position_ids[..., -1].max()) + request.num_slots - request.prompt_length


def sees_everything(adapter: Any) -> bool:
    """Whether all layers attend to the whole text, with no window or chunks."""
    return adapter.attention_spans in (EVERYWHERE, {"full_attention": EVERYWHERE})


def forgets_nan(adapter: Any, attention_mask: Tensor | None) -> bool:
    """Whether left padding puts NaN into the cache that a sliding window would later drop and lade's cache keeps.

    Eager attention computes the softmax in float32. The mask value, the minimum of float64, becomes minus infinity
    there, so a token that attends to no key, such as left padding, becomes NaN. attention_mask: [B, P] or None.
    """
    if adapter.dtype != torch.float64 or adapter.config._attn_implementation != "eager" or attention_mask is None:
        return False
    return not sees_everything(adapter) and not bool(attention_mask[:, 0].all())
