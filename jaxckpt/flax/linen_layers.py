"""A stack of linen blocks as one scan.

The call is lifted to a function of variables, rng keys and arguments, as in `nn.scan`. The variables of each layer are
one row of the scan. The differences from `nn.scan` are:

- Keys are those of unrolled layers (`linen_streams`); `nn.scan` splits the key.
- There is a schedule; `nn.scan` keeps everything that the layers compute, or the input of each layer with `nn.remat`.
- Rng counters start every trace of the block at the same count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxckpt._compat import flax as _compat
from jaxckpt._errors import ArgumentError, InWords
from jaxckpt.flax.functional import cached, subclass
from jaxckpt.flax.linen import copy_counters, members_kept, reset_counters
from jaxckpt.flax.linen_streams import Layer
from jaxckpt.flax.stack import Stack, check_result
from jaxckpt.flax.trees import AXIS


@cached
def stack_class(base: Any, stack: Stack) -> type:
    """Returns a class `<name>Stack` whose `__call__` runs `stack.length` layers of a linen class."""

    @functools.wraps(base.__call__)
    def body(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.__call__(self, *args, **kwargs)

    managed = _compat.wrap_method_once(body)
    lifted = _compat.decorator_lift_transform(functools.partial(_transform, stack=stack, name=base.__name__), body)

    @functools.wraps(managed)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return managed(self, *args, **kwargs) if self.scope is None else lifted(self, *args, **kwargs)

    made = subclass(stack_class, base, stack, {"__call__": call, **members_kept(base)})
    made.__name__ = f"{base.__name__}Stack"  # flax adds a number if the module is given no name
    return made


def _transform(function: Callable[..., Any], stack: Stack, name: str) -> Callable[..., Any]:
    """Returns the function (scopes, *args, **kwargs) of the whole stack, from the function of one layer."""

    def lifted(scopes: Sequence[_compat.Scope], *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise ArgumentError("x", f"the first positional argument of a stack of {name}", tuple(kwargs))
        own = scopes[-1]
        outside = sorted({"/".join(s.path) for s in scopes if s.path[: len(own.path)] != own.path})
        if outside:
            hint = "Each layer has its own variables. Call such a module outside of the stack, and pass its result."
            raise ArgumentError(
                "Block", "a module that holds, and is called with, no modules from outside", outside, hint
            )
        x, *same = args
        counters = [scope.rng_counters for scope in scopes]
        before = [copy_counters(counter) for counter in counters]
        names = tuple(stack.names.format(i) for i in range(stack.length))

        def inner(opening: Any, closing: Any, variables: Any, rngs: Any) -> Any:
            rows = _compat.remove_axis(variables, 0, AXIS)
            _check_rows(rows[0], stack, name)

            def step(x: Any, row: Any) -> tuple[Any, Any]:
                number, variables = row
                for counter, start in zip(counters, before, strict=True):
                    reset_counters(counter, start)
                opened = opening(variables, rngs)
                layer = Layer(names, number, own)
                for scope in opened:
                    layer.enter(scope)
                out = function(opened, x, *same, **kwargs)
                check_result(name, x, out)
                return out, closing(opened)

            out, changed = stack.run(step, x, (jnp.arange(stack.length, dtype=jnp.uint32), rows))
            return out, _compat.add_axis(changed, 0, AXIS)

        return _compat.pack(inner, (True,), (True,), (True,), name="scan")(scopes)

    return lifted


def _check_rows(variables: Sequence[Mapping[str, Any]], stack: Stack, name: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]:
        if jnp.ndim(leaf) < 1 or jnp.shape(leaf)[0] != stack.length:
            rule = f"stacked along axis 0, one row for each of the {stack.length} layers of {name}"
            got = InWords(f"{jax.tree_util.keystr(path[1:])} of shape {jnp.shape(leaf)}")
            hint = "jaxckpt.flax.stack_layers makes them from the variables of an unrolled model."
            raise ArgumentError("variables", rule, got, hint)
