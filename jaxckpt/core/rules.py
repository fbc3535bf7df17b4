"""Custom rules opened: the residuals of a `jax.custom_vjp`, and what is dear to compute in the rule of a
`jax.custom_jvp`, become values of the graph, which a policy or a plan can keep.

JAX runs the forward rule of such a function where it differentiates, so its residuals are in no traced program, and
nothing can name them: a checkpoint around flash attention runs the whole attention again for the logsumexp that its
backward rule reads. `opened` puts a function of our own in the rule's place. Its results are the rule's and, after
these, the residuals, so that the emitter can name them; its derivative is the forward rule and, for cotangents, the
user's backward rule. In the place of a `jax.custom_jvp` its results are the rule's and, after these, what is dear in
it; its derivative is the rule.

For code that uses the rule's own results alone, nothing changes. Where nothing of a rule is kept, the rule is
emitted as it was.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.finish import finished, finished_program
from jaxckpt.core.forward import TITLE
from jaxckpt.core.inline import Calls, inline
from jaxckpt.core.primitives import Holds

REVERSE, FORWARD = "custom_vjp_call", "custom_jvp_call"
"""The operations whose rules are opened; what stands in the place of either is of the second kind."""
KERNELS = ("pallas_call", "ffi_call")
"""Operations that run a kernel of the user's."""


@dataclass(frozen=True)
class Rule:
    """An opened rule, as its equation says.

    Attributes:
      name: of the user's function.
      primitive: the operation that was opened.
      results: how many results the rule has; those after them are residuals, tagged values, and values that are dear
        to compute, such as the results of matmuls.
      shape: how many operands and results the equation has. JAX may leave some out; what is left is no opened rule.
      residuals: for each leaf of what the forward rule keeps where it is: ("in", an operand's place) or ("out", a
        result's place).
      tags: (result's place, the tag that the rule gives it).
      hidden: tags inside of the function that its rule does not give: nothing can be kept by them.
    """

    name: str
    primitive: str
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
        if _compat.primitive_name(eqn) != FORWARD:
            return None
        title = _compat.jaxpr_title(eqn.params["call_jaxpr"])
        rule = _rule_of(title.removeprefix(TITLE)) if title.startswith(TITLE) else None
        return rule if rule is not None and rule.shape == (len(eqn.invars), len(eqn.outvars)) else None


@functools.cache
def _rule_of(encoded: str) -> Rule:
    name, primitive, results, shape, residuals, tags, hidden = json.loads(base64.urlsafe_b64decode(encoded))
    places = tuple(map(tuple, residuals)), tuple(map(tuple, tags))
    return Rule(name, primitive, results, tuple(shape), *places, tuple(hidden))


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
        facts = primitives.of(_compat.primitive_name(eqn))
        if (may_open := _may_open(eqn)) is not None:
            new = may_open(eqn) or eqn
        elif facts.entered and (facts.holds is not Holds.MAPPED or _has_any(eqn)):
            new = surgery.with_programs_mapped(eqn, self.jaxpr)
        else:
            return eqn
        if new is not eqn:
            self.calls.add_opened(eqn, new)
        return new


def _has_any(eqn: Any) -> bool:
    """Whether a program of an equation has a rule that may be opened."""
    return any(_may_open(each) is not None for program in surgery.programs(eqn) for each in surgery.walk(program))


def _may_open(eqn: Any) -> Callable[[Any], Any] | None:
    """Returns what opens the rule of an equation, if that can be done; None where nothing would be gained. Of a
    `jax.custom_jvp` that is so where it runs nothing dear and tags nothing: most are activations. jaxckpt's own stay as
    they are.
    """
    primitive = _compat.primitive_name(eqn)
    if primitive == REVERSE:
        return _open_reverse
    if primitive != FORWARD or _compat.is_own_file(_compat.jaxpr_file(eqn.params["call_jaxpr"])):
        return None
    inside = surgery.walk(eqn.params["call_jaxpr"])
    return _open_forward if any(map(_is_worth_keeping, inside)) else None


def _is_worth_keeping(eqn: Any) -> bool:
    return _is_dear(eqn) or _compat.equation_name(eqn) is not None


