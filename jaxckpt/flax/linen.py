"""Checkpointing of linen modules: a class, a method, or the submodules of a model at given paths.

A module's call is lifted to a function of its variables, its rng keys and its arguments, as in `nn.remat`, with these
differences:

- The subclass has the name of its class, so automatic names of submodules ("Block_0") do not change.
- Arguments that are not arrays stay Python values, by position or by keyword.
- Rng counters start every trace at the same count, so a function that is traced twice draws the same numbers as a
  function that is traced once.
- Nothing is lifted while variables are initialised: there is nothing to differentiate, and values and names are those
  of the plain model.

Known shortfalls: a `setup` that draws random numbers when it is applied, and not only when it is initialised, draws new
ones in each checkpointed method of an instance (models under `apply` draw the same ones). A method under flax's
experimental `compact_name_scope` cannot be lifted, and `nn.remat` cannot lift it either. The class around it can.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import flax.linen as nn

from jaxckpt._compat import flax as _compat
from jaxckpt._errors import ArgumentError, near_glob
from jaxckpt.core.lift import Lifted, spread, title
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
from jaxckpt.flax.linen_streams import layered

# -------------------------------------------------------------------------------------------------------------- lifting


def method(fun: Callable[..., Any], made: Options) -> Callable[..., Any]:
    """Returns a method, or a function whose first argument is a bound module, with a checkpoint around it.

    Args:
      fun: the method as it is in the class, plain or `@nn.compact`.
      made: the options.
    """

    @functools.wraps(fun)
    def body(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fun(self, *args, **kwargs)

    static = arguments(fun, made.static_argnums, has_self=True)
    managed = _compat.wrap_method_once(body)
    lifted = _compat.decorator_lift_transform(_transform(made, static, title(fun)), body)

    @functools.wraps(managed)
    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or self.is_initializing():
            return managed(self, *args, **kwargs)
        wrapped, named = static.wrap(args, kwargs)
        return lifted(self, *wrapped, **named)

    return checkpointed


@cached
def module_class(base: Any, made: Options) -> type:
    """Returns a subclass of a linen module class whose `__call__` is checkpointed."""
    return subclass(module_class, base, made, {"__call__": method(base.__call__, made), **members_kept(base)})


def members_kept(base: type) -> dict[str, Any]:
    """Returns the members that flax would otherwise make again for a subclass."""
    return {name: vars(base)[name] for name in ("__init__", "__eq__", "__hash__") if name in vars(base)}


def _transform(made: Options, static: Arguments, name: str) -> Callable[..., Any]:
    """Returns a transform of functions (scopes, *args, **kwargs), as `decorator_lift_transform` takes it."""

    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
            counters = [scope.rng_counters for scope in scopes]
            before = [copy_counters(counter) for counter in counters]
            names, keywords = static.labels(args, kwargs)

            def inner(opening: Any, closing: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                def fun(operands: dict[str, Any]) -> Any:
                    for counter, start in zip(counters, before, strict=True):
                        reset_counters(counter, start)
                    opened = opening(operands["<variables>"], operands["<rngs>"])
                    for outer, scope in zip(scopes, opened, strict=True):
                        layered(outer, scope)
                    named = {key: operands[label] for key, label in keywords.items()}
                    plain, named = unwrap([operands[label] for label in names], named)
                    out = function(opened, *plain, **named)
                    return out, closing(opened)

                operands = {"<variables>": variables, "<rngs>": rngs, **dict(zip(names, args, strict=True))}
                arrays, spec = spread(operands | {keywords[key]: x for key, x in kwargs.items()})
                return run(Lifted(fun, spec, name), made.engine, arrays)

            packed = _compat.pack(inner, (True,), (True,), (True,), name="checkpoint", enable_kwargs=True)
            return packed(scopes, *args, **kwargs)

        return lifted

    return transform


def copy_counters(counters: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a scope's rng counters, with those of its children nested in it."""
    return {key: copy_counters(count) if isinstance(count, dict) else count for key, count in counters.items()}


