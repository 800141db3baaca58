"""Token selection with generate()'s own rules: how tokens are chosen, committed and streamed, and when a row ends.

Selection does not depend on the source of the guesses. Along a token tree it chooses one token after another, in plain
order, and never after a rejected guess. Three classes, all with plain generate()'s result:

    PerRowSelection    transformers' processors and samplers that treat rows independently. Each row accepts its own
                       number of tokens.
    GreedySelection    the same for argmax alone. All choices of a step in one copy to the host.
    LockstepSelection  everything else: processors, criteria and streamers see the whole batch at one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import inf

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)

from lade.block.token_tree import TokenTree
from lade.common.bypassed import is_as_written
from lade.common.compat import logits_processors
from lade.common.request import Request, whole_length
from lade.verification.draws import ExponentialDraws, drawing
from lade.verification.logits import BlockLogits
from lade.verification.nan_guard import NanGuard
from lade.verification.outputs import OutputRecorder
from lade.verification.sequences import TokenSequences
from lade.verification.walk import children_of, walk

Accepted = list[list[int] | None]

# Processors whose scores for a row depend on that row alone, and whose calls leave no state behind.
ROW_WISE_PROCESSORS = logits_processors(
    """
    EpsilonLogitsWarper EtaLogitsWarper ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor LogitNormalization MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor
    MinPLogitsWarper NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper
    TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """
)
# When sampling, a row may be at most this many tokens ahead of the slowest one: draws are kept for so many tokens.
MAX_LEAD = 32


class Selection:
    """Common part: the sequences, which rows are finished, and generate()'s rules."""

    pads_guesses = False  # whether finished rows go on with pad tokens, as in plain generate()

    def __init__(self, request: Request) -> None:
        batch_size = len(request.input_ids)
        self.processor, self.criteria = request.logits_processor, request.stopping_criteria
        self.streamer, self.recorder = request.streamer, OutputRecorder(request.generation_config)
        self.do_sample = bool(request.generation_config.do_sample)
        self.temperature = (request.generation_config.temperature or 1.0) if self.do_sample else 1.0
        self.sequences = TokenSequences(request.input_ids)
        self.is_finished = [False] * batch_size
        self.num_generated = 0  # over all rows, without padding
        self.nan_guard = NanGuard()
        pad_token = request.generation_config._pad_token_tensor
        self.pad_token = -1 if pad_token is None else int(pad_token)
        self.draws = ExponentialDraws(request.input_ids.device, batch_size) if self.do_sample else None

    def verify(self, tree: TokenTree, block_logits: BlockLogits) -> Accepted:
        """Commit the model's choices along each row's tree.

        Returns the accepted nodes of each row; None for a row to which nothing was committed.
        """
        self.nan_guard.begin_step()
        self._block_logits = block_logits
        children = [children_of(*row) for row in zip(tree.tokens, tree.parents, strict=True)]
        accepted: Accepted = [None] * len(children)
        for rows in self._row_groups():
            paths = walk(children[rows], partial(self._choice, rows), partial(self._commit, rows))
            if paths is not None:
                accepted[rows] = paths
        del self._block_logits  # after the prompt they may hold the logits of all its tokens
        if self.draws is not None:
            self.draws.forget(self._shortest - self.sequences.prompt_length)
        return accepted

    def _row_groups(self) -> list[slice]:
        """The rows that walk together, of all in which something is chosen in this step."""
        raise NotImplementedError

    def _ended(self, rows: slice, tokens: list[int], were_guessed: bool) -> list[bool]:
        """Which of some rows have ended with these tokens, the last of their texts. were_guessed: as for `walk`."""
        raise NotImplementedError

    def without_finished(self, tree: TokenTree, max_depth: int) -> TokenTree:
        """Replace finished rows' guesses by nothing, or by pad tokens where such rows go on with them."""
        rows = [row for row, is_idle in enumerate(self.is_idle) if is_idle]
        return tree.with_chains(rows, self.pad_token, max_depth if self.pads_guesses else 0) if rows else tree

    @cached_property
    def max_length(self) -> int:
        """The smallest maximum length among the criteria; the list's own attribute is the first one's."""
        return min((whole_length(c.max_length) for c in self.criteria if isinstance(c, MaxLengthCriteria)), default=0)

    @cached_property
    def eos_ids(self) -> set[int]:
        return {
            int(token) for c in self.criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.flatten()
        }

    @cached_property
    def stop_strings(self) -> list[StopStringCriteria]:
        return [criterion for criterion in self.criteria if isinstance(criterion, StopStringCriteria)]

    @property
    def is_idle(self) -> list[bool]:
        """Rows that need no guesses."""
        return self.is_finished

    @property
    def _shortest(self) -> int:
        """Length of the shortest unfinished text; 0 if all are finished."""
        rows = zip(self.sequences.lengths, self.is_finished, strict=True)
        return min((length for length, is_finished in rows if not is_finished), default=0)

    def _choice(self, rows: slice, nodes: list[int]) -> list[int] | None:
        """`choose` of `walk`."""
        are_usable = self.nan_guard.are_usable(self._block_logits.is_number, rows, nodes)
        return self._choose(rows, nodes) if are_usable else None

    def _choose(self, rows: slice, nodes: list[int]) -> list[int]:
        """The token after one node (-1 = root) of each row."""
        ids = self.sequences.texts(rows)
        logits = self._block_logits.of(rows, nodes).to(dtype=torch.float32, copy=True, device=ids.device)
        scores = self._scores(rows, ids, logits)
        self.recorder.record(scores=scores, logits=logits)
        if scores.shape[:-1] != ids.shape[:-1]:
            torch.cat([ids, scores.argmax(dim=-1)[:, None]], dim=-1)  # raises, as in plain generate()
        if self.do_sample:
            return self._sample(scores, rows)
        return scores.argmax(dim=-1).tolist()

    def _commit(self, rows: slice, tokens: list[int], were_guessed: bool) -> bool:
        """`commit` of `walk`."""
        for row, token in enumerate(tokens, rows.start):
            self.sequences.append([token], row)
        self.num_generated += self.is_finished[rows].count(False)
        ended = self._ended(rows, tokens, were_guessed)
        self.is_finished[rows] = ended
        # A criterion may write another token, which then goes through the model instead of the guess.
        return all(ended) or [text[-1] for text in self.sequences.generated[rows]] != tokens

    def _scores(self, rows: slice, ids: Tensor, logits: Tensor) -> Tensor:
        """Apply the processors. ids: [R, T]. logits: [R, V]. Returns [R, V], in another width if they change it."""
        with self._reading_back(rows, ids):
            return self.processor(ids, logits)

    @contextmanager
    def _reading_back(self, rows: slice, ids: Tensor) -> Iterator[None]:
        """Go on with the changed text if user code writes to `ids`, as plain generate() does. ids: [R, T]."""
        before = ids.clone() if ids.is_inference() else ids._version
        yield
        is_same = torch.equal(before, ids) if isinstance(before, Tensor) else before == ids._version
        if not is_same:
            self.sequences.read_back(rows, ids)

    def _sample(self, scores: Tensor, rows: slice) -> list[int]:
        """The tokens that `torch.multinomial` would sample for these rows, whose texts have the same length.

        scores: [R, V]. Returns [R]. Raises what multinomial raises for NaN.
        """
        assert self.draws is not None
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        # Processors may have set another dtype, whose draws differ; softmax makes a whole row NaN.
        if probabilities.dtype != torch.float32 or bool(probabilities[:, 0].isnan().any()):
            with drawing:
                return torch.multinomial(probabilities, num_samples=1).squeeze(1).tolist()
        index = len(self.sequences.generated[rows.start])
        draws = self.draws.draw(index, probabilities.shape[1])
        return (probabilities / draws[rows]).argmax(dim=-1).tolist()


