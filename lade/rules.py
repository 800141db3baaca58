"""generate()'s own rules for a committed token: how it is chosen, where it goes, and when the text ends.

Knows nothing about guesses: it is asked for one token after another, in plain order, and never about a rejected one.
Floor 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class GenerationRules:
    """The texts of B rows and the rules that extend them.

    Greedy choices without processors, whose only ends are a length and end-of-sequence ids, are read for a whole step at
    once; everything else asks the processors, criteria and streamer token by token. Both give the same tokens.
    """

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
    ) -> None:
        """input_ids: [B, P] prompts, padded on the left."""
        batch_size, prompt_length = input_ids.shape
        self._processor, self._criteria, self._streamer = logits_processor, stopping_criteria, streamer
        self._do_sample = bool(generation_config.do_sample)
        self._max_length = stopping_criteria.max_length  # tokens of prompt and answer; None without such a criterion
        self._eos_ids = _eos_ids(stopping_criteria)
        self._is_simple = (
            not self._do_sample
            and streamer is None
            and not logits_processor
            and self._max_length is not None
            and all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in stopping_criteria)
        )
        room = max(self._max_length or 0, prompt_length + 1)
        self._ids = input_ids.new_empty(batch_size, room, dtype=torch.long)
        self._ids[:, :prompt_length] = input_ids
        self.prompt_length = prompt_length
        self.lengths = [prompt_length] * batch_size  # prompt and committed tokens of each row
        self.is_finished = [False] * batch_size
        self._pending: list[list[int]] = [[] for _ in range(batch_size)]  # committed, not yet in _ids

    def begin_step(self, logits: Tensor) -> None:
        """logits: [B, 1 + n, V] behind each root, then behind each node of its tree."""
        if self._is_simple:
            self._chosen: list[list[int]] = as_plain(logits).argmax(dim=-1).tolist()
        else:
            self._logits = logits

    def choose(self, row: int, node: int) -> int:
        """The token that generate() would put behind the text committed so far. node: -1 for the root."""
        if self._is_simple:
            return self._chosen[row][node + 1]
        scores = self._logits[row : row + 1, node + 1].to(dtype=torch.float32, copy=True)
        self._scores = self._processor(self._text(row), scores)
        if self._do_sample:
            probabilities = torch.nn.functional.softmax(self._scores, dim=-1)
            return int(torch.multinomial(probabilities, num_samples=1))
        return int(torch.argmax(self._scores, dim=-1))

    def commit(self, row: int, token: int) -> bool:
        """Append the token to a row; True when that ends the row."""
        length = self.lengths[row]
        self.lengths[row] = length + 1
        if self._is_simple:
            self._pending[row].append(token)
            self.is_finished[row] = token in self._eos_ids or length + 1 == self._max_length
        else:
            if length == self._ids.shape[1]:  # there is no max_length
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
            self._ids[row, length] = token
            if self._streamer is not None:
                self._streamer.put(self._ids[row : row + 1, length].cpu())
            self.is_finished[row] = bool(self._criteria(self._text(row), self._scores).all())
        return self.is_finished[row]

    def end_step(self) -> None:
        """Bring the texts up to date."""
        for row, tokens in enumerate(self._pending):
            if tokens:
                end = self.lengths[row]
                self._ids[row, end - len(tokens) : end] = torch.tensor(tokens, device=self._ids.device)
                tokens.clear()

    def texts(self) -> list[Tensor]:
        """Prompt and committed tokens of each row."""
        return [self._text(row)[0] for row in range(len(self.lengths))]

    def roots(self) -> Tensor:
        """The last committed token of each row. Returns [B] ids."""
        last = torch.tensor(self.lengths, device=self._ids.device)[:, None] - 1
        return self._ids.gather(1, last)[:, 0]

    def result(self) -> Tensor:
        """What generate() returns: [B, longest text] ids."""
        return self._ids[:, : max(self.lengths)].clone()

    def _text(self, row: int) -> Tensor:
        return self._ids[row : row + 1, : self.lengths[row]]


def as_plain(logits: Tensor) -> Tensor:
    """Logits with the ties that generate() sees: it compares in float32, which rounds float64 and nothing else."""
    return logits.float() if logits.dtype == torch.float64 else logits


def _eos_ids(criteria: StoppingCriteriaList) -> set[int]:
    return {int(token) for c in criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.flatten()}
