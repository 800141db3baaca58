"""generate()'s whole contract: a table of cases, each with lade off and on, everything observable compared."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from support import (
    TOKENIZER,
    VOCAB,
    CountingBias,
    Recorder,
    compare,
    generate_plain,
    in_threads,
    note_calls,
    prompt,
    seeded,
    tiny_llama,
)
from support.families import LONGROPE, rope
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria

import lade
from lade import ModelAdapter
from lade.block.token_tree import TokenTree
from lade.common.compat import CACHE_NAME, CACHE_NAMES
from lade.verification import selection as rules


def dice(input_ids, scores):
    """Draws from torch's generator itself, and now and then seeds it."""
    if input_ids.shape[1] % 5 == 0:
        torch.manual_seed(input_ids.shape[1])
    return scores + torch.rand(scores.shape)


def double(input_ids, scores):
    """Has scores sampled from in another precision."""
    return scores.double() if input_ids.shape[1] % 3 else scores


class EvenRows(StoppingCriteria):
    """Ends each row by itself, at its second token that is a multiple of 9."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return ((input_ids[:, 24:] % 9) == 0).sum(dim=1) >= 2


def padded(batch_size: int, length: int = 24) -> dict[str, torch.Tensor]:
    """Row i has i pads on its left, at most half of it."""
    inputs = prompt(length, batch_size, seed=batch_size)
    for row in range(batch_size):
        pads = min(row, length // 2)
        inputs["input_ids"][row, :pads] = 0
        inputs["attention_mask"][row, :pads] = 0
    return inputs


ENDS = [4, 9, 17, 23, 31, 44, 50]  # tokens that the model does produce
STOPS = {"max_new_tokens": 60, "stop_strings": ["q", "Zk", "4"], "tokenizer": TOKENIZER}
LENGTHS = {
    "max_new_tokens": {"max_new_tokens": 33},
    "one_token": {"max_new_tokens": 1},
    "min_new_tokens": {"max_new_tokens": 30, "min_new_tokens": 20, "eos_token_id": ENDS},
    "min_length": {"max_new_tokens": 30, "min_length": 40, "eos_token_id": ENDS},
    "eos_list": {"max_new_tokens": 60, "eos_token_id": ENDS},
    "stop_strings": STOPS,
    "max_time": {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(999.0)])},
    "time_is_up": {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e-9)])},
    # The list's own `max_length` is that of the first; a text ends at the smallest.
    "lengths": {"stopping_criteria": StoppingCriteriaList(map(MaxLengthCriteria, (40, 30, 50)))},
    "reached": {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(24)])},
    "passed": {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(10)])},
    "own_criterion": {"max_new_tokens": 60, "stopping_criteria": StoppingCriteriaList([EvenRows()])},
}
LENGTHS["own_criterion_and_eos"] = LENGTHS["own_criterion"] | {"eos_token_id": [VOCAB - 1]}
PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 3},
    "bad_words": {"bad_words_ids": [[4], [9, 17], [23, 31, 44]]},
    "forced_bos": {"forced_bos_token_id": 5},
    "forced_eos": {"forced_eos_token_id": 7},
    "suppress": {"suppress_tokens": [4, 9], "begin_suppress_tokens": [17]},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [t for t in range(3, VOCAB) if (t + batch) % 3]},
    "guidance": {"guidance_scale": 1.4},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=1.0, seeding_scheme="selfhash")},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "stateful": {"logits_processor": LogitsProcessorList([CountingBias()])},
    "dice": {"logits_processor": LogitsProcessorList([dice])},
    "double": {"logits_processor": LogitsProcessorList([double])},
}
SAMPLING = {
    "plain": {},
    "top_p": {"top_p": 0.6},
    "cutoffs": {"min_p": 0.05, "typical_p": 0.7, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "top_h": {"top_h": 0.5},
    "all": {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "eos_token_id": ENDS},
}
CASES = {f"length-{name}": case for name, case in LENGTHS.items()}
CASES |= {f"processor-{name}": {"max_new_tokens": 28} | case for name, case in PROCESSORS.items()}
CASES |= {f"sampling-{name}": {"max_new_tokens": 24, "do_sample": True} | case for name, case in SAMPLING.items()}
CASES |= {f"sampled-processor-{name}": {"max_new_tokens": 20, "do_sample": True, "temperature": 0.4} | PROCESSORS[name]
          for name in ("stateful", "watermark", "dice", "double")}  # fmt: skip
OUTPUTS = ("scores", "logits")


def both(model):
    """generate() without lade and with it."""
    return functools.partial(generate_plain, model, {}), model.generate


def observe(model, inputs, arguments, on, streams=False):
    """Everything that a caller can see of one call."""
    own = {name: copy.deepcopy(arguments.get(name)) for name in ("logits_processor", "stopping_criteria")}
    streamer, given = Recorder() if streams else None, copy.deepcopy(inputs)
    torch.manual_seed(11)
    result = both(model)[on](**inputs, **arguments | own, streamer=streamer)
    assert all(torch.equal(inputs[name], value) for name, value in given.items())
    seen = {"result": result, "generator": torch.get_rng_state(), "stream": streamer.calls if streamer else None}
    for values in own.values():
        for value in values or []:
            seen[type(value).__name__] = getattr(value, "prefixes", None) or getattr(value, "lengths", None)
    return seen


def assert_same(ahead, plain):
    assert ahead.keys() == plain.keys()
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert ahead[name].dtype == value.dtype
            assert torch.equal(ahead[name], value), name
        else:
            assert ahead[name] == value, name


def assert_ran():
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert len(stats.block_tokens) == stats.steps - 1
    return stats


def check(model, inputs, arguments, once=lambda make: make(), streams=False):
    """Lookahead runs, and all that can be seen of the call is plain generate()'s, which is returned."""
    plain = once(lambda: observe(model, inputs, arguments, on=False, streams=streams))
    assert_same(observe(model, inputs, arguments, on=True, streams=streams), plain)
    assert_ran()
    return plain


