"""frontier: the cheapest plan for each of many budgets, with one analysis for all, compared with other ways to run the
step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import jax

from jaxckpt._errors import ArgumentError, DoesNotFitError, InfeasibleBudgetError, check_flags, explains
from jaxckpt.actions import RECOMPUTE, SAVE, Action
from jaxckpt.core import shown
from jaxckpt.core.argument_names import items
from jaxckpt.core.lift import refuse_traced, trace
from jaxckpt.core.plan import SECONDS_BY, Plan, PlanReport
from jaxckpt.core.shown import Progress, silent, tells
from jaxckpt.core.units import added, as_int
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target, target_of
from jaxckpt.planner import costs as rates
from jaxckpt.planner import problems
from jaxckpt.planner.budget import check_budget
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.shards import WHOLE, Shards
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers import solver as solver_for

FORMAT = 1
"""Version of the JSON form."""
BUDGETS = ("25%", "30%", "40%", "50%", "60%", "70%", "80%", "90%")


@dataclass(frozen=True)
class Way:
    """A way to run the step.

    Attributes:
      name: what to call it.
      peak_bytes: compiled; what the compiler says that it needs where that does not fit the device, None where it says
        nothing.
      flops: of the step as traced, recomputation counted; where arguments are sharded, of all devices.
      seconds: of the step by the target's rates (a roofline) or its compiler, recomputation counted; of one device.
    """

    name: str
    peak_bytes: int | None
    flops: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """What the planner found for a budget.

    Attributes:
      budget: as it was asked for.
      budget_bytes: in bytes.
      report: the plan and what is known of it; None where no plan fits.
      why: where no plan fits, the planner's word on it, with the least budget found to fit; else "".
      least_bytes, stretch: where no plan fits, as of `InfeasibleBudgetError`; else None.
    """

    budget: int | str
    budget_bytes: int
    report: PlanReport | None
    why: str = ""
    least_bytes: int | None = None
    stretch: str | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan; None where none fits."""
        return None if self.report is None else self.report.plan

    @property
    def peak_bytes(self) -> int | None:
        """Compiled peak; None where there is no plan or nothing was compiled."""
        return None if self.report is None else self.report.peak_bytes

    @property
    def predicted_bytes(self) -> int | None:
        """The peak as the planner predicted it before it compiled this plan."""
        return None if self.report is None else self.report.predicted_bytes

    @property
    def prediction_error(self) -> float | None:
        """Predicted over compiled peak, less 1: positive where the prediction says more."""
        return None if self.report is None else self.report.prediction_error

    @property
    def flops(self) -> int | None:
        """FLOPs of the planned step, as of `Way`."""
        return None if self.report is None else self.report.flops

    @property
    def seconds(self) -> float | None:
        """Seconds of the planned step, as of `Way`."""
        return None if self.report is None else self.report.seconds


@dataclass(frozen=True)
class Frontier:
    """Plans for many budgets, and other ways beside them; prints as a table, shows as one in a notebook.

    Attributes:
      target: name of the target that was compiled for.
      unplanned: the step as it is.
      points: one for each budget, in the order that they were asked for.
      others: ways that the caller put beside them, such as checkpoints placed by hand.
      costs: whose seconds all of them have; see `PlanReport`.
    """

    target: str
    unplanned: Way
    points: tuple[Point, ...]
    others: tuple[Way, ...] = ()
    costs: str = "roofline"

    @property
    def seconds_by(self) -> str:
        """Whose seconds they are, in words."""
        return SECONDS_BY[self.costs]

    @overload
    def recompute(self, way: Way) -> float: ...
    @overload
    def recompute(self, way: Point) -> float | None: ...
    def recompute(self, way: Way | Point) -> float | None:
        """Returns the FLOPs that a way adds, over those of the step as it is; None where no plan fits."""
        return added(way.flops, self.unplanned.flops)

    @overload
    def overhead(self, way: Way) -> float: ...
    @overload
    def overhead(self, way: Point) -> float | None: ...
    def overhead(self, way: Way | Point) -> float | None:
        """Returns the seconds that a way adds, over those of the step as it is; None where no plan fits."""
        return added(way.seconds, self.unplanned.seconds)

    def best_other(self, point: Point, by: str = "flops", within: int | None = None) -> Way | None:
        """Returns the cheapest of the others, the step as it is among them, that needs no more memory than a plan; None
        where there is none.

        Args:
          point: one with a plan that was compiled.
          by: "flops" or "seconds".
          within: bytes that it may need; by default the plan's compiled peak.
        """
        within = point.peak_bytes if within is None else within
        if within is None:
            return None
        fitting = [
            way for way in (self.unplanned, *self.others) if way.peak_bytes is not None and way.peak_bytes <= within
        ]
        return min(fitting, key=lambda way: (getattr(way, by), way.peak_bytes), default=None)

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain values: bytes, FLOPs, seconds, shares."""
        return {
            "format": FORMAT,
            "target": self.target,
            "jax": jax.__version__,
            "costs": self.costs,
            "unplanned": way_to_json(self.unplanned),
            "points": [point_to_json(point) for point in self.points],
            "others": [way_to_json(way) for way in self.others],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws peak against recomputation, plans and other ways, to a file: .png, .svg or .pdf (extra: plot)."""
        shown.save_picture(self, path)

    def __str__(self) -> str:
        return shown.text_of(self)

    def _repr_html_(self) -> str:
        return shown.fragment_of(self)


