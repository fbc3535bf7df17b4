"""Checkpointing of nnx modules: a class, a method or function of modules, or the submodules of a model at given paths.

The graph of objects in the arguments is flattened to arrays, and put together again inside the checkpoint, as
`nnx.remat` does it, with these differences:

- Arguments that are no arrays stay Python values, by position or by keyword.
- Modules may be anywhere among the arguments; a bound method or an instance is a target too.
- Where only values of Variables change, as those of BatchNorm and of rng streams do, only these are set. So modules
  from outside a trace can be called in it as long as they only read.

Variables that hold refs, or are of hijax types, are refused: they change as a side effect, which a recomputation repeats.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
from flax import nnx
from flax.nnx import graphlib

from jaxckpt._errors import ArgumentError, did_you_mean
from jaxckpt.core.lift import Lifted, Whole, spread, title
from jaxckpt.core.typed import typed
from jaxckpt.flax.functional import (
    Arguments,
    Options,
    Rules,
    arguments,
    cached,
    defines_call,
    run,
    subclass,
    unwrap,
)


def function(fun: Callable[..., Any], made: Options, memo: _Memo | None = None) -> Callable[..., Any]:
    """Returns a method or function of modules, checkpointed.

    Args:
      fun: the function.
      made: the options; `static_argnums` does not count a module that comes first.
      memo: where equal calls find what has been traced; of functions that depend on their arguments alone.
    """
    static = functools.cache(lambda has_self: arguments(fun, made.static_argnums, has_self=has_self))

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        has_self = bool(args) and isinstance(args[0], nnx.Module)
        return _call(fun, made, static(has_self), memo, args[:has_self], args[has_self:], kwargs)

    return checkpointed


@cached
def module_class(base: Any, made: Options) -> type:
    """Returns a subclass of an nnx module class whose `__call__` is checkpointed."""
    arguments(base.__call__, made.static_argnums, has_self=True)  # out of range is an error here, not at the first call
    members = {"__call__": function(base.__call__, made, _Memo())}
    return subclass(module_class, base, made, members, pytree=base._pytree__is_pytree)


def apply(model: nnx.Module, rules: Rules) -> nnx.Module:
    """Returns a model that shares the given one's Variables, with the modules checkpointed whose paths match.

    Args:
      model: it stays as it is.
      rules: by path; of a module at several paths, the first path counts.

    Raises:
      ArgumentError: a glob matches no path.
    """
    view = nnx.clone(model, variables=False, graph=True)
    modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(view)}
    unmatched = {text for text, _ in rules.options}
    for path, module in modules.items():
        found = rules.matching(path)
        unmatched.difference_update(text for text, _ in found)
        if found:
            object.__setattr__(module, "__class__", module_class(type(module), found[0][1]))
    if unmatched:
        near = did_you_mean(min(unmatched), sorted(modules.keys() - {""}))
        raise ArgumentError("rules", "globs over paths of submodules", min(unmatched), near)
    return view


class _Memo:
    """What has been lifted in the present trace: equal layers of a model are traced once, as `nnx.remat` does it.

    No longer than the trace, because what is lifted may close over its tracers. Not for functions but for classes,
    whose state is in their instances: a function may close over modules that change between its calls.
    """

    def __init__(self) -> None:
        self._here = threading.local()  # a trace belongs to one thread

    def get(self, key: Any, make: Callable[[], Lifted]) -> Lifted:
        now = jax.extend.core.get_opaque_trace_state()
        trace: Any
        lifted: dict[Any, Lifted]
        trace, lifted = getattr(self._here, "memo", (None, {}))
        if now != trace or len(lifted) >= 64:  # without a trace there is no end to it
            lifted = {}
            self._here.memo = now, lifted
        try:
            return lifted.get(key) or lifted.setdefault(key, make())
        except TypeError:  # an attribute that cannot be hashed
            return make()


def _call(
    fun: Callable[..., Any],
    made: Options,
    static: Arguments,
    memo: _Memo | None,
    module: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns the call's result, and changes the modules in its arguments as the call changes them."""
    wrapped, named = static.wrap(args, kwargs)
    positional, by_name = static.labels(args, kwargs)
    heads = ["self"], positional, list(by_name.values())
    label = lambda path: ".".join(map(str, (heads[path[0]][path[1]], *path[2:])))  # "self.layers.0.kernel", "x"
    objects = Objects((module, wrapped, list(named.values())), label)
    given = tuple(kwargs)
    build, take_up = objects.build, objects.take_up

    def inner(operands: dict[str, Any]) -> Any:
        (module, args, keyword_args), inside = build(operands)
        plain, named = unwrap(args, dict(zip(given, keyword_args, strict=True)))
        return take_up((module, args, keyword_args), inside, fun(*module, *plain, **named))

    arrays, spec = spread(objects.operands)
    make = functools.partial(Lifted, inner, spec, title(fun))
    key = objects.key, spec, given, tuple(jax.typeof(array) for array in arrays.values())
    return objects.put_back(run(memo.get(key, make) if memo else make(), made.engine, arrays))


