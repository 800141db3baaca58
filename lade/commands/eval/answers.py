"""The methods that are compared, and an answer by one of them: plain data, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN, LADE = "plain", "lade"
LOOKUP_TOKENS = 5
# Method -> arguments of generate(). Only LADE runs with lookahead on.
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    LADE: {},
    "prompt-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    "static": {"cache_implementation": "static"},  # transformers compiles this one on a GPU
}


@dataclass(slots=True)
class Answer:
    """All turns of one question by one method. tokens: the new ids of each turn."""

    question: str
    method: str
    is_continuation: bool  # of the question's text, and not an answer to a chat's question
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # forward passes, the prompt's included
    fallback_reason: str | None = None  # of lade: why a turn ran without lookahead
    skipped: str | None = None  # why the question was not answered to its end

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))
