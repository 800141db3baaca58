"""The lookahead loop: propose, lay out, forward, verify, commit, learn. One loop for greedy and sampling. Floor 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lade.attention import Block
from lade.config import LookaheadConfig
from lade.drafters import Outcome, make_drafter
from lade.drafters.base import ROOT_ALONE, Drafter
from lade.kv_cache import slots_of_static
from lade.layout import block_layout
from lade.models.base import ModelAdapter, prompt_key_mask
from lade.models.device_loop import device_loop
from lade.models.forward_choice import choose_forward
from lade.outputs import OutputRecorder
from lade.parallel import Alone
from lade.rules import Rules, rules_for
from lade.stats import GenerationStats
from lade.token_tree import TokenTree

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
    team: Alone,
    **model_kwargs: Any,
) -> Any:
    """What `GenerationMixin._sample` returns for these arguments, in fewer forward passes.

    input_ids: [B, P] prompts; P is 0 when only inputs_embeds are given. callers_cache: the cache that plain generate()
    would leave to its caller, who finds the whole text in it afterwards. team: the processes that share each step.
    Source: arXiv:2402.02057, algorithm 2.
    """
    model = adapter.prompt_model
    recorder = OutputRecorder(generation_config)
    needs_equal_lengths = callers_cache is not None or adapter.needs_equal_lengths
    request = (input_ids, logits_processor, stopping_criteria, generation_config, streamer, recorder)
    rules = team.rules(rules_for(*request, needs_equal_lengths), *request)
    batch_size, device = len(input_ids), input_ids.device
    is_on_host = device.type == "cpu"
    key_mask = prompt_key_mask(model_kwargs.get("attention_mask"))
    positions = model_kwargs.get("position_ids")  # [B or 1, prompt], or more of these; None for a model that takes none
    num_new = max(1, (stopping_criteria.max_length or 0) - input_ids.shape[1])
    adapter.carry(model_kwargs)
    choose_forward(adapter, config, stats, key_mask, num_new, recorder.model_arguments)
    team.num_tokens = adapter.num_tokens
    temperature = (generation_config.temperature or 1.0) if generation_config.do_sample else None
    drafter = make_drafter(
        config,
        adapter.model,
        adapter.num_tokens,
        input_ids,
        key_mask,
        temperature,
        rules.noise,
        adapter.forward_kind,
        is_exact=not config.adaptive or adapter.is_exact,
    )

    num_slots = input_ids.shape[1] + min(num_new, FIRST_CAPACITY) + config.max_block_tokens
    most_slots = slots_of_static(callers_cache)
    is_alone = type(team) is Alone and not synced_gpus and most_slots is None
    on_device = device_loop(adapter, config, rules, drafter, stats, key_mask, positions) if is_alone else None
    if on_device:
        cache = on_device.make_cache(num_slots)
    else:
        cache = adapter.take_cache(num_slots, input_ids.shape[1] + num_new + config.max_block_tokens, batch_size)
    cache.most_slots = most_slots
    cache.adopt(model_kwargs["past_key_values"])
    model_kwargs["past_key_values"] = cache

    # The prompt's own forward is a step with an empty tree.
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    if outputs.past_key_values is not cache:  # the model made one of its own for the prompt
        cache = adapter.make_cache(cache.capacity)
        cache.most_slots = most_slots
        cache.adopt(outputs.past_key_values)
    cache.end_prefill(batch_size)
    # How far positions are ahead of slots, [..., B or 1, 1]; the most of all rows is read once, so that no step has to wait for it.
    ahead = 0 if positions is None else positions[..., -1:] + 1 - cache.lengths[0]
    lead = 0 if positions is None else int(positions[..., -1].max()) + 1 - cache.lengths[0]
    if positions is not None and positions.shape[:-1] == (1,):
        ahead = lead  # the same for all, as a number: that takes less time in each step
    stats.batch_size, stats.steps = batch_size, 1

    # Mixture-of-experts layers compute in another way, with other rounding, while they decode.
    with adapter.block_model._optimize_model_for_decode(), reporting(stats, rules, drafter):
        recorder.begin_step(outputs, None)
        tree, logits = TokenTree.empty(batch_size), outputs.logits[:, -1:]
        answers, _ = team.exchange(team.share(tree, ROOT_ALONE), logits, has_window=False)
        accepted = rules.verify(tree, answers)
        drafter.learn(Outcome(tree, logits, accepted, None, rules.texts))
        outputs = None
        if on_device:  # this loop in another form; what it leaves undone is done below
            on_device.run(cache, logits.shape[-1], answers.witness)
        while model._has_unfinished_sequences(all(rules.is_finished), synced_gpus, device=device):
            began, drawn = perf_counter(), rules.drawing_seconds
            roots = rules.texts.roots()
            allowed = adapter.max_guess_offset(max(cache.lengths) + lead)
            max_offset = 0 if rules.next_is_plain else cache.max_guess_offset(allowed)
            draft = drafter.propose(rules.texts, rules.is_idle, max_offset)
            drafted = perf_counter()
            # Guesses look ahead at the draws of verification, which are made but once.
            drawing = rules.drawing_seconds - drawn
            tree = rules.without_finished(draft.tree, draft.max_depth)
            share = team.share(tree, draft.window_shape)
            num_nodes = adapter.padded_nodes(share.tree.num_nodes)
            layout = block_layout(*draft.window_shape, num_nodes, device, share.columns)
            if min(cache.lengths) == max(cache.lengths):
                starts: int | Tensor = cache.lengths[0]
            else:
                # The last token of a row that has ended is never read, and may lie behind the model's last position.
                counted = [
                    length - has_ended for length, has_ended in zip(cache.lengths, rules.is_finished, strict=True)
                ]
                starts = torch.tensor(counted, device=device)[:, None]  # [B, 1]
            offsets = layout.position_offsets(share.tree)
            block = Block(
                tokens=rules.without_avoided(layout.tokens(roots, share.tree, draft.window_cells)),
                offsets=offsets,
                positions=offsets + (ahead + starts),
                visible=layout.visibility(share.tree),
                logit_rows=layout.logit_rows if draft.has_window else layout.answers,
                lengths=cache.lengths,
                key_mask=key_mask,
            )
            outputs = adapter.forward_block(block, cache, **recorder.model_arguments)
            if not is_on_host:
                wait_for(device)
            forwarded = perf_counter()
            stats.steps += 1
            stats.block_tokens.append(layout.num_tokens)

            if all(rules.is_finished):  # only other processes still decode; this one keeps them company
                continue
            recorder.begin_step(outputs, cache.lengths[0])
            logits = layout.without_padding(outputs.logits, share.tree)
            answers, choices = team.exchange(share, logits, draft.has_window)
            accepted = rules.verify(tree, answers)
            team.commit(cache, share, accepted)
            if rules.next_is_plain:
                team.recover(rules, *cache.clear_guesses(block.tokens, accepted))
            for path in accepted:
                if path is not None:
                    stats.accepted_lengths[len(path)] += 1
            verified = perf_counter()

            drafter.learn(Outcome(tree, logits[:, : 1 + tree.num_nodes], accepted, choices, rules.texts))
            learned = perf_counter()
            # The user's own code runs while tokens are verified: once per token, whatever the block. What prepares later steps does
            # not count either.
            searching = drafted - began - drawing
            seconds = forwarded - drafted - adapter.preparing_seconds + learned - verified
            drafter.spent(max(rules.texts.lengths), layout.num_tokens, seconds, searching)
            stats.add_times(searching + learned - verified, forwarded - drafted, verified - forwarded + drawing)
            if stats.on_step is not None:
                stats.on_step(roots, draft, tree, layout, accepted, choices, rules.texts)

    if streamer is not None:
        streamer.end()
    team.end(rules.do_sample, device)
    drafter.finish()
    if callers_cache is not None:
        cache.hand_over(callers_cache)
    if on_device:
        on_device.give_back()
    adapter.give_back()
    adapter.check_kernel(stats)
    return recorder.result(rules.texts.padded(rules.pad_token), callers_cache)


def wait_for(device: torch.device) -> None:
    """Let a device other than the CPU finish, so that times are those of what ran; verification, which comes next, would wait as well.

    On CUDA for this thread's stream: to wait for all of a device breaks off a graph that another thread is capturing.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        torch.accelerator.synchronize(device)


@contextmanager
def reporting(stats: GenerationStats, rules: Rules, drafter: Drafter) -> Iterator[None]:
    """Let the figures say what was made, also where a streamer, a processor or an interrupt ends the call."""
    try:
        yield
    finally:
        stats.generated_tokens, stats.sources = rules.num_generated, drafter.sources()
