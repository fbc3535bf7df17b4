"""Programs with literals for operands, results that nobody reads, arrays of no bytes, or no operations at all are
planned like others.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxckpt
from jaxckpt import InfeasibleBudgetError
from jaxckpt.core.liveness import estimate_peak
from jaxckpt.planner.inside import whole
from jaxckpt.planner.problems import problem_of
from tests.helpers import assert_trees_close, executions, kept_bytes

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((64, 8), jnp.float32)


def moved_literals(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w) * jnp.linspace(0.1, 1.0, 8)
    x = x * jnp.expand_dims(lax.stop_gradient(2.0), 0) + lax.reshape(jnp.float32(2.0), (1, 1))
    return jnp.sum(x * jnp.copy(3.0))


def rounded_literal(w, x):
    return jnp.sum(jnp.tanh(x @ w) * lax.reduce_precision(np.float32(3.3), 8, 7))


def arrays_of_no_bytes(w, x):
    empty = jnp.tanh(jnp.zeros((0, 8)) @ w)
    y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, jnp.zeros((5, 0)))
    return jnp.sum(empty) + jnp.sum(y)


def a_scan_that_ignores_its_carry(w, x):
    carry, ys = lax.scan(lambda c, t: (c, jnp.tanh(t @ w)), 0.0, jnp.stack([x] * 4))
    return jnp.sum(ys) + carry


def a_scan_that_ignores_its_rows_and_returns_a_literal(w, x):
    x, (twos, rows) = lax.scan(lambda c, t: (jnp.tanh(c @ w), (2.0, t)), x, jnp.arange(5.0))
    return jnp.sum(twos) + jnp.sum(rows) + jnp.sum(x)


def a_scan_with_a_carry_that_becomes_a_literal(w, x):
    (x, one), _ = lax.scan(lambda c, _: ((jnp.tanh(c[0] @ w), np.float32(0.0)), None), (x, np.float32(1)), length=4)
    return jnp.sum(x) + one


def a_scan_that_returns_a_value_twice(w, x):
    def body(c, _):
        y = jnp.tanh(c @ w)
        return y, (y, y)

    x, (a, b) = lax.scan(body, x, length=4)
    return jnp.sum(2 * a) + jnp.sum(b) + jnp.sum(x)


def scans_of_one_and_of_no_iteration(w, x):
    x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=1)
    x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=0)
    return jnp.sum(x @ w)


def a_result_that_nobody_reads(w, x):
    q, _ = jnp.linalg.qr(x.T @ x + jnp.eye(8))
    return jnp.sum(q @ w)


def an_effect_without_operands(w, x):
    x = jnp.tanh(x @ w)
    jax.debug.callback(lambda: None)
    return jnp.sum(jnp.tanh(x @ w))


def a_checkpoint_that_returns_literals_and_its_input(w, x):
    y, two, same = jax.checkpoint(lambda v: (jnp.tanh(v @ w), 2.0, v))(x)
    return jnp.sum(y) * two + jnp.sum(jax.checkpoint(lambda v: v)(same) @ w)


def branches_without_operations(w, x):
    y = lax.cond(x[0, 0] > 0, lambda v: jnp.tanh(v @ w), jnp.zeros_like, x)
    return jnp.sum(y) + lax.switch(2, [lambda: 1.0, lambda: 2.0, lambda: jnp.sum(w)])


def keys_and_integers(w, x):
    for key in jax.random.split(jax.random.key(0), 2):
        x = jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.sum(x) + jnp.sum(w[jnp.argmax(x, axis=1)])


def an_argument(w, x):
    return w[0, 0]


def all_the_same(w, x):
    return jnp.sum(lax.stop_gradient(w) * w)


PROGRAMS = [
    moved_literals, rounded_literal, arrays_of_no_bytes, a_scan_that_ignores_its_carry,
    a_scan_that_ignores_its_rows_and_returns_a_literal, a_scan_with_a_carry_that_becomes_a_literal,
    a_scan_that_returns_a_value_twice, scans_of_one_and_of_no_iteration, a_result_that_nobody_reads,
    an_effect_without_operands, a_checkpoint_that_returns_literals_and_its_input, branches_without_operations,
    keys_and_integers, an_argument, all_the_same,
]  # fmt: skip


@pytest.mark.parametrize("fun", PROGRAMS)
def test_the_plan_that_keeps_least_gives_the_same_gradients(fun):
    problem = problem_of(fun, W, X, target="cpu")
    least = problem.model.plan(problem.table.solution(problem.table.least))
    args = [np.random.default_rng(0).normal(size=each.shape).astype(np.float32) for each in (W, X)]
    step = jax.value_and_grad(fun, argnums=(0, 1))
    planned = jax.value_and_grad(least.apply(fun), argnums=(0, 1))
    assert_trees_close(planned(*args), step(*args), rtol=1e-4, atol=1e-4)
    assert executions(planned, W, X)["tanh"] >= executions(step, W, X)["tanh"]


@pytest.mark.parametrize("fun", PROGRAMS)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_estimate_counts_at_least_arguments_and_gradients(fun, platform):
    """Of the arguments those that the gradient reads: `jax.jit` leaves out the others."""
    step = jax.value_and_grad(fun, argnums=(0, 1))
    compiled = jaxckpt.measure(step, W, X, target="cpu", generate_code=False)
    gradients = 4 * (8 * 8 + 64 * 8)
    assert compiled.output_bytes >= gradients
    assert estimate_peak(step, W, X, platform=platform) >= compiled.argument_bytes + gradients


def test_a_chain_with_linspace_in_it_runs_again_what_the_budget_asks_for():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w) * jnp.linspace(0.1, 1.0, 8)
        return jnp.sum(x)

    args = [W] * 12, jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    plan = jaxckpt.plan(loss, *args, budget="60%", target="cpu")
    assert plan.measured_bytes <= plan.budget < plan.unplanned_bytes
    planned = executions(jax.value_and_grad(plan.apply(loss)), *args)
    assert planned["tanh"] > executions(jax.value_and_grad(loss), *args)["tanh"]


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: x.reshape(())], ids=["nothing", "a reshape"])
def test_a_function_of_no_operations_has_an_empty_plan(fun):
    x = jax.ShapeDtypeStruct((), jnp.float32)
    assert jaxckpt.plan(fun, x, budget="1MiB", target="cpu").regions == ()
    unverified = jaxckpt.plan(fun, x, budget="1MiB", target="cpu", verify=False)
    assert unverified.predicted.kept_bytes == 0
    np.testing.assert_allclose(jax.grad(unverified.apply(fun))(3.0), 1.0)


def test_a_budget_that_a_step_around_no_operations_exceeds_is_infeasible():
    def step(fun):
        return lambda x: jax.value_and_grad(lambda x: (fun(x), jnp.cumsum(jnp.ones(1000) * x)), has_aux=True)(x)

    with pytest.raises(jaxckpt.InfeasibleBudgetError, match="no operations"):
        jaxckpt.plan(
            lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), budget=64, target="cpu", step=step, verify=False
        )


def test_a_nested_checkpoint_may_take_a_value_twice_and_return_what_it_closes_over():
    def loss(x, y):
        scale = jnp.linalg.norm(jnp.nan_to_num(y), axis=0)
        one, two = jax.checkpoint(lambda z: (scale, scale * z[0]))(y)
        three = jax.checkpoint(lambda a, b, c: a * b + c)(x, x, 2.0)
        return (one + two).astype(jnp.float32) + jnp.sum(three)

    found = jaxckpt.plan(loss, jnp.ones(8), jnp.ones(16, jnp.float16), budget="1MiB", target="cpu", verify=False)
    assert found.predicted.peak_bytes > 0


def test_a_gradient_of_a_scan_within_the_function_is_planned():
    def inner(w, x):
        return jnp.sum(lax.scan(lambda c, r: (jnp.sin(c * r * w), None), x, jnp.ones((3, 4)))[0])

    def loss(w, x):
        for _ in range(4):
            x = jnp.sin(x @ x) * jnp.cos(x) + 0.1 * jnp.sum(jax.grad(inner)(w, jnp.ones(4)) ** 2)
        return jnp.sum(x)

    args = jnp.full(4, 0.5), jnp.eye(64) * 0.5
    found = jaxckpt.plan(loss, *args, budget=problem_of(loss, *args, target="cpu").plain.peak_bytes * 4 // 5, verify=False)  # fmt: skip
    assert found.regions and kept_bytes(found.apply(loss), *args) < 0.8 * kept_bytes(loss, *args)
    assert_trees_close(jax.grad(found.apply(loss))(*args), jax.grad(loss)(*args), rtol=1e-4)


def test_values_of_earlier_stages_may_be_printed():
    def loss(x):
        y = jnp.sin(x @ x)
        for _ in range(4):
            z = jnp.sin(y @ x)
            jax.debug.callback(lambda v: None, y)
            y = z
        return jnp.sum(y)

    x = jnp.eye(64) * 0.5
    analysis = problem_of(loss, x, target="cpu")
    with pytest.raises(InfeasibleBudgetError) as caught:
        analysis.plan(40_000, verify=False)
    least = int(re.search(r"is (\d+) bytes", str(caught.value))[1])
    for budget in (10**6, least):
        found = analysis.plan(budget, verify=False)
        assert_trees_close(jax.grad(found.apply(loss))(x), jax.grad(loss)(x), rtol=1e-4)
        assert_trees_close(jax.jit(jax.grad(found.apply(loss)))(x), jax.grad(loss)(x), rtol=1e-4)


def test_a_derivative_may_call_jitted_functions_whose_results_are_planned():
    def loss(x):
        for _ in range(2):
            x = jnp.sort(jnp.cumprod(jnp.sin(x @ x), axis=0), axis=0)
        return jnp.sum(x)

    x = jnp.eye(64) * 0.5 + 0.1
    budget = problem_of(loss, x, target="cpu").plain.peak_bytes * 9 // 10
    found = jaxckpt.plan(loss, x, budget=budget, target="cpu", verify=False)
    assert found.regions and kept_bytes(found.apply(loss), x) < kept_bytes(loss, x)
    assert_trees_close(jax.grad(found.apply(loss))(x), jax.grad(loss)(x), rtol=1e-4)


def halved(x):
    """Has no derivative in reverse mode."""
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.sin(s[0]) / 2, s[1] + 1), (x, 0))[0]


def test_what_nobody_differentiates_is_not_differentiated():
    """A while loop's results pass from block to block, and out of the function beside the loss."""

    def loss(ws, x):
        z = x
        for w in ws:
            h = jnp.tanh(x @ w)
            x = x + jnp.sin(h) * jnp.max(jnp.round(z)) + jnp.cos(h @ w) * jnp.mean(lax.stop_gradient(z))
            z = halved(h)
        return jnp.mean(x**2), z

    ws, x = [jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i in range(6)], jnp.ones((512, 32))
    step = lambda fun: jax.value_and_grad(fun, has_aux=True)
    peak = jaxckpt.measure(step(loss), ws, x).peak_bytes
    plan = jaxckpt.plan(loss, ws, x, budget=peak * 6 // 10, step=step)
    assert plan.measured_bytes <= peak * 6 // 10 and plan.regions
    assert_trees_close(step(plan.apply(loss))(ws, x), step(loss)(ws, x))
    graph = jaxckpt.trace(loss, ws, x)
    arguments = [value.index for value in graph.values if value.kind == "argument"]
    loops = [op.outputs[0] for op in graph.ops if op.primitive == "while"]
    assert len(loops) == 6
    assert not whole(graph, arguments, graph.body.outputs[:1]).active.intersection(loops)
    assert set(whole(graph, arguments).active).intersection(loops) == {loops[-1]}, "it comes out"
