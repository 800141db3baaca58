"""Calls that some model cannot take: lade gives plain generate()'s result or error, or lets it run and says why."""

import math
import sys
from functools import partial

import pytest
import torch
from support import VOCAB, compare, generate_plain, prompt, seeded
from support.families import WINDOW, before, named
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
)

import lade
from lade.common.compat import CACHE_NAME

pytestmark = pytest.mark.usefixtures("small_block")


def built(name, dtype=torch.float64, **changes):
    return named(name, dtype=dtype, **changes).build()


def outcome(run, *args, **arguments):
    """The output, or the type of what was raised."""
    try:
        return run(*args, **arguments)
    except Exception as error:
        return type(error)


def assert_same(model, inputs, reason, **arguments):
    """Plain generate()'s outcome and generator, and why lookahead did not run (None: it did). Returns the outcome."""
    found = []
    for run in (generate_plain, lambda model, inputs, **arguments: model.generate(**inputs, **arguments)):
        ids = inputs["input_ids"].clone()  # which a processor may write to
        outcome_of_run, states = seeded(outcome, run, model, inputs | {"input_ids": ids}, **arguments)
        found.append((outcome_of_run, [*states, ids]))
    (expected, expected_tensors), (result, tensors) = found
    assert result is expected if isinstance(expected, type) else torch.equal(result, expected)
    assert all(map(torch.equal, tensors, expected_tensors))
    stats = lade.last_stats()
    assert stats.fallback_reason is None if reason is None else reason in stats.fallback_reason
    if reason is None and not isinstance(expected, type):
        assert max(stats.block_tokens) > 1
    return expected


def end_of(model, inputs):
    """An id that the first row of a batch ends with, some tokens before another row does."""
    text = generate_plain(model, inputs, max_new_tokens=16)[:, inputs["input_ids"].shape[1] :].tolist()
    first = {token: max([*row, token].index(token) for row in text) for token in text[0]}
    return next(token for token in text[0] if text[0].index(token) + 4 < first[token])


@pytest.mark.parametrize("pad", [-1, VOCAB, 1000])
def test_a_pad_id_that_is_no_token(model, pad):
    batch = prompt(20, 3)
    ends = {"eos_token_id": end_of(model, batch), "pad_token_id": pad, "max_new_tokens": 16}
    assert assert_same(model, batch, "is not a token of the model", **ends) is IndexError
    model.generation_config.pad_token_id = None  # then rows are padded with the first end
    ends_first = {"eos_token_id": [pad, ends["eos_token_id"]], "max_new_tokens": 16}
    assert assert_same(model, batch, "is not a token of the model", **ends_first) is IndexError
    last = {name: tensor[2:] for name, tensor in batch.items()}
    assert_same(model, last, None, **ends)  # nothing is padded
    assert_same(model, batch, None, pad_token_id=pad, max_new_tokens=16)
    assert_same(model, batch, None, **ends | {"pad_token_id": VOCAB - 1})


@pytest.mark.parametrize("name", ["bloom", "llama4_text"])
def test_a_callers_cache_of_a_model_without_a_state(name):
    """It has no layers at first, and keeps whole texts; the second turn goes on where the first one ended."""
    model, inputs = built(name, torch.float32), prompt(24)
    texts = []
    for run in (partial(generate_plain, model), lambda inputs, **arguments: model.generate(**inputs, **arguments)):
        cache = DynamicCache()
        first = run(inputs, past_key_values=cache, max_new_tokens=16)
        more = torch.cat([first, prompt(8, seed=1)["input_ids"]], dim=1)
        more = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        texts.append(run(more, past_key_values=cache, max_new_tokens=16))
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert max(stats.block_tokens) > 1
    assert torch.equal(*texts)


@pytest.mark.parametrize(("name", "size"), [("mpt", "max_seq_len"), ("gpt_neo", "max_position_embeddings")])
def test_texts_longer_than_the_code_has_room_for(name, size):
    model = built(name, torch.float32, **{size: 40 + (more := lade.current_config().max_block_tokens)})
    padded = prompt(24, 2)
    padded["attention_mask"][:, :10] = 0  # positions stay below the table's end, slots do not
    for inputs in (prompt(24), prompt(24, 2), padded):
        assert_same(model, inputs, None, max_new_tokens=17)
        assert_same(model, inputs, "no room", max_new_tokens=18)
        assert isinstance(assert_same(model, inputs, "no room", max_new_tokens=18 + more), type)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt"])
