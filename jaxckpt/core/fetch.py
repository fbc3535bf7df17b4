"""Values come back from the host when the backward pass of their region begins, and not before.

JAX puts a barrier between what a region keeps and its backward pass, and the cotangents go through it too: nothing runs
again before they are there. XLA for TPUs takes barriers out before it puts the operations in order. Then it fetches
what is on the host as soon as it is there, and the device holds all of it (jax 0.10.2 to 0.12.0.1). So for a TPU a
fetch depends on numbers: the value is fetched in slices, and the index at which they begin is a zero that is computed
from the cotangents. In a loop the number of the iteration is such an index.

For all other targets, and for everything that reads a program, both operations are the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

# ------------------------------------------------------------------------------------------------------------ the start

_start = _compat.Primitive("jaxckpt_start_of_backward")
_start.multiple_results = True


def start_of_backward(kept: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns (an int32, arrays as they are). The int32 is zero. For a TPU it is computed from what goes through the
    same barrier as the arrays, without these.

    Args:
      kept: arrays of the host's memory. What nothing reads is left out.
    """
    zero, *kept = _start.bind(*kept)
    return zero, list(kept)


def _as_they_are(*kept: Any) -> list[Any]:
    return [jnp.int32(0), *kept]


def _computed(kept: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    if not beside:
        return _as_they_are(*kept)
    bits = jnp.uint32(0)
    for x in beside:
        first = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()).astype(jnp.float32)
        bits ^= lax.bitcast_convert_type(first, jnp.uint32)
    # Zero for all numbers. XLA does not see that it is.
    return [(bits % jnp.uint32(7) // jnp.uint32(8)).astype(jnp.int32), *kept]


def _start_for_tpu(context: Any, *kept: Any) -> Any:
    beside = _compat.values_at_barrier(context, kept)
    return _compat.lower_with(context, lambda *xs: _computed(xs[: len(kept)], xs[len(kept) :]), kept, beside)


def _start_tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    zero, *kept = _start.bind(*primals)
    return [zero, *kept], [_compat.Zero(_compat.tangent_aval(zero)), *tangents]


def _start_of_used(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(eqn.invars), None
    kept = list(used[1:])
    invars = [var for var, flag in zip(eqn.invars, kept) if flag]
    outvars = [eqn.outvars[0], *(var for var, flag in zip(eqn.outvars[1:], kept) if flag)]
    return kept, eqn.replace(invars=invars, outvars=outvars)


_start.def_impl(_as_they_are)
_start.def_abstract_eval(lambda *avals: [_compat.shaped_array((), jnp.dtype(jnp.int32)), *avals])
_compat.register_lowering(_start, _compat.lower_fun(_as_they_are, multiple_results=True))
_compat.register_lowering(_start, _start_for_tpu, platform="tpu", cacheable=False)
_compat.batching_rules[_start] = lambda kept, dims: (_start.bind(*kept), [None, *dims])
_compat.jvp_rules[_start] = _start_tangent
_compat.drop_unused(_start, _start_of_used)

# ------------------------------------------------------------------------------------------------------------ the fetch

_hold = _compat.Primitive("jaxckpt_hold_on_host")


def fetch(x: Any, start: Any = None) -> Any:
    """Returns an array of the host's memory on the device.

    Args:
      x: the array.
      start: of `start_of_backward`; for a TPU the array is fetched when that is there. None in loops.
    """
    # Without the source a copy has no second derivative.
    return jax.device_put(x if start is None else _hold.bind(x, start), _DEVICE, src=_HOST)


def _as_it_is(x: Any, start: Any) -> Any:
    return x


def _in_halves(x: Any, start: Any) -> Any:
    axis = next(axis for axis, size in enumerate(x.shape) if size > 1)
    size = x.shape[axis]
    # A slice of all of it is the array, wherever it begins. One of a half is a slice.
    halves = [(0, size // 2), (size // 2, size - size // 2)]
    parts = [lax.dynamic_slice_in_dim(x, start + first, count, axis) for first, count in halves]
    return lax.concatenate([jax.device_put(part, _DEVICE, src=_HOST) for part in parts], axis)


def _hold_for_tpu(context: Any, x: Any, start: Any) -> Any:
    whole = _compat.is_constant(start) or context.avals_in[0].size <= 1
    return _compat.lower_fun(_as_it_is if whole else _in_halves, multiple_results=False)(context, x, start)


_hold.def_impl(_as_it_is)
_hold.def_abstract_eval(lambda aval, _: aval)
_compat.register_lowering(_hold, _compat.lower_fun(_as_it_is, multiple_results=False))
_compat.register_lowering(_hold, _hold_for_tpu, platform="tpu", cacheable=False)
_compat.batching_rules[_hold] = lambda operands, dims: (_hold.bind(*operands), dims[0])
_compat.jvp_rules[_hold] = lambda primals, tangents: (_hold.bind(*primals), tangents[0])
