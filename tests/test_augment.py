"""The patch: on, off, put back by identity, and invisible to everything but generate()."""

import functools
import inspect
import json

import pytest
import torch
from support import compare, prompt, tiny_llama
from transformers import GenerationMixin

import lade
from lade import augment
from lade.models import eligibility
from lade.models.eligibility import LEAST_TOKENS, TOO_SHORT
from lade.stats import GenerationStats

PATCHED = ("generate", "_sample", "_beam_search", "_assisted_decoding")


def installed():
    return {name: vars(GenerationMixin)[name] for name in PATCHED}


def test_restored_by_identity():
    before = installed()
    assert not any(getattr(function, "__module__", "").startswith("lade") for function in before.values())
    lade.augment_all()
    wrapped = installed()
    assert all(wrapped[name] is not before[name] for name in PATCHED)
    assert all(inspect.signature(wrapped[name]) == inspect.signature(before[name]) for name in PATCHED)
    lade.augment_llama()  # again, under another of its names
    lade.augment_generate()
    assert installed() == wrapped
    lade.restore_all()
    assert all(vars(GenerationMixin)[name] is before[name] for name in PATCHED)
    lade.restore_all()
    assert installed() == before


@pytest.mark.parametrize("puts_back", [False, True])
def test_another_library_over_the_patch(lade_on, model, monkeypatch, puts_back):
    """restore_all() leaves it there; it calls lade's wrapper, or puts it back later: both run the original."""
    lade.restore_all()
    monkeypatch.setattr(GenerationMixin, "generate", vars(GenerationMixin)["generate"])  # put back after the test
    lade.augment_all()
    ours = vars(GenerationMixin)["generate"]
    theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    GenerationMixin.generate = theirs
    lade.restore_all()
    assert vars(GenerationMixin)["generate"] is theirs
    if puts_back:
        GenerationMixin.generate = ours
    lade.log_history(clear=True)
    model.generate(**prompt(), max_new_tokens=24)
    assert lade.log_history() == []
    lade.augment_all()
    compare(model, prompt(), max_new_tokens=24)
    assert len(lade.log_history()) == 2  # plain and not
    lade.restore_all()
    assert vars(GenerationMixin)["generate"] is (ours if puts_back else theirs)


def test_off_is_the_original(lade_on, monkeypatch, model):
    """The very function that was there gets the very arguments, whatever its result."""
    seen = []
    monkeypatch.setenv("USE_LADE", "0")
    original = inspect.unwrap(vars(GenerationMixin)["_sample"])
    lade.restore_all()

    @functools.wraps(original)
    def spy(self, *args, **kwargs):
        seen.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", spy)
    lade.augment_all()
    model.generate(**prompt(), max_new_tokens=4)
    assert len(seen) == 1
    lade.restore_all()


def test_custom_generate_still_wins(lade_on, model):
    def own(model, input_ids, extra=None, **kwargs):
        return input_ids, extra

    inputs = prompt()
    ids, extra = model.generate(**inputs, custom_generate=own, extra=5, max_new_tokens=3)
    assert torch.equal(ids, inputs["input_ids"])
    assert extra == 5
    assert "custom_generate" in lade.last_stats().fallback_reason


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"assistant_model": tiny_llama(num_hidden_layers=1)}, "assisted"),
        ({"use_cache": False}, "use_cache"),
    ],
    ids=["beams", "assistant", "no-cache"],
)
def test_fallbacks_say_why_once(lade_on, model, caplog, monkeypatch, arguments, reason):
    monkeypatch.setattr(augment, "_warned", set())
    for _ in range(2):
        compare(model, reason=reason, max_new_tokens=12, **arguments)
    assert len([record for record in caplog.records if reason in record.getMessage()]) == 1


@pytest.mark.parametrize(("num_tokens", "is_plain"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.usefixtures("lade_on")
def test_a_call_that_cannot_become_faster_is_left_alone(num_tokens, is_plain, by_length, model, caplog, monkeypatch):
    monkeypatch.setattr(eligibility, "LEAST_TOKENS", LEAST_TOKENS)
    monkeypatch.setattr(augment, "_warned", set())
    arguments = {"max_new_tokens": None, "max_length": 24 + num_tokens} if by_length else {"max_new_tokens": num_tokens}
    compare(model, reason=TOO_SHORT if is_plain else None, **arguments)
    assert not caplog.records


def test_a_call_under_way_keeps_its_settings(lade_on, capsys, model):
    def change(ids, scores):
        lade.config_lade(DEBUG=1, MAX_BLOCK=2)
        return torch.zeros(len(ids), dtype=torch.bool)

    lade.config_lade(MODE="tree", MAX_BLOCK=8)
    model.generate(**prompt(), max_new_tokens=30, stopping_criteria=[change])
    assert capsys.readouterr().out == ""
    assert max(lade.last_stats().block_tokens) == 8


def test_logs(lade_on, tmp_path, model):
    lade.log_history(clear=True)
    model.generate(**prompt(), max_new_tokens=30)
    model.generate(**prompt(), max_new_tokens=10, num_beams=2)
    path = tmp_path / "log.json"
    lade.save_log(path)
    first, second = lade.log_history()
    assert first.generated_tokens == 30
    assert first.tokens_per_step == 30 / first.steps
    assert sum(first.accepted_lengths.values()) == len(first.block_tokens) == first.steps - 1
    assert sum((n + 1) * count for n, count in first.accepted_lengths.items()) == 30 - 1
    assert "beam search" in second.fallback_reason
    assert json.loads(path.read_text())[0]["steps"] == first.steps
    assert len(lade.log_history(clear=True)) == 2
    assert lade.log_history() == []


def test_a_log_is_saved_while_other_calls_end(lade_on, tmp_path, model, monkeypatch):
    lade.log_history(clear=True)
    model.generate(**prompt(), max_new_tokens=2)
    inner = GenerationStats.as_dict

    def as_dict(self):
        model.generate(**prompt(), max_new_tokens=2)
        return inner(self)

    monkeypatch.setattr(GenerationStats, "as_dict", as_dict)
    lade.save_log(tmp_path / "log.json")
    assert len(json.loads((tmp_path / "log.json").read_text())) == 1
    assert len(lade.log_history()) == 2


def test_stats_are_one_readable_line(lade_on, model):
    for inputs, row in ((prompt(), ""), (prompt(batch_size=2), " in 2 rows")):
        model.generate(**inputs, max_new_tokens=20)
        stats = lade.last_stats()
        assert str(stats).startswith(f"{stats.generated_tokens} tokens{row} in {stats.steps} forward passes, ")
        assert f"{stats.tokens_per_step:.2f} tokens per pass" in str(stats)
        assert "\n" not in str(stats)
    model.generate(**prompt(), max_new_tokens=4, num_beams=2)
    assert str(lade.last_stats()) == f"lookahead did not run: {lade.last_stats().fallback_reason}"
