"""`lade tune` and `lade bench`: on a clock that ticks by the tokens of each forward, what they find is known beforehand."""

import dataclasses
import inspect
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import generate_plain, prompt, tiny_llama
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lade
from lade import commands, config
from lade.commands import bench, measure
from lade.commands import forward_costs as cost
from lade.commands.forward_costs import cost_at, step_costs
from lade.commands.measure import Method, Run, run_methods
from lade.commands.prompts import OWN_PROMPTS, as_inputs, read_prompts
from lade.commands.tune.report import NOTHING_PAYS, as_text, settings_file
from lade.commands.tune.search import PLAN, QUICK_PLAN, Plan, Row, lookahead_settings, may_pay, screen, tune
from lade.models import adapter_for

BUNDLED = Path(lade.__file__).parent.parent / "models" / "stdlib-9m"
SMALL_PLAN = Plan(
    (*lookahead_settings((3, 5), ((1, 3), (7, 7))),),
    block_sizes=(1, 8, 64),
    num_screened=1,
    num_finalists=2,
    trials=1,  # on a clock like that, another gives the same
)


@pytest.fixture(autouse=True)
def keep_config(monkeypatch):
    monkeypatch.setattr(config, "_default", config.LookaheadConfig())
    monkeypatch.setattr(config, "_environment_is_read", False)
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.delenv("LADE_CONFIG", raising=False)


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
    monkeypatch.setattr(cost, "time", fake)
    return make


def no_progress(label):
    return iter


def test_step_costs(clock):
    adapter = adapter_for(clock(0.25))
    found = step_costs(adapter, (1, 3, 9), context=20, trials=3)
    assert found == {1: 1.0, 3: 1.5, 9: 3.0}
    assert [cost_at(found, size) for size in (1, 2, 3, 6, 9, 17)] == [1.0, 1.25, 1.5, 2.25, 3.0, 5.0]
    assert cost_at({1: 2.0, 4: 2.0}, 3) == cost_at({1: 2.0}, 50) == 1.0


def test_step_costs_runs_the_blocks_that_it_times():
    model = tiny_llama()
    seen = []
    model.register_forward_pre_hook(
        lade.allow_hook(
            lambda module, args, kwargs: seen.append((*kwargs["input_ids"].shape, kwargs.get("logits_to_keep")))
        ),
        with_kwargs=True,
    )
    with_progress = []
    step_costs(adapter_for(model), (4, 1), context=20, trials=2, progress=lambda rounds: with_progress or rounds)
    assert [shape[:2] for shape in seen] == [(1, 20)] + [(1, 4), (1, 1)] * (cost.WARM_UP + 2)
    assert seen[1][2] == 0  # all rows


