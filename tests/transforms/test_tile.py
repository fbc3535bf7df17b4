"""`jaxckpt.tile`: what it computes, what it spares, what it refuses."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import ArgumentError, EffectsError, TilingError, tile
from jaxckpt.core.constants import DIVISIONS
from tests.helpers import assert_trees_close, executions, kept_bytes

TOKENS, WIDTH, WORDS = 24, 8, 64
KEYS = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(KEYS[0], (WIDTH, WORDS)) / WIDTH**0.5  # so that what sines are taken of is of size one
X = jax.random.normal(KEYS[1], (TOKENS, WIDTH))
T = jax.random.randint(KEYS[2], (TOKENS,), 0, WORDS)


def head(w, x, t):
    """A language model's head and loss."""
    logits = (x @ w).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), t[:, None], -1))


def mlp(w, x):
    return jax.nn.gelu(x @ w) @ w.T


def tiled_head(tiles):
    return tile(head, in_axes=(None, 0, 0), tiles=tiles)


def tiled_mlp(tiles):
    return tile(mlp, in_axes=(None, 0), tiles=tiles)


def summed(fun):
    return lambda *args: jnp.sum(jnp.sin(fun(*args)))


# ---------------------------------------------------------------------------------------------------- values, gradients


@pytest.mark.parametrize("tiles", [1, 2, 5, 7, 24])
def test_a_loss_has_its_value_and_gradients_however_many_tiles(tiles):
    actual = jax.jit(jax.value_and_grad(tiled_head(tiles), (0, 1)))(W, X, T)
    assert_trees_close(actual, jax.value_and_grad(head, (0, 1))(W, X, T))


@pytest.mark.parametrize("tiles", [2, 5, 24])
def test_rows_are_put_together_and_their_gradients_are_equal(tiles):
    fun = tiled_mlp(tiles)
    assert_trees_close(fun(W, X), mlp(W, X), rtol=1e-4, atol=1e-4)
    assert_trees_close(jax.grad(summed(fun), (0, 1))(W, X), jax.grad(summed(mlp), (0, 1))(W, X), rtol=1e-4, atol=1e-3)


def test_no_tile_has_the_logits_of_all_tokens():
    """The test of equal values would pass if nothing ran in tiles."""
    graph = jaxckpt.trace(jax.value_and_grad(tiled_head(4), (0, 1)), W, X, T)
    sizes = {value.shape for value in graph.values}
    assert (TOKENS, WORDS) not in sizes and (TOKENS // 4, WORDS) in sizes
    whole = jaxckpt.trace(jax.value_and_grad(head, (0, 1)), W, X, T)
    assert (TOKENS, WORDS) in {value.shape for value in whole.values}


def test_a_loss_runs_no_matmul_again_and_keeps_its_gradients_alone():
    step = lambda fun: executions(jax.value_and_grad(fun, (0, 1)), W, X, T)["dot_general"]
    assert step(tiled_head(4)) == 4 * step(head), "each in four tiles"
    flops = lambda fun: jaxckpt.count_flops(jax.value_and_grad(fun, (0, 1)), W, X, T)
    assert flops(tiled_head(4)) < 1.05 * flops(head)
    assert kept_bytes(tiled_head(4), W, X, T) < kept_bytes(head, W, X, T) / 2


def test_rows_keep_nothing_but_the_arguments_and_run_each_matmul_once_again():
    assert kept_bytes(tiled_mlp(4), W, X) < kept_bytes(mlp, W, X) / 10
    count = lambda fun: executions(jax.grad(summed(fun), (0, 1)), W, X)["dot_general"]
    assert count(mlp) == 6
    assert count(tiled_mlp(4)) == 4 * (6 + 1), "the second product is not needed again"


def test_without_a_derivative_no_gradient_is_computed():
    assert executions(tiled_head(4), W, X, T)["dot_general"] == 4


def test_only_the_gradients_that_are_asked_for_are_computed():
    assert executions(jax.grad(tiled_head(4), 1), W, X, T)["dot_general"] == 4 * 2


@pytest.mark.parametrize("fun", ["loss", "rows"])
def test_gradients_of_bfloat16_parameters_add_up_in_float32(fun):
    """In bfloat16, a hundred terms of one size stop growing a sum after some tens."""
    n = 2048
    x = jnp.ones((n, 1), jnp.bfloat16)
    w = jnp.full((1, 1), 1.0, jnp.bfloat16)
    product = lambda w, x: x @ w
    if fun == "loss":
        loss = tile(lambda w, x: jnp.sum((x @ w).astype(jnp.float32)), in_axes=(None, 0), tiles=n)
    else:
        loss = lambda w, x: jnp.sum(tile(product, in_axes=(None, 0), tiles=n)(w, x).astype(jnp.float32))
    grad = jax.grad(loss)(w, x)
    assert grad.dtype == jnp.bfloat16 and float(grad[0, 0]) == n
    plain = lambda w, x: lax.scan(lambda c, row: (c + jnp.sum((row @ w).astype(jnp.float32)), None), 0.0, x[:, None])[0]
    assert float(jax.grad(plain)(w, x)[0, 0]) < n / 2, "so the sum above says something"


@pytest.mark.parametrize("count", [259, 387])
def test_gradients_of_bfloat16_rows_are_not_all_off_by_one_factor(count):
    """1 / count in bfloat16 is off by up to 0.4%, in all rows alike."""
    w, x = jax.random.normal(KEYS[0], (16, 64), jnp.bfloat16), jax.random.normal(KEYS[1], (512, 16), jnp.bfloat16)
    labels, mask = jax.random.randint(KEYS[2], (512,), 0, 64), jnp.arange(512) < count

    def masked(w, x, labels, mask):
        logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
        losses = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)[:, 0]
        return -jnp.sum(losses * mask) / jnp.sum(mask)

    exact = jax.grad(masked, 1)(w.astype(jnp.float32), x.astype(jnp.float32), labels, mask)
    tiled = tile(masked, in_axes=(None, 0, 0, 0), tiles=8)
    found = jax.grad(tiled, 1)(w, x, labels, mask).astype(jnp.float32)
    assert abs(jnp.vdot(found, exact) / jnp.vdot(exact, exact) - 1) < 8e-4
    assert executions(tiled, w, x, labels, mask)["dot_general"] == 8


