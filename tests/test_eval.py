"""`lade eval`: what it asks, how it scores right and wrong answers, what it reports, and that a stopped run is gone on
with."""

import json
import os
import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from support import ENVIRONMENT, ROOT, beside
from support.processes import AtTerminal
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade import commands
from lade.commands import eval as lade_eval
from lade.commands.eval.data import BadData, load_questions
from lade.commands.eval.methods import Answer, Answerer
from lade.commands.eval.programs import Limits, Program, code_in, program_of, run_program
from lade.commands.eval.quality import NoQuality, exact_match, final_number, scorer_for
from lade.commands.eval.report import markdown, summarize
from lade.commands.eval.results import Results
from lade.commands.eval.tasks import TASKS, Question
from lade.drafting import memory
from lade.state import forget_all

BUNDLED = ROOT / "models" / "stdlib-9m"
LIMITS = Limits(seconds=100, megabytes=512)

# Rows in the published layouts.
ROWS = {
    "mtbench": [
        {"question_id": 1, "category": "coding", "turns": ["What does os.path.join do?", "And os.path.split?"]},
        {"question_id": 2, "category": "writing", "turns": ["Write a function.", "Make it shorter."]},
    ],
    "specbench": [
        {"question_id": 7, "category": "qa", "turns": ["What does json.loads do?"]},
        {"question_id": 9, "category": "qa", "turns": ["What is the module json for?"], "reference": ["parsing"]},
        {"question_id": 8, "category": "rag", "turns": ["What are the arguments of shutil.copytree?"]},
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef root(x):\n    """ The square root of x, or None.\n    """\n',
            "entry_point": "root",
            "canonical_solution": "    return math.sqrt(helper(x)) if x >= 0 else None\n",
            "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(-1) is None\n",
        },
        {
            "task_id": "HumanEval/1",
            "prompt": 'def add(a, b):\n    """ Return the sum."""\n',
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        },
    ],
    "mbpp": [
        {
            "task_id": 11,
            "text": "Write a function that doubles a number.",
            "code": "def double(x):\n    return 2 * x",
            "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        {
            "task_id": 12,
            "prompt": "Write a function for the length of the hypotenuse.",
            "code": "def hypotenuse(a, b):\n    return math.hypot(a, b)",
            "test_list": ["assert hypotenuse(3, 4) == 5"],
            "test_imports": ["import math"],
            "source_file": "set",
        },
    ],
    "classeval": [
        {
            "task_id": "ClassEval_0",
            "class_name": "Counter",
            "import_statement": ["import collections"],
            "skeleton": 'import collections\n\nclass Counter(object):\n    """\n    Counts.\n    """\n\n    def add(self, name):\n        """\n        Count one more.\n        """\n',
            "solution_code": "import collections\n\nclass Counter:\n    def __init__(self):\n        self.all = collections.Counter()\n\n    def add(self, name):\n        self.all[name] += 1\n        return self.all[name]\n",
            "test": "import unittest\n\n\nclass CounterTestAdd(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(Counter().add(1), 1)\n\n    def test_twice(self):\n        c = Counter()\n        c.add(1)\n        self.assertEqual(c.add(1), 2)\n",
            "test_classes": ["CounterTestAdd"],
            "methods_info": [],
        }
    ],
    "gsm8k": [
        {"question": "Ann has 3 bags of 4 apples. How many?", "answer": "3 bags of 4 are <<3*4=12>>12.\n#### 12"},
        {"question": "A car costs 1,000 dollars and 250 more. How much?", "answer": "1,000+250\n#### 1,250"},
    ],
    "xsum": [{"document": "The cat sat on the mat. It slept.", "summary": "A cat slept on a mat.", "id": "x1"}],
    "cnndm": [{"article": "A dog ran home. It barked.", "highlights": "Dog ran home .\nIt barked .", "id": "c1"}],
}
# Answers to the first row: right, wrong; as continuations, and as a chat's answer.
CODE_ANSWERS = {
    "humaneval": (
        "    return math.sqrt(helper(x)) if x >= 0 else None\n",
        "    return math.sqrt(abs(x))\n",
        "Use `math`.\n\n```python\ndef root(x):\n    return math.sqrt(helper(x)) if x >= 0 else None\n```\nThat is all.",
    ),
    "mbpp": (
        "def double(x):\n    return x + x\n",
        "def double(x):\n    return x\n",
        "Sure!\n```\ndef double(x):\n    return x + x\n```",
    ),
    "classeval": (
        "    all = None\n    def add(self, name):\n        self.all = self.all or collections.Counter()\n        self.all[name] += 1\n        return self.all[name]\n",
        "    def add(self, name):\n        return 1\n",
        f"```python\n{ROWS['classeval'][0]['solution_code']}",  # a block that the answer does not close
    ),
}


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def first_question(task: str) -> Question:
    return TASKS[task].read(ROWS[task][0], 0)


