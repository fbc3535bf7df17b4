"""Of a plan with more actions and one that saves and recomputes alone, the one that takes less time is returned."""

from types import SimpleNamespace

import pytest

from jaxckpt import InfeasibleBudgetError
from jaxckpt.planner import problems
from jaxckpt.planner.solvers.optimal import Optimal
from jaxckpt.planner.tiled import Within


def bare():
    """A problem that knows of no other, and of nothing that was compiled."""
    each = object.__new__(problems.Problem)
    each.other, each.finer, each.called, each.saving, each.known_unplanned, each._made = *[None] * 5, []
    return each


@pytest.mark.parametrize("fits", [True, False])
def test_calls_are_looked_at_where_nothing_else_fits(monkeypatch, fits):
    first, called = bare(), bare()
    plans = {id(each): SimpleNamespace(overhead=0.1) for each in (first, called)}
    seen = []

    class Found:
        effort = 1.0

        def __init__(self, problem, budget, solver, verify, report, thorough):
            self.problem = problem

        def run(self):
            seen.append(self.problem)
            if self.problem is first and not fits:
                raise InfeasibleBudgetError("too little", least_bytes=2, budget_bytes=1, stretch=None)
            return plans[id(self.problem)]

    monkeypatch.setattr(problems, "Search", Found)
    first.called = lambda: called
    expected = first if fits else called
    assert first.best(Within(1, Optimal(), True, lambda done, total, what: None)) is plans[id(expected)]
    assert seen == ([first] if fits else [first, called])


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
        def __init__(self, problem, budget, solver, verify, report, thorough):
            self.place = both.index(problem)
            self.effort = efforts[self.place]

        def run(self):
            return plans[self.place]

    monkeypatch.setattr(problems, "Search", Found)
    within = Within(1, Optimal(), True, lambda done, total, what: None)
    both = [bare(), bare()]
    both[0].saving = lambda: both[1]
    assert both[0].best(within) is plans[expected]
