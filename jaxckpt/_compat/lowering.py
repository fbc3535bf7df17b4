"""Parts for the lowering of operations that jaxckpt defines: from a jaxpr's equation to MLIR.

A rule sees the MLIR values that the equation reads, and through them the operations before it. `jax.interpreters.mlir`
is partly private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

register_lowering = mlir.register_lowering
lower_fun = mlir.lower_fun

_BARRIER, _CONSTANT = "stablehlo.optimization_barrier", "stablehlo.constant"
_FLOATS = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32, "f64": jnp.float64}
"""MLIR's names of dtypes."""


def lower_with(context: Any, fun: Callable[..., Sequence[Any]], operands: Sequence[Any], more: Sequence[Any]) -> Any:
    """Lowers a function of arrays as one operation, which reads more than its operands.

    Args:
      context: of the rule.
      fun: called with arrays for the operands and for `more`; returns those that the operation does.
      operands: MLIR values, of the operation.
      more: MLIR values, as of `values_at_barrier`.
    """
    avals = [*context.avals_in, *(ShapedArray(tuple(x.type.shape), _dtype(x)) for x in more)]
    return lower_fun(fun, multiple_results=True)(context.replace(avals_in=avals), *operands, *more)


def values_at_barrier(context: Any, values: Sequence[Any]) -> list[Any]:
    """Returns what comes out of a barrier beside some values.

    Args:
      context: of the rule.
      values: MLIR values; all on the host that come out of the barrier.

    Returns:
      MLIR values: arrays of floats on the device, of known sizes, none of them empty. None where the values do not come
      out of one barrier; where the compiler divides the program over several devices, since then a number of an array
      is on some of them alone.
    """
    barrier = values[0].owner
    if not _is_of_one_device(context) or not _is(barrier, _BARRIER) or any(x.owner != barrier for x in values):
        return []
    return [
        x for x in barrier.results if _dtype(x) is not None and min(x.type.shape, default=1) > 0 and x not in values
    ]


def is_constant(value: Any) -> bool:
    """Whether an MLIR value is a number that the program holds."""
    return _is(value.owner, _CONSTANT)


def _is(operation: Any, name: str) -> bool:
    return getattr(operation, "name", None) == name  # the owner of an argument is a block, which has no name


def _is_of_one_device(context: Any) -> bool:
    axes = context.module_context.axis_context
    if hasattr(axes, "num_devices"):
        return bool(axes.num_devices == 1)
    return axes.mesh.size == 1 or axes.manual_axes >= set(axes.mesh.axis_names)


def _dtype(value: Any) -> Any:
    """Returns the dtype of an array of floats, None for all else."""
    return _FLOATS.get(str(getattr(value.type, "element_type", None)))
