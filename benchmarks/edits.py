"""Edits of functions by a chat model: how many passes and how much time a predicted output saves.

    python benchmarks/edits.py --model_path MODEL --dtype float32 --set HumanEval.jsonl

Each function of a file of JSON lines with `prompt`, `canonical_solution` and `entry_point` (HumanEval's) is edited
three times: renamed, given one more argument, given another docstring. A fourth question, "again", has it written a
second time after a change of the question. With --one_each a function has one of the three, in turn. Each is asked once
by each method, the methods next to each other in an order that changes from one to the next. `lade_predicted` is lade
with the function as it was as PREDICTION, or with the first answer. Each call of lade begins with an empty memory
(SHARE=0). Ratios are to plain generate() on the same edit. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import harness

import lade
from lade.commands.measure import NOT_SHARED, generate_timed

EDITS = {
    "rename": "Rename the function `{name}` to `{name}_v2`, wherever its name stands.",
    "argument": "Add a last argument `verbose: bool = False` to the function; if it is true, the function begins with "
    "printing its other arguments.",
    "docstring": "Replace the function's docstring by one short sentence without examples, and leave the rest as it is.",
}
QUESTION = "{edit}\n\n```python\n{function}```\n\nAnswer with the whole function in a Python code block, nothing else."
WRITE = "Write this function:\n\n```python\n{head}```"
AGAIN = "\n\nGive its arguments short names."
METHODS = ("plain", "prompt_lookup", "lade", "lade_predicted")


def read_edits(
    model: Any, tokenizer: Any, path: Path, limit: int, one_each: bool, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Of each of the first functions three edits and a changed question, or one edit: the model's inputs, and the ids
    of the text that its answer will resemble."""

    def asked(content: str) -> Any:
        turns = [{"role": "user", "content": content}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return inputs.to(model.device)

    edits = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit]):
        row = json.loads(line)
        function = row["prompt"] + row["canonical_solution"]
        before = tokenizer(function, add_special_tokens=False)["input_ids"]
        kinds = list(EDITS.items())
        for kind, edit in kinds[number % 3 : number % 3 + 1] if one_each else kinds:
            content = QUESTION.format(edit=edit.format(name=row["entry_point"]), function=function)
            edits.append({"kind": kind, "inputs": asked(content), "before": before})
        if one_each:
            continue
        written = WRITE.format(head=row["prompt"])
        with lade.enabled(False):
            before, _ = generate_timed(model, asked(written), **common)
        edits.append({"kind": "again", "inputs": asked(written + AGAIN), "before": before})
    return edits


def run_method(model: Any, edit: dict[str, Any], method: str, common: dict[str, Any]) -> tuple[list[int], float, int]:
    """New tokens, seconds and forward passes of one edit."""
    own = {"prompt_lookup_num_tokens": 10} if method == "prompt_lookup" else {}
    prediction = edit["before"] if method == "lade_predicted" else None
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    with lade.enabled(method.startswith("lade")):
        if not method.startswith("lade"):
            hook = model.register_forward_hook(count)
            found = generate_timed(model, edit["inputs"], **common, **own)
            hook.remove()
            return *found, steps
        with lade.enabled(PREDICTION=prediction, **NOT_SHARED):
            found = generate_timed(model, edit["inputs"], **common)
        stats = lade.last_stats()
        if stats is None or stats.fallback_reason is not None:
            raise RuntimeError(f"lookahead did not run: {stats and stats.fallback_reason}")
        return *found, stats.steps


def run(model: Any, edits: list[dict[str, Any]], common: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Append one row per edit."""
    for method in METHODS:
        run_method(model, edits[-1], method, common)  # a warm-up
    for number, edit in enumerate(edits):
        turn = number % len(METHODS)
        found = {method: run_method(model, edit, method, common) for method in METHODS[turn:] + METHODS[:turn]}
        tokens, seconds, _ = found["plain"]
        row: dict[str, Any] = {"edit": edit["kind"], "tokens": len(tokens), "plain_seconds": round(seconds, 3)}
        for method in METHODS[1:]:
            ids, own_seconds, steps = found[method]
            ratio = len(ids) / own_seconds / (len(tokens) / seconds)  # in half precision texts may differ in length
            row[method] = {"tokens": len(ids), "steps": steps, "ratio": round(ratio, 3), "identical": ids == tokens}
        rows.append(row)
        print(row, flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind of edit and for all: tokens per pass, the median and the worst ratio, identical texts."""
    figures: dict[str, Any] = {}
    for kind in dict.fromkeys([*(row["edit"] for row in rows), "all"]):
        chosen = [row for row in rows if kind in (row["edit"], "all")]
        figures[kind] = {"edits": len(chosen), "tokens": sum(row["tokens"] for row in chosen)}
        for method in METHODS[1:]:
            ratios = [row[method]["ratio"] for row in chosen]
            tokens, steps = (sum(row[method][name] for row in chosen) for name in ("tokens", "steps"))
            figures[kind][method] = {
                "tokens_per_step": round(tokens / steps, 2),
                "ratio": round(median(ratios), 2),
                "worst": min(ratios),
                "identical": sum(row[method]["identical"] for row in chosen),
            }
            print(f"{kind:<10} {method:<15} {figures[kind][method]}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_model_arguments(parser)
    parser.add_argument("--set", type=Path, required=True, help="JSON lines of functions, as HumanEval's")
    parser.add_argument("--one_each", action="store_true", help="one edit a function, the kinds in turn")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    model, tokenizer = harness.load_model(args)
    if not tokenizer.chat_template:
        parser.error(f"--model_path must be a chat model, {args.model_path!r} has no chat template")
    common: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "repetition_penalty": 1.0}
    lade.augment_all()
    edits = read_edits(model, tokenizer, args.set, args.limit, args.one_each, common)
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"benchmark": "edits", "environment": harness.environment(model), "settings": common}
    figures["rows"] = rows
    with harness.reporting(figures, args.out):
        run(model, edits, common, rows)
        figures |= summary(rows)


if __name__ == "__main__":
    main()
