"""`benchmarks/gpu_check.py`: results after every row, whatever ends a stage, and a verdict for each claim. On a CPU,
with stand-ins."""

import dataclasses
import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import ENVIRONMENT, ROOT, beside, forked

from lade.config import current_config
from lade.stats import GenerationStats

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--shape", "tiny"]
SHORT = "speeds"  # the long test takes all
# One of each other kind, before it, in a process that has torch and transformers imported.
WITHOUT_PARENT = ("environment", "kernel", "hazard_eviction", "hazard_memory")
CHILD = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv = ["gpu.child", {stage!r}, "--out", {out!r}, "--device", "cpu", "--shape", "tiny"]
runpy.run_module("gpu.child", run_name="__main__")
"""


def check(folder, *options, **environment):
    """Of a run: how it ended, what it printed, and its summary."""
    done = subprocess.run(
        [*COMMAND, "--out", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | environment,
    )
    path = Path(folder, "summary.json")
    return done, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@beside
def short_run():
    folder = tempfile.mkdtemp()
    for stage in WITHOUT_PARENT:
        done = forked(CHILD.format(folder=str(ROOT / "benchmarks"), stage=stage, out=folder))
        assert done.returncode == 0, done.stderr
    return (folder, *check(folder, "--only", SHORT))


def states(summary):
    return {row["stage"]: row["status"] for row in summary["stages"]}


def test_stages_run_on_a_cpu(short_run):
    folder, done, summary = short_run
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(summary) == {SHORT: "ok"}
    assert summary["is_stand_in"]
    assert summary["environment"]["torch"]
    assert all(row["rows"] and row["first_error"] is None for row in summary["stages"])
    rows = json.loads(Path(folder, "hazard_memory.json").read_text(encoding="utf-8"))["rows"]
    assert rows["capture"]["passed"]
    assert rows["capture"]["captured_steps"] > 0  # the stand-in ran
    assert "stood in for: no memory" in rows["capture"]["cuda_graph_reason"]
    eviction = json.loads(Path(folder, "hazard_eviction.json").read_text(encoding="utf-8"))["rows"]["captures"]
    assert (eviction["passed"], eviction["kept"]) == (True, 3)  # of four
    kernel = json.loads(Path(folder, "kernel.json").read_text(encoding="utf-8"))["rows"]
    assert [row["passed"] for row in kernel.values()] == 5 * [True]  # two blocks, soft cap, sinks, padding
    speeds = json.loads(Path(folder, "speeds.json").read_text(encoding="utf-8"))["rows"]
    methods = ["tree", "plain", "lookahead", "lookahead, 5 15 15"]
    assert list(speeds) == [*methods, "tree, by parts", *(f"{name}, device and host" for name in methods)]
    assert len({speeds[name]["mean_block_tokens"] for name in methods[1:]}) == 3
    assert all(speeds[f"{name}, device and host"]["device_milliseconds"] > 0 for name in methods)
    assert {row["verdict"] for row in summary["claims"]} == {"unknown"}  # no time of a stand-in decides anything
    page = Path(folder, "summary.md").read_text(encoding="utf-8")
    assert "| kernel right | unknown |" in page
    assert "shows that the command runs, and nothing about a GPU" in page


def test_a_second_run_goes_on(short_run):
    """What was right is not repeated; a stage that was not has its rows still."""
    folder, _, _ = short_run
    before = Path(folder, "speeds.json").stat().st_mtime_ns
    done, summary = check(folder, "--only", SHORT)
    assert done.returncode == 0
    assert Path(folder, "speeds.json").stat().st_mtime_ns == before
    assert states(summary) == {SHORT: "ok"}
    other, _ = check(folder, "--only", SHORT, "--device", "cuda", "--shape", "tiny")
    assert other.returncode != 0
    assert "--out must be a folder of a run with the same --device and --shape" in other.stderr


def test_a_stage_that_does_not_fit_is_skipped(tmp_path):
    done, summary = check(tmp_path, "--only", "costs,static", "--seconds", "1")
    assert done.returncode == 0
    assert states(summary) == {"costs": "skipped", "static": "skipped"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "kernel,magic"), "--only takes names of .* got 'magic'"),
        (("--seconds", "0"), "--seconds must be more than 0, got 0.0"),
    ],
)
def test_refuses(options, message, tmp_path):
    done, summary = check(tmp_path / "none", *options)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert summary is None


@pytest.fixture
def parent(monkeypatch):
    """The command's own modules, in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_check")