BY_MODE = {
    "lookahead": {"MODE": "lookahead", "LEVEL": 4, "WINDOW_SIZE": 3, "GUESS_SET_SIZE": 4},
    "tree": {"MODE": "tree", "MAX_BLOCK": 16},
}


@pytest.fixture(autouse=True, params=BY_MODE)
def settings(request, lade_on):
    lade.config_lade(**BY_MODE[request.param])


# Of what does not depend on how guesses are made.
in_one_mode = pytest.mark.parametrize("settings", ["tree"], indirect=True)


KNOWN: dict = {}


@pytest.fixture
def once(request):
    """once(make) is make(), remembered for the test's other mode: plain generate() knows nothing of modes."""
    name = request.node.name.replace(request.node.callspec.id.split("-")[0], "mode", 1)
    return lambda make: KNOWN.get(name) or KNOWN.setdefault(name, make())


@pytest.fixture(scope="module")
def model():
    model = tiny_llama()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("case", CASES)
def test_one_row(model, case, once):
    inputs = prompt(24, seed=3)
    plain = check(model, inputs, CASES[case], once, streams=True)
    # Without a streamer the fastest rules apply; the tokens are the same.
    assert_same(observe(model, inputs, CASES[case], on=True), plain | {"stream": None})
    assert assert_ran().generated_tokens == plain["result"].shape[1] - 24


# Plain generate() has no guidance for padded batches.
@pytest.mark.parametrize("case", [case for case in CASES if "guidance" not in case])
def test_batch(model, case, once):
    check(model, padded(4), CASES[case], once)


@pytest.mark.parametrize("batch_size", [3, 16])
def test_ragged_greedy_batches(model, batch_size, once):
    check(model, padded(batch_size), {"max_new_tokens": 48}, once)
    assert lade.last_stats().tokens_per_step > 1.15
    assert lade.last_stats().steps < 48


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampling", [False, True])
def test_batched_streams_and_sequences(model, batch_size, sampling, once):
    arguments = {"max_new_tokens": 20, "num_return_sequences": 2 if sampling else 1, "do_sample": sampling,
                 "eos_token_id": [4, 9, 17]}  # fmt: skip
    check(model, padded(batch_size), arguments, once, streams=True)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("ends", [None, [4, 9, 17]])
