"""The benchmark commands run, and what they count is right. Figures are not looked at: other machines, other
figures."""

import argparse
import json
import os
import signal
import sys

import pytest
import torch
from support import note_calls, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

import lade
from lade import switch
from lade.forward.cuda import kernel_path
from lade.stats import GenerationStats


@pytest.fixture
def main(module, monkeypatch):
    """Runs a benchmark's main() with arguments."""

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        module(name).main()

    return run


@pytest.fixture
def command(main, module, lade_on, checkpoint, monkeypatch, capsys):
    """`main`, by default on a random model. Returns what its last line says."""
    monkeypatch.setattr(module("harness"), "BUNDLED", checkpoint)

    def run(name: str, *arguments: str) -> dict:
        main(name, *arguments)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


SMALL = ("--limit", "2", "--max_new_tokens", "12", "--dtype", "float32")


def test_decode(command, tmp_path):
    out = tmp_path / "figures.json"
    options = ("--limit", "1", "--trials", "1", "--max_new_tokens", "40")
    figures = command("decode", *SMALL, *options, "--out", str(out))
    assert figures == json.loads(out.read_text(encoding="utf-8"))
    methods = figures["methods"]
    assert list(methods) == ["plain", "prompt_lookup", "lade", "lade_kept", "lookahead"]  # by default, on a CPU
    assert methods["lade"]["identical_outputs"] == methods["lade_kept"]["identical_outputs"] == 1.0
    assert methods["lade"]["tokens_per_step"] > 1


@pytest.mark.parametrize("trace", ["retries", "sessions"])
def test_repeated(command, trace):
    """A replay takes the steps of generate(), also with texts of earlier calls."""
    arguments = ("--trace", trace, "--limit", "1", "--max_new_tokens", "20", "--sizes", "64", "--loop")
    figures = command("repeated", *arguments, "--temperature", "0")["replays"]["q=64"]
    assert figures["steps"] == figures["steps_of_loop"]
    assert figures["texts"]["prompts"] == (3 if trace == "retries" else 4)
    assert figures["steps"]["texts"] <= figures["steps"]["warm"] < figures["steps"]["cold"]


def test_replay(command, tmp_path):
    arguments = ("--limit", "2", "--max_new_tokens", "12", "--temperatures", "0.5", "--sizes", "6")
    out = tmp_path / "first.json"
    first = command("replay", *arguments, "--records", str(tmp_path), "--out", str(out))
    assert len(first["replays"]) == 4  # two sets, cold and warm
    again = command("replay", *arguments, "--records", str(tmp_path), "--against", str(out), "--loop", "2")
    for key, figures in again["replays"].items():
        assert figures["each"] == first["replays"][key]["each"]
        assert figures["prompts"] == figures["loops"] or figures["ratio"][0] == 1.0
        assert "warm" in key or figures["steps"] == figures["steps_of_loop"] > 0
    options = ("--modes", "lookahead,logitspec", "--sizes", "8", "--varied", "1", "--out", str(out))
    more = command("replay", *arguments, *options)
    new = set(more["replays"]) - set(first["replays"])
    assert len(new) == 2 * 3  # of the window cold alone: nothing of it is kept
    assert all(more["replays"][key]["prompts"] <= 1 for key in new)
    assert json.loads(out.read_text())["replays"].keys() == first["replays"].keys() | new


