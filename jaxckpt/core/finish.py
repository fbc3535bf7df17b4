"""What is done last to every equation of the programs that jaxckpt returns, also within the programs that these hold.

- Scans fill arrays that are allocated when their loops start, not when the program does: see `_compat/loops.py`.
- Kernels of Pallas are calls that a checkpoint can leave out: see `_compat/kernels.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
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


def finished(eqn: Any, lone: bool = False) -> Any:
    """Returns an equation as it is returned to the user; itself where nothing is to be done.

    Args:
      eqn: the equation.
      lone: whether it is of a program with `has_one_scan`. JAX lowers that one as well, and in the very bytes of a step
        without a plan: no other scan's arrays are there before their time.
    """
    primitive = _compat.primitive_name(eqn)
    if primitive == "pallas_call":
        return _compat.removable(eqn)
    facts = primitives.of(primitive)
    if facts.holds not in _ENTERED:
        return eqn
    if facts.backward_rule:
        eqn = _compat.with_changed_rules(eqn, finished_program, finished_function)
    same = facts.holds.returns  # as if its program stood in its place
    eqn = surgery.with_programs(eqn, lambda jaxpr: finished_program(jaxpr, lone if same else has_one_scan(jaxpr)))
    return eqn if primitive != "scan" or lone or _compat.waits(eqn) else _compat.waiting(eqn)


def finished_program(jaxpr: Any, lone: bool = False) -> Any:
    """Returns a program, closed or open, with `finished` equations; itself where nothing is to be done."""
    return _changed(jaxpr, lone) or jaxpr


def has_one_scan(jaxpr: Any) -> bool:
    """Whether a program has at most one scan that is in no loop and no branch."""
    return len(list(itertools.islice(_scans(jaxpr), 2))) < 2


def _scans(jaxpr: Any) -> Iterator[Any]:
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        primitive = _compat.primitive_name(eqn)
        if primitive == "scan":
            yield eqn
        elif primitives.of(primitive).holds.returns:
            for inner in surgery.programs(eqn):
                yield from _scans(inner)


@_compat.weakref_lru_cache
def _changed(jaxpr: Any, lone: bool) -> Any:
    """Returns what `finished_program` does: one for one program, since JAX caches by identity. None for itself."""
    opened = _compat.open_jaxpr(jaxpr)
    eqns = [finished(eqn, lone) for eqn in opened.eqns]
    if all(new is old for new, old in zip(eqns, opened.eqns)):
        return None
    return _compat.like(jaxpr, surgery.with_equations(opened, eqns), _compat.jaxpr_consts(jaxpr))