def test_dictionary_outputs(batch_size, ends, once):
    model = tiny_llama(torch.float32, "eager")  # transformers' eager attention yields nan for float64 and padding
    inputs = padded(batch_size)
    arguments = {"max_new_tokens": 30, "eos_token_id": ends, "return_dict_in_generate": True}
    arguments |= {f"output_{name}": True for name in OUTPUTS}
    plain = once(lambda: generate_plain(model, inputs, **arguments))
    ahead = model.generate(**inputs, **arguments)
    stats = assert_ran()
    if ends is None:
        assert stats.steps < 30
    assert type(ahead) is type(plain)
    assert torch.equal(ahead.sequences, plain.sequences)
    for name in OUTPUTS:
        torch.testing.assert_close(ahead[name], plain[name], rtol=1e-5, atol=1e-5)
    assert type(ahead.past_key_values) is type(plain.past_key_values)
    assert_caches_close(ahead.past_key_values, plain.past_key_values)


def assert_caches_close(mine, theirs):
    length = int(theirs.get_seq_length())
    assert int(mine.get_seq_length()) == length
    for layer, expected in zip(mine.layers, theirs.layers, strict=True):
        for states, others in ((layer.keys, expected.keys), (layer.values, expected.values)):
            assert states.shape == others.shape
            torch.testing.assert_close(states[:, :, :length], others[:, :, :length], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("kind", "only_new_ids"), [("dynamic", False), ("dynamic", True), ("empty", False)])
def test_the_callers_own_cache(model, batch_size, only_new_ids, kind):
    """Two turns over one cache; the second turn's ids are the whole text, or just what is new."""
    first, more = padded(batch_size), prompt(7, batch_size, seed=9)
    results, caches = [], []
    for run in both(model):
        cache = DynamicCache(config=model.config)
        text = first["input_ids"]
        if kind != "empty":
            text = run(**first, max_new_tokens=20, past_key_values=cache)
            if run == model.generate:
                assert_ran()
        text = torch.cat([text, more["input_ids"]], dim=1)
        mask = torch.ones_like(text)
        mask[:, :24] = first["attention_mask"]
        ids = text[:, -8:] if only_new_ids else text  # the last token of the first turn is in no cache yet
        results.append(run(input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=25))
        caches.append(cache)
    assert_ran()
    assert torch.equal(results[0], results[1])
    assert_caches_close(caches[1], caches[0])


@in_one_mode
@pytest.mark.parametrize("num_hidden", [0, 5])
def test_a_cache_that_holds_the_whole_prompt(model, num_hidden):
    """Plain generate() runs the prompt again, behind itself, and hides the newest keys by a mask that is too short."""
    inputs = prompt(24)
    inputs["attention_mask"][:, :num_hidden] = 0
    results, caches = [], []
    for run in both(model):
        cache = DynamicCache(config=model.config)
        run(**inputs, max_new_tokens=10, past_key_values=cache)
        results.append(run(**inputs, max_new_tokens=15, past_key_values=cache))
        caches.append(cache)
    assert torch.equal(*results)
    assert_caches_close(*reversed(caches))
    keeps_mask = num_hidden or "_mask_length" not in inspect.getsource(GenerationMixin.generate)
    reason = lade.last_stats().fallback_reason
    assert "shorter than the text" in reason if keeps_mask else reason is None


