"""How good an answer is, where its task defines that: exact match, ROUGE, pass@1."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from lade.commands.eval.programs import Limits, Outcome, problem, program_of, run_program
from lade.commands.eval.tasks import EXACT_MATCH, PASS_AT_1, ROUGE, TASKS, Question

NUMBER = re.compile(r"(?:(?<![\w)])[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")  # a minus after a digit is a difference
MARKS = (
    re.compile(r"####\s*(.*)"),
    re.compile(r"\\boxed\{([^}]*)\}"),
    re.compile(r"answer is:?\s*(.*)", re.IGNORECASE),
)
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")

Scorer = Callable[[Question, str, bool], dict[str, Any]]


class NoQuality(Exception):
    """No figure of quality can be given; the message says why."""


def scorer_for(task_name: str, run_code: bool, limits: Limits) -> Scorer:
    """A function (question, answer, whether it is a continuation) -> scores from 0 to 1, by name.

    Entries that are texts, such as how a program ended, are no scores. Raises NoQuality.
    """
    quality = TASKS[task_name].quality
    if quality == EXACT_MATCH:
        return exact_match
    if quality == ROUGE:
        return rouge_scorer()
    if quality != PASS_AT_1:
        raise NoQuality("no figure is defined without a judge; the answers are in the file")
    if not run_code:
        raise NoQuality("pass@1 needs --run_code, which runs the programs that the model wrote")
    reason = problem()
    if reason:
        raise NoQuality(f"pass@1 cannot be had here: {reason}")
    outcomes: dict[Any, Outcome] = {}  # methods with equal answers need one run

    def pass_at_1(question: Question, answer: str, is_continuation: bool) -> dict[str, Any]:
        program = program_of(task_name, question, answer, is_continuation)
        if program not in outcomes:
            outcomes[program] = run_program(program, limits)
        found = outcomes[program]
        return {PASS_AT_1: float(found.kind == "passed"), "outcome": found.kind, "error": found.error}

    return pass_at_1


def exact_match(question: Question, answer: str, is_continuation: bool) -> dict[str, Any]:
    """GSM8K: the last number of the answer, or the one it marks as its result, against the reference's."""
    found, wanted = final_number(answer), final_number(question.row["answer"])
    return {EXACT_MATCH: float(found is not None and found == wanted)}


def final_number(text: str) -> Decimal | None:
    """What follows the last ####, stands in the last box, or follows the last "answer is"; else the last number."""
    for mark in MARKS:
        marked = mark.findall(text)
        if marked:
            number = NUMBER.search(marked[-1])
            if number:
                return to_decimal(number[0])
    numbers = NUMBER.findall(text)
    return to_decimal(numbers[-1]) if numbers else None


def to_decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[$,\s]", "", text))
    except InvalidOperation:
        return None


def rouge_scorer() -> Scorer:
    """F-measures with stemming, by the package rouge_score, which `evaluate` calls as well."""
    try:
        library: Any = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError as error:
        raise NoQuality("ROUGE needs the package rouge_score: pip install rouge_score") from error
    scorer = library.RougeScorer(list(ROUGE_KINDS), use_stemmer=True)

    def rouge(question: Question, answer: str, is_continuation: bool) -> dict[str, Any]:
        reference = question.row["summary" if "summary" in question.row else "highlights"]
        scores = scorer.score(reference, answer)
        return {kind: scores[kind].fmeasure for kind in ROUGE_KINDS}

    return rouge
