"""`lade bench`, with `--tune` and without: on a clock that ticks by the tokens of each forward, what it finds is known
beforehand."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import note_calls, prompt, tiny_llama

import lade
from lade import commands, config, switch
from lade.commands import bench, measure
from lade.commands.measure import Method, Run, run_methods
from lade.commands.prompts import as_inputs, read_prompts
from lade.commands.tune import CANDIDATES, KEEP_DEFAULT, NOTHING_PAYS, describe, is_worth_it, report, tune
from lade.switch import is_enabled

pytestmark = pytest.mark.usefixtures("new_settings")
PROMPTS = [prompt(20), prompt(30, seed=1)]  # the first to choose by, the second to judge by
WINDOWS = tuple({"MODE": "lookahead", "LEVEL": n, "WINDOW_SIZE": w, "GUESS_SET_SIZE": w} for n, w in ((3, 2), (5, 7)))
COMMON = {"max_new_tokens": 24}


@pytest.fixture
def clock(monkeypatch):
    """Gives a model whose forward over q tokens takes 1 + slope * (q - 1) seconds, and nothing else any time at all."""
    time = 0.0

    def make(slope: float, **changes):
        def tick(module, args, kwargs):
            nonlocal time
            time += 1 + slope * (kwargs["input_ids"].shape[1] - 1)

        model = tiny_llama(num_hidden_layers=1, **changes)
        model.register_forward_pre_hook(lade.allow_hook(tick), with_kwargs=True)
        return model

    fake = SimpleNamespace(perf_counter=lambda: time)
    monkeypatch.setattr(measure, "time", fake)
    return make


def found_by(model, candidates=WINDOWS, prompts=PROMPTS):
    """By one trial: on a clock like that, another gives the same."""
    return tune(model, prompts, COMMON, 1, lambda label: iter, candidates)


@pytest.fixture
def poor_default(monkeypatch):
    """The default proposes little."""
    monkeypatch.setattr(switch, "_default", config.LookaheadConfig(max_block=2, adaptive=False))


def test_what_beats_the_default_is_recommended(clock, lade_on, poor_default, tmp_path):
    model, path = clock(0.0), tmp_path / "lade.json"
    found = found_by(model)
    settings, measured = {name: value for name, value in found.items() if name != "measured"}, found["measured"]
    assert settings in WINDOWS
    assert measured["winner"] == describe(settings)
    choice = measured["ratio_to_default_when_choosing"]
    assert max(choice, key=lambda name: choice[name]["median"]) == measured["winner"]
    assert measured["noise"] == 1
    assert measured["identical_outputs"] == 1
    steps = []
    for tried in ({}, settings):  # they were really in force: a step of either kind takes a second
        with lade.enabled(**measure.NOT_SHARED, **tried):
            model.generate(**PROMPTS[1], **COMMON)
        steps.append(lade.last_stats().steps)
    assert measured["ratio_to_default"]["median"] == round(steps[0] / steps[1], 4) > 1.02
    assert measured["ratio_to_plain"][measured["winner"]]["median"] == round(24 / steps[1], 4)
    assert f"lade --config {path}" in report(found, str(path))
    path.write_text(json.dumps(found))
    lade.config_lade(CONFIG=path)
    assert lade.current_config().window_size == settings["WINDOW_SIZE"]


def test_what_is_slower_than_plain_is_not_recommended(clock, lade_on, tmp_path, caplog):
    found, path, before = found_by(clock(0.5), WINDOWS[:1]), tmp_path / "lade.json", lade.current_config()
    assert sorted(found) == ["measured", "note"]
    assert "says so, and sets nothing" in report(found, str(path))
    path.write_text(json.dumps(found))
    lade.config_lade(CONFIG=path)
    assert lade.current_config() == before
    assert found["note"] in caplog.text


@pytest.fixture
def timed_as(monkeypatch):
    """Where lookahead is on, what a call takes is that many times as much."""

    def change(factor, generate_timed=measure.generate_timed):
        def timed(*arguments, **named):
            tokens, seconds = generate_timed(*arguments, **named)
            return tokens, seconds * (factor() if is_enabled() else 1)

        monkeypatch.setattr(measure, "generate_timed", timed)

    return change


def test_where_the_default_is_slower_than_plain_the_advice_is_to_leave_it_off(clock, lade_on, timed_as):
    timed_as(lambda: 20)
    assert found_by(clock(0.0), WINDOWS[:1])["note"] == NOTHING_PAYS


def test_the_winner_is_chosen_by_other_prompts_than_judge_it(clock, lade_on, poor_default, monkeypatch):
    def lengths(model, prompts, *_):
        return [inputs["input_ids"].shape[1] for inputs in prompts]

    timed = note_calls(monkeypatch, sys.modules["lade.commands.tune"], "run_methods", lengths)
    prompts = [prompt(20 + number, seed=number) for number in range(3)]
    found_by(clock(0.0), WINDOWS[:1], prompts)
    assert timed == [[20, 22], [21]]
    with pytest.raises(ValueError, match="prompts must be two or more, some to choose by and some to judge by, got 1"):
        found_by(clock(0.0), prompts=prompts[:1])


def test_the_same_work_is_no_gain(clock, lade_on, timed_as):
    """MODE=tree takes the default's steps: however much luck it has with the clock, it is not recommended."""
    timed_as(lambda: 0.7 if lade.current_config().mode == "tree" else 1)
    found = found_by(clock(0.0), ({"MODE": "tree"},))
    assert found["measured"]["ratio_to_default"]["p20"] > 1.3
    assert found["measured"]["same_steps"]
    assert found["note"] == KEEP_DEFAULT
    assert "MODE=tree: takes the same steps as the default" in report(found, "x.json")
    assert found_by(clock(0.0), ({"MODE": "tree"}, WINDOWS[0]))["measured"]["winner"] == describe(WINDOWS[0])