@in_one_mode
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)], ids=str)
def test_a_cache_in_a_narrower_dtype(dtypes):
    """Its keys become the model's dtype, as torch.cat makes them."""
    wide, narrow = dtypes
    model, results, caches = tiny_llama(wide), [], []
    for run in both(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**prompt(20), **{CACHE_NAME: cache})
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(narrow), layer.values.to(narrow)
        results.append(run(**prompt(26), max_new_tokens=30, past_key_values=cache))
        caches.append(cache)
    assert assert_ran().steps < 30
    assert torch.equal(*results)
    assert {layer.keys.dtype for layer in caches[1].layers} == {wide}
    assert_caches_close(*reversed(caches))


class WritingLater(LogitsProcessor):
    """Keeps the ids of each call, and overwrites them in the next one."""

    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores):
        for ids in self.kept[1:]:  # not the prompt, which is the caller's
            ids.zero_()
        self.kept.append(input_ids)
        return scores


@pytest.mark.parametrize("batch_size", [1, 2])
def test_ids_that_user_code_keeps_are_its_own(model, batch_size):
    results = [
        run(**prompt(24, batch_size), max_new_tokens=30, logits_processor=[WritingLater()]) for run in both(model)
    ]
    assert torch.equal(*results)
    assert_ran()


@in_one_mode
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_reminder_of_a_models_length(batch_size, monkeypatch):
    model, said = tiny_llama(max_position_embeddings=40), []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
    for run in both(model):
        for length in (10, 24):
            said.clear()
            run(**prompt(24, batch_size), max_new_tokens=length)
            assert len(set(said)) == (length == 24)
    assert_ran()
    assert len(said) == 1


@in_one_mode
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_under_either_name(model, name):
    """Transformers 5.24 renames the argument and takes both names."""
    if name not in ("past_key_values", CACHE_NAME):
        pytest.skip(f"this transformers takes no {name}")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    expected = generate_plain(model, prompt(24), max_new_tokens=20, **{name: caches[0]})
    found = model.generate(**prompt(24), max_new_tokens=20, **{name: caches[1]}, return_dict_in_generate=True)
    assert_ran()
    assert torch.equal(found.sequences, expected)
    assert found[CACHE_NAME] is caches[1]
    assert_caches_close(caches[1], caches[0])


def own_positions():
    inputs = padded(3)
    own = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) + torch.tensor([[5], [0], [40]])
    return inputs | {"position_ids": own}


