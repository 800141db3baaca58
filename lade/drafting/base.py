"""The interface of drafters: what they are given, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lade.block.token_tree import TokenTree
from lade.config import LookaheadConfig
from lade.drafting.prediction import Predictions
from lade.drafting.step_costs import StepCosts
from lade.verification.logits import LogitsSummary
from lade.verification.sequences import TokenSequences

ROOT_ALONE = (2, 1)  # the (N, W) of a block without a window
FOREIGN = -1  # in place of an id that no embedding exists for


@dataclass(frozen=True, slots=True)
class Explanation:
    """The origin of one row's guesses and of the block's size, for tools such as `lade trace`. Parts may be empty.

    sources, chances: of each node of the tree, its source, and its estimated probability of being
    accepted together with all its ancestors. reason: why the block has its size, as a sentence. offers: the sizes that
    were compared, each as tokens of the block, tokens that the step is expected to commit, and cost in plain steps.
    """

    sources: tuple[str, ...] = ()
    chances: tuple[float, ...] = ()
    reason: str = ""
    offers: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """The guesses of one step.

    explain: row -> Explanation, until the next `propose`; None if the drafter has none.
    """

    tree: TokenTree
    max_depth: int  # of the tree
    window_shape: tuple[int, int]  # (N, W) of the window's part of the block; ROOT_ALONE without one
    window_cells: Tensor  # [B, (N-1)*W - 1] ids
    explain: Callable[[int], Explanation] | None = None

    @property
    def has_window(self) -> bool:
        return self.window_shape != ROOT_ALONE

    def as_chains(self, is_finished: list[bool]) -> Draft:
        """The first path of each tree alone, all of the same length. Without the window, whose levels are no chain.

        is_finished: rows that need no guesses.
        """
        tree = self.tree.first_paths(is_finished)
        if tree == self.tree and not self.has_window:
            return self
        return Draft(tree, tree.num_nodes, ROOT_ALONE, self.window_cells[:, :0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step, or of the prompt's forward.

    tree: the guesses as they were laid out. logits: [B, 1 + n, V] after the root and after each node. accepted: the
    accepted nodes of each row, None for a row to which nothing was committed. choices: [B, W] the model's choices
    after the window's last level; None without a window. sequences: the committed text. summary: what the host already
    has of these logits, and of padding after them; None if nothing.
    """

    tree: TokenTree
    logits: Tensor
    accepted: list[list[int] | None]
    choices: Tensor | None
    sequences: TokenSequences
    summary: LogitsSummary | None = None

    @property
    def num_committed(self) -> list[int]:
        """Tokens committed to each row: the accepted guesses and the one chosen after them."""
        return [0 if path is None else len(path) + 1 for path in self.accepted]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The call that a drafter is made for.

    num_tokens: ids that the model has an embedding for. prompt_ids: [B, P] ids, padded on the left. key_mask: [B, P or
    more] bool, False for padding; None without. temperature: of sampling, None for greedy. costs: of steps, at each
    step of the kind that it will have; None where no size follows costs. is_exact: no block's size can change a text.
    takes_chains: of each tree only the first path is used, cut to the shortest row's. predictions: of each row, ids
    that its answer is expected to resemble; None without.
    """

    config: LookaheadConfig
    model: Any
    num_tokens: int
    prompt_ids: Tensor
    key_mask: Tensor | None
    temperature: float | None
    costs: StepCosts | None = None
    is_exact: bool = True
    takes_chains: bool = False
    predictions: Predictions | None = None

    def prompts(self) -> list[Tensor]:
        """Each row's ids without padding, [length]; FOREIGN for placeholders, which may stand beside inputs_embeds."""
        ids = self.prompt_ids.long()
        ids = ids.masked_fill((ids < 0) | (ids >= self.num_tokens), FOREIGN)
        if self.key_mask is None:
            return list(ids)
        are_text = self.key_mask[:, self.key_mask.shape[1] - ids.shape[1] :]
        return [row[is_text] for row, is_text in zip(ids, are_text, strict=True)]


class Drafter(Protocol):
    """Proposes guesses after each row's root. Any tokens are valid guesses; good ones are accepted.

    A class that inherits from it needs only `propose`.
    """

    def propose(self, sequences: TokenSequences, is_finished: list[bool], max_offset: int | None) -> Draft:
        """sequences: the committed text, whose last tokens are the roots. is_finished: rows that need no guesses.

        max_offset: how far beyond the root a guess may lie, None for anywhere.
        """

    def learn(self, outcome: Outcome) -> None:
        """Called once after each forward, the prompt's included."""
        return

    def finish(self) -> None:
        """The call is over: what has waited is learned from."""
        return

    def sources(self) -> dict[str, list[int]]:
        """Guesses proposed and guesses accepted during the call, by where they came from."""
        return {}
