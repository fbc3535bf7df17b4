"""What is being traced, and over which axes: contexts, tracers, abstract values."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax._src import config, util
from jax._src import core as _core
from jax._src.interpreters import ad
from jax._src.state.types import AbstractRef
from jax.experimental import mesh_utils
from jax.extend import core as _extend_core
from jax.extend.core.primitives import convert_element_type_p, scan_p

from jaxckpt._compat.needs import VERSION, unsupported

Tracer = jax.core.Tracer
Returned = TypeVar("Returned")

cache_in_context = util.cache()
"""Caches a function's results for each configuration of JAX. Arguments must be hashable. (functools does not know JAX's
flags.)
"""

trace_context = config.trace_context
"""Returns a value that is equal as long as those of JAX's settings are the same that change a trace."""

weakref_lru_cache = util.weakref_lru_cache
"""The same; a result is cached as long as the first argument lives."""

trace_state = _extend_core.get_opaque_trace_state
"""Returns a value that is equal as long as the trace is the same."""

unmapped_aval = _extend_core.unmapped_aval
"""Returns the abstract value with a new axis, from (size, axis, abstract value)."""

create_device_mesh = mesh_utils.create_device_mesh
"""Returns an array of devices, from (shape, devices)."""

_LOOP_RULES = {ad.primitive_jvps[scan_p].__code__, ad.primitive_linearizations[scan_p].__code__}
"""The code of JAX's rules that differentiate a scan, forward and for reverse mode."""


def is_tracer(value: Any) -> bool:
    """Returns whether a value is being traced."""
    return isinstance(value, Tracer)


def is_linearized(value: Any) -> bool:
    """Returns whether a value is being differentiated in reverse (the tracer's class is private)."""
    return isinstance(value, ad.LinearizeTracer)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context for jaxckpt's own traces: no trace, no mesh, and jit not disabled, whatever the user has set."""
    nowhere = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with clean_trace(), jax.disable_jit(False), nowhere:
        yield


def clean_trace() -> Any:
    """A context outside of all traces: computations in it run at once, and traces in it are independent.

    `jax.ensure_compile_time_eval` is the public function to leave a trace, but it also computes whatever depends on no
    argument in traces that begin inside it, so that a mask becomes a constant. Not every version exports
    `jax.core.eval_context`.
    """
    return _core.eval_context()


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """A context in which types and ranks are promoted as JAX does it by default, for jaxckpt's own arithmetic, whatever
    the user has set.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def jit_is_disabled() -> bool:
    """Returns whether jax.disable_jit is on, which unrolls loops."""
    return bool(config.disable_jit.value)


def may_be_of_sharding(error: Exception) -> bool:
    """Returns whether JAX may mean by an error that it cannot shard a result over explicit axes of a mesh.

    Its own class for that is private, and not all of its rules raise it.
    """
    return isinstance(error, (ValueError, _core.ShardingTypeError))


def manual_axes(aval: Any) -> dict[str, Any]:
    """Returns the arguments of `jax.ShapeDtypeStruct` for the axes of jax.shard_map over which a value varies.

    The argument is not documented, and its type is not public.
    """
    kind = varying_axes(aval)
    return {} if kind is None or kind.empty else {"manual_axis_type": kind, "sharding": aval.sharding}


MERGES_SHARDED = VERSION >= (0, 12)
"""Whether a reshape may merge a dimension with the one before it that an explicit axis shards. Before jax 0.12 it
raises."""


SCANS_KEEP_RULES = VERSION >= (0, 12)
"""Whether a scan keeps the derivatives of the user's that are in it where it is run while a linear function is built.
Before jax 0.12 `jax.hessian` of a plain scan is wrong for a `jax.custom_jvp` whose rule is not the function's own."""


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding that is part of a value's type, over an abstract mesh; None if no axis of the mesh is
    explicit.

    For other axes, the type does not say how a value is sharded. `jax.typeof(x).sharding` is public; the sharding of a
    jaxpr's variable is not.
    """
    sharding = getattr(aval, "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def varying_axes(aval: Any) -> Any:
    """Returns the axes of jax.shard_map over which an abstract value varies, for comparisons; None if it is not an
    array.
    """
    return aval.manual_axis_type if isinstance(aval, jax.core.ShapedArray) else None


def differentiates_loop() -> bool:
    """Whether JAX is differentiating a loop's body: whether its rules for a scan are on the stack.

    The body's own trace does not say it, and what is differentiated within an iteration is traced in the same way.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _LOOP_RULES:
            return True
        frame = frame.f_back
    return False


