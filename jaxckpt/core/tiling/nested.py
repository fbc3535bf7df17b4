"""How an axis passes through the operations that hold programs: loops, branches, checkpoints, calls, custom rules.

Their programs are followed as the function itself is. What a loop carries has one place for the axis, which is found by
going through the body until nothing changes. The derivatives of custom rules are followed when they are asked for: the
rule is traced with all rows, as everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import TilingError
from jaxckpt.core import primitives
from jaxckpt.core.inline import inline
from jaxckpt.core.primitives import Holds
from jaxckpt.core.tiling.axes import rule
from jaxckpt.core.tiling.follow import Followed, error, joined
from jaxckpt.core.tiling.shares import (
    SUM,
    WHOLE,
    At,
    Axis,
    CoupledError,
    Kind,
    Passage,
    Share,
    is_differentiable,
    rows,
    zeros,
)

_TRIES = 50
"""Rounds until the places of the axis in a loop's carry do not change; each round changes one carry at least."""


# --------------------------------------------------------------------------------------------------- calls, checkpoints


@rule(*primitives.holding(Holds.CALL), mixed=True)
def _call(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    params = _compat.equation_params(eqn)
    body: Followed = axis.follow(params.get("call_jaxpr", params.get("jaxpr")), shares)
    return Passage(shares, body.outs, run=body)


@rule(*primitives.holding(Holds.CHECKPOINT), mixed=True)
def _checkpoint(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    params = _compat.equation_params(eqn)
    body: Followed = axis.follow(params["jaxpr"], shares)
    barriers = params["prevent_cse"] if isinstance(params["prevent_cse"], bool) else any(params["prevent_cse"])

    def run(at: At, operands: list[Any]) -> list[Any]:
        inside = lambda start, *values: body(replace(at, start=start), values)
        with _compat.working_checkpoints():
            made = jax.checkpoint(inside, policy=params["policy"], prevent_cse=barriers)
            return list(made(jnp.asarray(at.start), *operands))

    return Passage(shares, body.outs, run=run)


# --------------------------------------------------------------------------------------------------- branches and loops


@rule("cond", mixed=True)
def _cond(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    index, *operands = shares
    if index != WHOLE:
        raise CoupledError("chooses a branch by all rows")
    programs = eqn.params["branches"]
    found = [axis.follow(program, operands) for program in programs]
    outs = [joined(*each) for each in zip(*(body.outs for body in found))]
    bodies = [axis.follow(program, operands, outs) for program in programs]

    def run(at: At, values: list[Any]) -> list[Any]:
        branches = [lambda *args, body=body: body(at, args) for body in bodies]
        return lax.switch(values[0], branches, *values[1:])

    return Passage(shares, outs, run=run)


@rule("scan", mixed=True)
def _scan(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    params = _compat.equation_params(eqn)
    count, carries = _compat.num_scan_consts_carry(params)
    consts, carry, xs = shares[:count], shares[count : count + carries], shares[count + carries :]
    settings = {"reverse": params["reverse"], "unroll": params["unroll"]}
    if any(share.kind is Kind.ROWS and share.dim == 0 for share in xs):
        return _map(eqn, shares, carries, count, axis, settings)
    body, carry = _carried(params["jaxpr"], consts, carry, [_shifted(share, -1) for share in xs], carries, axis)
    outs = [*carry, *(_shifted(share, 1) for share in body.outs[carries:])]

    def run(at: At, values: list[Any]) -> list[Any]:
        fixed = values[:count]

        def step(state: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = _same_types(body(at, [*fixed, *state, *row]), state)
            return results[:carries], results[carries:]

        init, given = values[count : count + carries], values[count + carries :]
        last, ys = lax.scan(step, init, given, length=params["length"], **settings)
        return [*last, *ys]

    return Passage([*consts, *carry, *xs], outs, run=run)


def _shifted(share: Share, by: int) -> Share:
    return rows(share.dim + by, share.block) if share.kind is Kind.ROWS else share


def _same_types(results: list[Any], carry: Sequence[Any]) -> list[Any]:
    """Returns results of which the first have the types of a carry: weak types differ where a value was sliced."""
    return [
        lax.convert_element_type(value, old.dtype)
        if not jnp.issubdtype(old.dtype, jax.dtypes.extended) and jax.typeof(value) != jax.typeof(old)
        else value
        for value, old in zip(results, carry)
    ] + list(results[len(carry) :])


def _carried(
    program: Any, consts: Sequence[Share], carry: Sequence[Share], xs: Sequence[Share], carries: int, axis: Axis
) -> tuple[Followed, list[Share]]:
    """Returns the body of a loop, and what a tile has of what it carries."""
    carry = list(carry)
    for _ in range(_TRIES):
        body: Followed = axis.follow(program, [*consts, *carry, *xs])
        new = [joined(a, b) for a, b in zip(carry, body.outs)]
        if new == carry:
            return axis.follow(program, [*consts, *carry, *xs], [*carry, *[None] * (len(body.outs) - carries)]), carry
        carry = new
    raise CoupledError("carries the axis in more places than can be followed")


def _map(eqn: Any, shares: list[Share], carries: int, consts: int, axis: Axis, settings: dict[str, Any]) -> Passage:
    """Returns the passage through a scan over the axis itself, which is a map over rows if nothing is carried."""
    if carries or any(share != WHOLE for share in shares[:consts]):
        raise CoupledError("goes along the axis, and carries something from row to row")
    xs = shares[consts:]
    if any(share not in (WHOLE, rows(0)) for share in xs) or axis.size != eqn.params["length"]:
        raise CoupledError("goes along the axis, and takes it in other places, too")
    body: Followed = axis.follow(eqn.params["jaxpr"], [WHOLE] * len(shares), by_row=True)

    def run(at: At, values: list[Any]) -> list[Any]:
        def step(state: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            return state, body(at, [*values[:consts], *row])

        return lax.scan(step, [], values[consts:], length=at.size, **settings)[1]

    return Passage([*shares[:consts], *[rows(0)] * len(xs)], [rows(0)] * len(eqn.outvars), run=run)


@rule("while", mixed=True)
def _while(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    params = eqn.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, carry = shares[:first], shares[first : first + second], shares[first + second :]
    body, carry = _carried(params["body_jaxpr"], of_body, carry, [], len(carry), axis)
    test: Followed = axis.follow(params["cond_jaxpr"], [*of_test, *carry])
    if test.outs[0] != WHOLE:
        raise CoupledError("runs as long as all rows say")

    def run(at: At, values: list[Any]) -> list[Any]:
        tested, fixed = values[:first], values[first : first + second]
        step = lambda state: _same_types(body(at, [*fixed, *state]), state)
        return lax.while_loop(lambda state: test(at, [*tested, *state])[0], step, values[first + second :])

    return Passage([*of_test, *of_body, *carry], carry, run=run)


@rule("custom_linear_solve")
def _linear_solve(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    """Solves of each row's own equations, and of equations that all rows share."""
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    places, start = {}, 0
    for name, length in lengths._asdict().items():
        places[name] = range(start, start + length)
        start += length
    right = shares[start:]
    if len(eqn.outvars) != len(right):
        raise CoupledError("returns more than the solution")
    consts = {name: [shares[place] for place in there] for name, there in places.items()}
    right = list(axis.follow(programs.solve, [*consts["solve"], *right]).outs)
    names = ["matvec", "solve", *(["transpose_solve"] if programs.transpose_solve is not None else [])]
    bodies = {name: axis.follow(getattr(programs, name), [*consts[name], *right], right) for name in names}

    def run(at: At, operands: list[Any]) -> list[Any]:
        given = lambda name: [operands[place] for place in places[name]]
        solve = {name: lambda values, name=name: bodies[name](at, [*given(name), *values]) for name in names}
        transposed = None
        if "transpose_solve" in solve:
            transposed = lambda _, values: solve["transpose_solve"](values)
        found = lax.custom_linear_solve(
            solve["matvec"], operands[start:], lambda _, values: solve["solve"](values), transposed
        )
        return list(found)

    return Passage([*shares[:start], *right], right, run=run)


@rule("shard_map", mixed=True)
def _mapped(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    raise CoupledError("maps over devices, and tile cannot divide that from outside; use jaxckpt.tile in what it maps")


# --------------------------------------------------------------------------------------------------------- custom rules


@rule("custom_jvp_call", mixed=True)
def _custom_jvp(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    body: Followed = axis.follow(eqn.params["call_jaxpr"], shares)
    zero = jax.custom_derivatives.SymbolicZero

    def run(at: At, operands: list[Any]) -> list[Any]:
        tiled = jax.custom_jvp(lambda start, *values: body(replace(at, start=start), values))

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            start, *values = primals
            consts = eqn.params["num_consts"]
            moving = [tangent for tangent in tangents[1 + consts :] if not isinstance(tangent, zero)]
            without = [isinstance(tangent, zero) for tangent in tangents[1 + consts :]]
            program, _, still = _compat.tangent_program(eqn, without)
            own = shares[consts:]
            given = [*own, *(share for share, flag in zip(own, without) if not flag)]
            wants = [*body.outs, *(out for out, flag in zip(body.outs, still) if not flag)]
            both = _asked(eqn, lambda: axis.follow(program, given, wants))
            results = both(replace(at, start=start), [*values[consts:], *moving])
            out, found = results[: len(still)], iter(results[len(still) :])
            avals = [_compat.tangent_aval(result) for result in out]
            nothing = zero if eqn.params["symbolic_zeros"] else _zero_tangent
            return out, [nothing(aval) if flag else next(found) for aval, flag in zip(avals, still)]

        # Without symbolic zeros, the rule was traced for tangents that are all arrays.
        tiled.defjvp(derivative, symbolic_zeros=eqn.params["symbolic_zeros"])
        return tiled(jnp.asarray(at.start), *operands)

    return Passage(shares, body.outs, run=run)


def _asked(eqn: Any, find: Callable[[], Followed]) -> Followed:
    """Returns a derivative of the user's, followed; raises TilingError where it couples."""
    try:
        return find()
    except CoupledError as why:
        raise error(eqn, CoupledError(f"has a derivative that {why}")) from None
    except TilingError as inside:
        if inside.line:
            raise
        named = CoupledError(f"has a derivative in which {inside.operation} {inside.reason}")
        raise error(eqn, named, inside.hint) from None


@rule("custom_vjp_call")
def _custom_vjp(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    body: Followed = axis.follow(eqn.params["call_jaxpr"], shares)
    custom = _compat.custom_rule(eqn)
    consts = custom.num_consts
    if custom.symbolic_zeros:
        raise CoupledError("has a derivative that asks what is differentiated, which tile cannot follow")
    flags = [is_differentiable(atom.aval.dtype) for atom in eqn.invars[consts:]]

    @functools.cache
    def rules() -> tuple[list[int | None], Followed, Followed]:
        # Followed when they are asked for: a forward rule may call the function itself.
        traced, forwards = custom.trace(flags)
        new = sum(place is None for place in forwards)
        forward = _asked(eqn, lambda: axis.follow(traced, shares[consts:], [*[None] * new, *body.outs]))
        fresh = iter(zip(forward.outs, _compat.open_jaxpr(traced).outvars))
        kept = [next(fresh) if place is None else (shares[place], eqn.invars[place]) for place in forwards]
        return forwards, forward, _backward(eqn, shares[consts:], body.outs, kept, axis)

    def run(at: At, operands: list[Any]) -> list[Any]:
        tiled = jax.custom_vjp(lambda start, *values: body(replace(at, start=start), values))

        def forth(start: Any, *given: Any) -> tuple[list[Any], list[Any]]:
            if any(each.perturbed for each in given[:consts]):
                raise _compat.closed_over_error()
            start, values = start.value, [each.value for each in given]
            forwards, forward, _ = rules()
            results = forward(replace(at, start=start), values[consts:])
            new = iter(results)
            residuals = [next(new) if place is None else values[place] for place in forwards]
            return results[len(results) - len(body.outs) :], [start, *residuals]

        def back(kept: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            start, *residuals = kept
            moving = [
                zeros(each.aval) if isinstance(each, jax.custom_derivatives.SymbolicZero) else each
                for each, var in zip(cotangents, eqn.outvars)
                if is_differentiable(var.aval.dtype)
            ]
            found = iter(rules()[2](replace(at, start=start), [*residuals, *moving]))
            return (None, *[None] * consts, *(next(found) if flag else None for flag in flags))

        tiled.defvjp(forth, back, symbolic_zeros=True)  # for what has a derivative; the rules do not ask
        return tiled(jnp.asarray(at.start), *operands)

    return Passage(shares, body.outs, run=run)


def _backward(
    eqn: Any, operands: Sequence[Share], outs: Sequence[Share], kept: Sequence[tuple[Share, Any]], axis: Axis
) -> Followed:
    """Returns the backward rule of a custom_vjp_call, followed: residuals and cotangents to the cotangents of the
    operands that have a derivative. What a tile has of the cotangent of a whole value is a term of it, and of that of a
    sum all of it.
    """
    turned = {Kind.SUM: WHOLE, Kind.WHOLE: SUM}
    results = [(out, var.aval) for out, var in zip(outs, eqn.outvars) if is_differentiable(var.aval.dtype)]
    if any(out == WHOLE for out, _ in results):
        raise error(eqn, CoupledError("has a result that is the same for all rows, and a derivative of its own"))
    inputs = eqn.invars[len(eqn.invars) - len(operands) :]

    def pulled(residuals: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
        given = iter(moving)
        cotangents = [
            next(given) if is_differentiable(var.aval.dtype) else np.zeros(var.aval.shape, jax.dtypes.float0)
            for var in eqn.outvars
        ]
        found = _compat.pull_back(eqn, residuals, cotangents)[-len(operands) :]
        pairs = [(each, atom.aval) for each, atom in zip(found, inputs) if is_differentiable(atom.aval.dtype)]
        return [jnp.zeros(aval.shape, aval.dtype) if each is None else each for each, aval in pairs]

    closed = inline(jax.make_jaxpr(pulled)([atom.aval for _, atom in kept], [aval for _, aval in results]))
    wants = [turned.get(s.kind, s) for s, atom in zip(operands, inputs) if is_differentiable(atom.aval.dtype)]
    given = [*(share for share, _ in kept), *(turned.get(out.kind, out) for out, _ in results)]
    return _asked(eqn, lambda: axis.follow(closed, given, wants))


def _zero_tangent(aval: Any) -> Any:
    none = aval.dtype == jax.dtypes.float0
    return np.zeros(aval.shape, jax.dtypes.float0) if none else jnp.zeros(aval.shape, aval.dtype)
