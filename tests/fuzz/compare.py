"""Do two functions have the same results and gradients?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt
from jaxckpt.core.graph import graph_of
from tests.fuzz.cases import Failed, Invalid
from tests.fuzz.walk import walk


class Differentiated:
    """A function's results and its gradients in all that can be differentiated, as one function of its arrays; traced
    once.

    Attributes:
      closed: the jaxpr, of (results, gradients).
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        leaves, self.tree = jax.tree.flatten(args)
        self.places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        self.leaves, self.fun = leaves, fun
        self.arrays = [leaves[i] for i in self.places]
        self.closed, shape = jax.make_jaxpr(self.call, return_shape=True)(*self.arrays)
        self.out_tree = jax.tree.structure(shape)

    def call(self, *arrays: Any) -> tuple[Any, list[Any]]:
        moving = [i for i, x in enumerate(arrays) if is_inexact(x)]

        def varying(*some: Any) -> tuple[list[Any], Any]:
            full = list(arrays)
            for i, x in zip(moving, some):
                full[i] = x
            leaves = list(self.leaves)
            for i, x in zip(self.places, full):
                leaves[i] = x
            out = self.fun(*jax.tree.unflatten(self.tree, leaves))
            return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

        smooth, pull, out = jax.vjp(varying, *(arrays[i] for i in moving), has_aux=True)
        return out, list(pull([_cotangent(i, leaf) for i, leaf in enumerate(smooth)]))

    def run(self, mode: str) -> Any:
        """Returns (results, gradients). mode: "walk", "eager" or "jit"."""
        if mode == "walk":
            return jax.tree.unflatten(self.out_tree, walk(self.closed, *self.arrays))
        if mode == "eager":
            return self.call(*self.arrays)
        options = {
            "xla_allow_excess_precision": False,
            "xla_backend_optimization_level": 1,
            **jaxckpt.compiler_options("cpu"),
        }
        return jax.jit(self.call, compiler_options=options)(*self.arrays)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an array or a number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and not isinstance(leaf, bool)


def is_inexact(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(jax.typeof(leaf).dtype, np.inexact))


def _cotangent(place: int, leaf: Any) -> Any:
    aval = jax.typeof(leaf)
    values = np.cos(np.arange(aval.size, dtype=np.float64) * 1.7 + place).reshape(aval.shape)
    return jnp.asarray(values * (1 + 0.5j) if jnp.issubdtype(aval.dtype, jnp.complexfloating) else values, aval.dtype)


TOLERANCES = {"float32": 1e-4, "complex64": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}


def compare(
    what: str, reference: Differentiated, fun: Callable[..., Any], args: tuple[Any, ...], mode: str
) -> Differentiated:
    """Checks that `fun` has the reference's results and gradients; returns it differentiated.

    Rounding may differ where cotangents are added in another order, or where a compiler fuses otherwise. What is off by
    more than the tolerance is held against how far the reference itself moves: see `_excused`.
    """
    try:
        expected = reference.run(mode)
    except Exception as error:
        raise Invalid(f"{mode}: {error}") from error
    actual = Differentiated(fun, args)
    got = actual.run(mode)
    off = difference(got, expected)
    if off is not None:
        tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in _dtypes(reference.closed)), default=0.0)
        if off[0] > tolerance and off[0] > _excused(reference, mode, expected):
            raise Failed(what, f"{off[1]} ({mode}; {tolerance:g} is allowed)")
    return actual


def _dtypes(closed: Any) -> set[str]:
    return {
        str(value.dtype)
        for value in graph_of(closed).values
        if value.dtype is not None and jnp.issubdtype(value.dtype, jnp.inexact)
    }


def _excused(reference: Differentiated, mode: str, expected: Any) -> float:
    """Returns by how much results may be off where the reference itself moves: 30 times what the last digits of its
    arguments change, and 4 times what it changes when it is compiled, or not, so that it rounds otherwise on the way.
    """
    other = difference(reference.run("walk" if mode == "jit" else "jit"), expected)
    rounding = other[0] if other and np.isfinite(other[0]) else 0.0
    worst, arrays = 0.0, reference.arrays
    for seed in range(3):
        rng = np.random.default_rng(seed)
        try:
            reference.arrays = [_nudged(x, rng) for x in arrays]
            off = difference(reference.run(mode), expected)
        finally:
            reference.arrays = arrays
        worst = max(worst, off[0] if off else 0.0)
    return max(30 * worst, 4 * rounding)


def _nudged(x: Any, rng: np.random.Generator) -> Any:
    if not is_inexact(x) or isinstance(x, (int, float)):
        return x
    step = float(jnp.finfo(x.dtype).eps)
    return (x * (1 + step * rng.choice([-1.0, 1.0], np.shape(x)))).astype(x.dtype)


def difference(got: Any, expected: Any) -> tuple[float, str] | None:
    """Returns the largest error, relative to the largest number in its array or a hundredth of that in all, and where
    it is; None for none.
    """
    here, there = jax.tree.structure(got), jax.tree.structure(expected)
    if here != there:
        return np.inf, f"the structure is {here}, not {there}"
    pairs = [
        (jax.tree_util.keystr(path), a, b)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected))
    ]
    for path, a, b in pairs:
        kinds = [(jax.typeof(x).shape, jax.typeof(x).dtype) for x in (a, b)]
        if kinds[0] != kinds[1]:
            return np.inf, f"{path} is {kinds[0]}, not {kinds[1]}"
    numbers = [(path, wide(a), wide(b)) for path, a, b in pairs]
    largest = max((_largest(b) for _, _, b in numbers), default=0.0)
    worst: tuple[float, str] | None = None
    for path, a, b in numbers:
        with np.errstate(all="ignore"):
            differs = ~((a == b) | ((a != a) & (b != b)))
        if not differs.any():
            continue
        off = (
            float(np.max(np.abs(a[differs] - b[differs])))
            if np.isfinite(a[differs]).all() and np.isfinite(b[differs]).all()
            else np.inf
        )
        error = off / max(_largest(b), 0.01 * largest, 1e-30) if a.dtype.kind in "fc" else np.inf
        if worst is None or error > worst[0]:
            worst = (
                error,
                f"{'results' if path.startswith('[0]') else 'gradients'}{path} is off by {off:.3g}, {error:.3g} of "
                f"its largest: "
                f"{a.ravel()[:4]} for {b.ravel()[:4]}",
            )
    return worst


def wide(x: Any) -> np.ndarray:
    dtype = jax.typeof(x).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.asarray(x).astype(np.complex128)
    return np.asarray(x).astype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else np.asarray(x)


def _largest(x: np.ndarray) -> float:
    finite = x[np.isfinite(x)] if x.dtype.kind in "fc" else x
    return float(np.max(np.abs(finite), initial=0.0)) if x.dtype.kind != "b" else 1.0
