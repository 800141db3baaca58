"""The committed text: prompts and generated tokens of all rows. Floor 1."""

from __future__ import annotations

import torch
from torch import Tensor


class Texts:
    """Prompts and committed tokens of B rows in one buffer that grows by doubling."""

    def __init__(self, input_ids: Tensor, room: int) -> None:
        """input_ids: [B, P] prompts, padded on the left. room: tokens per row to start with."""
        batch_size, self.prompt_length = input_ids.shape
        self.ids = input_ids.new_empty(batch_size, max(room, self.prompt_length + 1), dtype=torch.long)
        self.ids[:, : self.prompt_length] = input_ids
        self.lengths = [self.prompt_length] * batch_size

    def append(self, tokens: list[int] | Tensor, row: int) -> None:
        """Append some tokens to one row."""
        length = self.lengths[row]
        self._ensure_room(length + len(tokens))
        self.ids[row, length : length + len(tokens)] = torch.as_tensor(tokens, device=self.ids.device)
        self.lengths[row] = length + len(tokens)

    def append_column(self, tokens: Tensor) -> None:
        """Append one token to every row. tokens: [B]. All rows have the same length."""
        length = self.lengths[0]
        self._ensure_room(length + 1)
        self.ids[:, length] = tokens
        self.lengths = [length + 1] * len(self.lengths)

    def row(self, row: int) -> Tensor:
        """Returns [1, length]."""
        return self.ids[row : row + 1, : self.lengths[row]]

    def all_rows(self) -> Tensor:
        """Returns [B, length], where all rows have the same length; contiguous, as plain generate() passes it on."""
        return self.ids[:, : self.lengths[0]].contiguous()

    def roots(self) -> Tensor:
        """The last token of each row. Returns [B]."""
        last = torch.tensor(self.lengths, device=self.ids.device)[:, None] - 1
        return self.ids.gather(1, last)[:, 0]

    def padded(self, pad_token: int) -> Tensor:
        """All rows, the shorter ones filled up with the pad token. Returns [B, longest]."""
        longest = max(self.lengths)
        result = self.ids[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            if length < longest:
                result[row, length:] = pad_token
        return result

    def _ensure_room(self, length: int) -> None:
        while length > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
