"""The self-check: compare a block's logits with plain decoding on a model whose code is not known to be safe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers import DynamicCache

from lade.block.kv_cache import cache_arguments
from lade.block.mask import Block
from lade.common.compat import PLAIN_LAYERS, DynamicSlidingWindowLayer
from lade.common.request import Request, whole_length
from lade.common.state import ModuleState, PerModel, keeping_state
from lade.common.tolerance import MASK_EFFECT_RATIO, STATE_EFFECT_RATIO, largest_difference
from lade.common.trial import NotUsed, Trial
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.models.training import failed_in_training
from lade.switch import current_config
from lade.verification.draws import keeping_generators

# The check's prompt is as long as the call's text, up to the last of these. What changes beyond that many tokens only
# the configuration tells.
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SHORTEST_CHECK, LONGEST_CHECK = LENGTHS[0], LENGTHS[-1]
# A check of L tokens takes about as long as 10 + L/10 one-token forwards (0.5B parameters, bfloat16, one core). It
# waits until calls have asked for PAYS times as much, so that it is at most a twentieth of their time.
FIXED_COST, COST_PER_TOKEN, PAYS = 10, 0.1, 20
SMALL_BLOCK = 6  # tokens: a wrong guess, three right ones, and a wrong one after the root
CHAINED = 15  # tokens that the chains of a check hold, as many more steps
WAITS = (
    "code that lade does not know, and code with a recurrent state, is tried out first, "
    "once calls have asked for some hundreds of tokens; lade.warmup(model) does it at once"
)

DIFFERS = "differed from one-token decoding by more than rounding"
FAULT = ", so the model seems to ignore the mask or the positions; see docs/adding-a-model.md"
FAULT_OF_CHAINS = ": a forward of several tokens does not continue from the state, or leaves another one"
MOST_KINDS = 64  # remembered per model: hooks may have different arguments in each call

_trials: PerModel[Trial] = PerModel(Trial)  # by code and by the sizes checked
_asked: PerModel[list[float]] = PerModel(list)  # by calls that wait for a check, in one-token forwards
_at_once: ContextVar[int] = ContextVar("lade_checks_at_once", default=0)  # for texts of so many tokens


def self_check_reason(request: Request, adapter: ModelAdapter) -> str | None:
    """Why a model failed its self-check, as a sentence; None if it passed. Runs once per model, code and size of call.

    Why training mode rules the call out is asked first, at the cost of two forwards, where the call does not wait.
    Returns `WAITS` as long as a check would not pay.
    """
    code, max_length = adapter.code, whole_length(request.generation_config.max_length)
    # A mask needs a check of its own: some models derive positions from it and some ignore it.
    is_masked = prompt_key_mask(request.attention_mask) is not None
    length = next(length for length in LENGTHS if length >= min(max(max_length, _at_once.get()), LONGEST_CHECK))
    # A hook's effect may depend on the number of rows.
    sizes = (current_config().max_block_tokens, request.batch_size if code.hooks else 1, is_masked)
    kind = (
        code.classes,
        code.functions,
        code.hooks,
        adapter.config._attn_implementation,
        adapter.dtype,
        sizes,
        any(part.training for part in adapter.parts),
    )
    trial, key = _trials.of(adapter.model), (length, *kind)
    has_passed = any(trial.is_over((longer, *kind)) for longer in LENGTHS if longer >= length)
    is_new, asked = not has_passed and key not in trial.reasons, _asked.of(adapter.model)
    if is_new:
        asked.append(request.num_new + COST_PER_TOKEN * (max_length - request.num_new))
        fixed_cost = FIXED_COST + (CHAINED if adapter.takes_chains else 0)
        if sum(asked) < PAYS * (fixed_cost + COST_PER_TOKEN * length) and not _at_once.get():
            return WAITS
    if (reason := failed_in_training(request, adapter)) is not None or has_passed:
        if is_new:
            asked.pop()
        return reason
    if is_new:
        asked.clear()  # the next check waits as long for its own part
        if trial.num_kinds >= MOST_KINDS:
            _trials.set(adapter.model, trial := Trial())
    names = ", ".join(code.names[:3])
    subject = f"this {adapter.model.config.model_type!r} model" + (f" with {names}" if names else "")

    def compare() -> str | None:
        with keeping_generators(adapter.model), keeping_state(adapter.model):
            # A fresh adapter, since it keeps state of the check.
            found = trial_errors(type(adapter)(adapter.model), length, *sizes)
        ratio = (STATE_EFFECT_RATIO if adapter.takes_chains else MASK_EFFECT_RATIO)[adapter.dtype]
        is_fine = all(error * ratio < effect for error, effect in found)  # not where either is nan
        padded = " after a prompt with padding" if is_masked else ""
        fault = FAULT_OF_CHAINS if adapter.takes_chains else FAULT
        return None if is_fine else f"a trial block{padded} on {subject} {DIFFERS}{fault}"

    return trial.reason(key, compare, failure=f"a trial block failed on {subject}: ")


@contextmanager
def checking_at_once(num_tokens: int) -> Iterator[None]:
    """Calls inside run the self-check that a text of so many tokens needs, whatever it costs."""
    token = _at_once.set(num_tokens)
    try:
        yield
    finally:
        _at_once.reset(token)


@torch.no_grad()
def trial_errors(
    adapter: ModelAdapter,
    length: int = SHORTEST_CHECK,
    largest_block: int = 0,
    num_rows: int = 1,
    is_masked: bool = False,
) -> list[tuple[float, float]]:
    """Of each trial block, the largest difference of logits from plain decoding's, and the effect of a fault in them.

    The second figure is what the first is judged against: the difference where the tree mask is ignored or, in a model
    with a recurrent state, where rejected guesses stay in the state.

    length: of the text in tokens, at most the model's positions. largest_block: size in tokens of another block with
    more wrong guesses, since code may depend on the size. num_rows: B, all with the same text. is_masked: mask part of
    the prompt.
    """
    run = TrialRun(adapter, length, largest_block, num_rows, is_masked)
    return chain_errors(run) if adapter.takes_chains else tree_errors(run)


def tree_errors(run: TrialRun) -> list[tuple[float, float]]:
    """Errors and effects of a small and a large block: wrong guesses, a branch of right ones, and a wrong one.

    The last one is there for code that takes the last row of the mask for all rows.
    """
    (root, *right), wrong = run.tokens, run.wrong
    run.begin()

    def difference(size: int, is_causal: bool = False) -> float:
        branch = right[: size - 3]
        first = size - 1 - len(branch)
        visible = torch.eye(size, dtype=torch.bool, device=root.device)
        visible[:, 0] = True
        visible[first:-1, first:-1] = torch.ones_like(visible[first:-1, first:-1]).tril()
        visible = torch.ones_like(visible).tril() if is_causal else visible
        tokens = [root, *[wrong] * (first - 1), *branch, wrong]
        offsets = [0, *[1] * (first - 1), *range(1, 1 + len(branch)), 1]
        return run.difference(tokens, offsets, visible, [0, *range(first, size - 1)])

    doubt = max(run.doubt(), run.difference([root], [0], torch.ones_like(root, dtype=torch.bool).view(1, 1), [0]))
    sizes = sorted({SMALL_BLOCK, run.largest_block})
    return [(max(doubt, difference(size)), difference(size, is_causal=True)) for size in sizes]


def chain_errors(run: TrialRun) -> list[tuple[float, float]]:
    """Error and effect of chains in a row: wrong guesses, some of right ones first, right ones alone, no guess."""

    def differences(chains: list[tuple[int, int]], puts_back: bool = True) -> float:
        """chains: the right and the wrong tokens of each."""
        run.begin()
        found, rest = [], run.tokens
        for num_right, num_wrong in chains:
            size = num_right + num_wrong
            tokens, rest = [*rest[:num_right], *[run.wrong] * num_wrong], rest[num_right:]
            visible = torch.ones(size, size, dtype=torch.bool, device=run.wrong.device).tril()
            found.append(run.difference(tokens, list(range(size)), visible, list(range(num_right))))
            run.commit(num_right, num_right if puts_back else size)
        return max(found)

    long = (1, run.largest_block - 1)
    error = differences([long, (2, 1), (3, 0), (1, 0), (1, 2), (2, 1), (3, 1), (2, 0)])
    return [(error, differences([long, (2, 0)], puts_back=False))]


class TrialRun:
    """Random text, the logits that plain decoding gives after its last tokens, and trial blocks on a prefix of it."""

    def __init__(self, adapter: ModelAdapter, length: int, largest_block: int, num_rows: int, is_masked: bool) -> None:
        """As for `trial_errors`."""
        self.adapter, self.largest_block, self._num_rows = adapter, max(largest_block, SMALL_BLOCK), num_rows
        longest = getattr(adapter.config, "max_position_embeddings", None) or length
        num_more = 1 + (CHAINED if adapter.takes_chains else 7)
        count = min(length, longest) - num_more
        numbers = torch.Generator().manual_seed(0)
        text = torch.randint(adapter.num_tokens, (1, count + num_more), generator=numbers, device="cpu")
        device = adapter.model.get_input_embeddings().weight.device
        text = text.to("cpu" if device.type == "meta" else device)  # accelerate moves it to where the weights come
        self._prefix = text[:, :count].expand(num_rows, -1)
        self.wrong, *self.tokens = text[0, count:]
        self._mask = torch.ones_like(self._prefix)
        if is_masked:  # not the first tokens, which may become NaN with eager attention
            self._mask[:, count // 4 : count // 2] = 0
        self._masks = {"attention_mask": self._mask} if is_masked else {}
        self._places = counted(self._mask)
        self._expected = self._plain_logits(DynamicCache(config=adapter.config))

    def _plain_logits(self, cache: DynamicCache) -> Tensor:
        """Logits after each of `tokens`, one forward per token as in plain generate(). Returns [B, n, V] in float64."""
        adapter, logits = self.adapter, []
        start, mask = 0, self._mask
        for ids in (self._prefix, *torch.stack(self.tokens)[:, None, None].expand(-1, self._num_rows, -1)):
            end = start + ids.shape[1]
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
            arguments = {"position_ids": counted(mask)[:, start:end]} if adapter.takes_positions else {}
            arguments |= {"attention_mask": mask} if self._masks else {}
            outputs = adapter.model(input_ids=ids, **cache_arguments(cache, adapter.cache_name), **arguments)
            if getattr(outputs, adapter.cache_name) is None:
                raise NotUsed("its forward returns no cache")
            logits.append(outputs.logits[:, -1])
            start = end
        return torch.stack(logits[1:], dim=1).double()

    def doubt(self) -> float:
        """The difference of plain decoding with a caller's cache, which keeps every key of a sliding window."""
        kinds = {type(layer) for layer in DynamicCache(config=self.adapter.config).layers}
        if DynamicSlidingWindowLayer not in kinds or not kinds <= set(PLAIN_LAYERS):
            return 0.0
        return largest_difference(self._plain_logits(DynamicCache()), self._expected)

    def begin(self) -> None:
        """Run the prefix on a new cache."""
        adapter, count = self.adapter, self._prefix.shape[1]
        self._cache, self._num_done = adapter.make_cache(count + self.largest_block + 16), 0
        arguments = self._masks | ({"position_ids": self._places} if adapter.takes_positions else {})
        adapter.model(input_ids=self._prefix, **cache_arguments(self._cache, adapter.cache_name), **arguments)
        self._cache.end_prefill(self._num_rows)

    def difference(self, tokens: list[Tensor], offsets: list[int], visible: Tensor, rows: list[int]) -> float:
        """Run a block. Returns the largest difference at `rows`, which hold the next tokens of the text in order."""
        steps = torch.tensor(offsets, device=self.wrong.device).expand(self._num_rows, -1)
        block = Block(
            tokens=torch.stack(tokens).expand(self._num_rows, -1),
            offsets=steps,
            positions=self._places[:, -1:] + 1 + self._num_done + steps,
            visible=visible.expand(self._num_rows, -1, -1),
            logit_rows=torch.tensor(rows, device=self.wrong.device),
            lengths=self._cache.lengths,
            key_mask=self._mask.bool() if self._masks else None,
        )
        # Tables that grow with the text have grown as far as the small blocks reach.
        with keeping_nothing(self.adapter) if len(tokens) <= SMALL_BLOCK else nullcontext():
            found = self.adapter.forward_block(block, self._cache).double().to(self._expected.device)
        return largest_difference(found, self._expected[:, self._num_done : self._num_done + len(rows)])

    def commit(self, num_tokens: int, num_kept: int) -> None:
        """Go on after `num_tokens` of the text; the cache keeps the first `num_kept` of the block."""
        self._cache.commit([list(range(1, num_kept))] * self._num_rows)
        self._num_done += num_tokens


@contextmanager
def keeping_nothing(adapter: ModelAdapter) -> Iterator[None]:
    """Raise NotUsed if a forward inside changes what a foreign module holds: it would keep guesses, too."""
    before = [(part := adapter.parts[place], ModuleState(part)) for place, *_ in adapter.code.classes]
    yield
    for part, state in before:
        if not state.is_of(part):
            raise NotUsed(f"{type(part).__name__} keeps something of a forward, and would keep guesses")


def counted(mask: Tensor) -> Tensor:
    """Positions as generate() computes them. mask: [B, T] of 0 and 1. Returns [B, T]."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