class PerRowSelection(Selection):
    """Row-wise processors and sampling, each row at its own length; rows share the draws of plain generate()."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._reminders = [criterion for criterion in self.criteria if isinstance(criterion, MaxLengthCriteria)]

    def _row_groups(self) -> list[slice]:
        limit = self._shortest + MAX_LEAD if self.do_sample else inf
        rows = enumerate(zip(self.sequences.lengths, self.is_finished, strict=True))
        return [slice(row, row + 1) for row, (length, has_ended) in rows if length < limit and not has_ended]

    def _ended(self, rows: slice, tokens: list[int], were_guessed: bool) -> list[bool]:
        length = self.sequences.lengths[rows.start]
        for criterion in [each for each in self._reminders if length > (each.max_position_embeddings or inf)]:
            criterion(self.sequences.texts(rows), None)  # warns of it once
            self._reminders.remove(criterion)
        return [
            tokens[0] in self.eos_ids
            or length >= self.max_length
            or any(bool(criterion(self.sequences.texts(rows), None)) for criterion in self.stop_strings)
        ]


class GreedySelection(PerRowSelection):
    """Greedy decoding without processors: on a device a step is one argmax and one copy to the host."""

    def verify(self, tree: TokenTree, block_logits: BlockLogits) -> Accepted:
        self._best = block_logits.best()
        return super().verify(tree, block_logits)

    def _choose(self, rows: slice, nodes: list[int]) -> list[int]:
        return [self._best(rows.start, nodes[0])]


class LockstepSelection(Selection):
    """Everything generate() supports: all rows commit the same number of tokens, as many as all of them accept."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.pads_guesses = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self._unfinished: Tensor | int = 1  # [B] of 0 and 1, or in the shape that the criteria's answers give it

    @property
    def is_idle(self) -> list[bool]:
        """Rows that need no guesses: finished ones, if they are padded. Without padding they go on like the others."""
        return self.is_finished if self.pads_guesses else [False] * len(self.is_finished)

    def _row_groups(self) -> list[slice]:
        return [slice(0, len(self.is_finished))]

    def _choose(self, rows: slice, nodes: list[int]) -> list[int]:
        chosen = super()._choose(rows, nodes)
        if self.pads_guesses:
            chosen = [self.pad_token if done else token for token, done in zip(chosen, self.is_finished, strict=True)]
        return chosen

    def _ended(self, rows: slice, tokens: list[int], were_guessed: bool) -> list[bool]:
        scores = self.recorder.collected.get("scores")
        ids = self.sequences.texts(rows)
        with self._reading_back(rows, ids):
            unfinished = self._unfinished & ~self.criteria(ids, scores)
        self._unfinished = unfinished
        if self.streamer is not None:
            # Optional method of a streamer that shows which tokens were guessed.
            is_told = were_guessed and hasattr(type(self.streamer), "put_guess")
            (self.streamer.put_guess if is_told else self.streamer.put)(torch.tensor(tokens, device="cpu"))
        if unfinished.shape == (len(tokens),):
            return (unfinished == 0).tolist()
        is_over = not bool(unfinished.any())
        if self.pads_guesses and not is_over:
            torch.cat([ids, unfinished[:, None]], dim=-1)  # raises, as plain generate() does when it pads
        return [is_over] * len(tokens)


