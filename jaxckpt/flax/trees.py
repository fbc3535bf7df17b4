"""Convert trees of unrolled layers and of stacked layers: variables, gradients, optimizer states, nnx states.

A tree is seen as leaves at paths, such as "params/Block_3/Dense_0/kernel". A pattern with "{}" for the number says
which part of a path is the layer. So the same rule works for linen's names ("Block_{}"), nnx's lists ("blocks/{}"), all
collections, and optimizer states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict, freeze

from jaxckpt._compat import flax as _compat
from jaxckpt._errors import ArgumentError, InWords, did_you_mean

Tree = TypeVar("Tree")
_Path = tuple[Any, ...]
_Leaves = dict[_Path, Any]

AXIS = {_compat.PARTITION_NAME: None}  # the metadata of partitioned variables for the axis of layers


def stack_layers(tree: Tree, names: str, into: str | None = None) -> Tree:
    """Returns a tree with the leaves of equal layers stacked along a new axis 0, for a model with `scan_layers`.

    Args:
      tree: any pytree with dicts or nnx states in it: variables of one or all collections, gradients, an optimizer's
        state, a `TrainState`. Its leaves are arrays or `jax.ShapeDtypeStruct`. Layers are stacked wherever they are.
      names: the path of the layers, with "{}" for the number: "Block_{}" for linen's `Block_0`, `Block_1`, ...;
        "blocks/{}" for an nnx list `blocks`; "encoder/Block_{}" for the layers of the encoder only.
      into: the path of the stack. By default it is the path that `scan_layers` gives it: "BlockStack_0" for "Block_{}",
        "blocks" for "blocks/{}".

    Returns:
      A tree of the same kind. In an nnx state, Variables that the layers share do not change.

    Raises:
      ArgumentError: there are no such layers, one is missing, two differ in structure, shape or dtype, or the path of
        the stack is not free.

    >>> import jax.numpy as jnp
    >>> params = {"Block_0": {"bias": jnp.zeros(4)}, "Block_1": {"bias": jnp.ones(4)}, "head": jnp.ones(2)}
    >>> stacked = stack_layers(params, "Block_{}")
    >>> stacked["BlockStack_0"]["bias"].shape, sorted(stacked)
    ((2, 4), ['BlockStack_0', 'head'])
    >>> sorted(unstack_layers(stacked, "Block_{}"))
    ['Block_0', 'Block_1', 'head']
    """
    layer, stack = _patterns(names, into)
    return _converted(tree, names, lambda leaves, shared: _stack(leaves, layer, stack, shared))


def unstack_layers(tree: Tree, names: str, into: str | None = None) -> Tree:
    """Returns a tree with stacked layers as separate layers: the reverse of `stack_layers`, with the same arguments.

    Raises:
      ArgumentError: there is no such stack, its leaves have different numbers of rows, or layers of these names exist.
    """
    layer, stack = _patterns(names, into)
    return _converted(tree, "/".join(stack), lambda leaves, shared: _unstack(leaves, layer, stack, shared))


def pattern_parts(names: Any, argument: str) -> tuple[str, ...]:
    """Returns the parts of a pattern for the paths of layers.

    Raises:
      ArgumentError: it does not have exactly one "{}".
    """
    if not isinstance(names, str) or re.sub(r"\{\}", "", names, count=1).count("{") or "{}" not in names:
        raise ArgumentError(argument, 'a path with one "{}" for the number of the layer, such as "Block_{}"', names)
    return tuple(names.split("/"))


def _patterns(names: str, into: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the paths of a layer, with "{}", and of the stack."""
    layer = pattern_parts(names, "names")
    if into is not None:
        if not isinstance(into, str) or not into or "{" in into:
            raise ArgumentError("into", "the path of the stack, without a number", into)
        return layer, tuple(into.split("/"))
    *parents, last = layer
    if last == "{}" and parents:
        return layer, tuple(parents)
    if last.endswith("_{}") and last != "_{}":
        return layer, (*parents, f"{last[:-3]}Stack_0")
    hint = 'It has a default for names like "Block_{}" or "blocks/{}".'
    raise ArgumentError("into", f"given for layers with the names {names!r}", into, hint)


# ------------------------------------------------------------------------------------------------ trees and their paths


