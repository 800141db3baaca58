"""The committed token sequences: prompts and generated tokens of all rows."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from lade.common.transfer import HOST, to_device


class TokenSequences:
    """Prompts and committed tokens of B rows. New tokens are kept on the host until somebody asks for a text."""

    def __init__(self, input_ids: Tensor) -> None:
        """input_ids: [B, P] prompts, padded on the left."""
        self.device, self.prompt_length = input_ids.device, input_ids.shape[1]
        self._prompts = input_ids
        self._texts = list(input_ids.long().split(1))  # [1, length] each, as long as they were asked for last
        self.generated: list[list[int]] = [[] for _ in input_ids]  # of each row, on the host

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, prompt included."""
        return [self.prompt_length + len(tokens) for tokens in self.generated]

    def append(self, tokens: list[int], row: int) -> None:
        """Append tokens to one row."""
        self.generated[row].extend(tokens)

    def row(self, row: int) -> Tensor:
        """Returns [1, length]."""
        return self.texts(slice(row, row + 1))

    def texts(self, rows: slice) -> Tensor:
        """Texts of rows of the same length. Returns [R, length], of the dtype in plain generate().

        A copy, since user code may keep it and write to it later.
        """
        if not self.generated[rows.start]:
            return self._prompts[rows]
        return torch.cat(self._whole(rows))

    def read_back(self, rows: slice, texts: Tensor) -> None:
        """Replace the texts of rows by what user code has written to the tensor that `texts` returned."""
        self._texts[rows] = texts.long().clone().split(1)
        for row, tokens in enumerate(texts[:, self.prompt_length :].tolist(), rows.start):
            self.generated[row][:] = tokens

    def roots(self) -> list[int]:
        """The last token of each row, which must be a generated one. Returns [B]."""
        return [tokens[-1] for tokens in self.generated]

    def padded(self, pad_token: int) -> Tensor:
        """All rows, right-padded with the pad token. Returns [B, longest]."""
        longest = max(self.lengths)
        texts = self._whole(slice(0, len(self.generated)))
        return torch.cat([pad(text, (0, longest - text.shape[1]), value=pad_token) for text in texts])

    def _whole(self, rows: slice) -> list[Tensor]:
        """Some rows, [1, length] each. What they lack goes to the device in one copy."""
        known = zip(self.generated[rows], self._texts[rows], strict=True)
        missing = [tokens[text.shape[1] - self.prompt_length :] for tokens, text in known]
        sent = to_device(torch.tensor([*chain.from_iterable(missing)], dtype=torch.long, device=HOST), self.device)
        for row, more in enumerate(sent.split(list(map(len, missing))), rows.start):
            if len(more):
                self._texts[row] = torch.cat([self._texts[row], more[None]], dim=1)
        return self._texts[rows]
