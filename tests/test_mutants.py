"""The table of tests/mutants.py is up to date."""

import ast
import functools

import mutants
import pytest
from support import ROOT


@functools.cache
def functions_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("wrong", mutants.MUTANTS, ids=lambda wrong: wrong.name)
def test_the_line_and_its_tests_exist(wrong):
    """A line that has changed needs its mutant changed: to one that is as wrong, and that the tests notice."""
    assert (ROOT / "lade" / wrong.path).read_text(encoding="utf-8").count(wrong.old) == 1
    for test in wrong.tests:
        file, _, function = test.partition("::")
        assert not function or function.split("[")[0] in functions_of(ROOT / file)
