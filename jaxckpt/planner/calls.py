"""A call of a function, taken apart: what is an array and what is not, what calls with one plan have in common."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError


@dataclass(frozen=True, eq=False)
class _Static:
    """An argument that is static as a whole, whatever it is."""

    value: Any


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Static) else leaf


@dataclass(frozen=True, eq=False)
class Call:
    """A call, taken apart.

    Attributes:
      tree: structure of (args, kwargs).
      arrays: the leaves that are arrays or numbers, in order.
      statics: place among all leaves -> a leaf that is neither.
      avals: of `arrays`: (abstract value, whether its type is weak, sharding or None).
      key: what calls with one plan have in common.
    """

    tree: Any
    arrays: list[Any]
    statics: dict[int, Any]
    avals: tuple[Any, ...]
    key: Any = field(init=False)

    def __post_init__(self) -> None:
        # 1 and True are equal, and not the same argument.
        statics = tuple((place, type(_value(leaf)), _value(leaf)) for place, leaf in self.statics.items())
        object.__setattr__(self, "key", (self.tree, self.avals, statics))

    def without_shardings(self) -> Call | None:
        """Returns the call as it looks where shardings cannot be seen; None where it has none, or explicit ones, which always can be."""
        shardings = [sharding for _, _, sharding in self.avals if sharding is not None]
        axes = [kind for each in shardings for kind in getattr(getattr(each, "mesh", None), "axis_types", ())]
        if not shardings or jax.sharding.AxisType.Explicit in axes:
            return None
        return Call(self.tree, self.arrays, self.statics, tuple((*aval[:2], None) for aval in self.avals))

    def whole(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with `arrays` for its arrays."""
        rest = iter(arrays)
        count = len(self.arrays) + len(self.statics)
        leaves = [self.statics[i] if i in self.statics else next(rest) for i in range(count)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return tuple(map(_value, args)), kwargs

    def positional(self) -> tuple[Any, ...]:
        """Returns the arguments without what is static, by position; the keyword ones, if any, as one dictionary after the others."""
        rest = iter(self.arrays)
        count = len(self.arrays) + len(self.statics)
        leaves = [None if i in self.statics else next(rest) for i in range(count)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return (*args, kwargs) if jax.tree.leaves(kwargs) else tuple(args)


def parse(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: inspect.Signature | None, static: tuple[int, ...]
) -> Call:
    """Takes a call apart.

    Args:
      args, kwargs: of the call.
      signature: the function's, by which keyword arguments are taken as positional ones where they can be; None where it has none.
      static: numbers of positional arguments that are static as a whole.

    Raises:
      ArgumentError: a number is out of range, or something that is no array cannot be hashed.
    """
    if kwargs and signature is not None:
        # The first argument is the first, however it is passed. A call that does not fit is the function's own error, later.
        with contextlib.suppress(TypeError):
            bound = signature.bind(*args, **kwargs)
            args, kwargs = bound.args, dict(bound.kwargs)
    for number in static:
        if not -len(args) <= number < len(args):
            raise ArgumentError(
                "static_argnums", f"within the {len(args)} positional arguments of the call", number,
                "Pass that argument by position.",
            )  # fmt: skip
    places = {number % len(args) for number in static}
    args = tuple(_Static(arg) if i in places else arg for i, arg in enumerate(args))
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays, avals, statics = [], [], {}
    for place, leaf in enumerate(leaves):
        aval = _aval(leaf)
        if aval is not None:
            arrays.append(leaf)
            avals.append(aval)
            continue
        statics[place] = leaf
    if unhashable := [_value(leaf) for leaf in statics.values() if not _hashable(_value(leaf))]:
        raise ArgumentError("args", "arrays, numbers, or else hashable", unhashable)
    return Call(tree, arrays, statics, tuple(avals))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _aval(leaf: Any) -> tuple[Any, bool, Any] | None:
    """Returns (abstract value, whether its type is weak, sharding over several devices or None); None for what is no array."""
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        if _compat.is_tracer(leaf):
            return aval, aval.weak_type, None
        sharding = leaf.sharding if getattr(leaf, "committed", False) else None
        several = sharding is not None and sharding.num_devices > 1
        return aval, aval.weak_type, sharding if several else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval = jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(leaf.weak_type))
        sharding = leaf.sharding
        several = sharding is not None and sharding.num_devices > 1
        return aval, aval.weak_type, sharding if several else None
    if isinstance(leaf, (np.ndarray, np.generic, int, float, complex)) and not isinstance(leaf, bool):
        aval = jax.typeof(leaf)
        return aval, aval.weak_type, None
    return None


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of an array or a number."""
    described = _aval(leaf)
    assert described is not None, "static leaves are not among the arguments of what is planned"
    aval, weak, sharding = described
    if sharding is None and not aval.sharding.mesh.empty:
        sharding = aval.sharding  # explicit sharding is part of the type, in a trace too
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def array(leaf: Any) -> Any:
    """Returns an array of JAX's, from itself, from one of NumPy's, or from a number (whose type stays weak)."""
    return leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf)


def closed(call: Call, fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """Returns a function of positional pytrees of arrays, its arguments, and whether it had to be closed.

    A function that closes over values being traced (a lambda within a train step does) gets those as one argument more, so that it can
    be planned by itself. It is traced for that at each call.
    """

    def of_arrays(*args: Any) -> Any:
        whole_args, kwargs = call.whole(jax.tree.leaves(args))
        return fun(*whole_args, **kwargs)

    functools.update_wrapper(of_arrays, fun)
    args = call.positional()
    jaxpr, out = jax.make_jaxpr(of_arrays, return_shape=True)(*jax.tree.map(abstract, args))
    consts = _compat.jaxpr_consts(jaxpr)
    if not any(map(_compat.is_tracer, consts)):
        return of_arrays, args, False
    out_tree = jax.tree.structure(out)

    def of_everything(*args: Any) -> Any:
        *given, captured = args
        flat = _compat.eval_jaxpr(_compat.open_jaxpr(jaxpr), captured, *jax.tree.leaves(given))
        return jax.tree.unflatten(out_tree, flat)

    return functools.update_wrapper(of_everything, fun), (*args, consts), True


def signature_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    """Returns a function's signature, or None where it has none."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some builtins have none
        return None