def test_step_costs_keeps_within_the_positions():
    settings = {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    assert list(step_costs(adapter_for(model), (1, 4, 5), context=28, trials=1)) == [1, 4]
    for name in ("context", "trials"):
        with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
            step_costs(adapter_for(model), **{name: 0})
    with pytest.raises(ValueError, match="training mode"):
        step_costs(adapter_for(model.train()))


def test_where_blocks_are_free_the_most_tokens_per_step_win(clock, lade_on):
    model, prompts = clock(0.0), [prompt(20), prompt(30, seed=1)]
    findings = tune(model, prompts, {"max_new_tokens": 40}, SMALL_PLAN, no_progress)
    assert set(findings.seconds.values()) == {1.0}
    assert (findings.hopeless, len(findings.rows), findings.context) == ([], 4, 25 + 20)
    measured = [row for row in findings.rows if row.ratio]
    assert len(measured) == SMALL_PLAN.num_finalists
    for row in measured:  # both ways to the same number: a step of either kind takes a second
        assert row.ratio == dict.fromkeys(("median", "p20", "p80"), row.tokens_per_step)
        assert row.predicted == row.tokens_per_step > 1.2
        assert row.identical == 1
    assert findings.best is measured[0]
    assert findings.best.tokens_per_step == max(row.tokens_per_step for row in measured)

    # The settings were really in force.
    lade.config_lade(**findings.best.settings)
    steps = 0
    for inputs in prompts:
        expected = generate_plain(model, inputs, max_new_tokens=40)
        assert torch.equal(model.generate(**inputs, max_new_tokens=40), expected)
        steps += lade.last_stats().steps
    assert round(80 / steps, 4) == findings.best.tokens_per_step


def test_the_best_block_follows_from_the_cost(clock, lade_on):
    """The same model and prompts, on a machine where each token of a block costs a twentieth of a step."""
    free, dear = (
        tune(clock(slope), [prompt(20)], {"max_new_tokens": 32}, SMALL_PLAN, no_progress).best for slope in (0.0, 0.05)
    )
    assert dear.mean_block < free.mean_block
    assert dear.ratio["median"] < free.ratio["median"]


def test_what_is_slower_than_plain_is_not_recommended(clock, lade_on, tmp_path, caplog):
    findings = tune(clock(0.5), [prompt(20)], {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
    assert findings.best is None
    assert all(row.ratio["median"] < 1 for row in findings.rows if row.ratio)
    assert {"LEVEL": 5, "WINDOW_SIZE": 7, "GUESS_SET_SIZE": 7} in findings.hopeless
    path = tmp_path / "lade.json"
    content = settings_file(findings, {})
    path.write_text(json.dumps(content))
    before = lade.current_config()
    assert sorted(content) == ["measured", "note"]
    assert "says so, and sets nothing" in as_text(findings, path)
    lade.config_lade(CONFIG=path)
    assert lade.current_config() == before
    assert NOTHING_PAYS in caplog.text


def test_a_lucky_median_is_not_enough():
    row = Row({"LEVEL": 3}, mean_block=4.0, tokens_per_step=2.0, predicted=1.9)
    for ratio, is_faster in ((None, False), ((1.2, 0.99, 1.3), False), ((1.1, 1.01, 1.3), True)):
        row.ratio = ratio and dict(zip(("median", "p20", "p80"), ratio, strict=True))
        assert row.is_faster() == is_faster


def test_the_better_half_goes_on(lade_on):
    """Where blocks are free, more tokens per step are better, and only those that got far are measured later."""
    plan = dataclasses.replace(SMALL_PLAN, num_finalists=1)
    model, prompts, common = tiny_llama(), [prompt(20), prompt(24, seed=1)], {"max_new_tokens": 32}
    labels = []
    rows = screen(
        model, prompts, [*plan.candidates], common, plan, {1: 1.0}, lambda label: labels.append(label) or (lambda x: x)
    )

    def tokens_per_step(settings, prompts):
        steps = 0
        with config.temporary_settings(**measure.NOT_SHARED, **settings):
            for inputs in prompts:
                model.generate(**inputs, **common)
                steps += lade.last_stats().steps
        return round(32 * len(prompts) / steps, 4)

    on_first = sorted(plan.candidates, key=lambda settings: -tokens_per_step(settings, prompts[:1]))
    assert labels == ["tokens per step, prompt 1 of 2", "tokens per step, prompt 2 of 2"]
    assert {str(row.settings) for row in rows[:2]} == set(map(str, on_first[:2]))
    assert [row.tokens_per_step for row in rows[2:]] == [tokens_per_step(s, prompts[:1]) for s in on_first[2:]]
    assert [row.tokens_per_step for row in rows[:2]] == [tokens_per_step(row.settings, prompts) for row in rows[:2]]
    assert rows[0].predicted == rows[0].tokens_per_step >= rows[1].predicted


def test_what_cannot_pay():
    seconds = {1: 1.0, 64: 4.0}
    assert may_pay({"LEVEL": 5, "WINDOW_SIZE": 15}, seconds)
    assert not may_pay({"LEVEL": 3, "WINDOW_SIZE": 25}, seconds)
    assert may_pay({"MODE": "another"}, seconds)


@pytest.mark.parametrize("plan", [PLAN, QUICK_PLAN], ids=["full", "quick"])
def test_plans_hold_what_config_lade_takes(plan):
    assert len({json.dumps(settings, sort_keys=True) for settings in plan.candidates}) == len(plan.candidates) > 4
    assert plan.block_sizes[0] == 1
    for settings in plan.candidates:
        lade.config_lade(**settings)


def test_where_no_candidate_can_pay(clock, lade_on):
    findings = tune(clock(9.0), [prompt(20)], {"max_new_tokens": 16}, SMALL_PLAN, no_progress)
    assert (findings.rows, findings.best, findings.hopeless) == ([], None, [*SMALL_PLAN.candidates])
    text = as_text(findings, Path("found.json"))
    assert "4 candidates were not tried" in text
    assert "No candidate was faster" in text
    assert settings_file(findings, {})["note"] == NOTHING_PAYS


def test_report(clock, lade_on):
    findings = tune(clock(0.02), [prompt(20)], {"max_new_tokens": 32}, SMALL_PLAN, no_progress)
    text = as_text(findings, Path("found.json"))
    assert max(map(len, text.splitlines())) <= 120
    plot = text.partition("tokens in the block\n")[2].partition("+--")[0]
    assert (plot.count("*"), plot.count("#"), plot.count("o") > 0, plot.count(".") > 50) == (1, 1, True, True)
    best = findings.best
    assert f"LEVEL={best.settings['LEVEL']} " in text.splitlines()[-2]
    assert f"{best.ratio['median']:.2f} times plain generate()" in text
    assert "config_lade(CONFIG='found.json')" in text
    assert measure.MEMORY_NOTE in text


def test_methods_take_turns(lade_on):
    model, calls = tiny_llama(), []
    original = type(model).generate

    class Spy(type(model)):
        def generate(self, **arguments):
            calls.append((arguments["input_ids"].shape[1], os.environ["USE_LADE"], lade.current_config().ngram_size))
            return original(self, **arguments)

    model.__class__ = Spy
    methods = {"plain": Method(), "a": Method(settings={"LEVEL": 3}), "b": Method(settings={"LEVEL": 4})}
    runs = run_methods(model, [prompt(10), prompt(12)], methods, 2, {"max_new_tokens": 12})
    warm_up = [(length, *how) for how in (("0", 5), ("1", 3), ("1", 4)) for length in (12, 10, 12)]
    trial = [(length, *how) for length in (10, 12) for how in (("0", 5), ("1", 3), ("1", 4))]
    assert calls == warm_up + trial * 2
    assert lade.current_config().ngram_size == 5
    assert os.environ["USE_LADE"] == "1"
    for name, run in itertools.product("ab", range(2)):
        assert runs[name][run].outputs == runs["plain"][0].outputs
        assert all(steps < 12 for steps in runs[name][run].steps)
    assert not runs["plain"][0].steps


def test_a_fallback_is_not_measured(lade_on):
    with pytest.raises(RuntimeError, match="beam search"):
        measure.run_once(tiny_llama(), prompt(10), Method({"num_beams": 2}, {}), Run(), {"max_new_tokens": 4})


@pytest.mark.skipif(
    "SHARE" not in inspect.signature(lade.config_lade).parameters, reason="config_lade has no SHARE yet"
)
def test_no_run_profits_from_another(lade_on):
    model = tiny_llama()
    runs = run_methods(
        model, [prompt(20)] * 3, {"plain": Method(), "lade": Method(settings={})}, 1, {"max_new_tokens": 32}
    )
    assert len(set(runs["lade"][0].steps)) == 1


def test_no_setting_lets_a_run_profit_from_another(lade_on):
    """Not even one of a candidate's; and the tables say how it was measured."""
    model, method = tiny_llama(), {"plain": Method(), "lade": Method(settings={"MODE": "tree", "SHARE": 1})}
    runs = run_methods(model, [prompt(20)] * 3, method, 1, {"max_new_tokens": 32})
    assert len(set(runs["lade"][0].steps)) == 1
    figures = bench.benchmark(model, [prompt(20)], {"plain": Method()}, 1, {"max_new_tokens": 8})
    assert measure.MEMORY_NOTE in bench.table(figures)
    assert figures["memory"] == measure.MEMORY_NOTE


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


def test_own_prompts():
    rows = read_prompts(None)
    assert len(rows) >= 8
    assert len(read_prompts(None, 3)) == 3
    setup = (BUNDLED.parents[1] / "setup.py").read_text()
    assert f'"{OWN_PROMPTS.name}"' in setup
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
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
    with pytest.raises(ValueError, match="prompts must be a text file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        read_prompts(None, 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(torch.float32, vocab_size=4096, max_position_embeddings=2048).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(folder)
    return str(folder)


def test_tune_from_the_command_line(checkpoint, tmp_path, capsys, monkeypatch, lade_on):
    monkeypatch.setenv("LADE_CONFIG", "what was found before.json")
    out = tmp_path / "found.json"
    arguments = ["--quick", "--model_path", checkpoint, "--device", "cpu", "--max_new_tokens", "16", "--limit", "2"]
    assert commands.main(["tune", *arguments, "--out", str(out)]) == 0
    shown, content = capsys.readouterr().out, json.loads(out.read_text())
    assert str(out) in shown
    measured = content["measured"]
    assert (measured["model"], measured["prompts"], measured["arguments"]) == (
        checkpoint,
        2,
        {"max_new_tokens": 16, "seed": 0},
    )
    assert measured["environment"]["dtype"] == "float32"
    assert list(measured["step_cost"]) == [str(size) for size in QUICK_PLAN.block_sizes]
    assert measured["step_cost"]["1"] == 1
    tried = [row["settings"] for row in measured["candidates"]] + measured["cannot_pay"]
    assert sorted(map(json.dumps, tried)) == sorted(map(json.dumps, QUICK_PLAN.candidates))
    finalists = [row for row in measured["candidates"] if row["ratio"]]
    assert [row["identical"] for row in finalists] == [1.0] * len(finalists)
    lade.config_lade(CONFIG=out)
    settings = {name: value for name, value in content.items() if name not in config.NO_SETTINGS}
    assert ("note" in content) == (settings == {})
    assert settings in ({}, finalists[0]["settings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "missing.jsonl"], "prompts must be"),
        (["--limit", "-1"], "limit must be"),
        (["--max_new_tokens", "2"], "max_new_tokens must be 8 or more"),
        (["--out", "no/such/folder/x.json"], "out must lie in a folder that exists"),
    ],
)
def test_wrong_arguments_end_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["tune", "--model_path", "nothing/is/loaded", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_from_the_command_line(checkpoint, tmp_path, capsys, lade_on):
    out = tmp_path / "bench.json"
    arguments = ["--model_path", checkpoint, "--device", "cpu", "--max_new_tokens", "24", "--limit", "1"]
    assert commands.main(["bench", *arguments, "--trials", "2", "--out", str(out), "--level", "4"]) == 0
    shown, figures = capsys.readouterr().out, json.loads(out.read_text())
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == list(bench.METHODS) == list(figures["methods"])
    assert {row["identical_outputs"] for row in figures["methods"].values()} == {1.0}
    assert figures["methods"]["plain"]["ratio_to_plain"] == {"median": 1.0, "p20": 1.0, "p80": 1.0}
    assert figures["methods"]["lade"]["tokens_per_step"] > 1
    assert figures["methods"]["plain"]["tokens_per_step"] is None
    assert "ngram_size=4" in figures["settings"]["lade"]
    with pytest.raises(SystemExit):
        commands.main(["bench", *arguments, "--methods", "lade,fast"])
    assert "methods must be of plain, static, prompt_lookup, lade, got 'fast'" in capsys.readouterr().err
