"""Plans in tiles down to the least: what is tiled by hand is found, and no larger budget fails."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import InfeasibleBudgetError
from jaxckpt.planner.problems import problem_of

pytestmark = pytest.mark.usefixtures("shared_answers")

F = jnp.float32


def mlp(w, x):
    return jnp.sum(jax.nn.gelu(x @ w) @ w.T * x)


def attention(w, x):
    """Its scores are most of what it needs, and what makes the queries reads each row of `x` twice."""
    q = x @ w
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), q @ x.T, -1e9)
    return jnp.sum((jax.nn.softmax(scores) @ x) ** 2) + jnp.sum(jnp.tanh(x @ w))


MLP = jax.ShapeDtypeStruct((32, 512), F), jax.ShapeDtypeStruct((512, 32), F)
ATTENTION = jax.ShapeDtypeStruct((32, 32), F), jax.ShapeDtypeStruct((512, 32), F)


def fresh(fun, args):
    """Returns a problem that knows nothing of other budgets."""
    return problem_of(fun, *args, target="cpu", tile=True)


@functools.cache
def least(fun, args):
    """Returns the error that names the least budget."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        fresh(fun, args).plan(args[0].size * 4 + args[1].size * 4 + 1000)
    return caught.value


@pytest.mark.parametrize("tiles", [8, 16, 32])
def test_no_worse_than_tiles_by_hand(tiles):
    hand = jaxckpt.tile(mlp, in_axes=(None, 0), tiles=tiles, parts=1)  # in the least memory: nothing is sharded
    by_hand = problem_of(hand, *MLP, target="cpu")
    whole = fresh(mlp, MLP)
    plan = whole.plan(by_hand.unplanned.peak_bytes)
    assert plan.tiles and plan.measured_bytes <= plan.budget < whole.unplanned.peak_bytes
    assert plan.overhead <= by_hand.plain.time.seconds / whole.plain.time.seconds - 1 + 1e-6


@pytest.mark.parametrize(("fun", "args", "shares"), [(mlp, MLP, (20, 30, 42)), (attention, ATTENTION, (20, 50, 90))])
def test_from_the_least_upwards_every_budget_has_a_plan(fun, args, shares):
    """Each asked for alone, as of several runs."""
    peak = fresh(fun, args).unplanned.peak_bytes
    budgets = [least(fun, args).least_bytes, *(peak * share // 100 for share in shares)]
    plans = [fresh(fun, args).plan(budget) for budget in budgets]
    assert budgets == sorted(budgets)
    assert all(plan.tiles and plan.measured_bytes <= plan.budget for plan in plans)
    peaks, times = [p.measured_bytes for p in plans], [p.overhead for p in plans]
    assert peaks == sorted(peaks) and times == sorted(times, reverse=True)
    real = [jnp.sin(jnp.arange(each.size, dtype=F).reshape(each.shape)) for each in args]
    step = lambda fun: jax.jit(jax.value_and_grad(fun, (0, 1)))(*real)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-4, 2e-4), step(plans[0].apply(fun)), step(fun))


def test_the_error_says_in_how_many_tiles_and_blames_no_axis_that_goes_through():
    for fun, args in ((mlp, MLP), (attention, ATTENTION)):
        error = least(fun, args)
        assert error.budget_bytes < error.least_bytes < 0.2 * fresh(fun, args).unplanned.peak_bytes
        assert "in 64" in str(error) and "No axis goes through" not in str(error)


def test_a_plan_with_tiles_for_one_budget_is_one_for_every_larger_budget():
    problem = fresh(attention, ATTENTION)
    peak = problem.unplanned.peak_bytes
    lean = problem.plan(peak // 4)
    assert lean.tiles and problem.recall(lean.measured_bytes).tiles == lean.tiles
    assert problem.recall(least(attention, ATTENTION).least_bytes - 1) is None
    for budget in (lean.measured_bytes, peak // 2):
        assert problem.plan(budget).overhead <= lean.overhead
