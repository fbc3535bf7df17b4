"""What is being traced, and over what: contexts, tracers, abstract values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config, util
from jax._src import core as _core
from jax._src.interpreters import ad
from jax._src.state.types import AbstractRef
from jax.experimental import mesh_utils
from jax.extend import core as _extend_core

from jaxckpt._compat.needs import unsupported

Tracer = jax.core.Tracer

cache_in_context = util.cache()
"""Remembers a function's results, for each configuration of JAX by itself; arguments are hashable. (functools does not know JAX's flags.)"""

weakref_lru_cache = util.weakref_lru_cache
"""The same, held as long as its first argument lives."""

trace_state = _extend_core.get_opaque_trace_state
"""Returns what is equal as long as the same is being traced."""

unmapped_aval = _extend_core.unmapped_aval
"""Returns the abstract value of so many rows along a new axis: size, axis, abstract value."""

create_device_mesh = mesh_utils.create_device_mesh
"""Returns an array of devices: shape, devices."""


def is_tracer(value: Any) -> bool:
    """Whether a value is being traced."""
    return isinstance(value, Tracer)


def is_linearized(value: Any) -> bool:
    """Whether a value is being differentiated in reverse (the tracer's class is private)."""
    return isinstance(value, ad.LinearizeTracer)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context for traces of our own: nothing is being traced, over no mesh, calls are not written out, whatever the user has set."""
    nowhere = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with clean_trace(), jax.disable_jit(False), nowhere:
        yield


def clean_trace() -> Any:
    """A context in which nothing is being traced, whatever is outside: what is computed in it is computed now, what is traced is traced alone.

    `jax.ensure_compile_time_eval` is the public way out of a trace, and not the same: it also computes, within traces that begin in it, whatever
    depends on no argument, so that a mask becomes a constant. `jax.core.eval_context` is not exported by every version.
    """
    return _core.eval_context()


def jit_is_disabled() -> bool:
    """Whether jax.disable_jit holds, under which loops are written out."""
    return bool(config.disable_jit.value)


def manual_axes(aval: Any) -> dict[str, Any]:
    """Returns what `jax.ShapeDtypeStruct` is told besides shape and dtype of a value within jax.shard_map: over which axes it varies.

    The argument is not documented; what it takes is not public.
    """
    kind = varying_axes(aval)
    return {} if kind is None or kind.empty else {"manual_axis_type": kind, "sharding": aval.sharding}


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding that is part of a value's type, over an abstract mesh; None where no axis of the mesh is explicit.

    Over other axes the type says nothing of how a value lies. `jax.typeof(x).sharding` is public, not so that of a jaxpr's variable.
    """
    sharding = getattr(aval, "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def varying_axes(aval: Any) -> Any:
    """Returns over which axes of jax.shard_map an abstract value varies, to be compared; None for what is no array."""
    return aval.manual_axis_type if isinstance(aval, jax.core.ShapedArray) else None


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> Any:
    """Returns the abstract value of an array."""
    return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)


def tangent_aval(value: Any) -> Any:
    """Returns the abstract value of the tangents of an array."""
    return jax.typeof(value).to_tangent_aval()


def key_implementation(dtype: Any) -> Any:
    """Returns the implementation of random keys of a dtype."""
    if (found := getattr(dtype, "_impl", None)) is None:
        raise unsupported("the attribute _impl of the dtype of random keys", "make keys of that dtype", "has none")
    return found


def within_named_axes(jaxpr: Any) -> bool:
    """Whether a program belongs into the axes that are being mapped over: it has collectives over them, or they are jax.shard_map's.

    Such a program cannot be compiled by itself. No public function lists the axes.
    """
    names = set(_core.get_axis_env().axis_names())
    if not names:
        return False
    used = {effect.name for effect in jaxpr.effects if isinstance(effect, _core.NamedAxisEffect)}
    return bool(names & used) or bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_ref_type(aval: Any) -> bool:
    """Whether an abstract value is that of a `jax.Ref`; the class is not public."""
    return isinstance(aval, AbstractRef)


def is_ref(value: Any) -> bool:
    """Whether a value is a `jax.Ref`, or stands for one in a trace."""
    return isinstance(value, jax.Ref) or is_ref_type(getattr(value, "aval", None))


def blank_keys(aval: Any) -> Any:
    """Returns random keys of an abstract value, all of zero words; to be written over."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.random.wrap_key_data(jax.numpy.zeros(data.shape, data.dtype), impl=key_implementation(aval.dtype))
