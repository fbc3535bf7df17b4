"""Static arguments: they are not arrays, and select the program. A function is closed over them, once for each type and
value.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, did_you_mean
from jaxckpt.core.argument_names import argument_numbers, items
from jaxckpt.core.typed import hashable, typed


@dataclass(frozen=True)
class Static:
    """Which arguments of a function are static.

    Attributes:
      fun: the function.
      numbers: numbers of positional arguments; negative numbers count from the last argument of the call.
      names: names of keyword arguments.
      positions: positions of positional arguments that have one of the names.
    """

    fun: Callable[..., Any]
    numbers: tuple[int, ...]
    names: frozenset[str]
    positions: tuple[int, ...]

    def after_model(self, call: Callable[..., Any]) -> Static:
        """Returns the same of `call(model, *args, **kwargs)`, where the function is a model that is an argument too."""
        after = lambda places: tuple(place if place < 0 else place + 1 for place in places)
        return Static(call, after(self.numbers), self.names, after(self.positions))

    def closed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns a function of the other arguments, and these arguments. Static arguments of equal types and values
        give the same function.

        Raises:
          ArgumentError: a number is out of the range of the call's positional arguments.
        """
        count = len(args)
        for number in self.numbers:
            if not -count <= number < count:
                rule = f"within the {count} positional arguments of the call"
                raise ArgumentError("static_argnums", rule, number, "Pass that argument by position.")
        places = {number % count for number in self.numbers} | {place for place in self.positions if place < count}
        positional = tuple((i, _Fixed(args[i])) for i in sorted(places))
        named = tuple((name, _Fixed(kwargs[name])) for name in sorted(self.names & kwargs.keys()))
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in places)
        rest = {name: arg for name, arg in kwargs.items() if name not in self.names}
        try:
            return _closure(self.fun, count, positional, named), dynamic, rest
        except TypeError:
            if all(hashable(fixed) for _, fixed in (*positional, *named)):
                raise
        return _make_closure(self.fun, count, positional, named), dynamic, rest


def static(fun: Callable[..., Any], numbers: int | Sequence[int], names: str | Sequence[str]) -> Static | None:
    """Returns which arguments of a function are static; None if none are.

    Raises:
      ArgumentError: `numbers` has something other than ints, or `names` something other than names of the function's
        arguments.
    """
    listed = argument_numbers(numbers)
    given = [names] if isinstance(names, str) else items(names)
    if given is None or not all(isinstance(name, str) for name in given):
        raise ArgumentError("static_argnames", "a string or a sequence of strings", names)
    called = frozenset(given)
    if not listed and not called:
        return None
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        parameters = list(inspect.signature(fun).parameters.values())
    kinds = {p.kind for p in parameters}
    unknown = called - {p.name for p in parameters} if parameters and inspect.Parameter.VAR_KEYWORD not in kinds else ()
    if unknown:
        near = did_you_mean(min(unknown), [p.name for p in parameters])
        raise ArgumentError("static_argnames", "names of arguments of fun", min(unknown), near)
    positions = tuple(
        i for i, p in enumerate(parameters) if p.name in called and p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    return Static(fun, listed, called, positions)


@dataclass(frozen=True)
class _Fixed:
    """A static argument. Two are equal if their types and values are equal at every depth: see `typed`."""

    value: Any = field(compare=False)
    key: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", typed(self.value))


def _make_closure(
    fun: Callable[..., Any],
    count: int,
    positional: tuple[tuple[int, _Fixed], ...],
    named: tuple[tuple[str, _Fixed], ...],
) -> Callable[..., Any]:
    fixed = {i: each.value for i, each in positional}
    by_name = {name: each.value for name, each in named}

    def dynamic(*args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        return fun(*(fixed[i] if i in fixed else next(rest) for i in range(count)), **by_name, **kwargs)

    dynamic.__name__ = getattr(fun, "__name__", "fun")
    dynamic.__qualname__ = getattr(fun, "__qualname__", dynamic.__name__)
    return dynamic


_closure = _compat.weakref_lru_cache(_make_closure)
