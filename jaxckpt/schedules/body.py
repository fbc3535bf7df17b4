"""The body of a scan as a program: taken out of a call or of an operation, and what in it depends on what is
differentiated.

`lax.scan` itself traces the function, so its rules and its error messages hold. The body is then a jaxpr, (constants,
carry, x) -> (carry, y), with calls written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.core import reads, surgery
from jaxckpt.core.forward import forward_pass
from jaxckpt.core.inline import inline
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.scans import ScanBody, Values


@dataclass(frozen=True, eq=False)
class TracedScan:
    """A call of lax.scan: its body, its operands, and what makes the caller's result of the carries and ys that come
    out.
    """

    body: ScanBody
    consts: Values
    init: Values
    xs: Values
    finish: Callable[[Values, Values], Any]


def take_apart(
    f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool, unroll: int | bool
) -> TracedScan | None:
    """Traces `lax.scan` and takes the scan out of what it traced; None where there is none (length 0, jax.disable_jit).

    Raises:
      TypeError, ValueError: lax.scan's own, where its arguments do not fit together.
      ArgumentError: the number of rows is symbolic.
    """
    _compat.check_primitives()
    run = lambda init, xs: lax.scan(f, init, xs, length, reverse, unroll)
    with reads.in_loop():
        traced, shape = jax.make_jaxpr(run, return_shape=True)(init, xs)
    outer = _compat.open_jaxpr(traced)
    where = [i for i, eqn in enumerate(outer.eqns) if _compat.primitive_name(eqn) == "scan"]
    if not where or outer.eqns[where[-1]].params["length"] == 0 or _compat.jit_is_disabled():
        return None
    scan = outer.eqns[where[-1]]
    if not isinstance(scan.params["length"], int):
        rule = "arrays with a number of rows that is known when they are traced"
        raise ArgumentError("xs", rule, scan.params["length"], "lax.scan takes a symbolic number.")
    consts, carries = _compat.num_scan_consts_carry(scan.params)
    body, extra = written_out(scan.params["jaxpr"], consts, carries, scan.params["length"], scan.params["reverse"])

    inputs = surgery.inputs_of(outer)
    values = [*_compat.jaxpr_consts(traced), *jax.tree.leaves((init, xs))]
    before = surgery.function(outer.eqns[: where[-1]], inputs, scan.invars, outer.debug_info)(*values)

    def finish(carry: Values, ys: Values) -> Any:
        after = surgery.function(outer.eqns, [*inputs, *scan.outvars], outer.outvars, outer.debug_info)
        return jax.tree.unflatten(jax.tree.structure(shape), after(*values, *carry, *ys))

    fixed = [*extra, *before[:consts]]
    return TracedScan(body, fixed, before[consts : consts + carries], before[consts + carries :], finish)


def written_out(closed: Any, consts: int, carries: int, length: int, reverse: bool) -> tuple[ScanBody, Values]:
    """Returns a scan's body with calls written out, and the values of the constants that it has before the others then.

    Args:
      closed: the body as JAX has it, closed.
      consts, carries, length, reverse: of the scan.
    """
    inner = inline(closed)
    opened = _compat.open_jaxpr(inner)
    jaxpr = surgery.constants_as_inputs(opened)
    extra = list(_compat.jaxpr_consts(inner))
    return ScanBody(jaxpr, consts + len(extra), carries, len(opened.invars) - consts - carries, length, reverse), extra


def in_forward_pass(body: ScanBody) -> ScanBody:
    """Returns a body that runs the forward rules of functions with a `jax.custom_vjp`, as where JAX differentiates it:
    forward mode over its reverse mode goes through these.
    """
    closed = _compat.close_jaxpr(body.jaxpr, [])
    return replace(body, jaxpr=_compat.open_jaxpr(forward_pass(closed)))


# ------------------------------------------------------------------------------------------------------ parts of jaxprs


def zeros(aval: Any, rows: int | None = None) -> Any:
    """Returns zeros of an abstract value, its sharding and manual axes too, or so many rows of it; for random keys,
    keys of zero words.
    """
    wide = aval if rows is None else _compat.unmapped_aval(rows, 0, aval)
    return (
        _compat.blank_keys(wide) if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else _compat.zeros_like_aval(wide)
    )


def pick(values: Iterable[Any], flags: Iterable[bool]) -> Values:
    """Returns the values whose flag is true."""
    return [value for value, flag in zip(values, flags) if flag]


def split(values: Sequence[Any], counts: Sequence[int]) -> list[Values]:
    """Returns the values in parts of so many each."""
    parts, at = [], 0
    for count in counts:
        parts.append(list(values[at : at + count]))
        at += count
    return parts


def perturbed(
    body: ScanBody, consts: Sequence[bool], carry: Sequence[bool], xs: Sequence[bool]
) -> tuple[list[bool], list[bool]]:
    """Returns which carries and which ys have tangents, over all iterations together: those that lax.scan gives
    tangents to.

    Args:
      consts, carry, xs: whether each is differentiated, the carry's at the first iteration.
    """
    carry = list(carry)
    while True:
        out = _moved(body.jaxpr, [*consts, *carry, *xs])
        new = [a or b for a, b in zip(carry, out)]
        if new == carry:
            return carry, out[body.carries :]
        carry = new


def reached(body: ScanBody, carry: Sequence[bool], ys: Sequence[bool]) -> tuple[list[bool], list[bool], list[bool]]:
    """Returns which constants, carries and xs have cotangents, over all iterations together; the others have none from
    lax.scan. Zeros in their place would be multiplied with what may be infinite.

    Args:
      carry, ys: whether each has a cotangent, the carry's after the last iteration.
    """
    carry = list(carry)
    while True:
        results = [var for var, flag in zip(body.jaxpr.outvars, [*carry, *ys], strict=True) if flag]
        sources = surgery.sources(body.jaxpr.eqns, results)
        inputs = [var in sources for var in body.jaxpr.invars]
        consts, new, xs = split(inputs, (body.consts, body.carries, body.xs))
        new = [a or b for a, b in zip(carry, new)]
        if new == carry:
            return consts, carry, xs
        carry = new


def _moved(jaxpr: Any, flags: Sequence[bool]) -> list[bool]:
    """Returns which results of a jaxpr have tangents, as JAX's own rules say, where the inputs with a flag have
    some.
    """
    found: list[bool] = []

    @jax.custom_jvp
    def look(out: Values) -> Values:
        return out

    def tangents(primals: tuple[Values], tangents: tuple[Values]) -> tuple[Values, Values]:
        zero = jax.custom_derivatives.SymbolicZero
        moving = zip(tangents[0], primals[0])
        found[:] = [not isinstance(tangent, zero) and is_inexact(jax.typeof(value)) for tangent, value in moving]
        return primals[0], tangents[0]

    look.defjvp(tangents, symbolic_zeros=True)

    def run(*operands: Any) -> Any:
        def moved(moving: Values) -> Values:
            rest = iter(moving)
            values = [next(rest) if flag else operand for flag, operand in zip(flags, operands)]
            return look(_compat.eval_jaxpr(jaxpr, [], *values))

        moving = pick(operands, flags)
        return jax.jvp(moved, (moving,), ([zeros(_compat.tangent_aval(x)) for x in moving],))

    if any(flags):
        jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars))
    return found or [False] * len(jaxpr.outvars)