@pytest.fixture(scope="module")
def random_model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, max_position_embeddings=512)


@pytest.fixture
def template():
    """Whether the tokenizer has a chat template."""
    return True


@pytest.fixture
def evaluate(tmp_path, lade_on, capsys, monkeypatch, random_model, template):
    """Runs `lade eval` on this file's rows of a task: (exit status, figures or None, standard error).

    A random model stands in for the one that is loaded, unless a --model_path is given.
    """
    load = lade_eval.load

    def load_random(args):
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
        if not template:
            tokenizer.chat_template = None
        return random_model, tokenizer

    monkeypatch.setattr(
        lade_eval, "load", lambda args: (load if args.model_path != str(BUNDLED) else load_random)(args)
    )

    def run(task: str, *arguments: str, rows: list[dict] | None = None, tokens: int = 12):
        data = write_rows(tmp_path / f"{task}-data.jsonl", ROWS[task] if rows is None else rows)
        common = ["--task", task, "--data", data, "--dtype", "float32", "--out", str(tmp_path / f"{task}.jsonl")]
        status = commands.main(["eval", *common, "--max_new_tokens", str(tokens), *arguments])
        out, err = capsys.readouterr()
        assert "{" not in out
        figures = json.loads((tmp_path / f"{task}.json").read_text(encoding="utf-8")) if status == 0 else None
        return status, figures, err

    return run


# What is asked


@pytest.mark.parametrize("task", TASKS)
def test_questions(task, tmp_path):
    questions, data = load_questions(task, write_rows(tmp_path / "d.jsonl", ROWS[task]), None)
    assert [question.number for question in questions] == list(range(len(ROWS[task])))
    assert len({question.id for question in questions}) == len(questions)
    (tmp_path / "list.json").write_text(json.dumps(ROWS[task]), encoding="utf-8")
    again, same = load_questions(task, str(tmp_path / "list.json"), 1)
    assert again == questions[:1]
    assert same["data_digest"] == data["data_digest"]
    assert load_questions(task, write_rows(tmp_path / "d.jsonl", [*ROWS[task], {}]), 1)[1] != data


def test_questions_hold_what_the_model_needs():
    assert first_question("humaneval").text == ROWS["humaneval"][0]["prompt"]
    assert ROWS["humaneval"][0]["prompt"].rstrip() in first_question("humaneval").turns[0]
    for test in ROWS["mbpp"][0]["test_list"]:
        assert test in first_question("mbpp").turns[0]
        assert test in first_question("mbpp").text
    assert first_question("classeval").text.endswith("import collections\nclass Counter(object):\n")
    assert first_question("mtbench").turns == ("What does os.path.join do?", "And os.path.split?")
    hub_row = {"prompt": ["a", "b"], "prompt_id": 5, "category": "math", "reference": []}
    assert TASKS["mtbench"].read(hub_row, 0).turns == ("a", "b")
    for task in ("xsum", "cnndm"):
        assert next(iter(ROWS[task][0].values())) in first_question(task).turns[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"task_id": 1, "prompt": "x", "test": "y"}', "row 1 must have the field entry_point for --task humaneval"),
        ('{"task_id": 1}\n{"task_id"', "line 2 is not JSON"),
        ("[1, 2", "is not JSON"),
        ("[1, 2]", "row 1 must be a JSON object, got '1'"),
        ("\n", "has no rows"),
        ('{"task_id": 1, "prompt": 5, "test": "y", "entry_point": "f"}', "row 1 has a field of another kind"),
        ("\n".join([json.dumps(ROWS["humaneval"][0])] * 2), "'HumanEval/0' twice, in rows 1 and 2"),
    ],
)
def test_bad_data(text, message, tmp_path):
    (tmp_path / "d.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(BadData, match=message):
        load_questions("humaneval", str(tmp_path / "d.jsonl"), None)


def test_turns_must_be_a_list(tmp_path):
    with pytest.raises(BadData, match="turns must be a list of texts, got 'abc'"):
        load_questions("mtbench", write_rows(tmp_path / "d.jsonl", [{"turns": "abc"}]), None)


def test_the_hub(monkeypatch, tmp_path):
    with pytest.raises(BadData, match="must be a readable JSON file"):
        load_questions("gsm8k", str(tmp_path / "none.jsonl"), None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadData, match=r"`datasets` is installed.*not installed here.*no file 'openai/gsm8k:main@test'"):
        load_questions("gsm8k", None, None)
    with pytest.raises(BadData, match="--data FILE must be given for --task specbench"):
        load_questions("specbench", None, None)
    calls = []

    def load_dataset(name, configuration, split):
        calls.append((name, configuration, split))
        if name == "a/b":
            raise ConnectionError("no network")
        return ROWS["gsm8k"]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(load_questions("gsm8k", None, None)[0]) == 2
    assert len(load_questions("gsm8k", "openai/gsm8k@train", 1)[0]) == 1
    assert len(load_questions("gsm8k", "c/d:e@f", None)[0]) == 2
    with pytest.raises(BadData, match="'a/b' could not be loaded from the hub: ConnectionError: no network"):
        load_questions("gsm8k", "a/b", None)
    assert calls == [
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "main", "train"),
        ("c/d", "e", "f"),
        ("a/b", None, "test"),
    ]