@pytest.mark.parametrize("within", [False, True], ids=["rows", "inside"])
def test_gradients_in_float16_are_within_range_where_the_loss_is_scaled(within):
    """Of the unscaled loss they are zero: the least number of float16 is 6e-8."""
    dtype = jnp.float32 if within else jnp.float16
    w, x = jax.random.normal(KEYS[0], (16, 64), dtype), jax.random.normal(KEYS[1], (512, 16), dtype)
    labels, scale = jax.random.randint(KEYS[2], (512,), 0, 64), 2.0**18

    @jax.checkpoint
    def product(x, w):
        return jnp.dot(x.astype(jnp.float16), w.astype(jnp.float16), preferred_element_type=jnp.float32)

    def small(w, x, labels):
        logits = product(x, w)
        return -jnp.sum(2e-10 * jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))

    tiled = tile(small, in_axes=(None, 0, 0), tiles=8)
    found, expected = (jax.grad(lambda w, x: scale * f(w, x, labels), (0, 1))(w, x) for f in (tiled, small))
    assert all(jnp.any(each != 0) for each in expected)
    assert_trees_close(found, expected, rtol=0.02, atol=1e-6)


def test_weak_types_stay_weak():
    fun = lambda x: (jnp.where(x > 0, 1.0, 0.5), jnp.sum(jnp.where(x > 0, 1, 2)), x * 2)
    out_axes = (0, None, 0)
    actual, expected = (jax.tree.map(jax.typeof, f(X)) for f in (tile(fun, in_axes=0, tiles=3, out_axes=out_axes), fun))
    assert [(each.dtype, each.weak_type) for each in actual] == [(each.dtype, each.weak_type) for each in expected]
    assert any(each.weak_type for each in actual)
    assert (tile(lambda x: fun(x)[0], in_axes=0, tiles=3)(X) * jnp.bfloat16(2)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "setting",
    [jax.enable_checks, lambda on: jax.numpy_rank_promotion("raise" if on else "allow")],
    ids=["checks", "rank"],
)
def test_under_settings_of_jax_that_check_more(setting):
    fun = lambda w, x: jnp.mean(jax.lax.broadcasted_iota(jnp.float32, x.shape, 0) * jnp.sin(x) @ w)
    with setting(True):
        found = jax.grad(tile(fun, in_axes=(None, 0), tiles=5, parts=2), (0, 1))(W, X)
    assert_trees_close(found, jax.grad(fun, (0, 1))(W, X), rtol=1e-4, atol=1e-6)


def test_gradients_of_different_dtypes_where_jax_promotes_none():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        fun = lambda w, x: jnp.sum(jnp.sin(x.astype(jnp.float64) @ w))
        w = W.astype(jnp.float64)
        tiled = tile(fun, in_axes=(None, 0), tiles=3)
        assert_trees_close(*(jax.grad(f, (0, 1))(w, X) for f in (tiled, fun)), rtol=1e-5, atol=1e-6)


def test_sums_of_bfloat16_add_up_in_float32():
    x = jnp.ones((2048, 3), jnp.bfloat16)
    fun = tile(lambda x: lax.dot_general(jnp.ones(2048, x.dtype), x, (((0,), (0,)), ((), ()))), in_axes=0, tiles=2048)
    assert fun(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(fun(x), np.float32), 2048.0)


def test_sums_means_and_what_is_computed_of_them():
    def fun(w, x):
        total = jnp.sum(x @ w)
        return {"mean": jnp.mean(x, 0), "log": jnp.log(1.0 + total**2), "w": w, "rows": x * 2.0, "n": jnp.sum(x > 0)}

    assert_trees_close(tile(fun, in_axes=(None, 0), tiles=5)(W, X), fun(W, X), rtol=1e-4)


def test_several_losses_that_lead_linearly_to_one_are_one():
    def fun(w, x, t):
        logits = x @ w
        return head(w, x, t) + 1e-3 * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)

    tiled = tile(fun, in_axes=(None, 0, 0), tiles=4)
    assert_trees_close(jax.grad(tiled, (0, 1))(W, X, T), jax.grad(fun, (0, 1))(W, X, T))
    step = lambda f: executions(jax.value_and_grad(f, (0, 1)), W, X, T)["dot_general"]
    assert step(tiled) == 4 * step(fun), "nothing runs again"


def test_several_losses_over_a_sum_without_a_derivative_are_one():
    weights = jnp.linspace(0.0, 1.0, TOKENS)

    def fun(w, x, t, weights):
        logits = x @ w
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), t[:, None], -1)[:, 0]
        penalty = jax.nn.logsumexp(logits, -1) ** 2
        return (jnp.sum(weights * losses) + jnp.sum(1e-3 * weights * penalty)) / jnp.sum(weights)

    tiled = tile(fun, in_axes=(None, 0, 0, 0), tiles=4)
    for places in (0, 1), (0, 1, 3):
        assert_trees_close(*(jax.grad(f, places)(W, X, T, weights) for f in (tiled, fun)), rtol=1e-4, atol=1e-6)
    step = lambda f: executions(jax.value_and_grad(f, (0, 1)), W, X, T, weights)["dot_general"]
    assert step(tiled) == 4 * step(fun), "nothing runs again"


