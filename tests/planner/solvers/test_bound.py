"""The bound over all orders of runs: it is below every nested solution, it is the optimum where the optimum nests, and
it is lower where only another order fits.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import optimum
from jaxckpt.planner.chain import Candidate, Carried, Chain, Drop, Segment, cost, covers
from jaxckpt.planner.model import _made_before
from jaxckpt.planner.problems import problem_of
from jaxckpt.planner.solvers import Infeasible, solver
from jaxckpt.planner.solvers.bound import NONE, bound
from jaxckpt.planner.solvers.milp import STAGES, Milp
from jaxckpt.planner.solvers.optimal import Table
from tests.helpers import gradient_executions
from tests.planner.solvers.chains import deep_chain, random_chain


def as_built(chain):
    """A chain whose stretches need what their stages need one by one, as `jaxckpt.planner.model` makes them."""
    made, segments = _made_before(chain.carried, chain.length), {}
    for start in range(chain.length):
        work = 0
        for stop in range(start + 1, chain.length + 1):
            work = max(work, chain.segment(stop - 1, stop).forward_work + int(made[start, stop - 1]))
            segments[start, stop] = replace(chain.segment(start, stop), forward_work=work)
    return Chain(chain.length, segments, chain.carried)


def straight(seed, length):
    """A chain in which no value skips a stage."""
    chain = random_chain(seed, length)
    return as_built(
        Chain(length, chain.segments, tuple(each for each in chain.carried if each.uses == (each.made + 1,)))
    )


def row(length, time=1.0, size=4, kept=8):
    """Equal stages: to keep all costs nothing, to keep nothing costs a run."""
    segments = {}
    for start in range(length):
        for stop in range(start + 1, length + 1):
            ways = (Candidate(0, time, kept), Candidate(kept, 0.0, 0)) if stop == start + 1 else ()
            segments[start, stop] = Segment(time * (stop - start), size, 0, ways)
    return segments


@pytest.mark.parametrize("seed", range(8))
def test_no_nested_solution_is_below_it_and_what_was_found_is_not_below_it(seed):
    chain = as_built(random_chain(seed, 4 + seed % 3))
    table = Table(chain)
    frontier = table.frontier()
    for limit in {frontier[0][0], frontier[len(frontier) // 3][0], frontier[-1][0]}:
        nested = cost(chain, table.solution(limit)).time
        for known in (NONE, nested):
            found = bound(chain, limit, 60, known)
            assert found.least_time <= nested * (1 + 1e-6)
            assert found.time >= found.least_time * (1 - 1e-6)
            assert found.solution is None or covers(chain, found.solution)
            if found.solution is not None and (tree := cost(chain, found.solution)).peak <= limit:
                assert tree.time >= found.least_time * (1 - 1e-6)


def test_without_skips_it_is_the_optimum_of_nested_solutions():
    equal = asked = 0
    for seed in range(6):
        chain = straight(seed, 5)
        table = Table(chain)
        frontier = table.frontier()
        for limit, seconds in frontier[:: max(1, len(frontier) // 4)]:
            found = bound(chain, limit, 60)
            asked += 1
            equal += found.least_time == pytest.approx(seconds, rel=1e-5, abs=1e-9)
            assert found.least_time <= seconds * (1 + 1e-6)
    assert equal >= 0.9 * asked, (equal, asked)


def test_below_the_least_that_any_order_needs_nothing_fits():
    chain = as_built(Chain(3, row(3), tuple(Carried(4, i, (i + 1,)) for i in range(2))))
    least = Table(chain).least
    assert bound(chain, least, 60).least_time < NONE
    nothing = bound(chain, least // 2, 60)
    assert nothing.least_time == NONE and nothing.solution is None


def test_an_order_that_does_not_nest_is_found_where_it_is_cheaper():
    """Two towers, stages 0 2 4 and 1 3 5, joined at the end. To run one of them again, a nested solution runs the other
    too.
    """
    carried = [Carried(4, i, (i + 2,)) for i in range(4)] + [Carried(4, 4, (6,)), Carried(4, 5, (6,))]
    segments = row(7, size=4, kept=12)
    for start in range(7):  # the second tower takes ten times as long, and has nothing to keep
        for stop in range(start + 1, 8):
            times = [10.0 if stage in (1, 3, 5) else 1.0 for stage in range(start, stop)]
            ways = segments[start, stop].candidates
            if len(times) == 1 and times[0] == 10.0:
                ways = (Candidate(0, 0.0, 4),)
            segments[start, stop] = replace(segments[start, stop], forward_time=sum(times), candidates=ways)
    chain = as_built(Chain(7, segments, tuple(carried)))
    table = Table(chain)
    gains = {}
    for limit, seconds in table.frontier():
        gains[limit] = seconds - bound(chain, limit, 60, seconds).time
    assert max(gains.values()) > 0.5, gains
    assert min(gain for gain in gains.values() if gain > -NONE) > -1e-6


def test_no_stages():
    assert bound(Chain(0, {}), 0, 1.0).solution == ()
    assert bound(Chain(0, {}), -1, 1.0).least_time == NONE


def test_the_solver_takes_sixty_stages_and_says_what_is_proved():
    chain = deep_chain(60, period=4, candidates=3, wide=1)
    milp, table = Milp(seconds=4), Table(chain)
    frontier = table.frontier()
    limit = frontier[len(frontier) // 2][0]
    found = milp.solve(chain, limit)
    assert covers(chain, found) and cost(chain, found).peak <= limit
    assert cost(chain, found).time <= cost(chain, table.solution(limit)).time
    assert 0 <= milp.proved.least_time <= cost(chain, found).time
    assert any(isinstance(item, Drop) or chain.candidate(item).time > 0 for item in found)
    refused = milp.solve(chain, table.least - 1)
    assert isinstance(refused, Infeasible) and refused.least_bytes == table.least
    assert cost(chain, milp.least(chain)).peak == table.least


def test_the_solver_proves_the_chain_right_where_nothing_skips():
    chain = straight(1, STAGES + 1)
    table = Table(chain)
    frontier = table.frontier()
    limit = frontier[2 * len(frontier) // 3][0]
    milp = Milp(seconds=60)
    found = cost(chain, milp.solve(chain, limit))
    assert found.peak <= limit
    assert milp.proved.least_time == pytest.approx(found.time, rel=0.02)


@pytest.mark.compile
def test_a_plan_of_many_stages_by_it_fits_and_recomputes():
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x).sum()

    args = [jnp.eye(64) * 0.9] * (STAGES + 2), jnp.ones((512, 64))
    problem = problem_of(loss, *args, target="cpu")
    assert problem.model.chain.length > STAGES
    plan = problem.plan("60%", solver=Milp(seconds=0.2))
    assert plan.measured_bytes <= 0.6 * problem.unplanned.peak_bytes
    assert gradient_executions(plan.apply(loss), *args)["tanh"] > STAGES + 2
    np.testing.assert_array_equal(jax.grad(plan.apply(loss))(*args)[3], jax.grad(loss)(*args)[3])


def test_a_short_chain_is_solved_to_the_end():
    milp = Milp(seconds=1e-3)
    chain = random_chain(3, 6)
    limit = Table(chain).frontier()[-1][0]
    assert cost(chain, milp.solve(chain, limit)).time == pytest.approx(
        cost(chain, solver("chain").solve(chain, limit)).time
    )
    assert milp.proved is None


def test_the_table_of_models_says_how_far_they_are():
    rows = {
        "near": {
            "stages": 9,
            "values": 8,
            "skips": 0,
            "limits": [{"limit_bytes": 1 << 20, "chain": 0.1, "least": 0.1, "found": 0.1, "seconds": 2.0}],
        },
        "far": {
            "stages": 9,
            "values": 8,
            "skips": 5,
            "limits": [{"limit_bytes": 1 << 20, "chain": 0.2, "least": 0.1, "found": 0.15, "seconds": 2.0}],
        },
    }
    text = optimum.report(rows)
    assert "far at 1.0 MiB: at most 9.1%, at least 4.3%" in text
    assert "near at" not in text and "2 models, 2 limits" in text
