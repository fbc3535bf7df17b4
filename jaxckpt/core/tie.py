"""A barrier for tangents, transposed one for cotangents, that leaves out what is zero.

`jax.lax.optimization_barrier` transposed makes zeros of the cotangents that are missing. Those run through the backward pass of all
that came before: work for nothing, and NaN where a derivative is infinite. A value that later stretches read only for what nobody
differentiates, such as a metric carried along, has no cotangent.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxckpt import _compat

_tie = _compat.Primitive("jaxckpt_tie")
_tie.multiple_results = True


def tie(*tangents: Any) -> list[Any]:
    """Returns the tangents as they are; in reverse mode no cotangent of theirs goes on before all that there are have come."""
    return _tie.bind(*tangents)  # type: ignore[no-any-return]


def _held(*values: Any) -> list[Any]:
    return list(jax.lax.optimization_barrier(list(values)))


def _some(values: Any, held: Any) -> list[Any]:
    """Returns the values with what `held` makes of those that are not zero."""
    there = [value for value in values if not isinstance(value, _compat.Zero)]
    rest = iter(held(*there) if there else ())
    return [value if isinstance(value, _compat.Zero) else next(rest) for value in values]


_tie.def_impl(_held)
_tie.def_abstract_eval(lambda *avals: list(avals))
_compat.register_lowering(_tie, _compat.lower_fun(_held, multiple_results=True))
_compat.batching_rules[_tie] = lambda args, axes: (_tie.bind(*args), axes)
_compat.jvp_rules[_tie] = lambda primals, tangents: (_tie.bind(*primals), _some(tangents, _tie.bind))
_compat.transpose_rules[_tie] = lambda cotangents, *operands: _some(cotangents, _held)
