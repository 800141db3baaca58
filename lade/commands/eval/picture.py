"""Speed relative to plain generate() as a picture: bars by task or category, an SVG without any library."""

from __future__ import annotations

from html import escape
from typing import Any

from lade.commands.eval.answers import LADE, PLAIN

WIDTH, LABEL_WIDTH, RIGHT = 720, 190, 56
BAR, GAP, GROUP_GAP, TOP, BOTTOM = 18, 3, 16, 64, 34
OTHER_COLORS = ("#9aa3b2", "#c9b38c", "#b7a3c9")
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1c2230 } .faint { fill: #656d7d } .line { stroke: #d9dce3 } .one { stroke: #656d7d }
  .head { font-size: 15px; font-weight: 600 } .paper { fill: #ffffff } .lade { fill: #2f8f5b } .value { font-size: 12px }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8ee } .faint { fill: #99a1b2 } .line { stroke: #2f3440 } .one { stroke: #99a1b2 } .paper { fill: #1b1e27 }
    .lade { fill: #4fbf86 }
  }
"""

Rows = list[tuple[str, dict[str, float]]]  # label -> method -> ratio to plain


def rows_of(figures: list[dict[str, Any]]) -> Rows:
    """The rows of the picture: one for each run, followed by one for each of its categories."""
    rows: Rows = []
    for run in figures:
        settings = run["settings"]
        rows.append(
            (
                settings["task"] if len(figures) == 1 else f"{settings['task']}, {settings['model']}",
                ratios(run["methods"]),
            )
        )
        rows += [(category, ratios(methods)) for category, methods in run.get("categories", {}).items()]
    return [(label, found) for label, found in rows if found]


def ratios(methods: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        name: row["speed_ratio"]
        for name, row in methods.items()
        if name != PLAIN and row.get("speed_ratio") is not None
    }


def svg(rows: Rows, title: str, note: str) -> str:
    """Horizontal bars from 0; a line marks plain generate(), 1. note: the conditions, in a line."""
    methods = list(dict.fromkeys(method for _, found in rows for method in found))
    top = max([1.2, *(ratio for _, found in rows for ratio in found.values())]) * 1.02
    unit = next(unit for unit in (0.25, 0.5, 1, 2, 5, 10, 50, 100, 1000) if top / unit <= 8)
    scale = (WIDTH - LABEL_WIDTH - RIGHT) / top
    body, y = [], float(TOP)
    for label, found in rows:
        height = len(found) * (BAR + GAP)
        body.append(_text(LABEL_WIDTH - 10, y + height / 2 + 3, _short(label), anchor="end"))
        for method, ratio in found.items():
            body.append(
                f'<rect x="{LABEL_WIDTH}" y="{y:.0f}" width="{ratio * scale:.1f}" height="{BAR}" rx="3" {_fill(method, methods)}>'
                f"<title>{escape(label)}, {escape(method)}: {ratio:.2f} times plain generate()</title></rect>"
            )
            body.append(_text(LABEL_WIDTH + ratio * scale + 6, y + BAR - 5, f"{ratio:.2f}", kind="value"))
            y += BAR + GAP
        y += GROUP_GAP
    lines = []
    for number in range(int(top / unit) + 1):
        x = LABEL_WIDTH + number * unit * scale
        lines.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{y:.0f}"/>')
        lines.append(_text(x, y + 16, f"{number * unit:g}", anchor="middle", kind="faint value"))
    one = LABEL_WIDTH + scale
    lines.append(
        f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 6}" y2="{y:.0f}" stroke-dasharray="4 3"/>'
    )
    legend, x = [], float(LABEL_WIDTH)
    for method in methods:
        legend.append(f'<rect x="{x:.0f}" y="34" width="12" height="12" rx="3" {_fill(method, methods)}/>')
        legend.append(_text(x + 18, 45, method, kind="value"))
        x += 40 + 7 * len(method)
    legend.append(_text(x, 45, "dashed: plain generate()", kind="faint value"))
    whole = y + BOTTOM + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole:.0f}" width="{WIDTH}" height="{whole:.0f}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{whole:.0f}" rx="10"/>'
        + _text(16, 24, title, kind="head")
        + "".join([*legend, *lines, *body])
        + _text(16, whole - 10, note, kind="faint value")
        + "</svg>\n"
    )


def picture(figures: list[dict[str, Any]]) -> str | None:
    """The SVG of one or more runs; None where no run has a ratio to plain generate()."""
    rows = rows_of(figures)
    if not rows:
        return None
    settings = figures[0]["settings"]
    same = all(run["settings"]["machine"] == settings["machine"] for run in figures)
    where = f"{settings['machine']}, {settings['threads']} threads, " if same else ""
    questions = sum(run["questions"] for run in figures)
    note = f"{questions} questions, {settings['model'] if len(figures) == 1 else ''}{', ' if len(figures) == 1 else ''}{where}{settings['dtype']}"
    return svg(rows, "Speed relative to plain generate(), tokens per second", _short(note, 104))


def _fill(method: str, methods: list[str]) -> str:
    if method == LADE:
        return 'class="lade"'
    others = [name for name in methods if name != LADE]
    return f'fill="{OTHER_COLORS[others.index(method) % len(OTHER_COLORS)]}"'


def _short(text: str, length: int = 26) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
