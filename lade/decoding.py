"""The lookahead loop: propose, lay out, forward, verify, commit, learn. One loop for greedy and sampling. Floor 4."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lade.attention import Block
from lade.config import LookaheadConfig
from lade.drafters import LookaheadDrafter
from lade.layout import block_layout
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.outputs import OutputRecorder
from lade.rules import Accepted, best_tokens, rules_for
from lade.stats import GenerationStats
from lade.token_tree import TokenTree

WEIGHTS_WANTED = "output_attentions asks for weights that the kernel never forms"
FIRST_CAPACITY = 1024  # slots behind the prompt that are allocated at first, where that many may be needed


# Under a compiled generate() this loop, whose shapes change, is not worth compiling.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def lookahead_decode(
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    config: LookaheadConfig,
    adapter: ModelAdapter,
    stats: GenerationStats,
    callers_cache: Cache | None,
    **model_kwargs: Any,
) -> Any:
    """What `GenerationMixin._sample` returns for these arguments, in fewer forward passes.

    input_ids: [B, P] prompts; P is 0 when only inputs_embeds are given. callers_cache: the cache that plain generate()
    would leave to its caller, who finds the whole text in it afterwards. Source: arXiv:2402.02057, algorithm 2.
    """
    model = adapter.prompt_model
    recorder = OutputRecorder(generation_config)
    needs_equal_lengths = callers_cache is not None or adapter.needs_equal_lengths
    rules = rules_for(
        input_ids, logits_processor, stopping_criteria, generation_config, streamer, recorder, needs_equal_lengths
    )
    batch_size, device = len(input_ids), input_ids.device
    key_mask = prompt_key_mask(model_kwargs.get("attention_mask"))
    positions = model_kwargs.get("position_ids")  # [B or 1, prompt], or more of these; None for a model that takes none
    if config.use_flash:
        wants_weights = "output_attentions" in recorder.model_arguments
        stats.kernel_reason = WEIGHTS_WANTED if wants_weights else adapter.use_kernel(key_mask)
        stats.used_kernel = stats.kernel_reason is None
    adapter.fix_shapes(config, stats)
    num_tokens = adapter.num_tokens
    drafter = LookaheadDrafter(config, num_tokens, input_ids, key_mask)

    num_new = max(1, (stopping_criteria.max_length or 0) - input_ids.shape[1])
    cache = adapter.make_cache(input_ids.shape[1] + min(num_new, FIRST_CAPACITY) + config.max_block_tokens)
    cache.adopt(model_kwargs["past_key_values"])
    model_kwargs["past_key_values"] = cache

    # The prompt's own forward is a step with an empty tree.
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    if outputs.past_key_values is not cache:  # the model made one of its own for the prompt
        cache = adapter.make_cache(cache.capacity)
        cache.adopt(outputs.past_key_values)
    cache.end_prefill(batch_size)
    first_slot = cache.lengths[0]
    first_position = first_slot if positions is None else positions[..., -1:] + 1
    # How far positions are ahead of slots: read once, so that no step has to wait for the device to say it.
    lead = 0 if positions is None else int(positions[..., -1].max()) + 1 - first_slot
    recorder.begin_step(outputs, None)
    tree = TokenTree.empty(batch_size)
    accepted = rules.verify(tree, outputs.logits[:, -1:])
    guesses = outputs = None
    stats.batch_size, stats.steps = batch_size, 1

    with decode_mode(adapter.block_model):
        while model._has_unfinished_sequences(all(rules.is_finished), synced_gpus, device=device):
            drafter.learn(guesses, rules.texts, num_committed(accepted))

            roots = rules.texts.roots()
            starts = first_position + torch.tensor(cache.lengths, device=device)[:, None] - first_slot  # [..., B, 1]
            draft = drafter.propose(roots, adapter.max_guess_offset(max(cache.lengths) + lead))
            tree = rules.without_finished(draft.tree, draft.max_depth)
            layout = block_layout(*draft.window_shape, adapter.padded_nodes(tree.num_nodes), device)
            offsets = layout.position_offsets(tree)
            block = Block(
                tokens=layout.tokens(roots, tree, draft.window_cells),
                offsets=offsets,
                positions=starts + offsets,
                visible=layout.visibility(tree),
                logit_rows=layout.logit_rows,
                lengths=cache.lengths,
                key_mask=key_mask,
            )
            outputs = adapter.forward_block(block, cache, **recorder.model_arguments)
            stats.steps += 1
            stats.block_tokens.append(layout.num_tokens)

            if all(rules.is_finished):  # only other processes still decode; this one keeps them company
                accepted = [None] * batch_size
                continue
            recorder.begin_step(outputs, cache.lengths[0])
            accepted = rules.verify(tree, outputs.logits[:, : 1 + tree.num_nodes])
            cache.commit([None if path is None else [node + 1 for node in path] for path in accepted])
            stats.accepted_lengths.update(len(path) for path in accepted if path is not None)
            guesses = None
            if draft.has_window:
                guesses = best_tokens(outputs.logits[:, 1 + layout.num_nodes :, :num_tokens]).to(device)  # [B, W]
            if stats.on_step is not None:
                stats.on_step(roots, draft, tree, layout, accepted, guesses, rules.texts)

    if streamer is not None:
        streamer.end()
    stats.generated_tokens = rules.num_generated
    if callers_cache is not None:
        cache.hand_over(callers_cache)
    return recorder.result(rules.texts.padded(rules.pad_token), callers_cache)


def num_committed(accepted: Accepted) -> list[int]:
    """Tokens committed to each row: the accepted guesses and the one chosen after them."""
    return [0 if path is None else len(path) + 1 for path in accepted]


def decode_mode(model: Any) -> Any:
    """transformers' own switches for decoding, which change the numerics of mixture-of-experts layers."""
    enter = getattr(model, "_optimize_model_for_decode", None)
    return enter() if enter else nullcontext()
