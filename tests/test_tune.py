"""`lade tune` and `lade bench`: on a clock that ticks by the tokens of each forward, what they find is known
beforehand."""

import dataclasses
import inspect
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import prompt, tiny_llama
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import lade
from lade import commands, config
from lade.commands import bench, measure
from lade.commands import forward_costs as cost
from lade.commands import progress as progress_module
from lade.commands.forward_costs import cost_at, step_costs
from lade.commands.measure import Method, Run, run_methods
from lade.commands.progress import progress_bar
from lade.commands.prompts import OWN_PROMPTS, as_inputs, read_prompts
from lade.commands.tune import candidates as tried
from lade.commands.tune.candidates import ANCHORS, DEFAULT, TREE, candidates, lookahead_settings, mode_of
from lade.commands.tune.report import KEEP_DEFAULT, NOTHING_PAYS, STOPPED, as_text, settings_file
from lade.commands.tune.search import PLAN, QUICK_PLAN, Findings, Plan, Row, may_pay, noise_of, screen, tune
from lade.drafting import register_drafter
from lade.drafting.tree import TreeDrafter
from lade.models import adapter_for

BUNDLED = Path(lade.__file__).parent.parent / "models" / "stdlib-9m"
SMALL_PLAN = Plan(
    (*lookahead_settings((3, 5), ((1, 3), (7, 7))),),
    block_sizes=(1, 8, 64),
    num_screened=1,
    num_finalists=2,
    choosing_trials=1,
    trials=1,  # on a clock like that, another gives the same
)
PROMPTS = [prompt(20), prompt(30, seed=1)]  # the first to choose by, the second to judge by


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


def settings_with(rows, *settings):
    return [row for row in rows if row.settings in settings]


