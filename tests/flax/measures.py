"""What the tests of both kinds of modules measure: memory by residuals, recomputation by matmuls in the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of differentiating a scalar function in all its arguments.

    Attributes:
      shapes: of all that is kept for the backward pass, the arguments among it.
      bytes: of the same.
      matmuls: that forward and backward pass run, loops multiplied out.
    """

    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    matmuls: int


def cost(fun: Callable[..., Any], *args: Any) -> Cost:
    """Returns what differentiating a scalar function costs; traced once, for traces are what tests spend time on."""

    def both(*args: Any) -> Any:
        out, backward = jax.vjp(fun, *args)
        return jax.tree.leaves(backward), backward(jax.numpy.ones_like(out))

    jaxpr, (kept, _) = jax.make_jaxpr(both, return_shape=True)(*args)
    size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in kept)
    return Cost(tuple(x.shape for x in kept), size, _count(jaxpr.jaxpr, "dot_general"))


def assert_cheaper(ours: Any, plain: Any, *args: Any, at_most: float = 0.6) -> None:
    """Asserts that `ours` keeps at most that share of the bytes, and recomputes matmuls for it."""
    less, more = cost(ours, *args), cost(plain, *args)
    assert less.bytes <= at_most * more.bytes, (less, more)
    assert less.matmuls > more.matmuls


def _count(jaxpr: Any, primitive: str) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = sum(_count(sub, primitive) for value in eqn.params.values() for sub in _jaxprs(value))
        total += (eqn.primitive.name == primitive) + inner * eqn.params.get("length", 1)
    return total


def _jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _jaxprs(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)


def assert_close(ours: Any, plain: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that two trees of arrays and keys have one structure and agree."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(ours)[0], jax.tree.leaves(plain), strict=True):
        if hasattr(a, "dtype") and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def identical(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def gradients(ours: Any, plain: Any, *args: Any, argnums: Any = 0) -> tuple[Any, Any]:
    """Returns the gradients of two functions, compiled at one go."""
    return jax.jit(lambda *args: tuple(jax.grad(f, argnums)(*args) for f in (ours, plain)))(*args)
