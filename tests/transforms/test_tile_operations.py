"""Each operation that an axis passes through: in tiles it is what it is without, and it runs in the tiles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import TilingError, tile
from jaxckpt.core import primitives
from jaxckpt.core.tiling import axes, divide  # noqa: F401 (the second notes all rules)
from tests.helpers import assert_trees_close

N, TILES, PARTS = 10, 3, 2
"""Two tiles of four rows, two of each half of the axis, and one of two rows."""


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def positive(m):
    return jnp.einsum("nij,nkj->nik", m, m) + 3 * jnp.eye(m.shape[-1])


X, Y, W = normal(N, 4), normal(N, 4, seed=1), normal(4, 5, seed=2)
M, IMAGES = normal(N, 3, 3, seed=3), normal(N, 8, 4, seed=4)
PLACES = jax.random.randint(jax.random.key(5), (N, 1), 0, 4)
TABLE = normal(10, 4, seed=6)
KEYS = jax.random.split(jax.random.key(7), N)
NUMBERS = lax.GatherDimensionNumbers((1,), (0,), (0,))


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def window(x, start, each):
    return lax.reduce_window(x, start, each, (1, 3, 1), (1, 2, 1), "SAME")


def generic_window(x):
    return window(x, jnp.float32(1), lambda a, b: a * b)


def several(x, y):
    return lax.reduce((x, y), (jnp.float32(0), jnp.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))


def scattered(how, x, updates):
    return getattr(x.at[:, 1:3], how)(updates[:, :2])


def rows_scattered(how, x, y, places):
    return jax.vmap(lambda row, new, place: getattr(row.at[place], how)(new[:1]))(x, y, places)


CASES = {
    "abs": (jnp.abs, (X,)),
    "argmax": (functools.partial(jnp.argmax, axis=1), (X,)),
    "argmin": (functools.partial(jnp.argmin, axis=-1), (X,)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (X,)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x[:, None], (N, 2, 4)) * 2.0, (X,)),
    "cholesky": (lambda m: jnp.linalg.cholesky(positive(m)), (M,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), (X, Y)),
    "conv_general_dilated": (conv, (IMAGES, normal(3, 4, 6)), (0, None)),
    "custom_linear_solve": (lambda m, x: jnp.linalg.solve(positive(m), x[:, :3, None]), (M, X)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1, reverse=True), (X,)),
    "cummax": (lambda x: lax.cummax(x, 1), (X,)),
    "cummin": (lambda x: lax.cummin(x, 1, reverse=True), (X,)),
    "cumprod": (lambda x: lax.cumprod(x, 1), (X,)),
    "cumsum": (lambda x: lax.cumsum(x, 1, reverse=True), (X,)),
    "dot_general": (lambda x, w: x @ w, (X, W), (0, None)),
    "dynamic_slice": (lambda x: lax.dynamic_slice_in_dim(x, 1, 2, 1), (X,)),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice_in_dim(x, y[:, :2], 1, 1), (X, Y)),
    "eig": (lambda m: jnp.sort(jnp.abs(jnp.linalg.eigvals(m))), (M,), 0, 0, False),
    "eigh": (lambda m: jnp.linalg.eigvalsh(positive(m)), (M,)),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)), (X,)),
    "gather": (lambda table, places: table[places[:, 0]], (TABLE, PLACES), (None, 0)),
    "geqrf": (lambda m: jnp.linalg.qr(m, mode="raw")[1], (M,), 0, 0, False),
    "householder_product": (lax.linalg.householder_product, (normal(N, 4, 3), normal(N, 3)), 0, 0, False),
    "lu": (lambda m: lax.linalg.lu(positive(m))[0], (M,)),
    "pad": (lambda x: lax.pad(x, jnp.float32(2), ((0, 0, 0), (-1, 2, 1))), (X,)),
    "qr": (lambda m: jnp.linalg.qr(positive(m))[1], (M,)),
    "random_bits": (jax.vmap(lambda key: jax.random.bits(key, (3,))), (KEYS,)),
    "random_seed": (jax.vmap(lambda n: jax.random.bits(jax.random.key(n), (3,))), (PLACES[:, 0],)),
    "random_split": (jax.vmap(lambda key: jax.random.bits(jax.random.split(key)[1])), (KEYS,)),
    "random_unwrap": (jax.random.key_data, (KEYS,)),
    "random_wrap": (lambda data: jax.vmap(jax.random.bits)(jax.random.wrap_key_data(data)), (jax.random.key_data(KEYS),)),
    "reduce": (several, (X, Y), 0, 0, False),
    "reduce_and": (lambda x: jnp.all(x > -1, 1), (X,)),
    "reduce_max": (lambda x: jnp.max(x, (1, 2)), (IMAGES,)),
    "reduce_min": (lambda x: jnp.min(x, 1), (X,)),
    "reduce_or": (lambda x: jnp.any(x > 1, 1), (X,)),
    "reduce_prod": (lambda x: jnp.prod(x, 1), (X,)),
    "reduce_sum": (lambda x: jnp.sum(x, (0, 2)), (IMAGES,)),
    "reduce_window": (generic_window, (IMAGES,), 0, 0, False),
    "reduce_window_max": (lambda x: window(x, -jnp.inf, lax.max), (IMAGES,)),
    "reduce_window_min": (lambda x: window(x, jnp.inf, lax.min), (IMAGES,), 0, 0, False),
    "reduce_window_sum": (lambda x: window(x, 0.0, lax.add), (IMAGES,)),
    "reduce_xor": (lambda n: lax.reduce_xor(n, (1,)), (PLACES,)),
    "reshape": (lambda x: jnp.reshape(x, (N * 2, 16)) * 2.0, (IMAGES,)),
    "rev": (lambda x: x[:, ::-1], (X,)),
    "scatter": (functools.partial(rows_scattered, "set"), (X, Y, PLACES)),
    "scatter-add": (lambda x, places: jnp.zeros((10, 4)).at[places[:, 0]].add(x), (X, PLACES)),
    "scatter-max": (functools.partial(scattered, "max"), (X, Y)),
    "scatter-min": (functools.partial(rows_scattered, "min"), (X, Y, PLACES)),
    "scatter-mul": (functools.partial(scattered, "multiply"), (X, Y)),
    "scatter-sub": (functools.partial(rows_scattered, "subtract"), (X, Y, PLACES)),
    "slice": (lambda x: lax.slice_in_dim(x, 0, 4, 2, 1), (X,)),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=2), (X, Y)),
    "split": (lambda x: lax.split(x, (1, 3), 1), (X,)),
    "squeeze": (lambda x: lax.squeeze(x[:, None], (1,)) * 2.0, (X,)),
    "stack": (lambda x, y: jnp.stack([x, y], 0), (X, Y), 0, 1),
    "svd": (lambda m: jnp.linalg.svd(m, compute_uv=False), (M,)),
    "tile": (lambda x: jnp.tile(x, (1, 3)), (X,)),
    "top_k": (lambda x: lax.top_k(x, 2), (X,)),
    "transpose": (lambda x: x.T * 2.0, (X,), 0, 1),
    "triangular_solve": (lambda m: lax.linalg.triangular_solve(positive(m), m, lower=True, left_side=True), (M,)),
    "unstack": (lambda x: jnp.unstack(x, axis=1), (X,)),
}  # fmt: skip
"""Primitive -> (function, arguments, in_axes or 0, out_axes or 0, whether JAX has its derivative or True)."""

WRITTEN_DIFFERENTLY = {
    "broadcast_in_dim", "random_seed", "scatter", "scatter-sub", "scatter-mul", "squeeze", "split", "stack", "tile",
    "unstack", "slice", "reduce_xor",
}  # fmt: skip
"""Some version of JAX makes other primitives of these functions, or uses these outside of the tiles, too."""

ELSEWHERE = {
    "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call", "device_put", "eval_jaxpr",
    "jaxckpt_hold_on_host", "jaxckpt_start_of_backward", "jaxckpt_tie", "jit", "optimization_barrier", "pjit",
    "psum_invariant", "pvary", "remat", "remat2", "scan", "shard_map", "while",
}  # fmt: skip
"""Operations that hold programs, those that jax.shard_map puts in, and those of values on the host: test_tile.py,
test_tile_sharded.py, test_tile_random.py and actions/test_offload.py tile them.
"""

AROUND = [(0, 1), (1, 2), (2, 0)]
BETWEEN = {
    "pbroadcast": lambda w, x: lax.pbroadcast(x @ w, "i", 1),
    "pmax": lambda w, x: lax.pmax(lax.stop_gradient(x @ w), "i") + x @ w,
    "pmin": lambda w, x: lax.pmin(lax.stop_gradient(x @ w), "i") + x @ w,
    "ppermute": lambda w, x: lax.ppermute(jnp.sin(x @ w), "i", AROUND),
    "psum": lambda w, x: lax.psum(jnp.sin(x @ w), "i"),
}
"""Operation between devices -> a function of weights and rows with it."""


def weighed(fun):
    """Returns a function of which each result counts in the gradient."""

    def total(*args):
        leaves = [leaf for leaf in jax.tree.leaves(fun(*args)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(leaf * normal(*leaf.shape, seed=8)) for leaf in leaves)

    return total


def in_branches(fun, other):
    """Returns a function of rows that sums them within a branch, where the sum is not complete."""
    return lambda x: lax.cond(W[0, 0] > -9, lambda x: fun(x.sum(0)), lambda x: other(x.sum(0)), x)


def runs_in_tiles(tiled, *args):
    """Whether a function runs a loop: equal values would be equal without tiles, too."""
    return "scan" in {op.primitive for op in jaxckpt.trace(tiled, *args).walk()}


def floats(args):
    return tuple(place for place, each in enumerate(args) if jnp.issubdtype(each.dtype, jnp.floating))


@pytest.mark.parametrize("name", CASES)
def test_an_operation_in_tiles_is_what_it_is_without_them(name):
    fun, args, in_axes, out_axes, smooth = (*CASES[name], *(0, 0, True)[len(CASES[name]) - 2 :])
    tiled = tile(fun, in_axes=in_axes, tiles=TILES, out_axes=out_axes, parts=PARTS)
    assert_trees_close(jax.jit(tiled)(*args), fun(*args), rtol=1e-4, atol=1e-4)
    if smooth and floats(args) and jax.tree.leaves(jax.eval_shape(fun, *args))[0].dtype == jnp.float32:
        gradients = [jax.grad(weighed(each), floats(args))(*args) for each in (tiled, fun)]
        assert_trees_close(*gradients, rtol=1e-3, atol=1e-3)
    graph = jaxckpt.trace(tiled, *args)
    outside, everywhere = {op.primitive for op in graph.ops}, {op.primitive for op in graph.walk()}
    assert "scan" in everywhere
    if name not in WRITTEN_DIFFERENTLY:
        assert name in everywhere and (name not in outside or name in {"reshape", "dynamic_slice", "transpose"})


@pytest.mark.parametrize("of", ["rows", "sums", "loss"])
@pytest.mark.parametrize("name", BETWEEN)
def test_an_operation_between_devices_in_tiles_is_what_it_is_without_them(name, of):
    made = {
        "rows": BETWEEN[name],
        "sums": lambda w, x: BETWEEN[name](jnp.eye(W.shape[1]), jnp.sin(x @ w).sum(0)),
        "loss": lambda w, x: jnp.sum(jnp.sin(BETWEEN[name](w, x))),
    }[of]
    stacked = jnp.stack([normal(*X.shape, seed=seed) for seed in range(3)])
    tiled = tile(made, in_axes=(None, 0), tiles=TILES, parts=PARTS)
    inside = jax.make_jaxpr(tiled, axis_env=[("i", 3)])(W, X)
    assert any(name in str(eqn) for eqn in inside.eqns) and "scan" in str(inside)
    if name == "pbroadcast":  # JAX runs it on GPUs only, and has no derivative of it
        return
    mapped = [jax.vmap(fun, in_axes=(None, 0), axis_name="i") for fun in (tiled, made)]
    assert_trees_close(*(jax.jit(fun)(W, stacked) for fun in mapped), rtol=1e-4, atol=1e-4)
    gradients = [jax.grad(weighed(fun), (0, 1))(W, stacked) for fun in mapped]
    assert_trees_close(*gradients, rtol=1e-3, atol=1e-3)


def test_each_operation_with_a_rule_is_tried_here_or_elsewhere():
    tried = {*CASES, *BETWEEN, *ELSEWHERE}
    assert set(axes.RULES) - tried == set()
    assert {name for name in tried - set(axes.RULES) if not primitives.of(name).elementwise} == set()


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
        lambda x: jnp.digitize(x, jnp.arange(4.0)),
        jax.vmap(lambda row: jnp.nonzero(row > 0, size=4)[0]),
        jax.vmap(lambda row: jax.random.choice(jax.random.key(0), 4, (2,), p=jax.nn.softmax(row))),
        lambda x: jnp.median(x, 1),
        lambda x: jnp.quantile(x, 0.3, axis=1),
    ],
    ids=["interp", "digitize", "nonzero", "choice", "median", "quantile"],
)
def test_functions_that_some_jax_makes_one_operation_of(fun):
    tiled = tile(fun, in_axes=0, tiles=3)
    assert_trees_close(tiled(X), fun(X), rtol=1e-5, atol=1e-5)
    assert runs_in_tiles(tiled, X)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.fori_loop(0, 3, lambda i, c: c.at[i].set(jnp.sum(x * i)), jnp.zeros(3)),
        lambda x: lax.fori_loop(0, 2, lambda i, c: c + jnp.concatenate([x.sum(0), x.sum(0)]), jnp.zeros(8)),
        in_branches(lambda s: jnp.pad(s, 2)[1:-1], lambda s: jnp.tile(s, 2)[:6]),
        in_branches(lambda s: s.at[1].set(s[0]), lambda s: s.at[jnp.array([0, 0])].add(s[:2])),
        in_branches(lambda s: s[PLACES[:, 0]], lambda s: jnp.stack([s[0]] * N)),
    ],
    ids=["written", "concatenated", "padded", "scattered", "gathered"],
)
def test_sums_over_the_axis_are_moved_inside_of_loops_and_branches(fun):
    """A sum is complete after the last tile only; what moves terms of it moves the sum."""
    tiled = tile(fun, in_axes=0, tiles=3)
    assert runs_in_tiles(tiled, X)
    assert_trees_close(tiled(X), fun(X), rtol=1e-5, atol=1e-5)
    assert_trees_close(*(jax.grad(weighed(each))(X) for each in (tiled, fun)), rtol=1e-5, atol=1e-5)


def test_a_gather_that_fills_in_a_number_is_not_a_sum():
    """Each tile would add it."""
    filled = lambda s: s.at[jnp.array([0, 7])].get(mode="fill", fill_value=5.0)
    fun = in_branches(filled, lambda s: s[:2])
    with pytest.raises(TilingError, match="gather .* needs the whole sum"):
        tile(fun, in_axes=0, tiles=3)(X)


def test_the_sign_of_a_complex_number_has_a_derivative_where_jax_says_so():
    rows = lambda x: jnp.real(jnp.sign(x + 1j * x**2))
    for fun, tiled in (
        (lambda x: jnp.sum(rows(x) ** 3), lambda x: jnp.sum(tile(rows, in_axes=0, tiles=2)(x) ** 3)),
        (lambda x: jnp.sum(rows(x)), tile(lambda x: jnp.sum(rows(x)), in_axes=0, tiles=2)),
    ):
        np.testing.assert_allclose(jax.grad(tiled)(X), jax.grad(fun)(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, row in primitives.TABLE.items() if row.flat])
def test_what_the_table_calls_flat_has_no_derivative(name):
    fun = {"stop_gradient": lax.stop_gradient}.get(name) or getattr(lax, name)
    x = jnp.asarray([1.3, -0.7])
    assert primitives.is_flat(name, x.dtype)
    assert not jnp.any(jax.jvp(fun, (x,), (x,))[1])


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_of_eight_bit_floats_add_up_in_float32(whole):
    """JAX promotes no 8-bit floats, so what they are added up in has to be asked for."""
    narrow = jnp.float8_e4m3fn
    if whole:
        fun = lambda x, w: jnp.sum(lax.dot(x.astype(narrow), w, preferred_element_type=jnp.float32))
        args, in_axes, place = (X, W.astype(narrow)), (0, None), 1
    else:
        fun, args, in_axes, place = lambda x: jnp.sum(x.astype(jnp.float32) ** 2), (X.astype(narrow),), 0, 0
    actual, expected = (jax.grad(f, place)(*args) for f in (tile(fun, in_axes=in_axes, tiles=3), fun))
    assert actual.dtype == narrow
    np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.13, atol=0.05)


def test_a_long_chain_of_operations_on_a_whole_value_is_made_tile_by_tile():
    """Longer than Python's stack is deep."""

    def fun(x, w):
        mask = jnp.broadcast_to(w, x.shape)
        for _ in range(1500):
            mask = mask * 1.00001
        return x * mask

    tiled = tile(fun, in_axes=(0, None), tiles=2)
    np.testing.assert_allclose(tiled(X, W[:, 0]), fun(X, W[:, 0]), rtol=1e-4)
    top = [op for op in jaxckpt.trace(tiled, X, W[:, 0]).ops if op.primitive == "mul"]
    assert len(top) < 10, "the mask is not whole in memory"