def test_a_masked_mean_divides_by_the_whole_count():
    def fun(w, x, t):
        mask = (t > 9).astype(jnp.float32)
        losses = jax.nn.logsumexp(x @ w, -1) * mask
        return jnp.sum(losses) / jnp.sum(mask)

    tiled = tile(fun, in_axes=(None, 0, 0), tiles=7)
    assert_trees_close(jax.value_and_grad(tiled)(W, X, T), jax.value_and_grad(fun)(W, X, T))


def test_the_axis_may_be_any_and_differ_between_arguments():
    fun = lambda a, b: jnp.einsum("btd,tbd->bt", a, b)
    a, b = jnp.arange(24.0).reshape(2, 6, 2), jnp.arange(24.0).reshape(6, 2, 2)
    assert_trees_close(tile(fun, in_axes=(1, 0), tiles=4, out_axes=1)(a, b), fun(a, b))
    assert_trees_close(tile(fun, in_axes=(-2, -3), tiles=4, out_axes=1)(a, b), fun(a, b))
    loss = lambda f: jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1))(a, b)
    assert_trees_close(loss(tile(fun, in_axes=(1, 0), tiles=4, out_axes=1)), loss(fun))


def test_a_reshape_that_merges_the_axis_as_the_inner_factor():
    fun = lambda x: jnp.sin(x.reshape(-1, 2) * 2.0).reshape(x.shape)
    x = jnp.arange(48.0).reshape(4, 6, 2)
    for axis in (0, 1):
        actual = tile(fun, in_axes=axis, tiles=3, out_axes=axis)
        assert_trees_close(actual(x), fun(x))
        assert_trees_close(jax.grad(summed(actual))(x), jax.grad(summed(fun))(x))
    merged = tile(lambda x: x.reshape(-1, 2), in_axes=1, tiles=4)
    assert_trees_close(merged(x), x.reshape(-1, 2))


def test_complex_arguments_of_a_loss_have_their_gradients():
    fun = lambda w, x: jnp.mean(jnp.abs(x @ w) ** 2 + jnp.real(x @ w)[:, :1])
    w, x = W + 1j * W[::-1], X - 0.5j * X[::-1]
    tiled = tile(fun, in_axes=(None, 0), tiles=5)
    assert_trees_close(jax.grad(tiled, (0, 1))(w, x), jax.grad(fun, (0, 1))(w, x), rtol=1e-4, atol=1e-4)
    actual, expected = (jax.jvp(lambda w: f(w, x), (w,), (w * 1j,)) for f in (tiled, fun))
    assert_trees_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_a_sum_over_a_table_is_a_sum_over_rows():
    fun = lambda table, at: (jnp.zeros_like(table).at[at].add(table[at] ** 2), jnp.sin(table)[at])
    at = jnp.array([0, 3, 3, 1, 0, 5])
    tiled = tile(fun, in_axes=(None, 0), tiles=4)
    assert_trees_close(tiled(X, at), fun(X, at))
    loss = lambda f: jax.grad(lambda table: sum(jnp.sum(jnp.sin(out)) for out in f(table, at)))(X)
    assert_trees_close(loss(tiled), loss(fun))


def test_pytrees_prefixes_keywords_and_leaves_that_are_no_arrays():
    def fun(batch, params, mode, *, scale=1.0):
        x = batch["x"] @ params["w"] + batch["y"][:, None]
        return {"out": getattr(jnp, mode)(x) * scale}

    batch, params = {"x": X, "y": X[:, 0]}, {"w": W, "name": "layer"}
    tiled = tile(fun, in_axes=(0, None, None), tiles=5)
    for scale in (2.0, jnp.float32(2.0)):
        assert_trees_close(tiled(batch, params, "sin", scale=scale), fun(batch, params, "sin", scale=scale))
    mixed = tile(fun, in_axes=({"x": 0, "y": 0}, {"w": None, "name": None}, None), tiles=5)
    assert_trees_close(mixed(batch, params, "cos"), fun(batch, params, "cos"))


def test_as_a_decorator_and_with_keywords_in_place_of_positions():
    @tile(in_axes=(None, 0), tiles=3)
    def layer(w, x):
        """The layer."""
        return x @ w

    assert layer.__doc__ == "The layer." and layer.__name__ == "layer"
    assert_trees_close(layer(w=W, x=X), X @ W)


def test_what_it_closes_over_is_whole_and_differentiated():
    loss = lambda w: tile(lambda x: jnp.sum(jnp.sin(x @ w)), in_axes=0, tiles=4)(X)
    assert_trees_close(jax.grad(loss)(W), jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)))(W))


def test_whole_values_are_computed_once_before_the_tiles():
    fun = tile(lambda w, x: x @ jnp.exp(w), in_axes=(None, 0), tiles=4)
    assert executions(fun, W, X)["exp"] == 1


