"""Draws the committed results: one picture for each file of benchmarks/results that shows something.

    python benchmarks/plots.py
    python benchmarks/plots.py --results FOLDER --out FOLDER

Needs matplotlib (pip install matplotlib), which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LABELS = {
    "plain": "plain",
    "static": "static\ncache,\ncompiled",
    "prompt_lookup": "prompt\nlookup",
    "lade_unpacked": "lade,\nunpacked\nweights",
    "lade": "lade",
    "lade_kept": "lade,\nmemory\nkept",
    "lookahead": "lade,\npaper's\nwindow",
}
OURS, OTHERS = "#1a7f37", "#8c959f"  # lade's bars stand out
Figures = dict[str, Any]


def error_bars(spreads: list[Figures]) -> list[list[float]]:
    """Distances from the medians down to p20 and up to p80, as matplotlib wants them."""
    return [[s["median"] - s["p20"] for s in spreads], [s["p80"] - s["median"] for s in spreads]]


def draw_decode(axes: Any, figures: Figures) -> None:
    """Speed of each method over plain generate(); the time of a step where the weights were random."""
    if "steps" in figures:
        names, spreads = list(figures["steps"]), [row["milliseconds_per_step"] for row in figures["steps"].values()]
        axes.set_ylabel(f"milliseconds per step ({figures['shape']} shape, random weights)")
    else:
        names, spreads = list(figures["methods"]), [row["ratio_to_plain"] for row in figures["methods"].values()]
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_ylabel("tokens per second, over plain generate()")
    medians = [spread["median"] for spread in spreads]
    colors = [OURS if name.startswith("lade") else OTHERS for name in names]
    labels = [LABELS.get(name, name) for name in names]
    bars = axes.bar(labels, medians, yerr=error_bars(spreads), capsize=4, color=colors)
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")


def draw_step_cost(axes: Any, figures: Figures) -> None:
    """The forward's time by the block's tokens, one line per context."""
    for context in sorted({row["context"] for row in figures["forward"]}):
        rows = [row for row in figures["forward"] if row["context"] == context]
        times = [row["milliseconds"] for row in rows]
        axes.errorbar(
            [row["tokens"] for row in rows],
            [time["median"] for time in times],
            yerr=error_bars(times),
            marker="o",
            capsize=3,
            label=f"{context} tokens before",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("milliseconds of the forward")
    axes.legend()


def draw_parts(axes: Any, figures: Figures) -> None:
    """Share of each part of a step."""
    shares = {name: row["share"] for name, row in figures["parts"].items()}
    bars = axes.barh(list(shares), [100 * share for share in shares.values()])
    axes.bar_label(bars, fmt="%.1f %%", padding=2)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("share of a step, %")


def draw_replay(axes: Any, figures: Figures) -> None:
    """Tokens per step of each drafter by the block's size, one line with an empty memory and one, dashed, with one that
    is kept."""
    cells: dict[str, dict[str, dict[int, list[float]]]] = {}
    for key, cell in figures["replays"].items():
        *_, mode, q, memory = key.split()
        cells.setdefault(mode, {}).setdefault(memory, {}).setdefault(int(q[2:]), []).append(cell["S_without_loops"])
    others = iter(("#0969da", "#bf3989", "#9a6700", "#8250df", "#57606a", "#cf222e"))
    for mode, lines in cells.items():
        if len(lines["cold"]) < 2:
            continue
        is_ours = mode == "tree"
        color, label = (OURS, "lade") if is_ours else (next(others), mode)
        for memory, by_size in lines.items():
            sizes = sorted(by_size)
            style = {"linestyle": "-", "label": label} if memory == "cold" else {"linestyle": "--"}
            means = [geometric_mean(by_size[q]) for q in sizes]
            axes.plot(sizes, means, marker="o", markersize=3, linewidth=2 if is_ours else 1, color=color, **style)
            axes.set_xticks(sizes, [str(q) for q in sizes])
    axes.set_ylim(bottom=1)
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("tokens per step (dashed: memory kept)")
    axes.legend(fontsize=6)


def acceptance_by_source(figures: Figures) -> dict[str, list[float]]:
    """Guesses whose parent was accepted, and how many of them were expected and found to be right, by source."""
    found: dict[str, list[float]] = {}
    for cell in figures["replays"].values():
        for source, counts in cell["acceptance"].items():
            found[source] = [a + b for a, b in zip(found.get(source, [0, 0, 0]), counts, strict=True)]
    return found


def draw_acceptance(axes: Any, figures: Figures) -> None:
    """Measured by predicted acceptance, a point for each source, with its standard error."""
    for source, (count, expected, right) in acceptance_by_source(figures).items():
        share = right / count
        error = (share * (1 - share) / count) ** 0.5
        axes.errorbar(expected / count, share, yerr=error, fmt="o", markersize=4, color=OURS)
        axes.annotate(source, (expected / count, share), fontsize=6, xytext=(4, -6), textcoords="offset points")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set_xlabel("predicted acceptance of a guess whose parent was accepted")
    axes.set_ylabel("measured")


# benchmark -> what is drawn, with the ending of the picture's name
DRAWINGS: dict[str, list[tuple[str, Callable[[Any, Figures], None]]]] = {
    "decode": [("", draw_decode)],
    "step_cost": [("", draw_step_cost), ("-parts", draw_parts)],
    "replay": [("", draw_replay), ("-acceptance", draw_acceptance)],
}


def caption(figures: Figures) -> str:
    """Conditions that a picture states."""
    machine = figures["environment"]
    words = [machine["device"], f"{machine['threads']} threads", machine["dtype"]]
    if "parameters" in machine:
        words.append(f"{machine['parameters'] / 1e6:,.1f} M parameters")
    settings = figures.get("settings", {})
    if "LEVEL" in settings:
        words.append("N={LEVEL} W={WINDOW_SIZE} G={GUESS_SET_SIZE}".format(**settings))
    if "do_sample" in settings:
        words.append("sampled" if settings["do_sample"] else "greedy")
    if figures.get("batch", 1) > 1:
        words.append(f"batch {figures['batch']}")
    return ", ".join(words)


def draw_file(pyplot: Any, path: Path, folder: Path) -> list[Path]:
    """The pictures of one result. Returns their paths; none for a benchmark that is not drawn."""
    figures = json.loads(path.read_text(encoding="utf-8"))
    written = []
    for ending, draw in DRAWINGS.get(figures.get("benchmark"), []):
        if draw is draw_parts and "parts" not in figures:  # stopped before them
            continue
        if draw is draw_acceptance and not acceptance_by_source(figures):
            continue
        if draw is draw_replay and len({key.split()[2] for key in figures["replays"]}) == 1:  # one drafter alone
            continue
        picture, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        draw(axes, figures)
        axes.set_title(caption(figures), fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        written.append(folder / f"{path.stem}{ending}.svg")
        picture.savefig(written[-1], metadata={"Date": None})
        pyplot.close(picture)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="a folder of JSON files")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="the folder for the pictures")
    args = parser.parse_args()
    files = sorted(args.results.glob("*.json"))
    if not files:
        raise SystemExit(f"--results must be a folder with JSON files, got {args.results}")
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots.py needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lade"  # the same picture for the same figures, byte for byte
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size
    import matplotlib.pyplot as pyplot

    args.out.mkdir(parents=True, exist_ok=True)
    for path in files:
        for picture in draw_file(pyplot, path, args.out):
            print(picture)


if __name__ == "__main__":
    main()
