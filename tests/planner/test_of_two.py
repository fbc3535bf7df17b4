"""Of a plan with more actions and one that saves and recomputes alone, the one that takes less time is returned."""

from types import SimpleNamespace

import pytest

from jaxckpt.planner import problems
from jaxckpt.planner.solvers.optimal import Optimal
from jaxckpt.planner.tiled import Within


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
    both: list[problems.Problem] = []
    for _ in plans:
        each = object.__new__(problems.Problem)
        each.other, each.finer, each.saving, each.known_unplanned, each._made = None, None, None, None, []
        both.append(each)
    both[0].saving = lambda: both[1]
    assert both[0].best(within) is plans[expected]
