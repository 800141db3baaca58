"""A conversation with a model: the turns, their chat template, and a cache in which earlier turns stay.

Knows nothing about terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from lade.common.compat import CACHE_NAME, DynamicLayer

# Entries of a configuration's `layer_types` whose layers keep keys and values and nothing else.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what it took."""

    text: str
    prompt_tokens: int
    reused_tokens: int  # of the prompt: their keys and values were in the cache
    new_tokens: int
    seconds: float
    is_cut: bool  # by the limit on new tokens


class DoesNotFit(ValueError):
    """A question is longer than what the model can read at once."""


class Conversation:
    """Questions and answers, one after the other."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int = 256, system: str | None = None) -> None:
        """system: the system message, which stays when old turns are cut. Raises ValueError without a chat template."""
        self.model, self.tokenizer = model, tokenizer
        self.note: Callable[[str], None] = lambda text: None  # called with messages for the user
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template (tokenizer.chat_template), so the model is none to chat with"
            )
        self.set_max_new_tokens(max_new_tokens)
        self.messages: list[Message] = []
        self.set_system(system)
        self._cached_ids: list[int] = []
        self._start_cache()

    def set_max_new_tokens(self, count: int) -> None:
        """Limit the length of later answers. Raises ValueError if that leaves no room for a question."""
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context and count >= context:
            raise ValueError(f"max_new_tokens must be below the model's {context} positions, got {count}")
        self.max_new_tokens = count
        self.max_prompt_tokens = context - count if context else None

    @property
    def system(self) -> str | None:
        """The system message."""
        return self._system[0]["content"] if self._system else None

    def set_system(self, text: str | None) -> None:
        """Put another system message in front of the turns so far; None for none."""
        self._system: list[Message] = [{"role": "system", "content": text}] if text else []
        self.messages = self._system + [message for message in self.messages if message["role"] != "system"]

    def undo(self, everything: bool = False) -> str | None:
        """Take back the latest question and its answer, or all. Returns the first of them, None where there is none."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            return None
        first = places[0 if everything else -1]
        question, self.messages = self.messages[first]["content"], self.messages[:first]
        return question

    def restore(self, messages: list[Message]) -> None:
        """Go on with a conversation that was saved. Raises ValueError for what is none."""
        is_system = bool(messages) and messages[0]["role"] == "system"
        roles = [message["role"] for message in messages[is_system:]]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("messages must be of user and assistant in turn")
        if not all(isinstance(message["content"], str) for message in messages):
            raise ValueError("messages must have a text as content")
        self._system, self.messages = messages[:is_system], messages

    @property
    def num_turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def ask(self, question: str, streamer: Any = None, **choice: Any) -> Answer:
        """The model's answer, which becomes part of the conversation together with the question.

        choice: arguments of generate() that say how tokens are chosen. After an exception, including
        KeyboardInterrupt, the conversation is unchanged. Raises DoesNotFit for a question that leaves no room for an
        answer.
        """
        messages, ids = self._fit([*self.messages, {"role": "user", "content": question}])
        reused = self._keep_common_prefix(ids)
        inputs = torch.tensor([ids], device=self.model.device)
        started = time.perf_counter()
        try:
            output = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                **{CACHE_NAME: self._cache},
                max_new_tokens=self.max_new_tokens,
                streamer=streamer,
                **choice,
            )[0].tolist()
        except BaseException:
            self._trim_cache(reused)
            raise
        seconds, new = time.perf_counter() - started, output[len(ids) :]
        if self._cache is not None:
            self._cached_ids = output[: int(self._cache.get_seq_length())]
        text: str = self.tokenizer.decode(new, skip_special_tokens=True).strip()
        self.messages = [*messages, {"role": "assistant", "content": text}]
        ends = torch.tensor(self.model.generation_config.eos_token_id or []).view(-1).tolist()
        return Answer(
            text,
            prompt_tokens=len(ids),
            reused_tokens=reused,
            new_tokens=len(new),
            seconds=seconds,
            is_cut=len(new) == self.max_new_tokens and new[-1] not in ends,
        )

    def _ids_of(self, messages: list[Message]) -> list[int]:
        # The tokenizer would warn of texts longer than the context; `DoesNotFit` reports them.
        before, self.tokenizer.model_max_length = self.tokenizer.model_max_length, int(1e30)
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        self.tokenizer.model_max_length = before
        return list(encoded["input_ids"])

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The latest turns for which there is room, and their ids."""
        ids, begin, dropped = self._ids_of(messages), len(self._system), 0
        while self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            if len(messages) == begin + 1:
                raise DoesNotFit(
                    f"the question takes {len(ids)} tokens; the model has room for {self.max_prompt_tokens} "
                    f"beside an answer of {self.max_new_tokens}"
                )
            messages = messages[:begin] + messages[begin + 2 :]
            ids, dropped = self._ids_of(messages), dropped + 1
        if dropped:
            self.note(f"the conversation no longer fits the model; its {dropped} oldest turns were cut off")
        return messages, ids

    def _start_cache(self) -> None:
        # Without a configuration every layer keeps all tokens, so that a sliding window can be cut anywhere too.
        self._cache = DynamicCache() if keeps_keys_only(self.model) else None
        self._cached_ids = []

    def _keep_common_prefix(self, ids: list[int]) -> int:
        """Cut the cache to its longest common prefix with `ids` and return the prefix's length in tokens.

        Usually all of the cache; less when an answer's text is tokenized otherwise than the model generated it.
        """
        pairs = list(zip(self._cached_ids, ids[:-1], strict=False))  # at least one token must be left to feed
        common = next((index for index, (cached, wanted) in enumerate(pairs) if cached != wanted), len(pairs))
        self._trim_cache(common)
        return common

    def _trim_cache(self, length: int) -> None:
        """Cut the cache down to its first `length` tokens."""
        if length == 0 or self._cache is None:
            self._start_cache()
            return
        for layer in self._cache.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        self._cached_ids = self._cached_ids[:length]


def keeps_keys_only(model: Any) -> bool:
    """True if keys and values are the model's only state, so that its cache can be cut anywhere."""
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    return not model._is_stateful and kinds <= ATTENTION_KINDS
