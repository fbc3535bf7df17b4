"""Maxima over windows, written with one axis more in front.

The gradient of such a maximum is a scatter into zeros of the operand's shape. XLA keeps one array for equal constants.
So where the operand is `relu(x)`, whose rule has zeros of the same shape, the GPU's compiler stores that array in the
forward pass already, and a second one to scatter into, until the backward pass ends: twice the largest activation of a
ResNet. With an axis of one element in front the shapes differ; each array of zeros is part of the kernel that uses it,
but for the one that is scattered into. Values and gradients are the same, bit for bit.
Plans for GPUs write them so (`Plan.pools_apart`). On a CPU, the axis would cost a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxckpt import _compat
from jaxckpt.core import surgery
from jaxckpt.core.graph import Graph

_MAXIMA: dict[str, tuple[Callable[..., Any], float]] = {
    "reduce_window_max": (lax.max, -jnp.inf),
    "reduce_window_min": (lax.min, jnp.inf),
}
"""Name of a primitive -> what it reduces by, and the least there is for that."""


def is_in(graph: Graph) -> bool:
    """Whether the function has maxima or minima over windows that have a gradient."""
    return any(op.primitive in _MAXIMA and _is_real(graph.values[op.inputs[0]].dtype) for op in graph.ops if op.inputs)


def _is_real(dtype: Any) -> bool:
    return dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)  # others may have no infinity


def with_axis(eqn: Any) -> list[Any]:
    """Returns the equations that take the place of one: itself, unless it is a maximum or a minimum over windows that
    has a gradient.

    Where its operand's type says how it is sharded, it stays as it is: the type would have to say it of the axis too.
    """
    if _compat.primitive_name(eqn) not in _MAXIMA:
        return [eqn]
    aval = eqn.invars[0].aval
    if not _is_real(aval.dtype) or _compat.explicit_sharding(aval) is not None:
        return [eqn]
    reduction, least = _MAXIMA[_compat.primitive_name(eqn)]
    params = _compat.equation_params(eqn)
    window, strides, dilation, apart = (
        (1, *params[name]) for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    )
    padding = ((0, 0), *params["padding"])

    def maximum(x: jax.Array) -> jax.Array:
        x = lax.expand_dims(x, (0,))
        found = lax.reduce_window(x, np.array(least, x.dtype), reduction, window, strides, padding, dilation, apart)
        return lax.squeeze(found, (0,))

    return surgery.splice(jax.make_jaxpr(maximum)(aval), eqn)
