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
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
from flax import nnx
from flax.nnx import graphlib

from jaxckpt._errors import ArgumentError, did_you_mean
from jaxckpt.flax.functional import (
    Arguments,
    Lifted,
    Options,
    Rules,
    Whole,
    arguments,
    cached,
    spread,
    subclass,
    title,
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
        self._trace: Any = None
        self._lifted: dict[Any, Lifted] = {}

    def get(self, key: Any, make: Callable[[], Lifted]) -> Lifted:
        now = jax.extend.core.get_opaque_trace_state()
        if now != self._trace or len(self._lifted) >= 64:  # without a trace there is no end to it
            self._trace, self._lifted = now, {}
        try:
            return self._lifted.get(key) or self._lifted.setdefault(key, make())
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
    outside = graphlib.RefMap()
    before, state = nnx.flatten((module, wrapped, list(named.values())), ref_index=outside, graph=True)
    if any(isinstance(leaf, nnx.Variable) and (leaf.ref or leaf.hijax) for leaf in state.leaves):
        rule = "modules whose Variables hold arrays, no refs and no hijax types"
        got = [type(x).__name__ for x in (*module, *args)]
        raise ArgumentError("arguments", rule, got, "nnx.with_vars(module, ref=False, hijax=False) makes it so.")
    labels = _labels(state.paths, static.labels(args, kwargs))
    values = [leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for leaf in state.leaves]
    given = tuple(kwargs)

    def inner(operands: dict[str, Any]) -> Any:
        inside = graphlib.IndexMap()
        module, args, keyword_args = nnx.unflatten(before, [operands[label] for label in labels], index_ref=inside)
        plain, named = unwrap(args, dict(zip(given, keyword_args, strict=True)))
        out = fun(*module, *plain, **named)
        flatten = functools.partial(
            nnx.flatten,
            ref_index=graphlib.RefMap(),
            ref_outer_index=graphlib.RefMap.from_indexmap(inside),
            with_paths=False,
            graph=True,
        )
        after, leaves = flatten((module, args, keyword_args))
        result, results = flatten(out)
        return leaves, results, Whole((after, result))

    arrays, spec = spread(dict(zip(labels, values, strict=True)))
    make = functools.partial(Lifted, inner, spec, title(fun))
    key = before, spec, given, tuple(jax.typeof(array) for array in arrays.values())
    lifted = memo.get(key, make) if memo else make()
    leaves, results, graphs = lifted(made.engine, arrays)
    after, result = graphs.value
    objects = graphlib.IndexMap.from_refmap(outside)
    pairs = zip(state.leaves, values, leaves, strict=False)  # of one length where the structure is the same
    changed = [(leaf, new) for leaf, old, new in pairs if not _same_leaves(old, new)]
    if same_graph(after, before.with_same_outer_index()) and all(isinstance(leaf, nnx.Variable) for leaf, _ in changed):
        for variable, new in changed:
            variable.set_raw_value(new)
        return nnx.unflatten(result, results, index_ref=objects)
    unflatten = functools.partial(nnx.unflatten, index_ref=graphlib.IndexMap(), outer_index_outer_ref=objects)
    unflatten(after, leaves)
    return unflatten(result, results)


def _labels(paths: Any, arguments: tuple[list[str], dict[str, str]]) -> list[str]:
    """Returns what to call each array in messages, all different: "self.layers.0.kernel", "x"."""
    heads = [["self"], arguments[0], list(arguments[1].values())]
    labels: dict[str, None] = {}
    for which, position, *rest in paths:
        label = ".".join(map(str, (heads[which][position], *rest)))
        labels[label if label not in labels else f"{label}#{len(labels)}"] = None
    return list(labels)


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
