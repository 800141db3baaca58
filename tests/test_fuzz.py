"""Random combinations of generate()'s arguments against plain generate(): tokens, stream and generator state.

LADE_FUZZ_EXAMPLES sets how many combinations are tried; the normal run takes a fixed, small number of them.
"""

from __future__ import annotations

import os

import pytest
import torch
from conftest import VOCAB, Recorder, generate_plain, tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        "cache_implementation": st.sampled_from([None, "dynamic", "static"]),
        "output_scores": st.booleans(),
        "output_logits": st.booleans(),
        "output_hidden_states": st.booleans(),
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "LEVEL": st.integers(2, 6),
        "WINDOW_SIZE": st.integers(1, 6),
        "GUESS_SET_SIZE": st.sampled_from([0, 1, 3, 7, -1]),
        "ALWAYS_FWD_ONE": st.booleans(),
        "POOL_FROM_PROMPT": st.booleans(),
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


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 60, print_blob=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    arguments=ARGUMENTS,
    setting=SETTINGS,
    attention=st.sampled_from(["sdpa", "eager"]),
    batch_size=st.sampled_from([1, 1, 2, 4]),
    length=st.integers(1, 30),
    alphabet=st.integers(4, VOCAB),
    streams=st.booleans(),
    returns_dict=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_combinations(
    models, lade_on, arguments, setting, attention, batch_size, length, alphabet, streams, returns_dict, seed
):
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if not arguments["do_sample"]:
        arguments["num_return_sequences"] = 1
    arguments["return_dict_in_generate"] = returns_dict
    # Few distinct tokens make prompts that repeat, and guesses that hit.
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, alphabet, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch_size):
        pads = int(torch.randint(0, length, (), generator=generator))
        ids[row, :pads], mask[row, :pads] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    lade.config_lade(**setting)

    seen, results = [], []
    for on in (False, True):
        streamer = Recorder() if streams else None
        call = models[attention].generate if on else lambda **kw: generate_plain(models[attention], {}, **kw)
        torch.manual_seed(seed)
        try:
            result = call(**inputs, **arguments, streamer=streamer)
        except (ValueError, TypeError) as error:  # what plain refuses, lade must refuse alike
            result = None
            seen.append((type(error), str(error)))
        else:
            sequences = result.sequences if returns_dict else result
            seen.append((sequences.tolist(), torch.get_rng_state().tolist(), streamer.calls if streamer else None))
        results.append(result)
        if on and result is not None:
            assert lade.last_stats().fallback_reason is None
    assert seen[0] == seen[1]
    if returns_dict and results[0] is not None:
        assert_outputs_close(results[1], results[0], arguments.get("cache_implementation") != "static")


def assert_outputs_close(ahead, plain, with_padding):
    """with_padding: compare what padding positions hold too; with a static cache they average over its empty slots."""
    assert ahead.keys() == plain.keys()
    for name in ("scores", "logits", "hidden_states") if with_padding else ("scores", "logits"):
        if name in plain:
            torch.testing.assert_close(ahead[name], plain[name], rtol=1e-4, atol=1e-5)
    length = int(plain.past_key_values.get_seq_length())
    assert int(ahead.past_key_values.get_seq_length()) == length
    if not with_padding:
        return
    for layer, expected in zip(ahead.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :length], expected.keys[:, :, :length], rtol=1e-4, atol=1e-5)
