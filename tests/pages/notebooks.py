"""Runs the notebooks of docs/tutorials in plain Python, and holds what they print against the stored outputs.

python -m tests.pages.notebooks    # runs all of them, and stores what they print
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

from tests.pages.blocks import SLACK

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def slack(notebook: dict[str, Any]) -> float:
    """Returns how far numbers may be from the stored ones: any way, if another version of JAX stored them."""
    return SLACK if notebook["metadata"].get("jax") == jax.__version__ else math.inf


def stored(cell: dict[str, Any]) -> str:
    """Returns what a cell printed when its outputs were stored."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def printed(page: pathlib.Path) -> Iterator[str]:
    """Runs the cells of a notebook in one module, and yields what each prints."""
    module = types.ModuleType(f"notebook_{page.stem}")
    sys.modules[module.__name__] = module
    try:
        for number, cell in enumerate(code_cells(json.loads(page.read_text())), 1):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), module.__dict__)
            yield out.getvalue()
    finally:
        del sys.modules[module.__name__]


def store(page: pathlib.Path) -> None:
    """Runs a notebook and writes what it prints into it."""
    notebook = json.loads(page.read_text())
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed(page)), 1):
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        cell["execution_count"] = number
    notebook["metadata"]["jax"] = jax.__version__
    page.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for each in PAGES:
        store(each)
