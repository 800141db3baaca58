"""Figures of the answers, as plain data and as a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from lade.commands.eval.answers import LADE, PLAIN, Answer
from lade.commands.eval.results import Key
from lade.commands.eval.tasks import Question
from lade.config import LookaheadConfig

MEMORY_KEPT = "lade's memory is kept from question to question, without what the warm-up taught it."
MEMORY_EMPTY = "Each answer of lade begins with an empty memory."


def summarize(
    questions: list[Question], methods: list[str], answers: dict[Key, Answer], scores: dict[Key, dict[str, Any]]
) -> dict[str, Any]:
    """Figures of each method over the questions that every method has answered, and of each category of them.

    identical_outputs and speed_ratio compare with plain generate(), and are None where that did not run.
    """
    done = [question for question in questions if all(_is_whole(answers.get((question.id, m))) for m in methods)]
    skipped = {q.id: reason for q in questions for m in methods if (reason := _skipped(answers.get((q.id, m))))}
    figures: dict[str, Any] = {
        "questions": len(done),
        "skipped": skipped,
        "methods": {method: _of_method(method, done, methods, answers, scores) for method in methods},
    }
    categories = list(dict.fromkeys(question.category for question in done if question.category))
    if len(categories) > 1:
        figures["categories"] = {
            category: {
                method: _of_method(method, [q for q in done if q.category == category], methods, answers, scores)
                for method in methods
            }
            for category in categories
        }
    return figures


def _is_whole(answer: Answer | None) -> bool:
    return answer is not None and answer.skipped is None


def _skipped(answer: Answer | None) -> str | None:
    return answer.skipped if answer else None


def _of_method(
    method: str,
    questions: list[Question],
    methods: list[str],
    answers: dict[Key, Answer],
    scores: dict[Key, dict[str, Any]],
) -> dict[str, Any]:
    own = [answers[question.id, method] for question in questions]
    plain = [answers[question.id, PLAIN] for question in questions] if PLAIN in methods else None
    speeds = [answer.num_tokens / sum(answer.seconds) for answer in own if answer.num_tokens]
    figures: dict[str, Any] = {
        "new_tokens": sum(answer.num_tokens for answer in own),
        "seconds": round(sum(sum(answer.seconds) for answer in own), 4),
        "tokens_per_second_mean": _rounded(statistics.fmean(speeds)) if speeds else None,
        "tokens_per_second": _rounded(_speed(own)),
        "tokens_per_step": _rounded(_ratio(sum(a.num_tokens for a in own), sum(sum(a.steps) for a in own))),
        "speed_ratio": _rounded(_ratio(_speed(own), _speed(plain))) if plain else None,
        "identical_outputs": _share(a.tokens == b.tokens for a, b in zip(own, plain, strict=True)) if plain else None,
    }
    if method == LADE:
        reasons = [answer.fallback_reason for answer in own if answer.fallback_reason]
        figures["fallbacks"] = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
    found = [scores[question.id, method] for question in questions if (question.id, method) in scores]
    if found and len(found) == len(own):
        names = [name for name, value in found[0].items() if isinstance(value, float)]
        figures["quality"] = {name: round(statistics.fmean(score[name] for score in found), 4) for name in names}
        if "outcome" in found[0]:
            kinds = [score["outcome"] for score in found]
            figures["outcomes"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    return figures


def _speed(answers: list[Answer] | None) -> float | None:
    """Tokens per second over all answers together."""
    answers = answers or []
    return _ratio(sum(answer.num_tokens for answer in answers), sum(sum(answer.seconds) for answer in answers))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _share(values: Iterable[bool]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 4) if found else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def markdown(figures: dict[str, Any], picture: str | None = None) -> str:
    """Conditions, one table over all questions, and one over the categories where there are several.

    picture: the name of a file to be shown below the first table.
    """
    settings = figures["settings"]
    how = "greedy" if not settings["do_sample"] else f"sampled, seed {settings['seed']}"
    config = LookaheadConfig(**settings["lade"])
    is_kept = config.share and not config.uses_window
    lines = [
        f"# {settings['task']}: {settings['model']}",
        "",
        f"{figures['questions']} questions of {settings['data']}, {settings['max_new_tokens']} new tokens at most, {how}, "
        f"{settings['dtype']}, {settings['machine']}, {settings['threads']} threads, torch {settings['torch']}, "
        f"transformers {settings['transformers']}, lade {settings['version']} with {config.description}. {MEMORY_KEPT if is_kept else MEMORY_EMPTY}",
        "",
        *_table(figures["methods"]),
    ]
    if picture:
        lines += ["", f"![Speed relative to plain generate()]({picture})"]
    for category, methods in figures.get("categories", {}).items():
        lines += ["", f"## {category}", "", *_table(methods)]
    notes = [f"Quality: {figures['no_quality']}." if figures.get("no_quality") else ""]
    notes += [f"Left out, {question}: {reason}." for question, reason in figures["skipped"].items()]
    for reason, count in figures["methods"].get(LADE, {}).get("fallbacks", {}).items():
        notes.append(f"Without lookahead ({count} questions): {reason}")
    for note in filter(None, notes):
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _table(methods: dict[str, dict[str, Any]]) -> list[str]:
    qualities = list(dict.fromkeys(name for row in methods.values() for name in row.get("quality", ())))
    heads = ["method", "tokens/s, mean per question", "tokens/s, overall", "ratio to plain", "tokens per step"]
    heads += ["identical outputs", *qualities]
    rows = [heads]
    for name, row in methods.items():
        rows.append(
            [
                name,
                _cell(row["tokens_per_second_mean"], ".1f"),
                _cell(row["tokens_per_second"], ".1f"),
                _cell(row["speed_ratio"], ".2f"),
                _cell(row["tokens_per_step"], ".2f"),
                _cell(row["identical_outputs"], ".1%"),
                *(_cell(row.get("quality", {}).get(quality), ".1%") for quality in qualities),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]  # so that it can be read as it stands
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