@pytest.mark.parametrize(
    ("gain", "to_plain", "noise", "is_enough"),
    [
        ((1.2, 0.99), 1.9, 1.0, False),
        ((1.01, 1.005), 1.9, 1.0, False),
        ((1.1, 1.01), 1.9, 1.0, True),
        ((1.1, 1.05), 0.8, 1.0, False),
        ((1.1, 1.05), 1.9, 1.04, True),
        ((1.1, 1.05), 1.9, 1.06, False),
    ],
)
def test_a_lucky_median_is_not_enough(gain, to_plain, noise, is_enough):
    measured = {"winner": "x", "noise": noise, "same_steps": False}
    measured["ratio_to_default"] = dict(zip(("median", "p20"), gain, strict=True))
    measured["ratio_to_plain"] = {"x": {"median": 2.0, "p20": to_plain}}
    assert is_worth_it(measured) == is_enough
    assert not is_worth_it(measured | {"same_steps": True})


def test_what_is_tried_is_what_config_lade_takes():
    for settings in CANDIDATES:
        lade.config_lade(**settings)
        assert lade.current_config().mode == settings["MODE"]


def test_tune_from_the_command_line(checkpoint, tmp_path, capsys, monkeypatch, lade_on):
    monkeypatch.setenv("LADE_CONFIG", "what was found before.json")
    monkeypatch.setattr(bench, "tune", lambda *arguments: tune(*arguments, WINDOWS[:1]))
    out = tmp_path / "found.json"
    arguments = f"--model_path {checkpoint} --device cpu --max_new_tokens 8 --limit 2 --trials 1".split()
    assert commands.main(["bench", "--tune", *arguments, "--out", str(out)]) == 0
    shown, content = capsys.readouterr().out, json.loads(out.read_text())
    assert str(out) in shown
    assert measure.MEMORY_NOTE in shown
    measured = content["measured"]
    assert (measured["model"], measured["prompts"]) == (checkpoint, {"choosing": 1, "judging": 1})
    assert measured["arguments"] == {"max_new_tokens": 8, "seed": 0}
    assert measured["environment"]["dtype"] == "float32"
    assert measured["identical_outputs"] == 1
    lade.config_lade(CONFIG=out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "missing.jsonl"], "prompts must be"),
        (["--limit", "-1"], "limit must be"),
        (["--trials", "0"], "--trials must be 1 or more, got 0"),
        (["--max_new_tokens", "-3"], "--max_new_tokens must be 1 or more, got -3"),
        (["--temperature", "-1"], "--temperature must be 0, which is greedy, or above, got -1.0"),
        (["--top_p", "2"], "--top_p must be above 0 and at most 1, got 2.0"),
        (["--methods", "lade,fast"], "methods must be of plain, static, prompt_lookup, lade, got 'fast'"),
        (["--seed", "99999999999999999999"], "--seed must be an integer of 64 bits, got 99999999999999999999"),
        (["--out", "no/such/folder/x.json"], "--out must be a file in a folder that exists"),
        (["--out", str(Path(__file__).parent)], "--out must be a file in a folder that exists"),
        (["--tune", "--limit", "1"], "prompts must be two or more"),
        (["--tune", "--level", "5"], "--level must not be given"),
        (["--tune", "--out", "no/such/folder/x.json"], "--out must be a file in a folder that exists"),
    ],
)
def test_wrong_arguments_end_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["bench", "--model_path", "nothing/loaded", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lade bench: error: ")  # and then the usage
    assert message in error.splitlines()[0]


def test_ctrl_c_is_a_sentence(checkpoint, capsys, monkeypatch, lade_on):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "benchmark", interrupted)
    assert commands.main(["bench", "--model_path", checkpoint, "--methods", "lade", "--limit", "1"]) == 130
    assert capsys.readouterr().err.endswith("lade bench: stopped, nothing was written\n")


