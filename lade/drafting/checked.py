"""Drafters of users: what they propose is checked before it reaches the model."""

from __future__ import annotations

from collections.abc import Iterator

from lade.drafting.base import Draft, Drafter, DraftRequest
from lade.verification.sequences import TokenSequences

METHODS = ("propose", "learn", "finish", "sources")


class CheckedDrafter(Drafter):
    """A registered drafter with checks: an unknown id or a node too far ahead would fail inside the model."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        """Raises TypeError for what lacks a drafter's methods."""
        self._drafter, self._name = drafter, f"{type(drafter).__name__} (MODE={request.config.mode!r})"
        missing = [name for name in METHODS if not callable(getattr(drafter, name, None))]
        if missing:
            raise TypeError(
                f"{self._name} has no {missing[0]}(): a drafter must inherit from lade.drafting.base.Drafter, "
                f"or have {', '.join(METHODS)}"
            )
        self._num_tokens, self._most = request.num_tokens, request.config.max_block_tokens
        self.learn = drafter.learn  # type: ignore[method-assign]
        self.finish, self.sources = drafter.finish, drafter.sources  # type: ignore[method-assign]

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        """Raises ValueError for a draft that breaks a rule, and TypeError for what is no draft."""
        draft = self._drafter.propose(sequences, is_finished, max_offset)
        if not isinstance(draft, Draft):
            raise TypeError(f"{self._name}.propose() must return a Draft, got {draft!r}")
        problem = next(self._problems(draft, len(is_finished), max_offset), None)
        if problem:
            raise ValueError(f"a draft of {self._name} {problem}")
        return draft

    def _problems(self, draft: Draft, batch_size: int, max_offset: int | None) -> Iterator[str]:
        """The rules that are broken, as sentences. Each rule relies on those before it."""
        tree, last_id = draft.tree, self._num_tokens - 1
        if (len(tree.tokens), len(tree.parents)) != (batch_size, batch_size):
            yield f"must have one tree for each of the {batch_size} rows, got {len(tree.tokens)}"
        if tree.num_nodes + 1 > self._most:
            yield f"may have {self._most - 1} guesses in a row, MAX_BLOCK less the root, got {tree.num_nodes}"
        for tokens, parents in zip(tree.tokens, tree.parents, strict=True):
            unknown = [token for token in tokens if not 0 <= token <= last_id]
            if unknown:
                yield f"must hold ids from 0 to {last_id}, got {unknown[0]}"
            if len(parents) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(parents)):
                yield f"must name for each node an earlier one or -1 as its parent, got {parents}"
        depth = max((max(depths, default=0) for depths in tree.padded_depths(tree.num_nodes)), default=0)
        if draft.max_depth != depth:
            yield f"must give its tree's depth, {depth}, as max_depth, got {draft.max_depth}"
        if max_offset is not None and depth > max_offset:
            yield f"may lie at most {max_offset} tokens (max_offset) after the root, got {depth}"
        (num_levels, num_columns), cells = draft.window_shape, draft.window_cells
        if num_levels < 2 or num_columns < 1:
            yield f"must have a window_shape (N, W) of at least (2, 1), got {draft.window_shape}"
        if not draft.has_window:
            return  # its cells are not read
        shape = batch_size, (num_levels - 1) * num_columns - 1
        if tuple(cells.shape) != shape:
            yield f"must have window_cells of shape {shape} for a window_shape of {draft.window_shape}, got {tuple(cells.shape)}"
        if not bool(((cells >= 0) & (cells <= last_id)).all()):
            yield f"must hold ids from 0 to {last_id} as window_cells, got {cells.tolist()}"