def reset_counters(counters: dict[Any, Any], to: dict[Any, Any]) -> None:
    """Sets rng counters in place, because scopes share them."""
    for key in [key for key in counters if key not in to]:
        del counters[key]
    for key, count in to.items():
        if isinstance(count, dict):
            reset_counters(counters.setdefault(key, {}), count)
        else:
            counters[key] = count


# -------------------------------------------------------------------------------------------------------------- by path

_ACTIVE: ContextVar[frozenset[Any]] = ContextVar("jaxckpt_flax_active", default=frozenset())
"""Models whose rules are being applied, and modules that are inside their own checkpoint: (what, path)."""


def apply(model: nn.Module, rules: Rules) -> nn.Module:
    """Returns the model with checkpoints around the `__call__`s of the submodules whose paths match.

    Submodules are made while the model is called. So the returned model intercepts the calls inside its own call.

    Args:
      model: a bound or unbound model; it is not changed.
      rules: options by path, relative to the model.
    """
    view: Any = object.__new__(_ruled(type(model), rules))
    view.__dict__.update(model.__dict__)
    object.__setattr__(view, "_id", _compat.uuid())
    return view  # type: ignore[no-any-return]


def _ruled(base: type, rules: Rules) -> type:
    """Returns a subclass whose methods checkpoint the submodules that they call."""
    unmatched, seen = {text for text, _ in rules.options}, set[str]()

    def intercept(root: tuple[str, ...], next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, called = context.module, context.method_name
        path = module.scope.path if module.scope is not None else ()
        inside = path[: len(root)] == root and (ruled, path) not in _ACTIVE.get()
        if called not in ("__call__", "setup") or not inside:
            return next_fun(*args, **kwargs)
        relative = "/".join(path[len(root) :])
        seen.add(relative)
        found = rules.matching(relative)
        unmatched.difference_update(text for text, _ in found)
        if found and called == "setup":
            object.__setattr__(module, "_jaxckpt_before_setup", copy_counters(module.scope.rng_counters))
        if not found or called == "setup" or module.is_initializing():
            return next_fun(*args, **kwargs)
        with _active((ruled, path)):
            return _again(module, context.orig_method.func, found[0][1])(module, *args, **kwargs)

    def entering(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.scope is None or (key := ("root", ruled, self.scope.path)) in _ACTIVE.get():
                return fun(self, *args, **kwargs)
            with _active(key), nn.intercept_methods(functools.partial(intercept, self.scope.path)):
                out = fun(self, *args, **kwargs)
            if name == "__call__" and unmatched:
                near = near_glob(min(unmatched), sorted(seen - {""}))
                raise ArgumentError("rules", "globs over paths of submodules", min(unmatched), near)
            return out

        return entered

    own = {name for cls in base.__mro__[: base.__mro__.index(nn.Module)] for name in vars(cls)} - {"setup"}
    methods = {name: inspect.getattr_static(base, name) for name in sorted(own)}
    members = {name: entering(name, fun) for name, fun in methods.items() if _compat.is_wrapped(fun)}
    ruled = subclass(_ruled, base, rules, {**members, **members_kept(base)})
    return ruled


def _again(module: nn.Module, fun: Callable[..., Any], made: Options) -> Callable[..., Any]:
    """Returns a method with a checkpoint around it, for a module that is being called.

    The module has been set up, its call is on flax's stacks, and flax will capture its result. So its copy, which is
    bound to the lifted variables, is set up in the same way, and runs without the work that flax does around a call.
    """

    def body(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counters = copy.scope.rng_counters  # type: ignore[union-attr]
        now = copy_counters(counters)
        reset_counters(counters, getattr(module, "_jaxckpt_before_setup", now))
        _compat.set_up(copy)
        reset_counters(counters, now)
        with _compat.being_called(copy):
            return fun(copy, *args, **kwargs)

    _compat.mark_wrapped(body)
    static = arguments(fun, made.static_argnums, has_self=True)
    return _compat.decorator_lift_transform(_transform(made, static, title(fun)), body)  # type: ignore[no-any-return]


@contextmanager
def _active(key: Any) -> Iterator[None]:
    token = _ACTIVE.set(_ACTIVE.get() | {key})
    try:
        yield
    finally:
        _ACTIVE.reset(token)
