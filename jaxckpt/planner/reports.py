"""Reports of plans for the command, its tables and its pictures: costs of both steps, their times, plans for other
budgets.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxckpt._errors import InfeasibleBudgetError
from jaxckpt.core.plan import PlanReport
from jaxckpt.core.shown import Progress
from jaxckpt.memory.compare import time_steps
from jaxckpt.memory.verify import fill
from jaxckpt.planner.frontier import Frontier, Way, point, unplanned_bytes
from jaxckpt.planner.problems import Problem
from jaxckpt.planner.solvers import Solver


def report_of(
    problem: Problem,
    budget: int | str,
    *,
    verify: bool = True,
    solver: str | Solver = "chain",
    progress: Progress | None = None,
) -> PlanReport:
    """Returns the plan for a budget with what its step and the step as it is cost; with `verify` both are compiled.

    Raises:
      InfeasibleBudgetError: no plan fits.
    """
    found = point(problem, budget, verify=verify, solver=solver, progress=progress)
    if found.report is None:
        raise InfeasibleBudgetError(
            found.why, least_bytes=found.least_bytes, budget_bytes=found.budget_bytes, stretch=found.stretch
        )
    if verify and progress is not None:
        progress(0, 1, "compiling the step as it is")
    peak = unplanned_bytes(problem) if verify else found.report.unplanned_bytes
    plain = problem.plain
    return replace(
        found.report,
        unplanned=problem.known_unplanned,
        unplanned_bytes=peak,
        unplanned_flops=plain.flops,
        unplanned_seconds=plain.time.seconds,
    )


def timed(report: PlanReport, problem: Problem, progress: Progress) -> PlanReport:
    """Returns the report with the times of both steps, run in turns on the local backend; shapes are filled with
    data.
    """
    steps = {
        "planned": problem.planned(report.plan),
        "as it is": problem.step(problem.fun),
    }
    seconds = time_steps(steps, fill(problem.args), lambda done, what: progress(done, len(steps), what))
    return replace(report, times=(seconds["planned"], seconds["as it is"]), timed_on=jax.default_backend())


def sketch(report: PlanReport, problem: Problem, *, solver: str | Solver = "chain", points: int = 8) -> Frontier:
    """Returns the frontier that a plan lies on as the planner predicts it, to be drawn behind the plan.

    Args:
      report: one of `report_of`.
      problem: what was planned. Nothing is compiled.
      solver: see `jaxckpt.plan`.
      points: number of budgets.
    """
    assert report.budget is not None and report.unplanned_flops is not None and report.unplanned_seconds is not None
    most = report.unplanned_bytes or 2 * report.budget
    least = max(problem.argument_bytes, most // 5)
    budgets = [least + (most - least) * i // points for i in range(1, points + 1)]
    return Frontier(
        problem.target.name,
        Way("as it is", report.unplanned_bytes, report.unplanned_flops, report.unplanned_seconds),
        tuple(point(problem, budget, verify=False, solver=solver) for budget in budgets),
        costs=report.costs,
    )