def of_ids(*ids, dtype=torch.long):
    return {"input_ids": torch.tensor([ids], dtype=dtype), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


INPUTS = {
    "positions": (prompt(24) | {"position_ids": torch.arange(24)[None] + 100}, {}),
    "positions of a batch": (own_positions(), {}),
    "one token": (of_ids(5), {}),
    "two tokens": (of_ids(5, 6), {}),
    "equal tokens": (of_ids(*[5] * 40), {}),
    "equal tokens, sampled": (of_ids(*[5] * 40), {"do_sample": True}),
    "int32": (of_ids(*range(5, 29), dtype=torch.int32), {}),
    "in chunks": (padded(2), {"prefill_chunk_size": 5}),
    "dynamic cache": (padded(2), {"cache_implementation": "dynamic"}),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(model, case):
    inputs, arguments = INPUTS[case]
    check(model, inputs, {"max_new_tokens": 40} | arguments)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds(model, batch_size, with_ids):
    inputs = padded(batch_size)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    if not with_ids:
        del inputs["input_ids"]
    check(model, inputs, {"inputs_embeds": embeds, "max_new_tokens": 40})
    assert lade.last_stats().steps < 40


# Frequencies that depend on the length change at 64 tokens.
ROPES = {
    "dynamic": (64, rope("dynamic", factor=4.0)),
    "longrope": (256, LONGROPE | {"original_max_position_embeddings": 64}),
}


def rope_model(kind: str):
    """Larger weights than usual, so that other frequencies lead to other tokens."""
    positions, parameters = ROPES[kind]
    return tiny_llama(max_position_embeddings=positions, rope_parameters=dict(parameters), initializer_range=0.1)


@functools.cache
def plain_text(kind: str, length: int, batch_size: int):
    return generate_plain(rope_model(kind), padded(batch_size, length), max_new_tokens=45)


def differs(kind: str, length: int, batch_size: int) -> bool:
    """Whether a text is not plain generate()'s. Each call has its own model, as "dynamic" ones remember texts."""
    result = rope_model(kind).generate(**padded(batch_size, length), max_new_tokens=45)
    assert_ran()
    return not torch.equal(result, plain_text(kind, length, batch_size))


@in_one_mode
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    ("batch_size", "lengths", "guard", "off"),
    [
        (1, (30, 62, 63, 64, 90), "max_guess_offset", lambda *_: None),
        (3, (30, 50, 62, 70), "needs_equal_lengths", False),
    ],
    ids=["one-row", "batch"],
)
def test_rope_boundaries(kind, batch_size, lengths, guard, off, monkeypatch):
    """Blocks that pass the boundary would change the text, as would rows apart: the longest sets frequencies."""
    if batch_size == 1:
        lade.config_lade(MODE="lookahead", WINDOW_SIZE=30)  # reaches far beyond the root
    assert not any(differs(kind, length, batch_size) for length in lengths)
    monkeypatch.setattr(ModelAdapter, guard, off)
    assert any(differs(kind, length, batch_size) for length in lengths)


class GuessRecorder(Recorder):
    """Takes tokens that were guessed apart from the others."""

    def __init__(self):
        super().__init__()
        self.guesses = []

    def put_guess(self, value):
        self.guesses.append(len(self.calls))
        self.put(value)


@pytest.mark.parametrize("do_sample", [False, True])
def test_streamers_can_tell_guesses(model, do_sample):
    """Each step commits its accepted guesses and then one token that was not guessed."""
    streamer, plain = GuessRecorder(), GuessRecorder()
    arguments = {"max_new_tokens": 60, "do_sample": do_sample, "top_k": 2}
    seeded(generate_plain, model, prompt(24), **arguments, streamer=plain)
    seeded(model.generate, **prompt(24), **arguments, streamer=streamer)
    stats = assert_ran()
    assert streamer.calls == plain.calls
    assert plain.guesses == []
    # calls[0] is the prompt, calls[1] comes from its forward; the last step may end in a guess.
    steps = [1 + length for length, count in stats.accepted_lengths.items() for _ in range(count)]
    assert 0 <= len(streamer.guesses) - (sum(steps) - len(steps)) <= 1
    assert len(streamer.guesses) > 3
    assert not {0, 1} & set(streamer.guesses)


class Explosive:
    """Raises on its fifth call, or another one, wherever it is put. As a streamer it is called with what is put."""

    def __init__(self, error, fatal=5):
        self.error, self.fatal, self.calls = error, fatal, 0

    def put(self, value=None):
        self.calls += 1
        if self.calls == self.fatal:
            raise self.error
        return value

    def end(self):
        pass


ERROR, INTERRUPT = RuntimeError("boom"), KeyboardInterrupt()


@pytest.mark.parametrize(
    ("where", "error"),
    [("streamer", INTERRUPT), ("stopping_criteria", INTERRUPT), ("logits_processor", ERROR), ("model", ERROR)],
)
def test_exceptions_leave_no_trace(where, error):
    model = tiny_llama()
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=30)
    cache = DynamicCache(config=model.config)
    arguments: dict = {"max_new_tokens": 30, "past_key_values": cache}
    bomb = Explosive(error)
    if where == "streamer":
        arguments[where] = bomb
    elif where == "logits_processor":
        arguments[where] = [lambda ids, scores: bomb.put(scores)]
    elif where == "stopping_criteria":
        arguments[where] = [lambda ids, scores: bomb.put(torch.zeros(len(ids), dtype=torch.bool))]
    else:
        tick = lade.allow_hook(lambda *_: bomb.put() if is_armed else None)
        hook, is_armed = model.model.layers[0].register_forward_hook(tick), False
        model.generate(**inputs, max_new_tokens=30)  # the hook's trial
        is_armed = True
    with pytest.raises(type(error)):
        model.generate(**inputs, **arguments)
    if where == "model":
        hook.remove()
    assert lade.last_stats().fallback_reason is None
    assert cache.get_seq_length() == 0
    assert torch.equal(generate_plain(model, inputs, max_new_tokens=30), expected)
    assert torch.equal(model.generate(**inputs, max_new_tokens=30, past_key_values=cache), expected)
    assert_ran()