def test_where_blocks_are_free_the_most_tokens_per_step_win(clock, lade_on):
    model = clock(0.0)
    findings = tune(model, PROMPTS, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
    assert set(findings.seconds.values()) == {1.0}
    assert (findings.hopeless, len(findings.rows), findings.context) == ([], 4 + 2, 25 + 12)
    assert (findings.prompts, findings.trials, findings.is_stopped) == ((1, 1), 1, False)
    timed = [row for row in findings.rows if row.ratio]
    assert len(timed) == SMALL_PLAN.num_finalists + len(ANCHORS)
    for row in timed:  # both ways to the same number: a step of either kind takes a second
        assert row.ratio == dict.fromkeys(("median", "p20", "p80"), row.tokens_per_step)
        assert row.identical == 1
    judged = [row for row in findings.rows if row.is_judged]
    assert len(settings_with(judged, *ANCHORS)) == 2
    default = settings_with(judged, DEFAULT)[0]
    assert default is findings.default
    assert (default.gain["median"], default.is_worth_it()) == (1, False)
    for row in judged:
        assert row.gain["median"] == pytest.approx(row.tokens_per_step / default.tokens_per_step, abs=1e-4)
        if row.settings in ANCHORS:
            continue
        with config.temporary_settings(**measure.NOT_SHARED, **row.settings):  # they were really in force
            model.generate(**PROMPTS[1], max_new_tokens=24)
        assert round(24 / lade.last_stats().steps, 4) == row.tokens_per_step


@pytest.fixture
def poor_default(monkeypatch):
    """The default proposes little."""
    monkeypatch.setattr(config, "_default", dataclasses.replace(config._default, max_block=2, adaptive=False))


def test_what_beats_the_default_is_recommended(clock, lade_on, poor_default, tmp_path):
    findings = tune(clock(0.0), PROMPTS, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
    best = findings.best
    assert best is findings.rows[0]
    assert best.settings in SMALL_PLAN.candidates
    assert best.gain["p20"] > 1.02
    content = settings_file(findings, {})
    assert {name: content[name] for name in best.settings} == best.settings
    text = as_text(findings, tmp_path / "lade.json")
    assert f"{best.gain['median']:.2f} (" in text.split("times the default")[0].splitlines()[-1]
    # Not by what chose it, and not where the default is faster.
    best.is_judged = False
    assert findings.best is None


def test_the_winner_is_chosen_by_other_prompts_than_judge_it(clock, lade_on, poor_default, monkeypatch):
    timed = []

    def spied(model, prompts, *arguments):
        timed.append(prompts)
        return run_methods(model, prompts, *arguments)

    monkeypatch.setattr("lade.commands.tune.search.run_methods", spied)
    prompts = [prompt(20 + number, seed=number) for number in range(5)]
    tune(clock(0.0), prompts, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
    assert [[inputs["input_ids"].shape[1] for inputs in group] for group in timed] == [[20, 22, 24], [21, 23]]
    with pytest.raises(ValueError, match="prompts must be two or more"):
        tune(clock(0.0), prompts[:1], {"max_new_tokens": 24}, SMALL_PLAN, no_progress)


def test_the_best_block_follows_from_the_cost(clock, lade_on):
    """The same model and prompts, on a machine where each token of a block costs a twentieth of a step."""
    chosen = []
    for slope in (0.0, 0.05):
        findings = tune(clock(slope), PROMPTS, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
        chosen.append(
            max(
                (row for row in findings.rows if row.ratio and row.settings not in ANCHORS),
                key=lambda row: row.ratio["median"],
            )
        )
    assert chosen[1].mean_block < chosen[0].mean_block
    assert chosen[1].ratio["median"] < chosen[0].ratio["median"]


def test_what_is_slower_than_plain_is_not_recommended(clock, lade_on, tmp_path, caplog):
    findings = tune(clock(0.5), PROMPTS, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
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


def row_with(settings, gain, ratio=(2.0, 1.9, 2.1), is_judged=True):
    row = Row(settings, mean_block=4.0, tokens_per_step=2.0, predicted=1.9, corrected=1.9, is_judged=is_judged)
    row.gain, row.ratio = (
        values and dict(zip(("median", "p20", "p80"), values, strict=True)) for values in (gain, ratio)
    )
    return row


def test_a_lucky_median_is_not_enough():
    for gain, is_worth_it in (
        (None, False),
        ((1.2, 0.99, 1.3), False),
        ((1.01, 1.005, 1.02), False),
        ((1.1, 1.01, 1.3), True),
    ):
        assert row_with({"LEVEL": 3}, gain).is_worth_it() == is_worth_it
    assert not row_with({"LEVEL": 3}, (1.1, 1.05, 1.2), ratio=(0.9, 0.8, 1.1)).is_worth_it()
    assert not row_with({"LEVEL": 3}, (1.1, 1.05, 1.2), is_judged=False).is_worth_it()
    assert row_with({"LEVEL": 3}, (1.1, 1.05, 1.2)).is_worth_it(noise=1.04)
    assert not row_with({"LEVEL": 3}, (1.1, 1.05, 1.2)).is_worth_it(noise=1.06)
    assert noise_of({"median": 1.0, "p20": 0.8, "p80": 1.1}) == 1.25


def test_the_same_work_is_no_gain(clock, lade_on, monkeypatch):
    """MODE=tree is today's default: however much luck it has with the clock, it is not recommended; nor where all is
    noise."""
    model, calls = clock(0.0), itertools.count()
    original = measure.generate_timed

    def lucky(*arguments, **named):
        tokens, seconds = original(*arguments, **named)
        is_tree = os.environ["USE_LADE"] == "1" and lade.current_config().mode == "tree"
        return tokens, seconds * (0.7 if is_tree else 1 + 0.001 * (next(calls) % 7))

    monkeypatch.setattr(measure, "generate_timed", lucky)
    plan = dataclasses.replace(SMALL_PLAN, candidates=())
    findings = tune(model, PROMPTS, {"max_new_tokens": 24}, plan, no_progress)
    tree = settings_with(findings.rows, TREE)[0]
    assert tree.gain["p20"] > 1.3
    assert tree.is_judged
    assert tree.is_same_work
    assert findings.best is None
    assert "MODE=tree, takes the same steps as the default" in as_text(findings, Path("x.json"))
    assert 1 < findings.noise < 1.02


def test_the_default_is_kept():
    """And what comes of it: the words, the file, and the gain of the best of the others."""
    findings = Findings({}, 10, (1, 1), {1: 0.1}, trials=5)
    findings.rows = [
        row_with(DEFAULT, (1.0, 1.0, 1.0)),
        row_with(TREE, (1.01, 0.98, 1.03)),
        row_with({"LEVEL": 3}, (0.7, 0.6, 0.8)),
    ]
    findings.sort()
    text = as_text(findings, Path("found.json"))
    assert findings.best is None
    assert "Keep the default: no other settings were clearly faster" in text
    assert "The default is 2.00 (1.90 to 2.10) times plain generate()" in text
    assert (
        "The best of the others, MODE=tree, is 1.01 (0.98 to 1.03) times the default, which differed from itself by up to 0%"
        in text
    )
    assert settings_file(findings, {})["note"] == KEEP_DEFAULT


def test_the_better_half_goes_on(lade_on):
    """Where blocks are free, more tokens per step are better, and only those that got far are timed later."""
    plan = dataclasses.replace(SMALL_PLAN, num_finalists=1)
    model, common = tiny_llama(), {"max_new_tokens": 32}
    labels = []
    findings = Findings({}, 10, (2, 0), {1: 1.0})
    screen(
        model, PROMPTS, [*plan.candidates], common, plan, findings, lambda label: labels.append(label) or (lambda x: x)
    )

    def tokens_per_step(settings, prompts):
        steps = 0
        with config.temporary_settings(**measure.NOT_SHARED, **settings):
            for inputs in prompts:
                model.generate(**inputs, **common)
                steps += lade.last_stats().steps
        return round(32 * len(prompts) / steps, 4)

    assert labels == ["screening, prompt 1 of 2", "screening, prompt 2 of 2"]
    found = {str(row.settings): row for row in findings.rows}
    assert len(found) == len(ANCHORS) + len(plan.candidates)
    for settings in ANCHORS:  # never left behind
        assert found[str(settings)].tokens_per_step == tokens_per_step(settings, PROMPTS)
    first = {str(settings): tokens_per_step(settings, PROMPTS[:1]) for settings in plan.candidates}
    both = {str(settings): tokens_per_step(settings, PROMPTS) for settings in plan.candidates}
    went_on = [name for name in both if found[name].tokens_per_step == both[name] != first[name]]
    left = [name for name in both if found[name].tokens_per_step == first[name] != both[name]]
    assert left
    assert min((first[name] for name in went_on), default=9) >= max(first[name] for name in left)


def test_predictions_are_corrected(clock, lade_on, monkeypatch):
    """A drafter whose own work takes time that no forward shows is predicted too well, all its candidates alike."""
    model = clock(0.0)
    original = measure.generate_timed

    def slower(*arguments, **named):
        tokens, seconds = original(*arguments, **named)
        is_window = os.environ["USE_LADE"] == "1" and lade.current_config().uses_window
        return tokens, seconds * (2 if is_window else 1)

    monkeypatch.setattr(measure, "generate_timed", slower)
    prompts = [prompt(20, seed=seed) for seed in (0, 1)]  # a new length would be another trial of the clock's hook
    findings = Findings({}, 10, (2, 0), {1: 1.0})
    screen(model, prompts, [*SMALL_PLAN.candidates], {"max_new_tokens": 32}, SMALL_PLAN, findings, no_progress)
    assert findings.corrections == {"auto": 1.0, "tree": 1.0, "lookahead": 0.5}
    for row in findings.rows:
        assert row.corrected == pytest.approx(row.predicted * (0.5 if "LEVEL" in row.settings else 1), abs=1e-4)


def interrupting(label_to_stop_at, number=1):
    """A progress in which somebody presses Ctrl-C."""

    def progress(label):
        def wrap(items):
            for place, item in enumerate(items):
                if label.startswith(label_to_stop_at) and place == number:
                    raise KeyboardInterrupt
                yield item

        return wrap

    return progress


def test_ctrl_c_keeps_what_was_found(clock, lade_on, poor_default):
    plan = dataclasses.replace(SMALL_PLAN, trials=4)
    for label, has_rows, is_timed, is_judged in (
        ("cost", False, False, False),
        ("screening", False, False, False),
        ("choosing", True, False, False),
        ("judging", True, True, True),
    ):
        number = 0 if label == "choosing" else 2
        findings = tune(clock(0.0), PROMPTS, {"max_new_tokens": 24}, plan, interrupting(label, number))
        assert findings.is_stopped
        assert bool(findings.rows) == has_rows
        assert any(row.ratio for row in findings.rows) == is_timed
        assert any(row.is_judged for row in findings.rows) == is_judged
        text = as_text(findings, Path("found.json"))
        if is_judged:
            assert findings.trials == 2
            assert findings.best is not None
        else:
            assert settings_file(findings, {})["note"] == STOPPED
            assert "Stopped before anything was judged" in text


def test_candidates_of_each_drafter(monkeypatch):
    assert [mode_of(settings) for settings in (DEFAULT, TREE, {"LEVEL": 4}, {"MODE": "x"})] == [
        "auto",
        "tree",
        "lookahead",
        "x",
    ]
    before = candidates(is_quick=False)
    register_drafter("mine", TreeDrafter)
    assert candidates(is_quick=False) == (*before, {"MODE": "mine"})
    monkeypatch.setitem(tried.CANDIDATES, "mine", ([{"MODE": "mine", "MAX_BLOCK": 4}], []))
    assert candidates(is_quick=False) == (*before, {"MODE": "mine", "MAX_BLOCK": 4})
    assert "mine" not in str(candidates(is_quick=True))


def test_progress_in_a_pipe(capsys, monkeypatch):
    time = SimpleNamespace(now=0.0, monotonic=lambda: time.now)
    monkeypatch.setattr(progress_module, "time", time)
    seen = []
    for item in progress_bar("counting")(range(40)):
        seen.append(item)
        time.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert seen == list(range(40))
    assert [lines[0], lines[1], lines[-1]] == [
        "counting: 1 of 40, 1 s",
        "counting: 11 of 40, 11 s",
        "counting: 40 of 40, 40 s",
    ]
    assert len(lines) == 5


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
    findings = tune(clock(9.0), PROMPTS, {"max_new_tokens": 16}, SMALL_PLAN, no_progress)
    assert (findings.best, findings.hopeless) == (None, [*SMALL_PLAN.candidates])
    assert [row.settings in ANCHORS for row in findings.rows] == [True, True]
    text = as_text(findings, Path("found.json"))
    assert "4 candidates were not tried" in text
    assert "Nothing was faster than plain generate()" in text
    assert settings_file(findings, {})["note"] == NOTHING_PAYS


def test_report(clock, lade_on, poor_default):
    findings = tune(clock(0.02), PROMPTS, {"max_new_tokens": 24}, SMALL_PLAN, no_progress)
    text = as_text(findings, Path("found.json"))
    assert max(map(len, text.splitlines())) <= 120
    plot = text.partition("tokens in the block\n")[2].partition("+--")[0]
    assert (plot.count("*"), plot.count("#") > 0, plot.count(".") > 50) == (1, True, True)
    best = findings.best
    assert f"LEVEL={best.settings['LEVEL']} " in text
    assert (
        f"{best.ratio['median']:.2f} ({best.ratio['p20']:.2f} to {best.ratio['p80']:.2f}) times plain generate()"
        in text
    )
    assert "on 1 prompts" in text
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
    plain, a, b = ("0", 5), ("1", 3), ("1", 4)
    turns = ((10, (plain, a, b)), (12, (a, b, plain)), (10, (b, plain, a)), (12, (plain, a, b)))
    assert calls == warm_up + [(length, *how) for length, order in turns for how in order]
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


def test_tune_from_the_command_line(checkpoint, tmp_path, capsys, monkeypatch, lade_on):
    monkeypatch.setenv("LADE_CONFIG", "what was found before.json")
    out = tmp_path / "found.json"
    arguments = ["--quick", "--model_path", checkpoint, "--device", "cpu", "--max_new_tokens", "8", "--limit", "2"]
    assert commands.main(["tune", *arguments, "--out", str(out)]) == 0
    shown, content = capsys.readouterr().out, json.loads(out.read_text())
    assert str(out) in shown
    measured = content["measured"]
    assert (measured["model"], measured["prompts"], measured["arguments"]) == (
        checkpoint,
        {"choosing": 1, "judging": 1},
        {"max_new_tokens": 8, "seed": 0},
    )
    assert measured["environment"]["dtype"] == "float32"
    assert list(measured["step_cost"]) == [str(size) for size in QUICK_PLAN.block_sizes]
    assert measured["step_cost"]["1"] == 1
    tried = [row["settings"] for row in measured["candidates"]] + measured["cannot_pay"]
    assert sorted(map(json.dumps, tried)) == sorted(map(json.dumps, (*ANCHORS, *QUICK_PLAN.candidates)))
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
        (["--limit", "1"], "prompts must be two or more"),
        (["--max_new_tokens", "2"], "max_new_tokens must be 8 or more"),
        (["--out", "no/such/folder/x.json"], "out must lie in a folder that exists"),
    ],
)
def test_wrong_arguments_end_before_any_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["tune", "--model_path", "nothing/loaded", *arguments])
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
