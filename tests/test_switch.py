"""Lookahead switched on in code, for a block or for one call, and the line for somebody who forgot to switch it on."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import Recorder, in_threads, prompt, python, seeded, tiny_llama
from transformers import DynamicCache, GenerationMixin, LogitsProcessorList, StoppingCriteriaList

import lade
from lade import custom_generate, eligibility, switch

SAMPLED = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8}


@pytest.fixture(autouse=True)
def unpatched(monkeypatch):
    """No patch, no variable, and both as they were afterwards."""
    before = switch.current_config()
    monkeypatch.delenv("USE_LADE", raising=False)
    monkeypatch.setattr(eligibility, "LEAST_TOKENS", 1)
    lade.restore_all()
    lade.config_lade(ADAPTIVE=0)
    yield
    lade.restore_all()
    switch._default = before


def assert_same(found, plain):
    """Texts and states of the generators, as `seeded` returns them."""
    assert torch.equal(found[0], plain[0])
    assert all(map(torch.equal, found[1], plain[1]))


# What is said at the first call.


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, ["USE_LADE=1", "with lade.enabled():", "USE_LADE=0"]),
        ("", ["USE_LADE=1"]),
        ("2", ["USE_LADE='2'", "1, true, yes, on", "0, false, no, off"]),
        ("ture", ["USE_LADE='ture'"]),
        *[(value, None) for value in ("0", "false", "No", " off ", "1", "on", "true", "YES")],
    ],
)
def test_one_line_at_the_first_call(value, said, monkeypatch, caplog, model):
    if value is not None:
        monkeypatch.setenv("USE_LADE", value)
    lade.augment_all()
    assert not caplog.records  # the patch alone says nothing
    for _ in range(2):
        model.generate(**prompt(), max_new_tokens=4)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (said is not None)
    for part in said or ():
        assert part in messages[0]
        assert "\n" not in messages[0]
    assert (lade.last_stats().fallback_reason is None) == (value in ("1", "on", "true", "YES"))


def test_no_line_for_who_switches_it_on_in_code(caplog, model):
    with lade.enabled():
        model.generate(**prompt(), max_new_tokens=8)
    model.generate(**prompt(), max_new_tokens=8)
    assert lade.last_stats().fallback_reason == "USE_LADE is not set to 1, true, yes or on"
    with lade.enabled(False):
        model.generate(**prompt(), max_new_tokens=8)
    assert not caplog.records


# A block of code.


@pytest.mark.parametrize("arguments", [{"max_new_tokens": 24}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", [{}, {"MODE": "lookahead", "LEVEL": 4}], ids=["tree", "window"])
def test_enabled(model, arguments, settings):
    inputs = prompt()
    plain = seeded(model.generate, **inputs, **arguments)
    with lade.enabled(**settings):
        found = seeded(model.generate, **inputs, **arguments)
        assert lade.last_stats().fallback_reason is None
        assert lade.current_config().uses_window == bool(settings)
        assert max(lade.last_stats().block_tokens) > 1
    assert_same(found, plain)
    assert not lade.current_config().uses_window
    model.generate(**inputs, **arguments)
    assert "USE_LADE" in lade.last_stats().fallback_reason


def test_the_innermost_decides(monkeypatch, model):
    for variable, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("USE_LADE", variable)
        with lade.enabled(MAX_BLOCK=8):
            assert switch.is_enabled()
            with lade.enabled(False, SHARE=0):
                assert lade.current_config().max_block == 8
                assert not switch.is_enabled()
                model.generate(**prompt(), max_new_tokens=8)
                assert lade.last_stats().fallback_reason == "lade.enabled(False) is in force"
            assert switch.is_enabled()
            assert lade.current_config().share
        assert switch.is_enabled() is expected


def test_a_block_keeps_its_settings():
    with lade.enabled(MAX_BLOCK=8):
        lade.config_lade(MAX_BLOCK=32, SHARE=0)
        assert (lade.current_config().max_block, lade.current_config().share) == (8, True)
    assert (lade.current_config().max_block, lade.current_config().share) == (32, False)


def test_a_file_of_settings(tmp_path):
    path = tmp_path / "lade.json"
    path.write_text('{"MAX_BLOCK": 16, "SHARE": 0}')
    with lade.enabled(CONFIG=path, SHARE=1):
        assert (lade.current_config().max_block, lade.current_config().share) == (16, True)


WRONG = [({"LEVEL": 1}, "LEVEL must be"), ({"LEVL": 4}, r"enabled\(\) has no keyword 'LEVL'.*LEVEL")]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_change_nothing(settings, message):
    before = vars(GenerationMixin)["generate"]
    with pytest.raises(TypeError if "LEVL" in settings else ValueError, match=message), lade.enabled(**settings):
        pass
    assert vars(GenerationMixin)["generate"] is before
    assert not switch.is_enabled()


def test_after_an_exception():
    with pytest.raises(KeyError), lade.enabled(MAX_BLOCK=8):
        raise KeyError
    assert not switch.is_enabled()
    assert lade.current_config().max_block == 64


def test_other_threads_are_untouched(model):
    """One that was there before, and one that is started inside; a copied context goes along."""

    def state():
        model.generate(**prompt(), max_new_tokens=8)
        return switch.is_enabled(), lade.current_config().max_block, lade.last_stats().fallback_reason is None

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(switch.is_enabled).result()  # which starts the thread
        with lade.enabled(MAX_BLOCK=8):
            context = contextvars.copy_context()
            found = in_threads(lambda run: run(state), lambda function: function(), context.run)
            assert found == [(False, 64, False), (True, 8, True)]
            assert pool.submit(state).result() == (False, 64, False)
            assert state() == (True, 8, True)


def test_tasks():
    """Each has its own; one that is started inside inherits."""

    async def inner():
        return lade.current_config().max_block

    async def task(size):
        with lade.enabled(MAX_BLOCK=size):
            await asyncio.sleep(0)
            inherited = asyncio.create_task(inner())
            await asyncio.sleep(0)
            return await inner(), await inherited

    async def main():
        return await asyncio.gather(task(8), task(16)), await inner()

    assert asyncio.run(main()) == ([(8, 8), (16, 16)], 64)


# One call without a patch.


@pytest.mark.parametrize(
    ("inputs", "arguments"),
    [
        (prompt(batch_size=3), {**SAMPLED, "num_return_sequences": 2}),
        (prompt(), {"max_new_tokens": 32, "repetition_penalty": 1.2, "eos_token_id": 5, "pad_token_id": 0}),
    ],
    ids=["sampled", "greedy"],
)
@pytest.mark.parametrize("is_patched", [False, True])
def test_one_call(model, inputs, arguments, is_patched, monkeypatch):
    monkeypatch.setenv("USE_LADE", "0")  # code says otherwise
    before = {name: vars(GenerationMixin)[name] for name in ("generate", "_sample")}
    plain = seeded(model.generate, **inputs, **arguments)
    if is_patched:
        lade.augment_all()
    count = len(lade.log_history())
    found = seeded(model.generate, **inputs, **arguments, custom_generate=lade.generate)
    assert_same(found, plain)
    assert lade.last_stats().fallback_reason is None
    assert max(lade.last_stats().block_tokens) > 1
    assert len(lade.log_history()) == count + 1
    if not is_patched:
        assert {name: vars(GenerationMixin)[name] for name in before} == before
    assert_same(seeded(model.generate, **inputs, **arguments), plain)
    assert lade.last_stats().fallback_reason is None or is_patched


@pytest.mark.parametrize("is_patched", [False, True])
def test_one_call_gives_back_the_callers_cache(model, is_patched):
    inputs = prompt()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    plain = model.generate(**inputs, max_new_tokens=16, past_key_values=caches[0])
    if is_patched:
        lade.augment_all()
    found = model.generate(**inputs, max_new_tokens=16, past_key_values=caches[1], custom_generate=lade.generate)
    assert lade.last_stats().fallback_reason is None
    assert torch.equal(found, plain)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 24 + 15
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(one.keys, other.keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streamer": Recorder()}, "no streamer .*lade.enabled"),
        ({"synced_gpus": True}, "no synced_gpus"),
        ({"num_beams": 2}, "got a request for beam_search"),
        ({"num_beams": 2, "do_sample": True}, "got a request for beam_sample"),
        ({"prompt_lookup_num_tokens": 3}, "got a request for assisted_generation"),
        ({"assistant_model": True}, "got a request for assisted_generation"),
        # What transformers itself refuses, since it gives no tokenizer to a function of a user's.
        ({"stop_strings": "x", "tokenizer": object()}, "tokenizer"),
        ({"token_healing": True, "tokenizer": object()}, "tokenizer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_one_call_cannot_have_is_refused(model, arguments, message):
    if "assistant_model" in arguments:
        arguments = {"assistant_model": tiny_llama(num_hidden_layers=1)}
    with pytest.raises(ValueError, match=message):
        model.generate(**prompt(), max_new_tokens=8, custom_generate=lade.generate, **arguments)


def test_models_divided_over_processes_are_refused(model, monkeypatch):
    """generate() would set synced_gpus by itself, and does not pass it on."""
    monkeypatch.setattr(custom_generate, "is_divided", lambda model: True)
    model.generate(**prompt(), max_new_tokens=8, custom_generate=lade.generate)  # one process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="no synced_gpus"):
        model.generate(**prompt(), max_new_tokens=8, custom_generate=lade.generate)


def test_one_call_reads_the_file_of_settings(model, tmp_path, monkeypatch):
    path = tmp_path / "lade.json"
    path.write_text('{"LEVEL": 3, "WINDOW_SIZE": 2, "GUESS_SET_SIZE": 2}')
    monkeypatch.setenv("LADE_CONFIG", str(path))
    monkeypatch.setattr(switch, "_environment_is_read", False)  # as in a new process
    custom_generate._prepare.cache_clear()
    model.generate(**prompt(), max_new_tokens=8, custom_generate=lade.generate)
    assert lade.last_stats().fallback_reason is None
    assert lade.current_config().ngram_size == 3


def test_one_call_that_lookahead_cannot_serve(model, caplog):
    inputs = prompt()
    plain = model.generate(**inputs, max_new_tokens=8, use_cache=False)
    found = model.generate(**inputs, max_new_tokens=8, use_cache=False, custom_generate=lade.generate)
    assert torch.equal(found, plain)
    assert "use_cache" in lade.last_stats().fallback_reason
    assert len(caplog.records) == 1


def test_a_loop_of_the_models_own_stays(model):
    class Own(type(model)):
        def _sample(self, input_ids, *args, **kwargs):
            return input_ids

    own, inputs = tiny_llama(), prompt()
    own.__class__ = Own
    assert torch.equal(own.generate(**inputs, max_new_tokens=4, custom_generate=lade.generate), inputs["input_ids"])
    assert "loop of its own" in lade.last_stats().fallback_reason


def test_called_by_something_else(model):
    """Without generate() above it, as a library may: what generate() would have prepared is the caller's to give."""
    inputs, prepared = prompt(), {}

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        prepared.update(kwargs, generation_config=generation_config, stopping_criteria=stopping_criteria)
        return input_ids

    model.generate(**inputs, custom_generate=keep, max_new_tokens=12)
    expected = model.generate(**inputs, max_new_tokens=12)
    assert isinstance(prepared["stopping_criteria"], StoppingCriteriaList)
    with torch.no_grad():
        found = lade.generate(model, inputs["input_ids"], logits_processor=LogitsProcessorList(), **prepared)
    assert torch.equal(found, expected)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps < 12


