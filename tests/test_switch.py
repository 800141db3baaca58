"""Lookahead switched on in code, for a block, and the line for somebody who forgot to switch it on."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import in_threads, prompt, python, seeded
from transformers import GenerationMixin

import lade
from lade import switch
from lade.models import eligibility


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


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", [{}, {"MODE": "lookahead", "LEVEL": 4}], ids=["tree", "window"])
def test_enabled(model, sampling, settings):
    arguments = prompt() | {"max_new_tokens": 24} | sampling
    plain = seeded(model.generate, **arguments)
    with lade.enabled(**settings):
        found = seeded(model.generate, **arguments)
        assert lade.last_stats().fallback_reason is None
        assert lade.current_config().uses_window == bool(settings)
        assert max(lade.last_stats().block_tokens) > 1
    assert torch.equal(found[0], plain[0])
    assert all(map(torch.equal, found[1], plain[1]))
    assert not lade.current_config().uses_window
    model.generate(**arguments)
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
            assert state() == (True, 8, True)
            mine = lade.last_stats()
            assert pool.submit(state).result() == (False, 64, False)
            assert lade.last_stats() is mine
            assert in_threads(lambda function: function(), lade.last_stats) == [None]


def test_tasks_inherit():
    async def size():
        return lade.current_config().max_block

    async def main():
        with lade.enabled(MAX_BLOCK=8):
            task = asyncio.create_task(size())
        return await task, await size()

    assert asyncio.run(main()) == (8, 64)


@pytest.mark.parametrize(("batch_size", "place", "unit"), [(1, "", ""), (6, " in 6 sequences", " per sequence")])
def test_summary(model, capsys, batch_size, place, unit):
    arguments = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3 if batch_size > 1 else 1}
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


def test_importing_stays_light():
    program = "import sys, lade; print({'torch', 'transformers'} & set(sys.modules), 'lade' in sys.modules)"
    assert python("-c", program).stdout == "set() True\n"
