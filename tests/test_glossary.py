"""The glossary of docs/architecture.md, held against the code: one word has one meaning."""

import ast
import pathlib
import re
from collections import defaultdict

import pytest

import jaxckpt

ROOT = pathlib.Path(jaxckpt.__file__).parent
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "architecture.md"
PROGRAMS = {"models", "templates"}
"""Folders of programs like those of users, which have words of their own."""


def sources():
    """Returns the files of the package that keep to the glossary."""
    return [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in PROGRAMS]


def rows():
    """Yields (terms, files) of the glossary's table."""
    section = PAGE.read_text().split("## Glossary")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("term", "---"):
            yield cells[0].split(", "), re.findall(r"`([^`]+)`", cells[2])


def definitions():
    """Yields (file, name, is a class) of all classes and functions of modules, private ones too, and of type
    aliases.
    """
    for path in sources():
        file = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield file, node.name, isinstance(node, ast.ClassDef)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.fullmatch(r"_?[A-Z][a-z]\w*", name):  # an alias of a type
                    yield file, name, True


def words(name):
    """ "_ScanBody" -> ["scan", "body"]; "count_flops" -> ["count", "flops"]"""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


DEFINED = list(definitions())


def test_there_are_at_most_thirty_terms_and_every_file_named_is_there():
    found = list(rows())
    assert 20 <= len(found) <= 30
    for _, files in found:
        assert files
        for file in files:
            assert (ROOT / file).exists(), file


def test_no_two_classes_have_one_name():
    places = defaultdict(set)
    for file, name, is_class in DEFINED:
        if is_class and not name.startswith("_") and not file.startswith("_compat"):
            places[name].add(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


FAMILIES = {
    "graph": ("core/graph.py",),
    "body": ("core/graph.py", "core/loops.py", "core/scans.py", "schedules/body.py"),
    "policy": ("policies.py",),
    "selector": ("policies.py",),
    "plan": ("core/plan.py",),
    "region": ("core/regions.py",),
    "residual": ("memory/residuals.py",),
    "schedule": ("core/schedule.py", "schedules/"),
    "segment": ("schedules/segments.py", "planner/chain.py"),
    "slots": ("schedules/",),
    "chain": ("planner/chain.py",),
    "cut": ("planner/mincut.py",),
    "candidate": ("planner/chain.py", "planner/candidates.py", "planner/scans.py"),
    "solver": ("planner/solvers/base.py",),
    "solution": ("planner/chain.py",),
    "frontier": ("planner/frontier.py",),
    "target": ("memory/targets.py",),
    "chip": ("memory/chips.py",),
    "platform": ("memory/platforms/base.py",),
    "action": ("actions/base.py",),
}
"""Terms that are the last word of class names, and the files whose classes have them."""


@pytest.mark.parametrize("term", FAMILIES)
def test_a_class_is_called_by_a_term_only_where_it_is_that(term):
    mine = [
        (file, name)
        for file, name, is_class in DEFINED
        if is_class and words(name)[-1] == term and not name.startswith("_")
    ]
    assert mine, "the glossary's term has a class"
    assert [(file, name) for file, name in mine if not file.startswith(FAMILIES[term])] == []


GONE = {
    "step": {"StepMaker"},
    "steps": set(),
    "choice": set(),
    "choices": set(),
    "option": set(),
    "kept": set(),
    "run": {"ScanRun"},
    "span": set(),
    "window": set(),
    "piece": set(),
    "part": set(),
    "analysis": set(),
}
"""Words that classes had in several meanings, and the classes that may have them."""


@pytest.mark.parametrize("word", GONE)
def test_no_class_has_a_word_that_stood_for_several_things(word):
    assert {name for _, name, is_class in DEFINED if is_class and words(name)[-1] == word} <= GONE[word]


VERBS = {"analyse": (), "analyze": (), "resolve": ("_compat/needs.py",), "piece": (), "span": ()}
"""Names of functions that stood for several things, and the files that may have one."""


@pytest.mark.parametrize("verb", VERBS)
def test_no_function_has_a_name_that_stood_for_several_things(verb):
    found = {file for file, name, is_class in DEFINED if not is_class and name.lstrip("_") == verb}
    assert found <= set(VERBS[verb])


def test_attributes_and_variables_keep_to_the_words_too():
    """No identifier is one of the words that the glossary gave up."""
    given_up = {"analyse", "span", "spans", "piece", "ScanChoice", "windows"}
    found = defaultdict(set)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            if name in given_up:
                found[name].add(path.relative_to(ROOT).as_posix())
    assert dict(found) == {}
