"""A call of a function, separated into arrays and other leaves, with the key of its plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.core import lift, purity
from jaxckpt.core.typed import hashable, typed


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
      taken: the call taken apart, where there are objects among its arguments that it may change; `arrays` and
        `statics` are then those of that.
      fun, args: then, the call that is taken apart: of positional arguments, static leaves wrapped.
      key: what calls with one plan have in common.
    """

    tree: Any
    arrays: list[Any]
    statics: dict[Any, Any]
    avals: tuple[Any, ...]
    taken: lift.Taken | None = None
    fun: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    key: Any = field(init=False)

    def __post_init__(self) -> None:
        statics = tuple((place, typed(_value(leaf))) for place, leaf in self.statics.items())
        object.__setattr__(self, "key", (self.tree, self.avals, statics))

    def without_shardings(self) -> Call | None:
        """Returns the call as it looks where shardings cannot be seen; None where it has none, or explicit ones, which
        always can be.
        """
        shardings = [sharding for _, _, sharding in self.avals if sharding is not None]
        axes = [kind for each in shardings for kind in getattr(getattr(each, "mesh", None), "axis_types", ())]
        if not shardings or jax.sharding.AxisType.Explicit in axes:
            return None
        return Call(
            self.tree,
            self.arrays,
            self.statics,
            tuple((*aval[:2], None) for aval in self.avals),
            self.taken,
            self.fun,
            self.args,
        )

    def whole(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with `arrays` for its arrays."""
        rest = iter(arrays)
        count = len(self.arrays) + len(self.statics)
        leaves = [self.statics[i] if i in self.statics else next(rest) for i in range(count)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return tuple(map(_value, args)), kwargs

    def positional(self) -> tuple[Any, ...]:
        """Returns the arguments without what is static, by position; the keyword ones, if any, as one dictionary after
        the others.
        """
        rest = iter(self.arrays)
        count = len(self.arrays) + len(self.statics)
        leaves = [None if i in self.statics else next(rest) for i in range(count)]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return (*args, kwargs) if jax.tree.leaves(kwargs) else tuple(args)


def parse(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: inspect.Signature | None,
    static: tuple[int, ...],
    fun: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs),
    *,
    numbers: bool = True,
) -> Call:
    """Takes a call apart.

    Args:
      args, kwargs: of the call.
      signature: the function's, by which keyword arguments are taken as positional ones where they can be; None where
        it has none.
      static: numbers of positional arguments that are static as a whole.
      fun: the function; only calls with objects among their arguments depend on it.
      numbers: whether Python's numbers, not bools, are taken for arrays.

    Raises:
      ArgumentError: a number is out of range, or something that is no array cannot be hashed.
    """
    args, kwargs = lift.by_position(signature, args, kwargs)
    for number in static:
        if not -len(args) <= number < len(args):
            raise ArgumentError(
                "static_argnums", f"within the {len(args)} positional arguments of the call", number,
                "Pass that argument by position.",
            )  # fmt: skip
    places = {number % len(args) for number in static}
    args = tuple(_Static(arg) if i in places else arg for i, arg in enumerate(args))
    statics: dict[Any, Any]
    described = lambda leaf: _aval(leaf) if numbers or not lift.is_number(leaf) else None
    bare, whole_args = lift.unbound(fun, args)
    if lift.has_objects((whole_args, kwargs)):
        of_positions = _of_positions(purity.refusing(bare), bool(kwargs))
        whole_args = (*whole_args, kwargs) if kwargs else whole_args
        # Wrapped, so that who plans takes nothing for an array that is none here.
        whole_args = lift.map_leaves(
            lambda leaf: leaf if described(leaf) is not None else _Static(_value(leaf)), whole_args
        )
        taken = lift.take(of_positions, whole_args, {})
        assert taken.lifted is not None, "objects are no arrays"
        arrays, tree = jax.tree.leaves(taken.args), taken.key
        statics = dict(taken.lifted.spec.constants)
        call = functools.partial(
            Call, tree, arrays, statics, tuple(map(_aval, arrays)), taken, of_positions, whole_args
        )
    else:
        leaves, tree = jax.tree.flatten((args, kwargs))
        avals = list(map(described, leaves))
        statics = {place: leaf for place, (leaf, aval) in enumerate(zip(leaves, avals)) if aval is None}
        arrays = [leaf for leaf, aval in zip(leaves, avals) if aval is not None]
        call = functools.partial(Call, tree, arrays, statics, tuple(aval for aval in avals if aval is not None))
    if unhashable := [value for value in (*map(_value, statics.values()), tree) if not hashable(value)]:
        raise ArgumentError("args", "arrays, numbers, or else hashable", unhashable)
    return call()


def _of_positions(fun: Callable[..., Any], keywords: bool) -> Callable[..., Any]:
    """Returns the function for arguments that may be static as a whole; with `keywords` the last one is the dictionary
    of those by keyword.
    """

    def call(*args: Any) -> Any:
        *given, last = lift.map_leaves(_value, args)
        return fun(*given, **last) if keywords else fun(*given, last)

    call.__name__ = call.__qualname__ = lift.title(fun)
    return call


def _aval(leaf: Any) -> tuple[Any, bool, Any] | None:
    """Returns (abstract value, whether its type is weak, sharding over several devices or None); None for what is no
    array.
    """
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        if _compat.is_tracer(leaf):
            return aval, aval.weak_type, None
        sharding = leaf.sharding if getattr(leaf, "committed", False) else None
        several = sharding is not None and sharding.num_devices > 1
        return aval, aval.weak_type, sharding if several else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval = _compat.shaped_array(leaf.shape, leaf.dtype, bool(leaf.weak_type))
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
    if sharding is None:
        sharding = _compat.explicit_sharding(aval)  # it is part of the type, in a trace too
    rest: dict[str, Any] = {"sharding": sharding, "weak_type": weak} | _compat.manual_axes(aval)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **rest)


def shapes_of(call: Call) -> Any:
    """Returns the arguments of a call's function of arrays (of `call.taken.fun`, where there are objects), as
    shapes.
    """
    return jax.tree.map(abstract, call.positional() if call.taken is None else call.taken.args)


@dataclass(frozen=True)
class Closed:
    """A call as what is planned.

    Attributes:
      fun, args: a function of positional arguments, pytrees of arrays and objects, and its arguments.
      shapes: the arguments with shapes for arrays.
      closes: whether the function closes over values being traced. Those are one argument more.
      bound: whether it uses axes of a `jax.vmap` or `jax.shard_map` around it, and so cannot be compiled by itself.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    shapes: tuple[Any, ...]
    closes: bool
    bound: bool


def closed(call: Call, fun: Callable[..., Any]) -> Closed:
    """Returns a call as what is planned.

    A function that closes over values being traced (a lambda within a train step does) gets those as one argument more,
    so that it can be planned by itself. It is traced for that at each call.
    """
    taken = call.taken

    refusing = purity.refusing(fun)

    def of_arrays(*args: Any) -> Any:
        whole_args, kwargs = call.whole(jax.tree.leaves(args))
        return refusing(*whole_args, **kwargs)

    functools.update_wrapper(of_arrays, fun)
    shapes = shapes_of(call)
    jaxpr, out = jax.make_jaxpr(of_arrays if taken is None else taken.fun, return_shape=True)(*shapes)
    captured = _compat.jaxpr_consts(jaxpr)
    closes = any(map(_compat.is_tracer, captured))
    bound = _compat.within_named_axes(_compat.open_jaxpr(jaxpr))
    out_tree = jax.tree.structure(out)
    run = functools.partial(_compat.eval_jaxpr, _compat.open_jaxpr(jaxpr))
    if taken is None:

        def of_everything(*args: Any) -> Any:
            *given, captured = args
            return jax.tree.unflatten(out_tree, run(captured, *jax.tree.leaves(given)))

        args = call.positional()
        if not closes:
            return Closed(of_arrays, args, shapes, False, bound)
        functools.update_wrapper(of_everything, fun)
        return Closed(of_everything, (*args, captured), (*shapes, jax.tree.map(abstract, captured)), True, bound)

    assert call.fun is not None and taken.lifted is not None
    abstract_args, _ = taken.restore((shapes, {}))
    if not closes:
        return Closed(call.fun, call.args, abstract_args, False, bound)
    positions, results = call.fun, taken.lifted.results

    def of_objects(*args: Any) -> Any:
        *given, captured = args
        again = lift.take(positions, tuple(given), {})
        assert again.lifted is not None
        again.lifted.results = results
        return again.finish(run(captured, *jax.tree.leaves(again.args)))

    return Closed(of_objects, (*call.args, captured), (*abstract_args, jax.tree.map(abstract, captured)), True, bound)