def _converted(tree: Any, wanted: str, convert: Callable[[_Leaves, bool], _Leaves | None]) -> Any:
    """Returns the tree with `convert` applied to the leaves, by path, of each outermost mapping.

    Raises:
      ArgumentError: `convert` found nothing to convert in the tree.
    """
    found, known = False, set[str]()

    def visit(node: Any) -> Any:
        nonlocal found
        if isinstance(node, Mapping):
            leaves = dict(_walk(node))
            known.update(str(part) for path in leaves for part in path)
            new = convert(leaves, isinstance(node, nnx.State))
            found |= new is not None
            nested = _nested(
                {path: leaf if _is_variable(leaf) else visit(leaf) for path, leaf in (new or leaves).items()}
            )
            return freeze(nested) if isinstance(node, FrozenDict) else type(node)(nested)  # type: ignore[call-arg]
        children, structure = jax.tree.flatten(node, is_leaf=lambda child: child is not node)
        return (
            node
            if len(children) == 1 and children[0] is node
            else jax.tree.unflatten(structure, [visit(child) for child in children])
        )

    out = visit(tree)
    if not found:
        raise ArgumentError("tree", f"a tree that contains {wanted!r}", type(tree), did_you_mean(wanted, sorted(known)))
    return out


def _walk(node: Mapping[Any, Any], path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yields the leaves of nested mappings with their paths. An empty mapping is a leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _walk(value, (*path, key))
        else:
            yield (*path, key), value


def _nested(leaves: _Leaves) -> dict[Any, Any]:
    """Undoes `_walk`."""
    out: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = out
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return out


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _match(path: _Path, pattern: Sequence[str]) -> tuple[_Path, int, _Path] | None:
    """Returns the part of a path before the first match of a pattern, the number in the match (0 without one), and the
    part after it.
    """
    regexes = [re.escape(part).replace(r"\{\}", "(0|[1-9][0-9]*)") for part in pattern]
    for at in range(len(path) - len(pattern) + 1):
        found = [re.fullmatch(regex, str(key)) for regex, key in zip(regexes, path[at:])]
        if all(found):
            number = next((int(one[1]) for one in found if one and one.groups()), 0)
            return path[:at], number, path[at + len(pattern) :]
    return None


def _show(path: _Path) -> str:
    return "/".join(map(str, path))


# ---------------------------------------------------------------------------------------------------------- conversions


def _stack(leaves: _Leaves, layer: Sequence[str], stack: Sequence[str], shared: bool) -> _Leaves | None:
    """Returns the leaves, with those of layers stacked; None if there are no layers.

    Args:
      shared: whether all layers share a leaf that only layer 0 has, as in nnx states.
    """
    found = {path: _match(path, layer) for path in leaves}
    layers: dict[_Path, dict[int, _Leaves]] = {}
    for path, match in found.items():
        if match is not None:
            before, number, rest = match
            layers.setdefault(before, {}).setdefault(number, {})[rest] = leaves[path]
    rows = {before: _rows(each, (*before, *layer), shared) for before, each in layers.items()}
    out: _Leaves = {}
    for path, match in found.items():
        if match is None:
            _check_free(path, stack, layers)
            out[path] = leaves[path]
        else:
            before = match[0]
            out.update({(*before, *stack, *rest): leaf for rest, leaf in rows.pop(before, {}).items()})
    return out if layers else None


def _rows(layers: dict[int, _Leaves], pattern: _Path, shared: bool) -> _Leaves:
    """Returns the leaves of a stack of layers."""
    name = lambda i, rest=(): _show((*pattern, *rest)).replace("{}", str(i), 1)
    missing = [i for i in range(max(layers)) if i not in layers]
    if missing:
        rule = f"a tree with all layers from {name(0)!r} to {name(max(layers))!r}"
        raise ArgumentError(
            "tree", rule, InWords(f"no {name(missing[0])!r}"), "Layers are numbered from 0, without a gap."
        )
    rest_of = [set(layer) for layer in layers.values()]
    everywhere, anywhere = set.intersection(*rest_of), set.union(*rest_of)
    alone = (
        {rest for rest in layers[0] if shared and all(rest not in layers[i] for i in layers if i)}
        if len(layers) > 1
        else set()
    )
    for rest in sorted(anywhere - everywhere - alone, key=_show):
        i = next(i for i in sorted(layers) if rest not in layers[i])
        there = next(i for i in sorted(layers) if rest in layers[i])
        got = InWords(f"{name(there, rest)!r}, but no {name(i, rest)!r}")
        raise ArgumentError("tree", "one whose layers have the same leaves", got, "Only equal layers can be stacked.")
    out: _Leaves = {}
    for rest, first in layers[0].items():
        if rest in alone:
            out[rest] = first
            continue
        values = [layers[i][rest] for i in range(len(layers))]
        for i, value in enumerate(values):
            if _shapes(value) != _shapes(first):
                got = InWords(f"{_shapes(first)} at {name(0, rest)!r} and {_shapes(value)} at {name(i, rest)!r}")
                raise ArgumentError(
                    "tree", "one whose layers have the same shapes and dtypes", got, "Only equal layers can be stacked."
                )
        out[rest] = stacked(values)
    return out


def _unstack(leaves: _Leaves, layer: Sequence[str], stack: Sequence[str], shared: bool) -> _Leaves | None:
    """Returns the leaves, with those of stacks as separate layers; None if there are no stacks."""
    found = {path: _match(path, stack) for path in leaves}
    stacks: dict[_Path, _Leaves] = {}
    for path, match in found.items():
        if match is not None:
            stacks.setdefault(match[0], {})[match[2]] = leaves[path]
    counts = {before: _count(rows, (*before, *stack), shared) for before, rows in stacks.items()}
    out: _Leaves = {}
    for path, leaf in leaves.items():
        _check_free(path, layer, stacks)
        match = found[path]
        if match is None:
            out[path] = leaf
            continue
        before, _, rest = match
        alone = shared and not _rank(leaf)
        for i in range(1 if alone else counts[before]):
            named = tuple(i if part == "{}" else part.replace("{}", str(i)) for part in layer)
            out[(*before, *named, *rest)] = leaf if alone else _row(leaf, i)
    return out if stacks else None


def _count(leaves: _Leaves, path: _Path, shared: bool) -> int:
    """Returns the number of layers in a stack."""
    counts: dict[int, str] = {}
    for rest, leaf in leaves.items():
        for value in jax.tree.leaves(leaf):
            if jnp.ndim(value) or not shared:
                counts.setdefault(jnp.shape(value)[0] if jnp.ndim(value) else 0, _show((*path, *rest)))
    if len(counts) != 1 or 0 in counts:
        rows = ", ".join(f"{count or 'no'} rows at {where!r}" for count, where in counts.items())
        got = InWords(rows or "no arrays")
        raise ArgumentError("tree", f"a tree in which all leaves under {_show(path)!r} have a row for each layer", got)
    return next(iter(counts))


def _check_free(path: _Path, pattern: Sequence[str], converted: Mapping[_Path, Any]) -> None:
    """Checks that a leaf is not at the path of the converted leaves."""
    match = _match(path, pattern)
    if match is not None and match[0] in converted:
        rule = f"a tree without leaves at {_show((*match[0], *pattern))!r}, where the result goes"
        raise ArgumentError("tree", rule, InWords(f"a leaf at {_show(path)!r}"), "Was it converted before?")


# --------------------------------------------------------------------------------------------------------------- leaves


def stacked(leaves: Sequence[Any]) -> Any:
    """Returns equal leaves stacked along a new axis 0: arrays, shapes, boxed arrays, nnx Variables."""
    if _is_variable(leaves[0]):
        new = _copy(leaves[0])
        new.set_raw_value(jax.tree.map(_stacked, *(leaf.get_raw_value() for leaf in leaves)))
        return _compat.add_variable_axis(new, 0, AXIS)
    return _compat.add_axis(jax.tree.map(_stacked, *leaves), 0, AXIS)


def _row(leaf: Any, i: int) -> Any:
    """Returns the leaf of layer i from a stacked leaf."""
    take = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[i]
    if _is_variable(leaf):
        new = _copy(leaf)
        new.set_raw_value(jax.tree.map(take, leaf.get_raw_value()))
        return _compat.remove_variable_axis(new, 0, AXIS)
    return jax.tree.map(take, _compat.remove_axis(leaf, 0, AXIS))


def _copy(variable: Any) -> Any:
    structure = jax.tree.structure(variable)
    return jax.tree.unflatten(structure, jax.tree.leaves(variable))


def _stacked(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
    return np.stack(leaves) if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp.stack(leaves)


def _rank(leaf: Any) -> int:
    return max((jnp.ndim(value) for value in jax.tree.leaves(leaf)), default=0)


def _shapes(leaf: Any) -> str:
    """Returns the shapes and dtypes in a leaf, for messages and comparisons."""
    shapes = [f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}" for x in jax.tree.leaves(leaf)]
    return ", ".join(shapes) or type(leaf).__name__
