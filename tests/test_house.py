"""The house: each part imports from lower floors only, no two parts import each other, and no file lacks a place."""

import ast
import importlib.util
import sys
from pathlib import Path

import lade

ROOT = Path(lade.__file__).parent
TESTS = Path(__file__).parent


def house():
    """docs/house.py, which knows the floors and draws them."""
    spec = importlib.util.spec_from_file_location("house", ROOT.parent / "docs" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FLOORS, imports, part_of = house().FLOORS, house().imports, house().part_of


def test_the_picture_is_the_one_drawn():
    committed = ROOT.parent / "docs" / "img" / "house.svg"
    assert committed.read_text(encoding="utf-8") == house().draw(), "run python docs/house.py"


def test_the_table_names_every_part():
    table = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8").partition("## The house")[2]
    for part in set().union(*FLOORS) - {"__main__"}:
        assert f"`{part}/`" in table or f"`{part}.py`" in table, f"docs/design.md does not say what {part} is for"


def test_imports_go_down():
    floors = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
    found = imports()
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
    allowed = {"torch", "transformers", "numpy", "packaging", "safetensors", "lade", *sys.stdlib_module_names}
    for path in set(ROOT.rglob("*.py")) - {
        ROOT / "forward" / "cuda" / "kernel" / "triton_attention.py"
    }:  # imported where triton is there
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, f"{path.name} imports {names}"


def test_test_files_share_through_support():
    """What one test file needs of another belongs to tests/support/ (fixtures: to its fixtures.py)."""
    for path in TESTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            others = [name for name in names if name.startswith("test_") or name == "conftest"]
            assert not others, f"{path.name} imports {others}: from support import ..."


# Of modules without a test file of their own name: the file that tests them. A folder stands for all in it that is not
# named.
TESTED_IN = {
    "__init__": "config",
    "__main__": "launcher",
    "block.mask": "layout",
    "block.recurrent_state": "recurrent",
    "common.cache_folder": "step_costs",
    "common.notices": "packed",
    "common.processor": "step_costs",
    "common.trial": "forward_paths",
    "common.version": "packaging",
    "commands": "launcher",
    "commands.chat": "chat",
    "commands.detokenize": "chat",
    "commands.measure": "bench",
    "commands.progress": "bench",
    "commands.prompts": "bench",
    "commands.trace": "trace",
    "commands.tune": "bench",
    "decoding": "exactness",
    "drafting.acceptance": "drafting",
    "drafting.checked": "registered_drafters",
    "drafting.coming_draws": "draws",
    "drafting.base": "drafting",
    "drafting.lookahead": "walk",
    "drafting.memory_file": "memory",
    "drafting.suffix_index": "memory",
    "drafting.likeliest": "memory",
    "drafting.top_k_table": "memory",
    "drafting.tree": "drafting",
    "drafting.text": "drafting",
    "forward.base": "forward_paths",
    "forward.cpu.free_memory": "packed",
    "forward.cpu.path": "forward_paths",
    "forward.cuda.buffer_pool": "static_shapes",
    "forward.cuda.fingerprint": "static_shapes",
    "forward.cuda.kernel": "kernels",
    "forward.cuda.kernel.interface": "kernel_interface",
    "forward.cuda.kernel.self_check": "automatic",
    "forward.cuda.kernel_path": "forward_paths",
    "forward.cuda.path": "automatic",
    "forward.cuda.proof": "automatic",
    "forward.cuda.static_inputs": "static_shapes",
    "models": "families",
    "models.base": "models",
    "models.compiled": "compiled_models",
    "models.attention_spans": "families",
    "models.checks": "requests",
    "models.self_check": "models",
    "models.shadow": "models",
    "parallel.checksums": "parallel",
    "parallel.communicator": "parallel",
    "parallel.group": "parallel",
    "common.request": "requests",
    "common.settings_file": "config",
    "custom_generate": "switch",
    "stats": "augment",
    "eligibility": "contract",
    "verification.logits": "nan_guard",
    "verification.outputs": "contract",
    "verification.selection": "contract",
    "verification.single_process": "parallel",
}


def file_testing(name: str) -> str | None:
    """The test file of a module, by the module's own name or by the table, without `test_` and `.py`; None where there
    is none."""
    parts = name.split(".")
    parents = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    own = parts[-1] if (TESTS / f"test_{parts[-1]}.py").exists() else None
    return own or next((TESTED_IN[parent] for parent in parents if parent in TESTED_IN), None)


def test_every_module_has_a_test_file():
    modules = {name.removesuffix(".__init__") for name in imports()}
    without_code = {"block", "common", "drafting", "forward", "forward.cpu", "forward.cuda", "parallel", "verification"}
    for name in modules - without_code:
        file = file_testing(name)
        assert file, f"lade/{name}: name a test file after it, or add it to TESTED_IN"
        assert (TESTS / f"test_{file}.py").exists(), f"{name}: there is no tests/test_{file}.py"
    assert set(TESTED_IN) <= modules, f"no such modules: {set(TESTED_IN) - modules}"
    packages = {
        name.removesuffix(".__init__") for name in imports() if name.endswith(".__init__")
    }  # stand for their parts
    own = [name for name in TESTED_IN if (TESTS / f"test_{name.rpartition('.')[2]}.py").exists()]
    assert set(own) <= packages, f"have a file of their own name: {own}"