def loop_body() -> Any:
    """Returns the trace of the loop's body that is being traced, to be held weakly; None where what is traced is no
    body, or is called or differentiated within one.

    No public function says what a trace is for.
    """
    trace = _core.trace_ctx.trace
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return trace if getattr(info, "traced_for", None) in ("scan", "fori_loop") else None


def is_on_host(aval: Any) -> bool:
    """Returns whether an abstract value lies in host memory."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> Any:
    """Returns the abstract value of an array."""
    return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)


def typed(value: Any, aval: Any) -> Any:
    """Returns an array with the dtype of an abstract value, and with its weak type. No public function makes one."""
    if not getattr(aval, "weak_type", False):
        return value.astype(aval.dtype)
    return convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=True, sharding=None)


def tangent_aval(value: Any) -> Any:
    """Returns the abstract value of the tangents of an array."""
    return jax.typeof(value).to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """Returns the abstract value of the cotangents of an array with an abstract value."""
    return aval.to_ct_aval()


def key_implementation(dtype: Any) -> Any:
    """Returns the implementation of random keys of a dtype."""
    if (found := getattr(dtype, "_impl", None)) is None:
        raise unsupported("the attribute _impl of the dtype of random keys", "make keys of that dtype", "has none")
    return found


def within_named_axes(jaxpr: Any) -> bool:
    """Returns whether a program depends on the axes that are being mapped over: it has collectives over them, or
    jax.shard_map maps them.

    Such a program cannot be compiled alone. No public function lists the axes.
    """
    names = set(_core.get_axis_env().axis_names())
    if not names:
        return False
    used = {effect.name for effect in jaxpr.effects if isinstance(effect, _core.NamedAxisEffect)}
    return bool(names & used) or bool(jax.sharding.get_abstract_mesh().manual_axes)


def returned_within(transform: Callable[[Callable[[], tuple[()]]], Any], fun: Callable[[], Returned]) -> Returned:
    """Returns what `fun()` returns, called while what `transform` makes of a function without arguments is traced."""
    found: list[Returned] = []

    def call() -> tuple[()]:
        found.append(fun())
        return ()

    jax.eval_shape(transform(call))
    return found[0]


@dataclass(frozen=True)
class Mapped:
    """What is traced within a jax.shard_map: the mesh, the axes that it maps over, and whether types say how values
    vary over them.
    """

    mesh: Any
    axes: frozenset[str]
    typed: bool

    def run(self, fun: Callable[[], Returned]) -> Returned:
        """Returns what `fun()` returns, called where the axes are those of a device."""
        mapped = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(), out_specs=(), axis_names=self.axes, check_vma=self.typed
        )
        with alone():
            return returned_within(mapped, fun)


def mapped_here() -> Mapped | None:
    """Returns the jax.shard_map that is being traced; None where there is none.

    The mesh within it has its axes as manual ones, and JAX has no public function for a mesh with the others.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = frozenset(mesh.manual_axes)
    if not axes:
        return None
    typed = not varying_axes(jax.typeof(jax.lax.axis_index(min(axes)))).empty
    auto = jax.sharding.AxisType.Auto
    return Mapped(mesh.update_axis_types(dict.fromkeys(axes, auto)), axes, typed)


def is_ref_type(aval: Any) -> bool:
    """Returns whether an abstract value is that of a `jax.Ref`; the class is not public."""
    return isinstance(aval, AbstractRef)


def is_ref(value: Any) -> bool:
    """Returns whether a value is a `jax.Ref`, or represents one in a trace."""
    return isinstance(value, jax.Ref) or is_ref_type(getattr(value, "aval", None))


def blank_keys(aval: Any) -> Any:
    """Returns random keys of an abstract value, with all words zero, to be overwritten."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.random.wrap_key_data(jax.numpy.zeros(data.shape, data.dtype), impl=key_implementation(aval.dtype))
