"""Scans whose results are allocated when their loops start, not when the program does: see `_compat/loops.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.primitives import Holds

_ENTERED = (Holds.LOOP, Holds.BRANCHES, Holds.CALL, Holds.CHECKPOINT, Holds.MAPPED, Holds.RULE)


def with_waiting_scans(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of pytrees of arrays, traced at each call, whose scans wait for their operands."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        jaxpr = _compat.open_jaxpr(closed)
        run = surgery.with_equations(jaxpr, [waiting(eqn) for eqn in jaxpr.eqns])
        out = surgery.evaluate(run, *_compat.jaxpr_consts(closed), *jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


def waiting(eqn: Any) -> Any:
    """Returns an equation of which each scan, also within the programs that it holds, waits for its operands; itself
    where there is none.
    """
    primitive = _compat.primitive_name(eqn)
    facts = primitives.of(primitive)
    if facts.holds not in _ENTERED:
        return eqn
    if facts.backward_rule:
        eqn = _compat.with_changed_rules(eqn, lambda jaxpr: _program(jaxpr) or jaxpr, with_waiting_scans)
    eqn = surgery.with_programs(eqn, lambda jaxpr: _program(jaxpr) or jaxpr)
    return eqn if primitive != "scan" or _compat.waits(eqn) else _compat.waiting(eqn)


@_compat.weakref_lru_cache
def _program(jaxpr: Any) -> Any:
    """Returns a program with `waiting` equations: one for one program, since JAX caches by identity. None where all
    are as they were.
    """
    opened = _compat.open_jaxpr(jaxpr)
    eqns = [waiting(eqn) for eqn in opened.eqns]
    if all(new is old for new, old in zip(eqns, opened.eqns)):
        return None
    return _compat.like(jaxpr, surgery.with_equations(opened, eqns), _compat.jaxpr_consts(jaxpr))