# How answers are scored


@pytest.mark.parametrize(
    ("source", "kind", "error"),
    [
        ("assert 1 + 1 == 2", "passed", ""),
        ("assert 1 + 1 == 3", "failed", "AssertionError"),
        ("def f(:", "failed", "SyntaxError"),
        ("x = input()", "failed", "EOFError"),
        ("import sys; sys.exit(0)", "failed", "SystemExit"),  # before its tests
        ("import os; os._exit(0)", "crashed", "status 0 before its tests"),
        ("while True: pass", "timeout", "not finished after 1 s"),
        ("import time; time.sleep(600)", "timeout", "not finished after 1 s"),
        ("x = [b'x' * 2**20 for _ in range(10**6)]", "memory", "MemoryError"),
        ("x = bytearray(2**40)", "memory", "MemoryError"),
        ("def f(): return f()\nf()", "failed", "RecursionError"),
        ("while True: print('x' * 10000)", "timeout", "not finished"),
        ("open('big', 'wb').write(b'x' * 2**27)", "failed", "OSError"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()", "passed", ""),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\nassert A() == A()", "passed", ""),
    ],
)
def test_programs_run_with_limits(source, kind, error):
    started = time.monotonic()
    outcome = run_program(Program(source), Limits(seconds=1 if kind == "timeout" else 40, megabytes=256))
    assert outcome.kind == kind
    assert error in outcome.error
    assert bool(error) == bool(outcome.error)
    assert time.monotonic() - started < 300  # and not the 600 s of those that sleep


FORGED = """{'outcome': 'passed', 'kind': 'passed', 'error': ''}""".replace("'", '"')
FORGERIES = {
    "an open file": f"""
import os
for descriptor in range(3, 100):
    try:
        os.write(descriptor, {FORGED!r}.encode())
    except OSError:
        pass
os._exit(0)
""",
    "the outcome's path": f"""
import os
for folder in (".", ".."):
    open(os.path.join(folder, "outcome.json"), "w").write({FORGED!r})
os._exit(0)
""",
    "a patched json.dump": f"""
import json
json.dump = lambda value, file, **_: file.write({FORGED!r})
json.dumps = lambda *_, **__: {FORGED!r}
assert False
""",
    "the parent's standard output": f"""
import os
try:
    assert b"child.py" in open(f"/proc/{{os.getppid()}}/cmdline", "rb").read()
    open(f"/proc/{{os.getppid()}}/fd/1", "w").write({FORGED!r})
finally:
    os._exit(0)
""",
    "the parent's end": f"""
import os, signal
assert b"child.py" in open(f"/proc/{{os.getppid()}}/cmdline", "rb").read()
open(f"/proc/{{os.getppid()}}/fd/1", "w").write({FORGED!r})
os.kill(os.getppid(), signal.SIGKILL)
""",
    "a patched os.write": """
import os
write = os.write
os.write = lambda file, data: write(file, data.replace(b"failed", b"passed"))
assert False
""",
    "a patched runner": """
import __main__
__main__.run_unit_tests = lambda *_: ("passed", "")
__main__.KINDS = ("failed",)
class Test: pass
""",
    "a fork": "import os\nif os.fork(): os._exit(0)\n",
}


@pytest.mark.parametrize("way", FORGERIES)
def test_programs_cannot_say_that_they_have_passed(way):
    unit_tests = ("Test",) if "Test" in FORGERIES[way] else ()
    assert run_program(Program(FORGERIES[way], unit_tests), LIMITS).kind in ("failed", "crashed")


def is_running(process: int) -> bool:
    """Zombies have ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Sleeps in a session of its own, at the end of a chain of processes that have ended.
DAEMON = """
import os, subprocess, sys, time
source = "import os, time, sys; os.setsid(); os.fork() and os._exit(0); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", source, {path!r}], env={{}})
while not (os.path.exists({path!r}) and open({path!r}).read()):
    time.sleep(0.01)
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' child subreaper")