STAGE = """
import os, signal, sys, time
from pathlib import Path
from gpu.record import Record
what, out = sys.argv[1], Path(sys.argv[2])
record = Record(out / f"{what}.json")
record.measure("first", lambda: {"passed": True, "cuda_graph_reason": "none here"})
if what == "kernel":
    record.measure("second", lambda: 1 / 0)
    record.measure("third", lambda: {"passed": True})
if what == "modes":
    signal.pause()
if what == "speeds":
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
if what == "costs":
    raise MemoryError("no memory")
"""


@pytest.fixture
def run_stages(parent, monkeypatch, tmp_path):
    """The command with stages that are quickly done: one that hangs, one whose row fails, one that raises, one that is
    right."""
    (tmp_path / "child.py").write_text(STAGE, encoding="utf-8")
    program = [sys.executable, str(tmp_path / "child.py")]
    monkeypatch.setattr(parent, "child_command", lambda stage, args: [*program, stage.name, str(args.out)])
    before = signal.getsignal(signal.SIGTERM)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *COMMAND[2:], "--out", str(tmp_path / "out"), *options])
        status = parent.main()
        return status, json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))

    yield run
    signal.signal(signal.SIGTERM, before)


def test_what_goes_wrong_ends_one_stage_alone(run_stages, parent, monkeypatch, tmp_path):
    """Rows that are done stay, in every case; the status says that a check failed."""
    monkeypatch.setattr(parent, "limit_of", lambda stage, *_: 8 if stage.name == "modes" else 60)
    status, summary = run_stages("--only", "modes,kernel,costs,static")
    assert status == 1
    assert states(summary) == {"modes": "timeout", "kernel": "failed", "costs": "failed", "static": "ok"}
    found = {row["stage"]: row for row in summary["stages"]}
    assert found["kernel"]["first_error"] == "second: ZeroDivisionError: division by zero"
    assert found["costs"]["first_error"] == "MemoryError: no memory"
    assert found["modes"]["rows"] == 1
    assert found["static"]["reasons"] == ["cuda_graph_reason: none here"]
    rows = json.loads((tmp_path / "out" / "kernel.json").read_text(encoding="utf-8"))["rows"]
    assert list(rows) == ["first", "second", "third"]  # the stage went on
    claims = {row["claim"]: row["verdict"] for row in summary["claims"]}
    assert claims["kernel right"] == "NO"
    assert claims["capture right"] == "unknown"
    assert claims["every mode gives plain generate()'s tokens"] == "unknown"  # what has run of it was right


def test_stopped(run_stages):
    """SIGTERM ends the stage under way, and what there is by then is written."""
    status, summary = run_stages("--only", "speeds,static")
    assert status == 130
    assert states(summary) == {"speeds": "stopped"}
    assert summary["stages"][0]["rows"] == 1
    status, summary = run_stages("--only", "static")  # the next run goes on
    assert (status, states(summary)) == (0, {"speeds": "stopped", "static": "ok"})