# Summaries.


@pytest.mark.parametrize("way", ["patch", "call"])
@pytest.mark.parametrize(("batch_size", "place", "unit"), [(1, "", ""), (6, " in 6 sequences", " per sequence")])
def test_summary(model, capsys, way, batch_size, place, unit):
    arguments = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3 if batch_size > 1 else 1}
    if way == "call":
        arguments["custom_generate"] = lade.generate
    with lade.enabled(DEBUG=1):
        model.generate(**prompt(batch_size=-(-batch_size // 3)), **arguments)
    stats = lade.last_stats()
    assert (stats.batch_size, stats.generated_tokens) == (batch_size, 20 * batch_size)
    ratio = f"{20 / stats.steps:.2f}"
    out = capsys.readouterr().out
    assert f"{20 * batch_size}{place} Total steps: {stats.steps} Compression ratio: {ratio}{unit}\n" in out
    assert out.count("SUMMARY") == 1


def test_no_summary_without_lookahead(model, capsys):
    with lade.enabled(DEBUG=1):
        model.generate(**prompt(), max_new_tokens=4, num_beams=2)
        with lade.enabled(False):
            model.generate(**prompt(), max_new_tokens=4)
    assert capsys.readouterr().out == ""


# Importing.


def test_importing_stays_light():
    program = "import sys, lade; print({'torch', 'transformers'} & set(sys.modules), 'lade' in sys.modules)"
    assert python("-c", program).stdout == "set() True\n"