def test_masks_are_made_tile_by_tile():
    def scores(q, k):
        s = q @ k.T
        mask = jnp.tril(jnp.ones(s.shape, bool))
        return jax.nn.softmax(jnp.where(mask, s, -1e9), -1) @ k

    tiled = tile(scores, in_axes=(0, None), tiles=4)
    assert_trees_close(tiled(X, X), scores(X, X))
    graph = jaxckpt.trace(tiled, X, X)
    used = {graph.values[i].shape for op in graph.walk() if op.primitive in ("ge", "select_n") for i in op.outputs}
    assert (TOKENS, TOKENS) not in used and (TOKENS // 4, TOKENS) in used


# ------------------------------------------------------------------------------------------------------- random numbers


def test_dropout_draws_what_it_drew():
    def fun(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    tiled = tile(fun, in_axes=(None, 0), tiles=5)
    np.testing.assert_array_equal(tiled(KEYS[3], X), fun(KEYS[3], X))
    assert_trees_close(
        jax.grad(lambda x: jnp.sum(tiled(KEYS[3], x)))(X), jax.grad(lambda x: jnp.sum(fun(KEYS[3], x)))(X)
    )


def test_a_key_of_each_row_draws_what_it_drew():
    fun = jax.vmap(lambda key, x: x + jax.random.normal(jax.random.fold_in(key, 3), x.shape))
    keys = jax.random.split(KEYS[3], TOKENS)
    np.testing.assert_allclose(tile(fun, in_axes=0, tiles=5)(keys, X), fun(keys, X), rtol=1e-6)


def test_keys_of_rows_that_may_share_what_they_draw_are_refused():
    fun = jax.vmap(lambda key: jax.random.normal(key, (3,)))
    with pytest.raises(TilingError, match="other keys than threefry's"):
        tile(fun, in_axes=0, tiles=2)(jax.random.split(jax.random.key(0, impl="rbg"), 6))


# ------------------------------------------------------------------------------------------------ other transformations


def test_forward_mode_and_higher_orders():
    for fun, tiled in (
        (head, tiled_head(5)),
        (lambda w, x, t: summed(mlp)(w, x), lambda w, x, t: summed(tiled_mlp(5))(w, x)),
    ):
        assert_trees_close(
            jax.jvp(lambda x: tiled(W, x, T), (X,), (X,)), jax.jvp(lambda x: fun(W, x, T), (X,), (X,)), rtol=1e-3
        )
        for twice in (jax.hessian, lambda f, n: jax.jacrev(jax.jacrev(f, n), n)):
            expected = twice(fun, 1)(W, X[:6], T[:6])
            assert_trees_close(twice(tiled, 1)(W, X[:6], T[:6]), expected, rtol=1e-3, atol=1e-2)


def test_under_vmap_jit_and_scan():
    xs, ts = jnp.stack([X, X * 2.0]), jnp.stack([T, T[::-1]])
    grads = lambda fun: jax.jit(jax.vmap(jax.grad(fun, (0, 1)), in_axes=(None, 0, 0)))(W, xs, ts)
    assert_trees_close(grads(tiled_head(5)), grads(head))
    loop = lambda fun: jax.grad(lambda w: lax.scan(lambda c, x: (c + jnp.sum(jnp.sin(fun(w, x))), None), 0.0, xs)[0])(W)
    assert_trees_close(loop(tiled_mlp(5)), loop(mlp), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(fun):
        inside = lambda w, x, t: lax.pmean(fun(w, x, t), "d")
        specs = (spec(), spec("d"), spec("d"))
        return jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=spec(), check_vma=check_vma)

    grads = lambda fun: jax.jit(jax.value_and_grad(loss(fun), (0, 1)))(W, X, T)
    assert_trees_close(grads(tiled_head(5)), grads(head))
    rows = lambda fun: lambda w, x, t: jnp.sum(jnp.sin(fun(w, x)))
    assert_trees_close(grads(rows(tiled_mlp(5))), grads(rows(mlp)), rtol=1e-4, atol=1e-4)


def test_tiles_of_tiles():
    inner = tile(head, in_axes=(1, None, None), tiles=4)
    with pytest.raises(TilingError):
        inner(W, X, T)  # the softmax is over that axis
    block = tile(lambda w, x: jax.nn.gelu(x @ w), in_axes=(1, None), tiles=4, out_axes=1)
    both = tile(lambda w, x: jnp.sum(block(w, x) ** 2), in_axes=(None, 0), tiles=3)
    plain = lambda w, x: jnp.sum(jax.nn.gelu(x @ w) ** 2)
    assert_trees_close(jax.grad(both, (0, 1))(W, X), jax.grad(plain, (0, 1))(W, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [None, "dots"])
def test_a_checkpointed_function_and_a_checkpoint_around_it(policy):
    inside = tile(jaxckpt.checkpoint(head, policy=policy), in_axes=(None, 0, 0), tiles=5)
    around = jaxckpt.checkpoint(tiled_head(5), policy=policy)
    for fun in (inside, around):
        assert_trees_close(jax.grad(fun, (0, 1))(W, X, T), jax.grad(head, (0, 1))(W, X, T))


def test_a_checkpoint_stays_where_another_one_holds_a_sum_and_its_use():
    def encoder(table, w):
        for _ in range(12):
            table = jnp.sin(table @ w)
        return table

    def tail(w, table, x):
        total = jnp.sum(jnp.sin(x @ w @ table))
        return total / (1.0 + total * total)

    def fun(w, table, x):
        return jax.checkpoint(tail)(w, jax.checkpoint(encoder)(table, w), x)

    args = [jax.random.normal(key, (16, 16)) for key in KEYS[:3]]
    tiled, bare = (
        tile(f, in_axes=(None, None, 0), tiles=4) for f in (fun, lambda w, table, x: tail(w, encoder(table, w), x))
    )
    assert_trees_close(*(jax.grad(f, (0, 1, 2))(*args) for f in (tiled, fun)), rtol=1e-4, atol=1e-5)
    assert kept_bytes(bare, *args) > 3 * kept_bytes(tiled, *args)


def test_in_a_function_that_is_planned():
    def loss(fun):
        def of(ws, x):
            for w in ws:
                x = x + fun(w, x)
            return jnp.mean(x**2)

        return of

    ws = [W * 0.1] * 3
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (ws, X))
    plan = jaxckpt.plan(loss(tiled_mlp(4)), *args, budget="95%", target="cpu")
    assert_trees_close(jax.grad(plan.apply(loss(tiled_mlp(4))))(ws, X), jax.grad(loss(mlp))(ws, X), rtol=1e-4)


def test_a_custom_reverse_rule_is_used_and_followed():
    @jax.custom_vjp
    def cross_entropy(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, -1))

    def backward(kept, ct):
        w, x = kept
        p = jax.nn.softmax(x @ w, -1) * ct * 3.0  # so that it shows
        return x.T @ p, p @ w.T

    cross_entropy.defvjp(lambda w, x: (cross_entropy(w, x), (w, x)), backward)
    fun = lambda w, x: cross_entropy(w, x) / x.shape[0]
    tiled = tile(fun, in_axes=(None, 0), tiles=5)
    assert_trees_close(jax.grad(tiled, (0, 1))(W, X), jax.grad(fun, (0, 1))(W, X), rtol=1e-4)


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def _dense_backward(kept, cotangent):
    x, w, y = kept
    slope = 3.0 * cotangent * (1 - y * y)  # so that the rule shows
    return slope @ w.T, x.T @ slope


def _dense_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


dense.defvjp(_dense_forward, _dense_backward)

OF_RULES = {
    "a mean": lambda w, x: jnp.mean(dense(x, w) ** 2),
    "a sum": lambda w, x: jnp.sum(dense(x, w)),
    "one after the other": lambda w, x: jnp.mean(dense(dense(x, w), w) ** 2),
}
MODES = {
    "a gradient": lambda fun, w, x: jax.grad(fun, (0, 1))(w, x),
    "a hessian": lambda fun, w, x: jax.hessian(fun)(w, x),
    "forward over reverse": lambda fun, w, x: jax.jvp(lambda w: jax.grad(fun)(w, x), (w,), (w,))[1],
    "mixed": lambda fun, w, x: jax.jvp(lambda x: jax.grad(fun)(w, x), (x,), (x,))[1],
    "reverse over reverse": lambda fun, w, x: jax.grad(lambda w: jnp.sum(jax.grad(fun)(w, x) ** 2))(w),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OF_RULES)
@pytest.mark.parametrize("tiles", [4, 3])
def test_custom_reverse_rules_are_differentiated_again_as_in_jax(name, mode, tiles):
    """Forward mode has no rule of a `jax.custom_vjp`: what it differentiates must be what the rules compute."""
    w, x = 0.1 * jnp.sin(jnp.arange(16.0)).reshape(4, 4), jnp.linspace(-1, 1, 32).reshape(8, 4)
    of = MODES[mode]
    tiled = tile(OF_RULES[name], in_axes=(None, 0), tiles=tiles)
    assert_trees_close(of(tiled, w, x), of(OF_RULES[name], w, x), rtol=1e-4, atol=1e-6)


def test_the_planners_tiles_of_custom_reverse_rules_are_differentiated_again():
    def loss(w, x):
        for _ in range(3):
            x = x + dense(x, w)
        return jnp.mean(x**2)

    w, x = 0.1 * jnp.sin(jnp.arange(16.0)).reshape(4, 4), jnp.linspace(-1, 1, 2048).reshape(512, 4)
    plan = jaxckpt.plan(loss, w, x, budget="60%", target="cpu", tile=True)
    assert plan.tiles
    assert_trees_close(jax.hessian(plan.apply(loss))(w, x), jax.hessian(loss)(w, x), rtol=1e-3, atol=1e-5)


def test_a_custom_reverse_rule_has_no_derivative_in_what_it_closes_over():
    def closing(w, x):
        scaled = jax.custom_vjp(lambda y: y + 0 * jnp.sum(w))
        scaled.defvjp(lambda y: (y, None), lambda _, cotangent: (3.0 * cotangent,))
        return scaled(jnp.sin(x))

    tiled = tile(closing, in_axes=(None, 0), tiles=3)
    for fun in (jax.jit(closing), tiled):
        with pytest.raises(Exception, match="with respect to a closed-over value"):
            jax.grad(summed(fun))(W, X)
    assert_trees_close(*(jax.grad(summed(f), 1)(W, X) for f in (tiled, jax.jit(closing))), rtol=1e-4, atol=1e-5)


def test_a_rule_that_couples_in_its_derivative_alone_is_refused():
    @jax.custom_vjp
    def fun(x):
        return x * 2.0

    fun.defvjp(lambda x: (x * 2.0, None), lambda _, ct: (ct - jnp.mean(ct, 0),))
    with pytest.raises(TilingError):
        jax.grad(summed(tile(fun, in_axes=0, tiles=2)))(X)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_results_are_arrays():
    with pytest.raises(ArgumentError, match="fun must be a function that returns arrays; got 'a'"):
        tile(lambda x: (x, "a"), in_axes=0, tiles=2)(X)


@pytest.mark.parametrize("tiles", [0, -1, 1.5, True, "2"])
def test_the_number_of_tiles_is_a_positive_whole_number(tiles):
    with pytest.raises(ArgumentError, match="tiles must be a whole number of at least 1"):
        tile(mlp, in_axes=(None, 0), tiles=tiles)


@pytest.mark.parametrize("parts", [0, -1, 1.5, True, "2"])
def test_the_number_of_parts_is_a_positive_whole_number(parts):
    with pytest.raises(ArgumentError, match="parts must be None or a whole number of at least 1"):
        tile(head, in_axes=(None, 0, 0), tiles=2, parts=parts)


@pytest.mark.parametrize(("tiles", "parts"), [(2, 5), (13, 2), (2, 24), (2, 48)])
def test_parts_divide_the_rows_and_have_one_for_each_tile(tiles, parts):
    with pytest.raises(ArgumentError, match=f"parts must be a divisor of the 24 rows, with {tiles} rows or more"):
        tile(head, in_axes=(None, 0, 0), tiles=tiles, parts=parts)(W, X, T)


@pytest.mark.parametrize("in_axes", [None, (None, None), (0, "1"), (0, 1.0), (True, 0)])
def test_axes_are_ints_or_none(in_axes):
    with pytest.raises(ArgumentError, match="in_axes must be an int"):
        tile(mlp, in_axes=in_axes, tiles=2)


@pytest.mark.parametrize(
    ("in_axes", "args", "message"),
    [
        ((None, 2), (W, X), r"args\[1\] must be an array that has axis 2"),
        ((None, 0), (W, 3.0), r"args\[1\] must be an array that has axis 0"),
        ((0, 0), (W, X), r"args\[1\] must be an array with 8 rows along axis 0, as args\[0\] has along axis 0"),
        ((None, 0, 0), (W, X), "in_axes must be .* each of the 2 positional arguments"),
        ((None, {"x": 0}), (W, X), r"in_axes\[1\] must be a prefix"),
        ((None, 0), (W, X[:3]), "tiles must be at most the size of the axis, 3"),
    ],
)
def test_arguments_that_do_not_fit(in_axes, args, message):
    with pytest.raises(ArgumentError, match=message):
        tile(mlp, in_axes=in_axes, tiles=4)(*args)


@pytest.mark.parametrize("out_axes", [1, None, (0,)])
def test_results_have_the_axis_where_out_axes_says(out_axes):
    with pytest.raises(ArgumentError, match="out_axes"):
        tile(mlp, in_axes=(None, 0), tiles=4, out_axes=out_axes)(W, X)


def test_an_array_that_is_given_twice_with_different_axes():
    square = jnp.arange(16.0).reshape(4, 4)
    fun = lambda a, b, c, mode=None: a + b.T + c[0]
    tiled = tile(fun, in_axes=(0, 1, None), tiles=2)
    assert_trees_close(tiled(square, square, square), fun(square, square, square))
    with pytest.raises(ArgumentError, match="Give a copy"):
        tiled(square, square, square, mode="text")
    copies = square, square + 0.0, square * 1.0
    assert_trees_close(tiled(*copies, mode="text"), fun(*copies))


def test_side_effects_are_refused():
    def fun(x):
        jax.debug.print("{}", x[0])
        return x

    with pytest.raises(EffectsError, match="must have no side effects to be tiled"):
        tile(fun, in_axes=0, tiles=2)(X)
    seen = []
    with pytest.raises(EffectsError, match="Python objects"):
        tile(lambda x: seen.append(x) or x, in_axes=0, tiles=2)(X)


def test_the_error_names_the_operation_its_line_and_what_to_do():
    with pytest.raises(TilingError) as raised:
        tile(lambda x: x - jnp.mean(x, 0), in_axes=0, tiles=2)(X)
    error = raised.value
    assert error.operation == "sub" and "test_tile.py" in error.line
    assert "the sum over all rows that reduce_sum at test_tile.py:" in error.reason
    assert str(error).startswith("fun must be made of operations that run tile by tile")
    assert str(error).endswith("a variance in tiles is jnp.mean(x**2) - jnp.mean(x) ** 2. Or tile another axis.")


@pytest.mark.parametrize(
    ("fun", "hint"),
    [
        (lambda x: x[jnp.arange(TOKENS), jnp.zeros(TOKENS, int)], "write jnp.take_along_axis"),
        (lambda x: x.reshape(2, -1, WIDTH), "Split it before, and tile the outer part."),
        (lambda x: x @ x.T, "Give one of both whole: None in in_axes."),
        (lambda x: jax.lax.scan(lambda c, _: (c - c.mean(0), None), x, None, length=2)[0], "leave this operation out"),
        (lambda x: jnp.cumsum(x, 0), "Tile another axis, or leave this operation out of the tiled function."),
    ],
)
def test_the_error_says_what_to_write_instead(fun, hint):
    with pytest.raises(TilingError) as raised:
        tile(fun, in_axes=0, tiles=2)(X)
    assert hint in str(raised.value)


@jax.custom_vjp
def clipped(x):
    """Clips the gradient that comes back."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -1e-2, 1e-2),))


def test_a_backward_rule_that_clips_sees_the_cotangents_that_it_saw():
    fun = lambda w, x: jnp.mean(jnp.tanh(clipped(x @ w)) ** 2)
    args = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, 3)), jnp.float32), X
    for scale in (1.0, 1e-3, 1e3):
        scaled = lambda f, scale=scale: lambda *args: scale * f(*args)
        tiled = tile(fun, in_axes=(None, 0), tiles=3)
        expected = jax.grad(scaled(fun), (0, 1))(*args)
        assert_trees_close(jax.grad(scaled(tiled), (0, 1))(*args), expected)
    unclipped = jax.grad(lambda w, x: 1e3 * jnp.mean(jnp.tanh(x @ w) ** 2))(*args)
    assert not np.allclose(unclipped, jax.grad(scaled(fun))(*args)), "else nothing was clipped"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32])
def test_counts_are_those_of_all_rows_in_narrow_dtypes_too(dtype):
    rows = 5_000
    fun = lambda x: x + jnp.arange(rows, dtype=dtype).astype(jnp.float32)
    assert np.array_equal(tile(fun, in_axes=0, tiles=7)(jnp.zeros(rows)), fun(jnp.zeros(rows)))


@pytest.mark.parametrize("check", [True, False])
def test_a_loss_with_collectives_inside_of_shard_map(check):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.PartitionSpec()

    def fun(w, x):
        return jnp.mean(lax.psum(jnp.tanh(x @ w) @ w.T, "a") ** 2)

    mapped = lambda f: jax.shard_map(
        f, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(None, "a"), whole), out_specs=whole, check_vma=check
    )
    args = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, 4)), jnp.float32), X
    tiled = mapped(tile(fun, in_axes=(None, 0), tiles=3))
    assert_trees_close(tiled(*args), mapped(fun)(*args))
    assert_trees_close(jax.grad(tiled, (0, 1))(*args), jax.grad(mapped(fun), (0, 1))(*args))
    expected = jax.jvp(mapped(fun), args, args)[1]
    assert_trees_close(jax.jvp(tiled, args, args)[1], expected)


def test_a_metric_behind_stop_gradient_leaves_the_loss_as_cheap():
    def fun(w, x, t):
        loss = head(w, x, t)
        return loss, lax.stop_gradient(jnp.mean(jnp.max(x @ w, -1)))

    step = lambda f: jax.value_and_grad(f, (0, 1), has_aux=True)
    tiled = tile(fun, in_axes=(None, 0, 0), tiles=4)
    args = W, X, T
    assert_trees_close(step(tiled)(*args), step(fun)(*args))
    assert jaxckpt.count_flops(step(tiled), *args) < 1.1 * jaxckpt.count_flops(step(fun), *args)


def test_what_follows_several_sums_and_has_no_rule_runs_after_the_tiles():
    fun = lambda x: jax.nn.relu(jnp.sum(x) + jnp.sum(x**2)) + jax.nn.softplus(jnp.mean(x) + jnp.mean(jnp.sin(x)))
    tiled = tile(fun, in_axes=0, tiles=3)
    assert_trees_close(jax.value_and_grad(tiled)(X), jax.value_and_grad(fun)(X))


def test_keywords_beside_the_tiled_arguments():
    fun = lambda x, mode, train=False: x * (2.0 if train else 3.0) if mode == "b" else x
    tiled = tile(fun, in_axes=(0, None), tiles=2)
    assert_trees_close(tiled(X, mode="b", train=True), 2 * X)
    assert_trees_close(tiled(X, "b"), 3 * X)


def test_out_axes_count_from_the_end_too():
    fun = lambda x: jnp.tanh(x).T
    assert_trees_close(tile(fun, in_axes=0, tiles=2, out_axes=-1)(X), fun(X))
    for wrong in (-2, -9, 0):
        with pytest.raises(ArgumentError, match="out_axes must be 1 for the result"):
            tile(fun, in_axes=0, tiles=2, out_axes=wrong)(X)


def test_an_array_without_elements():
    fun = lambda x: (x.reshape(4, 3, 0), jnp.sum(x))
    with pytest.raises(TilingError, match="without elements"):
        tile(fun, in_axes=0, tiles=2)(jnp.zeros((4, 0, 3)))


@pytest.mark.parametrize(("tiles", "parts"), [(3, 2), (3, 4), (2, 12), (5, 3), (1, 24)])
def test_tiles_of_rows_of_every_part(tiles, parts):
    """Masks, counters, uneven tiles, forward mode and second derivatives, where a tile's rows are not consecutive."""
    cut = functools.partial(tile, tiles=tiles, parts=parts)

    def masked(w, x):
        position = lax.broadcasted_iota(jnp.int32, (TOKENS, WORDS), 0)
        return jnp.where(position % 5 < 3, jnp.sin(x @ w) * position, 0.0)

    rows, whole = cut(masked, in_axes=(None, 0)), cut(head, in_axes=(None, 0, 0))
    grads = lambda fun, *args: jax.value_and_grad(fun, (0, 1))(*args)
    assert_trees_close(rows(W, X), masked(W, X))
    assert_trees_close(grads(summed(rows), W, X), grads(summed(masked), W, X), rtol=1e-4, atol=1e-4)
    assert_trees_close(grads(whole, W, X, T), grads(head, W, X, T))
    turned = lambda fun: jax.jvp(jax.grad(lambda x: jnp.sum(fun(W, x) ** 2)), (X,), (jnp.cos(X),))
    assert_trees_close(turned(rows), turned(masked), rtol=1e-4, atol=1e-2)
    merged = lambda x: jnp.tanh(x.reshape(-1, TOKENS * 4)) @ jnp.eye(TOKENS * 4)[:, :3]
    blocks = lambda x: jnp.tanh(x.reshape(2, TOKENS * 4)) * 2
    x = jax.random.normal(KEYS[3], (2, TOKENS, 4))
    assert_trees_close(cut(merged, in_axes=1)(x), merged(x))
    assert_trees_close(cut(blocks, in_axes=1, out_axes=1)(x), blocks(x))


# ------------------------------------------------------------------------------------------------ derivatives of users'


@jax.custom_jvp
def straight_through(x):
    """Rounds, and has the derivative of what it rounds."""
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


@pytest.mark.parametrize("parts", [1, 2])
def test_second_derivatives_of_a_loss_follow_a_rule_that_is_not_the_functions_own(parts):
    """Without its rule the second derivative of what is rounded is zero."""
    loss = lambda w, x: jnp.sum(straight_through(x @ w) ** 2)
    tiled = tile(loss, in_axes=(None, 0), tiles=4, parts=parts)
    w, x = W[:, 0] * 3, X
    expected = jax.hessian(loss)(w, x)
    assert jnp.max(jnp.abs(expected)) > 1
    for order in (jax.hessian, lambda fun: jax.jacrev(jax.jacrev(fun)), lambda fun: jax.jacfwd(jax.jacfwd(fun))):
        np.testing.assert_allclose(order(tiled)(w, x), expected, rtol=1e-4)
    assert executions(jax.grad(tiled), w, x)["dot_general"] == 4 * 2, "the gradients come with the loss"


@pytest.fixture
def flag(request):
    if not hasattr(jax.config, request.param):
        pytest.skip(f"this JAX has no {request.param}")
    old = getattr(jax.config, request.param)
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, old)


