"""`summary.json` and `summary.md`: what has become of each stage, and a verdict per claim. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpu.plan import HAZARDS, PAPER, STAGES
from gpu.record import Row, read_json, write_json

Stages = dict[str, dict[str, Row]]  # rows by key, by stage
Verdict = tuple[bool | None, str]  # None: not known; and by what

ENOUGH_TOKENS = 2.5  # per step, at which the tree is to be twice as fast as a static cache under compile
MOST_OVER_FLOOR = 1.3
FUSING_PAYS = 0.9  # of a step: a compiled forward in a graph must take at most this share, to be worth compiling
REASONS = (  # of GenerationStats
    "fallback_reason",
    "kernel_reason",
    "compile_reason",
    "cuda_graph_reason",
    "packing_reason",
)
UNFINISHED = {"passed": None}  # in place of the rows that a stage did not come to


def stage_rows(out: Path) -> Stages:
    found: Stages = {}
    for stage in STAGES:
        content = read_json(out / f"{stage.name}.json")
        found[stage.name] = content.get("rows", {}) if isinstance(content, dict) else {}
    return found


def with_unfinished(stages: Stages, states: dict[str, Row]) -> Stages:
    """The same with a row `UNFINISHED` in each stage that was not right to its end."""
    ended = {name for name, state in states.items() if state["status"] != "ok"}
    return {name: rows | {"": UNFINISHED} if name in ended else rows for name, rows in stages.items()}


def has_failed(rows: Iterable[Row]) -> bool:
    return any(row.get("passed") is False for row in rows)


def first_error(rows: dict[str, Row], log: Path) -> str | None:
    """One line: of the first row that failed, or else the last line of a traceback in the stage's log."""
    for key, row in rows.items():
        if row.get("passed") is False:
            return f"{key}: {row.get('error') or 'check failed'}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    if not any(line.startswith("Traceback") for line in lines):
        return None
    return next((line[:300] for line in reversed(lines) if line and not line[0].isspace()), None)


def all_passed(stages: Stages, *names: str) -> Verdict:
    by_stage = [[row["passed"] for row in stages.get(name, {}).values() if "passed" in row] for name in names]
    checks = [passed for found in by_stage for passed in found if passed is not None]
    if all(checks) and any(not found or None in found for found in by_stage):
        return None, "not all of it has run"
    return all(checks), f"{sum(checks)} of {len(checks)} checks"


def kernel_right(stages: Stages) -> Verdict:
    verdict, by = all_passed(stages, "kernel")
    if verdict and not any(row.get("used_kernel") for row in stages["kernel"].values()):
        return None, "the kernel itself did not run here"
    return verdict, by


def capture_right(stages: Stages) -> Verdict:
    verdict, by = all_passed(stages, "modes", *HAZARDS)
    if verdict and not any(row.get("captured_steps") for row in stages["modes"].values()):
        return None, "nothing was captured"
    return verdict, by


def median(stages: Stages, stage: str, key: str, name: str = "milliseconds") -> float | None:
    found = stages.get(stage, {}).get(key, {}).get(name)
    return found["median"] if isinstance(found, dict) else found


def at_most(value: float | None, limit: float, unit: str = "") -> Verdict:
    return (None, "not measured") if value is None else (value <= limit, f"{value:.2f}{unit}, at most {limit}{unit}")


def at_least(value: float | None, limit: float, unit: str = "") -> Verdict:
    return (None, "not measured") if value is None else (value >= limit, f"{value:.2f}{unit}, at least {limit}{unit}")


def ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def near_floor(stages: Stages) -> Verdict:
    return at_most(median(stages, "costs", "kernel, context 512, 56 tokens", "to_floor"), MOST_OVER_FLOOR)


def capture_pays(stages: Stages) -> Verdict:
    found = (median(stages, "costs", f"{form}, context 512, 56 tokens") for form in ("captured", "eager"))
    return at_most(ratio(*found), 0.9, " of the eager step")


def kernel_pays(stages: Stages) -> Verdict:
    found = (median(stages, "costs", f"{form}, context 4096, 56 tokens") for form in ("kernel", "captured"))
    return at_most(ratio(*found), 1.0, " of the captured step without it")


def compiling_pays(stages: Stages) -> Verdict:
    """Whether a compiler's fused operations are worth more work: see docs/gpu.md."""
    forms = ("compiled kernel", "kernel")
    found = (median(stages, "compile", f"{form}, context 512, 56 tokens") for form in forms)
    verdict, by = at_most(ratio(*found), FUSING_PAYS, " of the captured step without it")
    seconds = median(stages, "compile", "compiled kernel, context 512, 56 tokens", "first_call_seconds")
    return verdict, by if seconds is None else f"{by}; first call {seconds:.0f} s"


