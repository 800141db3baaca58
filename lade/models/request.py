"""A `generate()` call as the checks and the adapters see it, and the checks of it that apply to every family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache

from lade.block.mask import EVERYWHERE
from lade.compat import CALLERS_CACHE_MARK


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `_sample` that decide whether lookahead serves a call. Lengths are in tokens.

    input_ids: [B, P]; the prompt may also be embeddings, or lie partly in a cache. config: a GenerationConfig.
    """

    model: PreTrainedModel
    input_ids: Tensor
    config: Any
    model_kwargs: dict[str, Any]

    @property
    def batch_size(self) -> int:
        return len(self.input_ids)

    @property
    def position_ids(self) -> Tensor | None:
        """[B or 1, prompt], or several such."""
        return self.model_kwargs.get("position_ids")

    @property
    def attention_mask(self) -> Tensor | None:
        """[B, prompt]."""
        return self.model_kwargs.get("attention_mask")

    @property
    def cache(self) -> Any:
        return self.model_kwargs.get("past_key_values")

    @property
    def callers_cache(self) -> Cache | None:
        """The cache if it outlives the call: it is returned, or the caller passed it in."""
        is_callers = getattr(self.cache, CALLERS_CACHE_MARK, False)
        return self.cache if self.config.return_dict_in_generate or is_callers else None

    @property
    def cached_length(self) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def has_static_cache(self) -> bool:
        return isinstance(self.cache, StaticCache)

    @property
    def prompt_length(self) -> int:
        known = (self.input_ids, self.attention_mask, self.model_kwargs.get("inputs_embeds"))
        return max(part.shape[1] for part in known if part is not None)

    @property
    def num_new(self) -> int:
        """The most tokens to generate: max_length counts from input_ids, which may be empty or the prompt's end."""
        return int(self.config.max_length) - self.input_ids.shape[1]

    @property
    def max_length(self) -> int:
        """Of a text, prompt included."""
        return self.prompt_length + self.num_new

    @property
    def num_slots(self) -> int:
        """The most tokens of a row, padding included, that go through the model: all but the last."""
        return self.max_length - 1

    @property
    def wants_attentions(self) -> bool:
        return bool(self.config.output_attentions)


def unsupported_by_any(adapter: Any, request: Request) -> str | None:
    """Why a call cannot be served, as a sentence; None if it can. adapter: the model's `ModelAdapter`.

    Plain generate() keeps finished rows in the batch until the last row ends; lade usually drops them. Where keeping
    them may raise an error, the call goes to plain generate(), so that the error is the same.
    """
    if request.wants_attentions and not sees_everything(adapter):
        return "output_attentions of windowed layers show the window alone, and lade's own cache keeps more"
    if adapter.most_slots is not None and request.num_slots > adapter.most_slots:
        return f"the text may grow over {adapter.most_slots} tokens, padding included, for which the model's code has no room"
    if request.batch_size > 1:
        last = adapter.last_position
        if last is not None and request.num_slots > last + 1 and furthest_position(request) > last:
            return f"rows of the batch may grow over the {last + 1} positions that the model knows"
        pad_token, may_end_early = request.config.pad_token_id, request.config.eos_token_id is not None
        if may_end_early and pad_token is not None and not 0 <= pad_token < adapter.num_tokens:
            return f"pad_token_id={pad_token}, which pads rows that end early, is not a token of the model"
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
    return adapter.reaches in (EVERYWHERE, {"full_attention": EVERYWHERE})


def forgets_nan(adapter: Any, attention_mask: Tensor | None) -> bool:
    """Whether left padding puts NaN into the cache that a sliding window would later drop and lade's cache keeps.

    Eager attention computes the softmax in float32. The mask value, the minimum of float64, becomes minus infinity
    there, so a token that attends to no key, such as left padding, becomes NaN. attention_mask: [B, P] or None.
    """
    if adapter.dtype != torch.float64 or adapter.config._attn_implementation != "eager" or attention_mask is None:
        return False
    return not sees_everything(adapter) and not bool(attention_mask[:, 0].all())