@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3"], indirect=True)
def test_gradients_under_flags_that_give_jax_other_checkpoints_and_rules(flag):
    clip = jax.custom_vjp(lambda w: w)
    clip.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    step = lambda w, x: jnp.tanh(x @ clip(w))
    for fun in (step, jax.checkpoint(step), lambda w, x: jnp.mean(jnp.sin(x @ clip(w)))):
        tiled = tile(fun, in_axes=(None, 0), tiles=3)
        assert_trees_close(*(jax.grad(summed(each), (0, 1))(W, X) for each in (tiled, fun)), rtol=1e-4, atol=1e-4)
    for looped in (
        lambda w, x: lax.fori_loop(0, 2, lambda i, x: step(w, x) @ w.T, x),
        lambda w, x: lax.cond(w[0, 0] > -9, step, lambda w, x: x @ w, w, x),
    ):
        with pytest.raises(TilingError, match="has a backward rule of its own"):
            tile(looped, in_axes=(None, 0), tiles=3)(W, X)


# ------------------------------------------------------------------------------------------------------- odd arguments


@pytest.mark.parametrize(
    ("settings", "args", "message"),
    [
        ({"in_axes": {"w": None, "x": 0}, "tiles": 2}, (X,), "in_axes must be an int, or a tuple.*a pytree"),
        ({"in_axes": 0, "tiles": np.array([1, 2])}, (X,), "tiles must be a whole number of at least 1"),
        ({"in_axes": 0, "tiles": 2.0}, (X,), "tiles must be a whole number of at least 1; got 2.0"),
        ({"in_axes": 0, "tiles": 2, "parts": 0.5}, (X,), "parts must be None or a whole number"),
        (
            {"in_axes": (0, 0), "tiles": 2},
            (X,),
            r"args must be the arguments of fun, \(x, y\); got 1 positional argument",
        ),
        ({"in_axes": 0, "tiles": 2}, (jax.ShapeDtypeStruct((4, 4), jnp.float32), X[:4]), r"args\[0\] must be an array"),
    ],
)
def test_arguments_that_no_error_of_pythons_explains(settings, args, message):
    def fun(x, y):
        return x + y

    with pytest.raises(ArgumentError, match=message):
        tile(fun, **settings)(*args)


