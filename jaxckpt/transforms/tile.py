"""tile: one function, run tile by tile along an axis of some of its arguments.

No checkpoint lowers what a single stretch needs at once. A tile of the rows needs less: the logits of a language
model's head for some tokens, the scores of some queries, the hidden values of an MLP for some of its inputs.

The function is traced once, with all rows. In `core/tiling/`, the axis is followed through every operation (`axes.py`),
the program is divided (`divide.py`), and the middle part runs as a loop with its own derivative (`loop.py`). The
function is not called again with fewer rows, because it may read their number.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, EffectsError, InWords, JaxckptError, explains
from jaxckpt.core import lift, purity
from jaxckpt.core.argument_names import positional
from jaxckpt.core.constants import DIVISIONS, MOST_PARTS, RUN
from jaxckpt.core.finish import finished_function
from jaxckpt.core.leaves import array, is_array, is_given, is_operand
from jaxckpt.core.tiling.divide import Tiling, divided, undivided
from jaxckpt.core.tiling.shares import WHOLE, Kind, Share, rows, rows_of_tile
from jaxckpt.core.units import counted


@explains
def tile(
    fun: Callable[..., Any] | None = None, /, *, in_axes: Any, tiles: int, out_axes: Any = 0, parts: int | None = None
) -> Callable[..., Any]:
    """Returns `fun`, run tile by tile along an axis of some arguments, so that it needs the memory of one tile.

    Values and gradients are those of `fun`. Results that have the axis are put together from the tiles; sums over the
    axis, and means, are added up; what is computed of complete sums is computed once. Values that do not depend on the
    tiled arguments are computed once, before the tiles.

    In the backward pass, each tile is computed again. If all that has a derivative is one scalar sum, as a loss is,
    each tile's gradients are computed in the forward pass instead, and the backward pass scales them: then nothing is
    computed again. Terms and gradients of arguments without the axis are added up in float32 or wider.

    Args:
      fun: a function of pytrees. If it is omitted, a decorator is returned.
      in_axes: for each positional argument, the axis along which it is tiled: an int, or None for an argument that each
        tile gets whole, or a pytree of these that is a prefix of the argument, as of `jax.vmap`. One int is for all
        arguments. Arguments by keyword are whole.
      tiles: the number of tiles. If it does not divide the axis, the tiles have ceil(rows / tiles) rows, and the last
        one has what is left.
      out_axes: where results have the axis: an int or a pytree of ints that is a prefix of the result. None
        says that a result does not have the axis. Sums and whole values fit any int. It is checked, except for an axis
        of one row, and where an argument has leaves that are no arrays (modules of equinox, nnx).
      parts: where the axis is sharded, into how many equal parts of consecutive rows it is cut. Each tile has rows of
        every part, so that each device computes a part of every tile. It must be a multiple of the number of shards;
        more does no harm. 1: a tile has consecutive rows, and the compiler gathers those of sharded arguments. None:
        the greatest power of two up to 2,048 that leaves each tile several rows of a part, where these are rows of a
        matrix.

    Raises:
      ArgumentError: an axis is not there, sizes differ, `tiles` is not between 1 and the size, `parts` does not divide
        the size or leaves fewer rows than tiles, `out_axes` is wrong, or JAX cannot take apart what an explicit axis
        of a mesh shards.
      TilingError: at the call: an operation couples the rows. The error names the operation and its source line.
      EffectsError: at the call: `fun` has side effects, which each tile would repeat.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.logsumexp(x @ w, axis=-1))
    >>> w, x = jnp.ones((4, 1000)), jnp.ones((60, 4))
    >>> tiled = tile(loss, in_axes=(None, 0), tiles=8)
    >>> round(float(tiled(w, x)), 4) == round(float(loss(w, x)), 4), jax.grad(tiled)(w, x).shape
    (True, (4, 1000))
    """
    if fun is None:
        return functools.partial(tile, in_axes=in_axes, tiles=tiles, out_axes=out_axes, parts=parts)
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun, "Use @tile(in_axes=..., tiles=...).")
    tiles = _count("tiles", "a whole number of at least 1", tiles)
    parts = None if parts is None else _count("parts", "None or a whole number of at least 1", parts)
    in_axes, out_axes = _ints("in_axes", in_axes), _ints("out_axes", out_axes)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if not isinstance(in_axes, (int, tuple)):
        rule = "an int, or a tuple with an entry for each positional argument"
        raise ArgumentError("in_axes", rule, in_axes, "An entry may be a pytree of ints, such as a dict.")
    if all(axis is None for axis in jax.tree.leaves(in_axes)):
        raise ArgumentError("in_axes", "an int for at least one argument", in_axes)
    if lift.is_model(fun):
        call = lambda model, *args, **kwargs: _tiled(model, in_axes, tiles, out_axes, parts)(*args, **kwargs)
        return jax.tree_util.Partial(call, fun)  # may stand in the module's place in a model
    return _tiled(fun, in_axes, tiles, out_axes, parts)


def _tiled(fun: Callable[..., Any], in_axes: Any, tiles: int, out_axes: Any, parts: int | None) -> Callable[..., Any]:
    """Returns the function, tiled; arguments as of `tile`, checked."""
    signature = lift.signature_of(fun)

    @functools.wraps(fun)
    def tiled(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not isinstance(in_axes, int):
            args, kwargs = _by_position(signature, args, kwargs, len(in_axes))
        axes = _axes_of(in_axes, args, fun)
        size = _size(axes)
        if tiles > size:
            raise ArgumentError("tiles", f"at most the size of the axis, {size}", tiles)
        if parts is not None and (size % parts or size // parts < tiles):
            raise ArgumentError("parts", f"a divisor of the {size} rows, with {tiles} rows or more in each part", parts)
        found = _parts(axes, size, tiles) if parts is None else parts

        def use(call: lift.Taken) -> Any:
            return call.finish(_run(call, axes, (size, rows_of_tile(size, tiles, found), found), out_axes))

        return lift.attempt(fun, args, kwargs, use)

    return tiled


def _by_position(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with so many by position, those by keyword among them."""
    if len(args) >= count or signature is None:
        return args, kwargs
    placed, others = lift.by_position(signature, args, kwargs)
    names = list(signature.parameters)[: len(placed)]
    return placed[:count], {**dict(zip(names[count:], placed[count:])), **others}


