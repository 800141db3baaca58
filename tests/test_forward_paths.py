"""What a path of a call's blocks imports, and the gate that each faster way has to pass."""

import torch
from support import forked

from lade.common.trial import NotUsed, Trial, in_short


def test_a_call_on_a_cpu_imports_nothing_for_gpus():
    program = """
import sys, torch, lade
from support import prompt, tiny_llama
lade.augment_all()
tiny_llama().generate(**prompt(), max_new_tokens=12)
assert lade.last_stats().fallback_reason is None
print([name for name in sys.modules if name.startswith("lade.forward.cuda")])
"""
    found = forked(program, USE_LADE="1")
    assert found.stdout.strip() == "[]", found.stderr


# The gate.


def test_a_difference_is_remembered():
    trial, calls = Trial(), []

    def compare():
        calls.append(None)
        return "it differs"

    assert [trial.reason("a", compare) for _ in range(3)] == ["it differs"] * 3
    assert len(calls) == 1
    assert trial.reason("b", lambda: None) is None
    assert trial.refusal == "it differs"


def test_an_error_is_a_reason_unless_memory_ran_out():
    trial = Trial()

    def fail(error):
        raise error

    assert trial.reason("a", lambda: fail(NotUsed("not here"))) == "not here"
    assert trial.reason("b", lambda: fail(ValueError("one\ntwo\nthree"))) == "ValueError: one two"
    assert "out of memory" in trial.reason("c", lambda: fail(torch.OutOfMemoryError("CUDA out of memory")))
    assert trial.reasons.keys() == {"a", "b"}
    assert trial.reason("c", lambda: None) is None
    assert trial.refuse("c", RuntimeError("later")) == "RuntimeError: later"
    assert trial.reason("c", lambda: None) == "RuntimeError: later"
    assert len(in_short(ValueError("x" * 999))) == 300
