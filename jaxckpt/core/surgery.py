"""What is done to jaxprs: the programs inside of an equation, what equations use, stretches of them cut out as programs of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxckpt import _compat
from jaxckpt.core import primitives
from jaxckpt.core.primitives import Holds


def inner_jaxprs(primitive: str, params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int | None], Any]]:
    """Yields ((parameter, place in it or None), jaxpr) for the programs that an operation holds.

    The scalar functions of reductions, scatters and sorts are not programs in that sense.
    """
    if primitives.of(primitive).holds is Holds.SCALARS:
        return
    for name, param in params.items():
        if _compat.is_jaxpr(param):
            yield (name, None), param
        elif isinstance(param, tuple):
            for place, item in enumerate(param):
                if _compat.is_jaxpr(item):
                    yield (name, place), item


def programs(eqn: Any) -> list[Any]:
    """Returns the programs that an equation holds, closed or open as they are."""
    found = inner_jaxprs(_compat.primitive_name(eqn), _compat.equation_params(eqn))
    return [jaxpr for _, jaxpr in found]


def used(eqns: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations read and none of them makes, in the order of their first use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    found: dict[Any, None] = {}
    for eqn in eqns:
        for var in eqn.invars:
            if not isinstance(var, _compat.Literal) and var not in made:
                found[var] = None
    return list(found)


def stretch(eqns: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any], of: Any) -> Any:
    """Returns equations of the open jaxpr `of` as an open jaxpr of their own."""
    return _compat.build_jaxpr([], inputs, results, eqns, of.debug_info)


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """Returns an open jaxpr with other equations, whose effects are its own then."""
    return _compat.build_jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, eqns, jaxpr.debug_info)


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates an open jaxpr: its constants first, then its arguments."""
    constants = len(jaxpr.constvars)
    return _compat.eval_jaxpr(jaxpr, args[:constants], *args[constants:])