def test_the_figures_of_a_call_that_its_streamer_cancels(model):
    """The prompt is the first that it is given, the 40th token the last."""
    with pytest.raises(KeyboardInterrupt):
        model.generate(**prompt(24), max_new_tokens=60, streamer=Explosive(INTERRUPT, fatal=41))
    stats = lade.last_stats()
    assert stats.generated_tokens == 40
    assert stats.steps == 1 + len(stats.block_tokens)
    assert stats.steps < 40
    judged = sum(length * count for length, count in stats.accepted_lengths.items())
    assert 0 < sum(accepted for _, accepted in stats.sources.values()) == judged


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_that_end_without_a_pad_id(batch_size):
    """Plain generate() goes on with such rows until the others end, unpadded."""
    model = tiny_llama(pad_token_id=None)
    model.generation_config.pad_token_id = None
    check(model, prompt(24, batch_size), LENGTHS["own_criterion"])


def test_finished_rows_of_a_lockstep_batch_go_on_with_pad_tokens(model, monkeypatch):
    """These are what plain generate() feeds them, so they are guessed as such and never hold up the other rows."""
    chains = note_calls(monkeypatch, TokenTree, "with_chains", lambda tree, rows, *chain: (tuple(rows), *chain))
    inputs = padded(3)
    full = generate_plain(model, inputs, max_new_tokens=60)
    arguments = {"max_new_tokens": 60, "eos_token_id": [int(full[0, 36])]}
    plain = check(model, inputs, arguments, streams=True)
    assert lade.last_stats().steps < plain["result"].shape[1] - 24
    finished = [chain for chain in chains if chain[0]]
    assert finished
    assert {token for _, token, _ in finished} == {0}
    lengths = {length for _, _, length in finished}
    assert lengths == {3} if lade.current_config().uses_window else min(lengths) > 0


@pytest.fixture
def ways(monkeypatch):
    """The kinds of rules that calls have gone by."""
    chosen = []

    def choose(*arguments, original=rules.selection_for):
        chosen.append(original(*arguments))
        return chosen[-1]

    monkeypatch.setattr("lade.decoding.selection_for", choose)
    return chosen


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.1, "top_k": 9}], ids=["greedy", "sampled"]
)
def test_stop_strings_end_each_row_by_itself(model, ways, sampling, once):
    """The streamer keeps the rows in lockstep, and they need more steps, where most guesses are right."""
    lade.config_lade(SHARE=0)
    inputs, arguments = padded(8), STOPS | sampling | {"eos_token_id": [VOCAB - 1]}
    plain = once(lambda: observe(model, inputs, arguments, on=False))
    assert_same(observe(model, inputs, arguments, on=True), plain)
    steps = assert_ran().steps
    together = observe(model, inputs, arguments, on=True, streams=True)
    assert torch.equal(together["result"], plain["result"])
    assert ways == [rules.PerRowSelection, rules.LockstepSelection]
    assert steps < assert_ran().steps
    ends = [row.tolist().index(0) for row in plain["result"][:, 24:] if 0 in row]
    assert len(set(ends)) > 1  # rows that ended early, each at its own length