def test_batches_up_to_the_last_position(name):
    """A row that has ended stays where it is, while the others go on: its next position would be behind the last."""
    sizes = dict.fromkeys(["max_position_embeddings"] if name == "opt" else ["n_positions"], 40)
    model = built(name, torch.float32, **sizes)
    padded = prompt(24, 3)
    padded["attention_mask"][:, :10] = 0
    assert_same(model, padded, None, max_new_tokens=27)
    assert assert_same(model, padded, "positions", max_new_tokens=28) is not None
    ragged = prompt(24, 3)
    ragged["attention_mask"][1:, :10] = 0
    ends = {"eos_token_id": end_of(model, ragged), "pad_token_id": 0}
    assert_same(model, ragged, None, max_new_tokens=17, **ends)
    # Plain generate() raises when the longest row's positions end, though that row has ended before.
    assert_same(model, ragged, "positions", max_new_tokens=26, **ends)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_static_cache(model, batch_size):
    """It is plain generate()'s, which may compile for it, and is used and left as plain generate() does."""
    inputs = prompt(24, batch_size)
    assert_same(model, inputs, "cache_implementation='static'", cache_implementation="static", max_new_tokens=12)
    caches = [StaticCache(config=model.config, max_cache_len=35) for _ in range(2)]
    compare(model, inputs, "StaticCache", cache=iter(caches).__next__, max_new_tokens=12)
    assert [int(cache.get_seq_length()) for cache in caches] == [35, 35]


def test_embeddings_in_chunks():
    """generate() puts all embeddings into each chunk's forward, with a part of the mask."""
    model = built("mpt", torch.float32)
    inputs = prompt(24)
    inputs["attention_mask"][0, -5:] = 0
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()
    assert_same(model, inputs, "prefill_chunk_size", max_new_tokens=12, prefill_chunk_size=5)
    assert_same(model, inputs, None, max_new_tokens=12)


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-window"])
def test_padding_that_a_window_forgets(name):
    inputs = prompt(24, 2)
    inputs["attention_mask"][0, : WINDOW + 3] = 0
    eager = built(name, attention="eager")
    assert eager(**inputs).logits.isnan().any()
    assert_same(eager, inputs, "makes padding NaN", max_new_tokens=14)
    assert_same(eager, prompt(24, 2), None, max_new_tokens=14)
    assert_same(eager.float(), inputs, None, max_new_tokens=14)
    assert_same(built(name), inputs, None, max_new_tokens=14)


