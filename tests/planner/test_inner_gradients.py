"""Plans of losses that take a gradient themselves reach what people do with a checkpoint around each block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt.core.graph import trace
from jaxckpt.core.shown import silent
from jaxckpt.memory.targets import target_of
from jaxckpt.planner import inner_gradients
from jaxckpt.planner.frontier import cost_of
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.tiled import Within

pytestmark = pytest.mark.cuda
WIDTH = 32


def message(p, h, distance):
    """A block of a network on a point cloud: messages along all edges."""
    basis = jnp.exp(-((distance[..., None] - jnp.linspace(0.0, 5.0, 16)) ** 2))
    weight = jax.nn.silu(basis @ p["first"]) @ p["second"]
    mixed = (weight * (h @ p["node"])[:, None]).sum(2)
    return h + jax.nn.silu(mixed @ p["up"]) @ p["down"]


def energies_and_forces(wrap=lambda fun: fun, unlike=False):
    """A loss of energies and their gradients with respect to positions."""
    plain = wrap(message)
    squared = wrap(lambda p, h, distance: message(p, jnp.tanh(h), distance**2 / 5))

    def energy(p, positions):
        apart = ((positions[:, :, None] - positions[:, None]) ** 2).sum(-1)
        distance, h = jnp.sqrt(apart + 1e-3), jnp.broadcast_to(p["embedding"], (*positions.shape[:2], WIDTH))
        for number, each in enumerate(p["blocks"]):
            h = (squared if unlike and number % 2 else plain)(each, h, distance)
        return (h @ p["out"]).sum((1, 2))

    def loss(p, positions, known):
        total, slope = jax.value_and_grad(lambda x: energy(p, x).sum())(positions)
        return (total / positions.shape[0]) ** 2 + jnp.mean((slope + known) ** 2)

    return loss


def arguments(atoms, batch, make):
    block = {"first": (16, WIDTH), "second": (WIDTH, WIDTH), "node": (WIDTH, WIDTH), "up": (WIDTH, WIDTH)}
    block["down"] = WIDTH, WIDTH
    made = lambda shapes: {name: make(shape) for name, shape in shapes.items()}
    p = {"embedding": make((WIDTH,)), "blocks": [made(block) for _ in range(4)], "out": make((WIDTH, 1))}
    return p, make((batch, atoms, 3)), make((batch, atoms, 3))


SHAPES = arguments(24, 8, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))


def flops_and_seconds(loss):
    return cost_of(jax.value_and_grad(loss), SHAPES, target_of("cuda:h100"))


def peak(loss):
    step = jax.value_and_grad(loss)
    return jaxckpt.measure(step, *SHAPES, target="cuda:h100", generate_code=False).peak_bytes


@pytest.mark.parametrize("unlike", [False, pytest.param(True, marks=pytest.mark.once)])
def test_a_plan_fits_the_peak_of_checkpoints_around_blocks_with_no_more_work(unlike):
    """Where blocks are unlike, cuts at the ends of their calls fit too."""
    loss, by_hand = (energies_and_forces(wrap, unlike) for wrap in (lambda fun: fun, jax.checkpoint))
    budget = peak(by_hand)
    assert budget < 0.8 * peak(loss)
    plan = jaxckpt.plan(loss, *SHAPES, budget=budget, target="cuda:h100", cache=False)
    assert plan.measured_bytes == peak(plan.apply(loss)) <= budget
    known, found = (flops_and_seconds(fun) for fun in (by_hand, plan.apply(loss)))
    assert all(ours <= 1.001 * theirs for ours, theirs in zip(found, known))
    assert unlike or (plan.recomputed and "run again in front of op" in str(plan))
    assert 0 < plan.overhead == pytest.approx(found[1] / flops_and_seconds(loss)[1] - 1, rel=1e-3)
    read = jaxckpt.Plan.from_json(plan.to_json())
    keys = iter(jax.random.split(jax.random.key(0), 99))
    args = arguments(24, 8, lambda shape: jax.random.normal(next(keys), shape) / 4)
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    value = jax.jit(jax.value_and_grad(read.apply(loss)))(*args)
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * (1e-3 + np.abs(b).max()))


def test_checkpoints_in_the_loss_that_do_not_count():
    """What runs again is of the loss without them, and so is the plan."""
    by_hand = energies_and_forces(jax.checkpoint)
    problem = problem_of(by_hand, *SHAPES, target="cuda:h100", respect_checkpoints=False, cache=False)
    inner = problem.inner_gradients
    again, made = next(inner.problems(10**9))
    plan = inner.told(made.best(Within(10**9, problem.solver("chain"), True, silent)), again)
    assert not plan.respect_checkpoints and plan.recomputed == again and not plan.regions
    assert plan.measured_bytes == peak(plan.apply(by_hand))
    graphs = problem.graph, trace(plan.apply(by_hand), *SHAPES)
    dots = [sum(op.primitive == "dot_general" for op in graph.walk()) for graph in graphs]
    assert dots[1] == dots[0] + sum(
        op.primitive == "dot_general" for each in again for op in graphs[0].ops[each.start : each.stop]
    )


@pytest.mark.long
def test_the_least_that_an_error_names_has_a_plan(tmp_path):
    """A person gets to more than twice as much."""
    loss, asked = energies_and_forces(), {"target": "cuda:h100", "cache": tmp_path}
    with pytest.raises(jaxckpt.InfeasibleBudgetError) as raised:
        jaxckpt.plan(loss, *SHAPES, budget="20%", **asked)
    least = raised.value.least_bytes
    assert least < 0.5 * peak(energies_and_forces(jax.checkpoint))
    plan = jaxckpt.plan(loss, *SHAPES, budget=least, **asked)
    assert plan.measured_bytes <= least and plan.recomputed


def test_blocks_run_again_where_their_own_values_are_read():
    graph = trace(energies_and_forces(), *SHAPES)
    blocks = inner_gradients.ways(graph)[0]
    assert len(blocks) == 4
    assert [each.at for each in blocks] == sorted((each.at for each in blocks), reverse=True), "the last block's first"
    assert len({each.stop - each.start for each in blocks}) == 1
    assert not inner_gradients.ways(trace(lambda x: jnp.sum(jnp.tanh(x @ x)), jnp.ones((4, 4))))