def test_verdicts(parent):
    """Each claim with figures that hold, that do not, and without any."""
    from gpu import summary

    rows = {
        "costs": {
            "kernel, context 512, 56 tokens": {"to_floor": 1.2, "milliseconds": {"median": 5.0}},
            "captured, context 512, 56 tokens": {"milliseconds": {"median": 5.0}},
            "eager, context 512, 56 tokens": {"milliseconds": {"median": 20.0}},
            "kernel, context 4096, 56 tokens": {"milliseconds": {"median": 6.0}},
            "captured, context 4096, 56 tokens": {"milliseconds": {"median": 5.0}},
        },
        "compile": {
            "kernel, context 512, 56 tokens": {"milliseconds": {"median": 5.0}, "first_call_seconds": 0.4},
            "compiled kernel, context 512, 56 tokens": {"milliseconds": {"median": 4.0}, "first_call_seconds": 61.2},
        },
        "bundled": {"bfloat16, lade": {"tokens_per_second": {"median": 300.0}}},
        "bundled_static": {"bfloat16, static": {"tokens_per_second": {"median": 250.0}}},
        "speeds": {
            "tree": {"milliseconds_per_step": {"median": 7.0}},
            "plain": {"milliseconds_per_step": {"median": 20.0}},
            "lookahead, 5 15 15": {"milliseconds_per_step": {"median": 21.0}},
        },
        "static": {"static": {"milliseconds_per_step": {"median": 6.0}}},
        "modes": {"tree": {"passed": True, "captured_steps": 3}},
        **{name: {"row": {"passed": True}} for name in (*summary.HAZARDS, "tests", "mixed_lengths")},
        "kernel": {"one": {"passed": True, "used_kernel": True}, "two": {"passed": False, "used_kernel": True}},
    }
    found = {row["claim"]: row["verdict"] for row in summary.verdicts(rows, is_stand_in=False)}
    assert found == {
        "every mode gives plain generate()'s tokens": "yes",
        "kernel right": "NO",
        "capture right": "yes",
        "the GPU's own tests pass": "yes",
        "mixed lengths are captured once per shape and capacity": "yes",
        "7B: a step of 56 tokens at most 1.3 times the bytes floor": "yes",
        "7B: capturing pays": "yes",
        "7B: the kernel pays at 4,096 tokens": "NO",
        "7B: COMPILE=1 pays in a graph": "yes",
        "7B: a step of lookahead (5, 15, 15) at most one of eager generate()": "NO",
        "real text: tree captured >= 1.5x static + compile": "NO",
        "7B: tree >= 2x static + compile at 2.5 tokens per step": "yes",
    }
    by = {row["claim"]: row["by"] for row in summary.verdicts(rows, is_stand_in=False)}
    assert by["7B: COMPILE=1 pays in a graph"].endswith("first call 61 s")
    assert {row["verdict"] for row in summary.verdicts({}, is_stand_in=False)} == {"unknown"}
    timed = {row["claim"]: row["verdict"] for row in summary.verdicts(rows, is_stand_in=True)}
    assert timed["7B: capturing pays"] == "unknown"
    assert timed["capture right"] == "yes"


def test_every_reason_is_told(parent):
    from gpu import summary

    reasons = {field.name for field in dataclasses.fields(GenerationStats) if field.name.endswith("_reason")}
    assert set(summary.REASONS) == reasons


def test_a_kernel_that_failed_is_not_taken_for_right(parent, monkeypatch):
    """Its problems are stored by the device of its tensors, which has an index: "cuda" is another one."""
    checks = importlib.import_module("gpu.checks")
    problems = {torch.zeros(1, device="cpu:0").device: "the kernel failed"}
    monkeypatch.setattr(checks.kernels, "kernel_problem", lambda device, dtype: problems.get(device))
    run = SimpleNamespace(device="cpu:0", pick=lambda real, tiny: tiny)
    assert torch.device(run.device) not in problems
    row = checks.kernel_row(run, (4, 2, 16), 12, torch.float32)
    assert (row["passed"], row["problem"]) == (False, "the kernel failed")


def test_memory_runs_out_in_the_capture_itself(parent, monkeypatch, tmp_path):
    """On a GPU. The warm-ups before it have memory."""
    hazards = importlib.import_module("gpu.hazards")
    is_capturing, asked, calls = [False], [], iter(range(100))

    def capture(forward):
        is_capturing[0] = next(calls) % 3 == 2
        return forward()

    class Stop(Exception):
        pass

    def generate(model):
        for _ in range(3):
            hazards.static_shapes.capture(lambda: "logits")
        raise Stop

    monkeypatch.setattr(hazards, "tiny_model", lambda run: None)
    monkeypatch.setattr(hazards, "plain", lambda model: None)
    monkeypatch.setattr(hazards, "generate", generate)
    monkeypatch.setattr(hazards.static_shapes, "capture", capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: asked.append(shape))
    with pytest.raises(Stop):
        hazards.without_memory(SimpleNamespace(device="cuda", is_stand_in=False))
    assert asked == [(2**50,)]


def test_threads_capture_until_the_last_has_ended(parent):
    """Settings are the process's: a thread that ends must not put them back for the others."""
    hazards = importlib.import_module("gpu.hazards")
    begun, ended = threading.Event(), threading.Event()

    def first():
        begun.wait(5)
        ended.set()

    def second():
        begun.set()
        ended.wait(5)
        time.sleep(0.1)  # until the first one's thread has ended
        return current_config().cuda_graph

    before = current_config()
    assert hazards.in_threads([first, second]) == [None, True]
    assert current_config() == before


def test_the_parent_imports_no_torch():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_check; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "benchmarks")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.long
def test_all_stages_run_on_a_cpu(tmp_path):
    done, summary = check(tmp_path, "--seconds", "3000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(states(summary).values()) == {"ok"}
    claims = {row["claim"]: row["verdict"] for row in summary["claims"]}
    assert claims["capture right"] == claims["every mode gives plain generate()'s tokens"] == "yes"
