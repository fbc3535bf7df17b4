"""Several devices: every byte is a byte on one of them, as the compiler lays values out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.core.graph import trace
from jaxckpt.memory.targets import target_of
from jaxckpt.models import llama
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.shards import WHOLE, Shards, read

SIZES = {
    "layers": 6, "width": 512, "heads": 8, "key_heads": 4, "inner": 1536, "vocabulary": 2048, "batch": 16, "tokens": 256,
    "data": 2, "model": 2,
}  # fmt: skip


def test_without_a_mesh_every_array_is_whole():
    graph = trace(jnp.sin, jnp.ones((8, 8)))
    assert WHOLE.fraction((8, 8)) == 1.0 and WHOLE.applied(graph) is graph


def test_unknown_layouts_small_arrays_are_whole_and_large_ones_shared():
    shards = Shards(4, {(1024, 1024): 0.5})
    assert shards.fraction((1024, 1024)) == 0.5
    assert shards.fraction((8, 8)) == 1.0 and shards.fraction((4096, 4096)) == 0.25


@pytest.mark.tpu
def test_layouts_are_the_compilers():
    loss, args = llama.llama70b(**SIZES)
    graph = trace(loss, *args)
    shards = read(graph, args, jax.tree.leaves(args), target_of("tpu:v5e:2x2"))
    wanted = {
        (2048, 512): 1 / 4,  # the embedding, over both axes
        (16, 256): 1 / 2,  # tokens, over data
        (16, 256, 512): 1 / 2,  # the residual stream
        (16, 256, 1536): 1 / 4,  # the feed-forward's inside, over data and model
        (16, 4, 2, 256, 256): 1 / 4,  # attention's scores
        (16, 256, 2048): 1 / 4,  # the logits
    }
    assert {shape: shards.fraction(shape) for shape in wanted} == wanted
    scaled = shards.applied(graph)
    assert sum(v.bytes for v in scaled.values) < 0.5 * sum(v.bytes for v in graph.values)


@pytest.mark.tpu
def test_a_sharded_scan_is_planned_per_device():
    loss, args = llama.llama70b(**SIZES)
    problem = problem_of(loss, *args, target="tpu:v5e:2x2")
    assert problem.argument_bytes < 0.3 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))
    frontier = problem.table.frontier()
    lean, rich = (problem.model.plan(problem.table.solution(budget)) for budget in (frontier[0][0], frontier[-1][0]))
    assert lean.loops
    peaks = [
        jaxckpt.measure(
            jax.value_and_grad(plan.apply(loss)), *args, target="tpu:v5e:2x2", generate_code=False
        ).peak_bytes
        for plan in (lean, rich)
    ]
    kept = frontier[-1][0] - frontier[0][0]
    assert 0.4 * kept < peaks[1] - peaks[0] < 2.5 * kept  # of all devices together it would be 4 times as much


def test_the_llama_computes_the_same_under_a_plan():
    loss, args = llama.small(layers=3, real=True)
    problem = problem_of(loss, *args, target="cpu")
    frontier = problem.table.frontier()
    planned = problem.model.plan(problem.table.solution(frontier[len(frontier) // 3][0])).apply(loss)
    for got, wanted in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(f))(*args)) for f in (planned, loss))):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * (1e-6 + float(jnp.max(jnp.abs(wanted)))))


def test_programs_that_name_the_mesh_of_their_arguments_are_planned():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((2048, 64)), NamedSharding(mesh, P("data")))

    def loss(w, x):
        for _ in range(6):
            h = jnp.tanh(jnp.tanh(x @ w) @ w)
            x = x + jnp.where(h > 0, h, jnp.zeros_like(h))
        return jnp.mean(x**2)

    def step_of(loss):
        def step(w, x):
            value, gradient = jax.value_and_grad(loss)(w, x)
            return w - 0.1 * gradient, value

        return jax.jit(step, donate_argnums=0, compiler_options=jaxckpt.compiler_options("cpu"))

    for step in (jax.value_and_grad, step_of):
        plan = jaxckpt.plan(loss, jnp.eye(64), x, budget="85%", target="cpu", step=step)
        assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes
        sharded, single = (jax.grad(plan.apply(loss))(jnp.eye(64), a) for a in (x, jnp.ones((2048, 64))))
        np.testing.assert_allclose(sharded, single, rtol=1e-5)
