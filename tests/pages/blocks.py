"""Runs the code of a page of the docs, and holds what it prints against what the page shows.

A page's ```python blocks run from top to bottom in one module. A ```text block right after one is what it prints: words
are compared exactly, numbers within SLACK, since versions of JAX and XLA differ by some bytes.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import sys
import types
from dataclasses import dataclass
from typing import Any

SLACK = 0.05
"""Relative difference that a number in a page may have from what its block prints."""

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code, and what the page says it prints, or None."""

    code: str
    shown: str | None


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Returns the Python blocks of a page, in their order."""
    return [Block(code, shown or None) for code, shown in BLOCK.findall(page.read_text())]


def run(page: pathlib.Path) -> dict[str, Any]:
    """Runs a page's blocks, checks what they print, and returns the names that they define."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for block in blocks_of(page):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.code, page.name, "exec"), module.__dict__)
            if block.shown is not None:
                assert differences(out.getvalue(), block.shown) == [], f"{page.name} prints:\n{out.getvalue()}"
        return dict(module.__dict__)
    finally:
        del sys.modules[module.__name__]


def differences(printed: str, shown: str, slack: float = SLACK) -> list[str]:
    """Returns how a printed text differs from the shown one; spaces at line ends and blank lines do not count."""
    lines = [[line.rstrip() for line in text.splitlines() if line.strip()] for text in (printed, shown)]
    if len(lines[0]) != len(lines[1]):
        return [f"{len(lines[0])} lines, shown are {len(lines[1])}"]
    return [f"{got!r} for {want!r}" for got, want in zip(*lines) if not _alike(got, want, slack)]


def _alike(got: str, want: str, slack: float) -> bool:
    words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)) for text in (got, want)]
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (got, want)]
    return words[0] == words[1] and all(abs(a - b) <= slack * abs(b) for a, b in zip(*numbers))