def _is_dear(eqn: Any) -> bool:
    """Whether an equation is dear to compute; a call, or a function with a rule, if something in it is."""
    facts = primitives.of(_compat.primitive_name(eqn))
    if facts.holds.in_line:
        return any(map(_is_dear, itertools.chain(*(_compat.open_jaxpr(each).eqns for each in surgery.programs(eqn)))))
    return facts.dear


@dataclass(frozen=True, eq=False)
class _Forward:
    """What a rule runs forward, traced.

    Attributes:
      program: closed jaxpr of (operands but the constants) -> (results, residuals that are new, tagged values that are
        new, other values that are dear to compute).
      results: how many results the user's function has.
      kept: for each leaf of the residuals: ("in", operand's place) or ("out", place among the program's results).
      tags: as of `Rule`.
      named: how many of the program's results come before the values that are dear to compute.
    """

    program: Any
    results: int
    kept: tuple[tuple[str, int], ...]
    tags: tuple[tuple[int, str], ...]
    named: int


class _Results:
    """The results of a rule's program, each once; `atoms`: those so far."""

    def __init__(self, program: Any, results: Sequence[Any]) -> None:
        self.inputs, self.atoms = frozenset(program.invars), list(results)
        own = [(var, place) for place, var in enumerate(results) if isinstance(var, _compat.Var)]
        self._places = {var: place for var, place in own if var not in self.inputs}

    def place_of(self, atom: Any) -> int:
        """Returns the place of a value among the results, where it is put if it is none yet."""
        known = None if isinstance(atom, _compat.Literal) else self._places.get(atom)
        if known is None:
            known = len(self.atoms)
            self.atoms.append(atom)
            if not isinstance(atom, _compat.Literal):
                self._places[atom] = known
        return known

    def add_tagged(self, eqns: Sequence[Any]) -> tuple[tuple[int, str], ...]:
        """Makes results of tagged values. Returns (place, tag) of each."""
        tags = []
        for each in eqns:
            tag = _compat.equation_name(each)
            if tag is None or isinstance(each.invars[0], _compat.Literal) or each.invars[0] in self.inputs:
                continue
            tags.append((self.place_of(each.outvars[0]), tag))
        return tuple(tags)

    def add_dear(self, eqns: Sequence[Any]) -> None:
        """Makes results of what is dear to compute."""
        for each in eqns:
            if _is_dear(each):
                for var in each.outvars:
                    if not isinstance(var, _compat.DropVar):
                        self.place_of(var)


