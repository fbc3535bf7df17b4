"""What a function runs again for a gradient that it takes itself: values, gradients, bytes, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import PlanMismatchError, RecomputedStretch
from jaxckpt.core.again import recomputing, with_recomputed
from jaxckpt.core.graph import trace
from jaxckpt.core.plan import Plan
from jaxckpt.planner import inner_gradients

LAYERS, ROWS, WIDTH = 4, 64, 16


def params():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / 4, "b": jnp.full(WIDTH, 0.1)} for key in keys]


def net(p, x):
    for layer in p:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"]) * jax.nn.sigmoid(x)
    return x


X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def forces(p, x):
    """The energy and its gradient with respect to the inputs."""
    energy, force = jax.value_and_grad(lambda x: net(p, x).sum())(x)
    return energy**2 / ROWS + jnp.mean(force**2)


def inner_step(p, x):
    """One step of gradient descent, and the loss after it."""
    inner = lambda p: jnp.mean(net(p, x) ** 2)
    return inner(jax.tree.map(lambda w, g: w - 0.1 * jnp.tanh(g), p, jax.grad(inner)(p)))


def laplacian(p, x):
    """Second derivatives by forward mode over reverse mode: the inner gradient is differentiated in the loss too."""
    slope = jax.grad(lambda x: net(p, x).sum())
    _, second = jax.jvp(slope, (x,), (jnp.ones_like(x),))
    return jnp.mean(second**2)


def dropped(p, x):
    """The same key draws the same mask in both runs."""

    def loss(x):
        for number, layer in enumerate(p):
            keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), number), 0.5, x.shape)
            x = x + jnp.where(keep, jnp.tanh(x @ layer["w"]), 0.0)
        return jnp.sum(x**3) / x.size

    return jnp.mean(jax.grad(loss)(x) ** 2)


LOSSES = {each.__name__: each for each in (forces, inner_step, laplacian, dropped)}


def again(loss):
    """Returns the ways in which a loss can run again what its gradient reads."""
    return inner_gradients.ways(trace(loss, params(), X))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("jitted", [False, True])
def test_what_runs_again_changes_no_value_and_no_gradient(name, jitted):
    loss, wrapped = LOSSES[name], jax.jit if jitted else lambda fun: fun
    expected = wrapped(jax.value_and_grad(loss))(params(), X)
    found = again(loss)
    assert found, "its gradient reads what its forward pass made"
    for way in found:
        value = wrapped(jax.value_and_grad(recomputing(loss, way)))(params(), X)
        assert_close(value, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_each_stretch_runs_once_more(name):
    loss = LOSSES[name]
    graph = trace(loss, params(), X)
    for way in again(loss):
        more = with_recomputed(graph, way, (params(), X), {})
        extra = sum(each.stop - each.start for each in way)
        assert len(more.ops) == len(graph.ops) + extra + len(way), "its operations, and a barrier in front of them"
        dots = lambda ops: sum(op.primitive == "dot_general" for op in ops)
        again_dots = sum(dots(graph.ops[each.start : each.stop]) for each in way)
        assert dots(more.ops) == dots(graph.ops) + again_dots


def test_what_runs_again_is_not_kept():
    """The forward pass of the loss holds the values of one layer at a time."""
    p = [{"w": jax.ShapeDtypeStruct((256, 256), jnp.float32), "b": jax.ShapeDtypeStruct((256,), jnp.float32)}] * 8
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    way = inner_gradients.ways(trace(forces, p, x))[0]
    bytes_of = lambda fun: jaxckpt.measure(fun, p, x, target="cpu", generate_code=False).peak_bytes
    assert len(way) >= 7
    assert bytes_of(recomputing(forces, way)) < 0.75 * bytes_of(forces)


def test_a_plan_says_what_runs_again():
    graph = trace(forces, params(), X)
    way = again(forces)[0]
    plan = Plan((), graph.fingerprint, recomputed=way)
    expected = jax.value_and_grad(forces)(params(), X)
    value = jax.jit(jax.value_and_grad(plan.apply(forces)))(params(), X)
    assert_close(value, expected)
    assert f"run again in front of op {way[0].at}" in str(plan) and "run again" in plan.describe(graph)
    plan.check(graph)
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.recomputed == way and hash(read) == hash(plan)
    assert plan != replace(plan, recomputed=way[:-1])


def test_under_vmap_and_scan_and_with_other_transforms():
    graph = trace(forces, params(), X)
    planned = Plan((), graph.fingerprint, recomputed=again(forces)[0]).apply(forces)
    several = jnp.stack([X, 2 * X, 3 * X])
    for mapped in (
        lambda fun: jax.vmap(fun, (None, 0))(params(), several),
        lambda fun: jax.vmap(jax.grad(fun), (None, 0))(params(), several),
        lambda fun: jax.lax.map(lambda x: fun(params(), x), several),
        lambda fun: jax.jvp(lambda x: fun(params(), x), (X,), (X,)),
        lambda fun: jax.grad(lambda x: jnp.sum(jax.grad(fun, 1)(params(), x) ** 2))(X),
    ):
        assert_close(mapped(planned), mapped(forces))


@pytest.mark.parametrize(
    ("stretch", "said"),
    [((3, 2, 5), "end before it runs again"), ((0, 4, 3), "end before it runs again"), ((0, -1, 3), "whole number")],
)
def test_a_stretch_that_cannot_be_is_refused(stretch, said):
    with pytest.raises(PlanMismatchError, match=said):
        RecomputedStretch(*stretch)


def test_a_plan_that_is_none_is_refused():
    graph = trace(forces, params(), X)
    size = len(graph.ops)
    with pytest.raises(PlanMismatchError, match=f"again at {size} of {size}"):
        Plan((), graph.fingerprint, recomputed=(RecomputedStretch(0, 2, size),)).apply(forces)(params(), X)
    with pytest.raises(PlanMismatchError, match="recomputed must each be of type RecomputedStretch"):
        Plan((), graph.fingerprint, recomputed=((0, 2, 5),))
    tile = jaxckpt.TiledStretch(0, 2, 0, 0, 2)
    with pytest.raises(PlanMismatchError, match="tiles or stretches that run again"):
        Plan((), graph.fingerprint, tiles=(tile,), recomputed=(RecomputedStretch(0, 2, 5),))
    other = Plan((), graph.fingerprint, recomputed=again(forces)[0], tiled_fingerprint="other")
    with pytest.raises(PlanMismatchError, match="recomputing program other"):
        other.apply(forces)(params(), X)


def test_what_reads_nothing_runs_again_too():
    """Positions of a table that nobody gives."""

    def loss(x):
        table = jnp.sin(jnp.arange(float(WIDTH)))
        return jnp.mean(jax.grad(lambda x: jnp.sum((x * table) ** 2))(x) ** 2)

    graph = trace(loss, X)
    reads = next(place for place, op in enumerate(graph.ops) if graph.ops[1].outputs[0] in op.inputs)
    plan = Plan((), graph.fingerprint, recomputed=(RecomputedStretch(0, 2, reads),))
    assert not graph.ops[0].inputs and graph.ops[1].primitive == "sin"
    assert_close(jax.jit(jax.grad(plan.apply(loss)))(X), jax.jit(jax.grad(loss))(X))
    assert sum(op.primitive == "sin" for op in plan.tiled_graph(graph).ops) == 2


def test_side_effects_do_not_run_twice():
    def printing(p, x):
        def energy(x):
            jax.debug.print("{}", x[0, 0])
            return net(p, x).sum()

        return jnp.mean(jax.grad(energy)(x) ** 2)

    graph = trace(printing, params(), X)
    effect = next(place for place, op in enumerate(graph.ops) if op.equation.effects)
    assert not any(each.start <= effect < each.stop for way in again(printing) for each in way)
    plan = Plan((), graph.fingerprint, recomputed=(RecomputedStretch(0, effect + 4, len(graph.ops) - 1),))
    with pytest.raises(PlanMismatchError, match="side effects"):
        plan.apply(printing)(params(), X)