@explains
@tells("analysing the function")
def frontier(
    fun: Callable[..., Any],
    *args: Any,
    budgets: Sequence[int | str] = BUDGETS,
    target: Target | str | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    host_budget: int | str | None = None,
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    others: Mapping[str, Callable[..., Any]] | None = None,
    reverse_only: bool = True,
    respect_checkpoints: bool = True,
    tile: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | bool | None = None,
) -> Frontier:
    """Returns the cheapest plan for each budget; the function is analysed once for all of them.

    Args:
      fun: see `jaxckpt.plan`, and so for target, step, actions, host_budget, costs, verify, solver, reverse_only,
        respect_checkpoints, tile, cache.
      *args: arguments of the training step.
      budgets: each as for `jaxckpt.plan`. The result also has the budgets that no plan fits, with the reason.
      others: name -> function of the same arguments, to compare with the plans: the same loss with checkpoints placed
        by hand.
      progress: see `jaxckpt.plan`.

    Raises:
      ArgumentError: `budgets` is empty, or one of them is invalid.
      The other errors of `jaxckpt.plan`, but for InfeasibleBudgetError: such a budget is a point without a plan.

    >>> import jax, jax.numpy as jnp
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.sum(x)
    >>> args = [jnp.zeros((64, 64))] * 16, jnp.ones((4096, 64))
    >>> found = frontier(loss, *args, budgets=("50%", "80%"), target="cpu")
    >>> [point.peak_bytes <= point.budget_bytes for point in found.points]
    [True, True]
    """
    assert not isinstance(progress, bool), "tells"
    check_flags(verify=verify)
    given = items(budgets)
    listed = (budgets,) if given is None else given
    budgets = tuple(each if (count := as_int(each)) is None else count for each in listed)
    if not budgets or None in budgets:
        raise ArgumentError("budgets", "at least one budget, and each as for jaxckpt.plan", budgets)
    for place, budget in enumerate(budgets):
        check_budget(budget, f"budgets[{place}]")
    solver_for(solver)
    if others is not None and not (isinstance(others, Mapping) and all(map(callable, others.values()))):
        raise ArgumentError("others", "a mapping from names to functions", others)
    if verify and callable(fun):
        refuse_traced(fun, args, "frontier (unless verify=False)")
    problem = problems.problem_of(
        fun,
        *args,
        target=target,
        step=step,
        actions=actions,
        host_budget=host_budget,
        costs=costs,
        reverse_only=reverse_only,
        respect_checkpoints=respect_checkpoints,
        tile=tile,
        cache=cache,
        progress=progress,
        collectives=verify,
    )
    return sweep(problem, budgets, verify=verify, solver=solver, others=others, progress=progress)


