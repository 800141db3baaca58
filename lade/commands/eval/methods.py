"""A question answered by one of the methods that are compared, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

import lade
from lade.commands.eval.answers import LADE, METHODS, Answer
from lade.commands.eval.tasks import Question
from lade.commands.measure import synchronize, use_lade
from lade.commands.model import FALLBACK_STOP, FALLBACK_TEMPLATE


class Answerer:
    """Answers questions with one model."""

    def __init__(self, model: Any, tokenizer: Any, use_chat: bool, seed: int, arguments: dict[str, Any]) -> None:
        """use_chat: use the chat template even for questions that have a text to continue. arguments: of generate()."""
        self.model, self.tokenizer, self.use_chat = model, tokenizer, use_chat
        config = model.generation_config
        if (
            config.pad_token_id is None and config.eos_token_id is not None
        ):  # what generate() does, with a warning each time
            eos = config.eos_token_id
            arguments = {"pad_token_id": eos[0] if isinstance(eos, list) else eos} | arguments
        self.seed, self.arguments = seed, arguments
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._stopping_criteria: dict[tuple[str, ...], StopStringCriteria] = {}
        self.max_prompt_tokens = context - arguments["max_new_tokens"] if context else None

    def is_continuation(self, question: Question) -> bool:
        """Whether the answer goes on with the question's text."""
        return question.text is not None and not self.use_chat

    def answer(self, question: Question, method: str) -> Answer:
        """Ask one turn after the other. The same seed for every method, so that sampled answers can be compared."""
        found = Answer(question.id, method, self.is_continuation(question))
        torch.manual_seed(self.seed + question.number)
        messages: list[dict[str, str]] = []
        stop = self._stop_strings(question)
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            ids = self._prompt_ids(question, messages)
            if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
                found.skipped = f"a prompt of {len(ids)} tokens; the model has room for {self.max_prompt_tokens}"
                return found
            new = self._generate(ids, method, stop, found)
            found.texts.append(self._text_of(ids, new, stop))
            messages.append({"role": "assistant", "content": found.texts[-1].strip()})
        return found

    def _stop_strings(self, question: Question) -> tuple[str, ...]:
        if self.is_continuation(question):
            return question.stop
        return () if self.tokenizer.chat_template else (FALLBACK_STOP,)

    def _prompt_ids(self, question: Question, messages: list[dict[str, str]]) -> list[int]:
        if self.is_continuation(question):
            return list(self.tokenizer(question.text)["input_ids"])
        template = None if self.tokenizer.chat_template else FALLBACK_TEMPLATE
        encoded = self.tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def _generate(self, ids: list[int], method: str, stop: tuple[str, ...], found: Answer) -> list[int]:
        """The new ids; what they took is added to `found`."""
        inputs = torch.tensor([ids], device=self.model.device)
        arguments = self.arguments | METHODS[method]
        if stop:
            arguments |= {"stopping_criteria": StoppingCriteriaList([self._stopping_criterion(stop)])}
        with use_lade(method == LADE), counting_forwards(self.model, method == "prompt-lookup") as forwards:
            synchronize(self.model.device)
            started = time.perf_counter()
            output = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **arguments)
            synchronize(self.model.device)
            seconds = time.perf_counter() - started
        new: list[int] = output[0, len(ids) :].tolist()
        found.tokens.append(new)
        found.prompt_tokens.append(len(ids))
        found.seconds.append(round(seconds, 6))
        found.steps.append(self._steps(method, len(new), forwards(), found))
        return new

    def _stopping_criterion(self, stop: tuple[str, ...]) -> StopStringCriteria:
        """Made once: it reads the whole vocabulary, which must not count as decoding time."""
        if stop not in self._stopping_criteria:
            self._stopping_criteria[stop] = StopStringCriteria(self.tokenizer, list(stop))
        return self._stopping_criteria[stop]

    def _steps(self, method: str, num_tokens: int, forwards: int, found: Answer) -> int:
        if method == LADE:
            stats = lade.last_stats()
            reason = stats.fallback_reason if stats else "lade is not loaded"
            found.fallback_reason = found.fallback_reason or reason
            return num_tokens if stats is None or reason else stats.steps
        return forwards or num_tokens  # one step a token, the prompt's forward is the first's

    def _text_of(self, ids: list[int], new: list[int], stop: tuple[str, ...]) -> str:
        """The new text up to the first stop string."""
        prompt, whole = (
            self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (ids, ids + new)
        )
        # Some tokenizers drop the blank that new tokens begin with when they are decoded alone.
        text: str = whole[len(prompt) :] if whole.startswith(prompt) else self._alone(new)
        ends = [place for place in map(text.find, stop) if place >= 0]
        return text[: min(ends)] if ends else text

    def _alone(self, new: list[int]) -> str:
        return self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@contextmanager
def counting_forwards(model: Any, on: bool) -> Iterator[Callable[[], int]]:
    """Gives a function for the number of forward passes so far; 0 when off, since a hook may slow a compiled model."""
    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = model.register_forward_pre_hook(add) if on else None
    try:
        yield lambda: count
    finally:
        if hook is not None:
            hook.remove()
