"""Variants of a model, and the lines that a user writes for them."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One way to checkpoint.

    Attributes:
      stack: makes a model of blocks one after the other; None if that is not possible.
      loop: makes a loop over time; None if that is not possible.
      against: name of the variant of the same framework that memory, counts and time are compared with.
      skips: name of a task -> why the variant is not for it.
    """

    stack: Callable[..., Any] | None = None
    loop: Callable[..., Any] | None = None
    against: str = "plain"
    skips: Mapping[str, str] | None = None

    def maker(self, loop: bool) -> Callable[..., Any] | None:
        """Returns the function that makes the model."""
        return self.loop if loop else self.stack

    def why_not(self, task: str, loop: bool) -> str | None:
        """Returns why there is no such model; None if there is one."""
        if self.skips and task in self.skips:
            return self.skips[task]
        if self.maker(loop) is None:
            return "it is not for loops over time" if loop else "it is for loops over time"
        return None


def lines_written(made: Callable[..., Any], plain: Callable[..., Any]) -> list[str]:
    """Returns the lines of a variant's source that the plain model's source does not have.

    Indentation, docstrings and imports do not count.

    >>> def plain(f):
    ...     return [f]
    >>> def made(f):
    ...     f = abs(f)
    ...     return [f]
    >>> lines_written(plain, plain)
    []
    """
    before, after = _body(plain), _body(made)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [line for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal" for line in after[low:high]]


def _body(fun: Callable[..., Any]) -> list[str]:
    while isinstance(fun, functools.partial):
        fun = fun.func
    source = textwrap.dedent(inspect.getsource(fun))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)
    statements = tree.body[1:] if ast.get_docstring(tree) else tree.body
    lines = [line.strip() for line in source.splitlines()[statements[0].lineno - 1 :]]
    return [line for line in lines if line and not line.startswith("#")]