def test_masks_and_positions_that_are_no_counts(model):
    """Bloom adds up the mask, and positions in between come after those of plain generate()."""
    twos = prompt(24) | {"attention_mask": 2 * torch.ones(1, 24, dtype=torch.long)}
    assert_same(built("bloom"), twos, "other numbers than 0 and 1", max_new_tokens=12)
    halves = prompt(24) | {"position_ids": torch.arange(24)[None] / 2}
    assert_same(model, halves, "no integers", max_new_tokens=12)
    others = prompt(24) | {"position_ids": 2 * torch.arange(24)[None]}
    assert_same(built("whisper"), others, "does not name them", max_new_tokens=12)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("gpt2", 1), ("gpt2", 3), ("gptj", 3), ("codegen", 1), ("gpt_bigcode", 3)],
)
def test_token_types(name, batch_size):
    """Plain generate() goes on with the last type of each prompt."""
    model, inputs = built(name, torch.float32), prompt(24, batch_size)
    types = torch.randint(VOCAB, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    without = assert_same(model, inputs, None, max_new_tokens=20)
    text = assert_same(model, inputs | {"token_type_ids": types}, None, max_new_tokens=20)
    assert not torch.equal(text, without)
    assert_same(model, inputs | {"token_type_ids": types}, None, max_new_tokens=12, prefill_chunk_size=7)
    # The types of the prompt alone are not enough.
    types[:, -1] = (types[:, -1] + 1) % VOCAB
    assert not torch.equal(assert_same(model, inputs | {"token_type_ids": types}, None, max_new_tokens=20), text)


def test_compiled_blocks_leave_token_types_to_the_ordinary_forward():
    lade.config_lade(COMPILE=1)
    model, types = built("gpt2"), {"token_type_ids": torch.full((1, 24), 7)}
    assert_same(model, prompt() | types, None, max_new_tokens=20)
    assert "token_type_ids" in lade.last_stats().reasons.get("compile")
    assert lade.last_stats().compiled_steps == 0


def test_a_batch_under_autocast():
    """Rotary embeddings make keys float32, and values stay bfloat16."""
    model = built("llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = (model.generate(**prompt(20, 3), max_new_tokens=24) for _ in range(2))
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.accepted_lengths.keys() > {0}
    assert torch.equal(one, other)


def test_an_unknown_family_is_tried_out_with_a_mask_too():
    """Git counts on an image in front of the text, and shifts every mask by its length."""
    model = built("git")
    for _ in range(2):
        inputs = prompt(24)
        assert_same(model, inputs, None, max_new_tokens=12)
        inputs["attention_mask"][0, 5:9] = 0
        assert_same(model, inputs, "prompt with padding", max_new_tokens=12)


def test_an_unknown_family_with_a_good_mask_is_served():
    model = built("bert")
    inputs = prompt(24, 2)
    inputs["attention_mask"][0, 5:9] = 0
    assert_same(model, inputs, None, max_new_tokens=12)
    types = {"token_type_ids": torch.ones_like(inputs["input_ids"])}
    assert_same(model, inputs | types, "token_type_ids", max_new_tokens=12)


def test_an_encoder_as_a_language_model_keeps_no_cache():
    model = built("bert", is_decoder=False)
    assert assert_same(model, prompt(24), "returns no cache", max_new_tokens=12).shape == (1, 36)


@pytest.mark.parametrize("name", ["lfm2", "gemma2"])
def test_returned_caches_of_windows_and_convolutions(name):
    """A convolution's state and a window's keys."""
    if name == "lfm2" and before("5.18"):
        pytest.skip("its forward of several tokens may begin anew")
    model = built(name, torch.float32)
    arguments = {"max_new_tokens": 12, "return_dict_in_generate": True}
    expected = generate_plain(model, prompt(), **arguments)
    found = model.generate(**prompt(), **arguments)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert max(stats.block_tokens) > 1
    assert torch.equal(found.sequences, expected.sequences)
    for ours, plain in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        kept = (ours.keys, plain.keys) if hasattr(plain, "keys") else (ours.conv_states[0], plain.conv_states[0])
        torch.testing.assert_close(*kept, atol=1e-4, rtol=0)


def test_a_cache_without_layers_is_refused_where_the_model_needs_some():
    inputs = prompt() | {"past_key_values": DynamicCache()}
    assert assert_same(built("lfm2"), inputs, "has other layers", max_new_tokens=12) is IndexError


def test_a_model_whose_configuration_keeps_no_cache():
    """As MptConfig says by default."""
    model = built("mpt", torch.float32, use_cache=False)
    assert_same(model, prompt(), "use_cache=False", max_new_tokens=8)
    assert_same(model, prompt(), None, max_new_tokens=12, use_cache=True)


def test_a_length_that_only_a_criterion_tells(model, monkeypatch, caplog):
    """By those who call the loop themselves; generate() always sets max_length."""
    inputs, config = prompt(12), GenerationConfig()
    config._pad_token_tensor = None
    found = []
    for switch in ("0", "1"):
        monkeypatch.setenv("USE_LADE", switch)
        cache, positions = DynamicCache(config=model.config), torch.arange(12)[None]
        arguments = inputs | {CACHE_NAME: cache, "use_cache": True, "position_ids": positions}
        arguments |= {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(20)])}
        arguments |= {"logits_processor": LogitsProcessorList(), "generation_config": config}
        with torch.no_grad():
            found.append(model._sample(**arguments))
    assert torch.equal(*found)
    assert "name no max_length" in caplog.text


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("width", [VOCAB - 6, VOCAB + 4])
def test_scores_of_another_width(model, width, batch_size):
    """A processor that cuts a padded vocabulary. The numbers drawn per token are as many as there are scores."""

    def resize(_, scores):
        return torch.nn.functional.pad(scores, (0, width - scores.shape[1]), value=-torch.inf)

    lade.config_lade(MODE="tree")
    sampled = {"do_sample": True, "temperature": 0.1, "max_new_tokens": 40}
    found = assert_same(model, prompt(16, batch_size), None, logits_processor=[resize], **sampled)
    assert lade.last_stats().tokens_per_step > 1 or batch_size > 1  # such rows go on at one length
    assert not torch.equal(found, assert_same(model, prompt(16, batch_size), None, **sampled))  # the control


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2, 2]], ids=str)
def test_scores_of_other_rows(model, rows, do_sample):
    """Plain generate() raises when it appends their tokens."""
    wrong = {"logits_processor": [lambda _, scores: scores[rows]], "do_sample": do_sample, "max_new_tokens": 8}
    for run in (generate_plain, lambda model, inputs, **arguments: model.generate(**inputs, **arguments)):
        assert outcome(run, model, prompt(16, 3), **wrong) is RuntimeError