def test_numbers_of_numpy_and_jax_are_numbers():
    fun = tile(jnp.sin, in_axes=np.int64(0), out_axes=np.int32(0), tiles=jnp.asarray(3), parts=np.int64(2))
    np.testing.assert_allclose(fun(X), jnp.sin(X), rtol=1e-6)
    with pytest.raises(ArgumentError, match="must be known while the function is traced"):
        jax.jit(lambda count: tile(jnp.sin, in_axes=0, tiles=count)(X))(3)


def test_a_batch_of_one_row_may_couple_and_has_no_side_effects_either():
    centred = tile(lambda x: x - x.mean(0), in_axes=0, tiles=1)
    np.testing.assert_array_equal(centred(X[:1]), jnp.zeros_like(X[:1]))
    assert jax.grad(lambda x: jnp.sum(centred(x) ** 2))(X[:1]).shape == (1, WIDTH)

    def printing(x):
        jax.debug.print("a row")
        return x

    with pytest.raises(EffectsError, match="no side effects"):
        tile(printing, in_axes=0, tiles=1)(X[:1])


def test_batches_of_many_sizes_do_not_fill_the_memory():
    fun = lambda x: jnp.sin(x)
    divisions = importlib.import_module("jaxckpt.transforms.tile")._divisions
    for rows in range(2, DIVISIONS + 12):
        tile(fun, in_axes=0, tiles=2)(np.ones((rows, 1), np.float32))
    assert len(divisions(fun)) == DIVISIONS


def test_what_maps_over_devices_is_tiled_inside():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    with pytest.raises(TilingError, match="shard_map .* use jaxckpt.tile in what it maps"):
        tile(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec), in_axes=0, tiles=2)(X)


# ------------------------------------------------------------------------------------------------------------- memory


def peaks(fun, tiled, args, target):
    step = lambda f: jax.value_and_grad(f, (0, 1))
    return [jaxckpt.measure(step(f), *args, target=target, generate_code=False).peak_bytes for f in (fun, tiled)]


BIG = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((64, 8192), jnp.float32), ((4096, 64), jnp.float32), ((4096,), jnp.int32))
]


@pytest.mark.parametrize(
    "target",
    ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)],
)
@pytest.mark.parametrize("kind", ["loss", "rows"])
def test_the_compiled_peak_falls(kind, target):
    if kind == "loss":
        whole, tiled = peaks(head, tiled_head(16), BIG, target)
    else:
        of = lambda fun: lambda w, x: jnp.sum(fun(w, x) ** 2)
        whole, tiled = peaks(of(mlp), of(functools.partial(tiled_mlp(16))), BIG[:2], target)
    assert tiled < whole / 4, (whole, tiled)