def test_a_benchmark_that_is_stopped_tells_what_it_has(command, module, monkeypatch, tmp_path, capsys):
    """By Ctrl-C or by SIGTERM: the rows that are complete are written, and the program ends with 130."""
    out, step_cost = tmp_path / "figures.json", module("step_cost")
    monkeypatch.setattr(step_cost, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(step_cost, "part_costs", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        command("step_cost", *SMALL, "--trials", "1", "--tokens", "1,4", "--contexts", "20", "--out", str(out))
    assert ended.value.code == 130
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["stopped"]
    assert [row["tokens"] for row in figures["forward"]] == [1, 4]


def test_only_complete_trials_count(command, module, monkeypatch):
    decode, calls = module("decode"), []
    generate = decode.generate

    def stop_later(*args, **arguments):
        calls.append(args[2])
        if calls.count("lade") == 4:  # two to warm up, one of the first trial
            raise KeyboardInterrupt
        generate(*args, **arguments)

    monkeypatch.setattr(decode, "generate", stop_later)
    figures = command("decode", *SMALL, "--limit", "1", "--trials", "3", "--methods", "lade")
    assert figures["trials"] == 1
    assert figures["methods"]["lade"]["identical_outputs"] == 1.0


def test_what_is_kept_is_forgotten_before_each_trial(command, module, monkeypatch):
    """Of the same memory all calls of a trial, and no trial knows what an earlier one has learned."""
    decode = module("decode")
    rows = note_calls(monkeypatch, decode, "generate", lambda model, inputs, name, *_, **__: (name, len(decode.kept)))
    command("decode", *SMALL, "--methods", "plain,lade_kept", "--trials", "2")
    assert [count > 0 for name, count in rows if name == "lade_kept"][-4:] == [False, True, False, True]


def test_the_forward_that_is_asked_for(module, monkeypatch):
    parts, parser = module("parts"), argparse.ArgumentParser()
    parts.add_forward_arguments(parser)
    found = GenerationStats(reasons={"kernel": "no kernel", "graph": "no graph"})
    monkeypatch.setattr(switch, "_default", switch.current_config())  # and put it back
    for arguments, broken in (
        ("", set()),
        ("--use_flash 0 --cuda_graph 1 --pack 0", {"no graph", "no kernel"}),
        ("--use_flash 1 --cuda_graph auto --compile", {"no kernel"}),
    ):
        parts.set_up_forward(parser.parse_args(arguments.split()))
        assert parts.broken_wishes(found) == broken
    assert switch.current_config().compile
    for num_packed in (0, 43):  # one product of torch's own breaks no wish
        found = GenerationStats(reasons={"packed": "a product differs"}, packed_weights=num_packed)
        with lade.enabled(PACK=1):
            assert bool(parts.broken_wishes(found)) == (not num_packed)


def test_decode_in_batches(command):
    figures = command("decode", "--batch", "2", *SMALL, "--limit", "3", "--trials", "1")
    # transformers' prompt lookup takes one prompt
    assert list(figures["methods"]) == ["plain", "lade", "lade_kept", "lookahead"]
    assert figures["prompts"] == 2  # full batches only
    assert figures["methods"]["lade"]["identical_outputs"] == 1.0
    assert figures["methods"]["lade"]["tokens_per_step"] > 1


def test_batches_are_padded_on_the_left_and_cut_at_their_ends(module):
    decode = module("decode")
    prompts = [{"input_ids": torch.tensor([row])} for row in ([5, 6, 7], [8], [9, 9], [4, 4, 4, 4], [3, 3, 3, 3, 3])]
    first, second = decode.batches(prompts, 2, 0)
    assert first["input_ids"].tolist() == [[0, 8], [9, 9]]
    assert first["attention_mask"].tolist() == [[0, 1], [1, 1]]
    assert second["input_ids"].tolist() == [[0, 5, 6, 7], [4, 4, 4, 4]]
    assert [decode.without_padding(row, {2}) for row in ([5, 6, 2, 0, 0], [5, 6])] == [[5, 6, 2], [5, 6]]


def test_decode_with_random_weights_reports_no_speed(command):
    figures = command("decode", "--shape", "tiny", "--context", "30", *SMALL, "--batch", "2", "--trials", "1")
    assert list(figures["steps"]) == ["plain", "lade", "lookahead"]
    assert figures["steps"]["plain"]["mean_block_tokens"] == 1
    assert figures["steps"]["lade"]["mean_block_tokens"] > 1
    assert "methods" not in figures
    assert "tokens_per_second" not in json.dumps(figures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "plain,magic"], "--methods takes names of .* got 'magic'"),
        (["--methods", "prompt_lookup", "--batch", "4"], "--methods prompt_lookup needs --batch 1"),
        (["--limit", "2", "--batch", "3"], "--batch must be at most the number of prompts, 2, got 3"),
    ],
)
def test_decode_refuses(arguments, message, main):
    with pytest.raises(SystemExit, match=message):
        main("decode", *arguments)


SIZES = {"1b": 1_235_814_400, "7b": 6_738_415_616, "8b": 8_030_261_248, "13b": 13_015_864_320, "70b": 68_976_648_192}


