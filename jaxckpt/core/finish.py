"""What is done last to every equation of the programs that jaxckpt returns, also within the programs that these hold.

- Scans fill arrays that are allocated when their loops start, not when the program does: see `_compat/loops.py`.
- Kernels of Pallas are calls that a checkpoint can leave out: see `_compat/kernels.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.primitives import Holds

_ENTERED = (Holds.LOOP, Holds.BRANCHES, Holds.CALL, Holds.CHECKPOINT, Holds.MAPPED, Holds.RULE)


def finished_function(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of pytrees of arrays, traced at each call, whose equations are `finished`."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        jaxpr = _compat.open_jaxpr(closed)
        run = surgery.with_equations(jaxpr, list(map(finished, jaxpr.eqns)))
        out = surgery.evaluate(run, *_compat.jaxpr_consts(closed), *jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


def finished(eqn: Any) -> Any:
    """Returns an equation as it is returned to the user; itself where nothing is to be done."""
    primitive = _compat.primitive_name(eqn)
    if primitive == "pallas_call":
        return _compat.removable(eqn)
    facts = primitives.of(primitive)
    if facts.holds not in _ENTERED:
        return eqn
    if facts.backward_rule:
        eqn = _compat.with_changed_rules(eqn, finished_program, finished_function)
    eqn = surgery.with_programs(eqn, finished_program)
    return eqn if primitive != "scan" or _compat.waits(eqn) else _compat.waiting(eqn)


def finished_program(jaxpr: Any) -> Any:
    """Returns a program, closed or open, with `finished` equations; itself where nothing is to be done."""
    return _changed(jaxpr) or jaxpr


@_compat.weakref_lru_cache
def _changed(jaxpr: Any) -> Any:
    """Returns what `finished_program` does: one for one program, since JAX caches by identity. None for itself."""
    opened = _compat.open_jaxpr(jaxpr)
    eqns = list(map(finished, opened.eqns))
    if all(new is old for new, old in zip(eqns, opened.eqns)):
        return None
    return _compat.like(jaxpr, surgery.with_equations(opened, eqns), _compat.jaxpr_consts(jaxpr))
