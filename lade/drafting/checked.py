"""Drafters of users: what they propose is checked before it reaches the model."""

from __future__ import annotations

from lade.drafting.base import Draft, Drafter, DraftRequest
from lade.verification.sequences import TokenSequences


class CheckedDrafter(Drafter):
    """A registered drafter with checks: an unknown id or a node too far ahead would fail inside the model."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        self._drafter, self._name = drafter, f"{type(drafter).__name__} (MODE={request.config.mode!r})"
        self._num_tokens, self._most = request.num_tokens, request.config.max_block_tokens
        self.learn, self.spent = drafter.learn, drafter.spent  # type: ignore[method-assign]
        self.finish, self.sources = drafter.finish, drafter.sources  # type: ignore[method-assign]

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        """Raises ValueError for a draft that breaks a rule, and TypeError for what is no draft."""
        draft = self._drafter.propose(sequences, is_finished, max_offset)
        if not isinstance(draft, Draft):
            raise TypeError(f"{self._name}.propose() must return a Draft, got {draft!r}")
        self._check(draft, len(is_finished), max_offset)
        return draft

    def _check(self, draft: Draft, batch_size: int, max_offset: int | None) -> None:
        tree = draft.tree
        problem = None
        if (len(tree.tokens), len(tree.parents)) != (batch_size, batch_size):
            problem = f"must have one tree for each of the {batch_size} rows, got {len(tree.tokens)}"
        elif tree.num_nodes + 1 > self._most:
            problem = f"may have {self._most - 1} guesses in a row, MAX_BLOCK less the root, got {tree.num_nodes}"
        if problem is None:
            for tokens, parents in zip(tree.tokens, tree.parents, strict=True):
                problem = problem or self._problem_of_row(tokens, parents)
        if problem is None:
            depth = max((max(depths, default=0) for depths in tree.padded_depths(tree.num_nodes)), default=0)
            if draft.max_depth != depth:
                problem = f"must give its tree's depth, {depth}, as max_depth, got {draft.max_depth}"
            elif max_offset is not None and depth > max_offset:
                problem = f"may lie at most {max_offset} tokens (max_offset) after the root, got {depth}"
        if problem:
            raise ValueError(f"a draft of {self._name} {problem}")

    def _problem_of_row(self, tokens: list[int], parents: list[int]) -> str | None:
        bad = [token for token in tokens if not 0 <= token < self._num_tokens]
        if bad:
            return f"must hold ids from 0 to {self._num_tokens - 1}, got {bad[0]}"
        if len(parents) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(parents)):
            return f"must name for each node an earlier one or -1 as its parent, got {parents}"
        return None