def _count(name: str, rule: str, value: Any) -> int:
    """Returns a whole number of at least 1.

    Raises:
      ArgumentError: it is none.
    """
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also of a traced array, and of an array of several
        found = 0
    if found < 1:
        hint = "It must be known while the function is traced." if _compat.is_tracer(value) else ""
        raise ArgumentError(name, rule, value, hint)
    return found


def _ints(name: str, axes: Any) -> Any:
    """Returns a pytree of ints and None, with NumPy's integers as ints.

    Raises:
      ArgumentError: there is something else in it.
    """

    def whole(axis: Any) -> int | None:
        if axis is None:
            return None
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise ArgumentError(name, "an int, None, or a pytree of these", axis)
        return int(axis)

    return jax.tree.map(whole, axes, is_leaf=lambda axis: axis is None)


_Axes = list[tuple[Any, int | None, str]]
"""Leaves of the positional arguments, each with its axis and what to call it."""


def _axes_of(in_axes: Any, args: tuple[Any, ...], fun: Callable[..., Any]) -> _Axes:
    """Returns the leaves of the positional arguments with their axes.

    Raises:
      ArgumentError: `in_axes` does not fit the arguments, or an array does not have the axis.
    """
    if not isinstance(in_axes, int) and len(in_axes) != len(args):
        if not lift.accepts(fun, args):
            rule = f"the arguments of fun, {lift.signature_of(fun)}"
            raise ArgumentError("args", rule, InWords(counted(len(args), "positional argument")))
        rule = f"an int, or a tuple with an entry for each of the {len(args)} positional arguments"
        raise ArgumentError("in_axes", rule, in_axes)
    entries = [in_axes] * len(args) if isinstance(in_axes, int) else in_axes
    found: _Axes = []
    for place, (entry, argument) in enumerate(zip(entries, args)):
        leaves = jax.tree_util.tree_leaves_with_path(argument)
        for (path, leaf), axis in zip(leaves, _broadcast(entry, argument, f"in_axes[{place}]")):
            if axis is None:
                found.append((leaf, None, ""))
                continue
            name = positional(place) + jax.tree_util.keystr(path)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                hint = "To trace the tiled function for shapes, use jax.eval_shape or jax.jit(tiled).lower."
                raise ArgumentError(name, "an array", leaf, hint)
            shape = jax.typeof(leaf).shape if is_array(leaf) else tuple(leaf.shape) if is_given(leaf) else None
            if shape is None or not -len(shape) <= axis < len(shape):
                came = leaf if shape is None else InWords(f"an array of shape {list(shape)}")
                hint = "Give None in in_axes for what has no axis."
                raise ArgumentError(name, f"an array that has axis {axis}, as in_axes says", came, hint)
            found.append((leaf, axis % len(shape), name))
    if all(axis is None for _, axis, _ in found):
        raise ArgumentError("in_axes", "an int for at least one array", in_axes)
    return found