# ------------------------------------------------------------------------------------------------- objects as operands


def is_object(leaf: Any) -> bool:
    """Returns whether a leaf is an object that may change: a module, a Variable, an optimizer."""
    return isinstance(leaf, nnx.Variable) or graphlib.is_node_module(leaf)


def has_modules(tree: Any) -> bool:
    """Returns whether there are modules in a pytree, and not only Variables."""
    return any(graphlib.is_node_module(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_object))


def gradient(values: bool) -> Callable[..., Any]:
    """Returns nnx's gradient of a function, with values or without."""
    return nnx.value_and_grad if values else nnx.grad


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
        outside = graphlib.RefMap()
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
            inside = graphlib.IndexMap()
            return nnx.unflatten(before, [operands[name] for name in names], index_ref=inside), inside

        def take_up(tree: Any, inside: Any, out: Any) -> Any:
            outer = graphlib.RefMap.from_indexmap(inside)
            flatten = functools.partial(
                nnx.flatten, ref_index=graphlib.RefMap(), ref_outer_index=outer, with_paths=False, graph=True
            )
            after, leaves = flatten(tree)
            result, results = flatten(out)
            return leaves, results, Whole((after, result))

        self.build, self.take_up = build, take_up

    def put_back(self, taken_up: Any) -> Any:
        """Returns the call's result, and changes the objects as it changed those that it was run with: once, however often it was traced.

        Args:
          taken_up: what `take_up` returned in the call: of `build`'s tree, its index of objects, and the result.
        """
        leaves, results, graphs = taken_up
        after, result = graphs.value
        objects = graphlib.IndexMap.from_refmap(self._outside)
        # Of one length where the structure is the same.
        pairs = zip(self._leaves, self.operands.values(), leaves, strict=False)
        changed = [(leaf, new) for leaf, old, new in pairs if not _same_leaves(old, new)]
        variables = all(isinstance(leaf, nnx.Variable) for leaf, _ in changed)
        if same_graph(after, self._before.with_same_outer_index()) and variables:
            for variable, new in changed:
                variable.set_raw_value(new)
            return nnx.unflatten(result, results, index_ref=objects)
        unflatten = functools.partial(nnx.unflatten, index_ref=graphlib.IndexMap(), outer_index_outer_ref=objects)
        unflatten(after, leaves)
        return unflatten(result, results)


def same_graph(after: Any, before: Any) -> bool:
    """Returns whether two graphs of objects are one, attributes that are no arrays too."""
    try:
        return bool(after == before)
    except Exception:  # attributes that do not compare, whatever they raise: taken for changed, they are set again
        return False


def _same_leaves(old: Any, new: Any) -> bool:
    olds, before = jax.tree.flatten(old)
    news, after = jax.tree.flatten(new)
    return [before] == [after] and all(a is b for a, b in zip(olds, news, strict=True))
