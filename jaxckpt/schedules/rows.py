"""Rows of buffers in host memory, read and written where they lie, under `vmap` too.

JAX batches a dynamic slice as a gather. A gather's indices would have to be in host memory with the buffer,
and nothing gathers there. These two operations stay slices: a batched buffer only has one axis more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat


def goes_to_host(leaf: Any) -> bool:
    """Whether a leaf of a carry, an array or its abstract value, lies on the host where carries are kept there: arrays
    of floats do; counters and keys are not worth the way.
    """
    return leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def host_rows(value: Any, count: int, beside: Sequence[Any] = ()) -> Any:
    """Returns room for so many rows like a value in host memory; what is in it is not to be read. `beside`: what rows
    are computed of; where it has tangents, the room has.

    A copy would be made on the device first, all of it. So the room is only said to be on the host, as that of a
    `lax.scan` with results there is: XLA allocates it where rows are written.
    """
    return _declared.bind(lax.broadcast(value, (count,)), *beside)


def read_row(buffer: Any, i: Any) -> Any:
    """Returns row i of a buffer, in the memory that the buffer lies in."""
    return _read.bind(buffer, i, axis=0)


def write_row(buffer: Any, row: Any, i: Any) -> Any:
    """Returns the buffer with row i replaced by one that lies in the same memory."""
    return _write.bind(buffer, row, i, axis=0)


def _sliced(buffer: Any, i: Any, *, axis: int) -> Any:
    return lax.dynamic_index_in_dim(buffer, i, axis, keepdims=False, allow_negative_indices=False)


def _updated(buffer: Any, row: Any, i: Any, *, axis: int) -> Any:
    return lax.dynamic_update_index_in_dim(buffer, row, i, axis, allow_negative_indices=False)


def _primitive(name: str, fun: Any) -> _compat.Primitive:
    primitive = _compat.Primitive(name)
    primitive.def_impl(fun)
    primitive.def_abstract_eval(
        lambda *avals, axis: jax.make_jaxpr(lambda *values: fun(*values, axis=axis))(*avals).out_avals[0]
    )
    _compat.register_lowering(primitive, _compat.lower_fun(fun, multiple_results=False))
    return primitive


_read, _write = _primitive("jaxckpt_read_row", _sliced), _primitive("jaxckpt_write_row", _updated)


_declared = _compat.Primitive("jaxckpt_host_rows")
_declared.def_impl(lambda x, *_: jax.device_put(x, jax.memory.Space.Host))
_declared.def_abstract_eval(lambda aval, *_: aval.update(memory_space=jax.memory.Space.Host))
_compat.register_lowering(_declared, lambda context, x, *_: [x])
_compat.batching_rules[_declared] = lambda operands, dims: (_declared.bind(*operands), dims[0])


def _declared_tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # Zeros too: a loop that carries the buffer would make them on the device.
    return _declared.bind(*primals), _declared.bind(_compat.instantiate_zeros(tangents[0]), *primals[1:])


_compat.jvp_rules[_declared] = _declared_tangent


def _read_batched(operands: Sequence[Any], dims: Sequence[Any], *, axis: int) -> tuple[Any, int]:
    buffer, i = operands
    place = dims[0]
    out = _read.bind(buffer, i, axis=axis + (place <= axis))
    return out, place - (place > axis)


def _write_batched(operands: Sequence[Any], dims: Sequence[Any], *, axis: int) -> tuple[Any, int]:
    buffer, row, i = operands
    size = next(x.shape[dim] for x, dim in zip(operands, dims) if dim is not None)
    front = [x if dim == 0 else _to_front(x, dim, size) for x, dim in zip((buffer, row), dims)]
    return _write.bind(*front, i, axis=axis + 1), 0


def _to_front(value: Any, dim: int | None, size: int) -> Any:
    return _compat.broadcast(value, size, 0, None) if dim is None else jnp.moveaxis(value, dim, 0)


def _read_tangent(primals: Sequence[Any], tangents: Sequence[Any], *, axis: int) -> tuple[Any, Any]:
    buffer, i = primals
    out = _read.bind(buffer, i, axis=axis)
    moved = tangents[0]
    if isinstance(moved, _compat.Zero):
        return out, _compat.Zero(_compat.tangent_aval(out))
    return out, _read.bind(moved, i, axis=axis)


def _write_tangent(primals: Sequence[Any], tangents: Sequence[Any], *, axis: int) -> tuple[Any, Any]:
    buffer, row, i = primals
    out = _write.bind(buffer, row, i, axis=axis)
    moved = tangents[:2]
    if all(isinstance(tangent, _compat.Zero) for tangent in moved):
        return out, _compat.Zero(_compat.tangent_aval(out))
    there = [
        jax.device_put(_compat.instantiate_zeros(tangent), jax.memory.Space.Host)
        if isinstance(tangent, _compat.Zero)
        else tangent
        for tangent in moved
    ]
    return out, _write.bind(*there, i, axis=axis)


_compat.batching_rules[_read], _compat.batching_rules[_write] = _read_batched, _write_batched
_compat.jvp_rules[_read], _compat.jvp_rules[_write] = _read_tangent, _write_tangent
