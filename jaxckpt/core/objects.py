"""Objects of nnx among the arguments of a call: modules, Variables, optimizers.

What the call reads of them becomes operands, and what it changes in them is put back.

`jaxckpt.core.lift` imports this file once the user has imported flax; before, there are no such objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from jaxckpt._compat.flax import IndexMap, RefMap, is_node_module
from jaxckpt._errors import ArgumentError
from jaxckpt.core.leaves import Whole, defines_call, is_given
from jaxckpt.core.typed import typed


def is_object(leaf: Any) -> bool:
    """Returns whether a leaf is an object that may change: a module, a Variable, an optimizer."""
    return isinstance(leaf, nnx.Variable) or is_node_module(leaf)


def has_modules(tree: Any) -> bool:
    """Returns whether there are modules in a pytree, and not only Variables."""
    return any(is_node_module(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_object))


def is_closed_over(error: Exception) -> bool:
    """Returns whether an error says that an object changes which the traced function closes over."""
    return isinstance(error, TraceContextError)


def gradient(values: bool) -> Callable[..., Any]:
    """Returns nnx's gradient of a function, with values or without, jitted as its users jit it: what `nnx.jit` returns
    beside the gradients, the values of all Variables, takes memory too.

    Arguments without arrays, such as flags, are constants of what is jitted. Where an argument has both, it is not
    jitted.
    """
    made = nnx.value_and_grad if values else nnx.grad

    def of(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            leaves = [jax.tree.leaves(arg, is_leaf=is_object) for arg in args]
            moving = [any(is_object(leaf) or is_given(leaf) for leaf in each) for each in leaves]
            given = [leaf for each, moves in zip(leaves, moving) if moves for leaf in each]
            if not all(is_object(leaf) or is_given(leaf) for leaf in given):
                return made(fun, **options)(*args, **kwargs)

            def filled(*some: Any) -> Any:
                rest = iter(some)
                return fun(*(next(rest) if moves else arg for arg, moves in zip(args, moving)), **kwargs)

            return nnx.jit(made(filled, **options))(*(arg for arg, moves in zip(args, moving) if moves))

        return step

    return of


def unbound(fun: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and its arguments, a module that it is bound to or is itself among them."""
    if isinstance(fun, nnx.Module) and defines_call(type(fun)):
        return type(fun).__call__, (fun, *args)
    owner = getattr(fun, "__self__", None)
    return (fun.__func__, (owner, *args)) if isinstance(owner, nnx.Module) and hasattr(fun, "__func__") else (fun, args)


class Objects:
    """Objects among the arguments of a call: what it reads of them, as operands, and what it changes in them.

    Args:
      tree: a pytree of them, and of arrays.
      label: a path in the tree -> what to call what is there.

    Attributes:
      operands: label -> a Variable's value, or an array.
      key: equal for trees of one structure, whose attributes that are no arrays have one type and value.
    """

    def __init__(self, tree: Any, label: Callable[[tuple[Any, ...]], str]) -> None:
        outside = RefMap()
        before, state = nnx.flatten(tree, ref_index=outside, graph=True)
        labels: dict[str, None] = {}
        for path, leaf in zip(state.paths, state.leaves, strict=True):
            name = label(path)
            if isinstance(leaf, nnx.Variable) and (leaf.ref or leaf.hijax):
                rule = "modules whose Variables hold arrays, no refs and no hijax types"
                got = [type(x).__name__ for x in jax.tree.leaves(tree, is_leaf=is_object)]
                got.append(f"{name}: {type(leaf).__name__}")
                hint = "nnx.with_vars(module, ref=False, hijax=False) makes it so."
                raise ArgumentError("arguments", rule, got, hint)
            labels[name if name not in labels else f"{name}#{len(labels)}"] = None
        self._outside, self._leaves, self._before = outside, state.leaves, before
        self.key = typed((*before.nodes, *before.attributes))
        values = [leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for leaf in state.leaves]
        self.operands = dict(zip(labels, values, strict=True))
        names = list(labels)

        # Functions of the structure alone, for they may be traced again when the objects are gone.
        def build(operands: dict[str, Any]) -> tuple[Any, Any]:
            inside = IndexMap()
            return nnx.unflatten(before, [operands[name] for name in names], index_ref=inside), inside

        def take_up(tree: Any, inside: Any, out: Any) -> Any:
            outer = RefMap.from_indexmap(inside)
            flatten = functools.partial(
                nnx.flatten, ref_index=RefMap(), ref_outer_index=outer, with_paths=False, graph=True
            )
            after, leaves = flatten(tree)
            result, results = flatten(out)
            return leaves, results, Whole((after, result))

        self.build, self.take_up = build, take_up

    def put_back(self, taken_up: Any) -> Any:
        """Returns the call's result, and changes the objects as it changed those that it was run with: once, however
        often it was traced.

        Args:
          taken_up: what `take_up` returned in the call: of `build`'s tree, its index of objects, and the result.
        """
        leaves, results, graphs = taken_up
        after, result = graphs.value
        objects = IndexMap.from_refmap(self._outside)
        # Of one length where the structure is the same.
        pairs = zip(self._leaves, self.operands.values(), leaves, strict=False)
        changed = [(leaf, new) for leaf, old, new in pairs if not same_leaves(old, new)]
        variables = all(isinstance(leaf, nnx.Variable) for leaf, _ in changed)
        if same_graph(after, self._before.with_same_outer_index()) and variables:
            for variable, new in changed:
                variable.set_raw_value(new)
            return nnx.unflatten(result, results, index_ref=objects)
        unflatten = functools.partial(nnx.unflatten, index_ref=IndexMap(), outer_index_outer_ref=objects)
        unflatten(after, leaves)
        return unflatten(result, results)


def snapshot(tree: Any) -> tuple[list[Any], Callable[[], None]]:
    """Returns the values of the Variables in a tree of objects, and a function that puts them back."""
    _, state = nnx.flatten(tree, ref_index=RefMap(), graph=True)
    held = [(leaf, leaf.get_raw_value()) for leaf in state.leaves if isinstance(leaf, nnx.Variable)]

    def restore() -> None:
        for variable, value in held:
            variable.set_raw_value(value)

    return [value for _, value in held], restore


def same_graph(after: Any, before: Any) -> bool:
    """Returns whether two graphs of objects are one, attributes that are no arrays too."""
    try:
        return bool(after == before)
    except Exception:  # attributes that do not compare, whatever they raise: taken for changed, they are set again
        return False


def same_leaves(old: Any, new: Any) -> bool:
    """Returns whether two trees have one structure and hold the same objects."""
    olds, before = jax.tree.flatten(old)
    news, after = jax.tree.flatten(new)
    return [before] == [after] and all(a is b for a, b in zip(olds, news, strict=True))