@linux
@pytest.mark.parametrize("end", ["", "assert False", "time.sleep(600)"], ids=["passed", "failed", "timeout"])
def test_a_process_in_a_session_of_its_own_ends_with_the_program(end, tmp_path):
    path = tmp_path / "process"
    limits = Limits(seconds=5) if "sleep" in end else LIMITS
    outcome = run_program(Program(DAEMON.format(path=str(path)) + end), limits)
    assert outcome.kind == {"": "passed", "assert False": "failed"}.get(end, "timeout")
    assert not is_running(int(path.read_text()))  # at once: the outcome is told when all have ended


@linux
def test_a_process_in_a_session_of_its_own_ends_with_the_runner(tmp_path):
    path = tmp_path / "process"
    source = DAEMON.format(path=str(path)) + "time.sleep(600)"
    code = """
import sys, types
package = types.ModuleType("lade.commands.eval")  # which itself would import torch
package.__path__ = [sys.argv[1]]
sys.modules[package.__name__] = package
from lade.commands.eval.programs import *
run_program(Program(sys.argv[2]), Limits(seconds=600))
"""
    folder = str(ROOT / "lade" / "commands" / "eval")
    with subprocess.Popen([sys.executable, "-c", code, folder, source], env=ENVIRONMENT) as runner:
        deadline = time.monotonic() + 300
        while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        daemon = int(path.read_text())
        assert is_running(daemon)
        runner.kill()
    while is_running(daemon) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(daemon)


def test_what_a_program_leaves_running_is_ended(tmp_path):
    source = f"import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    assert run_program(Program(source), LIMITS).kind == "passed"
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 60  # whoever inherits it may take a moment to notice
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_programs_see_little_of_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    source = "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert os.listdir() == []"
    assert run_program(Program(source), LIMITS).kind == "passed"
    assert run_program(Program(source.replace("not in", "in")), LIMITS).kind == "failed"


def test_unit_tests_have_to_exist():
    source = "import unittest\nclass T(unittest.TestCase):\n    pass"
    assert run_program(Program(source, ("T",)), LIMITS).error == "no unit test was found"
    hungry = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        bytearray(2**40)"
    assert run_program(Program(hungry, ("T",)), LIMITS).kind == "memory"


@pytest.mark.parametrize("task", CODE_ANSWERS)
def test_pass_at_1(task):
    question = first_question(task)
    right, wrong, chat = CODE_ANSWERS[task]
    score = scorer_for(task, run_code=True, limits=LIMITS)
    assert score(question, right, True)["pass@1"] == 1
    assert score(question, wrong, True)["pass@1"] == 0
    assert score(question, chat, False)["pass@1"] == 1
    assert score(question, "I do not know.", False)["pass@1"] == 0
    assert "Error" in score(question, wrong, True)["error"]


def test_imports_of_the_sanitized_set():
    question = TASKS["mbpp"].read(ROWS["mbpp"][1], 1)
    assert run_program(program_of("mbpp", question, ROWS["mbpp"][1]["code"], True), LIMITS).kind == "passed"


