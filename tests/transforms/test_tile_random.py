"""Random functions: those through which the axis goes run tile by tile with equal values and gradients; all others are
refused, and none is tiled wrongly.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxckpt
from jaxckpt import TilingError

ROWS, WIDE = 6, 4
"""Sizes of the axis, and of the other dimensions."""

KEY = jax.random.key(3)


def close(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a / scale, b / scale, rtol=2e-4, atol=2e-5)


def smooth(x: Any) -> Any:
    return jnp.tanh(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=())
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1.0, 1.0)


clipped.defjvp(lambda p, t: (clipped(p[0]), t[0] * jnp.where(jnp.abs(p[0]) < 1.0, 1.0, 0.5)))


@jax.custom_vjp
def scaled(x: Any, w: Any) -> Any:
    return x * jnp.sum(w)


scaled.defvjp(
    lambda x, w: (x * jnp.sum(w), (x, w)),
    lambda kept, ct: (2.0 * ct * jnp.sum(kept[1]), jnp.full_like(kept[1], jnp.sum(ct * kept[0]))),
)


@dataclass(frozen=True)
class Way:
    """An operation of a random function: (x, w, d, other) -> x, which has the axis at dimension d where it passes.

    Attributes:
      fun: of an array, a matrix of parameters, and two dimensions of the array.
      moves: returns where the axis is after; None where it stays.
    """

    fun: Callable[..., Any]
    moves: Callable[[Any, int, int], int] | None = None


def other_product(x: Any, w: Any, d: int, e: int) -> Any:
    return jnp.moveaxis(jnp.tensordot(x, w, ((e,), (0,))), -1, e)


def merged(x: Any, w: Any, d: int, e: int) -> Any:
    shape = x.shape
    return smooth(x.reshape(-1)).reshape(shape)


def scanned(x: Any, w: Any, d: int, e: int) -> Any:
    xs = jnp.moveaxis(x, e, 0)
    ys = lax.scan(lambda c, row: (smooth(c + row), c * row), jnp.zeros(xs.shape[1:]), xs)[1]
    return jnp.moveaxis(ys, 0, e)


def branched(x: Any, w: Any, d: int, e: int) -> Any:
    return lax.cond(w[0, 0] > 0, lambda x: jnp.sin(x), lambda x: x * 0.5, x)


def mapped(x: Any, w: Any, d: int, e: int) -> Any:
    return jax.vmap(lambda row: row * jnp.sum(smooth(row)), in_axes=d, out_axes=d)(x)


def looked_up(x: Any, w: Any, d: int, e: int) -> Any:
    index = (jnp.abs(x) * 10).astype(jnp.int32) % WIDE
    return x * w[index, 0] + jnp.take(w[:, 1], index)


def dropped(x: Any, w: Any, d: int, e: int) -> Any:
    return jnp.where(jax.random.bernoulli(KEY, 0.7, x.shape), x / 0.7, 0.0)


def positions(x: Any, w: Any, d: int, e: int) -> Any:
    return x * (1.0 + lax.broadcasted_iota(jnp.float32, x.shape, d)) * 0.3 + lax.broadcasted_iota(
        jnp.float32, x.shape, e
    )


def masked(x: Any, w: Any, d: int, e: int) -> Any:
    a, b = (lax.broadcasted_iota(jnp.int32, x.shape, i) for i in (d, e))
    return jnp.where(a >= b, x, 0.1)


def picked(x: Any, w: Any, d: int, e: int) -> Any:
    best = jnp.argmax(lax.stop_gradient(x), axis=e)
    return x + jnp.take_along_axis(x, jnp.expand_dims(best, e), axis=e)


def written(x: Any, w: Any, d: int, e: int) -> Any:
    moved = jnp.moveaxis(x, e, 0)
    return jnp.moveaxis(moved.at[1].set(smooth(moved[0])), 0, e)


def padded(x: Any, w: Any, d: int, e: int) -> Any:
    return lax.slice_in_dim(jnp.concatenate([x, smooth(x)], axis=e), 1, 1 + x.shape[e], axis=e)


def rolled(x: Any, w: Any, d: int, e: int) -> Any:
    return jnp.roll(x, 1, axis=e)


PASSING = {
    "sin": Way(lambda x, w, d, e: jnp.sin(x)),
    "affine": Way(lambda x, w, d, e: 0.5 * x + w[0, 0]),
    "relu": Way(lambda x, w, d, e: jax.nn.relu(x)),
    "softplus": Way(lambda x, w, d, e: jax.nn.softplus(x)),
    "clipped": Way(lambda x, w, d, e: clipped(x)),
    "scaled": Way(lambda x, w, d, e: scaled(x, w)),
    "bias": Way(lambda x, w, d, e: x + jnp.expand_dims(w[1], [i for i in range(x.ndim) if i != e])),
    "softmax": Way(lambda x, w, d, e: jax.nn.softmax(x, axis=e)),
    "normed": Way(lambda x, w, d, e: (x - x.mean(e, keepdims=True)) * lax.rsqrt(x.var(e, keepdims=True) + 1e-2)),
    "product": Way(other_product),
    "merged": Way(merged),
    "scanned": Way(scanned),
    "branched": Way(branched),
    "mapped": Way(mapped),
    "looked_up": Way(looked_up),
    "dropped": Way(dropped),
    "positions": Way(positions),
    "masked": Way(masked),
    "picked": Way(picked),
    "written": Way(written),
    "padded": Way(padded),
    "rolled": Way(rolled),
    "sorted": Way(lambda x, w, d, e: jnp.sort(x, axis=e)),
    "cumsum": Way(lambda x, w, d, e: jnp.cumsum(x, axis=e)),
    # Without the stop_gradient, XLA for CPUs without its optimisations computes an infinite gradient of such a maximum
    # in a plain lax.scan of jax.grad, too: it compares two roundings of one value.
    "max": Way(lambda x, w, d, e: x - lax.stop_gradient(jnp.max(x, axis=e, keepdims=True))),
    "checkpointed": Way(lambda x, w, d, e: jax.checkpoint(lambda x: jnp.sin(x) * jnp.sum(w))(x)),
    "jitted": Way(lambda x, w, d, e: jax.jit(lambda x: jnp.cos(x) + x)(x)),
    "swapped": Way(lambda x, w, d, e: jnp.swapaxes(x, d, e), lambda x, d, e: e),
    "dot": Way(
        lambda x, w, d, e: jnp.expand_dims(jnp.einsum("...i,...i", a := jnp.moveaxis(x, e, -1), a), e) * 0.1 + x
    ),
    "fori": Way(lambda x, w, d, e: lax.fori_loop(0, 3, lambda i, c: smooth(c + w[0, i]), x)),
    "tiled": Way(lambda x, w, d, e: jaxckpt.tile(jnp.sin, in_axes=e, tiles=2, out_axes=e)(x)),
}
"""Operations that the axis d passes through. Those that are written for another dimension, e, couple that one."""


def sums(x: Any, w: Any, d: int) -> Any:
    return jnp.sum(x, axis=d)


ENDS = {
    "rows": lambda x, w, d: x,
    "sum": lambda x, w, d: jnp.sum(jnp.sin(x)),
    "mean": lambda x, w, d: jnp.mean(x),
    "along": lambda x, w, d: jnp.mean(x, axis=d),
    "both": lambda x, w, d: (x, jnp.sum(x**2), w),
    "product": lambda x, w, d: jnp.tensordot(x, x * 0.5, ((d,), (d,))),
    "tail": lambda x, w, d: jnp.log(1.0 + jnp.sum(x**2)) + jnp.sum(w),
    "two": lambda x, w, d: jnp.sum(x**2) / ROWS + 1e-2 * jnp.sum(jnp.cos(x)),
    "ratio": lambda x, w, d: jnp.sum(x) / (1.0 + jnp.sum(x > 0)),
    "counted": lambda x, w, d: (jnp.sum(x**2), jnp.sum(x > 0)),
    "histogram": lambda x, w, d: jnp.zeros(WIDE).at[(jnp.abs(x) * 9).astype(jnp.int32).reshape(-1) % WIDE].add(1.0),
}


def arrays(rank: int, axis: int) -> tuple[Any, Any]:
    shape = [WIDE] * rank
    shape[axis] = ROWS
    keys = jax.random.split(jax.random.key(rank * 7 + axis), 2)
    return jax.random.normal(keys[0], (WIDE, WIDE)) * 0.5, jax.random.normal(keys[1], shape)


def made(drawn: Any, through: bool) -> tuple[Callable, tuple[Any, Any], Any, Callable[[int], Callable]]:
    """Returns a drawn function, its arguments, the shapes of its results, and what tiles it by axes of the results."""
    rank, axis, ways, end, tiles, parts = drawn
    fun, args = program(rank, axis, ways, end, through=through), arrays(rank, axis % rank)
    in_axes = (None, axis % rank)
    tiles = min(tiles, ROWS // parts)
    tiled = lambda out_axes: jaxckpt.tile(fun, in_axes=in_axes, tiles=tiles, out_axes=out_axes, parts=parts)
    return fun, args, jax.eval_shape(fun, *args), tiled


def agree(fun: Callable, tiled: Callable, w: Any, x: Any) -> None:
    """Values, and gradients of a random sum of the results, are equal. One program computes both."""

    def of(fun: Callable) -> Callable:
        def loss(w: Any, x: Any) -> tuple[Any, Any]:
            out = fun(w, x)
            smooth = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
            weights = [np.random.default_rng(i).normal(size=leaf.shape) for i, leaf in enumerate(smooth)]
            return sum(jnp.sum(leaf * c) for leaf, c in zip(smooth, weights)), out

        return lambda w, x: (fun(w, x), jax.grad(loss, (0, 1), has_aux=True)(w, x))

    expected, actual = jax.jit(lambda *args: lax.optimization_barrier((of(fun)(*args), of(tiled)(*args))))(w, x)
    close(actual, expected)


COUNTS = [60, 300]
"""Numbers of random functions; the larger one is marked `long`."""

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
FUNCTIONS = st.tuples(
    st.integers(2, 3),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(sorted(PASSING)), st.integers(1, 2)), min_size=1, max_size=4),
    st.sampled_from(sorted(ENDS)),
    st.integers(1, ROWS),
    st.sampled_from([1, 2, 3]),
)


def program(rank: int, axis: int, ways: list[tuple[str, int]], end: str, *, through: bool) -> Callable:
    """Returns a random function (w, x).

    `through`: operations are told where the axis is. Otherwise they are written for any two dimensions.
    """

    def fun(w: Any, x: Any) -> Any:
        d = axis % rank
        for name, step in ways:
            way = PASSING[name]
            e = (d + step) % rank if (d + step) % rank != d else (d + 1) % rank
            if not through and step == 2:
                d, e = e, d
            if not through and name in ("product", "bias") and x.shape[e] != WIDE:
                continue
            x = way.fun(x, w, d, e)
            d = d if way.moves is None else way.moves(x, d, e)
        return ENDS[end](x, w, d)

    return fun


@pytest.mark.parametrize("count", COUNTS)
def test_functions_that_the_axis_goes_through(count: int) -> None:
    @given(FUNCTIONS)
    @settings(QUICK, max_examples=count)
    def check(drawn: Any) -> None:
        fun, args, out, tiled = made(drawn, through=True)
        first = jax.tree.leaves(out)[0]
        out_axes = first.shape.index(ROWS) if drawn[3] in ("rows", "both") and ROWS in first.shape else 0
        agree(fun, tiled(out_axes), *args)

    check()


@pytest.mark.parametrize("count", COUNTS)
def test_functions_that_may_couple_are_equal_or_refused(count: int) -> None:
    seen = collections.Counter()

    @given(FUNCTIONS)
    @settings(QUICK, max_examples=count)
    def check(drawn: Any) -> None:
        fun, args, out, tiled = made(drawn, through=False)
        error: Any = None
        for out_axes in range(max((leaf.ndim for leaf in jax.tree.leaves(out)), default=0) or 1):
            try:
                jax.eval_shape(tiled(out_axes), *args)
            except (TilingError, jaxckpt.ArgumentError) as raised:
                error = raised
                continue
            agree(fun, tiled(out_axes), *args)
            seen["equal"] += 1
            return
        assert isinstance(error, TilingError) and error.operation and "test_tile_random.py" in error.line
        seen["refused"] += 1

    check()
    assert seen["refused"] > count // 6 and seen["equal"] > count // 6, seen


COUPLED = {
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "reverse": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "centred": lambda x: x - jnp.mean(x, axis=0),
    "normed": lambda x: x / jnp.sqrt(jnp.sum(x**2)),
    "scores": lambda x: x @ x.T,
    "first": lambda x: x[0],
    "first by a gather": lambda x: x[jnp.array([0, 1])],
    "strided": lambda x: x[::2],
    "largest": lambda x: jnp.max(x, axis=0),
    "argmax": lambda x: jnp.argmax(x, axis=0),
    "product": lambda x: jnp.prod(x, axis=0),
    "differences": lambda x: x[1:] - x[:-1],
    "concatenated": lambda x: jnp.concatenate([x, x], axis=0),
    "recurrent": lambda x: lax.scan(lambda c, row: (jnp.sin(c + row), c), jnp.zeros(x.shape[1:]), x)[1],
    "written": lambda x: x.at[0].set(0.0),
    "pairs": lambda x: x[:, None] - x[None],
    "convolution": lambda x: jnp.stack([jnp.convolve(col, jnp.ones(3), "same") for col in x.T], 1),
    "median": lambda x: x - jnp.median(x, axis=0),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "while": lambda x: lax.while_loop(lambda c: jnp.max(c) < 10.0, lambda c: c + 1.0, x),
    "branch": lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x),
    "split": lambda x: x.reshape(2, ROWS // 2, -1).sum(1),
    "variance": lambda x: jnp.var(x),
    "nonlinear": lambda x: x * jnp.tanh(jnp.sum(x)),
    "batch norm": lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5),
    "in a checkpoint": lambda x: jax.checkpoint(lambda x: x - x.sum(0))(x),
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda i, c: c - c.mean(0), x),
    "in a custom rule": lambda x: clipped(jnp.cumsum(x, 0)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupling_functions_are_refused(name: str) -> None:
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDE))
    with warnings.catch_warnings(), pytest.raises(TilingError, match="test_tile_random.py"):
        jaxckpt.tile(COUPLED[name], in_axes=0, tiles=2)(x)
