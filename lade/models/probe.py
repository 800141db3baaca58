"""Trying out a model whose code nobody has vouched for, before lookahead is trusted with it. Floor 3."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lade.attention import Block
from lade.compat import PLAIN_LAYERS, DynamicSlidingWindowLayer
from lade.models.base import ModelAdapter

# The prompt of a trial is as long as the text of the call, up to this; what sets in later only the configuration can tell.
LONGEST_TRIAL = 2048
SHORTEST_TRIAL = 64
# The block's error must be so much smaller than what an ignored mask would cause; in half precision both are rounded.
SAFETY = {torch.float64: 1000.0, torch.float32: 1000.0}
SAFETY_IN_HALF_PRECISION = 10.0

# What came of trials, by the code that ran and the length that was tried; a model that is gone takes its entries along.
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, str | None]] = weakref.WeakKeyDictionary()


def trial_reason(adapter: ModelAdapter, max_length: int) -> str | None:
    """Why a model failed its trial, as a sentence; None when it passed. Tried once for each model, code and length.

    max_length: how long the text may get, in tokens.
    """
    length = SHORTEST_TRIAL
    while length < min(max_length, LONGEST_TRIAL):
        length *= 2
    key = (adapter.foreign_code, adapter.config._attn_implementation, adapter.dtype, length)
    verdicts = _verdicts.setdefault(adapter.model, {})
    if key not in verdicts:
        try:
            verdicts[key] = _try_out(adapter, length)
        except torch.OutOfMemoryError:
            return "there was no room for a trial block"  # there may be for the next call
    return verdicts[key]


def _try_out(adapter: ModelAdapter, length: int) -> str | None:
    family = adapter.model.config.model_type
    try:
        error, effect = probe(adapter, length)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever somebody's code raises when it is given a block
        return f"a trial block failed on this {family!r} model ({type(problem).__name__}: {problem})"
    if not error * SAFETY.get(adapter.dtype, SAFETY_IN_HALF_PRECISION) < effect:  # also where either is nan
        return (
            f"a trial block on this {family!r} model was off by {error:.2g}, where an ignored mask costs {effect:.2g}; "
            "see docs/adding-a-model.md"
        )
    return None


@torch.no_grad()
def probe(adapter: ModelAdapter, length: int = SHORTEST_TRIAL) -> tuple[float, float]:
    """How far a block's logits are from plain decoding's, and how far they would be if the model ignored the mask.

    length: tokens of the text, fewer where the model's positions end before. The block holds a root, a wrong guess, and behind it a branch of two right ones: rows that a plain causal mask would change.
    """
    model, vocab_size = adapter.model, adapter.config.vocab_size
    device = model.get_input_embeddings().weight.device
    numbers = torch.Generator().manual_seed(0)
    count = min(length, getattr(adapter.config, "max_position_embeddings", None) or length) - 4
    text = torch.randint(vocab_size, (1, count + 4), generator=numbers).to(device)
    prefix, (root, wrong, first, second) = text[:, :count], text[0, count:]

    tokens = torch.stack([root, first, second])
    expected = plain_logits(adapter, prefix, tokens, DynamicCache(config=adapter.config))
    doubt = 0.0
    kinds = {type(layer) for layer in DynamicCache(config=adapter.config).layers}
    if DynamicSlidingWindowLayer in kinds and kinds <= set(PLAIN_LAYERS):
        # A caller's own cache may keep every key; only what both agree on is what the model says.
        doubt = float((expected - plain_logits(adapter, prefix, tokens, DynamicCache())).abs().max())
    cache = adapter.make_cache(count + 8)
    positions = torch.arange(count + 4, device=device)[None]
    arguments = {"position_ids": positions[:, :count]} if adapter.takes_positions else {}
    adapter.prompt_model(input_ids=prefix, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
    cache.end_prefill(1)

    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=device)
    offsets = torch.tensor([[0, 1, 1, 2]], device=device)
    results = []
    for visible in (tree, torch.ones_like(tree).tril()):
        block = Block(
            tokens=torch.stack([root, wrong, first, second])[None],
            offsets=offsets,
            positions=count + offsets,
            visible=visible[None],
            logit_rows=torch.tensor([0, 2, 3], device=device),
            lengths=cache.lengths,
            key_mask=None,
        )
        results.append(adapter.forward_block(block, cache).logits[0].double().to(expected.device))
    error, effect = (float((result - expected).abs().max()) for result in results)
    return max(error, doubt), effect


def plain_logits(adapter: ModelAdapter, prefix: Tensor, tokens: Tensor, cache: DynamicCache) -> Tensor:
    """Logits behind each of `tokens`, one forward after the other as plain generate() does. Returns [len(tokens), V]."""
    model: Any = adapter.model
    logits = []
    start = 0
    for ids in (prefix, *tokens[:, None, None]):
        places = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        arguments = {"position_ids": places} if adapter.takes_positions else {}
        outputs = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
        logits.append(outputs.logits[0, -1])
        start += ids.shape[1]
    return torch.stack(logits[1:]).double()
