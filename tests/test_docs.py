"""README and docs: the Python in them runs, the links lead somewhere, and every setting is described."""

import functools
import importlib
import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from support import BUNDLED, ROOT
from transformers import AutoModelForCausalLM

import lade
from lade.block.layout import block_layout
from lade.block.token_tree import TokenTree
from lade.config import SETTINGS

NAMES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def bundled(tokenizer):
    """What a page may take for granted: a model and its tokenizer, both loaded, and a prompt."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    return {"model": model, "tokenizer": tokenizer, "inputs": tokenizer("def main():\n", return_tensors="pt")}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))], ids=page_id
)
def test_python_blocks_run(page, bundled, lade_on, monkeypatch, tmp_path):
    """The blocks of a page run one after the other in one namespace, in a folder with the bundled model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    names = {**bundled, "lade": lade, "os": os, "__name__": "__main__"}
    bundled["model"].generate(**bundled["inputs"], max_new_tokens=8)
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_setting_is_described():
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for name in inspect.signature(lade.config_lade).parameters:
        assert f"| `{name}` |" in text
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "lade").rglob("*.py"))
    for name in set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", sources)):
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("name", SETTINGS)
def test_a_settings_row_is_the_settings(name):
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    allowed, shown = re.search(rf"^\| `{name}` \| (.*?) \| (.*?) \|", text, re.MULTILINE).groups()
    field = SETTINGS[name]
    if name not in ("DIST_WORKERS", "backend"):  # whose default depends on the process
        default = "auto" if field.default is None else field.default
        assert shown == (f'`"{default}"`' if isinstance(default, str) else str(int(default)))
    check = functools.partial(field.metadata["check"], name)
    span = re.match(r"(\d+) to (\d+)", allowed)
    values = [int(end) for end in span.groups()] if span else re.findall(r'"(\w+)"|(\d)', allowed)
    assert values
    for value in values if span else [text or int(number) for text, number in values]:
        check(value)
    outside = [values[0] - 1, values[1] + 1] if span else [2, "other"]
    for value in outside:
        if f"or {value}" not in allowed:
            with pytest.raises(ValueError, match=name):
                check(value)


def test_quoted_errors_exist():
    """What a page shows of an error or of a reason stands in a file that raises such errors."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "lade").rglob("*.py")]
    quoted = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        quoted += [(f"{name}(", message) for name, message in re.findall(r"\*\*(\w+Error): (.+?)\*\*", text)]
        quoted += [("", message) for message in re.findall(r"fallback_reason='(.+?)'", text)]
        for path in re.findall(r"`lade\.(\w+\.\w+Error)`", text):
            module, name = path.split(".")
            assert hasattr(importlib.import_module(f"lade.{module}"), name)
    assert len(quoted) >= 4
    for name, message in quoted:
        found = [source for source in sources if all(part.strip() in source for part in message.split("..."))]
        # A file without `raise` gives its text to one that has it.
        assert any(name in source or "raise " not in source for source in found), (name, message)


def test_the_picture_of_the_mask():
    """Each cell of docs/mask.svg is filled where lade lets that query see that key."""
    picture = (ROOT / "docs" / "mask.svg").read_text(encoding="utf-8")
    cells = re.findall(r'class="cell (\w+)" x="(\d+)" y="(\d+)"', picture)
    tree = TokenTree([[0] * 6], [[-1, 0, 1, -1, 3, 4]])  # two candidates of three tokens
    visible = block_layout(4, 3, 6, torch.device("cpu")).offsets_and_visibility(tree)[1][0]
    columns, rows = (sorted({int(cell[axis]) for cell in cells}) for axis in (1, 2))
    drawn = torch.zeros_like(visible)
    for kind, x, y in cells:
        drawn[rows.index(int(y)), columns.index(int(x))] = kind != "off"
    assert len(cells) == visible.numel() == 15 * 15
    assert torch.equal(drawn, visible)
    assert not torch.equal(visible, torch.ones_like(visible).tril())  # more than causal


SETS = ("code", "maths", "chat", "summaries", "translation")
# Rows of README.md, by machine and model.
ROWS = {
    "Qwen2.5-Coder-0.5B, float32, greedy": ("epyc-qwen-0.5b-float32-greedy", "lade"),
    "transformers' prompt lookup, likewise": ("epyc-qwen-0.5b-float32-greedy", "prompt_lookup"),
    "lade, each call with an empty memory": ("epyc-qwen-0.5b-float32-greedy", "lade_cold"),
    "lade, T=0.7": ("epyc-qwen-0.5b-float32-sampled", "lade"),
    "lade, bfloat16, greedy": ("epyc-qwen-0.5b-bfloat16-greedy", "lade"),
    "Qwen2.5-Coder-1.5B, bfloat16, greedy": ("epyc-qwen-1.5b-bfloat16-greedy", "lade"),
    "Gemma 3 270M, float32, greedy": ("epyc-gemma-270m-float32-greedy", "lade"),
    "Qwen2.5-Coder-0.5B on AVX2 alone, float32, greedy": ("avx2-qwen-0.5b-float32-greedy", "lade"),
    "likewise, bfloat16": ("avx2-qwen-0.5b-bfloat16-greedy", "lade"),
}


def test_tables_of_first_calls_are_the_committed_figures():
    def result(name):
        return json.loads((ROOT / f"benchmarks/results/cpu-{name}-first-calls.json").read_text(encoding="utf-8"))

    def figures(name, method):
        found = result(name)
        total = found["all"][method]
        row = [*(found[name][method]["mean"] for name in SETS), total["worst"], total.get("tokens_per_step")]
        return ["" if figure is None else f"{figure:.2f}" for figure in row]

    def rows(page):
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("| "):
                label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
                yield label, cells[: len(SETS) + 2], cells[len(SETS) + 2 :]

    seen, means = set(), 0
    for label, cells, _ in rows("README.md"):
        if label in ROWS:
            seen.add(label)
            assert cells == figures(*ROWS[label])
    assert seen == ROWS.keys()
    for label, cells, others in rows("benchmarks/README.md"):
        if linked := re.search(r"\(results/cpu-(.*)-first-calls\.json\)", label):
            assert cells == figures(linked[1], "lade"), label
            if len(others) > 1:
                methods = ("lade", "lade_cold", "prompt_lookup")
                assert others[:3] == [f"{result(linked[1])['all'][method]['mean']:.2f}" for method in methods]
                means += 1
    assert means == 12
