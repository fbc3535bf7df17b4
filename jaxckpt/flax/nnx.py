"""Checkpointing of nnx modules: a class, a method or function of modules, or the submodules of a model at given paths.

The graph of objects in the arguments is flattened to arrays, and built again inside the checkpoint, as in `nnx.remat`,
with these differences:

- Arguments that are not arrays stay Python values, by position or by keyword.
- Modules may be anywhere among the arguments. A bound method or an instance can be checkpointed, too.
- If only values of Variables change, as in BatchNorm and rng streams, only these values are set. So a module from
  outside a trace can be called in the trace if the call only reads it.

Variables that hold refs, or have hijax types, are refused: they change as a side effect, which a recomputation repeats.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxckpt import _compat
from jaxckpt._compat.flax import is_pytree
from jaxckpt._errors import ArgumentError, near_glob
from jaxckpt.core.lift import Lifted, spread, title
from jaxckpt.core.objects import Objects
from jaxckpt.flax.functional import (
    Arguments,
    Options,
    Rules,
    arguments,
    cached,
    run,
    subclass,
    unwrap,
)


def function(fun: Callable[..., Any], made: Options, memo: _Memo | None = None) -> Callable[..., Any]:
    """Returns a method or function of modules, checkpointed.

    Args:
      fun: the function.
      made: the options; `static_argnums` does not count a module that is the first argument.
      memo: the cache in which equal calls find what has been traced, for functions that depend only on their arguments.
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
    arguments(
        base.__call__, made.static_argnums, has_self=True
    )  # raises for a number out of range here, and not at the first call
    members = {"__call__": function(base.__call__, made, _Memo())}
    return subclass(module_class, base, made, members, pytree=is_pytree(base))


def apply(model: nnx.Module, rules: Rules) -> nnx.Module:
    """Returns a model that shares the given model's Variables, with checkpoints around the modules whose paths match.

    Args:
      model: it is not changed.
      rules: options by path. If a module is at several paths, the first path decides.

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
        near = near_glob(min(unmatched), sorted(modules.keys() - {""}))
        raise ArgumentError("rules", "globs over paths of submodules", min(unmatched), near)
    return view


class _Memo:
    """Cache of what has been lifted in the present trace, so that equal layers of a model are traced once, as in
    `nnx.remat`.

    It lives as long as the trace, because lifted functions may close over tracers. It is used for classes, whose state
    is in their instances. It is not used for functions, which may close over modules that change between calls.
    """

    def __init__(self) -> None:
        self._here = threading.local()  # a trace belongs to one thread

    def get(self, key: Any, make: Callable[[], Lifted]) -> Lifted:
        now = _compat.trace_state()
        trace: Any
        lifted: dict[Any, Lifted]
        trace, lifted = getattr(self._here, "memo", (None, {}))
        if now != trace or len(lifted) >= 64:  # without a trace the cache would never end
            lifted = {}
            self._here.memo = now, lifted
        try:
            return lifted.get(key) or lifted.setdefault(key, make())
        except TypeError:  # an attribute cannot be hashed
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
