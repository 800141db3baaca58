"""Trying out a model whose code nobody has vouched for, before lookahead is trusted with it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lade.block.mask import Block
from lade.compat import PLAIN_LAYERS, DynamicSlidingWindowLayer, is_out_of_memory
from lade.config import current_config
from lade.models.base import ModelAdapter
from lade.models.foreign import is_gone
from lade.models.reasons import checked_code, failed_check_reason
from lade.state import PerModel
from lade.tolerance import MASK_EFFECT_RATIO, largest_difference
from lade.verification.draws import drawing

# The prompt of a trial is as long as the text of the call, up to this; what sets in later only the configuration can tell.
LONGEST_CHECK = 2048
SHORTEST_CHECK = 64

# What came of trials, by the code that ran and by what was tried; code that is gone takes its entries along.
_verdicts: PerModel[dict[Hashable, str | None]] = PerModel(dict)
MOST_VERDICTS = 64  # per model: hooks may come with other arguments in each call


def self_check_reason(
    adapter: ModelAdapter, max_length: int, num_rows: int = 1, key_mask: Tensor | None = None
) -> str | None:
    """Why a model failed its trial, as a sentence; None when it passed. Tried once for each model, code and size of a call.

    max_length: how long the text may get, in tokens. num_rows: B. key_mask: of the prompts, None where it hides nothing; one that hides
    something has a trial of its own, since some models count positions by it and some ignore it.
    """
    code = adapter.code
    length = SHORTEST_CHECK
    while length < min(max_length, LONGEST_CHECK):
        length *= 2
    # A hook may go by the row.
    sizes = (length, current_config().max_block_tokens, num_rows if code.hooks else 1, key_mask is not None)
    key = (
        code.classes,
        code.functions,
        code.hooks,
        adapter.config._attn_implementation,
        adapter.dtype,
        sizes,
        any(part.training for part in adapter.unusual_parts),
    )
    verdicts = _verdicts.of(adapter.model)
    if key not in verdicts:
        try:
            verdict = _try_out(type(adapter)(adapter.model), *sizes)
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            return "there was no room for a trial block"  # there may be for the next call
        for old in [old for old in verdicts if is_gone(old)] + list(verdicts)[: -MOST_VERDICTS + 1]:
            verdicts.pop(old, None)
        verdicts[key] = verdict
    return verdicts[key]


def _try_out(adapter: ModelAdapter, *sizes: Any) -> str | None:
    """adapter: one of its own, since it holds masks and views of the trial afterwards. sizes: as for `probe`."""
    try:
        with keeping_generators(adapter.model):
            error, effect = probe(adapter, *sizes)
    except Exception as problem:  # whatever somebody's code raises when it is given a block
        if is_out_of_memory(problem):
            raise
        return f"a trial block failed on {checked_code(adapter)} ({type(problem).__name__}: {problem})"
    if not error * MASK_EFFECT_RATIO[adapter.dtype] < effect:  # also where either is nan
        return failed_check_reason(adapter, is_masked=sizes[-1])
    return None


@contextmanager
def keeping_generators(model: PreTrainedModel) -> Iterator[None]:
    """Leave torch's generators as they were, whatever somebody's code draws from them inside."""
    devices = {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}
    kind = min((device.type for device in devices), default="cuda")
    with drawing, torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind):
        yield


@torch.no_grad()
def probe(
    adapter: ModelAdapter,
    length: int = SHORTEST_CHECK,
    largest_block: int = 0,
    num_rows: int = 1,
    is_masked: bool = False,
) -> tuple[float, float]:
    """How far a block's logits are from plain decoding's, and how far they would be if the model ignored the mask.

    length: tokens of the text, fewer where the model's positions end before. The block holds a root, a wrong guess, and behind it a
    branch of two right ones: rows that a plain causal mask would change. largest_block: tokens of a second one with more wrong guesses,
    since code may go by the size. num_rows: B, all of the same text. is_masked: whether a mask hides a part of the prompt.
    """
    model, vocab_size = adapter.model, adapter.config.vocab_size
    device = model.get_input_embeddings().weight.device
    numbers = torch.Generator().manual_seed(0)
    count = min(length, getattr(adapter.config, "max_position_embeddings", None) or length) - 4
    text = torch.randint(vocab_size, (1, count + 4), generator=numbers).to(device)
    prefix, (root, wrong, first, second) = text[:, :count].expand(num_rows, -1), text[0, count:]
    mask = torch.ones_like(text).repeat(num_rows, 1)
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
        doubt = largest_difference(plain_logits(adapter, prefix, tokens, DynamicCache(), masks), expected)
    largest_block = max(largest_block, 4)
    cache = adapter.make_cache(count + largest_block + 4)
    arguments = masks | ({"position_ids": places[:, :count]} if adapter.takes_positions else {})
    adapter.prompt_model(input_ids=prefix, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
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


def plain_logits(
    adapter: ModelAdapter, prefix: Tensor, tokens: Tensor, cache: DynamicCache, masks: dict[str, Tensor]
) -> Tensor:
    """Logits behind each of `tokens`, one forward after the other as plain generate() does.

    prefix: [B, P]. masks: its attention_mask, or nothing. Returns [B, len(tokens), V].
    """
    model: Any = adapter.model
    logits = []
    start, mask = 0, masks.get("attention_mask", torch.ones_like(prefix))
    for ids in (prefix, *tokens[:, None, None].expand(-1, len(prefix), -1)):
        end = start + ids.shape[1]
        mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
        arguments = {"position_ids": counted(mask)[:, start:end]} if adapter.takes_positions else {}
        arguments |= {"attention_mask": mask} if masks else {}
        outputs = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **arguments)
        logits.append(outputs.logits[:, -1])
        start = end
    return torch.stack(logits[1:], dim=1).double()


def counted(mask: Tensor) -> Tensor:
    """Positions as generate() counts them. mask: [B, T] of zeros and ones. Returns [B, T]."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
