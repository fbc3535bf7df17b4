"""Scans whose results are allocated when their loop starts.

JAX lowers a scan to a while loop that writes its ys, and with them what its derivative needs, into empty arrays. These
are made of nothing: arrays of zeros, which wait for no other operation. XLA for the CPU and for GPUs makes those of all
loops of a program first. Then a checkpoint around a part with a loop in it saves next to nothing, because the arrays
that the recomputed loop fills are there from the beginning.

A scan that is marked is lowered to a loop over zeros that wait for the scan's operands. The mark is metadata of XLA in
the context of the equation: JAX hands it on to what it makes of the scan (derivative, transpose, batched scan). The
lowering rule of scans is replaced when the first scan is marked. It calls JAX's rule for scans without the mark.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import mlir as _mlir
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core.primitives import scan_p

from jaxckpt._compat.jaxprs import eval_jaxpr, jaxpr_consts, num_scan_consts_carry, open_jaxpr
from jaxckpt._compat.lowering import lower_fun, register_lowering

_MARK = "jaxckpt_waits"


def waits(eqn: Any) -> bool:
    """Whether a scan's equation is marked."""
    return _is_marked(eqn.ctx)


def waiting(eqn: Any) -> Any:
    """Returns a scan's equation, marked: its results are allocated once its operands are there."""
    _install()
    with eqn.ctx.manager, set_xla_metadata(**{_MARK: True}):
        return eqn.replace(ctx=type(eqn.ctx)())


def _is_marked(context: Any) -> bool:
    return context is not None and _MARK in (context.xla_metadata or ())


@functools.cache
def _install() -> None:
    plain = _mlir._lowerings[scan_p].rule
    marked = lower_fun(_filling, multiple_results=True)

    def lower(context: Any, *operands: Any, **params: Any) -> Any:
        platforms = set(context.platforms or context.module_context.platforms)
        # XLA for TPUs makes the arrays of a loop when the loop starts.
        early = platforms != {"tpu"} and _is_loop(params["length"], params["unroll"])
        rule = marked if early and _is_marked(context.jaxpr_eqn_ctx) else plain
        return rule(context, *operands, **params)

    register_lowering(scan_p, lower)


def _is_loop(length: Any, unroll: int) -> bool:
    """Whether a scan becomes a loop of a known length: not if it is written out as a whole."""
    return isinstance(length, int) and length > 0 and 0 < unroll < max(length, 2)


def _filling(*operands: Any, **params: Any) -> list[Any]:
    """Runs a scan, of its parameters, as one that fills arrays in its carry."""
    consts, carries = num_scan_consts_carry(params)
    jaxpr, consts_of = open_jaxpr(params["jaxpr"]), jaxpr_consts(params["jaxpr"])
    init, xs = list(operands[consts : consts + carries]), list(operands[consts + carries :])
    length, unroll = params["length"], params["unroll"]
    rows = [var.aval for var in jaxpr.outvars[carries:]]
    filled = [place for place, row in enumerate(rows) if _is_plain(row)]
    others = [place for place in range(len(rows)) if place not in filled]

    def step(state: Any, x: Any) -> Any:
        i, carry, stacks = state
        out = eval_jaxpr(jaxpr, consts_of, *operands[:consts], *carry, *x)
        ys = out[carries:]
        row = length - 1 - i if params["reverse"] else i
        write = functools.partial(lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False)
        stacks = [write(stack, ys[place], index=row) for stack, place in zip(stacks, filled)]
        return (i + 1, out[:carries], stacks), [ys[place] for place in others]

    with set_xla_metadata(**{_MARK: None}):
        state = (jnp.int32(0), init, _empty([rows[place] for place in filled], length, operands))
        (_, carry, stacks), ys = lax.scan(step, state, xs, length, params["reverse"], unroll)
    made = dict(zip([*filled, *others], [*stacks, *ys]))
    return [*carry, *(made[place] for place in range(len(rows)))]


def _is_plain(row: Any) -> bool:
    """Whether an array is one of numbers in the device's memory."""
    return not jax.dtypes.issubdtype(row.dtype, jax.dtypes.extended) and row.memory_space == jax.memory.Space.Device


def _empty(rows: Sequence[Any], length: int, operands: Sequence[Any]) -> list[Any]:
    """Returns arrays for so many rows of each kind, of a zero that comes out of a barrier with the operands.

    It is that of the loop's counter, which is in the program anyway: a zero of each type would be another constant, for
    whose few bytes a budget at the very peak of a checkpoint by hand has no room.
    """
    if not rows:
        return []
    zero, _ = lax.optimization_barrier((jnp.int32(0), list(operands)))
    return [_stack(lax.convert_element_type(zero, row.dtype), length, row) for row in rows]


def _stack(zero: Any, length: int, row: Any) -> Any:
    """Returns a zero as an array of rows, divided over a mesh as they are."""
    axes = frozenset(row.manual_axis_type.varying) - frozenset(jax.typeof(zero).manual_axis_type.varying)
    if axes:
        zero = lax.pcast(zero, tuple(axes), to="varying")
    spec = row.sharding.spec
    sharding = jax.NamedSharding(row.sharding.mesh, jax.P(None, *spec)) if any(spec) else None
    return lax.broadcast(zero, (length, *row.shape), out_sharding=sharding)