def lookahead_is_free(stages: Stages) -> Verdict:
    """Then lookahead is faster than eager generate() by its tokens per step, or more."""
    found = (median(stages, "speeds", name, "milliseconds_per_step") for name in (PAPER, "plain"))
    return at_most(ratio(*found), 1.0, " of an eager step")


def tree_beats_static(stages: Stages) -> Verdict:
    """On real text, in bfloat16."""
    tree = median(stages, "bundled", "bfloat16, lade", "tokens_per_second")
    return at_least(
        ratio(tree, median(stages, "bundled_static", "bfloat16, static", "tokens_per_second")), 1.5, " times"
    )


def tree_doubles_static(stages: Stages) -> Verdict:
    tree = median(stages, "speeds", "tree", "milliseconds_per_step")
    step = ratio(median(stages, "static", "static", "milliseconds_per_step"), tree)
    return at_least(step and ENOUGH_TOKENS * step, 2.0, f" times at {ENOUGH_TOKENS} tokens per step")


def captured_once(stages: Stages) -> Verdict:
    return all_passed(stages, "mixed_lengths")


CLAIMS: tuple[tuple[str, bool, Callable[[Stages], Verdict]], ...] = (  # and whether only a GPU decides it
    ("every mode gives plain generate()'s tokens", False, lambda stages: all_passed(stages, "modes")),
    ("kernel right", False, kernel_right),
    ("capture right", False, capture_right),
    ("the GPU's own tests pass", True, lambda stages: all_passed(stages, "tests")),
    ("mixed lengths are captured once per shape and capacity", False, captured_once),
    ("7B: a step of 56 tokens at most 1.3 times the bytes floor", True, near_floor),
    ("7B: capturing pays", True, capture_pays),
    ("7B: the kernel pays at 4,096 tokens", True, kernel_pays),
    ("7B: COMPILE=1 pays in a graph", True, compiling_pays),
    ("7B: a step of lookahead (5, 15, 15) at most one of eager generate()", True, lookahead_is_free),
    ("real text: tree captured >= 1.5x static + compile", True, tree_beats_static),
    ("7B: tree >= 2x static + compile at 2.5 tokens per step", True, tree_doubles_static),
)


def verdicts(stages: Stages, is_stand_in: bool) -> list[Row]:
    """is_stand_in: whether graphs were stood in for, so that times and skipped tests say nothing about a GPU."""
    found = []
    for claim, needs_gpu, decide in CLAIMS:
        verdict, by = (None, "a stand-in says nothing") if needs_gpu and is_stand_in else decide(stages)
        word = {True: "yes", False: "NO", None: "unknown"}[verdict]
        found.append({"claim": claim, "verdict": word, "by": by})
    return found


def write_summary(out: Path, states: dict[str, Row], settings: Row, is_stand_in: bool) -> Row:
    """states: by stage, `status`, `seconds` and so on, as `gpu_check` found them. Returns what summary.json holds."""
    stages = stage_rows(out)
    rows = []
    for stage in STAGES:
        if stage.name not in states:
            continue
        found = stages[stage.name]
        reasons = sorted({f"{name}: {row[name]}" for row in found.values() for name in REASONS if row.get(name)})
        state = states[stage.name]
        error = first_error(found, out / f"{stage.name}.log") if state["status"] in ("failed", "timeout") else None
        rows.append(
            {
                "stage": stage.name,
                "what": stage.what,
                **state,
                "rows": len(found),
                "first_error": error,
                "reasons": reasons,
            }
        )
    environment = stages["environment"].get("environment", {})
    content = {"benchmark": "gpu_check", "settings": settings, "environment": environment, "is_stand_in": is_stand_in}
    content |= {"claims": verdicts(with_unfinished(stages, states), is_stand_in), "stages": rows}
    write_json(out / "summary.json", content)
    (out / "summary.md").write_text(as_markdown(content), encoding="utf-8")
    return content


def as_markdown(content: Row) -> str:
    machine = content["environment"]
    lines = [
        "# GPU check",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items() if isinstance(value, (str, int))),
    ]
    if content["is_stand_in"]:
        lines += ["", "CUDA graphs were stood in for: this shows that the command runs, and nothing about a GPU."]
    lines += ["", "| claim | verdict | by |", "|---|---|---|"]
    lines += [f"| {row['claim']} | {row['verdict']} | {row['by']} |" for row in content["claims"]]
    lines += ["", "| stage | status | seconds | rows | first error |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['stage']} | {row['status']} | {row['seconds']:.0f} | {row['rows']} | {cell(row['first_error'])} |"
        for row in content["stages"]
    ]
    reasons = [f"- {row['stage']}: {reason}" for row in content["stages"] for reason in row["reasons"]]
    return (
        "\n".join([*lines, *(["", "What did not go the way it was meant to:", "", *reasons] if reasons else [])]) + "\n"
    )


def cell(text: Any) -> str:
    return "" if text is None else str(text).replace("|", "\\|")
