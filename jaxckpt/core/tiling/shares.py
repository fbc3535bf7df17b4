"""What a tile has of a value, and what is needed to take it: the types that the rules and their callers share.

An axis of size n is followed through a program. Its place in a value may be a whole dimension, or a factor of one: a
reshape of (k, n, m) to (k * n * m) makes a dimension in which each of the n rows has `block = m` consecutive entries,
k times. So a dimension of size s with a block b holds the axis s / (n * b) times.

Several devices may hold the axis, each some consecutive rows. A tile of consecutive rows would then be on one of them:
the compiler gathers the rows, and every device computes every tile. So the axis is taken as `parts` of equally many
consecutive rows, and each tile has some rows of every part. That is right for any number of devices that divides the
parts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat


class Kind(enum.Enum):
    """What a tile has of a value."""

    WHOLE = enum.auto()
    """All of it: the value is the same in all tiles."""
    ROWS = enum.auto()
    """Its rows along the axis."""
    SUM = enum.auto()
    """One term: the value is the sum of what the tiles have."""


@dataclass(frozen=True)
class Share:
    """What a tile has of a value.

    Attributes:
      kind: see `Kind`.
      dim: of ROWS, the dimension that holds the axis.
      block: of ROWS, the consecutive entries of this dimension that belong to one row.
    """

    kind: Kind
    dim: int = -1
    block: int = 1


WHOLE = Share(Kind.WHOLE)
SUM = Share(Kind.SUM)


def rows(dim: int, block: int = 1) -> Share:
    """Returns the share of a value that has the axis."""
    return Share(Kind.ROWS, int(dim), int(block))


@dataclass(frozen=True)
class At:
    """Where a tile is.

    Attributes:
      start: how many rows the tiles before it have; an int, or an array of one.
      size: its rows.
      total: the rows of all tiles.
      parts: into how many parts of consecutive rows the axis is cut; a tile has size / parts rows of each, those from
        start / parts on.
    """

    start: Any
    size: int
    total: int
    parts: int = 1

    def numbers(self) -> Any:
        """Returns the number of each of its rows along the axis, int32 (size,)."""
        counted = jnp.arange(self.size // self.parts, dtype=jnp.int32) + self.start // self.parts
        if self.parts == 1:
            return counted
        firsts = jnp.arange(self.parts, dtype=jnp.int32) * (self.total // self.parts)
        return (firsts[:, None] + counted[None, :]).reshape(self.size)

    def sized(self, shape: Sequence[int], share: Share) -> tuple[int, ...]:
        """Returns the shape of what a tile has of a value of this shape."""
        if share.kind is not Kind.ROWS:
            return tuple(shape)
        return tuple(n // self.total * self.size if d == share.dim else n for d, n in enumerate(shape))

    def take(self, value: Any, share: Share) -> Any:
        """Returns what this tile has of a whole value."""
        if share.kind is Kind.SUM:
            first = jnp.asarray(self.start == 0)
            return lax.select_n(jnp.broadcast_to(first, jnp.shape(value)), jnp.zeros_like(value), value)
        if share.kind is Kind.WHOLE or self.size == self.total:
            return value
        outer = value.shape[share.dim] // (self.total * share.block)
        if outer * self.parts == 1:
            return lax.dynamic_slice_in_dim(value, self.start * share.block, self.size * share.block, share.dim)
        wide = value.reshape(unfolded(value.shape, share, self.total, self.parts))
        wide = lax.dynamic_slice_in_dim(wide, self.start // self.parts, self.size // self.parts, share.dim + 2)
        return wide.reshape(self.sized(value.shape, share))

    def put(self, into: Any, value: Any, share: Share) -> Any:
        """Returns a whole value with the rows of this tile replaced."""
        if self.size == self.total:
            return value
        outer = into.shape[share.dim] // (self.total * share.block)
        if outer * self.parts == 1:
            return lax.dynamic_update_slice_in_dim(into, value, self.start * share.block, share.dim)
        wide = into.reshape(unfolded(into.shape, share, self.total, self.parts))
        value = value.reshape(unfolded(value.shape, share, self.size, self.parts))
        start = self.start // self.parts
        return lax.dynamic_update_slice_in_dim(wide, value, start, share.dim + 2).reshape(into.shape)


def unfolded(shape: Sequence[int], share: Share, total: int, parts: int) -> tuple[int, ...]:
    """Returns a shape with the dimension that holds the axis as four: (before, parts, rows of a part, block)."""
    before = shape[share.dim] // (total * share.block)
    return (*shape[: share.dim], before, parts, total // parts, share.block, *shape[share.dim + 1 :])


def rows_of_tile(total: int, tiles: int, parts: int) -> int:
    """Returns how many rows a tile has, of so many tiles of an axis in parts; the last tile may have fewer."""
    return parts * -(-total // (parts * tiles))


class CoupledError(Exception):
    """An operation couples rows. `jaxckpt.TilingError` is made of it.

    Args:
      text: how, as a phrase after "it".
      hint: a sentence that says what to do; "" where there is nothing better than what every such error says.
    """

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True)
class Passage:
    """How the axis passes through one operation.

    Attributes:
      wants: what the operation takes of each operand.
      outs: what it makes of each result.
      params: returns the parameters that are others in a tile; None where none are.
      run: computes a tile's results, where that takes more than other parameters.
    """

    wants: Sequence[Share]
    outs: Sequence[Share]
    params: Callable[[At], Mapping[str, Any]] | None = None
    run: Callable[[At, list[Any]], Sequence[Any]] | None = None


@dataclass(frozen=True)
class Axis:
    """The axis that is followed.

    Attributes:
      size: its rows.
      follow: returns a program followed from the shares of its inputs, to shares of its results that are given or
        found; see `core/tiling/follow.py`.
    """

    size: int
    follow: Callable[..., Any]


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or a literal."""
    return tuple(atom.aval.shape)


def is_differentiable(dtype: Any) -> bool:
    """Returns whether values of a dtype have derivatives."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def wide(dtype: Any) -> Any:
    """Returns the dtype in which terms of this dtype are added up: float32 for narrower floats."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def has_range_of_float32(dtype: Any) -> bool:
    """Returns whether a dtype has numbers as large and as small as float32's; True for those with no derivative."""
    if not is_differentiable(dtype):
        return True
    own, least = jnp.finfo(dtype), jnp.finfo(jnp.float32)
    return bool(own.maxexp >= least.maxexp and own.minexp <= least.minexp)


def holds_all(wide: Any, narrow: Any) -> bool:
    """Returns whether a float dtype has all values of another one. JAX promotes no 8-bit floats."""
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in (wide, narrow)):
        return bool(jnp.promote_types(wide, narrow) == wide)
    more, less = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(more.nmant >= less.nmant and more.maxexp >= less.maxexp and more.minexp <= less.minexp)


def zeros(aval: Any, dtype: Any = None) -> Any:
    """Returns zeros of an abstract value, with its manual axes; keys of zero words for random keys."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return _compat.blank_keys(aval)
    return _compat.zeros_like_aval(aval).astype(aval.dtype if dtype is None else dtype)
