"""What was judged from few programs stands in one file, each constant with what it was judged by, and is used."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

import jaxckpt
from jaxckpt.core import constants
from jaxckpt.planner import aims, costs, hand_written, model, predictions, scans, search, stages

ROOT = pathlib.Path(jaxckpt.__file__).parent
PLANNER = (aims, costs, hand_written, model, predictions, scans, search, stages)
TREE = ast.parse(pathlib.Path(constants.__file__).read_text())


def judged():
    return sorted(name for name in vars(constants) if name.isupper())


def test_each_constant_says_what_it_is_and_what_it_was_judged_by():
    said = {}
    for node, after in zip(TREE.body, [*TREE.body[1:], None]):
        if isinstance(node, ast.Assign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            said[ast.unparse(node.targets[0])] = " ".join(str(after.value.value).split()) if is_text else ""
    judged_by = re.compile("[Jj]udged |[Nn]o measurement|It follows from ")
    silent = [name for name, text in said.items() if not judged_by.search(text)]
    assert len(judged()) > 25 and all(said.values())
    assert silent == ["TURN", "ITERATION", "KEPT", "ADDED"], "a comment says it of these four"


@functools.cache
def trees() -> dict[pathlib.Path, ast.Module]:
    """Every file of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def test_each_constant_is_used_and_none_is_defined_again():
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "jaxckpt.core.constants"]
    assert set(judged()) == {alias.name for node in taken for alias in node.names}
    for module in PLANNER:
        body = trees()[pathlib.Path(module.__file__)].body
        targets = {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
        assert not targets & set(judged()), module.__name__


@pytest.mark.parametrize("module", PLANNER)
def test_the_planner_has_no_figures_of_its_own(module):
    body = trees()[pathlib.Path(module.__file__)].body
    figures = [ast.unparse(node) for node in body if isinstance(node, ast.Assign) and _is_number(node.value)]
    assert figures == []


def _is_number(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
