"""The floors: a module imports only from lower ones, and says in its docstring where it stands."""

import ast
import re
import sys
from pathlib import Path

import lade

ROOT = Path(lade.__file__).parent


def modules() -> dict[str, tuple[int, set[str]]]:
    """Dotted name -> its floor, and what it imports of lade."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(["lade", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        floor = re.search(r"Floor (\d)", ast.get_docstring(tree) or "")
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        found[name] = (int(floor[1]) if floor else -1, {m for m in imported if m.split(".")[0] == "lade"})
    return found


def test_imports_go_down():
    found = modules()
    assert len(found) > 15
    for name, (floor, imported) in found.items():
        assert floor >= 0, f"{name} names no floor"
        for other in imported:
            inside = other.startswith(name + ".") or name.rsplit(".", 1)[0] == other.rsplit(".", 1)[0] != "lade"
            assert found[other][0] < floor or inside, (
                f"{name} (floor {floor}) imports {other} (floor {found[other][0]})"
            )


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
