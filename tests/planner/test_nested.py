"""What is planned inside of a loop's body: loops in it, and blocks one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Plan
from jaxckpt.core.graph import trace
from jaxckpt.planner.frontier import cost_of
from tests.helpers import assert_trees_close

OUTER, INNER, WIDTH, ROWS = 4, 3, 32, 2048
WS = {
    "up": jax.random.normal(jax.random.key(0), (OUTER, INNER, WIDTH, 4 * WIDTH)) / 8,
    "down": jax.random.normal(jax.random.key(1), (OUTER, INNER, 4 * WIDTH, WIDTH)) / 16,
}
X = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def block(x, w):
    return x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"]


def scan_of_scans(wrap):
    def outer(x, ws):
        return jax.lax.scan(lambda x, w: (wrap(block)(x, w), None), x, ws)[0], None

    return lambda ws, x: jnp.mean(jax.lax.scan(outer, x, ws)[0] ** 2)


def scan_of_blocks(wrap):
    def outer(x, ws):
        for number in range(INNER):
            x = wrap(block)(x, jax.tree.map(lambda w, number=number: w[number], ws))
        return x, None

    return lambda ws, x: jnp.mean(jax.lax.scan(outer, x, ws)[0] ** 2)


@pytest.mark.compile
@pytest.mark.parametrize("model", [scan_of_scans, scan_of_blocks], ids=lambda model: model.__name__)
def test_a_plan_fits_where_a_checkpoint_around_each_inner_block_does_at_no_more_work(model):
    loss, by_hand = model(lambda block: block), model(jax.checkpoint)
    step = jax.value_and_grad
    peak, plain = (jaxckpt.measure(step(fun), WS, X, target="cpu").peak_bytes for fun in (by_hand, loss))
    plan = jaxckpt.plan(loss, WS, X, budget=peak, target="cpu")
    assert plan.measured_bytes <= peak < 0.7 * plain
    planned, hand = (cost_of(step(fun), (WS, X), "cpu")[0] for fun in (plan.apply(loss), by_hand))
    assert planned <= hand
    assert_trees_close(jax.grad(plan.apply(loss))(WS, X), jax.grad(loss)(WS, X), rtol=1e-4, atol=1e-6)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.describe(trace(loss, WS, X))


@pytest.mark.compile
def test_what_an_inner_loop_keeps_is_chosen_by_the_budget():
    loss = scan_of_scans(lambda block: block)
    problem = jaxckpt.planner.search.problem_of(loss, WS, X, target="cpu")
    plain = jaxckpt.count_flops(jax.value_and_grad(loss), WS, X)
    more, inside = [], []
    for budget in ("85%", "60%", "30%"):
        plan = problem.plan(budget)
        assert plan.measured_bytes <= plan.budget
        more.append(jaxckpt.count_flops(jax.value_and_grad(plan.apply(loss)), WS, X) / plain - 1)
        inside += [loop.body for loop in plan.loops if loop.body]
    assert 0 <= more[0] < 0.02 and more[0] <= more[1] <= more[2] < 0.4
    assert inside and all(len(address) == 1 for address in inside)
