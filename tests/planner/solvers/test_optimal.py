"""What the solver `chain` finds: optimal on random chains, feasible at the very least budget, and revolve's counts on
uniform ones.
"""

import itertools

import numpy as np
import pytest

from jaxckpt.planner.chain import Candidate, Carried, Chain, Segment, cost, covers
from jaxckpt.planner.solvers import Infeasible
from jaxckpt.planner.solvers.exhaustive import Exhaustive, solutions
from jaxckpt.planner.solvers.milp import Milp
from jaxckpt.planner.solvers.optimal import Optimal, Table
from tests.planner.solvers.chains import random_chain, with_inputs_kept_otherwise


def budgets(chain, count=6):
    peaks = sorted({cost(chain, solution).peak for solution in solutions(chain, 0, chain.length)})
    return [peaks[i] for i in sorted(set(np.linspace(0, len(peaks) - 1, count).astype(int)))]


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_of_random_chains(seed):
    chain = random_chain(seed, length=1 + seed % 4, candidates=1 + seed % 3, wide=1 + seed % 2)
    table = Table(chain)
    for budget in budgets(chain):
        best, found = Exhaustive().solve(chain, budget), table.solution(budget)
        assert isinstance(best, Infeasible) == (found is None), budget
        if found is None:
            continue
        assert covers(chain, found)
        assert cost(chain, found).peak <= budget
        assert cost(chain, found).time == pytest.approx(cost(chain, best).time)


@pytest.mark.parametrize("seed", range(40))
def test_what_goes_in_may_be_kept_otherwise(seed):
    plain = random_chain(seed, length=2 + seed % 3, candidates=1 + seed % 2, wide=1 + seed % 2)
    chain = with_inputs_kept_otherwise(plain)
    table = Table(chain)
    assert table.least <= Table(plain).least
    for budget in budgets(chain):
        best, found = Exhaustive().solve(chain, budget), table.solution(budget)
        assert found is not None and cost(chain, found).peak <= budget
        assert cost(chain, found).time == pytest.approx(cost(chain, best).time)
        other = Milp().solve(chain, budget)
        assert cost(chain, other).peak <= budget and cost(chain, other).time == pytest.approx(cost(chain, best).time)


@pytest.mark.parametrize("seed", range(40))
def test_feasible_at_the_least_budget_and_not_at_one_byte_less(seed):
    chain = random_chain(seed, length=1 + seed % 4)
    optimal = Optimal()
    least = optimal.solve(chain, -1).least_bytes
    assert least == min(cost(chain, solution).peak for solution in solutions(chain, 0, chain.length))
    assert cost(chain, optimal.solve(chain, least)).peak == least == cost(chain, optimal.least(chain)).peak
    assert optimal.solve(chain, least - 1) == Infeasible(least, optimal.least(chain))


def test_time_falls_as_the_budget_grows():
    table = Table(random_chain(7, length=12))
    frontier = table.frontier()
    assert len(frontier) > 5
    for (less, slow), (more, fast) in itertools.pairwise(frontier):
        assert less < more and slow > fast
        assert cost(table.chain, table.solution(less)).time == pytest.approx(slow)
        assert cost(table.chain, table.solution(more - 1)).time <= slow * (1 + 1e-9)


def test_few_steps_stay_feasible_and_near():
    chain = random_chain(11, length=14)
    exact, coarse = Table(chain), Table(chain, steps=24)
    assert exact.least == coarse.least
    for budget, seconds in exact.frontier():
        solution = coarse.solution(budget)
        assert cost(chain, solution).peak <= budget
        assert cost(chain, solution).time <= seconds * 1.25 + 1


def test_a_uniform_chain_brackets_revolve():
    """l equal steps of one byte a state: revolve's t(l, s) counts neither the first state nor the one at work; here the
    latter counts.
    """

    def uniform(length):
        segments = {}
        for start, stop in itertools.combinations(range(length + 1), 2):
            candidates = (Candidate(0, 0.0, 0),) if stop == start + 1 else ()
            segments[start, stop] = Segment(float(stop - start), 0, 0, candidates)
        return Chain(length, segments, tuple(Carried(1, i, (i + 1,)) for i in range(length - 1)))

    for length, states, extra in [(10, 3, 15), (56, 3, 210)]:
        table = Table(uniform(length))
        times = [cost(table.chain, table.solution(budget)).time for budget in (states - 1, states)]
        assert times[0] >= extra >= times[1]