def test_a_mask_that_is_read_twice_is_not_whole_in_memory():
    def fun(x):
        causal = jnp.arange(N)[:, None] >= jnp.arange(64)
        return jnp.sum(jnp.where(causal, x, 0.0)) + jnp.sum(jnp.where(causal, jnp.sin(x), 1.0))

    x = normal(N, 64)
    tiled = tile(fun, in_axes=0, tiles=3)
    np.testing.assert_allclose(tiled(x), fun(x), rtol=1e-5)
    graph = jaxckpt.trace(tiled, x)
    assert not [op for op in graph.walk() for out in op.outputs if graph.values[out].shape == (N, 64)]


@pytest.mark.parametrize(
    "fun",
    [
        lambda m, x: jnp.linalg.inv(positive(m)),
        lambda m, x: jnp.linalg.slogdet(positive(m))[1],
        lambda m, x: jnp.linalg.solve(positive(M)[0], x[:, :3].T).T,
        jax.vmap(lambda m, x: jax.scipy.linalg.cho_solve((jnp.eye(3) * 2 + jnp.tril(m) * 0.1, True), x[:3])),
        lambda m, x: jax.scipy.linalg.solve_triangular(positive(M)[0], jax.device_put(x)[:, :3].T, lower=True).T,
        lambda m, x: jax.vmap(jax.scipy.linalg.expm)(0.1 * m),
    ],
    ids=["inverse", "determinant", "one matrix", "cholesky", "triangle", "exponential"],
)
def test_equations_of_each_row_are_solved_in_tiles(fun):
    tiled = tile(fun, in_axes=0, tiles=TILES, parts=PARTS)
    assert runs_in_tiles(tiled, M, X)
    assert_trees_close(tiled(M, X), fun(M, X), rtol=1e-3, atol=1e-3)
    assert_trees_close(*(jax.grad(weighed(each), (0, 1))(M, X) for each in (tiled, fun)), rtol=1e-2, atol=1e-3)
