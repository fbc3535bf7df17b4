"""The forward pass of a program that is being differentiated: forward rules in the place of functions with rules.

Where JAX differentiates a `jax.custom_vjp` it runs the forward rule, as operations like all others. So a second
derivative goes through these: the rule's residuals have derivatives too, and forward mode works. A program that stores
what a derivative reads has to be the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.primitives import Holds

TITLE = "jaxckpt_rule@"
"""What begins the name of the function that stands in an opened rule's place: see `core/rules.py`."""


def forward_pass(closed: Any) -> Any:
    """Returns the closed jaxpr with the forward rule of each `jax.custom_vjp` in its place, in loops, branches and
    calls too; itself where it has none.

    Rules with `symbolic_zeros` stay as they are: see `core/rules.py`.
    """
    return _Forward().jaxpr(closed)


class _Forward(surgery.Rewriter):
    def equation(self, eqn: Any) -> Any:
        name = _compat.primitive_name(eqn)
        facts = primitives.of(name)
        if name == "custom_vjp_call":
            return _by_its_forward_rule(eqn) or eqn
        if name == "custom_jvp_call" and _is_opened(eqn):
            return _called(eqn, eqn.params["call_jaxpr"], 0, 0)
        if facts.entered and facts.holds is not Holds.RULE and (facts.holds is not Holds.MAPPED or has_rules(eqn)):
            return surgery.with_programs_mapped(eqn, self.jaxpr)
        return eqn


def has_rules(eqn: Any) -> bool:
    """Whether a program of an equation calls a function with a custom rule for reverse mode, opened or not."""

    def is_rule(each: Any) -> bool:
        name = _compat.primitive_name(each)
        return name == "custom_vjp_call" or (name == "custom_jvp_call" and _is_opened(each))

    return any(is_rule(each) for program in surgery.programs(eqn) for each in surgery.walk(program))


def _is_opened(eqn: Any) -> bool:
    return _compat.jaxpr_title(eqn.params["call_jaxpr"]).startswith(TITLE)


def _by_its_forward_rule(eqn: Any) -> Any:
    """Returns the forward rule of a `jax.custom_vjp` as a call; None where it stays as it is."""
    rule = _compat.custom_rule(eqn)
    if rule.symbolic_zeros:
        return None
    try:
        traced, _ = rule.trace([jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars[rule.num_consts :]])
    except Exception:  # the user's: JAX says what is wrong with the rule where it is differentiated
        return None
    program = _compat.open_jaxpr(traced)
    if program.effects:
        return None
    return _called(eqn, traced, rule.num_consts, len(program.outvars) - len(eqn.outvars))


def _called(eqn: Any, closed: Any, skipped: int, first: int) -> Any:
    """Returns a call of a closed jaxpr in the place of an equation: without the first `skipped` operands, and with the
    results from the `first` one on.
    """
    program, consts = _compat.open_jaxpr(closed), _compat.jaxpr_consts(closed)
    run = jax.jit(lambda *operands: _compat.eval_jaxpr(program, consts, *operands[skipped:])[first:])
    traced = _compat.open_jaxpr(jax.make_jaxpr(run)(*(var.aval for var in eqn.invars)))
    if len(traced.eqns) != 1 or len(traced.eqns[0].invars) != len(eqn.invars):
        return eqn  # it holds arrays of its own, which have no place in this program
    return traced.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