class OwnStops(StopStringCriteria):
    """Somebody's own kind may look at the whole batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores).any().expand(len(input_ids))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("is_own_kind", [False, True])
def test_stop_strings_that_do_not_end_rows_by_themselves(model, ways, batch_size, is_own_kind):
    """Nor where nothing pads a row that has ended, so that it goes on with the others."""
    arguments = STOPS
    if is_own_kind:
        criterion = OwnStops(TOKENIZER, STOPS["stop_strings"])
        arguments = {"max_new_tokens": 60, "eos_token_id": [VOCAB - 1]}
        arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
    check(model, padded(batch_size), arguments)
    assert ways == [rules.PerRowSelection if batch_size == 1 and not is_own_kind else rules.LockstepSelection]


@pytest.mark.parametrize("placeholder", [-200, 5000])
def test_placeholder_ids_that_the_mask_hides(placeholder):
    """They stand in the texts, from which n-grams are learned."""
    small = tiny_llama(vocab_size=12)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7], [3, 4, 5, 6, 7, 8, placeholder, placeholder]])
    embeds = small.get_input_embeddings()(ids.clamp(0, 11))
    mask = (ids != placeholder).long()
    compare(small, {}, input_ids=ids, inputs_embeds=embeds, attention_mask=mask, max_new_tokens=60)


@pytest.mark.parametrize(("batch_size", "streams"), [(1, False), (1, True), (3, False)])  # generate() streams one text
def test_impossible_probabilities_raise_what_plain_raises(model, batch_size, streams):
    """And the generator has drawn as often."""
    arguments = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "suppress_tokens": list(range(VOCAB))}
    states = []
    for call in both(model):
        torch.manual_seed(5)
        with pytest.raises(RuntimeError, match="probability tensor"):
            call(**prompt(24, batch_size), **arguments, streamer=Recorder() if streams else None)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_another_default_device(model):
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=30)
    with torch.device("meta"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=30), expected)
    assert_ran()


@in_one_mode
def test_fewer_layers_than_configured():
    model = tiny_llama(num_hidden_layers=3)
    model.model.layers = model.model.layers[:2]
    cache = DynamicCache()
    expected = generate_plain(model, prompt(24), max_new_tokens=30)
    assert torch.equal(model.generate(**prompt(24), max_new_tokens=30, past_key_values=cache), expected)
    assert_ran()
    assert cache.get_seq_length() == 24 + 30 - 1


@in_one_mode
@pytest.mark.parametrize(
    ("error", "limit"),
    [(torch.OutOfMemoryError("no"), 16), (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 100)],
)
def test_out_of_memory_says_what_was_asked_for(model, monkeypatch, error, limit):
    """At the first allocation (16 slots are allowed), and while growing (100)."""
    monkeypatch.setattr("lade.decoding.FIRST_CAPACITY", 0)
    monkeypatch.setattr("lade.block.kv_cache.MIN_CAPACITY", 16)
    new_zeros = torch.Tensor.new_zeros

    def allocate(self, shape):
        if shape[3] > limit:
            raise error
        return new_zeros(self, shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", allocate)
    with pytest.raises(torch.OutOfMemoryError, match=r"cache of \d+ tokens, \d+ MiB.*max_new_tokens"):
        model.generate(**prompt(24), max_new_tokens=100)


class OwnPositions(LlamaForCausalLM):
    """Changes what every forward gets, which lade's blocks do not go through."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] * 2
        return inputs


