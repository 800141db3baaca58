"""What `lade tune` prints, and the file it writes."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lade.commands.forward_costs import cost_at
from lade.commands.measure import MEMORY_NOTE
from lade.commands.tune.candidates import Settings
from lade.commands.tune.search import Findings, Row, gain_of

PLOT_WIDTH, PLOT_HEIGHT = 60, 14
MAX_ROWS = 12  # of the table; the file has all
NOTHING_PAYS = "nothing was faster than plain generate() on this device and these prompts: leave lade off"
KEEP_DEFAULT = "keep the default: no other settings were clearly faster on this device and these prompts"
STOPPED = "stopped before anything was judged: keep the default"


def settings_file(findings: Findings, asked: dict[str, Any]) -> dict[str, Any]:
    """What `config_lade(CONFIG=...)` reads: the recommended settings, or none and a note, and what was measured.

    asked: what the measurement was told, kept with it.
    """
    best = findings.best
    costs = {str(size): round(cost_at(findings.seconds, size), 4) for size in findings.seconds}
    measured = {
        **asked,
        "environment": findings.environment,
        "prompts": {"choosing": findings.prompts[0], "judging": findings.prompts[1]},
        "trials": findings.trials,
        "noise": round(findings.noise, 4),
        "stopped": findings.is_stopped,
        "memory": MEMORY_NOTE,
        "context": findings.context,
        "milliseconds_per_step": {str(size): round(1000 * took, 4) for size, took in findings.seconds.items()},
        "step_cost": costs,
        "corrections": findings.corrections,
        "candidates": [asdict(row) for row in findings.rows],
        "cannot_pay": findings.hopeless,
    }
    return {**(best.settings if best else {"note": why_not(findings)}), "measured": measured}


def why_not(findings: Findings) -> str:
    """Why the default is kept."""
    default = findings.default
    if default is None or default.ratio is None or not default.is_judged:
        return STOPPED
    return NOTHING_PAYS if default.ratio["median"] < 1 else KEEP_DEFAULT


def as_text(findings: Findings, path: Path) -> str:
    """The report. path: where the file of settings lies."""
    parts = [cost_table(findings)] if findings.seconds else []
    if findings.rows:
        parts += [plot(findings), candidate_table(findings)]
    return "\n".join([*parts, not_tried(findings) + verdict(findings, path)])


def cost_table(findings: Findings) -> str:
    sizes = list(findings.seconds)
    costs = [cost_at(findings.seconds, size) for size in sizes]
    return (
        f"cost of a step over so many tokens, relative to one ({1000 * findings.seconds[1]:.2f} ms), after "
        f"{findings.context} tokens of text\n"
        f"  tokens {''.join(f'{size:>7}' for size in sizes)}\n"
        f"  cost   {''.join(f'{cost:>7.2f}' for cost in costs)}\n"
    )


def plot(findings: Findings) -> str:
    """Tokens per step of the candidates, and the cost of a step, against the tokens of a block."""
    rows, best = findings.rows, findings.best
    largest = max([*findings.seconds, *(row.mean_block for row in rows)])
    top = max([1.5, *(row.tokens_per_step for row in rows)]) * 1.1
    canvas = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]

    def column(tokens: float) -> int:
        return round(math.log(max(1, tokens)) / math.log(max(2, largest)) * (PLOT_WIDTH - 1))

    def put(x: int, height: float, mark: str) -> None:
        y = round((height - 1) / (top - 1) * (PLOT_HEIGHT - 1))
        if 0 <= y < PLOT_HEIGHT:
            canvas[PLOT_HEIGHT - 1 - y][x] = mark

    for x in range(PLOT_WIDTH):
        put(x, cost_at(findings.seconds, max(2, largest) ** (x / (PLOT_WIDTH - 1))), ".")
    for row in reversed(rows):  # so that what matters is drawn over the others
        put(column(row.mean_block), row.tokens_per_step, "*" if row is best else "#" if row.ratio else "o")
    axis = [" "] * (PLOT_WIDTH + 4)
    for size in findings.seconds:
        axis[column(size) : column(size) + len(str(size))] = str(size)
    lines = ["tokens per step (o predicted, # measured, * best) and cost of a step (.) by tokens in the block"]
    for i, line in enumerate(canvas):
        height = 1 + (top - 1) * (PLOT_HEIGHT - 1 - i) / (PLOT_HEIGHT - 1)
        lines.append(f"{height:>6.2f} |{''.join(line)}".rstrip())
    lines += [" " * 7 + "+" + "-" * PLOT_WIDTH, " " * 8 + "".join(axis).rstrip()]
    return "\n".join(lines) + "\n  above the dots is faster than plain generate()\n"


def candidate_table(findings: Findings) -> str:
    rows = findings.rows[:MAX_ROWS]
    names = [describe(row.settings) for row in rows]
    width = max([len("settings"), *map(len, names)])
    lines = [
        f"{'settings':<{width}} {'block':>5} {'tokens/step':>11} {'predicted':>9} {'to plain':>19} {'to the default':>19} same"
    ]
    for name, row in zip(names, rows, strict=True):
        same = "-" if row.identical is None else f"{row.identical:.0%}"
        lines.append(
            f"{name:<{width}} {row.mean_block:>5.1f} {row.tokens_per_step:>11.2f} {row.corrected:>9.2f} "
            f"{_spread(row.ratio):>19} {_spread(row.gain):>19} {same:>4}{'' if row.is_judged or not row.ratio else ' *'}"
        )
    if len(findings.rows) > len(rows):
        lines.append(f"and {len(findings.rows) - len(rows)} more that were predicted to be slower")
    if any(row.ratio and not row.is_judged for row in rows):
        lines.append("* timed on the prompts that the winner was chosen by, the others on prompts of their own")
    lines.append(
        "ratios of tokens per second: median (20th to 80th percentile); same: outputs equal to plain generate()'s"
    )
    return "\n".join([*lines, MEMORY_NOTE]) + "\n"


def _spread(found: dict[str, float] | None) -> str:
    return f"{found['median']:.2f} ({found['p20']:.2f} to {found['p80']:.2f})" if found else "-"


def not_tried(findings: Findings) -> str:
    count = len(findings.hopeless)
    return f"{count} candidates were not tried: their window alone costs more than a step can yield.\n" if count else ""


def describe(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "default"


def verdict(findings: Findings, path: Path) -> str:
    best: Row | None = findings.best
    if best is not None:
        return (
            f"{describe(best.settings)}: {_spread(best.gain)} times the default,\n"
            f"{_spread(best.ratio)} times plain generate(), on {findings.prompts[1]} prompts that nothing was chosen by.\n"
            f"The default differed from itself by up to {findings.noise - 1:.0%}.\n"
            f"{path} has these settings: config_lade(CONFIG={str(path)!r}), LADE_CONFIG={path} or lade --config {path}.\n"
        )
    reason, default = why_not(findings), findings.default
    figures = ""
    if default is not None and default.is_judged:
        figures = f"\nThe default is {_spread(default.ratio)} times plain generate()."
        challenger = max((row for row in findings.rows if row.is_judged and row.settings), key=gain_of, default=None)
        if challenger is not None:
            how = "takes the same steps as" if challenger.is_same_work else f"is {_spread(challenger.gain)} times"
            figures += f"\nThe best of the others, {describe(challenger.settings)}, {how} the default"
            figures += f", which differed from itself by up to {findings.noise - 1:.0%}."
    return f"{reason[0].upper()}{reason[1:]}.{figures}\n{path} says so, and sets nothing.\n"