@pytest.mark.parametrize(("shape", "parameters"), SIZES.items(), ids=SIZES)
def test_shapes_are_the_real_ones(shape, parameters, module):
    model = module("shapes").random_model(shape, "meta", torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


class WorkClock(TorchDispatchMode):
    """A clock that goes by what is computed: one second an operation, and one each time it is read."""

    seconds = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seconds += 1
        return function(*args, **kwargs or {})

    def perf_counter(self):
        self.seconds += 1
        return self.seconds


def test_step_cost(command, module, monkeypatch, modes_of_tests):
    monkeypatch.setattr(module("step_cost"), "LEAST_SECONDS", 0.0)
    with WorkClock() as clock:
        monkeypatch.setattr(module("parts"), "time", clock)
        options = "--mode lookahead --trials 2 --tokens 1,4 --contexts 20,40 --level 4 --guess 3"
        figures = command("step_cost", "--shape", "tiny", *SMALL, *options.split())
    assert [(row["context"], row["tokens"]) for row in figures["forward"]] == [(20, 1), (20, 4), (40, 1), (40, 4)]
    assert figures["forward"][0]["ratio_to_one"] == 1
    shares = {part: row["share"] for part, row in figures["parts"].items()}
    assert list(shares) == ["propose", "lay out", "forward", "verify", "commit", "learn", "other"]
    assert min(shares.values()) > 0  # every part was found
    assert max(shares, key=shares.get) == "forward"
    assert abs(sum(shares.values()) - 1) < 0.2  # medians of two trials


def test_plain_torch_is_not_timed_in_the_kernels_place(module, lade_on, monkeypatch):
    step_cost, rows = module("step_cost"), []
    args = argparse.Namespace(contexts=[20], tokens=[4], batch=1, trials=1, max_new_tokens=12)
    monkeypatch.setattr(step_cost, "LEAST_SECONDS", 0.0)
    with lade.enabled(USE_FLASH=1):
        step_cost.forward_costs(tiny_llama(), args, lambda: None, rows.append)
        monkeypatch.setattr(kernel_path, "kernel_problem", lambda device, dtype: "the kernel failed")
        with pytest.raises(SystemExit, match="the kernel failed"):
            step_cost.forward_costs(tiny_llama(), args, lambda: None, rows.append)
    assert len(rows) == 1


def test_known_acceptance(command):
    options = "--tokens_per_step 3 --max_new_tokens 200 --context 8 --trials 1 --prompts 1"
    figures = command("known_acceptance", "--shape", "tiny", "--dtype", "float32", *options.split())
    methods = figures["methods"]
    assert all(row["identical"] == 1 for row in methods.values())
    for name in ("lade 3", "unpacked 3"):
        assert abs(methods[name]["tokens_per_step"] - 3) < 0.5


def test_recurrent(command):
    pytest.importorskip("transformers.models.qwen3_5")
    options = "--tokens_per_step 2 --max_new_tokens 24 --context 8 --trials 1 --prompts 1"
    figures = command("recurrent", "--shape", "tiny", "--dtype", "float32", *options.split())
    assert all(row["identical"] == 1 for row in figures["methods"].values())
    assert figures["methods"]["lade 2"]["tokens_per_step"] > 1
    assert list(figures["milliseconds"]) == ["plain", "1", "2", "4", "8", "16"]
    assert "not supported with stateful models" in figures["prompt_lookup"]


def test_half_precision(command):
    options = ("--dtype", "bfloat16", "--methods", "plain,lade", "--temperature", "0.7")
    figures = command("half_precision", *SMALL, *options)
    assert list(figures["methods"]) == ["plain", "lade"]
    assert figures["methods"]["plain"]["identical"] == 2
    assert all(row["same_in_every_trial"] for row in figures["methods"].values())


def test_edits(command, tmp_path):
    row = {"prompt": "def f(a):\n", "canonical_solution": "    return a\n", "entry_point": "f"}
    path = tmp_path / "functions.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    figures = command("edits", *SMALL, "--set", str(path))
    assert [row["edit"] for row in figures["rows"]] == ["rename", "argument", "docstring", "again"]
    for method in ("prompt_lookup", "lade", "lade_predicted"):
        assert figures["all"][method]["identical"] == 4
    assert all(row["lade_predicted"]["steps"] <= 12 for row in figures["rows"])


def test_plots(main, tmp_path):
    pytest.importorskip("matplotlib")
    main("plots", "--out", str(tmp_path))
    drawn = {path.stem for path in tmp_path.iterdir()}
    replay = "cpu-epyc-qwen-0.5b-bfloat16-greedy-replay"
    assert {"cpu-epyc-bfloat16-sampled", replay, f"{replay}-acceptance"} <= drawn
