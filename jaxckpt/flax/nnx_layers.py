"""A stack of nnx blocks as one scan.

The stack is a block whose Variables hold the values of all layers, one layer in each row. Its layers are made one after
the other, like unrolled layers, so they have the same parameters and streams. A call flattens the graph of objects, as
in `nnx.scan`, and each layer builds it again with its own values. The differences from `nnx.scan` are:

- There is a schedule.
- Variables that are the same object in all layers are found when the stack is made, and are not stacked. If a layer
  changes these Variables, or Variables in a call's arguments, they go from layer to layer. Otherwise each layer reads
  them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jaxckpt._compat.flax import IndexMap, RefMap, is_pytree
from jaxckpt._errors import ArgumentError, InWords
from jaxckpt.core.lift import is_array
from jaxckpt.core.objects import same_graph, same_leaves
from jaxckpt.flax.functional import cached, subclass
from jaxckpt.flax.stack import Stack, check_result
from jaxckpt.flax.trees import stacked

_Path = tuple[Any, ...]

_SHARED = "_jaxckpt_shared"  # attribute of a stack: the paths of the Variables that all layers share


@cached
def stack_class(base: Any, stack: Stack) -> type:
    """Returns a class `<name>Stack` whose `__call__` runs `stack.length` layers of an nnx class."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        layers = [self, *(base(*args, **kwargs) for _ in range(stack.length - 1))]
        setattr(self, _SHARED, _stack(layers, base.__name__))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise ArgumentError("x", f"the first positional argument of a stack of {base.__name__}", tuple(kwargs))
        return _Call(base, stack, self, args[1:], kwargs)(args[0])

    init.__wrapped__, call.__wrapped__ = base.__init__, base.__call__  # type: ignore[attr-defined]
    members = {"__init__": init, "__call__": call}
    made = subclass(stack_class, base, stack, members, pytree=is_pytree(base))
    made.__name__ = f"{base.__name__}Stack"
    return made


# --------------------------------------------------------------------------------------------------------- construction


def _stack(layers: list[Any], name: str) -> tuple[_Path, ...]:
    """Stacks the values of the layers' Variables in those of layer 0. Returns the paths of the Variables that all
    layers share.

    Raises:
      ArgumentError: the layers differ.
    """
    for i, layer in enumerate(layers):
        if different := _difference(layers[0], layer):
            rule = f"a module whose instances differ only in the values of their arrays; {name} 0 and {name} {i} differ in more"
            raise ArgumentError("Block", rule, different)
    leaves = [_leaves(layer) for layer in layers]
    shared = tuple(path for path in leaves[0] if len(layers) > 1 and leaves[0][path] is leaves[1][path])
    new = {path: stacked([each[path] for each in leaves]) for path in leaves[0] if path not in shared}
    for path, leaf in new.items():
        old = leaves[0][path]
        if isinstance(old, nnx.Variable):
            old.set_raw_value(leaf.get_raw_value())
            old.set_metadata(**leaf.get_metadata())
    nnx.update(layers[0], nnx.from_flat_state([(p, x) for p, x in new.items() if not isinstance(x, nnx.Variable)]))
    return shared


def _leaves(module: Any) -> dict[_Path, Any]:
    _, state = nnx.flatten(module, graph=True)
    return dict(zip(state.paths, state.leaves, strict=True))


def _difference(one: Any, other: Any) -> str:
    """Returns a difference between two modules that is not in the values of their arrays; "" if there is none."""
    ones, others = ({path: _describe(leaf) for path, leaf in _leaves(module).items()} for module in (one, other))
    for path in sorted(ones.keys() | others.keys(), key=str):
        if ones.get(path) != others.get(path):
            return f"{'/'.join(map(str, path))}: {ones.get(path, 'nothing')} and {others.get(path, 'nothing')}"
    for (path, a), (_, b) in zip(nnx.iter_modules(one, graph=True), nnx.iter_modules(other, graph=True)):
        for name, value in vars(a).items():
            plain = isinstance(value, (bool, int, float, str, bytes, type(None))) and name != _SHARED
            if plain and value != vars(b).get(name):
                return f"{'/'.join(map(str, (*path, name)))}: {value!r} and {vars(b).get(name)!r}"
    return ""


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, nnx.Variable):
        return str(jax.typeof(leaf)) if is_array(leaf) else repr(leaf)
    return f"{type(leaf).__name__} of {', '.join(str(jax.typeof(x)) for x in jax.tree.leaves(leaf.get_raw_value()))}"


# ---------------------------------------------------------------------------------------------------------------- calls


@jax.tree_util.register_pytree_node_class
class _Values(dict[_Path, Any]):
    """Values by path. It is not a dict, because JAX sorts the keys of a dict, and names and numbers have no common
    order.
    """

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[_Path, ...]]:
        """Returns the values and the paths."""
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[_Path, ...], values: Any) -> _Values:
        """Undoes `tree_flatten`."""
        return cls(zip(paths, values, strict=True))


