"""A `lax.scan` run as a plan's `Loop` says: in runs of iterations, in nested segments, iterations checkpointed and keeping what they are told.

The scan's equation becomes the equations of that program, in the same place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core.graph import Op
from jaxckpt.core.reads import Flat
from jaxckpt.core.regions import Loop, Run

Body = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]
BodyFor = Callable[[Mapping[int, Action]], tuple[Flat, Any]]
"""Actions -> the body as a function that names what is kept, and the policy that keeps them."""


def can_be_rewritten(op: Op) -> bool:
    """Whether an operation is a scan that a plan can say something about: one with iterations, and no constants inside."""
    return op.primitive == "scan" and op.params["length"] > 0 and not _compat.jaxpr_consts(op.params["jaxpr"])


def rewrite(eqn: Any, op: Op, loop: Loop, body_for: BodyFor) -> list[Any]:
    """Returns equations that take the place of a scan's.

    Raises:
      PlanMismatchError: the operation is no such scan, or the runs do not add up to its length.
    """
    if not can_be_rewritten(op) or sum(run.count for run in loop.runs) != op.params["length"]:
        raise PlanMismatchError(
            f"The plan runs operation {loop.op} as a scan of {sum(run.count for run in loop.runs)} iterations; it is {op.primitive}"
            f"{' of ' + str(op.params['length']) if 'length' in op.params else ''}. Plan anew."
        )
    params = _compat.equation_params(eqn)
    consts, carries = _compat.num_scan_consts_carry(params)
    reverse, length = params["reverse"], params["length"]

    def scan(*operands: Any) -> list[Any]:
        fixed, state, xs = (
            operands[:consts],
            list(operands[consts : consts + carries]),
            list(operands[consts + carries :]),
        )
        stacked: list[list[Any]] = []
        done = 0
        for run in loop.runs:
            start, stop = (length - done - run.count, length - done) if reverse else (done, done + run.count)
            rows = xs if run.count == length else [lax.slice_in_dim(x, start, stop) for x in xs]
            iteration, policy = body_for(run.actions)
            body = _iteration(iteration, fixed, carries, policy, run.checkpoint)
            state, ys = _run(run, body, state, rows, reverse)
            stacked.append(ys)
            done += run.count
        if len(stacked) == 1:
            return [*state, *stacked[0]]
        order = stacked[::-1] if reverse else stacked
        return [*state, *(jnp.concatenate(parts) for parts in zip(*order))]

    closed = jax.make_jaxpr(scan)(*(var.aval for var in eqn.invars))
    return _splice(closed, eqn)


def _iteration(fun: Flat, fixed: Sequence[Any], carries: int, policy: Any, checkpoint: bool) -> Callable[[bool], Body]:
    def body(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = fun(*fixed, *state, *x)
        return out[:carries], out[carries:]

    return lambda alone: jax.checkpoint(body, policy=policy, prevent_cse=alone) if checkpoint else body


def _run(
    run: Run, body: Callable[[bool], Body], state: list[Any], xs: list[Any], reverse: bool
) -> tuple[list[Any], list[Any]]:
    """Runs `run.count` iterations; `body(alone)` is one, `alone` where no loop keeps the compiler from undoing its checkpoint."""
    if not run.segments:
        return lax.scan(body(run.count == 1), state, xs, length=run.count, reverse=reverse)  # type: ignore[no-any-return]
    size = min(run.segments[0], run.count)
    count, rest = divmod(run.count, size)
    main = count * size

    def segment(length: int, state: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        return _run(Run(length, run.segments[1:], run.actions), body, state, rows, reverse)

    first = xs if not rest else [x[rest:] if reverse else x[:main] for x in xs]
    rows = [x.reshape(count, size, *x.shape[1:]) for x in first]
    whole = jax.checkpoint(functools.partial(segment, size), prevent_cse=count == 1)
    state, ys = lax.scan(whole, state, rows, length=count, reverse=reverse)
    ys = [y.reshape(main, *y.shape[2:]) for y in ys]
    if rest:
        last = jax.checkpoint(functools.partial(segment, rest))
        state, tail = last(state, [x[:rest] if reverse else x[main:] for x in xs])
        ys = [jnp.concatenate([b, a] if reverse else [a, b]) for a, b in zip(ys, tail)]
    return state, ys


def _splice(closed: Any, eqn: Any) -> list[Any]:
    """Returns a jaxpr's equations with an equation's operands for its inputs and results for its outputs."""
    jaxpr = _compat.open_jaxpr(closed)
    assert not jaxpr.constvars, "a scan's operands are all that its body uses"
    operands = dict(zip(jaxpr.invars, eqn.invars))
    results = {}
    for inner, outer in zip(jaxpr.outvars, eqn.outvars):
        assert inner not in results and inner not in operands, "every result of a scan is computed, and once"
        results[inner] = outer
    return [
        each.replace(
            invars=[var if isinstance(var, _compat.Literal) else operands.get(var, var) for var in each.invars],
            outvars=[results.get(var, var) for var in each.outvars],
        )
        for each in jaxpr.eqns
    ]
