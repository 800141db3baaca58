"""What setup.py says of the package, without building it."""

import ast
import re
import runpy
from importlib import metadata

import pytest
from support import ROOT

import lade
from lade.common import version

setuptools = pytest.importorskip("setuptools")


@pytest.fixture
def package(monkeypatch):
    """The arguments of setup()."""
    found = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_version(package):
    assert package["version"] == lade.__version__


def test_all_that_is_not_python_goes_along(package):
    assert {"lade", "lade.commands.trace", "lade.forward"} <= set(package["packages"])
    for path in (ROOT / "lade").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            folder = ".".join(path.parent.relative_to(ROOT).parts)
            assert path.name in package["package_data"].get(folder, ()), f"{path.relative_to(ROOT)} is not installed"


def test_long_description_needs_no_checkout(package):
    text = package["long_description"]
    for target in re.findall(r"\]\(([^)]*)\)|src=\"([^\"]*)\"", text):
        assert "".join(target).startswith("https://")
    assert "<!--" not in text
    assert "lade.augment_all()" in text
    assert "how it works" in text.lower()


def test_extras_hold_what_tests_need(package):
    names = {re.split(r"[<>=\[]", line)[0].lower() for line in package["extras_require"]["clients"]}
    tree = ast.parse((ROOT / "tests" / "test_clients.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "client"]
    packages = {call.args[1].value for call in calls if len(call.args) > 1}
    parts = {
        "fastapi": "transformers",
        "rich": "transformers",
        "lm_eval": "lm-eval",
    }  # package -> requirement that brings it along
    assert len(packages) >= 10
    assert {parts.get(package, package) for package in packages} <= names
    paths = (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt")
    pinned = "".join(path.read_text(encoding="utf-8") for path in paths)
    for line in package["extras_require"]["test"]:
        assert re.split(r"[<>=\[]", line)[0] in pinned


def test_the_required_transformers_is_what_is_checked(package):
    required = next(line for line in package["install_requires"] if line.startswith("transformers"))
    assert required == f"transformers>={version.OLDEST},<{version.FIRST_UNSUPPORTED}"


def test_nothing_is_required_that_lade_does_not_import(package):
    """accelerate, for example, is the tests'."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "lade").rglob("*.py"))
    for line in package["install_requires"]:
        name = re.split(r"[<>=]", line)[0]
        assert re.search(rf"^\s*(import|from) {name}\b", sources, re.MULTILINE), name
        assert metadata.version(name)
