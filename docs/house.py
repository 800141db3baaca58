"""Draws docs/img/house.svg, lade's parts and what they import, from the imports themselves: `python docs/house.py`.

Knows which floor each part is on; tests/test_house.py checks that imports go down and that the committed picture is the
one drawn. An arrow means "imports". Arrows that follow from others are left out, and so are those to the lowest floor,
open to all parts.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files and folders of lade/ by floor, the lowest first: name -> what it is for.
FLOORS: tuple[dict[str, str], ...] = (
    {"common": "what all parts use"},
    {"config": "settings", "stats": "figures of a call"},
    {
        "block": "tree, layout, mask, cache",
        "switch": "on or off, settings in force",
    },
    {"verification": "which tokens are chosen"},
    {"models": "what a family is", "parallel": "several processes"},
    {"drafting": "who proposes guesses"},
    {"forward": "how a block runs"},
    {"decoding": "the loop"},
    {"augment": "the patch", "preparation": "compiling ahead"},
    {"__init__": "public names"},
    {"commands": "the command line"},
    {"__main__": "python -m lade"},
)
WIDTH, FLOOR, BOX, GAP = 1000, 84, (172, 48), 20
STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; text-anchor: middle }
.name { font-size: 15px; font-weight: 600 }
.what { font-size: 12px; fill: #59636e }
rect { fill: #ffffff; stroke: #8c959f; rx: 6 }
.core { fill: #ddf4ff; stroke: #0969da }
path { fill: none; stroke: #8c959f; stroke-width: 1.2 }
.page { fill: #ffffff; stroke: none }
"""
CORE = ("decoding", "block", "verification", "drafting")  # where a newcomer reads first


def imports() -> dict[str, set[str]]:
    """What each module of lade imports of lade, by dotted names without `lade.`.

    Imports for type checkers alone do not count, except those of `__init__`, which happen when a name is used.
    """
    found = {}
    for path in (ROOT / "lade").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "lade").with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing_only = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" and name != "__init__"
            for inner in ast.walk(node)
        }
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        nodes = [node for node in nodes if node not in typing_only]
        imported = {str(node.module) for node in nodes}
        for alias in (alias.name for node in nodes if node.module == "lade" for alias in node.names):
            is_module = any(alias in floor for floor in FLOORS)
            imported.add(f"lade.{alias if is_module else '__init__'}")  # `from lade import last_stats`
        found[name] = {other.removeprefix("lade.") for other in imported if other.startswith("lade.")}
    return found


def part_of(name: str) -> str:
    """The file or folder directly in lade/ that a module belongs to."""
    return name.split(".")[0]


def arrows() -> dict[str, set[str]]:
    """What each part imports of others above the lowest floor, without what follows from the rest."""
    parts = {part for floor in FLOORS[1:] for part in floor}
    direct: dict[str, set[str]] = {part: set() for part in parts}
    for name, imported in imports().items():
        if part_of(name) in FLOORS[0]:
            continue
        direct[part_of(name)] |= {part_of(other) for other in imported} & parts - {part_of(name)}
    reached: dict[str, set[str]] = {}
    for floor in FLOORS[1:]:  # the lowest first, so that what a part imports is known already
        for part in floor:
            reached[part] = direct[part].union(*(reached.get(other, set()) for other in direct[part]))
    return {
        part: {other for other in found if not any(other in reached[between] for between in found)}
        for part, found in direct.items()
    }


def draw() -> str:
    """The picture, as SVG."""
    places = {}
    for level, floor in enumerate(reversed(FLOORS)):
        left = (WIDTH - len(floor) * (BOX[0] + GAP) + GAP) / 2
        for index, part in enumerate(floor):
            places[part] = (left + index * (BOX[0] + GAP), GAP + level * FLOOR)
    height = FLOOR * len(FLOORS) + GAP
    lines, boxes = [], []
    for part, others in sorted(arrows().items()):
        for other in sorted(others):
            x, y = places[part][0] + BOX[0] / 2, places[part][1] + BOX[1]
            to_x, to_y = places[other][0] + BOX[0] / 2, places[other][1]
            middle = (y + to_y) / 2
            curve = f"M{x:g},{y:g} C{x:g},{middle:g} {to_x:g},{middle:g} {to_x:g},{to_y - 5:g}"
            lines.append(f'<path d="{curve}" marker-end="url(#tip)"/>')
    for floor in FLOORS:
        for part, what in floor.items():
            x, y = places[part]
            kind = ' class="core"' if part in CORE else ""
            folder = "/" if (ROOT / "lade" / part).is_dir() else ".py"
            boxes.append(f'<rect x="{x:g}" y="{y:g}" width="{BOX[0]}" height="{BOX[1]}"{kind}/>')
            boxes.append(f'<text class="name" x="{x + BOX[0] / 2:g}" y="{y + 20:g}">{part}{folder}</text>')
            boxes.append(f'<text class="what" x="{x + BOX[0] / 2:g}" y="{y + 38:g}">{escape(what)}</text>')
    tip = '<marker id="tip" orient="auto" markerWidth="6" markerHeight="6" refX="3" refY="3"><path d="M0,1 L4,3 L0,5"/></marker>'
    title = "The parts of lade by floor, and what they import"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
            f"<title>{title}</title><style>{STYLE}</style><defs>{tip}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs" / "img" / "house.svg").write_text(draw(), encoding="utf-8")
