"""The committed token sequences: prompts and generated tokens of all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lade.transfer import to_device


class TokenSequences:
    """Prompts and committed tokens of B rows, in one buffer that grows by doubling."""

    def __init__(self, input_ids: Tensor, room: int) -> None:
        """input_ids: [B, P] prompts, padded on the left. room: initial capacity in tokens per row."""
        batch_size, self.prompt_length = input_ids.shape
        self.ids = input_ids.new_empty(batch_size, max(room, self.prompt_length + 1), dtype=torch.long)
        self.ids[:, : self.prompt_length] = input_ids
        self.lengths = [self.prompt_length] * batch_size
        self.generated: list[list[int]] = [[] for _ in input_ids]  # of each row, on the host

    def append(self, tokens: list[int], row: int) -> None:
        """Append tokens to one row."""
        length = self.lengths[row]
        self.lengths[row] = length + len(tokens)
        self._ensure_room(self.lengths[row])
        self._put(slice(row, row + 1), length, [tokens])

    def append_column(self, tokens: list[int]) -> None:
        """Append one token to every row. tokens: [B]. All rows must have the same length."""
        length = self.lengths[0]
        self.lengths = [length + 1] * len(self.lengths)
        self._ensure_room(length + 1)
        self._put(slice(None), length, [[token] for token in tokens])

    def row(self, row: int) -> Tensor:
        """Returns [1, length]."""
        return self.ids[row : row + 1, : self.lengths[row]]

    def all_rows(self) -> Tensor:
        """Returns [B, length], contiguous as in plain generate(). All rows must have the same length."""
        return self.ids[:, : self.lengths[0]].contiguous()

    def roots(self) -> list[int]:
        """The last token of each row, which must be a generated one. Returns [B]."""
        return [tokens[-1] for tokens in self.generated]

    def padded(self, pad_token: int) -> Tensor:
        """All rows, right-padded with the pad token. Returns [B, longest]."""
        longest = max(self.lengths)
        result = self.ids[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            if length < longest:
                result[row, length:] = pad_token
        return result

    def _put(self, rows: slice, start: int, tokens: list[list[int]]) -> None:
        """Write the same number of tokens, at least one, to some rows."""
        end = start + len(tokens[0])
        if self.ids.device.type == "cpu":  # numpy writes a list to the same memory in a tenth of the time
            self.ids.numpy()[rows, start:end] = tokens
        else:
            self.ids[rows, start:end] = to_device(torch.tensor(tokens, device="cpu"), self.ids.device)
        for generated, new in zip(self.generated[rows], tokens, strict=True):
            generated.extend(new)

    def _ensure_room(self, length: int) -> None:
        while length > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