Derivative = Callable[[Callable[..., list[Any]], Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
"""(the function in the rule's place, primals, tangents with symbolic zeros) -> (its results, their tangents)"""


def _in_place(eqn: Any, name: str, consts: int, forward: _Forward, derivative: Derivative) -> Any:
    """Returns the equation that stands in a rule's place; None where that would hold arrays of its own.

    Args:
      eqn: the rule's equation.
      name: of the user's function.
      consts: how many of the first operands it closes over.
      forward: what it runs forward.
      derivative: of the function in its place.
    """
    tags = filter(None, map(_compat.equation_name, surgery.walk(eqn.params["call_jaxpr"])))
    hidden = tuple(sorted(set(tags) - {tag for _, tag in forward.tags}))
    program = _compat.open_jaxpr(finished_program(forward.program))
    shape = len(eqn.invars), len(program.outvars)
    kernel = any(_compat.primitive_name(each) in KERNELS for each in surgery.walk(program))

    def run(*operands: Any) -> list[Any]:
        made = _compat.eval_jaxpr(program, _compat.jaxpr_consts(forward.program), *operands[consts:])
        # What is cut out of a kernel's result would be cut out where it is first used, in the backward pass. A TPU pads
        # the last axis to 128: the result, such as a logsumexp with an axis of one element, may be far larger.
        return [*jax.lax.optimization_barrier(made[: forward.named]), *made[forward.named :]] if kernel else made

    rule = Rule(name, _compat.primitive_name(eqn), forward.results, shape, forward.kept, forward.tags, hidden)
    run.__name__ = run.__qualname__ = rule.title
    made = jax.custom_jvp(run)
    made.defjvp(functools.partial(derivative, run), symbolic_zeros=True)
    traced = _compat.open_jaxpr(jax.make_jaxpr(made)(*(var.aval for var in eqn.invars)))
    call = traced.eqns[-1]
    if len(traced.eqns) != 1 or len(call.invars) != len(eqn.invars):
        return None  # the rule holds arrays of its own, which have no place in this program
    extra = [_compat.fresh_var(var.aval) for var in call.outvars[forward.results :]]
    return call.replace(invars=eqn.invars, outvars=[*eqn.outvars, *extra], source_info=eqn.source_info)


# -------------------------------------------------------------------------------------------------------- reverse mode


def _open_reverse(eqn: Any) -> Any:
    """Returns the equation that stands in the place of a `custom_vjp_call`; None where the rule stays closed.

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
    forward = _forward_rule(rule, traced, forwards, len(eqn.outvars))
    if forward is None:
        return None

    def derivative(
        run: Callable[..., list[Any]], primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
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

    return _in_place(eqn, rule.name, rule.num_consts, forward, derivative)


def _forward_rule(rule: _compat.CustomRule, traced: Any, forwards: Sequence[int | None], count: int) -> _Forward | None:
    """Returns a forward rule as `CustomRule.trace` gave it; None where it has effects, or arrays of its own. `count`:
    of the function's results.
    """
    closed = inline(traced)
    program = _compat.open_jaxpr(closed)
    if program.effects or program.constvars:
        return None
    made = len(program.outvars) - count
    results = _Results(program, program.outvars[made:])
    inputs = {var: place for place, var in enumerate(program.invars)}
    waiting = iter(program.outvars[:made])
    kept: list[tuple[str, int]] = []
    for forwarded in forwards:
        atom = next(waiting) if forwarded is None else None
        if forwarded is not None:
            kept.append(("in", forwarded))
        elif isinstance(atom, _compat.Var) and atom in inputs:
            kept.append(("in", rule.num_consts + inputs[atom]))
        else:
            kept.append(("out", results.place_of(atom)))
    tags = results.add_tagged(program.eqns)
    named = len(results.atoms)
    results.add_dear(program.eqns)
    rebuilt = _compat.rewritten(program, list(program.eqns), results.atoms)
    return _Forward(_compat.like(closed, rebuilt, ()), count, tuple(kept), tags, named)


# -------------------------------------------------------------------------------------------------------- forward mode


@dataclass(frozen=True, eq=False)
class _Tangents:
    """The rule of a `jax.custom_jvp`, traced for operands some of which have no tangents.

    Attributes:
      forward: what reads no tangent.
      both: the open jaxpr of (operands but the constants, tangents) -> (the forward program's results, tangents of the
        function's results).
      moving: for each of the function's results whether it has a tangent.
    """

    forward: _Forward
    both: Any
    moving: tuple[bool, ...]

    @property
    def text(self) -> str:
        """What the forward program computes, as text."""
        return str(_compat.open_jaxpr(self.forward.program))


def _open_forward(eqn: Any) -> Any:
    """Returns the equation that stands in the place of a `custom_jvp_call`; None where the rule stays closed.

    That is so where it has effects, or arrays of its own, and where nothing in it is tagged or dear to compute.

    With `symbolic_zeros=True` the rule may be another one for each choice of operands that have no tangents. What it
    runs forward is that for tangents of all operands; if it refuses these, for a tangent of one. Where other operands
    have tangents, their rule is the derivative; if that runs the same forward, its values are those that are kept.
    """
    eqn = finished(eqn)
    consts, symbolic = eqn.params["num_consts"], bool(eqn.params["symbolic_zeros"])
    smooth = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars[consts:]]
    zero = jax.custom_derivatives.SymbolicZero

    @functools.cache
    def traced(still: tuple[bool, ...]) -> _Tangents | None:
        return _tangents(eqn, still)

    patterns = [tuple(not flag for flag in smooth) if symbolic else (False,) * len(smooth)]
    if symbolic:
        patterns += [tuple(k != place for k in range(len(smooth))) for place, flag in enumerate(smooth) if flag]
    usual = next(filter(None, map(traced, patterns)), None)
    if usual is None:
        return None
    forward = usual.forward
    count = len(_compat.open_jaxpr(forward.program).outvars)

    def derivative(
        run: Callable[..., list[Any]], primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        operands, tangents = primals[consts:], tangents[consts:]
        still = tuple(symbolic and isinstance(tangent, zero) for tangent in tangents)
        given = [
            _compat.zeros_like_aval(tangent.aval) if isinstance(tangent, zero) else tangent
            for tangent, flag in zip(tangents, still)
            if not flag
        ]
        rule = traced(still)
        if rule is not None and (rule is usual or rule.text == usual.text):
            found = _compat.eval_jaxpr(rule.both, [], *operands, *given)
            out, moved = found[:count], iter(found[count:])
            slopes = [next(moved) if flag else None for flag in rule.moving]
        else:
            out = run(*primals)
            out[: forward.results], slopes = _by_rule(eqn, still, operands, given)
        slopes += [None] * (len(out) - len(slopes))
        return out, [zero(_compat.tangent_aval(x)) if each is None else each for x, each in zip(out, slopes)]

    name = _compat.jaxpr_title(eqn.params["call_jaxpr"])
    return _in_place(eqn, name, consts, forward, derivative)


def _by_rule(
    eqn: Any, still: Sequence[bool], operands: Sequence[Any], given: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns what the rule of a `custom_jvp_call` says: the results, and their tangents, None for those that are zero.

    Args:
      eqn: the equation.
      still: for each operand but the constants whether it has no tangent.
      operands: all but the constants.
      given: the tangents.
    """
    closed, _, none = _compat.tangent_program(eqn, still)
    consts = _compat.jaxpr_consts(closed)
    found = _compat.eval_jaxpr(_compat.open_jaxpr(closed), consts, *operands, *given)
    moved = iter(found[len(none) :])
    slopes = [None if flag else next(moved) for flag in none]
    flat = jax.dtypes.float0
    return found[: len(none)], [None if x is None or jax.typeof(x).dtype == flat else x for x in slopes]


def _tangents(eqn: Any, still: tuple[bool, ...]) -> _Tangents | None:
    """Returns the rule of a `custom_jvp_call`, traced; None where nothing of it can be kept.

    Args:
      eqn: the equation.
      still: for each operand but the constants whether it has no tangent.
    """
    try:
        traced, _, none = _compat.tangent_program(eqn, still)
    except Exception:  # the user's: JAX says what is wrong with the rule where it is differentiated
        return None
    closed = inline(traced)
    program, count = _compat.open_jaxpr(closed), len(none)
    operands, tangents = program.invars[: len(still)], program.invars[len(still) :]
    moving = surgery.depends(program.eqns, tangents)
    fixed = [each for each in program.eqns if moving.isdisjoint(each.outvars)]
    results = _Results(program, program.outvars[:count])
    tags = results.add_tagged(fixed)
    named = len(results.atoms)
    results.add_dear(fixed)
    atoms = results.atoms
    if program.effects or not moving.isdisjoint(filter(_is_var, atoms)) or not any(map(_is_worth_keeping, fixed)):
        return None
    made = iter(program.outvars[count:])
    slopes = [None if flag else next(made) for flag in none]
    slopes = [None if each is None or each.aval.dtype == jax.dtypes.float0 else each for each in slopes]
    wanted = [*atoms, *(each for each in slopes if each is not None)]
    if not set(program.constvars).isdisjoint(_read(program.eqns, wanted)):
        return None
    run = surgery.stretch(surgery.needed(fixed, operands, atoms), operands, atoms, program)
    forward = _Forward(_compat.like(closed, run, ()), count, (), tags, named)
    both = surgery.stretch(surgery.needed(program.eqns, program.invars, wanted), program.invars, wanted, program)
    return _Tangents(forward, both, tuple(each is not None for each in slopes))


def _is_var(atom: Any) -> bool:
    return isinstance(atom, _compat.Var)


def _read(eqns: Sequence[Any], results: Sequence[Any]) -> set[Any]:
    """Returns the variables that it takes to compute results, themselves included."""
    taken = lambda eqn: list(filter(_is_var, eqn.invars))
    wanted = set(filter(_is_var, results))
    return wanted.union(*map(taken, surgery.live(eqns, wanted, lambda eqn: eqn.outvars, taken)))


def tags_of(rule: Rule) -> Iterator[tuple[str, int, str]]:
    """Yields ("in" or "out", place, tag): residuals by the rule's name and their places, and what its forward rule
    tags.
    """
    for leaf, (kind, place) in enumerate(rule.residuals):
        yield kind, place, f"{rule.name}/{leaf}"
    for place, tag in rule.tags:
        yield "out", place, tag
