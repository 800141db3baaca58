"""Trying out a model whose code nobody has vouched for, before lookahead is trusted with it. Floor 3."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from lade.attention import Block
from lade.models.base import PLAIN_LAYERS, ModelAdapter, prompt_key_mask

# The prompt of a trial is as long as the text of the call, up to this; what sets in later only the configuration can tell.
LONGEST_TRIAL = 2048
SHORTEST_TRIAL = 64
# The block's error must be so much smaller than what an ignored mask would cause; in half precision both are rounded.
SAFETY = {torch.float64: 1000.0, torch.float32: 1000.0}
SAFETY_IN_HALF_PRECISION = 10.0

# What came of trials, by the code that ran and the length that was tried; a model that is gone takes its entries along.
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, str | None]] = weakref.WeakKeyDictionary()


def trial_reason(adapter: ModelAdapter, max_length: int, attention_mask: Tensor | None = None) -> str | None:
    """Why a model failed its trial, as a sentence; None when it passed. Tried once for each model, code and length.

    max_length: how long the text may get, in tokens. attention_mask: of the prompts, [B, P]; one that hides something has a trial of its
    own, since some models count positions by it and some ignore it.
    """
    is_masked = prompt_key_mask(attention_mask) is not None
    length = SHORTEST_TRIAL
    while length < min(max_length, LONGEST_TRIAL):
        length *= 2
    key = (adapter.foreign_code, adapter.config._attn_implementation, adapter.dtype, length, is_masked)
    verdicts = _verdicts.setdefault(adapter.model, {})
    if key not in verdicts:
        try:
            verdicts[key] = _try_out(adapter, length, is_masked)
        except torch.OutOfMemoryError:
            return "there was no room for a trial block"  # there may be for the next call
    return verdicts[key]


def _try_out(adapter: ModelAdapter, length: int, is_masked: bool) -> str | None:
    family = adapter.model.config.model_type
    try:
        error, effect = probe(adapter, length, is_masked)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever somebody's code raises when it is given a block
        return f"a trial block failed on this {family!r} model ({type(problem).__name__}: {problem})"
    if not error * SAFETY.get(adapter.dtype, SAFETY_IN_HALF_PRECISION) < effect:  # also where either is nan
        padded = " behind a prompt with padding" if is_masked else ""
        return (
            f"a trial block{padded} on this {family!r} model was off by {error:.2g}, where an ignored mask costs {effect:.2g}; "
            "see docs/adding-a-model.md"
        )
    return None


@torch.no_grad()
def probe(adapter: ModelAdapter, length: int = SHORTEST_TRIAL, is_masked: bool = False) -> tuple[float, float]:
    """How far a block's logits are from plain decoding's, and how far they would be if the model ignored the mask.

    length: tokens of the text, fewer where the model's positions end before. The block holds a root, a wrong guess, and behind it a branch of two right ones: rows that a plain causal mask would change.
    is_masked: whether a mask hides a part of the prompt.
    """
    model, vocab_size = adapter.model, adapter.config.vocab_size
    device = model.get_input_embeddings().weight.device
    numbers = torch.Generator().manual_seed(0)
    count = min(length, getattr(adapter.config, "max_position_embeddings", None) or length) - 4
    text = torch.randint(vocab_size, (1, count + 4), generator=numbers).to(device)
    prefix, (root, wrong, first, second) = text[:, :count], text[0, count:]
    mask = torch.ones_like(text)
    if is_masked:  # not the first ones: eager attention may make NaN of those
        mask[:, count // 4 : count // 2] = 0
    masks = {"attention_mask": mask[:, :count]} if is_masked else {}
    places = counted(mask)

    tokens = torch.stack([root, first, second])
    expected = plain_logits(adapter, prefix, tokens, DynamicCache(config=adapter.config), masks)
    doubt = 0.0
    kinds = {type(layer) for layer in DynamicCache(config=adapter.config).layers}
    if DynamicSlidingWindowLayer in kinds and kinds <= set(PLAIN_LAYERS):
        # A caller's own cache may keep every key; only what both agree on is what the model says.
        doubt = float((expected - plain_logits(adapter, prefix, tokens, DynamicCache(), masks)).abs().max())
    cache = adapter.make_cache(count + 8)
    arguments = masks | ({"position_ids": places[:, :count]} if adapter.takes_positions else {})
    adapter.prompt_model(input_ids=prefix, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
    cache.end_prefill(1)

    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=device)
    offsets = torch.tensor([[0, 1, 1, 2]], device=device)
    results = []
    for visible in (tree, torch.ones_like(tree).tril()):
        block = Block(
            tokens=torch.stack([root, wrong, first, second])[None],
            offsets=offsets,
            positions=places[:, count, None] + offsets,
            visible=visible[None],
            logit_rows=torch.tensor([0, 2, 3], device=device),
            lengths=cache.lengths,
            key_mask=mask[:, :count].bool() if is_masked else None,
        )
        results.append(adapter.forward_block(block, cache).logits[0].double().to(expected.device))
    error, effect = (float((result - expected).abs().max()) for result in results)
    return max(error, doubt), effect


def plain_logits(
    adapter: ModelAdapter, prefix: Tensor, tokens: Tensor, cache: DynamicCache, masks: dict[str, Tensor]
) -> Tensor:
    """Logits behind each of `tokens`, one forward after the other as plain generate() does. Returns [len(tokens), V].

    masks: the prefix's attention_mask, or nothing.
    """
    model: Any = adapter.model
    logits = []
    start, mask = 0, masks.get("attention_mask", torch.ones_like(prefix))
    for ids in (prefix, *tokens[:, None, None]):
        end = start + ids.shape[1]
        mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
        arguments = {"position_ids": counted(mask)[:, start:end]} if adapter.takes_positions else {}
        arguments |= {"attention_mask": mask} if masks else {}
        outputs = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
        logits.append(outputs.logits[0, -1])
        start = end
    return torch.stack(logits[1:]).double()


def counted(mask: Tensor) -> Tensor:
    """Positions as generate() counts them. mask: [1, T] of zeros and ones. Returns [1, T]."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
