"""The solver `chain` and the oracles, on 300 random chains: the same least time at every budget, the same least budget,
to the byte.
"""

import collections
import itertools

import pytest
from hypothesis import HealthCheck, given, settings

from jaxckpt import ArgumentError
from jaxckpt.planner.chain import Candidate, Carried, Chain, Segment, cost, covers, items
from jaxckpt.planner.solvers import Infeasible, solver
from jaxckpt.planner.solvers.exhaustive import Exhaustive, solutions
from jaxckpt.planner.solvers.milp import Milp
from jaxckpt.planner.solvers.optimal import Optimal, Table
from tests.planner.solvers.chains import chains, random_chain

SETTINGS = settings(
    max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def every_cost(chain):
    return [cost(chain, solution) for solution in solutions(chain, 0, chain.length)]


def cheapest(costs, budget):
    return min((each.time for each in costs if each.peak <= budget), default=None)


def test_the_chain_solver_finds_what_trying_everything_finds():
    seen = collections.Counter()

    @SETTINGS
    @given(chains())
    def check(chain):
        costs = every_cost(chain)
        peaks = sorted({each.peak for each in costs})
        table = Table(chain)
        assert table.least == peaks[0]
        assert table.solution(peaks[0] - 1) is None
        deepest = 0
        for budget in peaks[:: max(1, len(peaks) // 12)]:
            found = table.solution(budget)
            assert found is not None and covers(chain, found)
            assert cost(chain, found).peak <= budget
            assert cost(chain, found).time == pytest.approx(cheapest(costs, budget), rel=1e-9, abs=1e-12)
            deepest = max(deepest, *(depth for depth, _ in items(found)))
        for bytes_, seconds in table.frontier():
            assert seconds == pytest.approx(cheapest(costs, bytes_), rel=1e-9, abs=1e-12)
            assert (less := cheapest(costs, bytes_ - 1)) is None or less > seconds
        skips = any(value.uses[-1] > value.made + 1 for value in chain.carried)
        seen.update(chains=1, dropped=deepest > 0, nested=deepest > 1, skips=skips)

    check()
    assert seen["chains"] == 300
    assert seen["dropped"] > 60 and seen["nested"] > 10 and seen["skips"] > 60, seen


@settings(SETTINGS, max_examples=40)
@given(chains(longest=3))
def test_every_solver_keeps_to_the_budget_and_covers_and_is_no_better_than_the_optimum(chain):
    costs = every_cost(chain)
    peaks = sorted({each.peak for each in costs})
    for budget in (peaks[0] - 1, peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        best = cheapest(costs, budget)
        for name in ("chain", "milp", "greedy", "sqrt", "exhaustive"):
            found = solver(name).solve(chain, budget)
            if isinstance(found, Infeasible):
                assert best is None or name in ("greedy", "sqrt"), name
                least = found.least_bytes
                assert least > budget and cost(chain, found.solution).peak == least and covers(chain, found.solution), (
                    name
                )
                assert least == peaks[0] or name in ("greedy", "sqrt"), name
                assert not isinstance(solver(name).solve(chain, least), Infeasible), name
                continue
            assert covers(chain, found), name
            assert cost(chain, found).peak <= budget, name
            if name in ("greedy", "sqrt"):
                assert cost(chain, found).time >= best - 1e-12, name
            else:
                assert cost(chain, found).time == pytest.approx(best, rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("seed", range(8))
def test_chain_and_integer_programme_agree_where_there_is_too_much_to_try(seed):
    chain = random_chain(seed, length=5 + seed % 4, candidates=2 + seed % 2)
    table = Table(chain)
    frontier = table.frontier()
    assert Milp().solve(chain, table.least - 1).least_bytes == table.least
    for budget in (table.least, frontier[len(frontier) // 2][0]):
        found = Milp().solve(chain, budget)
        assert covers(chain, found) and cost(chain, found).peak <= budget
        assert cost(chain, found).time == pytest.approx(cost(chain, table.solution(budget)).time, rel=1e-5)


def test_the_integer_programme_nests_drops_where_only_that_fits():
    chain = random_chain(5, length=7, candidates=1, wide=1)
    found = Milp().solve(chain, Table(chain).least)
    drops = [item for item in found if hasattr(item, "again")]
    assert any(hasattr(inner, "again") for item in drops for inner in item.again)


def test_exhaustive_is_the_cheapest_of_all():
    chain = random_chain(3, length=3)
    costs = every_cost(chain)
    for budget in sorted({each.peak for each in costs})[::20]:
        assert cost(chain, Exhaustive().solve(chain, budget)).time == cheapest(costs, budget)
    least = min(each.peak for each in costs)
    assert Exhaustive().solve(chain, least - 1).least_bytes == least


@pytest.mark.parametrize("name", ["chain", "milp", "greedy", "sqrt", "exhaustive"])
def test_a_chain_of_no_stages_has_the_empty_schedule(name):
    assert solver(name).solve(random_chain(0, 0), 0) == ()


def test_steps_left_out_lose_little_on_average():
    lost = []
    for seed in range(6):
        chain = random_chain(seed, length=14, candidates=6)
        exact, coarse = Table(chain, steps=10**6), Table(chain, steps=60)
        assert len(exact.frontier()) > 2 * 60, "else nothing was left out"
        assert coarse.least == exact.least
        for budget, seconds in exact.frontier()[:-1]:
            found = coarse.solution(budget)
            assert cost(chain, found).peak <= budget
            lost.append(cost(chain, found).time / seconds - 1)
    assert min(lost) > -1e-9
    assert sum(lost) / len(lost) < 0.03


def test_stretches_that_differ_in_one_value_alone_are_told_apart():
    chain = random_chain(9, length=1, candidates=3)
    segment = chain.segment(0, 1)
    segments = {
        (start, stop): segment
        if stop == start + 1
        else Segment(segment.forward_time * (stop - start), 5, segment.gradient * (stop - start), ())
        for start, stop in itertools.combinations(range(5), 2)
    }
    for carried in ((), (Carried(7, 2, (3,)),), (Carried(7, 1, (3,)), Carried(2, 0, (1, 2, 3)))):
        chain = Chain(4, segments, carried)
        costs = every_cost(chain)
        table = Table(chain)
        for budget, seconds in table.frontier():
            assert seconds == pytest.approx(cheapest(costs, budget))
        least = min(each.peak for each in costs)
        assert Optimal().solve(chain, least - 1).least_bytes == least


def test_exhaustive_refuses_what_would_take_forever():
    one = Segment(1.0, 8, 0, tuple(Candidate(i, 1.0 - i / 9, 8) for i in range(9)))
    chain = Chain(12, {(s, t): one for s in range(12) for t in range(s + 1, 13)})
    with pytest.raises(ArgumentError, match="solver must be another one.*12 stages have"):
        Exhaustive().solve(chain, 100)
