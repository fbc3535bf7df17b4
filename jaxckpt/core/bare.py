"""A function without the checkpoints that are in it, so that others can be placed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.core.graph import Graph, trace
from jaxckpt.core.inline import without_checkpoints as inlined
from jaxckpt.core.leaves import array
from jaxckpt.core.lift import attempt, transformed


def without_checkpoints(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with `fun`'s values and derivatives that has none of the checkpoints in `fun`: those of
    `jax.checkpoint`, `flax.linen.remat`, `jaxckpt.checkpoint` and so on, in loops and branches too.

    With them go their policies. Names and tags stay. What is in a custom rule (`jax.custom_vjp`, and so
    `jaxckpt.scan` with `Slots`) stays as it is, and what a gradient that `fun` takes itself computes again.

    Args:
      fun: any function of arrays, pytrees of them, or modules; see `jaxckpt.checkpoint`.

    Raises:
      ArgumentError: `fun` cannot be called.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) @ x))(x))
    >>> count = lambda f: str(jax.make_jaxpr(jax.grad(f))(jnp.ones((2, 2)))).count("dot_general")
    >>> count(f), count(without_checkpoints(f))
    (4, 3)
    """
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun)
    return transformed(bare, fun)


def bare(fun: Callable[..., Any]) -> Callable[..., Any]:
    """As `without_checkpoints`, of a function of arrays."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
        program = inlined(closed)
        leaves = jax.tree.leaves((args, kwargs))
        results = _compat.eval_jaxpr(_compat.open_jaxpr(program), _compat.jaxpr_consts(program), *leaves)
        return jax.tree.unflatten(jax.tree.structure(out), map(array, results))

    return call


def trace_bare(fun: Callable[..., Any], *args: Any) -> Graph:
    """Returns the graph of a call of a function without its checkpoints; the arguments may be anything."""
    return attempt(fun, args, {}, lambda call: trace(bare(call.fun), *call.args, **call.kwargs))


def has_checkpoints(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether there are checkpoints in a function of arrays."""
    closed = jax.make_jaxpr(fun)(*args, **kwargs)
    return inlined(closed) is not closed
