"""Distribute a value over devices that all have it whole: see `shard`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InWords, nearest
from jaxckpt.actions.base import Action, Array, Cost, StoredArray

_Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Shard(Action):
    """Keeps a part of the value on each device; see `shard`.

    Attributes:
      spec: for each dimension the names of the mesh axes that it is distributed over.
    """

    spec: _Names

    kind = "shard"
    example = 'shard(P("model"))'
    changes = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", _names(self.spec))

    def admits(self, value: Array) -> bool:
        """Returns whether the value is an array of numbers or booleans that has the dimensions of the spec."""
        plain = not jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return plain and len(value.shape) >= len(self.spec) and 0 not in value.shape

    def kept(self, value: Array) -> tuple[Array, ...]:
        """Returns the value with the bytes that one device keeps of it."""
        shape = list(value.shape)
        for dim, count in self._counts().items():
            shape[dim] = math.ceil(shape[dim] / count)
        share = math.prod(shape) / max(math.prod(value.shape), 1)
        return (StoredArray(value.shape, value.dtype, math.ceil(value.bytes * share)),)

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes that one device keeps, over the axes of the mesh in scope; those of the whole value where
        the mesh in scope does not have these axes.
        """
        return self.kept(value)[0].bytes

    def error(self, dtype: Any) -> float:
        """Returns 0: it is exact."""
        return 0.0

    def cost(self, value: Array) -> Cost:
        """Returns what a device writes and reads in memory, and receives from the others."""
        kept = self.device_bytes(value)
        return Cost(memory_bytes=2.0 * kept + value.bytes, link_bytes=float(value.bytes - kept))

    def _counts(self) -> dict[int, int]:
        """Returns how many devices each dimension is distributed over, of the mesh in scope."""
        mesh = jax.sharding.get_abstract_mesh()
        sizes = {} if mesh.empty else dict(mesh.shape)
        return {
            dim: math.prod(sizes[name] for name in names)
            for dim, names in enumerate(self.spec)
            if all(name in sizes for name in names)
        }

    def encode(self, x: Any) -> Any:
        """Returns the array, padded to what divides, of which each device keeps its part."""
        kinds, sizes = self._axes(x)
        for dim, names in enumerate(self.spec):
            here = [name for name in names if kinds[name] == AxisType.Manual]
            count = math.prod(sizes[name] for name in names)
            x = _padded(x, dim, count * (_devices(x, dim) if _explicit(x) else 1))
            if here:
                part = x.shape[dim] // math.prod(sizes[name] for name in here)
                place: Any = 0
                for name in here:
                    place = place * sizes[name] + jax.lax.axis_index(name)
                x = jax.lax.dynamic_slice_in_dim(x, place * part, part, dim)
        chosen = lambda kind: [tuple(n for n in names if kinds[n] == kind) for names in self.spec]
        if any(explicit := chosen(AxisType.Explicit)):
            x = jax.sharding.reshard(x, _with(jax.typeof(x).sharding.spec, explicit, x.ndim))
        if any(auto := chosen(AxisType.Auto)):
            x = _constrained(x, auto)
        return x

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array, whole again: gathered from the devices where axes are manual or explicit; where they are
        automatic, the compiler gathers what is read.
        """
        kinds = self._axes(like)[0]
        x = stored
        if any(kinds[name] == AxisType.Explicit for names in self.spec for name in names):
            x = jax.sharding.reshard(x, like.sharding.spec)
        for dim, names in enumerate(self.spec):
            for name in reversed([name for name in names if kinds[name] == AxisType.Manual]):
                x = jax.lax.all_gather(x, name, axis=dim, tiled=True, to="invarying")
        if x.shape != like.shape:
            x = jax.lax.slice(x, [0] * x.ndim, like.shape)
        return x

    def _axes(self, x: Any) -> tuple[dict[str, AxisType], dict[str, int]]:
        """Returns the kind and the size of each axis of the mesh.

        Raises:
          ArgumentError: there is no mesh; an axis is not in it, or the array is distributed over it already.
        """
        aval = jax.typeof(x) if isinstance(x, jax.Array) else x
        own = getattr(getattr(aval, "sharding", None), "mesh", None)
        scope = jax.sharding.get_abstract_mesh()
        mesh = scope if own is None or own.empty else own
        if scope.empty:  # also where arrays bring theirs: JAX asks for it there
            hint = "Call the function, and differentiate it, inside of `with jax.set_mesh(mesh):`."
            raise ArgumentError("spec", f"used where a mesh is in scope, to keep {_shown(aval)}", self, hint)
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        sizes = dict(mesh.shape)
        for dim, names in enumerate(self.spec):
            for name in names:
                if name not in kinds:
                    rule = f"of axes that the mesh has: {', '.join(map(str, kinds))}"
                    raise ArgumentError("spec", rule, name, nearest(name, [str(each) for each in kinds]))
                if (why := _taken(aval, name, kinds[name])) and isinstance(x, jax.Array):
                    rule = f"of axes over which {_shown(aval)} is replicated"
                    raise ArgumentError("spec", rule, InWords(f"{name!r} for dimension {dim}"), why)
        return kinds, sizes

    def refusal(self, target: Any) -> str:
        """Returns the same for all targets: the planner does not know what the links between devices carry."""
        return (
            "The planner does not weigh the links between devices. "
            "A Policy can distribute values: jaxckpt.checkpoint(policy=...)."
        )

    def parameters(self) -> dict[str, Any]:
        """Returns the spec as lists of names."""
        return {"spec": [list(names) for names in self.spec]}

    def __repr__(self) -> str:
        entries = (repr(names[0]) if len(names) == 1 else repr(names) if names else "None" for names in self.spec)
        return f"shard(P({', '.join(entries)}))"


def shard(spec: PartitionSpec | tuple[Any, ...] | list[Any] | str) -> Action:
    """Returns the action that keeps a part of a value on each device, where all devices have the whole value.

    Devices along a mesh axis often have equal activations: those between the matmuls of tensor parallelism, for one.
    Each then keeps its own part, and the backward pass gathers the parts. Values and gradients are exact. Megatron-LM
    calls this distributed saved activations, DeepSpeed partitioned activations (Rajbhandari et al. 2020, ZeRO-R,
    arXiv:1910.02054).

    The axes are those of the mesh in scope (`with jax.set_mesh(mesh):`, or inside of `jax.shard_map`):

    - Automatic axes: a sharding constraint, and the compiler gathers what is read. Name all axes of a dimension
      (`P(("data", "model"))` where it is distributed over "data" already); dimensions of None stay as they are. What
      is restored lies as a `jax.lax.with_sharding_constraint` says that makes the value, right before its tag. Without
      one the compiler chooses, and may compute what follows on whole arrays.
    - Explicit axes: `jax.sharding.reshard`, there and back. The axes come on top of those that the type names.
    - Manual axes, inside of `jax.shard_map`: a slice of what the device has, and an `all_gather`. This needs
      `check_vma=True` (the default), by which JAX knows that the value is replicated.

    Sizes that do not divide are padded. Values with fewer dimensions than the spec, random keys and empty arrays are
    saved as they are.

    Args:
      spec: for each dimension a mesh axis, a tuple of them, or None; a PartitionSpec, a tuple, or one axis for the
        first dimension.

    Raises:
      ArgumentError: the spec names no axis, or one axis twice. When a function is differentiated: there is no mesh in
        scope, the mesh does not have an axis, or the value is distributed over it already.

    >>> from jax.sharding import PartitionSpec as P
    >>> shard(P(None, "model")) == shard((None, "model")), shard("model")
    (True, shard(P('model')))
    """
    return Shard(_names(spec))


def _names(spec: Any) -> _Names:
    rule = "a PartitionSpec that names a mesh axis at least, and each axis once"
    entries = (spec,) if isinstance(spec, str) else spec
    if not isinstance(entries, (PartitionSpec, tuple, list)):
        raise ArgumentError("spec", rule, spec, "Such as P(None, 'model').")
    found: list[tuple[str, ...]] = []
    for entry in entries:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ArgumentError("spec", rule, spec, "An entry is a mesh axis, a tuple of them, or None.")
        found.append(tuple(names))
    while found and not found[-1]:
        found.pop()
    flat = [name for names in found for name in names]
    if not flat or "" in flat or len(set(flat)) < len(flat):
        raise ArgumentError("spec", rule, spec, "Such as P(None, 'model').")
    return tuple(found)


def _shown(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def _explicit(x: Any) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _devices(x: Any, dim: int) -> int:
    """Returns how many devices an array's type says that a dimension is distributed over."""
    sharding = jax.typeof(x).sharding
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(sharding.mesh.shape[name] for name in names)


