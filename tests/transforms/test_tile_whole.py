"""What tiles do with values that are the same in every tile: they run outside, whichever operation makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import TilingError, tile
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
        return jaxckpt.measure(step, kernels, images, target="cuda:h100", generate_code=False).peak_bytes

    tied = peak()
    monkeypatch.setattr("jaxckpt.core.tiling.loop.lax.optimization_barrier", lambda values: values)
    assert peak() - tied >= 2 * 9 * 256 * 256 * 4


@jax.custom_vjp
def _clipped(w):
    return w


_clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def _layer(w, x):
    return jnp.tanh(x @ _clipped(w))


HOLDS = {
    "checkpoint": lambda w, x: jax.checkpoint(_layer)(w, x),
    "our checkpoint": lambda w, x: jaxckpt.checkpoint(_layer, policy="dots")(w, x),
    "checkpoint of a call": lambda w, x: jax.checkpoint(lambda w, x: x @ jax.jit(jax.jit(_clipped))(w))(w, x),
    "scan of layers": lambda w, x: lax.scan(lambda h, w: (_layer(w, h), None), x, jnp.stack([w, w]))[0],
    "scan of one": lambda w, x: lax.scan(lambda h, _: (_layer(w, h), None), x, None, length=3)[0],
    "our scan": lambda w, x: jaxckpt.scan(lambda h, w: (_layer(w, h), None), x, jnp.stack([w] * 4), schedule="sqrt")[0],
    "loop": lambda w, x: lax.fori_loop(0, 3, lambda _, h: _layer(w, h), x),
    "branch": lambda w, x: lax.cond(w[0, 0] > 0, _layer, lambda w, x: x, w, x),
    "switch": lambda w, x: lax.switch(1, [lambda w, x: x, _layer], w, x),
    "rows": lambda w, x: lax.map(lambda row: _layer(w, row), x),
    "vmap": lambda w, x: jax.vmap(lambda row: _layer(w, row))(x),
    "scan of vmap": lambda w, x: lax.scan(
        lambda h, _: (jax.vmap(lambda row: _layer(w, row))(h), None), x, None, length=2
    )[0],
    "loop of rows": lambda w, x: lax.map(
        lambda row: lax.scan(lambda h, _: (_layer(w, h), None), row, None, length=2)[0], x
    ),
    "values of rows": lambda w, x: lax.scan(lambda h, _: (_clipped(jnp.tanh(h @ w)), None), x, None, length=2)[0],
}
LOOPS = {"scan of layers", "scan of one", "our scan", "loop", "branch", "switch", "scan of vmap"}


@pytest.mark.parametrize("end", [jnp.sum, lambda out: out], ids=["loss", "rows"])
@pytest.mark.parametrize("holds", HOLDS)
def test_a_backward_rule_gets_the_whole_gradient_or_is_refused(holds, end):
    """A rule that clips what it is given makes another of the parts that tiles have."""
    fun = lambda w, x: end(HOLDS[holds](w, x))
    grads = lambda fun: jax.grad(lambda w, x: jnp.sum(fun(w, x)), (0, 1))(W, X)
    tiled = tile(fun, in_axes=(None, 0), tiles=4)
    if holds in LOOPS:
        with pytest.raises(
            TilingError, match="would get a part of its gradient in each tile.*before the loop"
        ) as error:
            grads(tiled)
        assert error.value.operation == "custom_vjp_call" and "test_tile_whole.py" in error.value.line
        return
    expected = grads(fun)
    for a, b in zip(grads(tiled), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_rule_of_weights_in_layers_is_not_tiled_by_the_planner():
    def loss(ws, x):
        layer = lambda h, w: (h + jnp.tanh(jax.nn.gelu(h @ _clipped(w[0])) @ _clipped(w[1])), None)
        return (lax.scan(layer, x, ws)[0] ** 2).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    ws = 3 * jax.random.normal(keys[0], (4, 16, 64)), 3 * jax.random.normal(keys[1], (4, 64, 16))
    x = 30 * jax.random.normal(keys[2], (256, 16))
    try:
        plan = jaxckpt.plan(loss, ws, x, budget="20%", target="cpu", tile=True)
    except jaxckpt.InfeasibleBudgetError as error:
        plan = jaxckpt.plan(loss, ws, x, budget=error.least_bytes, target="cpu", tile=True)
    expected = jax.grad(loss)(ws, x)
    assert float(jnp.max(jnp.abs(expected[0]))) == pytest.approx(0.1)  # the rule clips
    for a, b in zip(jax.tree.leaves(jax.grad(plan.apply(loss))(ws, x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)  # a part for each tile would be off by as much as the rule leaves


@pytest.mark.parametrize("which", ["vjp", "jvp"])
def test_what_couples_in_a_rule_is_named_with_the_line_of_its_use(which):
    backward, forward = jax.custom_vjp(jnp.tanh), jax.custom_jvp(jnp.tanh)
    backward.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (d / jnp.maximum(1.0, jnp.sqrt((d**2).sum())),))
    forward.defjvp(lambda p, t: (jnp.tanh(*p), t[0] / (1.0 + jnp.sum(p[0]))))
    rule = backward if which == "vjp" else forward
    fun = tile(lambda x: rule(x).sum(), in_axes=0, tiles=3)
    with pytest.raises(TilingError, match=rf"custom_{which}_call at .*test_tile_whole.py.*has a derivative") as error:
        jax.grad(fun)(X)
    assert "test_tile_whole.py" in error.value.line