@dataclass
class _After:
    """The state after a layer in one of its traces: the graph, and the changed Variables that all layers share."""

    graph: Any = None
    order: list[_Path] = field(default_factory=list)
    changed: dict[_Path, Any] = field(default_factory=dict)


class _Call:
    """One call of a stack.

    Args:
      base: the block's class.
      stack: how to run the stack.
      module: the stack.
      args: arguments of the call, without the first.
      kwargs: keyword arguments of the call.
    """

    def __init__(self, base: Any, stack: Stack, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.base, self.stack, self.names = base, stack, list(kwargs)
        self.outside = RefMap()
        self.graph, state = nnx.flatten((module, args, list(kwargs.values())), ref_index=self.outside, graph=True)
        self.leaves: dict[_Path, Any] = dict(zip(state.paths, state.leaves, strict=True))
        if any(isinstance(leaf, nnx.Variable) and (leaf.ref or leaf.hijax) for leaf in state.leaves):
            rule = "modules whose Variables hold arrays, no refs and no hijax types"
            hint = "nnx.with_vars(module, ref=False, hijax=False) converts it."
            raise ArgumentError("arguments", rule, type(module).__name__, hint)
        self.values = {path: _raw(leaf) for path, leaf in self.leaves.items()}
        shared = {(0, *path) for path in getattr(module, _SHARED)}
        own = [path for path in self.values if path[0] == 0 and path not in shared]
        self.rows = _Values((path, self.values[path]) for path in own)
        for path, value in self.rows.items():
            for leaf in jax.tree.leaves(value):
                if not leaf.shape or leaf.shape[0] != stack.length:
                    rule = f"stacked along axis 0, one row for each of the {stack.length} layers of {base.__name__}"
                    hint = "jaxckpt.flax.stack_layers makes such a state from the state of an unrolled model."
                    raise ArgumentError(
                        "state", rule, InWords(f"{'/'.join(map(str, path[1:]))} of shape {leaf.shape}"), hint
                    )
        self.same = {path: value for path, value in self.values.items() if path not in self.rows}

    def __call__(self, x: Any) -> Any:
        """Returns what the last layer returns, and changes the modules as the layers change them."""
        after = _After()
        carried = _Values((path, self.same[path]) for path in self._carried(x))

        def step(state: tuple[Any, _Values], rows: _Values) -> Any:
            x, carried = state
            out, new = self._layer(x, {**self.same, **carried, **rows}, after)
            return (out, _Values((path, after.changed.get(path, old)) for path, old in carried.items())), new

        (out, finally_carried), new = self.stack.run(step, (x, carried), self.rows)
        self._update(after, {**finally_carried, **new})
        return out

    def _carried(self, x: Any) -> list[_Path]:
        """Returns the paths of Variables that are not stacked and that a layer changes. This needs a trace of the
        layer.
        """
        if not any(isinstance(self.leaves[path], nnx.Variable) for path in self.same):
            return []
        after = _After()
        jax.eval_shape(lambda x, rows: self._layer(x, {**self.same, **rows}, after)[0], x, self._row())
        return list(after.changed)

    def _row(self) -> _Values:
        """Returns the shapes of one layer's values."""
        return jax.eval_shape(lambda rows: jax.tree.map(lambda value: value[0], rows), self.rows)

    def _layer(self, x: Any, values: dict[_Path, Any], after: _After) -> tuple[Any, _Values]:
        """Runs a layer. Returns its result, and its own values that are new."""
        inside = IndexMap()
        # Copies, because a Variable may hold a container that is changed in place, as in `nnx.capture`.
        copies = [jax.tree.map(lambda value: value, values[path]) for path in self.leaves]
        module, args, keywords = nnx.unflatten(self.graph, copies, index_ref=inside)
        out = self.base.__call__(module, x, *args, **dict(zip(self.names, keywords, strict=True)))
        check_result(self.base.__name__, x, out)
        outer = RefMap.from_indexmap(inside)
        after.graph, state = nnx.flatten(
            (module, args, keywords), ref_index=RefMap(), ref_outer_index=outer, graph=True
        )
        after.order = list(state.paths)
        now = {path: _raw(leaf) for path, leaf in zip(state.paths, state.leaves, strict=True)}
        new = {path: value for path, value in now.items() if not same_leaves(value, values.get(path))}
        after.changed = {path: value for path, value in new.items() if path in self.same}
        return out, _Values((path, value) for path, value in new.items() if path not in self.same)

    def _update(self, after: _After, new: dict[_Path, Any]) -> None:
        """Sets the values that have changed. If a layer added or removed Variables, it sets the objects."""
        objects = IndexMap.from_refmap(self.outside)
        kept = same_graph(after.graph, self.graph.with_same_outer_index())
        if not kept or any(not isinstance(self.leaves[path], nnx.Variable) for path in new):
            leaves = [new.get(path, self.values.get(path)) for path in after.order]
            nnx.unflatten(after.graph, leaves, index_ref=IndexMap(), outer_index_outer_ref=objects)
            return
        for path, value in new.items():
            self.leaves[path].set_raw_value(value)


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
