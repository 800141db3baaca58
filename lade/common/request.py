"""A `generate()` call as lade sees it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from lade.common.compat import CACHE_NAME, CALLERS_CACHE_MARK, MAMBA_CACHE_NAME, MASK_LENGTH


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a `_sample` call, and what follows from them. Lengths are in tokens.

    input_ids: [B, P]; the prompt may also be embeddings, or lie partly in a cache. model_kwargs: the model's arguments,
    in which the call replaces the cache.
    """

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    streamer: Any
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
        return self.model_kwargs.get(CACHE_NAME, self.model_kwargs.get(MAMBA_CACHE_NAME))

    @property
    def callers_cache(self) -> Cache | None:
        """The cache if it outlives the call: it is returned, or the caller passed it in."""
        is_callers = getattr(self.cache, CALLERS_CACHE_MARK, False)
        return self.cache if self.generation_config.return_dict_in_generate or is_callers else None

    @property
    def cached_length(self) -> int:
        """Tokens in the cache; 0 where it holds states alone, which count none."""
        layers = getattr(self.cache, "layers", ())
        counts = self.cache is not None and (not layers or any(hasattr(layer, "get_seq_length") for layer in layers))
        return int(self.cache.get_seq_length()) if counts else 0

    @property
    def prompt_length(self) -> int:
        known = (self.input_ids, self.attention_mask, self.model_kwargs.get("inputs_embeds"))
        return max(part.shape[1] for part in known if part is not None)

    @property
    def num_uncached(self) -> int:
        """Tokens of a row in the prompt's forward, as `_prefill` takes them: ids are the whole text if the mask is as
        long as they are, and of a whole text the last ones, by a negative or empty slice where more is cached.
        """
        embeds, mask = self.model_kwargs.get("inputs_embeds"), self.attention_mask
        given = self.input_ids.shape[1] if embeds is None else embeds.shape[1]
        mask_length = getattr(self.generation_config, MASK_LENGTH, None) if mask is None else mask.shape[1]
        num_more = given - self.cached_length
        if num_more == 0 or (embeds is None and mask_length != given):
            return given
        return num_more if num_more > 0 else max(0, given + num_more)

    @property
    def num_new(self) -> int:
        """The most tokens to generate: max_length counts from input_ids, which may be empty or the prompt's end."""
        return whole_length(self.generation_config.max_length) - self.input_ids.shape[1]

    @property
    def max_length(self) -> int:
        """The maximum length of a text, prompt included."""
        return self.prompt_length + self.num_new

    @property
    def num_slots(self) -> int:
        """The most tokens of a row, padding included, that go through the model: all but the last."""
        return self.max_length - 1

    @property
    def furthest_position(self) -> int:
        """The largest position that may go through the model in plain generate(), finished rows included."""
        if self.position_ids is None:
            return self.num_slots - 1
        return int(self.position_ids[..., -1].max()) + self.num_slots - self.prompt_length


def whole_length(length: Any) -> int:
    """The number of tokens at which a text has reached a maximum length, which may be a fraction or infinite."""
    return math.ceil(min(length, sys.maxsize))
