"""Solvers against the oracle, on random chains: equal cost, feasible at the very least budget, and not at one byte less."""

import itertools

import numpy as np
import pytest

from jaxckpt.planner.chain import Carried, Chain, Cost, Drop, Keep, Option, Span, cost, covers
from jaxckpt.planner.solvers.exhaustive import exhaustive, schedules
from jaxckpt.planner.solvers.optimal import Table, least_budget, optimal


def random_chain(seed, length, options=3, wide=2):
    rng = np.random.default_rng(seed)
    time, output, gradient = rng.uniform(1, 9, length), rng.integers(1, 20, length), rng.integers(0, 12, length)
    spans = {}
    for start, stop in itertools.combinations(range(length + 1), 2):
        inside = slice(start, stop)
        forward = float(time[inside].sum())
        chosen = ()
        if stop - start <= wide:
            kept = np.sort(rng.integers(0, 25 * (stop - start), options))
            share = np.sort(rng.uniform(0, 1, options))[::-1]
            chosen = tuple(
                Option(int(k), forward * s, int(rng.integers(5, 40)), i) for i, (k, s) in enumerate(zip(kept, share))
            )
        spans[start, stop] = Span(
            forward, int(output[stop - 1] + rng.integers(0, 15)), int(gradient[inside].sum()), chosen
        )
    carried = [Carried(int(output[i]), i, (i + 1,)) for i in range(length - 1)]
    for made in range(length - 1):  # some skip stages, some are used more than once
        uses = tuple(int(u) for u in range(made + 1, length) if rng.random() < 0.3)
        if uses:
            carried.append(Carried(int(rng.integers(1, 9)), made, uses))
    return Chain(length, spans, tuple(carried))


def budgets(chain, count=6):
    peaks = sorted({cost(chain, schedule).peak for schedule in schedules(chain, 0, chain.length)})
    return [peaks[i] for i in sorted(set(np.linspace(0, len(peaks) - 1, count).astype(int)))]


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_of_random_chains(seed):
    chain = random_chain(seed, length=1 + seed % 4, options=1 + seed % 3, wide=1 + seed % 2)
    table = Table(chain)
    for budget in budgets(chain):
        best, found = exhaustive(chain, budget), table.schedule(budget)
        assert (best is None) == (found is None), budget
        if found is None:
            continue
        assert covers(chain, found)
        assert cost(chain, found).peak <= budget
        assert cost(chain, found).time == pytest.approx(cost(chain, best).time)


@pytest.mark.parametrize("seed", range(40))
def test_feasible_at_the_least_budget_and_not_at_one_byte_less(seed):
    chain = random_chain(seed, length=1 + seed % 4)
    least = least_budget(chain)
    assert least == min(cost(chain, schedule).peak for schedule in schedules(chain, 0, chain.length))
    assert optimal(chain, least) is not None
    assert optimal(chain, least - 1) is None


def test_time_falls_as_the_budget_grows():
    table = Table(random_chain(7, length=12))
    frontier = table.frontier()
    assert len(frontier) > 5
    for (less, slow), (more, fast) in itertools.pairwise(frontier):
        assert less < more and slow > fast
        assert cost(table.chain, table.schedule(less)).time == pytest.approx(slow)
        assert cost(table.chain, table.schedule(more - 1)).time <= slow * (1 + 1e-9)


def test_few_steps_stay_feasible_and_near():
    chain = random_chain(11, length=14)
    exact, coarse = Table(chain), Table(chain, steps=24)
    assert exact.least == coarse.least
    for budget, seconds in exact.frontier():
        schedule = coarse.schedule(budget)
        assert cost(chain, schedule).peak <= budget
        assert cost(chain, schedule).time <= seconds * 1.25 + 1


def test_a_uniform_chain_brackets_revolve():
    """l equal steps of one byte a state: revolve's t(l, s) counts neither the first state nor the one at work; here the latter counts."""

    def uniform(length):
        spans = {}
        for start, stop in itertools.combinations(range(length + 1), 2):
            options = (Option(0, 0.0, 0),) if stop == start + 1 else ()
            spans[start, stop] = Span(float(stop - start), 0, 0, options)
        return Chain(length, spans, tuple(Carried(1, i, (i + 1,)) for i in range(length - 1)))

    for length, states, extra in [(10, 3, 15), (56, 3, 210)]:
        table = Table(uniform(length))
        times = [cost(table.chain, table.schedule(budget)).time for budget in (states - 1, states)]
        assert times[0] >= extra >= times[1]


def test_the_simulator_counts_gradients_from_when_they_are_written():
    spans = {
        (0, 1): Span(1.0, 10, 100, (Option(5, 0.0, 7),)),
        (1, 2): Span(1.0, 10, 50, (Option(20, 0.0, 3),)),
        (0, 2): Span(2.0, 10, 150, ()),
    }
    chain = Chain(2, spans, (Carried(10, 0, (1,)),))
    # forward: 10 + 5, then + 20; backward of the second: 15 + 20 + 3; of the first: 5 + 7 + 50; all gradients: 150
    assert cost(chain, (Keep(0, 1, 0), Keep(1, 2, 0))).peak == 150
    light = Chain(2, {k: Span(s.forward_time, s.forward_work, 0, s.options) for k, s in spans.items()}, chain.carried)
    assert cost(light, (Keep(0, 1, 0), Keep(1, 2, 0))).peak == 38
    assert cost(light, (Drop(0, 1, (Keep(0, 1, 0),)), Keep(1, 2, 0))) == Cost(1.0, 33)