def _varying(aval: Any) -> Collection[str]:
    return _compat.varying_axes(aval).varying  # type: ignore[no-any-return]


def _padded(x: Any, dim: int, count: int) -> Any:
    missing = -x.shape[dim] % count
    return jnp.pad(x, [(0, missing if place == dim else 0) for place in range(x.ndim)]) if missing else x


def _with(spec: Any, axes: list[tuple[str, ...]], ndim: int) -> PartitionSpec:
    """Returns a spec with more axes."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    for dim, more in enumerate(axes):
        entry = entries[dim]
        known = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        entries[dim] = (*known, *more) or None
    return PartitionSpec(*entries)


def _constrained(x: Any, axes: list[tuple[str, ...]]) -> Any:
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(*(names or free for names in axes), *[free] * (x.ndim - len(axes)))
    )


def _taken(aval: Any, name: str, kind: AxisType) -> str:
    """Returns why an array cannot be distributed over an axis; "" where it can, as far as its type says."""
    if kind == AxisType.Explicit:
        used = {each for entry in aval.sharding.spec for each in ((entry,) if isinstance(entry, str) else entry or ())}
        return f"Its type says that it is distributed over {name!r}." if name in used else ""
    if kind == AxisType.Manual:
        if name not in _varying(jax.typeof(jax.lax.axis_index(name))):
            return "With check_vma=False nobody knows whether the devices have one value. Leave it at True."
        return f"It varies over {name!r}: each device has another one." if name in _varying(aval) else ""
    return ""
