"""The house: each part imports from lower floors only, no two parts import each other, and no file lacks a place."""

import ast
import sys
from pathlib import Path

import lade

ROOT = Path(lade.__file__).parent
# Files and folders of lade/ by floor; docs/design.md says what each is for.
FLOORS = (
    {"config", "stats", "compat", "state"},
    {"kernels"},
    {"block", "block_size"},
    {"verification"},
    {"models", "drafting", "parallel"},
    {"forward"},
    {"decoding"},
    {"augment", "preparation"},
    {"__init__"},
    {"commands"},
    {"__main__"},
)


def imports() -> dict[str, set[str]]:
    """What each module imports of lade, by dotted names without `lade.`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing_only = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        nodes = [node for node in nodes if node not in typing_only]
        imported = {node.module for node in nodes} | {
            f"lade.{alias.name}" for node in nodes if node.module == "lade" for alias in node.names
        }
        found[name] = {other.removeprefix("lade.") for other in imported if other.startswith("lade.")}
    return found


def part_of(name: str) -> str:
    return name.split(".")[0]


def test_imports_go_down():
    floors = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
    found = imports()
    assert {part_of(name) for name in found} == set(floors)
    for name, imported in found.items():
        for other in map(part_of, imported):
            part = part_of(name)
            if other in floors and other != part:  # `from lade import x` may name a function
                assert floors[other] < floors[part], f"{name} imports {other}, which is not below it"


def test_no_circles():
    """Within a part, too."""
    found = imports()
    modules = {
        name: {m for other in imported for m in (other, f"{other}.__init__") if m in found}
        for name, imported in found.items()
    }
    done: set[str] = set()
    while len(done) < len(modules):
        ready = {name for name, needed in modules.items() if name not in done and needed - {name} <= done}
        # A package's first file may import its parts, and each part is reached through that file.
        assert ready, f"a circle among {sorted(set(modules) - done)}"
        done |= ready


def test_no_print_outside_of_the_summary():
    for path in set(ROOT.rglob("*.py")) - set(ROOT.glob("commands/**/*.py")):  # whose output is what they are for
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert len(prints) == (path.name == "augment.py")


def test_nothing_else_is_imported():
    """What makes `import lade` cost next to nothing beside transformers; what a function imports does not count."""
    allowed = {"torch", "transformers", "numpy", "packaging", "lade", *sys.stdlib_module_names}
    for path in set(ROOT.rglob("*.py")) - {ROOT / "kernels" / "triton_attention.py"}:  # imported where triton is there
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, f"{path.name} imports {names}"
