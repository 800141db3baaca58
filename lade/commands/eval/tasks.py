"""The tasks: how a published row becomes a question. Knows nothing about models, and scores nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task, for models with a chat template and without."""

    id: str
    number: int  # of its row in the data, from 0; part of the seed
    turns: tuple[str, ...]  # asked one after the other, each after the model's own answers
    text: str | None = (
        None  # what a model without a chat template goes on with; None: turns of 'User:' and 'Assistant:'
    )
    stop: tuple[str, ...] = ()  # strings that end the continuation of `text`
    category: str = ""
    row: Row = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Task:
    """A published set of questions.

    fields: names that a row must have; of a tuple of several names it must have one. hub: name, configuration and split
    of the data set on the hub, or None. quality: name of the figure of quality, empty if none is defined.
    """

    read: Callable[[Row, int], Question]
    fields: tuple[tuple[str, ...], ...]
    hub: tuple[str, str | None, str] | None
    max_new_tokens: int
    quality: str = ""


PASS_AT_1, EXACT_MATCH, ROUGE = "pass@1", "exact match", "ROUGE"


def read_conversation(row: Row, number: int) -> Question:
    """MT-bench and Spec-Bench as published, or MT-bench as it is on the hub."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"turns must be a list of texts, got {str(turns)[:80]!r}")
    name = row.get("question_id", row.get("prompt_id", number))
    return Question(str(name), number, tuple(turns), category=str(row.get("category", "")), row=row)


def read_humaneval(row: Row, number: int) -> Question:
    asked = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{row['prompt'].rstrip()}\n```"
    # The function ends where a line begins at the margin.
    stop = ("\ndef ", "\nclass ", "\n@", "\nif ", "\nprint(", "\nassert ", "\n#", "\n```")
    return Question(str(row["task_id"]), number, (asked,), row["prompt"], stop, row=row)


def read_mbpp(row: Row, number: int) -> Question:
    """The full set has `text`, the sanitized one `prompt`."""
    wish, tests = row["text" if "text" in row else "prompt"].strip(), "\n".join(row["test_list"])
    asked = f"{wish}\nAnswer with Python code in one code block. It must pass these tests:\n\n```python\n{tests}\n```"
    stop = ("\nassert ", "\nprint(", "\nif __name__", '\n"""', "\n```")
    return Question(str(row["task_id"]), number, (asked,), f'"""\n{wish}\n\n{tests}\n"""\n', stop, row=row)


def read_classeval(row: Row, number: int) -> Question:
    """The whole class at once, from its skeleton."""
    skeleton = row["skeleton"].rstrip()
    asked = f"Write the body of every method of this Python class. Answer with the whole class in one code block.\n\n```python\n{skeleton}\n```"
    text = f"# A class and its outline:\n{skeleton}\n\n# The class with the body of every method:\n{class_opening(row)}"
    stop = ("\nclass ", "\ndef ", "\nif ", "\nprint(", "\n#", "\n```")
    return Question(str(row["task_id"]), number, (asked,), text, stop, row=row)


def class_opening(row: Row) -> str:
    """What a program needs before the class's body: its imports and the line that opens it."""
    name = re.escape(row["class_name"])
    found = re.search(rf"^class\s+{name}\b.*:", row["skeleton"], re.MULTILINE)
    opening = found[0] if found else f"class {row['class_name']}:"
    return "\n".join([*row.get("import_statement", ()), opening, ""])


def read_gsm8k(row: Row, number: int) -> Question:
    asked = (
        f"{row['question']}\nThink step by step. End with a line that has #### and then the answer, as a number only."
    )
    text, stop = f"Question: {row['question']}\nAnswer:", ("\nQuestion:",)
    return Question(str(row.get("id", number)), number, (asked,), text, stop, row=row)


def read_xsum(row: Row, number: int) -> Question:
    return _to_summarize(row, number, row["document"], "in one sentence")


def read_cnndm(row: Row, number: int) -> Question:
    return _to_summarize(row, number, row["article"], "in three or four short sentences")


def _to_summarize(row: Row, number: int, document: str, how: str) -> Question:
    asked, text = f"Summarize this article {how}.\n\n{document}", f"{document}\n\nTL;DR:"
    return Question(str(row.get("id", number)), number, (asked,), text, ("\n\n",), row=row)


TASKS = {
    "mtbench": Task(
        read_conversation,
        (("turns", "prompt"),),
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        max_new_tokens=1024,
    ),
    "humaneval": Task(
        read_humaneval,
        (("task_id",), ("prompt",), ("entry_point",), ("test",)),
        ("openai/openai_humaneval", None, "test"),
        max_new_tokens=512,
        quality=PASS_AT_1,
    ),
    "gsm8k": Task(read_gsm8k, (("question",), ("answer",)), ("openai/gsm8k", "main", "test"), 512, quality=EXACT_MATCH),
    "mbpp": Task(
        read_mbpp,
        (("task_id",), ("text", "prompt"), ("test_list",)),
        ("google-research-datasets/mbpp", "full", "test"),
        max_new_tokens=512,
        quality=PASS_AT_1,
    ),
    "xsum": Task(read_xsum, (("document",), ("summary",)), ("EdinburghNLP/xsum", None, "test"), 128, quality=ROUGE),
    "cnndm": Task(
        read_cnndm, (("article",), ("highlights",)), ("abisee/cnn_dailymail", "3.0.0", "test"), 256, quality=ROUGE
    ),
    "classeval": Task(
        read_classeval,
        (("task_id",), ("skeleton",), ("class_name",), ("test",), ("test_classes",)),
        ("FudanSELab/ClassEval", None, "test"),
        max_new_tokens=2048,
        quality=PASS_AT_1,
    ),
    "specbench": Task(read_conversation, (("turns",),), None, max_new_tokens=1024),
}
