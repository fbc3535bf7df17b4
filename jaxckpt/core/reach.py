"""What a function can reach beside its arguments: its closure, its globals, and what they hold.

A value of a trace that a function puts there is lost, or is another one, when the function runs again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from jaxckpt import _compat

NODES = 2000
"""Python objects that are looked at, at most."""
DEPTH = 6
"""Steps from the function to an object that is looked at."""
T = TypeVar("T")
_LIBRARIES = ("site-packages", "dist-packages")


def put_aside(
    fun: Callable[..., Any], call: Callable[[], T], skip: Callable[[Any], bool] = lambda value: False
) -> tuple[T, str]:
    """Returns what a call returns, and the way to the first traced value that a function can reach after it and could
    not before; "" where there is none.
    """
    before = {id(value) for _, value in tracers(fun, skip)}
    out = call()
    return out, next((where for where, value in tracers(fun, skip) if id(value) not in before), "")


def tracers(fun: Callable[..., Any], skip: Callable[[Any], bool] = lambda value: False) -> Iterator[tuple[str, Any]]:
    """Yields the traced values that a function can reach in its closure, its globals and what they hold, each with the
    way to it.

    Args:
      fun: the function.
      skip: whether an object's attributes are not looked at.
    """
    seen: set[int] = set()
    queue: list[tuple[str, Any, int]] = [("", fun, 0)]
    while queue and len(seen) < NODES:
        name, value, depth = queue.pop(0)
        if _compat.is_tracer(value):
            yield name, value
            continue
        if id(value) in seen or depth > DEPTH:
            continue
        seen.add(id(value))
        queue.extend((path, held, depth + 1) for path, held in itertools.islice(_held(name, value, skip), NODES))


def _held(name: str, value: Any, skip: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yields what a Python object holds that a function may change: (the way to it, it)."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        if _compat.is_own_file(code.co_filename):
            yield name, getattr(value, "__wrapped__", None)
            return
        if any(library in code.co_filename for library in _LIBRARIES):
            return
        for variable, cell in zip(code.co_freevars, value.__closure__ or ()):
            try:
                yield variable, cell.cell_contents
            except ValueError:  # not set yet
                continue
        for variable in code.co_names:
            if variable in value.__globals__:
                yield variable, value.__globals__[variable]
        yield from ((f"a default of {name or value.__name__}", held) for held in value.__defaults__ or ())
    elif isinstance(value, types.MethodType):
        yield name, value.__func__
        yield f"{name}.__self__" if name else "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((name, held) for held in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", held) for key, held in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{i}]", held) for i, held in enumerate(list(value)))
    elif not isinstance(value, (types.ModuleType, type, jax.Array)) and not callable(
        inspect.getattr_static(value, "lower", None)
    ):
        attributes = inspect.getattr_static(value, "__dict__", None)
        if attributes is not None and not skip(value):
            own = getattr(value, "__dict__", {})
            yield from ((f"{name}.{key} (of a {type(value).__name__})", held) for key, held in list(own.items()))
