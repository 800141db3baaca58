"""`benchmarks/gpu_check.py`: its result after every stage, whatever ends a stage, and a verdict for each question. On a
CPU, with stand-ins."""

import json
import signal
import sys

import numpy as np
import pytest
import torch
from support import ROOT, python

from lade.forward.cuda import proof


def check(path, *options):
    """Of a run: how it ended, and the file it wrote."""
    command = [str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--out", str(path), *options]
    done = python(*command, OMP_NUM_THREADS="1")
    return done, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def test_stages_run_on_a_cpu(tmp_path):
    done, found = check(tmp_path / "gpu.json", "--only", "environment,out_of_memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {stage["status"] for stage in found["stages"].values()} == {"ok"}
    assert found["is_stand_in"]
    assert found["environment"]["torch"] == torch.__version__
    memory = found["stages"]["out_of_memory"]["rows"]["without_memory"]
    assert memory["passed"]
    assert memory["captured_steps"] > 0  # the stand-in ran
    assert "stood in for: no memory" in memory["reason"]
    assert set(found["verdicts"].values()) == {None}


@pytest.fixture
def parent(module):
    """The command, in this process."""
    return module("gpu_check")


STAGE = """
import json, os, signal, sys
print(json.dumps({"row": "first", "passed": True, "captured_steps": 3}), flush=True)
what = sys.argv[1]
if what == "kernel":
    print(json.dumps({"row": "second", "passed": False, "error": "wrong"}))
    print(json.dumps({"row": "third", "passed": True}))
if what == "modes":
    signal.pause()
if what == "speed":
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
if what == "recording":
    raise MemoryError("no memory")
"""


@pytest.fixture
def run_stages(parent, monkeypatch, tmp_path):
    """The command with stages that are quickly done: one that hangs, one whose row fails, one that raises, one that is
    right."""
    (tmp_path / "child.py").write_text(STAGE, encoding="utf-8")
    monkeypatch.setattr(parent, "command_of", lambda stage, args: [sys.executable, str(tmp_path / "child.py"), stage])
    before = signal.getsignal(signal.SIGTERM)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out.json"), *options])
        return parent.main(), json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    yield run
    signal.signal(signal.SIGTERM, before)


def test_what_goes_wrong_ends_one_stage_alone(run_stages, parent, monkeypatch):
    """Rows that are done stay, in every case; the status says that a check failed."""
    monkeypatch.setitem(parent.STAGES, "modes", 2)
    status, found = run_stages("--only", "modes,kernel,recording,tests")
    assert status == 1
    states = {name: stage["status"] for name, stage in found["stages"].items()}
    assert states == {"modes": "timeout", "kernel": "failed", "recording": "failed", "tests": "ok"}
    assert found["stages"]["kernel"]["error"] == "second: wrong"
    assert found["stages"]["recording"]["error"] == "MemoryError: no memory"
    assert list(found["stages"]["modes"]["rows"]) == ["first"]
    assert list(found["stages"]["kernel"]["rows"]) == ["first", "second", "third"]  # the stage went on
    verdicts = found["verdicts"]
    assert verdicts["the kernel is right"] is verdicts["CUDA graphs are right"] is False
    assert verdicts["every mode gives plain generate()'s tokens"] is None  # what has run of it was right
    assert verdicts["the GPU's own tests pass"] is True


def test_stopped(run_stages):
    """SIGTERM ends the stage under way, and what there is by then was written."""
    status, found = run_stages("--only", "tests,speed,kernel")
    assert status == 130
    assert list(found["stages"]) == ["tests"]


def test_verdicts(parent):
    """Each with figures that hold, and that do not."""
    right = {"status": "ok", "rows": {"one": {"passed": True, "captured_steps": 3, "used_kernel": True}}}
    stages = dict.fromkeys(("modes", "kernel", "tests", *parent.HAZARDS), right)
    stages["speed"] = {"rows": {}}
    for name, time_ in (("captured, kernel", 7.0), ("captured", 6.0), ("eager", 20.0), ("plain", 20.0)):
        stages["speed"]["rows"][name] = {"milliseconds_per_step": {"median": time_}}
    stages["text"] = {
        "rows": {name: {"milliseconds_per_token": {"median": time_}} for name, time_ in (("lade", 3.0), ("plain", 8.0))}
    }
    assert list(parent.verdicts(stages, is_stand_in=False).values()) == [
        *(True, True, True, True),
        *(False, True, True, True),
        None,  # a static cache was not measured
    ]
    assert list(parent.verdicts(stages, is_stand_in=True).values()) == [True] * 3 + [None] * 6
    assert set(parent.verdicts({}, is_stand_in=False).values()) == {None}
    right["rows"]["one"] |= {"captured_steps": 0, "used_kernel": False}  # nothing ran of what is claimed
    assert list(parent.verdicts(stages, is_stand_in=False).values())[:3] == [True, None, None]


def test_what_has_passed_is_stored(parent, module, monkeypatch, tmp_path):
    """Both, or what has failed; what is right and slower is not switched on."""
    right = dict.fromkeys(parent.verdicts({}, is_stand_in=False), True)
    assert parent.proof_of(right) == {"graph": True, "kernel": True}
    assert parent.proof_of(right | {"the kernel is right": False}) == {"graph": True, "kernel": False}
    assert parent.proof_of(right | {"7B: capturing makes a step faster": False}) == {"graph": False, "kernel": True}
    assert parent.proof_of(right | {"CUDA graphs are right": None}) == {}
    assert parent.proof_of(right | {"CUDA graphs are right": None, "the kernel is right": False}) == {"kernel": False}
    monkeypatch.setattr(proof, "folder", lambda: tmp_path)
    found = '{"graph": true, "kernel": false}'
    monkeypatch.setattr(sys, "argv", ["stages", "proof", "--device", "cpu", "--proof", found])
    assert not proof.is_proven(torch.device("cpu"), "graph")
    module("gpu.stages").main()
    assert proof.is_proven(torch.device("cpu"), "graph")
    assert not proof.is_proven(torch.device("cpu"), "kernel")


def test_a_kernel_that_failed_is_not_taken_for_right(module, monkeypatch):
    """Its problems are stored by the device of its tensors, which has an index: "cuda" is another one."""
    stages = module("gpu.stages")
    problems = {torch.zeros(1, device="cpu:0").device: "the kernel failed"}
    monkeypatch.setattr(stages.kernels, "kernel_problem", lambda device, dtype: problems.get(device))
    row = stages.kernel_row("cpu:0", (4, 2, 16), 12, torch.float32)
    assert (row["passed"], row["problem"]) == (False, "the kernel failed")


def test_the_parent_imports_no_torch():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_check; print('torch' in sys.modules)"
    assert python("-c", code, str(ROOT / "benchmarks")).stdout.strip() == "False"


@pytest.mark.long
def test_all_stages_run_on_a_cpu(tmp_path):
    done, found = check(tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = found["stages"]
    assert {stage["status"] for stage in stages.values()} == {"ok"}
    eviction = stages["eviction"]["rows"]["captures_with_eviction"]
    assert eviction["passed"]
    assert 0 < eviction["kept"] < 4
    assert [row["passed"] for row in stages["kernel"]["rows"].values()] == 5 * [True]
    speed = stages["speed"]["rows"]
    assert speed["captured"]["captured_steps"] > 0 == speed["eager"]["captured_steps"]
    # A step's time is the difference of two calls' times: on a busy machine it has any sign.
    assert all(np.isfinite(row["milliseconds_per_step"]["median"]) for row in speed.values())
    verdicts = list(found["verdicts"].values())
    assert (verdicts[0], verdicts[2]) == (True, True)
    assert set(verdicts[3:]) == {None}  # no time of a stand-in decides anything
