"""Maxima over windows, written with one axis more in front.

The gradient of such a maximum is a scatter into zeros of the operand's shape. XLA keeps one array for equal constants.
So where the operand is `relu(x)`, whose rule has zeros of the same shape, the GPU's compiler stores that array in the
forward pass already, and a second one to scatter into, until the backward pass ends: twice the largest activation of a
ResNet. With an axis of one element in front the shapes differ; each array of zeros is part of the kernel that uses it,
but for the one that is scattered into. Values and gradients are the same, bit for bit.
Plans for GPUs write them so (`Plan.pools_apart`), those of the function itself: what a loop or a checkpoint of the
user's holds stays as it is. On a CPU, the axis would cost a copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt.core import surgery
from jaxckpt.core.graph import Graph

_EXTREMES = ("reduce_window_max", "reduce_window_min")


def is_in(graph: Graph) -> bool:
    """Whether the function itself has maxima or minima over windows that have a gradient."""
    return any(op.primitive in _EXTREMES and _is_real(graph.values[op.inputs[0]].dtype) for op in graph.ops)


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def with_axis(eqn: Any) -> list[Any]:
    """Returns the equations that take the place of one: itself, unless it is a maximum or a minimum over windows that
    has a gradient.

    Where its operand's type says how it is sharded, it stays as it is: the type would have to say it of the axis too.
    """
    if _compat.primitive_name(eqn) not in _EXTREMES:
        return [eqn]
    aval = eqn.invars[0].aval
    if not _is_real(aval.dtype) or _compat.explicit_sharding(aval) is not None:
        return [eqn]
    params = _compat.equation_params(eqn)
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    longer = {name: (1, *params[name]) for name in ones} | {"padding": ((0, 0), *params["padding"])}

    def extreme(x: jax.Array) -> jax.Array:
        return lax.squeeze(eqn.primitive.bind(lax.expand_dims(x, (0,)), **{**params, **longer}), (0,))

    made = surgery.splice(jax.make_jaxpr(extreme)(aval), eqn)
    return [each.replace(source_info=eqn.source_info) for each in made]