@pytest.mark.parametrize("kept", [0, 3, torch.tensor([0, -1])], ids=str)
def test_logits_that_the_user_keeps(model, kept):
    """Of the prompt more than the last one, or any."""
    assert_same(model, prompt(16), None, logits_to_keep=kept, max_new_tokens=20)


def test_the_prompts_own_dtype(model):
    seen = []
    inputs = prompt(12)
    inputs["input_ids"] = inputs["input_ids"].to(torch.int32)
    remember = [lambda ids, scores: (seen.append((ids.dtype, ids.shape)), scores)[1]]
    assert_same(model, inputs, None, logits_processor=remember, max_new_tokens=8)
    assert seen[:8] == seen[8:]
    assert [dtype for dtype, _ in seen[:3]] == [torch.int32, torch.int64, torch.int64]


@pytest.mark.parametrize(("place", "is_inference"), [(-1, False), (-1, True), (-2, False), (3, False)])
@pytest.mark.parametrize("writer", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_that_is_written_to(model, batch_size, writer, place, is_inference):
    """Plain generate() goes on with the changed text. The last token, if a criterion wrote it, goes to the model."""

    def write(ids, scores):
        if ids.shape[1] % 4 == 2:
            ids[:, place] = ids.shape[1] % VOCAB
        return scores if writer == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool)

    with torch.inference_mode(is_inference):
        assert_same(model, prompt(14, batch_size), None, max_new_tokens=20, **{writer: [write]})


ANSWERS = {
    "column": lambda ids: (ids.sum(1) % 7 == 0)[:, None],
    "bits": lambda ids: torch.where(ids.sum(1) % 7 == 0, 3, 2),
    "negative": lambda ids: -(ids.sum(1) % 7 == 0).long() - 2,
    "number": lambda ids: ids.shape[1] > 28,
}


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": VOCAB - 1, "pad_token_id": 0}], ids=["as-long", "padded"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_of_a_criterion(model, answer, batch_size, ends):
    """In any shape, and integers, whose lowest bit counts. What cannot be padded raises."""
    criterion = [lambda ids, scores: ANSWERS[answer](ids)]
    text = assert_same(model, prompt(16, batch_size), None, stopping_criteria=criterion, max_new_tokens=24, **ends)
    is_wrong = answer == "column" and ends
    assert text is RuntimeError if is_wrong else text.shape[1] > 18


@pytest.mark.parametrize("setting", ["max_length", "max_new_tokens", "stopping_criteria"])
def test_a_length_that_is_no_integer(model, setting):
    for longest, num_new in ((31.0, 19), (30.5, 19), (torch.tensor(31), 19)):
        given = longest - 12 if setting == "max_new_tokens" else longest
        given = [MaxLengthCriteria(longest)] if setting == "stopping_criteria" else given
        assert assert_same(model, prompt(12, 2), None, **{setting: given}).shape[1] == 12 + num_new


@pytest.mark.parametrize("longest", [10**10, sys.maxsize, math.inf])
@pytest.mark.parametrize("setting", ["max_length", "max_new_tokens"])
def test_a_length_without_an_end(model, setting, longest):
    """Memory is allocated by use."""
    end = end_of(model, prompt(20, 3))
    assert_same(model, prompt(20, 3), None, eos_token_id=[end, *range(3, 20)], pad_token_id=0, **{setting: longest})


def test_no_token_to_pad_with(model):
    """Plain generate() raises at the first token where a criterion says which token ends a text."""
    model.generation_config.pad_token_id = None
    for batch_size in (1, 2):
        ends = {"stopping_criteria": [EosTokenCriteria(5)], "max_new_tokens": 8}
        assert assert_same(model, prompt(12, batch_size), "no token to pad with", **ends) is TypeError