def sweep(
    problem: problems.Problem,
    budgets: Sequence[int | str],
    *,
    verify: bool = True,
    solver: str | Solver = "chain",
    others: Mapping[str, Callable[..., Any]] | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """Returns the frontier of a function that is already analysed; arguments as of `frontier`."""
    others = others or {}
    total = 1 + len(budgets) + len(others)
    progress = progress or silent
    if verify:
        progress(0, total, "compiling the step as it is")
    peak = unplanned_bytes(problem) if verify else None
    unplanned = Way("as it is", peak, problem.plain.flops, problem.plain.time.seconds)
    points: dict[int, Point] = {}
    # The least budget first: a plan that was compiled for it is one for those above it too.
    for done, place in enumerate(sorted(range(len(budgets)), key=lambda i: problem.budget_bytes(budgets[i])), start=1):
        progress(done, total, f"planning for {budgets[place]}")
        points[place] = point(problem, budgets[place], verify=verify, solver=solver)
    for place, found in points.items() if verify else ():  # what was compiled for a larger budget may fit a smaller one
        points[place] = _or_recalled(problem, found, solver)
    if verify and problem.shares(solver):
        points = {place: _or_cheaper(found, points.values()) for place, found in points.items()}
    ways = []
    for done, (name, other) in enumerate(others.items(), start=1 + len(budgets)):
        progress(done, total, f"{'compiling' if verify else 'tracing'} {name}")
        made = problem.step(other)
        peak = compiled_peak(made, problem.args, problem.target, problem.asked.cache) if verify else None
        ways.append(Way(name, peak, *problem.cost_of(made)))
    progress(total, total, "")
    return Frontier(
        problem.target.name,
        unplanned,
        tuple(points[i] for i in range(len(budgets))),
        tuple(ways),
        problem.asked.traced_costs,
    )


def point(
    problem: problems.Problem,
    budget: int | str,
    *,
    verify: bool = True,
    solver: str | Solver = "chain",
    progress: Progress | None = None,
) -> Point:
    """Returns what the planner finds for one budget."""
    bytes_ = problem.budget_bytes(budget)
    try:
        plan = problem.plan(bytes_, verify=verify, solver=solver, progress=progress)
    except InfeasibleBudgetError as error:
        return Point(budget, bytes_, None, str(error), least_bytes=error.least_bytes, stretch=error.stretch)
    return _point_of(problem, budget, bytes_, plan)


def _point_of(problem: problems.Problem, budget: int | str, bytes_: int, plan: Plan) -> Point:
    report = plan.report
    assert report is not None, "the planner's plans have reports"
    if report.flops is None:
        flops, seconds = problem.cost_of(problem.planned(plan))
        report = replace(report, flops=flops, seconds=seconds, costs=problem.asked.traced_costs)
    return Point(budget, bytes_, replace(report, asked=budget))


def _or_recalled(problem: problems.Problem, found: Point, solver: str | Solver) -> Point:
    """Returns the point, or one of a cheaper plan that was compiled and fits."""
    plan = problem.recall(found.budget_bytes, solver)
    if plan is None or (found.plan is not None and (not found.plan.regions or plan == found.plan)):
        return found
    recalled = _point_of(problem, found.budget, found.budget_bytes, plan)
    if found.seconds is None or (recalled.seconds or 0.0) < found.seconds:
        return recalled
    return found


def _or_cheaper(found: Point, points: Iterable[Point]) -> Point:
    """Returns the point, or that of the plan with the fewest seconds that fits its budget, of all the points: what the
    chain says of their times is not exactly what the traced steps say.
    """
    fitting = [each for each in points if each.peak_bytes is not None and each.peak_bytes <= found.budget_bytes]
    cheapest = min(fitting, key=lambda each: each.seconds or 0.0, default=found)
    if cheapest.report is None or (found.seconds is not None and found.seconds <= (cheapest.seconds or 0.0)):
        return found
    return Point(
        found.budget,
        found.budget_bytes,
        replace(cheapest.report, asked=found.budget, budget=found.budget_bytes),
    )


def unplanned_bytes(problem: problems.Problem) -> int | None:
    """Returns the peak of the step as it is: compiled, or what the compiler says that it needs where it does not fit
    the device.
    """
    try:
        return problem.unplanned.peak_bytes
    except DoesNotFitError as error:
        return error.needed_bytes


def way(
    name: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    step: Callable[[Callable[..., Any]], Callable[..., Any]],
    target: Target | str,
) -> Way:
    """Returns what a way to run the step needs, compiled, and what it costs."""
    made = step(fun)
    return Way(name, compiled_peak(made, args, target), *cost_of(made, args, target))


def compiled_peak(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str,
    cache: str | os.PathLike[str] | bool | None = None,
) -> int | None:
    """Returns a step's compiled peak, or what the compiler says that it needs where it does not fit the device."""
    try:
        return measure(step, *args, target=target, generate_code=False, cache=cache).peak_bytes
    except DoesNotFitError as error:
        return error.needed_bytes


def cost_of(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str,
    shards: Shards = WHOLE,
    cycles: Cycles | None = None,
) -> tuple[int, float]:
    """Returns (FLOPs of a step as traced, its seconds); what it recomputes is in both.

    Args:
      step: a function.
      args: its arguments.
      target: what it would run on.
      shards: how arrays lie over the target's devices: `Problem.model.shards`. FLOPs are those of all devices, seconds
        those of one.
      cycles: what the target's compiler has said of operations: `Problem.asked.cycles`. Those that it said nothing of
        take what the rates say.
    """
    graph = shards.applied(trace(step, *args))
    seconds = rates.roofline(graph, target_of(target), shards, cycles)
    return graph.flops, float(sum(map(seconds, graph.ops))) + shards.sent.elsewhere


def way_to_json(way: Way) -> dict[str, Any]:
    """Returns a way as plain values."""
    return {"name": way.name, "peak_bytes": way.peak_bytes, "flops": way.flops, "seconds": way.seconds}


def point_to_json(point: Point) -> dict[str, Any]:
    """Returns a point as plain values, without the plan itself."""
    return {
        "budget": point.budget,
        "budget_bytes": point.budget_bytes,
        "fits": point.plan is not None,
        "why": point.why,
        "peak_bytes": point.peak_bytes,
        "predicted_bytes": point.predicted_bytes,
        "prediction_error": point.prediction_error,
        "flops": point.flops,
        "seconds": point.seconds,
        "least_bytes": point.least_bytes,
        "stretch": point.stretch,
    }
