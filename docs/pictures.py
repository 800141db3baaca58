"""Draws the pictures of README and how-it-works.md from real runs of the bundled model: `python docs/pictures.py`.

Greedy, in float64, with blocks of a fixed size, so that each run of this script draws the same on every machine.
tests/test_pictures.py compares the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.drafting.tree import TreeDrafter
from lade.stats import tracing

ROOT = Path(__file__).resolve().parent.parent
# Its continuation is new text that does not end in a loop, which would flatter lade.
DECODED = '''import logging

logger = logging.getLogger(__name__)

def debug(msg, *args, **kwargs):
    """Log a message with severity 'DEBUG'."""
    logger.debug(msg, *args, **kwargs)

def info(msg, *args, **kwargs):
'''
DECODED_TOKENS, DECODED_BLOCK = 76, 16
# As in how-it-works.md, which follows these runs.
EXAMPLE = """def read_file(path):
    with open(path) as file:
        return file.read()

def write_file(path, text):
    with open(path"""
EXAMPLE_TOKENS, TREE_BLOCK, TREE_STEP = 40, 8, 17
LEVEL, WIDTH, WINDOW_STEP = 4, 3, 15  # N and W of the window
STYLE = """
text { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre }
.sans { font-family: system-ui, -apple-system, "Segoe UI", sans-serif }
.dim { fill: #59636e }
.page { fill: #ffffff; stroke: #d1d9e0 }
.off { fill: #eaeef2 }
.plain { fill: #8c959f }
.green { fill: #1a7f37 }
.glow { fill: #dafbe1 }
.suffix, .earlier { fill: #ddf4ff; stroke: #0969da }
.token { fill: #fbefff; stroke: #8250df }
.rejected { fill: #fff1e5; stroke: #bc4c00 }
.context { fill: #fff8c5; stroke: #9a6700 }
.root { fill: #f6f8fa; stroke: #59636e }
.start { fill: #f2b84b }
.window { fill: #6ea8fe }
.tree { fill: #63c586 }
.new { fill: #c9a7f5 }
.ink { fill: #1f2328 }
.line { stroke: #8c959f; stroke-width: 1.5; fill: none }
.taken { stroke: #1a7f37; stroke-width: 3.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .dim { fill: #9198a1 }
  .page { fill: #0d1117; stroke: #3d444d }
  .off { fill: #212830 }
  .plain { fill: #656c76 }
  .green { fill: #56d364 }
  .glow { fill: #12331c }
  .suffix, .earlier { fill: #0c2d6b }
  .token { fill: #2e1461 }
  .rejected { fill: #471700 }
  .context { fill: #3b2300 }
  .root { fill: #161b22 }
  .ink { fill: #10151c }
  .taken { stroke: #56d364 }
}
"""


@dataclass(frozen=True)
class Step:
    """One forward pass behind the prompt's own."""

    root: int
    tokens: list[int]  # guesses
    parents: list[int]
    sources: list[str]
    chances: list[float]  # of being accepted, each with all its ancestors
    accepted: list[int]  # guesses that were right
    committed: list[int]  # their tokens, and the model's own choice behind them


def trace(model: Any, tokenizer: Any, prompt: str, num_tokens: int, block: int) -> tuple[list[int], list[Step]]:
    """Generated tokens and steps of a call with an empty memory."""
    steps: list[Step] = []
    drafters: list[TreeDrafter] = []

    def make(request: Any) -> TreeDrafter:
        drafters.append(TreeDrafter(request))
        return drafters[-1]

    def keep(step: Any, outcome: Any) -> None:
        growth, path = drafters[-1]._texts[0].growth, list(outcome.accepted[0])
        sources = [source.split()[0] for source in growth.sources]
        committed = outcome.sequences.row(0)[0, -len(path) - 1 :].tolist()
        steps.append(Step(step.roots[0], growth.tokens, growth.parents, sources, growth.chances, path, committed))

    inputs = tokenizer(prompt, return_tensors="pt")
    lade.register_drafter("traced tree", make)
    with lade.enabled(MODE="traced tree", ADAPTIVE=0, MAX_BLOCK=block, SHARE=0), tracing(keep):
        output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), steps


def picture(width: int, height: int, title: str, parts: list[str], style: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n"
        f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def label(x: float, y: float, text: str, kind: str = "sans", size: float = 14, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" font-size="{size:g}" text-anchor="{anchor}">{escape(text)}</text>'


# The moving picture: what each forward pass commits.

TICK, HOLD = 0.12, 4.0  # seconds of a pass, and of the end
COLUMNS, CHAR, LINE, SIZE = 61, 8.7, 20, 14.5  # of the text: characters a line, and pixels


def moving_picture(tokenizer: Any, new: list[int], steps: list[Step]) -> str:
    """The generated text as lade's passes commit it, accepted guesses in green; above, how far plain decoding has
    come."""
    passes = [(new[:1], 0), *((step.committed, len(step.accepted)) for step in steps)]
    num_plain, num_passes = len(new), len(passes)
    cycle = num_plain * TICK + HOLD
    keyframes: list[str] = []

    def appears(number: int) -> str:
        """The class of what is there from that pass on; without animation it is there from the start."""
        share = 100 * number * TICK / cycle
        name = f"p{number}"
        keyframe = f"@keyframes {name} {{ 0% {{ opacity: 0 }} {share:.2f}% {{ opacity: 1 }} }} .{name} {{ animation: {name} {cycle:g}s step-end infinite }}"
        if keyframe not in keyframes:
            keyframes.append(keyframe)
        return name

    parts: list[str] = []
    runs = list(text_runs(tokenizer, passes))
    num_lines = runs[-1].line + 1
    width, top = int(COLUMNS * CHAR) + 40, 142
    height = top + num_lines * LINE + 44
    for y, name, total, kind in ((34, "plain generate()", num_plain, "plain"), (72, "lade", num_passes, "green")):
        parts += [
            label(20, y, f"{name}:"),
            label(width - 20, y, f"{total} forward passes", "sans dim", 14, "end"),
            f'<rect class="off" x="20" y="{y + 8}" width="{width - 40}" height="8" rx="4"/>',
            f'<rect class="{kind} bar{total}" x="20" y="{y + 8}" width="{width - 40}" height="8" rx="4"/>',
        ]
        keyframes.append(
            f"@keyframes bar{total} {{ 0% {{ transform: scaleX(0) }} {100 * total * TICK / cycle:.2f}%, 100% {{ transform: scaleX(1) }} }}"
            f" .bar{total} {{ transform-origin: 20px 0; animation: bar{total} {cycle:g}s linear infinite }}"
        )
    parts.append(label(20, top - LINE, DECODED.splitlines()[-1], "dim", SIZE))
    for run in runs:
        x, y, length = 20 + run.column * CHAR, top + run.line * LINE, len(run.text) * CHAR
        if run.is_accepted:
            parts.append(
                f'<rect class="glow {appears(run.number)}" x="{x:g}" y="{y - 15}" width="{length:g}" height="{LINE}" rx="3"/>'
            )
        kind = "green" if run.is_accepted else ""
        parts.append(
            f'<text class="{kind} {appears(run.number)}" x="{x:g}" y="{y}" font-size="{SIZE}" textLength="{length:g}"'
            f' lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(run.text)}</text>'
        )
    parts += [
        f'<rect class="glow" x="20" y="{height - 36}" width="16" height="16" rx="3"/>',
        label(
            42,
            height - 23,
            f"guessed, and accepted: the same {num_plain} tokens in {num_passes} passes",
            "sans dim",
            13,
        ),
    ]
    still = "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }"
    title = f"{num_plain} tokens: plain generate() takes {num_plain} forward passes, lade {num_passes}; accepted guesses are green"
    return picture(width, height, title, parts, "\n".join([*keyframes, still]) + "\n")


@dataclass(frozen=True)
class Run:
    """A piece of text in one place and of one kind."""

    text: str
    line: int
    column: int
    number: int  # of the pass that committed it
    is_accepted: bool


def text_runs(tokenizer: Any, passes: list[tuple[list[int], int]]) -> Iterator[Run]:
    """passes: of each, the tokens it has committed, and how many of them were guesses. Long lines are broken
    anywhere."""
    line = column = 0
    for number, (tokens, num_accepted) in enumerate(passes, start=1):
        for is_accepted, part in ((True, tokens[:num_accepted]), (False, tokens[num_accepted:])):
            text = tokenizer.decode(part)
            while text:
                head, newline, rest = text.partition("\n")
                head, rest = head[: COLUMNS - column], head[COLUMNS - column :] + newline + rest
                if head:
                    if head.strip():
                        lead = len(head) - len(head.lstrip())
                        yield Run(head.strip(), line, column + lead, number, is_accepted)
                    column += len(head)
                if column == COLUMNS and rest and rest[0] != "\n":
                    line, column = line + 1, 0
                elif rest[:1] == "\n":
                    rest, line, column = rest[1:], line + 1, 0
                text = rest


# The tree of one step.


def tree_picture(tokenizer: Any, step: Step) -> str:
    """Root and guesses, each with its source and chance; those that were right are joined by a thick line."""
    size, gap, row_height, box_height = 132, 14, 66, 42
    depth_of = [0]
    for parent in step.parents:
        depth_of.append(depth_of[parent + 1] + 1)
    children = {
        parent: [node for node, p in enumerate(step.parents) if p == parent] for parent in range(-1, len(step.tokens))
    }
    across: dict[int, float] = {}
    leaves = 0

    def set_place(node: int) -> None:
        nonlocal leaves
        for child in children[node]:
            set_place(child)
        if children[node]:
            across[node] = across[children[node][0]]
        else:
            across[node], leaves = leaves, leaves + 1

    set_place(-1)
    width = max(int(40 + leaves * (size + gap)), 680)
    top = 56
    height = top + (max(depth_of) + 1) * row_height + 92
    left = (width - leaves * (size + gap) + gap) / 2
    parts, boxes = [], []
    for node in range(-1, len(step.tokens)):
        x, y = left + across[node] * (size + gap), top + depth_of[node + 1] * row_height
        token = step.root if node < 0 else step.tokens[node]
        kind = "start" if node < 0 else step.sources[node]
        mark = " ✓" if node in step.accepted else ""
        below = "the root" if node < 0 else f"{kind}, {100 * step.chances[node]:.0f} %{mark}"
        boxes += [
            f'<rect class="{kind}" x="{x:g}" y="{y}" width="{size}" height="{box_height}" rx="6"/>',
            label(x + size / 2, y + 18, visible(tokenizer.decode([token])), "ink" if node < 0 else "", 14, "middle"),
            label(x + size / 2, y + 35, below, "sans ink" if node < 0 else "sans dim", 12, "middle"),
        ]
        if node >= 0:
            parent = step.parents[node]
            x0, y0 = (
                left + across[parent] * (size + gap) + size / 2,
                top + depth_of[parent + 1] * row_height + box_height,
            )
            line = "taken" if node in step.accepted else "line"
            parts.append(
                f'<path class="{line}" d="M{x0:g} {y0} C{x0:g} {y0 + 14} {x + size / 2:g} {y - 14} {x + size / 2:g} {y}"/>'
            )
    committed = " ".join(visible(tokenizer.decode([token])) for token in step.committed)
    end = height - 62
    notes = [
        label(20, 30, f"one forward pass over {len(step.tokens) + 1} tokens", "sans dim"),
        label(20, end, "committed:", "sans dim"),
        label(106, end, committed, "green", 14),
    ]
    for i, (kind, text) in enumerate(
        (
            ("context", "similar context"),
            ("token", "same token"),
            ("suffix", "repeated text"),
            ("root", "root's own row"),
        )
    ):
        x = 20 + i * 130
        notes += [
            f'<rect class="{kind}" x="{x}" y="{end + 20}" width="16" height="16" rx="4"/>',
            label(x + 22, end + 33, text, "sans dim", 13),
        ]
    title = f"The tree of guesses behind {visible(tokenizer.decode([step.root]))}, of which {len(step.accepted)} are accepted"
    return picture(width, height, title, [*parts, *boxes, *notes])


# Two blocks of a model with a recurrent state.

# Tokens and what they are in the block, what the model chooses after them, and where the states are left.
CHAINS = (
    (
        (("read", "root"), ("_", "accepted"), ("file", "accepted"), (".", "rejected")),
        "(",
        "a guess was wrong: the states are put back to before the block",
    ),
    (
        (("read", "waits"), ("_", "waits"), ("file", "waits"), ("(", "root"), ("path", "accepted"), ("):", "accepted")),
        "⏎",
        "all was right: the states stay as they are, and nothing waits",
    ),
)
CHAIN_KINDS = {"root": "start", "waits": "off", "accepted": "tree", "rejected": "rejected"}


def chain_picture() -> str:
    """Each block in a row, and below it what becomes of the states."""
    size, gap, left, parts = 86, 8, 84, []
    for number, (tokens, choice, states) in enumerate(CHAINS):
        top = 22 + 116 * number
        parts.append(label(20, top + 25, f"pass {number + 1}", "sans dim"))
        for place, (token, what) in enumerate(tokens):
            x = left + place * (size + gap)
            shade = "ink" if what in ("root", "accepted") else ""
            parts += [
                f'<rect class="{CHAIN_KINDS[what]}" x="{x}" y="{top}" width="{size}" height="42" rx="6"/>',
                label(x + size / 2, top + 18, token, shade, 14, "middle"),
                label(x + size / 2, top + 35, what, f"sans {shade or 'dim'}", 12, "middle"),
            ]
        x = left + len(tokens) * (size + gap)
        parts += [label(x, top + 25, f"→ {choice}", "green"), label(left, top + 66, states, "sans dim", 13)]
    title = "Two forward passes with chains of guesses: accepted tokens of the first one run again in the second one"
    return picture(720, 22 + 116 * len(CHAINS) - 24, title, parts)


# The paper's window, and who sees whom in its block.


@dataclass(frozen=True)
class WindowStep:
    """A step of the paper's method with two candidates."""

    root: int
    cells: list[int]  # behind the root, by level and column
    candidates: list[int]
    depths: list[int]  # of the candidates' tokens
    choices: list[int]  # the model's, behind the last level
    visible: list[list[bool]]  # by query and key, in the block's order: root, candidates, cells


def window_step(model: Any, tokenizer: Any) -> WindowStep:
    steps: list[WindowStep] = []

    def keep(step: Any, outcome: Any) -> None:
        offsets, visible = step.layout.offsets_and_visibility(step.tree)
        tokens = list(step.tree.tokens[0])
        depths = offsets[0, 1 : 1 + len(tokens)].tolist()
        cells, chosen = step.draft.window_cells[0].tolist(), outcome.choices[0].tolist()
        steps.append(WindowStep(int(step.roots[0]), cells, tokens, depths, chosen, visible[0].tolist()))

    inputs = tokenizer(EXAMPLE, return_tensors="pt")
    with lade.enabled(MODE="lookahead", LEVEL=LEVEL, WINDOW_SIZE=WIDTH, GUESS_SET_SIZE=3, ADAPTIVE=0), tracing(keep):
        model.generate(**inputs, max_new_tokens=EXAMPLE_TOKENS, do_sample=False)
    return steps[WINDOW_STEP - 1]


def place(offset: int) -> str:
    return f"L+{offset}" if offset else "L"


def window_picture(tokenizer: Any, step: WindowStep) -> str:
    """Levels of the window as rows, and the model's choice below each column."""
    left, column_width, level_height, width, height = 120, 118, 74, 96, 40
    parts = [label(20, 30, f"the window of one step, N={LEVEL}, W={WIDTH}", "sans dim")]
    levels = [[step.root, *step.cells][row * WIDTH : (row + 1) * WIDTH] for row in range(LEVEL - 1)] + [step.choices]
    for column in range(WIDTH):
        x = left + column * column_width
        parts.append(label(x + width / 2, 56, f"column {column}", "sans dim", 13, "middle"))
        for row, tokens in enumerate(levels):
            y = 66 + row * level_height
            kind = "new" if row == LEVEL - 1 else "window" if row or column else "start"
            parts += [
                f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>',
                label(x + width / 2, y + 17, visible(tokenizer.decode([tokens[column]])), "ink", 13, "middle"),
                label(x + width / 2, y + 33, place(row + column), "ink", 12, "middle"),
            ]
            if row < LEVEL - 1:
                dashes = ' stroke-dasharray="4 4"' if row == LEVEL - 2 else ""
                parts.append(f'<path class="line"{dashes} d="M{x + width / 2:g} {y + 44} v26"/>')
    names = [f"level {row}" for row in range(LEVEL - 1)] + ["chosen then"]
    parts += [label(20, 90 + row * level_height, name, "sans dim", 13) for row, name in enumerate(names)]
    parts.append(label(20, 384, "a column, read downwards, is one n-gram", "sans dim", 13))
    title = "A window of three levels and three columns with the position of each cell, and the model's choice below each column"
    return picture(480, 404, title, parts)


def mask_picture(tokenizer: Any, step: WindowStep) -> str:
    """One row per query and one column per key of the block; a filled cell is seen."""
    size, left, top = 24, 250, 96
    tokens = [step.root, *step.candidates, *step.cells]
    names, offsets, kinds = ["root, (0,0)"], [0], ["start"]
    for depth in step.depths:
        number = sum(name.startswith("candidate") for name in names) // (LEVEL - 1) + 1
        names, offsets, kinds = [*names, f"candidate {number}"], [*offsets, depth], [*kinds, "tree"]
    for cell in range(1, 1 + len(step.cells)):
        row, column = divmod(cell, WIDTH)
        names, offsets, kinds = [*names, f"({row},{column})"], [*offsets, row + column], [*kinds, "window"]
    parts = [label(20, 26, "query: row · key: column · filled: the row sees the column", "sans dim")]
    parts += [label(x, top - 12, word, "sans dim", 13) for x, word in ((20, "who"), (118, "token"), (188, "position"))]
    for row, (name, token, offset) in enumerate(zip(names, tokens, offsets, strict=True)):
        y, word = top + row * size, visible(tokenizer.decode([token]))
        parts += [
            label(20, y + 16, name, "sans", 13),
            label(118, y + 16, word, "", 13),
            label(236, y + 16, place(offset), "dim", 13, "end"),
            f'<text transform="translate({left + row * size + 16} {top - 8}) rotate(-60)" font-size="13">{escape(word)}</text>',
        ]
        for column, sees in enumerate(step.visible[row]):
            kind = kinds[column] if sees else "off"
            parts.append(
                f'<rect class="cell {kind}" x="{left + column * size}" y="{y}" width="22" height="22" rx="3"/>'
            )
    end = top + len(tokens) * size
    for i, (kind, name) in enumerate((("start", "the root"), ("tree", "candidates"), ("window", "window"))):
        x = left + i * 120
        parts += [f'<rect class="{kind}" x="{x}" y="{end + 14}" width="14" height="14" rx="3"/>']
        parts += [label(x + 20, end + 26, name, "sans", 13)]
    title = f"Who sees whom in a block of {len(tokens)} tokens: the root, two candidates of three tokens, and the rest of a window"
    return picture(640, end + 48, title, parts)


def visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎")


def draw() -> dict[str, str]:
    """File below docs/ -> picture."""
    folder = ROOT / "models" / "stdlib-9m"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    decoded = trace(model, tokenizer, DECODED, DECODED_TOKENS, DECODED_BLOCK)
    _, steps = trace(model, tokenizer, EXAMPLE, EXAMPLE_TOKENS, TREE_BLOCK)
    window = window_step(model, tokenizer)
    return {
        "window.svg": window_picture(tokenizer, window),
        "mask.svg": mask_picture(tokenizer, window),
        "img/decoding.svg": moving_picture(tokenizer, *decoded),
        "img/tree.svg": tree_picture(tokenizer, steps[TREE_STEP - 1]),
        "img/chain.svg": chain_picture(),
    }


if __name__ == "__main__":
    for name, content in draw().items():
        (ROOT / "docs" / name).write_text(content, encoding="utf-8")
        print(name)
