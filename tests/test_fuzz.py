"""Random combinations of generate()'s arguments against plain generate(): tokens, stream and generator state.

LADE_FUZZ_EXAMPLES sets how many combinations are tried; the normal run takes a fixed, small number of them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import TOKENIZER, VOCAB, Recorder, generate_plain, tiny_llama
from transformers import DynamicCache

import lade

EXAMPLES = int(os.environ.get("LADE_FUZZ_EXAMPLES", "60"))


@pytest.fixture(scope="module")
def models():
    found = {"sdpa": tiny_llama(num_hidden_layers=1), "eager": tiny_llama(torch.float32, "eager", num_hidden_layers=1)}
    for model in found.values():
        model.generation_config.pad_token_id = 0
    return found


def maybe(strategy):
    return st.one_of(st.none(), strategy)


ARGUMENTS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 36),
        "do_sample": st.booleans(),
        "temperature": maybe(st.sampled_from([0.1, 0.7, 1.5])),
        "top_k": maybe(st.integers(1, 30)),
        "top_p": maybe(st.sampled_from([0.3, 0.9])),
        "min_p": maybe(st.sampled_from([0.02, 0.3])),
        "repetition_penalty": maybe(st.sampled_from([0.9, 1.2])),
        "no_repeat_ngram_size": maybe(st.integers(2, 4)),
        "eos_token_id": maybe(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=8, unique=True)),
        "min_new_tokens": maybe(st.integers(1, 12)),
        "bad_words_ids": maybe(st.just([[5], [6, 7]])),
        "num_return_sequences": st.sampled_from([1, 1, 2]),
        "prefill_chunk_size": maybe(st.integers(2, 9)),
        "cache_implementation": st.sampled_from([None, "dynamic"]),
        "output_scores": st.booleans(),
        "output_logits": st.booleans(),
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "MODE": st.just("lookahead"),
        "LEVEL": st.integers(2, 6),
        "WINDOW_SIZE": st.integers(1, 6),
        "GUESS_SET_SIZE": st.sampled_from([0, 1, 3, 7, -1]),
        "ADAPTIVE": st.booleans(),
    }
) | st.fixed_dictionaries(
    {
        "MODE": st.just("tree"),
        "MAX_BLOCK": st.sampled_from([2, 5, 16, 64]),
        "ADAPTIVE": st.booleans(),
        "SHARE": st.booleans(),
    }
)


# What is around the arguments. Each row gets its own pads or holes.
CALLS = st.builds(
    SimpleNamespace,
    mask=st.sampled_from(["left", "left", "none", "right", "holes"]),
    turns=st.sampled_from([1, 1, 1, 1, 2, 3]),
    cache=st.sampled_from([None, None, "returned", "dynamic"]),
    stops=st.sampled_from([False, False, True]),
    poisons=st.booleans(),
    hook=st.sampled_from([None, None, None, None, "forward", "pre"]),
    trains=st.sampled_from([False, False, False, False, False, True]),
    attention=st.sampled_from(["sdpa", "eager"]),
    batch_size=st.sampled_from([1, 1, 2, 4]),
    length=st.integers(1, 30),
    alphabet=st.integers(4, VOCAB),
    streams=st.booleans(),
    returns_dict=st.booleans(),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 60, print_blob=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(arguments=ARGUMENTS, setting=SETTINGS, call=CALLS)
def test_random_combinations(models, lade_on, arguments, setting, call):
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if not arguments["do_sample"]:
        arguments["num_return_sequences"] = 1
    if call.cache is not None:  # one that is known row by row
        arguments |= {"num_return_sequences": 1, "cache_implementation": None}
    if call.stops:
        arguments |= {"stop_strings": ["q", "Zk", "4"], "tokenizer": TOKENIZER}
    arguments["return_dict_in_generate"] = returns_dict = call.returns_dict or call.cache == "returned"
    # Few distinct tokens make prompts that repeat, and guesses that hit.
    generator, shape = torch.Generator().manual_seed(call.seed), (call.batch_size, call.length)
    texts = [torch.randint(3, call.alphabet, shape, generator=generator) for _ in range(call.turns)]
    mask = masked(torch.ones_like(texts[0]), call.mask, generator)
    texts[0] = texts[0].where(mask == 1, 0)
    lade.config_lade(**setting)

    model = models[call.attention]
    plain = partial(generate_plain, model, {})
    with around(model, call):
        seen, results = converse(plain, model, texts, mask, arguments, call)
        with poisoned(model, unused_tokens(results, returns_dict, texts) if call.poisons else []):
            found, others = converse(model.generate, model, texts, mask, arguments, call)
    assert found == seen
    if results and lade.last_stats().fallback_reason is not None:
        assert call.hook or call.trains or "not empty" in lade.last_stats().fallback_reason
    if returns_dict:
        for ahead, expected in zip(others, results, strict=True):
            assert_outputs_close(ahead, expected, with_padding=call.mask != "right")


def masked(mask, kind, generator):
    """Ones and zeros, each row with at least one token. mask: all ones, [B, T]."""
    mask, length = mask.clone(), mask.shape[1]
    for row in mask:
        size = int(torch.randint(0, length, (), generator=generator))
        if kind == "left":
            row[:size] = 0
        elif kind == "right":
            row[length - size :] = 0
        elif kind == "holes":
            row[torch.randperm(length, generator=generator)[: size // 2]] = 0
    return mask


def converse(generate, model, texts, mask, arguments, call):
    """Several turns, each with the whole text so far: what can be seen of them, and what they returned. texts: [B, T]
    of each turn."""
    seen, results, ids = [], [], texts[0][:, :0]
    past = DynamicCache(config=model.config) if call.cache == "dynamic" else None
    torch.manual_seed(call.seed)
    for text in texts:
        ids = torch.cat([ids, text.repeat_interleave(len(ids) // len(text) or 1, dim=0)], dim=1)
        known = mask.repeat_interleave(len(ids) // len(mask), dim=0)
        known = torch.nn.functional.pad(known, (0, ids.shape[1] - known.shape[1]), value=1)
        inputs = {"input_ids": ids, "attention_mask": known}
        if past is not None:
            inputs["past_key_values"] = past
        streamer = Recorder() if call.streams else None
        try:
            result = generate(**inputs, **arguments, streamer=streamer)
        except (ValueError, TypeError) as error:  # what plain refuses, lade must refuse alike
            return [*seen, (type(error), str(error))], results
        ids = result.sequences if arguments["return_dict_in_generate"] else result
        arguments = arguments | {"num_return_sequences": 1}
        past = result.past_key_values if call.cache == "returned" else past
        seen.append((ids.tolist(), torch.get_rng_state().tolist(), streamer.calls if streamer else None))
        results.append(result)
    return seen, results


@contextmanager
def around(model, call):
    """A hook that changes nothing, and dropout in one layer's attention."""
    attention, hook = model.model.layers[0].self_attn, None
    if call.hook == "forward":
        hook = attention.register_forward_hook(lambda *_: None)
    elif call.hook == "pre":
        hook = attention.register_forward_pre_hook(lambda *_: None)
    attention.training = call.trains
    attention.attention_dropout = 0.1 if call.trains else 0.0
    try:
        yield
    finally:
        attention.training, attention.attention_dropout = False, 0.0
        if hook is not None:
            hook.remove()


@contextmanager
def poisoned(model, tokens):
    """Embeddings that are not numbers, of tokens that plain generate() never meets."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        before = weight[tokens].clone()
        weight[tokens] = torch.nan
        try:
            yield
        finally:
            weight[tokens] = before


def unused_tokens(results, returns_dict, texts):
    last = [result.sequences if returns_dict else result for result in results[-1:]]
    used = {token for ids in [*texts, *last] for token in ids.flatten().tolist()}
    return sorted(set(range(VOCAB)) - used - {0})


def assert_outputs_close(ahead, plain, with_padding):
    """with_padding: compare the caches, too."""
    assert ahead.keys() == plain.keys()
    for name in ("scores", "logits"):
        if name in plain:
            torch.testing.assert_close(ahead[name], plain[name], rtol=1e-4, atol=1e-5)
    length = int(plain.past_key_values.get_seq_length())
    assert int(ahead.past_key_values.get_seq_length()) == length
    if not with_padding:
        return
    for layer, expected in zip(ahead.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :length], expected.keys[:, :, :length], rtol=1e-4, atol=1e-5)
