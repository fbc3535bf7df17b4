"""trace: what a graph says of values and operations, and that it sees into everything that a program may hold."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt.core.graph import trace
from jaxckpt.core.lift import count_flops

X = jnp.ones((8, 16))
W = jnp.ones((16, 16))


def ops(graph):
    return [op.primitive for op in graph.walk()]


def test_flops_of_a_function_whose_arguments_have_leaves_that_are_no_arrays():
    def fun(x, settings):
        return jnp.tanh(x) if settings["mode"] == "tanh" else x

    assert count_flops(fun, X, {"mode": "tanh"}) > count_flops(fun, X, {"mode": "none"})


def test_values_say_shape_dtype_bytes_kind_and_where_they_come_from():
    constant = jnp.full((16,), 2.0)

    def fun(x, *, scale):
        return jnp.sin(x["a"]) * scale + constant

    graph = trace(fun, {"a": X.astype(jnp.bfloat16)}, scale=jnp.ones(16))
    arguments = {v.label: v for v in graph.values if v.kind == "argument"}
    assert set(arguments) == {"args[0]['a']", "scale"}
    assert (arguments["args[0]['a']"].shape, arguments["args[0]['a']"].bytes) == ((8, 16), 8 * 16 * 2)
    assert [v.bytes for v in graph.values if v.kind == "constant"] == [64]
    sine = next(v for v in graph.values if v.primitive == "sin")
    assert (sine.kind, sine.dtype, sine.flops) == ("intermediate", jnp.bfloat16, 128)
    assert "test_graph.py" in sine.source
    assert "(test_values_say" in sine.source
    assert "fun" in sine.source


def test_a_call_is_written_out_and_its_scope_kept():
    @jax.jit
    def inner(x):
        with jax.named_scope("deep"):
            return jnp.sin(x)

    def fun(x):
        with jax.named_scope("outer"):
            return inner(inner(x))

    graph = trace(jax.jit(fun), X)
    assert ops(graph) == ["sin", "sin"]
    assert all(op.scope.startswith("outer") and op.scope.endswith("deep") for op in graph.ops)
    assert graph.ops[0].outputs == graph.ops[1].inputs


def test_a_call_with_shardings_stays_a_call():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(lambda x: jnp.sin(x), out_shardings=sharding)
    graph = trace(lambda x: inner(x) + 1, X)
    assert [op.primitive for op in graph.ops] == ["jit", "add"]
    assert ops(graph) == ["jit", "sin", "add"]


@pytest.mark.parametrize(
    ("fun", "inside", "repeats"),
    [
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)[0], "sin", 5),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cos", 1),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x), "sin", 3),
        (lambda x: lax.while_loop(lambda c: c[0, 0] < 0, jnp.sin, x), "sin", 1),
        (jax.checkpoint(jnp.sin), "sin", 1),
        (jax.nn.relu, "max", 1),
        (jax.vmap(lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, c), x[0], x)[0]), "sin", 16),
    ],
    ids=["scan", "cond", "fori", "while", "checkpoint", "custom_jvp", "vmapped scan"],
)
def test_it_sees_into(fun, inside, repeats):
    argument = X if fun(X).ndim != 1 else jnp.ones((2, 16, 3))
    found = [op for op in trace(fun, argument).walk() if op.primitive == inside]
    assert found
    assert found[0].repeats == repeats


def test_it_sees_into_custom_vjp_but_nothing_there_can_be_given_an_action():
    @jax.custom_vjp
    def f(x):
        return jaxckpt.tag(jnp.sin(x), "hidden")

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * jnp.cos(x),))
    graph = trace(lambda x: f(x) * 2, X)
    sine = next(v for v in graph.values if v.primitive == "sin")
    assert not sine.addressable
    assert sine.tags == ("hidden",)
    assert graph.tags == ()


def test_loops_multiply_repeats_and_kept_bytes():
    def inner(c, _):
        return jnp.sin(c), None

    def outer(c, _):
        return lax.scan(inner, c, None, length=3)[0], None

    graph = trace(lambda x: lax.scan(outer, x, None, length=4)[0], X)
    sine = next(v for v in graph.values if v.primitive == "sin")
    assert sine.repeats == 12
    assert sine.kept_bytes == 12 * X.nbytes
    assert graph.flops == 12 * X.size


def test_a_tag_labels_the_value_itself_through_calls_and_loops():
    def body(c, w):
        return jaxckpt.tag(jnp.tanh(c @ w), "up"), None

    def fun(x, ws):
        return jaxckpt.tag(lax.scan(body, x, ws)[0], "out")

    graph = trace(fun, X, jnp.ones((3, 16, 16)))
    assert {v.tags: v.primitive for v in graph.values if v.tags} == {("up",): "tanh", ("out",): "scan"}
    assert "name" not in ops(graph)
    assert graph.tags == ("out", "up")


def test_closed_over_tracers_and_shapes_alone_are_traced():
    seen = []

    def outer(w):
        graph = trace(lambda x: x @ w, X)
        seen.append(graph)
        return w.sum()

    jax.jit(outer)(W)
    assert [v.kind for v in seen[0].values] == ["constant", "argument", "intermediate"]
    graph = trace(
        lambda x, k: x + jax.random.normal(k, x.shape), jax.ShapeDtypeStruct((3,), jnp.float32), jax.random.key(0)
    )
    assert next(v for v in graph.values if v.label == "args[1]").bytes == 8


@pytest.mark.parametrize(
    ("dtype", "size"), [("int4", 4), ("bool", 8), ("complex64", 64), ("float8_e4m3fn", 8), ("bfloat16", 16)]
)
def test_bytes_of_dtypes_in_bits(dtype, size):
    graph = trace(lambda x: x, jax.ShapeDtypeStruct((16,), dtype))
    assert graph.values[0].bytes == 16 * size // 8


MAPPED = """
import jax, jax.numpy as jnp
from jaxckpt import trace
mesh = jax.make_mesh((1, 1), ("dp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
spec = jax.sharding.PartitionSpec("dp", "model")
print(trace(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec), jnp.ones((2, 2))).fingerprint)
"""


def test_fingerprint_of_a_mapped_function_is_the_same_in_every_process():
    """The axes that it is mapped over are a set, whose order is another one in each process."""
    found = {
        subprocess.run(
            [sys.executable, "-c", MAPPED],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 2)
    }
    assert len(found) == 1


@pytest.mark.cuda
@pytest.mark.tpu
def test_fingerprint_is_that_of_any_mesh_of_the_same_shape_and_names():
    axes = {"axis_types": (jax.sharding.AxisType.Auto,) * 2}
    meshes = [
        jax.sharding.AbstractMesh((4, 2), ("a", "b"), **axes),
        *(jaxckpt.Target(name).mesh((4, 2), ("a", "b")) for name in ("cuda:h100x8", "tpu:v5e:2x4")),
    ]

    def mapped(mesh):
        spec = jax.sharding.PartitionSpec("a")
        fun = jax.shard_map(lambda x: jax.lax.psum(x, "a"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return trace(fun, X).fingerprint

    def constrained(mesh, *spec):
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return trace(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), where), X).fingerprint

    assert len({mapped(mesh) for mesh in meshes}) == 1
    assert len({constrained(mesh, "a") for mesh in meshes}) == 1
    assert constrained(meshes[0], "b") != constrained(meshes[0], "a")


def test_fingerprint_is_equal_for_equal_programs_and_differs_for_others():
    def layer(x, w):
        return jax.nn.gelu(x @ w) + jax.nn.relu(x)

    same = trace(layer, X, W).fingerprint
    assert trace(jax.jit(layer), X, W).fingerprint == same
    assert trace(lambda x, w: layer(x, w), X, W).fingerprint == same
    assert trace(layer, X[:4], W).fingerprint != same
    assert trace(layer, X.astype(jnp.bfloat16), W).fingerprint != same
    assert trace(lambda x, w: jax.nn.gelu(x @ w) - jax.nn.relu(x), X, W).fingerprint != same
    assert trace(lambda x, w: jax.nn.gelu(x @ w.T) + jax.nn.relu(x), X, W).fingerprint != same


def test_fingerprint_says_what_a_branch_reads_and_returns():
    def chosen(*outputs):
        def branch(a, b):
            return [(jnp.sin(a), jnp.sin(b))[which] for which in outputs]

        return trace(lambda x, y: jax.lax.cond(x[0, 0] > 0, branch, lambda a, b: [a, b], x, y), X, X + 1).fingerprint

    assert chosen(0, 1) == chosen(0, 1)
    assert chosen(0, 1) != chosen(1, 0)


@pytest.mark.parametrize(
    ("fun", "args", "flops"),
    [
        (lambda a, b: a @ b, (np.ones((2, 3)), np.ones((3, 4))), 2 * 2 * 3 * 4),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (np.ones((5, 2, 3)), np.ones((5, 3, 4))), 5 * 48),
        (lambda a: jnp.sum(a * a), (np.ones(10),), 20),
        (lambda a: a.T.reshape(6)[:3], (np.ones((2, 3)),), 0),
        (
            lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
            (np.ones((2, 3, 8, 8), np.float32), np.ones((4, 3, 5, 5), np.float32)),
            2 * (2 * 4 * 8 * 8) * 3 * 5 * 5,
        ),
        (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=3),
            (np.ones((2, 3, 8, 8), np.float32), np.ones((6, 1, 3, 3), np.float32)),
            2 * (2 * 6 * 8 * 8) * 3 * 3,
        ),
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0], (np.ones((3, 3)),), 7 * 54),
        (lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x), (np.ones((3, 3)),), 54 + 1),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (1,), "VALID"), (np.ones(10, np.float32),), 8 * 3),
        (lambda x: jnp.cumsum(x), (np.ones(10),), 10),
        (lambda x: x**4, (np.ones(10),), 20),
        (lambda x: jnp.sort(x), (np.ones(8),), 24),
        (lambda x: x.at[jnp.array([0, 1])].add(1.0), (np.ones(8),), None),
        (lambda x: jnp.fft.fft(x), (np.ones(8, np.complex64),), 5 * 8 * 3),
    ],
    ids=[
        "matmul",
        "batched",
        "reduce",
        "moves",
        "conv",
        "grouped",
        "scan",
        "cond",
        "window",
        "cumsum",
        "power",
        "sort",
        "scatter",
        "fft",
    ],
)
def test_flops(fun, args, flops):
    args = [jnp.asarray(a) for a in args]
    counted = count_flops(fun, *args)
    if flops is None:
        assert counted > 0
    else:
        # comparisons, clamps and the like of one element may come with it
        assert flops <= counted <= flops + 2


def test_flops_of_a_gradient_count_the_recomputation():
    def block(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    plain = count_flops(jax.grad(lambda x, w: block(x, w).sum(), argnums=(0, 1)), X, W)
    again = count_flops(jax.grad(lambda x, w: jax.checkpoint(block)(x, w).sum(), argnums=(0, 1)), X, W)
    matmul = 2 * 8 * 16 * 16
    assert 2 * matmul <= again - plain < 2.2 * matmul


def test_unknown_operations_count_one_flop_an_output_element():
    assert count_flops(lambda x: lax.erf_inv(x), jnp.zeros(12)) == 12


def test_convolution_gradients_cost_about_twice_the_convolution():
    x, k = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    forward = count_flops(conv, x, k)
    both = count_flops(jax.grad(lambda x, k: conv(x, k).sum(), argnums=(0, 1)), x, k)
    assert 2.9 * forward < both + forward < 4.2 * forward


def test_shard_map_is_seen_into():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "x")
    spec = jax.sharding.PartitionSpec("x")
    fun = jax.shard_map(lambda x: jnp.sin(x) * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    assert {"shard_map", "sin"} <= set(ops(trace(fun, X)))


def test_walk_visits_every_value_producer_once():
    graph = trace(lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 2, c), x, None, length=3), X)
    made = [i for op in graph.walk() for i in op.outputs]
    assert len(made) == len(set(made))
    chex.assert_trees_all_equal(sorted(made), [v.index for v in graph.values if v.kind == "intermediate"])
