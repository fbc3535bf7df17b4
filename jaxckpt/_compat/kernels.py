"""Kernels of Pallas that a checkpoint can leave out.

Before jax 0.12, JAX's rule for dead code keeps a kernel of which no result is used. So a checkpoint that keeps what a
kernel returns, such as the result and the logsumexp of an attention, runs the kernel again all the same. A call of
`jax.jit` is left out where none of its results is used, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt._compat.jaxprs import build_jaxpr, close_jaxpr, fresh_var, open_jaxpr
from jaxckpt._compat.needs import VERSION
from jaxckpt._compat.traces import is_ref_type, shaped_array, varying_axes


def removable(eqn: Any) -> Any:
    """Returns the equation of a kernel as a call of `jax.jit`, if it is one that would stay, and may be left out."""
    if (
        VERSION >= (0, 12)
        or eqn.effects
        or _has_side_effects(eqn)
        or not all(map(_is_plain, [*eqn.invars, *eqn.outvars]))
    ):
        return eqn
    inputs = [fresh_var(atom.aval) for atom in eqn.invars]
    results = [fresh_var(var.aval) for var in eqn.outvars]
    inner = eqn.replace(invars=inputs, outvars=results)
    program = build_jaxpr([], inputs, results, [inner], open_jaxpr(eqn.params["jaxpr"]).debug_info)
    call = _call(str(eqn.params["name"] or "kernel"), inputs, results)
    params = {**call.params, "jaxpr": close_jaxpr(program, ())}
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, params=params, source_info=eqn.source_info, ctx=eqn.ctx)


def _call(name: str, inputs: list[Any], results: list[Any]) -> Any:
    """Returns the equation of a call of `jax.jit` with so many operands and results."""

    def function(*_: Any) -> list[Any]:
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in results]

    function.__name__ = function.__qualname__ = name
    operands = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in inputs]
    return open_jaxpr(jax.make_jaxpr(jax.jit(function))(*operands)).eqns[0]


def _is_plain(atom: Any) -> bool:
    """Whether an array is one that no axis of a mesh is mapped over, or divides."""
    aval = atom.aval
    if is_ref_type(aval) or any(aval.sharding.spec):
        return False
    return varying_axes(aval) in (None, varying_axes(shaped_array((), jnp.float32)))


def _has_side_effects(eqn: Any) -> bool:
    given = eqn.params["compiler_params"]
    settings = given.values() if isinstance(given, Mapping) else [given]
    return any(bool(getattr(each, "has_side_effects", False)) for each in settings)
