"""The committed token sequences: prompts and generated tokens of all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lade.transfer import on_host, to_device


class TokenSequences:
    """Prompts and committed tokens of B rows, in one buffer that grows by doubling.

    New tokens are kept on the host. They are copied to the buffer when somebody asks for a text.
    """

    def __init__(self, input_ids: Tensor, room: int) -> None:
        """input_ids: [B, P] prompts, padded on the left. room: initial capacity in tokens per row."""
        batch_size, self.prompt_length = input_ids.shape
        self._ids = input_ids.new_empty(batch_size, max(room, self.prompt_length + 1), dtype=torch.long)
        self._ids[:, : self.prompt_length] = input_ids
        self._num_copied = [0] * batch_size  # of each row, generated tokens that are in the buffer
        self.device = input_ids.device
        self.lengths = [self.prompt_length] * batch_size
        self.generated: list[list[int]] = [[] for _ in input_ids]  # of each row, on the host

    def append(self, tokens: list[int], row: int) -> None:
        """Append tokens to one row."""
        self.lengths[row] += len(tokens)
        self.generated[row].extend(tokens)

    def append_column(self, tokens: list[int]) -> None:
        """Append one token to every row. tokens: [B]. All rows must have the same length."""
        self.lengths = [self.lengths[0] + 1] * len(self.lengths)
        for generated, token in zip(self.generated, tokens, strict=True):
            generated.append(token)

    @property
    def ids(self) -> Tensor:
        """All texts, each up to its length, [B, longest or more]."""
        self._copy(slice(None))
        return self._ids

    def row(self, row: int) -> Tensor:
        """Returns [1, length]."""
        self._copy(slice(row, row + 1))
        return self._ids[row : row + 1, : self.lengths[row]]

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

    def _copy(self, rows: slice) -> None:
        """Copy to the buffer what it lacks of some rows: in one go if they lack the same number of tokens."""
        missing = [tokens[count:] for tokens, count in zip(self.generated[rows], self._num_copied[rows], strict=True)]
        if not any(missing):
            return
        self._ensure_room(max(self.lengths))
        places = range(len(self.generated))[rows]
        starts = {self.prompt_length + self._num_copied[row] for row in places}
        if len(starts) == 1 and len(set(map(len, missing))) == 1:
            self._put(rows, starts.pop(), missing)
        else:
            for row, tokens in zip(places, missing, strict=True):
                if tokens:
                    self._put(slice(row, row + 1), self.prompt_length + self._num_copied[row], [tokens])
        self._num_copied[rows] = [len(tokens) for tokens in self.generated[rows]]

    def _put(self, rows: slice, start: int, tokens: list[list[int]]) -> None:
        """Write the same number of tokens, at least one, to some rows of the buffer."""
        end = start + len(tokens[0])
        if on_host(self._ids):  # numpy writes a list to the same memory in a tenth of the time
            self._ids.numpy()[rows, start:end] = tokens
        else:
            self._ids[rows, start:end] = to_device(torch.tensor(tokens, device="cpu"), self.device)

    def _ensure_room(self, length: int) -> None:
        while length > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