class NoRows(LlamaForCausalLM):
    """Gives the logits of every token."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kw):
        kw.pop("logits_to_keep", None)
        cache = past_key_values if cache is None else cache
        return super().forward(input_ids, attention_mask, position_ids, cache, use_cache=kw.get("use_cache"))


T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}


@in_one_mode
@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (T5ForConditionalGeneration, T5Config(vocab_size=VOCAB, **T5_SIZES), "encoder-decoder"),
        (OwnPositions, tiny_llama().config, "prepare_inputs_for_generation of its own"),
        (NoRows, tiny_llama().config, None),
    ],
)
def test_models_that_differ(kind, config, reason):
    compare(kind(config).double().eval(), None, reason, max_new_tokens=20, eos_token_id=None)


@in_one_mode
def test_gradients_fall_back(model):
    """Past generate()'s no_grad decorator, where plain generate() records gradients, it still does."""
    undecorated = inspect.unwrap(type(model).generate)
    result = undecorated(model, **prompt(24), max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
    assert result.logits[-1].requires_grad


@in_one_mode
@pytest.mark.parametrize("name", ["attentions", "hidden_states"])
def test_what_single_tokens_show_falls_back(name):
    """Bit for bit: a block would show something else by its rounding, and by its shape."""
    model, arguments = tiny_llama(torch.float32, "eager"), {"return_dict_in_generate": True, f"output_{name}": True}
    plain = generate_plain(model, prompt(24), max_new_tokens=8, **arguments)
    found = model.generate(**prompt(24), max_new_tokens=8, **arguments)
    assert "forwards of single tokens" in lade.last_stats().fallback_reason
    for steps in zip(found[name], plain[name], strict=True):
        assert all(map(torch.equal, *steps))


@in_one_mode
def test_other_caches_fall_back(model):
    def cache():
        made = DynamicCache(config=model.config)
        made.layers[0].__class__ = type("OtherLayer", (type(made.layers[0]),), {})
        return made

    compare(model, reason="OtherLayer does not keep every key", cache=cache, max_new_tokens=12)


@pytest.mark.parametrize("row_wise", [True, False])
def test_rows_far_ahead_wait_for_the_slowest(model, monkeypatch, row_wise):
    """However few tokens one row may be ahead, a sampled batch equals plain generate() and its generator state."""
    monkeypatch.setattr(rules, "MAX_LEAD", 2)
    monkeypatch.setattr(rules, "is_row_wise", lambda processor: row_wise)

    def lead(self, rows, *_):
        running = [n for n, done in zip(self.sequences.lengths, self.is_finished, strict=True) if not done]
        return self.sequences.lengths[rows.start] - min(running)

    leads = note_calls(monkeypatch, rules.PerRowSelection, "_commit", lead)
    check(model, padded(4), {"max_new_tokens": 60, "do_sample": True, "temperature": 0.01})
    # A row that is not far ahead may still accept a whole n-gram of 4, or a tree of 15 guesses in one line.
    assert max(leads, default=0) <= 2 + (4 if lade.current_config().uses_window else 16)


@pytest.mark.parametrize("num_models", [1, 2])
def test_threads(num_models):
    models = [tiny_llama(num_hidden_layers=1 + i) for i in range(num_models)]
    jobs = [(models[i % num_models], prompt(20 + i, seed=i)) for i in range(4)]
    expected = [generate_plain(model, inputs, max_new_tokens=40) for model, inputs in jobs]
    results = in_threads(lambda job: (job[0].generate(**job[1], max_new_tokens=40), lade.last_stats()), *jobs)
    for (result, stats), reference in zip(results, expected, strict=True):
        assert torch.equal(result, reference)
        assert stats.fallback_reason is None
        assert stats.steps < 40


@in_one_mode
def test_compiled_generate(model):
    """Under an outer torch.compile the loop still runs; the compiler steps over it."""
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=6)
    assert torch.equal(torch.compile(model.generate, backend="eager")(**inputs, max_new_tokens=6), expected)
    assert_ran()


@in_one_mode
def test_synced_gpus_keeps_forwarding_until_all_are_done(model, monkeypatch):
    """A process whose text has ended goes on calling the model while others decode, and changes nothing."""
    inputs = prompt(24)
    expected = generate_plain(model, inputs, max_new_tokens=10)
    waits, calls = 3, []
    hook = model.register_forward_hook(lade.allow_hook(lambda *_: calls.append(1)))
    model.generate(**inputs, max_new_tokens=10)  # the hook's trial
    calls.clear()

    def has_unfinished(self, is_finished, synced_gpus, device):
        nonlocal waits
        assert synced_gpus
        waits -= is_finished
        return not is_finished or waits >= 0

    monkeypatch.setattr(type(model), "_has_unfinished_sequences", has_unfinished)
    result = model.generate(**inputs, max_new_tokens=10, synced_gpus=True)
    hook.remove()
    stats = assert_ran()
    assert torch.equal(result, expected)
    assert len(calls) == stats.steps
    assert sum(stats.accepted_lengths.values()) == stats.steps - 1 - 3
