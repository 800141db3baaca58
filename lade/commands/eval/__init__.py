"""`lade eval` and `applications/eval.py`: speed of several methods on a task, and quality of their answers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lade
from lade.commands.eval.answers import LADE, METHODS, PLAIN
from lade.commands.eval.data import BadData, load_questions
from lade.commands.eval.picture import picture
from lade.commands.eval.programs import WARNING, Limits
from lade.commands.eval.quality import NoQuality, scorer_for
from lade.commands.eval.report import markdown, summarize
from lade.commands.eval.results import BadResults, Results
from lade.commands.eval.tasks import PASS_AT_1, TASKS, Question
from lade.commands.model import BUNDLED, add_model_arguments, load, parse
from lade.commands.progress import progress

COMPARED = {"on": [LADE], "off": [PLAIN], "both": [PLAIN, LADE]}
BASELINES = [name for name in METHODS if name not in (PLAIN, LADE)]


def main(arguments: list[str]) -> int:
    return evaluate(arguments, "lade eval")


def evaluate(arguments: list[str], program: str) -> int:
    """Answer, score, report. Returns the exit status."""
    parser = make_parser(program)
    args = parse(parser, arguments)
    if args.plot:
        return plot(args.plot, args.out, program)
    complete(parser, args)
    limits = Limits(args.code_seconds, args.code_megabytes)
    try:
        questions, data = load_questions(args.task, args.data, args.limit)
        results = Results(args.out, settings_of(args, data))
    except (BadData, BadResults) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 2
    if args.run_code and TASKS[args.task].quality == PASS_AT_1:
        sys.stderr.write(WARNING)
    methods = [*COMPARED[args.lade], *args.compare_with]
    try:
        answer_all(args, questions, methods, results)
        no_quality = score_all(args, questions, methods, results, limits)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: stopped; the same command goes on from {args.out}\n")
        return 130
    figures = {"settings": results.settings} | summarize(questions, methods, results.answers, results.scores)
    if no_quality:
        figures["no_quality"] = no_quality
    write_report(figures, args.out, args.json)
    return 0


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description="Speed and quality of generate() on a published task.")
    add = parser.add_argument
    add("--task", choices=list(TASKS))
    add(
        "--data",
        help="JSON lines as published, or a data set on the hub: name[:configuration][@split]; default: the task's",
    )
    add("--lade", choices=list(COMPARED), default="both", help="with lookahead, without, or both (default)")
    add("--compare-with", type=baselines, default=[], metavar="METHOD,...", help=f"also run: {', '.join(BASELINES)}")
    add("--limit", type=int, help="only so many questions, from the first")
    add("--prompt", choices=["auto", "chat", "text"], default="auto", help=PROMPT_HELP)
    add("--do_sample", action="store_true", help="sample; default: greedy")
    add("--run_code", action="store_true", help="run the programs that the model wrote, for pass@1: with your rights")
    add("--code_seconds", type=int, default=Limits().seconds, help="a program's time")
    add("--code_megabytes", type=int, default=Limits().megabytes, help="a program's memory")
    add(
        "--out",
        type=Path,
        help="JSON lines, resumed if the file exists. Table, figures and picture are written next to it",
    )
    add("--json", action="store_true", help="print the figures as one line of JSON in place of the table")
    add(
        "--plot",
        type=Path,
        nargs="+",
        metavar="RUN.json",
        help="only draw one picture (--out, default eval.svg) of runs made before",
    )
    add_model_arguments(parser, max_new_tokens=0)
    parser.set_defaults(max_new_tokens=None)
    return parser


PROMPT_HELP = "ask through the chat template, or let the model go on with a text; default: by whether it has a template"


def baselines(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in BASELINES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(BASELINES)}, separated by commas, got {name!r}")
    return names


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what argparse does not, and fill in what depends on other arguments."""
    if args.task is None:
        parser.error(f"--task must be one of {', '.join(TASKS)}")
    if args.max_new_tokens is None:
        args.max_new_tokens = TASKS[args.task].max_new_tokens
    for name in ("max_new_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if args.temperature is not None and args.temperature < 0:
        parser.error(f"--temperature must not be negative, got {args.temperature}")
    if args.do_sample and args.temperature == 0:
        parser.error("--temperature must be above 0 with --do_sample, got 0.0")
    for name in ("temperature", "top_p"):
        if not args.do_sample and getattr(args, name):
            parser.error(f"--{name} needs --do_sample")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        parser.error(f"--top_p must be above 0 and at most 1, got {args.top_p}")
    import torch

    try:
        Limits(args.code_seconds, args.code_megabytes)
        torch.empty(0, device=args.device)
    except (
        ValueError,
        RuntimeError,
        AssertionError,
    ) as error:  # the last two: how torch says that there is no such device
        is_limit = isinstance(error, ValueError)
        parser.error(str(error) if is_limit else f"--device must be one that torch finds here, got {args.device!r}")
    if args.out is None:
        args.out = Path(f"eval-{args.task}-{model_name(args).replace('/', '-')}.jsonl")
    if args.out.suffix != ".jsonl":
        parser.error(f"--out must end with .jsonl, got {args.out}")


def model_name(args: argparse.Namespace) -> str:
    is_folder = Path(args.model_path).is_dir()
    return Path(args.model_path).resolve().name if is_folder else str(args.model_path)


def settings_of(args: argparse.Namespace, data: dict[str, str]) -> dict[str, Any]:
    """Everything that answers and times depend on. A file of answers is only resumed when it is equal."""
    import torch
    import transformers

    from lade.block_size.tables import cpu_name

    device = torch.device(args.device)
    return {
        "task": args.task,
        **data,
        "model": model_name(args) if args.model_path == str(BUNDLED) else args.model_path,
        "prompt": args.prompt,
        "dtype": args.dtype,
        "device": args.device,
        "do_sample": args.do_sample,
        "temperature": args.temperature if args.do_sample else None,
        "top_p": args.top_p,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "lade": asdict(lade.current_config()),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": lade.__version__,
    }


def choice_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of generate() that say how tokens are chosen; greedy where sampling is not asked for."""
    choice: dict[str, Any] = {"do_sample": args.do_sample, "num_beams": 1, "max_new_tokens": args.max_new_tokens}
    if args.do_sample:
        choice |= {name: getattr(args, name) for name in ("temperature", "top_p") if getattr(args, name) is not None}
    return choice


def answer_all(args: argparse.Namespace, questions: list[Question], methods: list[str], results: Results) -> None:
    """Answer what is not in the file yet, the methods taking turns on each question."""
    missing = [(q, m) for q in questions for m in methods if (q.id, m) not in results.answers]
    if not missing:
        return
    from lade.commands.eval.methods import Answerer

    model, tokenizer = load(args)
    answerer = Answerer(model, tokenizer, uses_chat(args, tokenizer), args.seed, choice_of(args))
    with progress(len(questions) * len(methods), len(questions) * len(methods) - len(missing), "answers") as advance:
        with lade.Memory().active():  # forgotten afterwards, because the first question is asked again
            for method in dict.fromkeys(method for _, method in missing):
                answerer.answer(missing[0][0], method)  # a warm-up, which does not count
        for question, method in missing:
            results.add_answer(answerer.answer(question, method))
            advance(method)


def uses_chat(args: argparse.Namespace, tokenizer: Any) -> bool:
    return args.prompt == "chat" or (args.prompt == "auto" and bool(tokenizer.chat_template))


def score_all(
    args: argparse.Namespace, questions: list[Question], methods: list[str], results: Results, limits: Limits
) -> str | None:
    """Score what is not scored yet. Returns why there are no scores, None where there are."""
    found_with = [limits.seconds, limits.megabytes] if TASKS[args.task].quality == PASS_AT_1 else None
    missing = []
    for question in questions:
        for method in methods:
            is_scored = results.scores.get((question.id, method), {}).get("limits", ()) == found_with
            if not is_scored and results.answers[question.id, method].skipped is None:
                missing.append((question, results.answers[question.id, method]))
    if not missing:
        return None
    try:
        score = scorer_for(args.task, args.run_code, limits)
    except NoQuality as error:
        return str(error)
    with progress(len(missing), 0, "scores") as advance:
        for question, answer in missing:
            scores = score(question, answer.texts[0], answer.is_continuation)
            results.add_scores((question.id, answer.method), scores | {"limits": found_with})
            advance(answer.method)
    return None


def write_report(figures: dict[str, Any], out: Path, as_json: bool) -> None:
    """Write table, figures and picture next to the answers; print the table, or the figures as one line of JSON."""
    drawn = picture([figures])
    text = markdown(figures, out.with_suffix(".svg").name if drawn else None)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if drawn:
        out.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    kinds = [".md", ".json", *([".svg"] if drawn else [])]
    written = ", ".join(out.with_suffix(kind).name for kind in kinds)
    sys.stdout.write(
        f"{markdown(figures)}\nAnswers in {out}; this table, all figures and a picture next to it: {written}\n"
    )


def plot(paths: list[Path], out: Path | None, program: str) -> int:
    """One picture of several runs. paths: their files of figures. Returns the exit status."""
    out = out or Path("eval.svg")
    try:
        drawn = picture([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.stderr.write(f"{program}: --plot must have the .json files of runs: {type(error).__name__}: {error}\n")
        return 2
    if drawn is None:
        sys.stderr.write(f"{program}: --plot needs runs of plain generate() and of others: there is no ratio to draw\n")
        return 2
    out.write_text(drawn, encoding="utf-8")
    sys.stdout.write(f"{out}\n")
    return 0
