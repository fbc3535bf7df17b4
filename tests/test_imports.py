"""Imports go down through the layers that docs/architecture.md lists, and never in a circle; what draws is imported
when it draws.
"""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import jaxckpt

ROOT = pathlib.Path(jaxckpt.__file__).parent
GUIDE = pathlib.Path(__file__).parent.parent / "docs" / "architecture.md"


def layers() -> dict[str, int]:
    """Returns file or folder of the package -> its layer, the lowest first, as the guide has it."""
    section = re.search(r"^## Layers\n(.*?)^## ", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\d+\. ((?:`\w+`(?:, )?)+):", section[1], re.MULTILINE)
    return {name: i for i, row in enumerate(rows) for name in re.findall(r"`(\w+)`", row)}


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: pathlib.Path) -> dict[str, set[str]]:
    """Returns module -> the package's modules that it imports anywhere: at the top, within functions, for types alone,
    by importlib.
    """
    known = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        names = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, (path, "relative imports are not used")
                names += [name if (name := f"{node.module}.{a.name}") in known else node.module for a in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                names += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        found[module] = {name for name in names if name in known}
    return found


def layer_of(module: str, order: dict[str, int]) -> int:
    package, *rest = module.split(".")
    return order[rest[0] if rest else package]


def upward(found: dict[str, set[str]], order: dict[str, int]) -> list[tuple[str, str]]:
    return [(m, n) for m, used in found.items() for n in used if layer_of(n, order) > layer_of(m, order)]


def test_every_file_has_a_layer():
    order = layers()
    there = {module.split(".")[1] for module in modules(ROOT) if "." in module} | {"jaxckpt"}
    assert set(order) == there


def test_imports_go_to_the_same_layer_or_a_lower_one():
    assert upward(imports(ROOT), layers()) == []


def test_no_imports_run_in_a_circle():
    assert list(graphlib.TopologicalSorter(imports(ROOT)).static_order())


def test_deferred_and_typing_imports_count(tmp_path):
    """The walk itself: a package that breaks both rules, in each way to import."""
    package = tmp_path / "package"
    (package / "low").mkdir(parents=True)
    (package / "high").mkdir()
    (package / "__init__.py").write_text("")
    (package / "low" / "__init__.py").write_text("")
    (package / "high" / "__init__.py").write_text("def late():\n    from package.low import a\n")
    (package / "low" / "a.py").write_text("def late():\n    from package import high\n")
    (package / "low" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.high"
    )
    (package / "low" / "c.py").write_text("import importlib\nhigh = lambda: importlib.import_module('package.high')")
    found = imports(package)
    order = {"low": 0, "high": 1, "package": 2}
    assert {module for module, _ in upward(found, order)} == {"package.low.a", "package.low.b", "package.low.c"}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(found).static_order())


def test_the_package_imports_neither_what_draws_nor_what_solves_nor_extras():
    names = "rich", "matplotlib", "scipy", "flax", "optax"
    code = f"import sys, jaxckpt; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
