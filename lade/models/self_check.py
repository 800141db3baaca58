"""The self-check: compare a block's logits with plain decoding on a model whose code is not known to be safe."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lade.block.kv_cache import cache_arguments
from lade.block.mask import Block
from lade.common.compat import PLAIN_LAYERS, DynamicSlidingWindowLayer
from lade.common.state import PerModel, keeping_state
from lade.common.tolerance import MASK_EFFECT_RATIO, STATE_EFFECT_RATIO, largest_difference
from lade.common.trial import is_out_of_memory
from lade.config import current_config
from lade.models.base import ModelAdapter
from lade.models.foreign import is_gone
from lade.verification.draws import keeping_generators

# The check's prompt is as long as the call's text, up to the last of these. What changes beyond that many tokens only
# the configuration tells.
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SHORTEST_CHECK, LONGEST_CHECK = LENGTHS[0], LENGTHS[-1]
# A check of L tokens takes about as long as 10 + L/10 one-token forwards (9M parameters, float32, one core), and
# lookahead saves about half of a call's: a check waits until calls have asked for PAYS times as many tokens.
FIXED_COST, COST_PER_TOKEN, PAYS = 10, 0.1, 2
WAITS = (
    "code that is not transformers' own, and code with a recurrent state, is tried out first, "
    "which pays when calls have asked for some more tokens"
)

# Results by code and by the sizes checked. Entries whose code no longer exists are removed.
_verdicts: PerModel[dict[Hashable, str | None]] = PerModel(dict)
MOST_VERDICTS = 64  # per model: hooks may have different arguments in each call
_asked: PerModel[list[int]] = PerModel(list)  # tokens that calls without a verdict have asked for


def self_check_reason(
    adapter: ModelAdapter, max_length: int, num_new: int, num_rows: int = 1, key_mask: Tensor | None = None
) -> str | None:
    """Why a model failed its self-check, as a sentence; None if it passed. Runs once per model, code and size of call.

    max_length: the largest length of the text in tokens. num_new: the most tokens that the call may generate.
    num_rows: B. key_mask: [B, P] of the prompts, None if it hides nothing. A mask needs a check of its own: some models
    derive positions from it and some ignore it. Returns `WAITS` as long as a check would not pay.
    """
    code = adapter.code
    length = next(length for length in LENGTHS if length >= min(max_length, LONGEST_CHECK))
    # A hook's effect may depend on the number of rows.
    sizes = (current_config().max_block_tokens, num_rows if code.hooks else 1, key_mask is not None)
    kind = (
        code.classes,
        code.functions,
        code.hooks,
        adapter.config._attn_implementation,
        adapter.dtype,
        sizes,
        any(part.training for part in adapter.unusual_parts),
    )
    key, verdicts = (length, *kind), _verdicts.of(adapter.model)
    if any(verdicts.get((longer, *kind), "unknown") is None for longer in LENGTHS if longer > length):
        return None
    if key not in verdicts:
        asked = _asked.of(adapter.model)
        asked.append(num_new)
        if sum(asked) < PAYS * (FIXED_COST + COST_PER_TOKEN * length):
            return WAITS
        names = ", ".join(code.names[:3])
        subject = f"this {adapter.model.config.model_type!r} model" + (f" with {names}" if names else "")
        try:
            with keeping_generators(adapter.model), keeping_state(adapter.model):
                # A fresh adapter, since it keeps state of the check.
                measure = probe_states if adapter.is_recurrent else probe
                error, effect = measure(type(adapter)(adapter.model), length, *sizes)
        except Exception as problem:  # foreign code may raise anything
            if is_out_of_memory(problem):
                return "there was no room for a trial block"  # not stored: the next call may have room
            verdict: str | None = f"a trial block failed on {subject} ({type(problem).__name__}: {problem})"
        else:
            verdict = None
            ratios = STATE_EFFECT_RATIO if adapter.is_recurrent else MASK_EFFECT_RATIO
            if not error * ratios[adapter.dtype] < effect:  # also where either is nan
                verdict = reason_of_difference(adapter, subject, is_masked=key_mask is not None)
        for old in [old for old in verdicts if is_gone(old)] + list(verdicts)[: -MOST_VERDICTS + 1]:
            verdicts.pop(old, None)
        verdicts[key] = verdict
    return verdicts[key]


def reason_of_difference(adapter: ModelAdapter, subject: str, is_masked: bool) -> str:
    """Why a model whose logits differed in the self-check is not served. is_masked: as for `probe`."""
    if adapter.is_recurrent:
        return (
            f"a trial block on {subject} differed from one-token decoding by more than rounding: a forward of several tokens "
            "does not continue from the recurrent state, or leaves another one"
        )
    if not adapter.takes_positions:
        return f"{subject} takes no position_ids and failed a trial block: it counts tokens, guesses that lie side by side included"
    padded = " after a prompt with padding" if is_masked else ""
    return (
        f"a trial block{padded} on {subject} differed from one-token decoding by more than rounding, so the model seems "
        "to ignore the mask or the positions; see docs/adding-a-model.md"
    )


@torch.no_grad()
def probe(
    adapter: ModelAdapter,
    length: int = SHORTEST_CHECK,
    largest_block: int = 0,
    num_rows: int = 1,
    is_masked: bool = False,
) -> tuple[float, float]:
    """The largest difference of a block's logits from plain decoding's, and the same under a plain causal mask.

    The second figure is the effect of ignoring the tree mask, against which the first is judged. The block holds a
    root, a wrong guess, and after it a branch of two right guesses, whose rows a causal mask would change.

    length: of the text in tokens, at most the model's positions. largest_block: size in tokens of a second block with
    more wrong guesses, since code may depend on the size. num_rows: B, all with the same text. is_masked: mask part of
    the prompt.
    """
    model = adapter.model
    device = model.get_input_embeddings().weight.device
    numbers = torch.Generator().manual_seed(0)
    count = min(length, getattr(adapter.config, "max_position_embeddings", None) or length) - 4
    text = torch.randint(adapter.num_tokens, (1, count + 4), generator=numbers).to(device)
    prefix, (root, wrong, first, second) = text[:, :count].expand(num_rows, -1), text[0, count:]
    mask = torch.ones_like(text).repeat(num_rows, 1)
    if is_masked:  # not the first tokens, which may become NaN with eager attention
        mask[:, count // 4 : count // 2] = 0
    masks = {"attention_mask": mask[:, :count]} if is_masked else {}
    places = counted(mask)

    tokens = torch.stack([root, first, second])
    expected = plain_logits(adapter, prefix, tokens, DynamicCache(config=adapter.config), masks)
    doubt = 0.0
    kinds = {type(layer) for layer in DynamicCache(config=adapter.config).layers}
    if DynamicSlidingWindowLayer in kinds and kinds <= set(PLAIN_LAYERS):
        # A caller's own cache may keep every key; if that changes the logits, the reference is not reliable.
        doubt = largest_difference(plain_logits(adapter, prefix, tokens, DynamicCache(), masks), expected)
    largest_block = max(largest_block, 4)
    cache = adapter.make_cache(count + largest_block + 4)
    arguments = masks | ({"position_ids": places[:, :count]} if adapter.takes_positions else {})
    adapter.prompt_model(input_ids=prefix, **cache_arguments(cache, adapter.cache_name), **arguments)
    cache.end_prefill(num_rows)

    def distance(size: int, is_causal: bool = False) -> float:
        visible = torch.eye(size, dtype=torch.bool, device=device)
        visible[:, 0] = visible[3, 2] = True
        offsets = torch.tensor([0, 1, 1, 2] + [1] * (size - 4), device=device).expand(num_rows, -1)
        block = Block(
            tokens=torch.cat([torch.stack([root, wrong, first, second]), wrong.expand(size - 4)]).expand(num_rows, -1),
            offsets=offsets,
            positions=places[:, count, None] + offsets,
            visible=(torch.ones_like(visible).tril() if is_causal else visible).expand(num_rows, -1, -1),
            logit_rows=torch.tensor([0, 2, 3], device=device),
            lengths=cache.lengths,
            key_mask=mask[:, :count].bool() if is_masked else None,
        )
        return largest_difference(adapter.forward_block(block, cache).logits.double().to(expected.device), expected)

    error = max(distance(4), distance(largest_block)) if largest_block > 4 else distance(4)
    return max(error, doubt), distance(4, is_causal=True)


@torch.no_grad()
def probe_states(
    adapter: ModelAdapter,
    length: int = SHORTEST_CHECK,
    largest_block: int = 0,
    num_rows: int = 1,
    is_masked: bool = False,
) -> tuple[float, float]:
    """As `probe`, for a model with a recurrent state, whose blocks are chains.

    Four blocks: one of wrong guesses, one whose first guess is right, one of right guesses, and a token alone. The
    second figure is the effect of a rejected guess that stays in the state. Arguments as for `probe`.
    """
    numbers = torch.Generator().manual_seed(0)
    count = min(length, getattr(adapter.config, "max_position_embeddings", None) or length) - 8
    text = torch.randint(adapter.num_tokens, (1, count + 8), generator=numbers).to(adapter.model.device)
    prefix, (wrong, *tokens) = text[:, :count].expand(num_rows, -1), text[0, count:]
    mask = torch.ones_like(text).repeat(num_rows, 1)
    if is_masked:
        mask[:, count // 4 : count // 2] = 0
    masks = {"attention_mask": mask[:, :count]} if is_masked else {}
    places = counted(mask)
    expected = plain_logits(adapter, prefix, torch.stack(tokens), DynamicCache(config=adapter.config), masks)

    def run(blocks: list[tuple[list[Tensor], int]], puts_back: bool = True) -> float:
        """The largest difference after the blocks' right tokens. blocks: tokens, and how many of them are right."""
        cache = adapter.make_cache(count + largest_block + 16)
        arguments = masks | ({"position_ids": places[:, :count]} if adapter.takes_positions else {})
        adapter.prompt_model(input_ids=prefix, **cache_arguments(cache, adapter.cache_name), **arguments)
        cache.end_prefill(num_rows)
        done, worst = 0, 0.0
        for guesses, num_right in blocks:
            size = len(guesses)
            offsets = torch.arange(size, device=text.device).expand(num_rows, -1)
            block = Block(
                tokens=torch.stack(guesses).expand(num_rows, -1),
                offsets=offsets,
                positions=places[:, count - 1, None] + 1 + done + offsets,
                visible=torch.ones(num_rows, size, size, dtype=torch.bool, device=text.device).tril(),
                logit_rows=torch.arange(num_right, device=text.device),
                lengths=cache.lengths,
                key_mask=mask[:, :count].bool() if is_masked else None,
            )
            found = adapter.forward_block(block, cache).logits.double().to(expected.device)
            worst = max(worst, largest_difference(found, expected[:, done : done + num_right]))
            num_kept = num_right if puts_back else size
            cache.commit([list(range(1, num_kept))] * num_rows)
            done += num_right
        return worst

    a, b, c, d, e, f, g = tokens
    size = max(largest_block, 4)
    error = run([([a, *[wrong] * (size - 1)], 1), ([b, c, wrong], 2), ([d, e, f], 3), ([g], 1)])
    return error, run([([a, wrong], 1), ([b, c], 2)], puts_back=False)


def plain_logits(
    adapter: ModelAdapter, prefix: Tensor, tokens: Tensor, cache: DynamicCache, masks: dict[str, Tensor]
) -> Tensor:
    """Logits after each of `tokens`, one forward per token as in plain generate().

    prefix: [B, P]. tokens: [n]. masks: the prefix's attention_mask, or empty. Returns [B, n, V] in float64.
    """
    model: Any = adapter.model
    logits = []
    start, mask = 0, masks.get("attention_mask", torch.ones_like(prefix))
    for ids in (prefix, *tokens[:, None, None].expand(-1, len(prefix), -1)):
        end = start + ids.shape[1]
        mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
        arguments = {"position_ids": counted(mask)[:, start:end]} if adapter.takes_positions else {}
        arguments |= {"attention_mask": mask} if masks else {}
        outputs = model(input_ids=ids, **cache_arguments(cache, adapter.cache_name), **arguments)
        logits.append(outputs.logits[:, -1])
        start = end
    return torch.stack(logits[1:], dim=1).double()


def counted(mask: Tensor) -> Tensor:
    """Positions as generate() computes them. mask: [B, T] of 0 and 1. Returns [B, T]."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