def selection_for(request: Request, needs_equal_lengths: bool) -> type[Selection]:
    """The fastest class with plain generate()'s result.

    needs_equal_lengths: the model or the caller's cache requires all rows to have the same length.
    """
    processors, is_batch = request.logits_processor, len(request.input_ids) > 1
    rows_are_independent = (
        type(processors) is LogitsProcessorList  # a subclass may call its processors in another way
        and all(map(is_row_wise, processors))
        and rows_end_independently(request.stopping_criteria, is_batch)
        and request.streamer is None
        and not OutputRecorder(request.generation_config).collected
        and not (is_batch and needs_equal_lengths)
    )
    if not rows_are_independent:
        return LockstepSelection
    has_stop_strings = any(isinstance(criterion, StopStringCriteria) for criterion in request.stopping_criteria)
    is_greedy = not (processors or request.generation_config.do_sample or has_stop_strings)
    return GreedySelection if is_greedy else PerRowSelection


def rows_end_independently(criteria: StoppingCriteriaList, is_batch: bool) -> bool:
    """Whether each row ends independently, so that tokens after its end are never visible.

    generate() pads finished rows only if there are end-of-sequence ids. Without them, a row that a stop string has
    ended goes on with the others.
    """
    kinds = {type(criterion) for criterion in criteria}
    is_padded = EosTokenCriteria in kinds or StopStringCriteria not in kinds or not is_batch
    return (
        criteria.max_length is not None
        and kinds <= {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria}
        and is_padded
    )


def is_row_wise(processor: Callable[..., Tensor]) -> bool:
    """Whether one row's scores depend on that row alone, and calls leave no state behind."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        is_known = not isinstance(processor.prompt_ignore_length, Tensor)
    else:
        is_known = type(processor) in ROW_WISE_PROCESSORS
    return is_known and is_as_written(type(processor), "__call__")
