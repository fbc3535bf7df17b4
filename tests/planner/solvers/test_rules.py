"""The solvers that go by a rule: what they find fits, and is what the rule says."""

import pytest

from jaxckpt.planner.chain import Candidate, Carried, Chain, Drop, Keep, Segment, cost, covers, items
from jaxckpt.planner.solvers import Infeasible
from jaxckpt.planner.solvers.greedy import Greedy
from jaxckpt.planner.solvers.optimal import Table
from jaxckpt.planner.solvers.sqrt import Sqrt
from tests.planner.solvers.chains import deep_chain

greedy, sqrt = Greedy().solve, Sqrt().solve


def uniform(length):
    candidate = Candidate(0, 0.0, 1)
    segments = {
        (start, stop): Segment(float(stop - start), 0, 0, (candidate,) if stop == start + 1 else ())
        for start in range(length)
        for stop in range(start + 1, length + 1)
    }
    return Chain(length, segments, tuple(Carried(1, i, (i + 1,)) for i in range(length - 1)))


@pytest.mark.parametrize("length", [9, 16, 30, 100])
def test_sqrt_holds_about_two_roots_of_the_outputs_at_its_least(length):
    chain = uniform(length)
    least = sqrt(chain, 0).least_bytes
    assert isinstance(sqrt(chain, least - 1), Infeasible)
    assert 2 * length**0.5 - 3 <= least <= 2 * length**0.5 + 1
    found = sqrt(chain, least)
    sizes = {item.stop - item.start for item in found if isinstance(item, Drop)}
    assert len(sizes) == 1 and length**0.5 / 2 <= sizes.pop() <= 2 * length**0.5
    assert cost(chain, found).time <= length  # one forward run more, at most
    assert max(depth for depth, _ in items(found)) == 1


def test_sqrt_drops_nothing_where_everything_fits():
    chain = uniform(20)
    assert sqrt(chain, 1000) == tuple(Keep(i, i + 1, 0) for i in range(20))


def test_greedy_spends_bytes_where_they_save_most():
    cheap, dear = (Candidate(0, 4.0, 0), Candidate(2, 0.0, 0)), (Candidate(0, 4.0, 0), Candidate(8, 0.0, 0))
    segments = {(0, 1): Segment(9.0, 0, 0, dear), (1, 2): Segment(9.0, 0, 0, cheap), (0, 2): Segment(18.0, 0, 0, ())}
    chain = Chain(2, segments)
    assert greedy(chain, 1) == (Keep(0, 1, 0), Keep(1, 2, 0))
    assert greedy(chain, 9) == (Keep(0, 1, 0), Keep(1, 2, 1))
    assert greedy(chain, 10) == (Keep(0, 1, 1), Keep(1, 2, 1))


def test_greedy_drops_segments_where_keeping_every_input_does_not_fit_and_unfolds_what_does():
    chain = uniform(30)
    everything = cost(chain, tuple(Keep(i, i + 1, 0) for i in range(30))).peak
    times = []
    for budget in range(12, everything + 1):
        found = greedy(chain, budget)
        assert covers(chain, found) and cost(chain, found).peak <= budget
        times.append(cost(chain, found).time)
    assert times[0] > times[-1] == 0
    assert len(set(times)) > 3


@pytest.mark.parametrize("solve", [greedy, sqrt])
def test_rules_keep_to_every_budget_of_a_deep_chain_and_are_no_better_than_the_optimum(solve):
    chain = deep_chain(26, period=2)
    table = Table(chain)
    low, high = table.least, table.frontier()[-1][0]
    fits = 0
    for share in (-0.01, 0, 0.02, 0.1, 0.4, 0.8, 1.1):
        budget = int(low + share * (high - low))
        found = solve(chain, budget)
        if isinstance(found, Infeasible):
            assert share < 0.1 and found.least_bytes > budget
            continue
        fits += 1
        assert covers(chain, found) and cost(chain, found).peak <= budget
        # the table itself is exact to the steps that it leaves out
        assert cost(chain, found).time >= cost(chain, table.solution(budget)).time * 0.97 - 1e-3
    assert fits >= 4
