"""One text of a batch: earlier occurrences of its end, and what the last step has shown about its root."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from lade.drafting.acceptance import EARLIER, PREDICTION, SUFFIX
from lade.drafting.contexts import UNKNOWN, Context, Contexts
from lade.drafting.growth import Copy, Growth
from lade.drafting.prediction import Prediction
from lade.drafting.suffix_index import MAX_MATCH, SuffixIndex
from lade.drafting.text_store import TextStore
from lade.drafting.top_k_table import PackedRow


class DraftedText(SuffixIndex):
    """All ids of one text, the prompt's included.

    growth: the guesses after its end. root_row: the row of logits that its last token was chosen from, without that
    token. context: of the last token. None where these are not known.
    """

    def __init__(self, ids: list[int], prediction: tuple[int, ...] = ()) -> None:
        """ids: of the prompt. prediction: ids of what the answer is expected to resemble."""
        super().__init__()
        self.extend(ids)
        self._prompt_length = len(ids)
        self._prediction = Prediction(prediction) if prediction else None
        self.growth = Growth()
        self.root_row: PackedRow | None = None
        self.context: Context | None = None

    @property
    def to_keep(self) -> list[int]:
        """The generated tokens, after the end of the prompt: later calls find and repeat them."""
        return self.tokens[max(0, self._prompt_length - MAX_MATCH) :]

    def contexts_before(self, after: Contexts) -> Contexts:
        """Contexts of the root and of each guess, [1 + n, CONTEXT_SIZE]. after: those of what follows them."""
        root = UNKNOWN if self.context is None else self.context
        return np.concatenate([root[None], after[[parent + 1 for parent in self.growth.parents]]])

    def copies(self, texts: TextStore | None, count: int) -> list[Copy]:
        """At most `count` tokens each of what followed the longest earlier occurrence of the text's end, the shortest
        match first: in the text itself, in texts of other calls where that one is longer, and in the prediction."""
        found, own = [], self.match()
        if self._prediction is not None:
            match = self._prediction.match(self.tokens[max(self._prompt_length, len(self.tokens) - MAX_MATCH) :])
            if match is not None:
                found.append(Copy(self._prediction.following(match.place, count), 0, match.length, PREDICTION))
        if own is not None:
            found.append(Copy(self.following(own.place, count), 0, own.length, SUFFIX))
        other = None if texts is None else texts.match(self.tokens[-MAX_MATCH:])
        if texts is not None and other is not None and (own is None or other.length > own.length):
            found.append(Copy(texts.following(other.place, count), 0, other.length, EARLIER))
        return sorted(found, key=attrgetter("length"))  # where two guess the same token, the last one goes on