def _broadcast(prefix: Any, tree: Any, name: str) -> list[Any]:
    """Returns an entry for each leaf of a tree, from a prefix of it.

    Raises:
      ArgumentError: it is no prefix.
    """
    found: list[Any] = []
    none = lambda axis: axis is None
    try:
        jax.tree.map(lambda axis, part: found.extend([axis] * len(jax.tree.leaves(part))), prefix, tree, is_leaf=none)
    except ValueError as error:
        raise ArgumentError(name, f"a prefix of {jax.tree.structure(tree)}", prefix) from error
    return found


def _size(axes: _Axes) -> int:
    """Returns the size of the axis.

    Raises:
      ArgumentError: sizes differ.
    """
    tiled = [(leaf, axis, path) for leaf, axis, path in axes if axis is not None]
    first, axis, name = tiled[0]
    if not isinstance(first.shape[axis], int):
        rule = f"an array whose number of rows along axis {axis}, which is tiled, is known"
        raise ArgumentError(name, rule, InWords(f"an array of shape {list(first.shape)}"), "Tile another axis.")
    size = int(first.shape[axis])
    for leaf, other, path in tiled:
        if leaf.shape[other] != size:
            rule = f"an array with {size} rows along axis {other}, as {name} has along axis {axis}"
            raise ArgumentError(path, rule, InWords(f"an array of shape {list(leaf.shape)}"))
    return size


def _parts(axes: _Axes, size: int, tiles: int) -> int:
    """Returns into how many parts the axis is cut. Nothing says while tracing how an array is sharded, and the program
    must not depend on the devices that are there. So there are as many parts as do no harm: a matrix is read in runs
    of some rows.
    """
    if not _compat.MERGES_SHARDED and any(axis is not None and _is_explicit(leaf) for leaf, axis, _ in axes):
        return 1
    shapes = [(leaf.shape, axis) for leaf, axis, _ in axes if axis is not None]
    largest, dim = max(shapes, key=lambda each: math.prod(each[0]))
    run = RUN.get(len(largest) - dim, 1)
    parts = math.gcd(size, MOST_PARTS)
    while parts > 1 and size < parts * tiles * run:
        parts //= 2
    return parts


def _shares(axes: _Axes, call: lift.Taken) -> tuple[Share, ...]:
    """Returns what a tile has of the arrays of a call.

    Raises:
      ArgumentError: an array is given twice, with different axes, in a call that has leaves that are no arrays.
    """
    leaves = jax.tree.leaves((call.args, call.kwargs))
    shares = [WHOLE if axis is None else rows(axis) for _, axis, _ in axes]
    if call.whole:
        return (*shares, *[WHOLE] * (len(leaves) - len(shares)))
    by_array: dict[int, Share] = {}
    for (leaf, _, path), share in zip(axes, shares):
        if is_array(leaf) and by_array.setdefault(id(leaf), share) != share:
            raise ArgumentError(path, "another array than one that is given with another axis", leaf, "Give a copy.")
    return tuple(by_array.get(id(leaf), WHOLE) for leaf in leaves)


_Cut = tuple[int, int, int]
"""Rows of the axis, rows of a tile, parts of the axis."""