def test_methods_take_turns(lade_on, monkeypatch):
    def note(input_ids, **_):
        return input_ids.shape[1], is_enabled(), lade.current_config().ngram_size

    model = tiny_llama()
    calls = note_calls(monkeypatch, model, "generate", note)
    methods = {"plain": Method(), "a": Method(settings={"LEVEL": 3}), "b": Method(settings={"LEVEL": 4})}
    run_methods(model, [prompt(10), prompt(12)], methods, 2, {"max_new_tokens": 12})
    warm_up = [(length, *how) for how in ((False, 5), (True, 3), (True, 4)) for length in (12, 10, 12)]
    plain, a, b = (False, 5), (True, 3), (True, 4)
    turns = ((10, (plain, a, b)), (12, (a, b, plain)), (10, (b, plain, a)), (12, (plain, a, b)))
    assert calls == warm_up + [(length, *how) for length, order in turns for how in order]
    assert lade.current_config().ngram_size == 5
    assert is_enabled()


def test_a_fallback_is_not_measured(lade_on):
    with pytest.raises(RuntimeError, match="beam search"):
        measure.run_once(tiny_llama(), prompt(10), Method({"num_beams": 2}, {}), Run(), {"max_new_tokens": 4})


def test_no_setting_lets_a_run_profit_from_another(lade_on):
    """Not even one of a candidate's."""
    model, method = tiny_llama(), {"plain": Method(), "lade": Method(settings={"MODE": "tree", "SHARE": 1})}
    runs = run_methods(model, [prompt(20)] * 3, method, 1, {"max_new_tokens": 32})
    assert len(set(runs["lade"][0].steps)) == 1


def test_rivals_that_a_model_refuses(monkeypatch, lade_on):
    model = tiny_llama()
    assert bench.refusals(model, prompt(10), bench.METHODS, {"max_new_tokens": 4}) == {}
    monkeypatch.setattr(type(model), "_supports_static_cache", False, raising=False)
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False, raising=False)
    monkeypatch.setattr(type(model), "_is_stateful", True)
    found = bench.refusals(model, prompt(10), bench.METHODS, {"max_new_tokens": 4})
    assert "stateful" in found["prompt_lookup"]
    assert not {"plain", "lade"} & set(found)


def test_loops_are_found():
    assert measure.is_looping([1, 2, 3] * 20)
    assert not measure.is_looping(list(range(64)))


def test_own_prompts(tokenizer):
    rows = read_prompts(None)
    assert len(rows) >= 8
    assert len(read_prompts(None, 3)) == 3
    for row, inputs in zip(rows, as_inputs(rows, tokenizer, "cpu"), strict=True):
        text = tokenizer.decode(inputs["input_ids"][0])
        assert (text == row["prompt"]) if "prompt" in row else (row["question"] in text != row["question"])
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape


def test_prompts_of_ones_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n\n{"prompt": "three"}\n')
    assert [row.get("prompt") for row in read_prompts(path)] == [None, "three"]
    for content, message in (
        ("", "empty file"),
        ('{"prompt": "x"}\n{"text": "y"}', "line 2 has ['text']"),
        ('"x"', "line 1 has str"),
        ("x", "line 1 is not JSON"),
        ('{"turns": []}', "line 1 is empty"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match="prompts must") as error:
            read_prompts(path)
        assert message in str(error.value)


def test_bench_from_the_command_line(checkpoint, tmp_path, capsys, lade_on):
    out = tmp_path / "bench.json"
    arguments = f"--model_path {checkpoint} --device cpu --max_new_tokens 24 --limit 1 --trials 2 --level 4".split()
    assert commands.main(["bench", *arguments, "--out", str(out)]) == 0
    shown, figures = capsys.readouterr().out, json.loads(out.read_text())
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == list(bench.METHODS) == list(figures["methods"])
    assert {row["identical_outputs"] for row in figures["methods"].values()} == {1.0}
    assert figures["methods"]["plain"]["ratio_to_plain"] == {"median": 1.0, "p20": 1.0, "p80": 1.0}
    assert figures["methods"]["lade"]["tokens_per_step"] > 1
    assert figures["methods"]["plain"]["tokens_per_step"] is None
    assert "ngram_size=4" in figures["settings"]["lade"]
    assert bench.HALF_NOTE not in shown
    figures["methods"]["lade"]["identical_outputs"] = 0.5  # as may happen in 16 bits alone
    assert bench.HALF_NOTE not in bench.table(figures)
    figures["environment"]["dtype"] = "bfloat16"
    assert bench.HALF_NOTE in bench.table(figures)
