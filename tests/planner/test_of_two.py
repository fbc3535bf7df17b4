"""Of a plan with more actions and one that saves and recomputes alone, the one that takes less time is returned."""

from types import SimpleNamespace

import pytest

from jaxckpt import InfeasibleBudgetError
from jaxckpt.planner import problems
from jaxckpt.planner.around_calls import AroundCalls
from jaxckpt.planner.solvers.optimal import Optimal
from jaxckpt.planner.tiled import Within


def bare():
    """A problem that knows of no other, and of nothing that was compiled."""
    each = object.__new__(problems.Problem)
    each.other, each.finer, each.inner_gradients, each.saving, each.known_unplanned = [None] * 5
    each.around_calls, each._made = [], []
    return each


@pytest.mark.parametrize(("fits", "faster"), [(True, False), (True, True), (False, False), (False, True)])
def test_calls_are_looked_at_where_nothing_else_fits_or_they_may_be_faster(monkeypatch, fits, faster):
    first, called = bare(), bare()
    plans = {id(first): SimpleNamespace(overhead=0.2), id(called): SimpleNamespace(overhead=0.1)}
    seen = []

    class Likely:
        def __init__(self, problem, budget, ways):
            self.left = list(ways)

        def next(self, best):
            assert (best is not None) == fits or not self.left
            return self.left.pop() if self.left and (best is None or faster) else None

    class Found:
        effort = 1.0

        def __init__(self, problem, budget, solver, verify, report, thorough, floors):
            self.problem = problem
            seen.append((problem, floors))

        def run(self):
            if self.problem is first and not fits:
                raise InfeasibleBudgetError("too little", least_bytes=2, budget_bytes=1, stretch=None)
            return plans[id(self.problem)]

    monkeypatch.setattr(problems, "Search", Found)
    monkeypatch.setattr(problems, "Likely", Likely)
    monkeypatch.setattr(problems.Problem, "shares", lambda problem, solver: True)
    first.around_calls = [AroundCalls((), lambda: called)]
    looked = faster or not fits
    assert (
        first.best(Within(1, Optimal(), True, lambda done, total, what: None)) is plans[id(called if looked else first)]
    )
    assert seen == ([(first, False), (called, True)] if looked else [(first, False)])


def test_the_leanest_plans_are_looked_for_last(monkeypatch):
    """They take long to find; nothing else is left to look at then."""
    first, called, seen = bare(), bare(), []

    class Found:
        def __init__(self, problem, budget, solver, verify, report, thorough, floors):
            seen.append((problem, floors))

        def run(self):
            raise InfeasibleBudgetError("too little", least_bytes=2, budget_bytes=1, stretch=None)

    monkeypatch.setattr(problems, "Search", Found)
    monkeypatch.setattr(
        problems,
        "Likely",
        lambda problem, budget, ways: SimpleNamespace(next=lambda best: ways.pop() if ways else None),
    )
    monkeypatch.setattr(problems.Problem, "shares", lambda problem, solver: True)
    first.around_calls = [AroundCalls((), lambda: called)]
    with pytest.raises(InfeasibleBudgetError):
        first.best(Within(1, Optimal(), True, lambda done, total, what: None))
    assert seen == [(first, False), (called, True), (first, True)]


@pytest.mark.parametrize(("overhead", "expected"), [(0.1, 1), (0.3, 0)])
def test_more_memory_costs_no_more_than_what_runs_again_for_less(monkeypatch, overhead, expected):
    plans = [SimpleNamespace(overhead=each) for each in (0.2, overhead)]
    first = bare()
    first.inner_gradients = SimpleNamespace(ways=[()], recall=lambda within: [plans[1]])

    class Found:
        effort = 1.0

        def __init__(self, *args, **settings):
            pass

        def run(self):
            return plans[0]

    monkeypatch.setattr(problems, "Search", Found)
    monkeypatch.setattr(problems.Problem, "shares", lambda problem, solver: True)
    assert first.best(Within(1, Optimal(), True, lambda done, total, what: None)) is plans[expected]


@pytest.mark.parametrize(
    ("overheads", "efforts", "expected"),
    [
        ((0.31, 0.27), (1.0, 2.0), 1),
        ((0.27, 0.31), (2.0, 1.0), 0),
        ((0.3, 0.3), (2.0, 1.0), 1),
        ((None, 0.1), (1, 2), 0),
    ],
)
def test_more_actions_cost_no_time(monkeypatch, overheads, efforts, expected):
    plans = [SimpleNamespace(overhead=each) for each in overheads]

    class Found:
        def __init__(self, problem, budget, solver, verify, report, thorough, floors):
            assert floors, "there is nothing else to look at"
            self.place = both.index(problem)
            self.effort = efforts[self.place]

        def run(self):
            return plans[self.place]

    monkeypatch.setattr(problems, "Search", Found)
    within = Within(1, Optimal(), True, lambda done, total, what: None)
    both = [bare(), bare()]
    both[0].saving = lambda: both[1]
    assert both[0].best(within) is plans[expected]