def test_code_in_an_answer():
    answer = "```python\nx = 1\n```\nThen:\n  ```py\ndef f(): pass\n  ```\n"
    assert code_in(answer) == "x = 1\n"
    assert code_in(answer, wanted=re.compile("def f")) == "def f(): pass\n"
    assert code_in("def f(): pass") == "def f(): pass"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 * 4 = 12 apples.", "12"),
        ("it costs $1,250.50", "1250.50"),
        ("10-3 is 7, so\n#### 7\nBut 9", "7"),
        ("#### -5", "-5"),
        ("that leaves 10-3", "3"),
        ("The answer is 8. Check: 2*4", "8"),
        (r"\boxed{42} since 40+2", "42"),
        ("the answer is clear: none", None),
        ("The answer is below. 5 and\n6", "5"),
        ("no idea", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_exact_match():
    question = TASKS["gsm8k"].read(ROWS["gsm8k"][1], 1)
    assert exact_match(question, "That is 1250.00 dollars", False) == {"exact match": 1}
    assert exact_match(question, "That is 1,251", False) == {"exact match": 0}
    assert exact_match(question, "I cannot say", False) == {"exact match": 0}


def test_rouge(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(NoQuality, match="pip install rouge_score"):
        scorer_for("xsum", False, LIMITS)

    class SharedWords:
        def __init__(self, kinds, use_stemmer):
            self.kinds = kinds

        def score(self, target, prediction):
            target, prediction = set(target.split()), set(prediction.split())
            return {kind: SimpleNamespace(fmeasure=len(target & prediction) / len(target)) for kind in self.kinds}

    package, module = ModuleType("rouge_score"), ModuleType("rouge_score.rouge_scorer")
    module.RougeScorer = SharedWords
    monkeypatch.setitem(sys.modules, "rouge_score", package)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", module)
    for task, reference in (("xsum", "summary"), ("cnndm", "highlights")):
        score = scorer_for(task, False, LIMITS)
        assert score(first_question(task), ROWS[task][0][reference], False) == dict.fromkeys(
            ("rouge1", "rouge2", "rougeL"), 1
        )
        assert score(first_question(task), "nothing of this", False)["rouge1"] == 0


def test_rouge_by_the_library():
    pytest.importorskip("rouge_score", reason="the package rouge_score is not installed")
    score = scorer_for("xsum", False, LIMITS)
    assert score(first_question("xsum"), "A cat slept on a mat.", False)["rougeL"] == 1
    assert score(first_question("xsum"), "Something else", False)["rougeL"] == 0


def test_what_has_no_quality():
    for task, reason in (("mtbench", "judge"), ("specbench", "judge"), ("humaneval", "--run_code")):
        with pytest.raises(NoQuality, match=reason):
            scorer_for(task, False, LIMITS)


# What is reported


@pytest.mark.parametrize("task", TASKS)
def test_a_run(task, evaluate, tmp_path):
    flags = ["--run_code"] if TASKS[task].quality == "pass@1" else []
    status, figures, err = evaluate(task, *flags, tokens=48)  # enough for a guess to be right in each
    assert status == 0
    assert ("--run_code runs programs" in err) == (TASKS[task].quality == "pass@1")
    assert figures["questions"] == len(ROWS[task])
    plain, ahead = figures["methods"]["plain"], figures["methods"]["lade"]
    assert ahead["identical_outputs"] == plain["identical_outputs"] == 1
    assert ahead["fallbacks"] == {}
    assert ahead["new_tokens"] == plain["new_tokens"]
    assert ahead["tokens_per_step"] > plain["tokens_per_step"] == 1
    assert figures == json.loads((tmp_path / f"{task}.json").read_text(encoding="utf-8"))
    table = (tmp_path / f"{task}.md").read_text(encoding="utf-8")
    assert f"|lade|{ahead['tokens_per_second_mean']:.1f}|{ahead['tokens_per_second']:.1f}|" in table.replace(" ", "")
    expected = {"pass@1": ["pass@1"], "exact match": ["exact match"]}.get(TASKS[task].quality)
    if expected:
        assert list(ahead["quality"]) == expected
        assert expected[0] in table
    elif not TASKS[task].quality:
        assert "judge" in figures["no_quality"]
        assert list(figures["categories"]) == list(dict.fromkeys(row["category"] for row in ROWS[task]))
        assert "## " in table


def test_the_first_question_is_asked_for_the_first_time(evaluate, monkeypatch, random_model, tmp_path):
    """The warm-up asks it too, and its memory is forgotten. What one question has taught serves the next ones."""
    forget_all()
    asked, answer = [], Answerer.answer

    def watched(self, question, method):
        asked.append((question.id, len(memory.memory_for(random_model, True, "live"))))
        return answer(self, question, method)

    monkeypatch.setattr(Answerer, "answer", watched)
    evaluate("specbench", "--lade", "on", tokens=24)
    (warm_up, _), (first, rows_before), (_, rows_kept), _ = asked
    assert warm_up == first == "7"
    assert rows_before == 0 < rows_kept
    assert "memory is kept from question to question" in (tmp_path / "specbench.md").read_text(encoding="utf-8")


def test_the_bundled_checkpoint(evaluate):
    """Whose figures in bfloat16 may differ; stops where a continuation ends."""
    folder = ["--model_path", os.path.relpath(BUNDLED)]
    _, figures, _ = evaluate("humaneval", *folder, "--prompt", "text", "--limit", "1", tokens=48)
    assert figures["methods"]["lade"]["identical_outputs"] == 1
    assert figures["methods"]["lade"]["tokens_per_step"] > 1
    assert figures["settings"]["prompt"] == "text"


def test_later_turns_hold_the_earlier_ones(evaluate, tmp_path):
    evaluate("mtbench", "--lade", "on")
    lines = [json.loads(line) for line in (tmp_path / "mtbench.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [line["answer"] for line in lines if "answer" in line]
    assert [answer["method"] for answer in answers] == ["lade", "lade"]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    for answer, row in zip(answers, ROWS["mtbench"], strict=True):
        turns = [
            {"role": "user", "content": row["turns"][0]},
            {"role": "assistant", "content": answer["texts"][0].strip()},
            {"role": "user", "content": row["turns"][1]},
        ]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert answer["prompt_tokens"][1] == len(ids)
        assert len(answer["texts"]) == 2


@pytest.mark.parametrize("template", [False])
@pytest.mark.parametrize("task", ["humaneval", "classeval", "gsm8k", "mtbench"])
def test_models_without_a_template(task, evaluate, tmp_path):
    status, figures, _ = evaluate(task)
    assert status == 0
    assert figures["methods"]["lade"]["identical_outputs"] == 1
    results = Results(tmp_path / f"{task}.jsonl", figures["settings"])
    for (name, _), answer in results.answers.items():
        assert answer.is_continuation == (task != "mtbench")
        question = next(q for q in map(TASKS[task].read, ROWS[task], range(9)) if q.id == name)
        assert not any(stop in text for stop in (*question.stop, "\nUser:") for text in answer.texts)


def test_sampling_and_other_methods(evaluate):
    arguments = ["--do_sample", "--temperature", "0.8", "--compare-with", "static,prompt-lookup"]
    arguments += ["--model_path", os.path.relpath(BUNDLED), "--limit", "1"]
    _, figures, _ = evaluate("gsm8k", *arguments, tokens=32)
    methods = figures["methods"]
    assert list(methods) == ["plain", "lade", "static", "prompt-lookup"]
    assert methods["lade"]["identical_outputs"] == methods["static"]["identical_outputs"] == 1
    assert methods["lade"]["tokens_per_step"] > 1 == methods["static"]["tokens_per_step"]
    assert methods["prompt-lookup"]["tokens_per_step"] >= 1
    assert figures["settings"]["temperature"] == 0.8


def test_the_seed_counts(evaluate, tmp_path):
    def sampled(seed):
        (tmp_path / "gsm8k.jsonl").unlink(missing_ok=True)
        _, figures, _ = evaluate("gsm8k", "--do_sample", "--lade", "off", "--seed", seed)
        return [a.tokens for a in Results(tmp_path / "gsm8k.jsonl", figures["settings"]).answers.values()]

    first = sampled("1")
    assert sampled("1") == first
    assert sampled("2") != first


def test_prompts_without_room_are_left_out(evaluate, tmp_path):
    long = {"document": "word " * 3000, "summary": "words", "id": "long"}
    _, figures, _ = evaluate("xsum", rows=[long, *ROWS["xsum"]])
    assert figures["questions"] == 1
    assert "the model has room for 500" in figures["skipped"]["long"]
    assert "Left out, long: a prompt of" in (tmp_path / "xsum.md").read_text(encoding="utf-8")


def answer_of(question: str, method: str, tokens: list[int], seconds: float, steps: int) -> Answer:
    return Answer(question, method, False, ["x"], [tokens], [5], [seconds], [steps])


def test_figures():
    questions = [Question("a", 0, ("?",)), Question("b", 1, ("?",)), Question("c", 2, ("?",))]
    answers = [
        answer_of("a", "plain", [1, 2, 3, 4], 4.0, 4),
        answer_of("b", "plain", [5, 6], 1.0, 2),
        answer_of("c", "plain", [5], 1.0, 1),  # lade has not answered this one
        answer_of("a", "lade", [1, 2, 3, 4], 1.0, 2),
        answer_of("b", "lade", [5, 7], 1.0, 1),
    ]
    answers[-1].fallback_reason = "beam search"
    by_key = {(answer.question, answer.method): answer for answer in answers}
    scores = {("a", "lade"): {"pass@1": 1.0, "outcome": "passed"}, ("b", "lade"): {"pass@1": 0.0, "outcome": "timeout"}}
    figures = summarize(questions, ["plain", "lade"], by_key, scores)
    assert figures["questions"] == 2
    plain, ahead = figures["methods"]["plain"], figures["methods"]["lade"]
    assert (plain["tokens_per_second_mean"], plain["tokens_per_second"]) == (1.5, 1.2)
    assert (ahead["tokens_per_second_mean"], ahead["tokens_per_second"]) == (3.0, 3.0)
    assert ahead["speed_ratio"] == 2.5
    assert (plain["tokens_per_step"], ahead["tokens_per_step"]) == (1.0, 2.0)
    assert (plain["identical_outputs"], ahead["identical_outputs"]) == (1.0, 0.5)
    assert ahead["fallbacks"] == {"beam search": 1}
    assert ahead["quality"] == {"pass@1": 0.5}
    assert ahead["outcomes"] == {"passed": 1, "timeout": 1}
    assert "quality" not in plain
    alone = summarize(questions[:2], ["lade"], by_key, {})["methods"]["lade"]
    assert alone["speed_ratio"] is alone["identical_outputs"] is None
    settings = dict.fromkeys(["task", "model", "data", "machine", "torch", "transformers", "version", "dtype"], "x")
    settings |= {"do_sample": False, "max_new_tokens": 4, "threads": 1, "lade": lade_eval.asdict(lade.current_config())}
    text = markdown(figures | {"settings": settings}, "x.svg")
    assert "|lade|3.0|3.0|2.50|2.00|50.0%|50.0%|" in text.replace(" ", "")
    assert "](x.svg)" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(set(map(len, table))) == 1  # columns one below the other


def test_the_picture(evaluate, tmp_path, capsys):
    evaluate("specbench")
    evaluate("gsm8k")
    drawn = [ElementTree.parse(tmp_path / f"{task}.svg") for task in ("specbench", "gsm8k")]
    labels = [[node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")] for tree in drawn]
    assert {"specbench", "qa", "rag", "lade"} <= set(labels[0])
    assert "specbench.svg" in (tmp_path / "specbench.md").read_text(encoding="utf-8")
    ratio = json.loads((tmp_path / "gsm8k.json").read_text())["methods"]["lade"]["speed_ratio"]
    assert f"{ratio:.2f}" in labels[1]
    out, runs = tmp_path / "both.svg", [str(tmp_path / f"{task}.json") for task in ("specbench", "gsm8k")]
    assert commands.main(["eval", "--plot", *runs, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "gsm8k, stdlib-9m" in out.read_text(encoding="utf-8")
    _, figures, _ = evaluate("humaneval", "--lade", "on")
    assert not (tmp_path / "humaneval.svg").exists()  # nothing to compare with
    assert commands.main(["eval", "--plot", str(tmp_path / "humaneval.json")]) == 2
    assert "no ratio to draw" in capsys.readouterr().err
    assert commands.main(["eval", "--plot", str(tmp_path / "none.json")]) == 2
    assert commands.main(["eval", "--task", "humaneval", "--lade", "on", "--json", *same_run(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == figures


def same_run(folder: Path) -> list[str]:
    """The arguments that `evaluate` has given for humaneval."""
    paths = ["--data", str(folder / "humaneval-data.jsonl"), "--out", str(folder / "humaneval.jsonl")]
    return [*paths, "--dtype", "float32", "--max_new_tokens", "12"]


# That it can be stopped


def stop_after(monkeypatch, count: int) -> list[tuple[str, str]]:
    """Ctrl-C instead of the answer after `count` of them, the warm-up included; returns what is asked."""
    asked = []
    answer = Answerer.answer

    def counted(self, question, method):
        if len(asked) == count:
            raise KeyboardInterrupt
        asked.append((question.id, method))
        return answer(self, question, method)

    monkeypatch.setattr(Answerer, "answer", counted)
    return asked


def test_a_stopped_run_is_gone_on_with(evaluate, monkeypatch, tmp_path):
    file = tmp_path / "specbench.jsonl"
    _, whole, _ = evaluate("specbench")
    tokens = {key: answer.tokens for key, answer in Results(file, whole["settings"]).answers.items()}
    file.unlink()

    with monkeypatch.context() as patch:
        asked = stop_after(patch, 2 + 3)
        status, _, err = evaluate("specbench")
    assert status == 130
    assert f"the same command goes on from {file}" in err
    assert asked[2:] == [("7", "plain"), ("7", "lade"), ("9", "plain")]
    before = file.read_bytes()
    file.write_bytes(before + b'{"answer": {"question": "9", "meth')  # killed while it wrote

    with monkeypatch.context() as patch:
        asked = stop_after(patch, 99)
        status, figures, _ = evaluate("specbench")
    assert asked[2:] == [("9", "lade"), ("8", "plain"), ("8", "lade")]
    assert file.read_bytes().startswith(before)
    assert {key: a.tokens for key, a in Results(file, figures["settings"]).answers.items()} == tokens
    assert figures["questions"] == 3
    assert figures["methods"]["lade"]["new_tokens"] == whole["methods"]["lade"]["new_tokens"]

    with monkeypatch.context() as patch:  # nothing is left to do: no model is loaded
        patch.setattr(lade_eval, "load", None)
        status, again, _ = evaluate("specbench")
    assert status == 0
    assert again["methods"] == figures["methods"]


@pytest.mark.parametrize("share", [0.0, 0.005, 0.3, 0.5, 0.62, 0.8, 0.999, 1.0])
def test_a_file_cut_anywhere_is_gone_on_with(share, evaluate, tmp_path):
    """As a full disk or a lost machine leaves it: within a line, between two, within the settings, or empty."""
    file = tmp_path / "gsm8k.jsonl"
    _, whole, _ = evaluate("gsm8k")
    data = file.read_bytes()
    found = Results(file, whole["settings"])
    file.write_bytes(data[: int(share * len(data))])
    kept = data[: data.rfind(b"\n", 0, int(share * len(data))) + 1]
    status, figures, _ = evaluate("gsm8k")
    again = Results(file, figures["settings"])
    assert status == 0
    assert file.read_bytes().startswith(kept)
    assert file.read_bytes().count(b"\n") == data.count(b"\n")  # nothing is asked or scored twice
    assert again.scores == found.scores
    assert {key: a.tokens for key, a in again.answers.items()} == {key: a.tokens for key, a in found.answers.items()}
    assert figures["methods"]["lade"]["new_tokens"] == whole["methods"]["lade"]["new_tokens"]


def test_more_can_be_asked_of_a_run(evaluate, monkeypatch):
    evaluate("humaneval", "--limit", "1", "--lade", "off")
    asked = stop_after(monkeypatch, 99)
    _, figures, _ = evaluate("humaneval")
    assert asked[2:] == [("HumanEval/0", "lade"), ("HumanEval/1", "plain"), ("HumanEval/1", "lade")]
    assert "--run_code" in figures["no_quality"]
    asked.clear()
    _, figures, _ = evaluate("humaneval", "--run_code")
    assert asked == []
    assert figures["methods"]["lade"]["quality"] == {"pass@1": 0}
    monkeypatch.setattr(lade_eval, "scorer_for", None)  # programs that have been run are not run again
    _, figures, _ = evaluate("humaneval", "--run_code")
    assert figures["methods"]["lade"]["outcomes"] == {"failed": 2}


def test_other_settings_are_refused(evaluate, tmp_path):
    evaluate("gsm8k", "--limit", "1", "--lade", "off")
    file = tmp_path / "gsm8k.jsonl"
    before = file.read_bytes()
    for arguments, what in (
        (["--max_new_tokens", "13"], "max_new_tokens was 12, now 13"),
        (["--do_sample", "--seed", "4"], "do_sample was False, now True; seed was 0, now 4"),
        (["--window", "3"], "lade was {"),
        (["--dtype", "float64"], "dtype was 'float32', now 'float64'"),
    ):
        status, _, err = evaluate("gsm8k", *arguments)
        assert status == 2
        assert what in err
        assert "other settings" in err
    status, _, err = evaluate("gsm8k", rows=ROWS["gsm8k"][:1])
    assert (status, "data_digest was" in err) == (2, True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", ['{"question": 1}\n', "not JSON\n", "no line", '{"settings": 1}\n', "[1]\n"])
def test_other_files_are_left_alone(content, evaluate, tmp_path):
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(content, encoding="utf-8")
    status, _, err = evaluate("gsm8k")
    assert status == 2
    assert "not a file of this program's" in err
    assert file.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--max_new_tokens", "0"], "--max_new_tokens must be at least 1, got 0"),
        (["--temperature", "0.5"], "--temperature needs --do_sample"),
        (["--do_sample", "--temperature", "0"], "--temperature must be above 0 with --do_sample"),
        (["--do_sample", "--temperature", "-1"], "--temperature must not be negative, got -1"),
        (["--do_sample", "--top_p", "2"], "--top_p must be above 0 and at most 1, got 2.0"),
        (["--compare-with", "static,magic"], "must be of prompt-lookup, static, separated by commas, got 'magic'"),
        (["--code_seconds", "0"], "--code_seconds must be at least 1, got 0"),
        (["--code_megabytes", "1"], "--code_megabytes must be at least 128, got 1"),
        (["--device", "cpu:x"], "--device must be one that torch finds here, got 'cpu:x'"),
        (["--out", "x.csv"], "--out must end with .jsonl, got x.csv"),
        (["--window", "0"], "WINDOW_SIZE must be an integer from 1"),
    ],
)
def test_bad_arguments(arguments, message, lade_on, capsys):
    with pytest.raises(SystemExit) as caught:
        commands.main(["eval", "--task", "gsm8k", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# Runs a program whose third answer, after two of the warm-up, says so on stdout and does not end by itself.
ENDLESS = """
import runpy, sys, time
from transformers import StoppingCriteriaList
from lade.commands.eval.methods import Answerer

asked, answer, is_over = [], Answerer.answer, StoppingCriteriaList.__call__

def counted(self, question, method):
    asked.append((question, method))
    return answer(self, question, method)

def held(self, *arguments, **named):
    if len(asked) == 5:
        print("in generate()", flush=True)
        while True:
            time.sleep(0.01)
    return is_over(self, *arguments, **named)

Answerer.answer, StoppingCriteriaList.__call__ = counted, held
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@beside
def stopped():
    """The file in applications/, stopped by Ctrl-C: its status, what it says, and the lines it wrote."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "out.jsonl")
        arguments = [str(ROOT / "applications" / "eval.py"), "--task", "gsm8k", "--max_new_tokens", "8"]
        arguments += ["--data", write_rows(Path(folder, "d.jsonl"), ROWS["gsm8k"]), "--out", str(file)]
        with AtTerminal(ENDLESS.format(arguments=arguments)) as program:
            program.read_until("in generate")
            program.type("\x03")
            status = program.wait()
        return status, program.seen, file.read_text(encoding="utf-8").splitlines()


def test_ctrl_c_in_the_application(stopped):
    status, said, lines = stopped
    assert status == 130, said
    assert "the same command goes on from" in said
    assert "Traceback" not in said
    methods = [json.loads(line)["answer"]["method"] for line in lines[1:]]  # the first line holds the settings
    assert methods == ["plain", "lade"]
