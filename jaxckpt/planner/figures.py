"""What one plan brings and costs: for the command, its tables and its pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxckpt._errors import InfeasibleBudgetError
from jaxckpt.memory.compare import Progress, time_steps
from jaxckpt.memory.verify import fill
from jaxckpt.planner.frontier import (
    Frontier,
    Point,
    Way,
    cost_of,
    point,
    point_to_json,
    unplanned_bytes,
    way_to_json,
)
from jaxckpt.planner.search import Problem
from jaxckpt.planner.solvers import Solver


@dataclass(frozen=True)
class PlanFigures:
    """What a plan brings and costs, beside the plan itself.

    Attributes:
      point: the plan with its step's FLOPs and seconds.
      unplanned: the step as it is; its peak is None where nobody compiled it.
      times: median seconds of (planned step, step as it is), where they were run.
      timed_on: name of the backend that ran them, else "".
    """

    point: Point
    unplanned: Way
    times: tuple[float, float] | None = None
    timed_on: str = ""

    @property
    def recompute(self) -> float:
        """FLOPs that the plan adds, over the step's."""
        return (self.point.flops or 0) / self.unplanned.flops - 1 if self.unplanned.flops else 0.0

    @property
    def overhead(self) -> float:
        """Seconds that the plan adds by the target's rates, over the step's."""
        return (self.point.seconds or 0.0) / self.unplanned.seconds - 1 if self.unplanned.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain values: bytes, FLOPs, seconds, shares."""
        times = None
        if self.times is not None:
            times = {"planned": self.times[0], "as it is": self.times[1], "on": self.timed_on}
        return {
            "target": self.point.plan.target if self.point.plan is not None else None,
            "plan": point_to_json(self.point),
            "unplanned": way_to_json(self.unplanned),
            "recompute": self.recompute,
            "overhead": self.overhead,
            "times": times,
        }


def figures(
    problem: Problem,
    budget: int | str,
    *,
    verify: bool = True,
    solver: str | Solver = "chain",
    progress: Progress | None = None,
) -> PlanFigures:
    """Returns the plan for a budget with what it brings and costs; with `verify` the step as it is is compiled too.

    Raises:
      InfeasibleBudgetError: no plan fits.
    """
    found = point(problem, budget, verify=verify, solver=solver, progress=progress)
    if found.plan is None:
        raise InfeasibleBudgetError(
            found.why, least_bytes=found.least_bytes, budget_bytes=found.budget_bytes, stretch=found.stretch
        )
    if verify and progress is not None:
        progress(0, 1, "compiling the step as it is")
    peak = unplanned_bytes(problem) if verify else found.plan.unplanned_bytes
    flops, seconds = cost_of(problem.step(problem.fun), problem.args, problem.target, problem.model.shards)
    return PlanFigures(found, Way("as it is", peak, flops, seconds))


def timed(found: PlanFigures, problem: Problem, progress: Progress) -> PlanFigures:
    """Returns the figures with the times of both steps, run in turns on the local backend; shapes are filled with data."""
    assert found.point.plan is not None, "there is a plan, or an error instead of figures"
    steps = {
        "planned": problem.step(found.point.plan.apply(problem.fun)),
        "as it is": problem.step(problem.fun),
    }
    seconds = time_steps(steps, fill(problem.args), lambda done, what: progress(done, len(steps), what))
    return replace(found, times=(seconds["planned"], seconds["as it is"]), timed_on=jax.default_backend())


def sketch(found: PlanFigures, problem: Problem, *, solver: str | Solver = "chain", points: int = 8) -> Frontier:
    """Returns the frontier that a plan lies on as the planner predicts it, nothing of it compiled, to be drawn behind the plan."""
    most = found.unplanned.peak_bytes or 2 * found.point.budget_bytes
    least = max(problem.argument_bytes, most // 5)
    budgets = [least + (most - least) * i // points for i in range(1, points + 1)]
    return Frontier(
        problem.target.name,
        found.unplanned,
        tuple(point(problem, budget, verify=False, solver=solver) for budget in budgets),
    )
