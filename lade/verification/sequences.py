"""The committed token sequences: prompts and generated tokens of all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lade.common.transfer import HOST, to_device

FIRST_ROOM = 1024  # most generated tokens that the buffer has room for at first


class TokenSequences:
    """Prompts and committed tokens of B rows, in one buffer that grows by doubling.

    New tokens are kept on the host. They are copied to the buffer when somebody asks for a text.
    """

    def __init__(self, input_ids: Tensor, room: int) -> None:
        """input_ids: [B, P] prompts, padded on the left. room: the most tokens of a row, prompt included, if known."""
        batch_size, self.prompt_length = input_ids.shape
        self._prompts = input_ids
        room = min(room, self.prompt_length + FIRST_ROOM)
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

    def row(self, row: int) -> Tensor:
        """Returns [1, length]."""
        return self.texts(slice(row, row + 1))

    def texts(self, rows: slice) -> Tensor:
        """Texts of rows of the same length. Returns [R, length], of the dtype in plain generate().

        A contiguous copy, since user code may keep it and write to it later.
        """
        if self.lengths[rows][0] == self.prompt_length:
            return self._prompts[rows]
        self._copy(rows)
        return self._ids[rows, : self.lengths[rows][0]].clone(memory_format=torch.contiguous_format)

    def read_back(self, rows: slice, texts: Tensor) -> None:
        """Replace the texts of rows by what user code has written to the tensor that `texts` returned."""
        self._ids[rows, : texts.shape[1]] = texts
        self._num_copied[rows] = [texts.shape[1] - self.prompt_length] * len(texts)
        for row, tokens in enumerate(texts[:, self.prompt_length :].tolist(), rows.start):
            self.generated[row][:] = tokens

    def roots(self) -> list[int]:
        """The last token of each row, which must be a generated one. Returns [B]."""
        return [tokens[-1] for tokens in self.generated]

    def padded(self, pad_token: int) -> Tensor:
        """All rows, right-padded with the pad token. Returns [B, longest]."""
        self._copy(slice(None))
        result = self._ids[:, : max(self.lengths)].clone()
        for row, length in enumerate(self.lengths):
            result[row, length:] = pad_token
        return result

    def _copy(self, rows: slice) -> None:
        """Copy to the buffer what it lacks of some rows: in one go if they lack the same number of tokens."""
        counts = self._num_copied[rows]
        missing = [tokens[count:] for tokens, count in zip(self.generated[rows], counts, strict=True)]
        if len({(count, len(tokens)) for count, tokens in zip(counts, missing, strict=True)}) > 1:
            for row in range(len(self.generated))[rows]:
                self._copy(slice(row, row + 1))
        elif missing[0]:
            start = self.prompt_length + counts[0]
            end = start + len(missing[0])
            while end > self._ids.shape[1]:
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
            self._ids[rows, start:end] = to_device(torch.tensor(missing, device=HOST), self.device)
            self._num_copied[rows] = [len(tokens) for tokens in self.generated[rows]]
