"""Kept values put in the place of computed ones, so that a derivative does not compute them again.

The derivative of `tanh` reads tanh's own result. So it is not enough to give a kept value to the users of that result: the derivative would
still run `tanh`, and all that leads to it. Here the equation keeps its derivative, but the derivative reads what was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt.core.inline import inline
from jaxckpt.transforms.step import Values, is_inexact, piece

_Zero = jax.custom_derivatives.SymbolicZero


def inject(eqn: Any, given: Mapping[int, Any], debug_info: Any) -> list[Any]:
    """Returns equations that take the place of one, some of whose results are at hand.

    Args:
      eqn: an equation of a jaxpr.
      given: by the place among the equation's results, the variable that has the value.
      debug_info: of the jaxpr.

    Returns:
      Equations with the same results. A result that is given has its value, and the derivative that the equation gives to it; where that
      derivative reads results that are given, it reads the given values. The other results are computed, if anything reads them.
    """
    outvars = [_compat.fresh_var(var.aval) if place in given else var for place, var in enumerate(eqn.outvars)]
    places = [place for place in given if is_inexact(eqn.outvars[place].aval)]
    copies = [_compat.copy_equation(given[p], eqn.outvars[p], eqn) for p in given if p not in places]
    values = [given[place] for place in places]
    if not places:
        return [eqn.replace(outvars=outvars), *copies]
    if has_tangents_apart(eqn):
        call, operands = _with_tangents(eqn, places, debug_info), [*eqn.invars, *values]
    else:
        call, operands = _in_place_of, [*(outvars[place] for place in places), *values]
    template = _compat.open_jaxpr(jax.make_jaxpr(call)(*(atom.aval for atom in operands))).eqns[-1]
    return [
        eqn.replace(outvars=outvars),
        *copies,
        template.replace(invars=operands, outvars=[eqn.outvars[place] for place in places]),
    ]


def has_tangents_apart(eqn: Any) -> bool:
    """Whether an equation's tangents can be had without its value: not where a loop, or a rule of reverse mode, computes both at once."""
    return not eqn.effects and (eqn.primitive.name == "custom_jvp_call" or not inner_programs(eqn))


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs that an equation holds."""
    params = _compat.equation_params(eqn).values()
    items = [item for param in params for item in (param if isinstance(param, (tuple, list)) else [param])]
    return [_compat.open_jaxpr(item) for item in items if _compat.is_jaxpr(item)]


def tangents_from(
    eqn: Any, places: Sequence[int], debug_info: Any
) -> Callable[[Values, Values, Mapping[int, Any]], Values]:
    """Returns an equation's tangent rule, reading its results from values that are given.

    Args:
      eqn: an equation of a jaxpr; see `has_tangents_apart`.
      places: which of its results are given, and have their tangents returned.
      debug_info: of the jaxpr.

    Returns:
      (operands, given results, tangents of some operands by their places) -> tangents of the results.
    """
    inputs, outputs = ([_compat.fresh_var(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    run = piece([eqn.replace(invars=inputs, outvars=outputs)], inputs, [outputs[p] for p in places], debug_info)

    def rule(operands: Values, given: Values, tangents: Mapping[int, Any]) -> Values:
        def both(operands: Values, tangents: Mapping[int, Any]) -> tuple[Values, Values]:
            def moved(moving: Mapping[int, Any]) -> Values:
                return run(*(moving.get(place, operand) for place, operand in enumerate(operands)))

            return jax.jvp(moved, ({place: operands[place] for place in tangents},), (tangents,))

        traced = inline(jax.make_jaxpr(both)(operands, tangents))
        jaxpr = _compat.open_jaxpr(traced)
        results, wanted = jaxpr.outvars[: len(places)], jaxpr.outvars[len(places) :]
        made = {var for equation in jaxpr.eqns for var in equation.outvars}
        known = {var: value for var, value in zip(results, given) if isinstance(var, _compat.Var) and var in made}
        rest = piece(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars, *known], wanted, jaxpr.debug_info)
        return rest(*_compat.jaxpr_consts(traced), *operands, *jax.tree.leaves(tangents), *known.values())

    return rule


def _with_tangents(eqn: Any, places: Sequence[int], debug_info: Any) -> Callable[..., Any]:
    """Returns (operands, given results) -> given results, with the equation's derivative."""
    count, rule = len(eqn.invars), tangents_from(eqn, places, debug_info)

    @jax.custom_jvp
    def call(*values: Any) -> Values:
        return list(values[count:])

    def tangents(primals: Any, tangents: Any) -> tuple[Values, Values]:
        given = list(primals[count:])
        moving = {place: t for place, t in enumerate(tangents[:count]) if not isinstance(t, _Zero)}
        return given, rule(list(primals[:count]), given, moving) if moving else [jnp.zeros_like(v) for v in given]

    call.defjvp(tangents, symbolic_zeros=True)
    return call


@jax.custom_jvp
def _in_place_of(*values: Any) -> Values:
    """Returns the second half of the values, which get the derivatives of the first half."""
    return list(values[len(values) // 2 :])


_in_place_of.defjvp(lambda primals, tangents: (_in_place_of(*primals), list(tangents[: len(tangents) // 2])))