def _run(call: lift.Taken, axes: _Axes, cut: _Cut, out_axes: Any) -> Any:
    """Returns the result of a call of arrays, tile by tile.

    Raises:
      ArgumentError: an array is given twice with different axes, or JAX cannot take apart what a mesh shards.
    """
    shares = _shares(axes, call)
    leaves, in_tree = jax.tree.flatten((call.args, call.kwargs))
    holder = _divisions(call.fun)
    axes_leaves, axes_tree = jax.tree.flatten(out_axes, is_leaf=lambda axis: axis is None)
    key = (in_tree, tuple(map(jax.typeof, leaves)), shares, cut, tuple(axes_leaves), axes_tree)
    found = holder.get(key)
    if found is None:
        found = _divide(call, leaves, in_tree, shares, cut, out_axes)
        if not any(map(_compat.is_tracer, found[0].consts)):
            holder[key] = found
            if len(holder) > DIVISIONS:  # batches of ever other sizes
                del holder[next(iter(holder))]
    tiling, run, out_tree = found
    try:
        made = run(*tiling.consts, *leaves)
    except Exception as error:
        sharded = next((leaf for leaf, axis, _ in axes if axis is not None and _is_explicit(leaf)), None)
        if sharded is None or isinstance(error, JaxckptError) or not _compat.may_be_of_sharding(error):
            raise
        rule = "arrays that no explicit axis of a mesh shards along the tiled axis, as far as this JAX takes them apart"
        hint = "Use a mesh with jax.sharding.AxisType.Auto, or tile inside of jax.shard_map or jax.sharding.auto_axes."
        raise ArgumentError("args", rule, jax.typeof(sharded), hint) from error
    return jax.tree.unflatten(out_tree, map(array, made))


def _is_explicit(leaf: Any) -> bool:
    """Whether the type of an array says how it is sharded."""
    return is_array(leaf) and _compat.explicit_sharding(jax.typeof(leaf)) is not None


@_compat.weakref_lru_cache
def _divisions(fun: Callable[..., Any]) -> dict[Any, tuple[Tiling, Callable[..., list[Any]], Any]]:
    """Returns the cache of divided programs of a function, in the present configuration of JAX. It lives as long as the
    function.
    """
    return {}


def _divide(
    call: lift.Taken,
    leaves: list[Any],
    in_tree: Any,
    shares: tuple[Share, ...],
    cut: _Cut,
    out_axes: Any,
) -> tuple[Tiling, Callable[..., list[Any]], Any]:
    pure = purity.refusing(call.fun)
    trees = []

    def flat(*values: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(in_tree, values)
        out, tree = jax.tree.flatten(pure(*args, **kwargs))
        if strange := [leaf for leaf in out if not is_operand(leaf)]:
            raise ArgumentError("fun", "a function that returns arrays", strange[0])
        trees.append(tree)
        return out

    flat.__name__ = flat.__qualname__ = lift.title(call.fun)
    closed = jax.make_jaxpr(flat)(*leaves)
    if effects := _compat.side_effects(_compat.open_jaxpr(closed)):
        raise EffectsError(
            f"fun ({lift.title(call.fun)}) must have no side effects to be tiled, because each tile would repeat them; "
            f"it has {', '.join(map(str, effects))}. Move io_callback, jax.debug.print and other effects out of it."
        )
    tiling = undivided(closed) if cut[0] == 1 else divided(closed, shares, *cut)
    if call.lifted is None and cut[0] > 1:
        shapes = [atom.aval.shape for atom in tiling.program.outvars]
        _check_out_axes(out_axes, trees[-1], tiling.outs, shapes)
    run = finished_function(lambda *values: tiling.run(*values))
    run.__name__ = run.__qualname__ = f"tiled_{getattr(call.fun, '__name__', 'fun')}"
    return tiling, jax.jit(run), trees[-1]


def _check_out_axes(out_axes: Any, tree: Any, outs: Sequence[Share], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises ArgumentError where results have the axis elsewhere than `out_axes` says."""
    whole = jax.tree.unflatten(tree, range(len(outs)))
    for axis, share, shape, (path, _) in zip(
        _broadcast(out_axes, whole, "out_axes"), outs, shapes, jax.tree_util.tree_leaves_with_path(whole)
    ):
        name = f"the result{jax.tree_util.keystr(path)}"
        if share.kind is Kind.ROWS and axis is None:
            raise ArgumentError("out_axes", f"{share.dim} for {name}, which has the axis there", axis)
        if share.kind is Kind.ROWS and share.dim != (axis % len(shape) if -len(shape) <= axis < 0 else axis):
            raise ArgumentError("out_axes", f"{share.dim} for {name}, which has the axis there", axis)
