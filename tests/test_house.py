"""The house: each part imports from lower floors only."""

import ast
import importlib.util
import sys
from pathlib import Path

import lade

ROOT = Path(lade.__file__).parent
SPEC = importlib.util.spec_from_file_location("house", ROOT.parent / "docs" / "house.py")
house = importlib.util.module_from_spec(SPEC)  # it knows the floors and draws them
SPEC.loader.exec_module(house)
FLOORS = house.FLOORS


def test_the_picture_is_the_one_drawn():
    committed = ROOT.parent / "docs" / "img" / "house.svg"
    assert committed.read_text(encoding="utf-8") == house.draw(), "run python docs/house.py"


def test_imports_go_down():
    floors = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
    found, part_of = house.imports(), house.part_of
    assert {part_of(name) for name in found} == set(floors)
    for name, imported in found.items():
        for other in map(part_of, imported):
            part = part_of(name)
            if other in floors and other != part:  # `from lade import x` may name a function
                assert floors[other] < floors[part], f"{name} imports {other}, which is not below it"


WINGS = ("forward.cpu", "forward.cuda", "parallel", "commands")
# What is on top of them, and may know them: where a wing is chosen or prepared.
ABOVE = ("__init__", "__main__", "preparation")


def test_the_spine_imports_no_wing():
    """Not even for type checkers. A wing is named where it is chosen, and imported when it is used."""
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name.startswith(WINGS) or name in ABOVE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wings = [other for other in found if other.removeprefix("lade.").startswith(WINGS)]
            assert not wings, f"{name} imports {wings}"


def test_no_print_outside_of_the_summary():
    for path in set(ROOT.rglob("*.py")) - set(ROOT.glob("commands/**/*.py")):  # whose output is what they are for
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert len(prints) == (path.name == "augment.py")


def test_nothing_else_is_imported():
    """What makes `import lade` cost next to nothing beside transformers; what a function imports does not count."""
    allowed = {"torch", "transformers", "numpy", "packaging", "safetensors", "lade", *sys.stdlib_module_names}
    kernel = ROOT / "forward" / "cuda" / "kernel" / "triton_attention.py"  # imported where triton is there
    for path in set(ROOT.rglob("*.py")) - {kernel}:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, f"{path.name} imports {names}"
