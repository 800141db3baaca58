"""What setup.py says of the package, without building it."""

import re
import runpy

import pytest
from support import ROOT

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


def test_the_required_transformers_is_what_is_checked(package):
    required = next(line for line in package["install_requires"] if line.startswith("transformers"))
    assert required == f"transformers>={version.OLDEST},<{version.FIRST_UNSUPPORTED}"
