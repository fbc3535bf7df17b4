"""What tiles do with values that are the same in every tile: they run outside, whichever operation makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import tile
from tests.helpers import executions

W = 0.3 * jnp.ones((4, 4)) + jnp.eye(4)
X = jnp.sin(jnp.arange(32.0)).reshape(8, 4)


def _barrier(w, x):
    return lax.optimization_barrier((w, x))


def _checkpoint(w, x):
    return jax.checkpoint(lambda w, x: (jnp.sin(w), x @ w))(w, x)


def _handed_on(w, x):
    return jax.checkpoint(lambda w, x: (w, x @ w))(w, x)


def _scan(w, x):
    return lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.tanh(c[1] @ c[0])), None), (w, x), None, length=3)[0]


def _stacked(w, x):
    (_, x), ws = lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.tanh(c[1] @ c[0])), c[0]), (w, x), None, length=3)
    return ws[1], x


def _branch(w, x):
    return lax.cond(w[0, 0] > 0, lambda w, x: (jnp.sin(w), x @ w), lambda w, x: (w, x), w, x)


def _fori(w, x):
    count, w, x = lax.fori_loop(0, 3, lambda i, c: (c[0] + 1.0, jnp.sin(c[1]), jnp.tanh(c[2] @ c[1])), (0.0, w, x))
    return w * count, x


def _keys(w, x):
    def step(carry, _):
        key, x = carry
        return (jax.random.split(key)[0], jnp.tanh(x @ w) + jax.random.normal(key, ())), None

    (key, x), _ = lax.scan(step, (jax.random.key(0), x), None, length=3)
    return w * jax.random.normal(key, ()), x


def _rule(w, x):
    both = jax.custom_jvp(lambda w, x: (jnp.sin(w), x @ w))
    both.defjvp(lambda p, t: (both(*p), (jnp.cos(p[0]) * t[0], t[1] @ p[0] + p[1] @ t[0])))
    return both(w, x)


@pytest.mark.parametrize("tiles", [3, 4])
@pytest.mark.parametrize(
    "both", [_barrier, _checkpoint, _handed_on, _scan, _stacked, _branch, _fori, _keys, _rule], ids=lambda f: f.__name__
)
def test_an_operation_that_makes_rows_and_what_is_the_same_for_all(both, tiles):
    def in_tiles(w, x):
        w, x = both(w, x)
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def after_the_tiles(w, x):
        w, x = both(w, x)
        return jnp.mean(jnp.tanh(x) ** 2) * jnp.sum(w)

    def a_result(w, x):
        w, x = both(w, x)
        return jnp.mean(jnp.tanh(x @ w) ** 2), w

    for fun, out_axes in ((in_tiles, 0), (after_the_tiles, 0), (a_result, (0, None))):
        total = lambda f: lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args))))
        tiled = tile(fun, in_axes=(None, 0), tiles=tiles, out_axes=out_axes)
        actual = jax.value_and_grad(total(tiled), (0, 1))(W, X)
        expected = jax.value_and_grad(total(fun), (0, 1))(W, X)
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_the_same_for_all_does_not_run_the_rows_outside():
    def fun(w, x):
        w, x = _scan(w, x)
        return jnp.mean(jnp.tanh(x) ** 2) * jnp.sum(w)

    count = executions(tile(fun, in_axes=(None, 0), tiles=4), W, X)
    assert count["dot_general"] == 4 * executions(fun, W, X)["dot_general"], "in the tiles, and nowhere else"


@pytest.mark.once
@pytest.mark.cuda
def test_a_compiler_keeps_no_weights_in_another_order_for_all_tiles(monkeypatch):
    """A GPU's convolutions want their kernels in another order than the arguments'.

    Asked of jax 0.10 alone: the compiler of 0.12 moves little of this program out of the loop (0.4 of 37 MiB).
    """
    kernels = [jax.ShapeDtypeStruct((3, 3, 256, 256), jnp.float32)] * 4
    images = jax.ShapeDtypeStruct((8, 8, 8, 256), jnp.float32)

    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(
                lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return jnp.sum(x**2)

    def peak():
        step = jax.value_and_grad(tile(lambda *args: loss(*args), in_axes=(None, 0), tiles=8))
        return jaxckpt.measure(step, kernels, images, target="cuda:h100").peak_bytes

    tied = peak()
    monkeypatch.setattr("jaxckpt.core.tiling.loop.lax.optimization_barrier", lambda values: values)
    assert peak() - tied >= 2 * 9 * 256 * 256 * 4
