"""The lookahead loop: propose, lay out, forward, verify, commit, learn. One loop for greedy and sampling. Floor 4."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lade.config import LookaheadConfig
from lade.drafters import LookaheadDrafter
from lade.layout import block_layout
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.rules import GenerationRules, as_plain
from lade.stats import GenerationStats
from lade.token_tree import TokenTree
from lade.verify import children_of, walk

FIRST_CAPACITY = 1024  # slots behind the prompt that are allocated at first, where that many may be needed


def lookahead_decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    *,
    config: LookaheadConfig,
    adapter: ModelAdapter,
    stats: GenerationStats,
    **model_kwargs: Any,
) -> Tensor:
    """What `GenerationMixin._sample` returns for these arguments, in fewer forward passes.

    input_ids: [B, P] prompts. Returns [B, longest text] ids. Source: arXiv:2402.02057, algorithm 2.
    """
    batch_size, prompt_length = input_ids.shape
    rules = GenerationRules(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    key_mask = prompt_key_mask(model_kwargs.get("attention_mask"))
    prompt_lengths = [prompt_length] * batch_size if key_mask is None else key_mask.sum(1).tolist()
    padding = torch.tensor([prompt_length - length for length in prompt_lengths], device=input_ids.device)
    num_new = max(1, (stopping_criteria.max_length or 0) - prompt_length)
    cache = adapter.make_cache(model, prompt_length + min(num_new, FIRST_CAPACITY) + config.max_block_tokens)
    drafter = LookaheadDrafter(config, model.config.get_text_config().vocab_size, input_ids, prompt_lengths)

    # The prompt's own forward is a step with an empty tree.
    model_kwargs["past_key_values"] = cache
    logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1:]
    cache.end_prefill(batch_size)
    tree, guesses = TokenTree.empty(batch_size, input_ids.device), None
    stats.batch_size, stats.steps = batch_size, 1

    with _decode_mode(model):
        while True:
            accepted = verify(tree, logits, rules)
            if guesses is not None:
                cache.commit([None if path is None else [node + 1 for node in path] for path in accepted])
                stats.accepted_lengths.update(len(path) for path in accepted if path is not None)
            if all(rules.is_finished):
                break
            num_committed = [0 if path is None else len(path) + 1 for path in accepted]
            drafter.learn(guesses, rules.texts(), num_committed)

            roots = rules.roots()
            tree = drafter.propose(roots)
            layout = block_layout(config.ngram_size, config.window_size, tree.num_nodes, roots.device)
            starts = torch.tensor(cache.lengths, device=roots.device) - padding
            logits = adapter.forward_block(
                model,
                tokens=layout.tokens(roots, tree, drafter.window.cells()),
                positions=starts[:, None] + layout.position_offsets(tree),
                visible=layout.visibility(tree, config.ngram_size - 1),
                logit_rows=layout.logit_rows,
                cache=cache,
                key_mask=key_mask,
            )
            guesses = as_plain(logits[:, 1 + tree.num_nodes :]).argmax(dim=-1)  # [B, W]
            stats.steps += 1
            stats.block_tokens.append(layout.num_tokens)

    if streamer is not None:
        streamer.end()
    stats.generated_tokens = sum(rules.lengths) - batch_size * prompt_length
    return rules.result()


def verify(tree: TokenTree, logits: Tensor, rules: GenerationRules) -> list[list[int] | None]:
    """Commit what the model chose along each row's tree.

    logits: [B, 1 + n, V] behind the root and behind each node. Returns the accepted nodes of each row, None for a row
    that had ended before.
    """
    rules.begin_step(logits)
    accepted: list[list[int] | None] = []
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if rules.is_finished[row]:
            accepted.append(None)
        else:
            children = children_of(tokens, parents)
            accepted.append(walk(children, partial(rules.choose, row), partial(rules.commit, row)))
    rules.end_step()
    return accepted


def _decode_mode(model: Any) -> Any:
    """transformers' own switches for decoding, which change the numerics of mixture-of-experts layers."""
    enter = getattr(model, "_optimize_model_for_decode", None)
    return enter() if enter else nullcontext()
