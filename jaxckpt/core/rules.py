"""Custom rules opened: the residuals of a `jax.custom_vjp` become values of the graph, which a policy or a plan can
keep.

JAX runs the forward rule of such a function where it differentiates, so its residuals are in no traced program, and
nothing can name them: a checkpoint around flash attention runs the whole attention again for the logsumexp that its
backward rule reads. `opened` puts a function of our own in the rule's place. Its results are the rule's and, after
these, the residuals, so that the emitter can name them; its derivative is the forward rule and, for cotangents, the
user's backward rule.

For code that uses the rule's own results alone, nothing changes. Where nothing of a rule is kept, the rule is
emitted as it was.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.finish import finished, finished_program
from jaxckpt.core.forward import TITLE, has_rules
from jaxckpt.core.inline import Calls, inline
from jaxckpt.core.primitives import Holds

PRIMITIVE = "custom_vjp_call"
KERNELS = ("pallas_call", "ffi_call")
"""Operations that run a kernel of the user's."""


@dataclass(frozen=True)
class Rule:
    """An opened rule, as its equation says.

    Attributes:
      name: of the user's function.
      results: how many results the rule has; those after them are residuals, tagged values, and values that are dear
        to compute, such as the results of matmuls.
      shape: how many operands and results the equation has. JAX may leave some out; what is left is no opened rule.
      residuals: for each leaf of what the forward rule keeps where it is: ("in", an operand's place) or ("out", a
        result's place).
      tags: (result's place, the tag that the forward rule gives it).
      hidden: tags inside of the function that its forward rule does not give: nothing can be kept by them.
    """

    name: str
    results: int
    shape: tuple[int, int]
    residuals: tuple[tuple[str, int], ...]
    tags: tuple[tuple[int, str], ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The rule as the name of a function, encoded JSON: parameters of operations do not last, names of functions
        do.
        """
        return TITLE + base64.urlsafe_b64encode(json.dumps(dataclasses.astuple(self)).encode()).decode()

    @classmethod
    def of(cls, eqn: Any) -> Rule | None:
        """Returns the rule that an equation opens; None where it is another operation."""
        if _compat.primitive_name(eqn) != "custom_jvp_call":
            return None
        title = _compat.jaxpr_title(eqn.params["call_jaxpr"])
        rule = _rule_of(title.removeprefix(TITLE)) if title.startswith(TITLE) else None
        return rule if rule is not None and rule.shape == (len(eqn.invars), len(eqn.outvars)) else None


@functools.cache
def _rule_of(encoded: str) -> Rule:
    name, results, shape, residuals, tags, hidden = json.loads(base64.urlsafe_b64decode(encoded))
    return Rule(name, results, tuple(shape), tuple(map(tuple, residuals)), tuple(map(tuple, tags)), tuple(hidden))


def opened(closed: Any, calls: Calls) -> Any:
    """Returns the closed jaxpr with the custom rules in it opened, those in loops, branches and calls too; itself where
    it has none.

    Args:
      closed: the jaxpr.
      calls: where to note the equations that were opened, so that those of which nothing is kept become what they were.
    """
    return _Opener(calls).jaxpr(closed)


class _Opener(surgery.Rewriter):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def equation(self, eqn: Any) -> Any:
        name = _compat.primitive_name(eqn)
        facts = primitives.of(name)
        if name == PRIMITIVE:
            new = _open(eqn) or eqn
        elif facts.entered and (facts.holds is not Holds.MAPPED or has_rules(eqn)):
            new = surgery.with_programs_mapped(eqn, self.jaxpr)
        else:
            return eqn
        if new is not eqn:
            self.calls.add_opened(eqn, new)
        return new


@dataclass(frozen=True, eq=False)
class _Forward:
    """A forward rule, traced.

    Attributes:
      program: closed jaxpr of (operands) -> (results, residuals that are new, tagged values that are new, other values
        that are dear to compute).
      kept: for each leaf of the residuals: ("in", operand's place) or ("out", place among the program's results).
      results: how many results the user's function has.
      tags: as of `Rule`.
      named: how many of the program's results come before the values that are dear to compute.
    """

    program: Any
    kept: tuple[tuple[str, int], ...]
    results: int
    tags: tuple[tuple[int, str], ...]
    named: int


def _open(eqn: Any) -> Any:
    """Returns the equation that stands in a rule's place; None where the forward rule stays closed.

    That is so where it has effects, or arrays of its own, and with `symbolic_zeros=True`: what such a rule keeps
    depends on what is differentiated, and JAX remembers only what the last trace of it kept.
    """
    rule = _compat.custom_rule(finished(eqn))
    if rule.symbolic_zeros:
        return None
    flags = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars[rule.num_consts :]]
    try:
        traced, forwards = rule.trace(flags)
    except Exception:  # the user's: JAX says what is wrong with the rule where it is differentiated
        return None
    forward = _forward(eqn, rule, traced, forwards)
    return None if forward is None else _in_place(eqn, rule, forward)


def _in_place(eqn: Any, rule: _compat.CustomRule, forward: _Forward) -> Any:
    tags = filter(None, map(_compat.equation_name, surgery.walk(eqn.params["call_jaxpr"])))
    inside = set(tags) - {tag for _, tag in forward.tags}
    consts = rule.num_consts
    program = _compat.open_jaxpr(finished_program(forward.program))
    shape = len(eqn.invars), len(program.outvars)
    title = Rule(rule.name, forward.results, shape, forward.kept, forward.tags, tuple(sorted(inside))).title
    kernel = any(_compat.primitive_name(each) in KERNELS for each in surgery.walk(program))

    def run(*operands: Any) -> list[Any]:
        made = _compat.eval_jaxpr(program, _compat.jaxpr_consts(forward.program), *operands[consts:])
        # What is cut out of a kernel's result would be cut out where it is first used, in the backward pass. A TPU pads
        # the last axis to 128: the result, such as a logsumexp with an axis of one element, may be far larger.
        return [*jax.lax.optimization_barrier(made[: forward.named]), *made[forward.named :]] if kernel else made

    run.__name__ = run.__qualname__ = title
    made = jax.custom_jvp(run)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        zero = jax.custom_derivatives.SymbolicZero
        still = [isinstance(tangent, zero) for tangent in tangents]
        out = run(*primals)
        residuals = [primals[place] if kind == "in" else out[place] for kind, place in forward.kept]
        moving = [tangent for tangent, flag in zip(tangents, still) if not flag]
        avals = [_compat.tangent_aval(result) for result in out]
        own = rule.tangents(residuals, moving, still, avals[: forward.results]) if moving else []
        smooth = [place for place, aval in enumerate(avals[: forward.results]) if aval.dtype != jax.dtypes.float0]
        found = {place: own[place] for place in smooth} if moving else {}
        return out, [found.get(place, zero(aval)) for place, aval in enumerate(avals)]

    made.defjvp(derivative, symbolic_zeros=True)
    traced = _compat.open_jaxpr(jax.make_jaxpr(made)(*(var.aval for var in eqn.invars)))
    call = traced.eqns[-1]
    if len(traced.eqns) != 1 or len(call.invars) != len(eqn.invars):
        return None  # the forward rule holds arrays of its own, which have no place in this program
    extra = [_compat.fresh_var(var.aval) for var in call.outvars[forward.results :]]
    return call.replace(invars=eqn.invars, outvars=[*eqn.outvars, *extra], source_info=eqn.source_info)


def _forward(eqn: Any, rule: _compat.CustomRule, traced: Any, forwards: Sequence[int | None]) -> _Forward | None:
    """Returns a forward rule as `CustomRule.trace` gave it; None where it has effects, or arrays of its own."""
    closed = inline(traced)
    program = _compat.open_jaxpr(closed)
    if program.effects or program.constvars:
        return None
    made = len(program.outvars) - len(eqn.outvars)
    new, results = list(program.outvars[:made]), list(program.outvars[made:])
    where: dict[Any, int] = {}
    outvars = list(results)

    def place_of(atom: Any) -> int:
        known = None if isinstance(atom, _compat.Literal) else where.get(atom)
        if known is None:
            known = len(outvars)
            outvars.append(atom)
            if not isinstance(atom, _compat.Literal):
                where[atom] = known
        return known

    inputs = {var: place for place, var in enumerate(program.invars)}
    where.update(
        (var, place) for place, var in enumerate(results) if isinstance(var, _compat.Var) and var not in inputs
    )
    waiting = iter(new)
    kept: list[tuple[str, int]] = []
    for forwarded in forwards:
        atom = next(waiting) if forwarded is None else None
        if forwarded is not None:
            kept.append(("in", forwarded))
        elif isinstance(atom, _compat.Var) and atom in inputs:
            kept.append(("in", rule.num_consts + inputs[atom]))
        else:
            kept.append(("out", place_of(atom)))
    tags = []
    for each in program.eqns:
        tag = _compat.equation_name(each)
        if tag is not None and not isinstance(each.invars[0], _compat.Literal) and each.invars[0] not in inputs:
            tags.append((place_of(each.outvars[0]), tag))
    named = len(outvars)
    for each in program.eqns:
        if primitives.of(_compat.primitive_name(each)).dear:
            for var in each.outvars:
                if not isinstance(var, _compat.DropVar):
                    place_of(var)
    rebuilt = _compat.rewritten(program, list(program.eqns), outvars)
    return _Forward(_compat.like(closed, rebuilt, ()), tuple(kept), len(results), tuple(tags), named)


def tags_of(rule: Rule) -> Iterator[tuple[str, int, str]]:
    """Yields ("in" or "out", place, tag): residuals by the rule's name and their places, and what its forward rule
    tags.
    """
    for leaf, (kind, place) in enumerate(rule.residuals):
        yield kind, place, f"{rule.name}/{leaf}"
    for place, tag in rule.tags:
        yield "out", place, tag
