"""plan: find the cheapest plan that fits a budget in bytes, and check it with the compiler.

Solve, emit, compile the whole step, compare. The chain's bytes are a prediction. The compiled peak of one plan corrects
the prediction for the next plan. The returned plan is the cheapest whose compiled peak is within the budget, after at
most `COMPILES` compilations, `QUICK_COMPILES` of a small program, or where a plan that does not fit is much cheaper
than all that fit. Where none of these fits, the leanest plans are compiled as well.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxckpt._errors import (
    ArgumentError,
    DoesNotFitError,
    InfeasibleBudgetError,
    check_flags,
)
from jaxckpt.actions import RECOMPUTE, SAVE, Action, action_from
from jaxckpt.core import lift, purity
from jaxckpt.core.bare import bare, has_checkpoints
from jaxckpt.core.constants import (
    ABOVE,
    AIMS,
    BETWEEN,
    CLOSE,
    COMPILES,
    FLOORS,
    INNERMOST_SHARE,
    MARGIN,
    MORE,
    NESTED,
    OVERTIMED,
    QUICK,
    QUICK_AIMS,
    QUICK_COMPILES,
    STEEP,
    TINY,
    UNITS,
    WORTH,
)
from jaxckpt.core.graph import Graph
from jaxckpt.core.lift import trace_call as trace
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.core.shown import Progress
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.gradient import PLAIN, StepMaker, not_a_loss, suited
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.report import MemoryReport
from jaxckpt.memory.targets import Target, target_of
from jaxckpt.planner import refusal
from jaxckpt.planner.budget import check_budget
from jaxckpt.planner.chain import Chain, Drop, Solution, cost, covers, items
from jaxckpt.planner.context import Context
from jaxckpt.planner.corrections import Corrections
from jaxckpt.planner.inside import Inside, innermost
from jaxckpt.planner.measured import Asked, Measured, Traced, Try
from jaxckpt.planner.model import Model, build
from jaxckpt.planner.observe import observe
from jaxckpt.planner.shards import WHOLE, is_sharded, read
from jaxckpt.planner.solvers import Infeasible, Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.solvers.sqrt import leanest, single

logger = logging.getLogger("jaxckpt")

COSTS = ("roofline", "measured")

EVERYTHING = 2**62
"""Bytes of a budget within which everything can be kept."""


def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | str,
    target: Target | str | None = None,
    step: StepMaker = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    reverse_only: bool = True,
    respect_checkpoints: bool = True,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns the plan with the least recomputation whose step peaks within a budget of bytes.

    `plan(...).apply(fun)` is the function to train with.

    Args:
      fun: a loss, or any function that `step` differentiates. It needs no checkpoints and no tags.
      *args: arguments of `step(fun)`: pytrees of arrays or `jax.ShapeDtypeStruct`; shapes, dtypes and shardings count.
      budget: bytes, "12GiB", "60%" (of the peak without a plan) or "device" (what is free on the device now). It bounds
        the compiled peak of `step(plan.apply(fun))(*args)` on the target, for each device, with arguments, outputs and
        temporaries.
      target: the hardware that it will run on, which this machine need not have: see `jaxckpt.Target`. None for the
        local backend.
      step: makes the training step from the loss: `jax.value_and_grad`, or a function whose step also has the
        optimiser's update. The step must call and differentiate the loss.
      actions: the allowed actions: RECOMPUTE, SAVE, and any others. For each value that is kept, the planner takes the
        cheapest of them.
      costs: "roofline": seconds from the target's rates; or "measured": each distinct stretch runs on the local device,
        which must be the target, and the measured times correct the rates.
      verify: whether the step is compiled, and the plan corrected until it fits. False returns the first prediction, in
        seconds.
      solver: the name of one of `jaxckpt.planner.solvers.SOLVERS`, or an instance of a subclass of
        `jaxckpt.planner.solvers.Solver`.
      reverse_only: whether loops may run by schedules that can be differentiated in reverse alone, and once:
        `jaxckpt.Slots`, which need the least memory. False leaves them out; so does a step that differentiates a
        gradient.
      respect_checkpoints: False plans for the function without the checkpoints that are in it (see
        `jaxckpt.without_checkpoints`), and so may place them better; `plan.apply(fun)` takes them out too. Shares of
        the peak are then shares of the peak without any checkpoint. True leaves them as they are.
      cache: where compilers' results are stored, so that nothing is compiled twice: see `jaxckpt.measure`.
      progress: called before each piece of work.

    Returns:
      The plan, with `predicted`, `measured` and `overhead`. It is empty if the step fits without a plan.

    Raises:
      ArgumentError: the budget, an action, the costs or the solver is invalid.
      InfeasibleBudgetError: no plan fits the budget. The error names the least budget that was found to fit.
      NotDifferentiableError: the step does not differentiate the function.

    >>> import jax, jax.numpy as jnp
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.sum(x)
    >>> args = [jnp.zeros((64, 64))] * 16, jnp.ones((4096, 64))
    >>> found = plan(loss, *args, budget="60%", target="cpu")
    >>> found.measured_bytes <= found.budget, found.measured_bytes < found.unplanned_bytes
    (True, True)
    """
    check_budget(budget)
    solver_for(solver)
    check_flags(verify=verify)
    if verify and callable(fun):
        lift.refuse_traced(fun, args, "plan (unless verify=False)")
    problem = problem_of(
        fun,
        *args,
        target=target,
        step=step,
        actions=actions,
        costs=costs,
        reverse_only=reverse_only,
        respect_checkpoints=respect_checkpoints,
        cache=cache,
        progress=progress,
    )
    return problem.plan(budget, verify=verify, solver=solver, progress=progress)


def problem_of(
    fun: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    step: StepMaker = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    costs: str = "roofline",
    reverse_only: bool = True,
    respect_checkpoints: bool = True,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | None = None,
) -> Problem:
    """Returns the analysis of a function, which plans for all budgets share. The arguments are those of `plan`."""
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun)
    if not callable(step):
        raise ArgumentError("step", "a function that makes a step of a function, such as jax.value_and_grad", step)
    wanted = actions_of(actions)
    check_flags(reverse_only=reverse_only, respect_checkpoints=respect_checkpoints)
    if progress is not None and not callable(progress):
        raise ArgumentError("progress", "a function of (done, total, what), or None", progress)
    if costs not in COSTS:
        raise ArgumentError("costs", f"one of {', '.join(COSTS)}", costs)
    resolved = target_of(target)
    for action in wanted:
        if refusal := action.refusal(resolved):
            raise ArgumentError("actions", f"actions that {resolved.name} can take", action, refusal)
    if costs == "measured" and not resolved.local:
        hint = "Leave out the target to plan for this machine."
        raise ArgumentError("costs", f"'roofline' for {resolved.name}, which is not here", costs, hint)
    if not args:
        raise ArgumentError("args", "the arguments of the step, arrays or shapes, with at least one", args)
    if not callable(step(fun)):
        raise ArgumentError("step", "a function that makes a function of a function, such as jax.value_and_grad", step)
    plain, step = step in PLAIN, suited(step, fun, args)
    try:
        seen = observe(fun, step, args)
    except TypeError as error:
        if plain and (wrong := not_a_loss(lift.title(fun), fun, args)) is not None:
            raise wrong from error
        raise
    if not respect_checkpoints:
        if not has_checkpoints(seen.fun, seen.args, seen.kwargs):
            logger.warning("%s has no checkpoints: respect_checkpoints=False changes nothing", lift.title(fun))
        seen = replace(seen, fun=bare(seen.fun))
    graph = trace(seen.fun, *seen.args, **seen.kwargs)
    purity.refuse_refs(fun, graph)
    arguments = [value.index for value in graph.values if value.kind == "argument"]
    differentiated = [arguments[place] for place in seen.differentiated]
    keeping = tuple(action for action in wanted if action.keeps)

    asked = Asked(fun, args, step, resolved, respect_checkpoints, cache)

    def problem(inside: Inside, kept: tuple[Action, ...] = keeping) -> Problem:
        shards, traced = WHOLE, graph
        if inside.mapped:  # its bytes are those of one device
            if costs == "measured":
                rule, hint = "'roofline' for a function inside of jax.shard_map", "A part of it cannot be run alone."
                raise ArgumentError("costs", rule, costs, hint)
        elif is_sharded(args):
            if progress is not None:
                progress(0, 1, "reading how the compiler shards")
            shards = read(inside.graph, lift.leaves(fun, args), jax.tree.leaves((seen.args, seen.kwargs)), resolved)
            traced, inside = shards.applied(graph), replace(inside, graph=shards.applied(inside.graph))
        context = Context(resolved, shards, costs == "measured", kept, reverse_only and not seen.again)
        model = inside.run(lambda: build(inside.graph, inside.differentiated, context, progress))
        placed = replace(
            model,
            fingerprint=graph.fingerprint,
            address=inside.address,
            outside_bytes=inside.outside_bytes,
            mapped=inside.mapped,
        )
        return Problem(asked, traced, placed)

    whole = Inside(graph, tuple(differentiated))
    inner, smaller = (innermost(graph, differentiated, share) for share in (INNERMOST_SHARE, 0.0))
    other: Inside | None = whole
    if inner.address:
        purity.refuse_refs(fun, inner.graph)
    else:
        enters = smaller.address and costs != "measured" and purity.ref_in(smaller.graph) is None
        other = smaller if enters else None
    found = problem(inner)
    found.other = None if other is None else functools.cache(lambda: problem(other))
    found.saving = None if keeping == (SAVE,) else functools.cache(lambda: problem(inner, (SAVE,)))
    return found


def actions_of(actions: Sequence[Action | str]) -> tuple[Action, ...]:
    """Returns the actions that a planner is allowed, each once.

    Raises:
      ArgumentError: `actions` is not a sequence of actions, or lacks RECOMPUTE or SAVE.
    """
    if isinstance(actions, (str, Action)) or not isinstance(actions, Iterable):
        raise ArgumentError("actions", "a sequence of actions, such as (RECOMPUTE, SAVE)", actions)
    wanted = tuple(dict.fromkeys(action_from(action, "actions") for action in actions))
    if RECOMPUTE not in wanted or SAVE not in wanted:
        hint = "Values between regions are saved, and other values are recomputed, so both actions are needed."
        raise ArgumentError("actions", "a sequence with RECOMPUTE and SAVE in it", wanted, hint)
    return wanted


class Problem(Measured):
    """A function analysed for one step and target: `plan(budget)` gives plans.

    Attributes:
      other: makes the problem of another body, for budgets that no plan of this one fits: of the whole function, or of
        a `jax.shard_map` in it that does not hold most of it. None where there is none.
      saving: makes the problem where SAVE alone keeps values, for budgets that other actions come nowhere near: what
        the compiler makes of those is hard to predict. None where there are no others.
    """

    def __init__(self, asked: Asked, graph: Graph, model: Model) -> None:
        super().__init__(asked, graph, model)
        self.other: Callable[[], Problem] | None = None
        self.saving: Callable[[], Problem] | None = None
        self._made: list[Problem] = []

    def plan(
        self,
        budget: int | str,
        *,
        verify: bool = True,
        solver: str | Solver = "chain",
        progress: Progress | None = None,
    ) -> Plan:
        """Returns the cheapest plan within a budget; see `jaxckpt.plan`."""
        chosen = self.solver(solver)
        report = progress or (lambda done, total, what: None)
        wanted = self.budget_bytes(budget)
        if wanted < self.argument_bytes and wanted < (needed := self.used_argument_bytes):
            raise refusal.below_arguments(budget, wanted, needed)
        found = self._best(wanted, chosen, verify, report).report
        assert found is not None, "the planner's plans have reports"
        return replace(found, asked=budget if isinstance(budget, str) else wanted).plan

    def _best(self, budget: int, solver: Solver, verify: bool, report: Progress) -> Plan:
        """Returns the cheapest plan of this problem, of `other` where none fits, and of `saving` where none of these is
        near the budget.
        """
        found: list[tuple[float, Plan]] = []
        errors: list[InfeasibleBudgetError] = []

        def look(problem: Problem) -> None:
            search = _Search(problem, budget, solver, verify, report)
            try:
                plan = search.run()
                found.append((search.effort, plan))
            except InfeasibleBudgetError as error:
                errors.append(error)

        look(self)
        if self.other is not None and not found:
            look(self._shared(self.other()))
        if self.saving is not None and not any(effort == 0.0 or _is_near(plan, budget) for effort, plan in found):
            look(self._shared(self.saving()))
        if not found:
            raise min(errors, key=lambda each: each.least_bytes or EVERYTHING)
        return min(found, key=lambda each: each[0])[1]

    def _shared(self, problem: Problem) -> Problem:
        """Returns a problem that knows what was compiled for this one."""
        problem.known_unplanned = self.known_unplanned
        if problem not in self._made:
            self._made.append(problem)
        return problem

    def recall(self, budget: int | str, solver: str | Solver = "chain") -> Plan | None:
        """Returns the cheapest of the plans that were compiled, for whatever budgets, that fits a budget; compiles
        nothing. None where none fits.
        """
        if not self.shares(solver):
            return None
        wanted, silent = self.budget_bytes(budget), lambda done, total, what: None
        searches = [_Search(each, wanted, self.solver(solver), True, silent) for each in (self, *self._made)]
        found = [known.plan for search in searches if (known := search.known()) is not None]
        return min(found, key=lambda plan: plan.overhead or 0.0, default=None)


def _spread(errors: Sequence[int]) -> int:
    """Returns by how much errors differ, each from the next."""
    return sum(abs(second - first) for first, second in itertools.pairwise(errors))


def _is_near(plan: Plan, budget: int) -> bool:
    """Whether a plan needs nearly all of a budget; without a compiled peak it is taken to."""
    return plan.measured_bytes is None or plan.measured_bytes >= budget * (1 - CLOSE)


class _Search:
    """One search for one budget."""

    def __init__(self, problem: Problem, budget: int, solver: Solver, verify: bool, report: Progress) -> None:
        self.problem, self.budget, self.solver, self.verify, self.report = problem, budget, solver, verify, report
        self.free = problem.shares(solver)
        self.chain = problem.model.chain
        self.corrections, self.aiming = Corrections(self.chain), copy.copy(solver)  # a solver may keep what it solved
        self.tries: list[Try] = []
        self.compiles = 0
        self.effort = 0.0  # of the plan that was found
        self.quick = not is_sharded(problem.args) and sum(1 for _ in problem.graph.walk()) <= QUICK
        self.most = QUICK_COMPILES if self.quick else COMPILES
        self._most_overstated = PLATFORMS[problem.target.platform].overstated

    def run(self) -> Plan:
        if (found := self._as_it_is() if self.verify else self._predicted_as_it_is()) is not None:
            return found
        least = self.solver.least(self.chain)
        traced = least if least is not None and self._is_traced(least) else single(self.chain, leanest)
        standing = self._standing(traced)
        if not self.verify:
            solution = self._solve(self.budget - standing) or least
            if solution is None:
                raise self._infeasible(self._peak_as_it_is())
            return self._unverified(solution, standing)
        best = self._search(least, standing)
        if best is None:
            best = self._floor(least, standing)
        self.report(self.most, self.most, "")
        if best is None:
            raise self._infeasible()
        self.effort = best.effort
        return best.plan

    def known(self) -> Try | None:
        """Returns the cheapest plan that was compiled for another budget and fits this one."""
        least = self.solver.least(self.chain)
        return None if least is None else self._known(self._standing(least))

    def _search(self, least: Solution | None, standing: int) -> Try | None:
        """Returns the cheapest compiled plan that fits, or None: the solver's solutions, each corrected by what the
        compiler said of those before it, and what people do by hand where that is cheaper.
        """
        best = self._known(standing) if self.free else None
        seen: set[Solution] = set()
        closed = False  # whether a plan was near the budget, and another one is compiled all the same
        while self.compiles < self.most or (self.compiles < QUICK_COMPILES and self._is_steep()):
            last = self.compiles == self.most - 1 and best is None
            solution = None if last else self._next(standing, seen)
            if solution is None and best is not None and not self.tries:
                self.tries.append(best)  # made for another budget, it corrects what the chain says
                solution = self._next(standing, {*seen, best.solution})
            solution = solution or (least if best is None else None)
            if solution is None or solution in seen or (best is not None and not self._is_cheaper(solution, best)):
                break
            seen.add(solution)
            tried = self._try(solution, standing)
            best = self._better(best, tried)
            if closed:
                break
            if best is tried and tried.compiled >= self.budget * (1 - CLOSE) and not self._is_steep():
                if not self._is_worth_another(tried):
                    break
                closed = not self.quick
        if best is None or not self.free:
            return best
        return self._or_by_hand(self._or_estimated(best, standing, seen), standing)

    def _is_steep(self) -> bool:
        """Whether a plan that does not fit takes much less time than all that fit: then one between may be worth a
        compilation.
        """
        above = [t.effort for t in self.tries if not t.fits(self.budget)]
        below = [t.effort for t in self.tries if t.fits(self.budget)]
        return bool(above and below) and min(below) - max(above) > STEEP * self._forward_time()

    def _is_cheaper(self, solution: Solution, best: Try) -> bool:
        """Whether a solution takes less than a plan that was compiled, as its step is traced."""
        tiny = TINY * self.problem.plain.time.effort
        return not self._is_traced(solution) or self._effort(solution) < best.effort - tiny

    def _is_worth_another(self, close: Try) -> bool:
        """Whether a plan that needs all of the budget would take less time than one that is close to it."""
        fullest = self._solve_corrected() or self._solve(self.budget - close.compiled + close.modelled)
        saved = 0.0 if fullest is None else self._chain_time(close) - cost(self.chain, fullest).time
        return saved > (TINY if self.quick else WORTH) * self.problem.model.step_seconds

    def _next(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution to be compiled next, one that was not; None where there is none. Between a plan that
        fits and one that does not, compiled peaks may come in steps, so several solutions are traced.
        """
        aimed = self._aimed(standing, seen)
        low, high = self._nearest()
        if low is None or high is None or high.modelled <= low.modelled:
            return aimed
        limits = [low.modelled + round(share * (high.modelled - low.modelled)) for share in BETWEEN]
        found = dict.fromkeys(s for s in (aimed, *map(self._solve, limits)) if s is not None and s not in seen)
        between = [solution for solution in found if self._is_traced(solution)]
        if not between:
            return aimed
        over = {solution: self._predicted(solution, standing) - self.budget for solution in between}
        fitting = [solution for solution in between if over[solution] <= 0]
        if fitting:
            return min(fitting, key=self.problem.effort)
        far = low.compiled < self.budget * (1 - 2 * CLOSE)
        return min(between, key=lambda solution: over[solution]) if far or self._is_steep() else None

    def _aimed(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution that takes least of those that are predicted to fit, or the last one where none is.

        Each is traced, and corrects the chain for the next one, until that is the same.
        """
        found, cheapest, looked = None, None, set()
        for _ in range(0 if self.problem.divided else QUICK_AIMS if self.quick else AIMS):
            solution = self._solve_corrected()
            if solution is None or solution in looked or not self._is_traced(solution):
                break
            looked.add(solution)
            self.corrections.add(solution, self.problem.traced(solution).moments, max(self.budget // UNITS, 1))
            if solution in seen:
                continue
            found = solution
            if self._predicted(solution, standing) <= self.budget - self._spare():
                cheapest = solution if cheapest is None else min(cheapest, solution, key=self._effort)
        return cheapest or found or self._bracketed(standing, seen)

    def _solve_corrected(self) -> Solution | None:
        """Returns the solver's solution of the corrected chain that is predicted to fit, or None."""
        others = self.problem.argument_bytes + self._added()
        return self._solve(self.budget - self._spare() - others, self.corrections.chain)

    def _added(self) -> int:
        """Returns the bytes that the compiler adds to what the trace says of the stages: those of the plan that is
        nearest.
        """
        near = min(self._compiled(), key=lambda t: abs(t.compiled - self.budget), default=None)
        return 0 if near is None or not self._is_traced(near.solution) else near.compiled - self._traced(near.solution)

    def _traced(self, solution: Solution) -> int:
        """Returns the most bytes that a solution needs while its stages run, as traced."""
        moments = self.problem.traced(solution).moments
        return self.problem.argument_bytes + max(moments.values()) if moments else self.problem.estimate(solution)

    def _bracketed(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns what `_aimed` does, by the chain as it is.

        By the chain's bytes and the offset there is a first one. What is predicted of one says where the next is looked
        for: by as many bytes up or down as it is off; by twice as many as the time before where that changed little;
        and half way between one that is predicted to fit and one that is not, where it is not between them.
        """
        found, cheapest = None, None
        limit, aim = self.budget - self._offset(standing), self.budget - self._spare()
        low, high, step, off = None, None, 0, 0
        for _ in range(QUICK_AIMS if self.quick else AIMS):
            solution = self._solve(limit)
            if solution is None or (solution in seen and not self.quick):
                break
            over = self._predicted(solution, standing) - aim
            if solution not in seen:
                found = solution
                if over <= 0 and (cheapest is None or self._effort(solution) < self._effort(cheapest)):
                    cheapest = solution
            if -CLOSE / 4 * self.budget <= over <= 0 and not self.quick:
                break
            low, high = (limit, high) if over <= 0 else (low, limit)
            step = max(abs(over), 2 * step if 2 * abs(over) > abs(off) else 0, 1)
            off = over
            limit -= step if over > 0 else -step
            if low is not None and high is not None and not low < limit < high:
                limit = (low + high) // 2
        return cheapest or found

    def _spare(self) -> int:
        """Returns the bytes of the budget that the next plan leaves free, as what was compiled so far says that
        predictions are worth.
        """
        if self.quick and not self.tries:  # a compilation costs little, and a plan may need all of the budget
            return 0
        misses = sum(not each.fits(self.budget) for each in self.tries)
        fewer = 6 ** (misses - 1) if misses and misses == len(self.tries) else 0.5
        return int(MARGIN * self.budget * fewer)

    def _predicted(self, solution: Solution, standing: int) -> int:
        """Predicts the compiled peak: by the chain or by a trace of the step, whichever the compiled plans are more
        alike by, and by how far that was off in the nearest of these.
        """
        modelled, compiled = cost(self.chain, solution).peak, self._compiled()
        is_traced = all(self._is_traced(each) for each in (solution, *(t.solution for t in compiled)))
        if not compiled:
            return self._traced(solution) if is_traced else modelled + standing
        nearest = min(range(len(compiled)), key=lambda place: abs(compiled[place].modelled - modelled))
        chain = [t.compiled - t.modelled for t in compiled]
        traced = [t.compiled - self._traced(t.solution) for t in compiled] if is_traced else []
        if not is_traced or _spread(chain) < _spread(traced):
            return modelled + chain[nearest]
        return self._traced(solution) + traced[nearest]

    def _compiled(self) -> list[Try]:
        """Returns the solver's plans that were compiled, for whatever budgets, by their modelled bytes."""
        with self.problem.lock:
            made = [t for (_, by_hand), t in self.problem.tries.items() if t.report is not None and not by_hand]
        return sorted(made, key=lambda t: t.modelled)

    def _is_traced(self, solution: Solution) -> bool:
        """Whether the step of a solution is to be traced: JAX traces what a region holds once for each region around
        it.
        """
        return self._nested(solution) <= NESTED

    def _or_estimated(self, best: Try, standing: int, seen: Collection[Solution]) -> Try:
        """Returns the best plan, or one that the chain says needs more, and the estimate of its step that it fits: the
        cheapest of these first.
        """
        problem = self.problem
        if not self.quick:  # each estimate takes a trace of the whole step
            return best
        ratio = min(
            (t.compiled / problem.estimate(t.solution) for t in self.tries if t.report is not None), default=1.0
        )
        more = (self._solve(round(best.modelled * factor)) for factor in MORE)
        left = {solution: cost(self.chain, solution).time for solution in more if solution is not None}
        for solution in sorted(left, key=lambda each: left[each]):
            if self.compiles >= self.most or left[solution] >= self._chain_time(best):
                break
            if solution not in seen and problem.estimate(solution) * max(ratio, 1.0) <= self.budget:
                best = self._better(best, self._try(solution, standing)) or best
        return best

    def _forward_time(self) -> float:
        return sum(self.chain.segment(stage, stage + 1).forward_time for stage in range(self.chain.length))

    def _effort(self, solution: Solution) -> float:
        return self.problem.effort(solution) if self._is_traced(solution) else cost(self.chain, solution).time

    def _chain_time(self, tried: Try) -> float:
        return cost(self.chain, tried.solution).time

    def _better(self, best: Try | None, tried: Try) -> Try | None:
        return tried if tried.fits(self.budget) and (best is None or tried.effort < best.effort) else best

    def _known(self, standing: int) -> Try | None:
        """Returns the cheapest plan that was compiled for another budget and fits this one: more memory never costs
        more.
        """
        with self.problem.lock:
            fitting = [(t.effort, key) for key, t in self.problem.tries.items() if t.fits(self.budget)]
        found = min(fitting, key=lambda each: each[0], default=None)
        return None if found is None else self._try(found[1][0], standing, by_hand=found[1][1], corrects=False)

    def _or_by_hand(self, best: Try, standing: int) -> Try:
        """Returns the best plan, or checkpoints as people place them that fit and recompute less: of those that are
        estimated to fit, the cheapest first; of those that are not, the leanest, to learn what estimates are worth.
        """
        problem, tried = self.problem, 0
        times = {solution: cost(self.chain, solution).time for solution in problem.by_hand}
        while tried == 0 or self.compiles < self.most:
            most = OVERTIMED * self._chain_time(best)
            near = [s for s in times if times[s] < most and (s, True) not in problem.tries]
            efforts = {solution: problem.effort(solution, by_hand=True) for solution in near}
            most = best.effort - TINY * problem.plain.time.effort
            left = sorted((s for s in near if efforts[s] < most), key=lambda solution: efforts[solution])
            learned = self._overstated()
            known = learned or self._overstated(by_hand=False) or 1.0
            estimate = functools.partial(problem.estimate, by_hand=True)  # a trace of the step
            chosen = next((s for s in left if estimate(s) <= max(known, 1.0) * self.budget), None)
            if chosen is None and learned is None:
                near = [solution for solution in left if estimate(solution) <= self._most_overstated * self.budget]
                chosen = min(near, key=estimate, default=None)
            if chosen is None:
                break
            best = self._better(best, self._try(chosen, standing, by_hand=True)) or best
            tried += 1
        return best

    def _overstated(self, by_hand: bool = True) -> float | None:
        """Returns the estimate of a plan over its compiled peak: the most of those that were compiled as people write
        them, or of the others. None where there is none.
        """
        problem = self.problem
        with problem.lock:
            made = {key: t.compiled for key, t in problem.tries.items() if key[1] is by_hand and t.report is not None}
        return max((problem.estimate(*key) / peak for key, peak in made.items()), default=None)

    def _floor(self, least: Solution | None, standing: int) -> Try | None:
        """Returns the leanest plan, if it fits. The model does not know which of lean plans is the leanest, so several
        of different cuts are compiled: the solver's, what people do by hand, and the next on the frontier. Not so those
        that are estimated to need more than what is compiled already, unless a compilation takes no time.
        """
        problem, lean = self.problem, [] if least is None else [(least, False)]
        if self.free:
            by_hand = sorted(problem.by_hand, key=lambda solution: cost(self.chain, solution).peak)
            lean += [(solution, True) for solution in by_hand[:FLOORS]]
        if self.free and least is not None:
            peak = cost(self.chain, least).peak
            above = (self._solve(round(peak * more)) for more in (sorted({*ABOVE, *MORE}) if self.quick else ABOVE))
            lean += [(solution, False) for solution in above if solution is not None]
        compiled = [tried.compiled for tried in self.tries]
        estimates = {each: problem.estimate(*each) for each in lean}
        for solution, written in sorted(estimates, key=lambda each: estimates[each]):
            over = max(1 + CLOSE, self._overstated(by_hand=False) or 1.0)
            over = max(over, self._overstated() or self._most_overstated) if written else over
            if compiled and estimates[solution, written] > over * min(compiled) and not (self.quick and written):
                continue
            made = self._try(solution, standing, by_hand=written)
            compiled.append(made.compiled)
            if made.fits(self.budget):
                return made
        return None

    def _solve(self, limit: int, corrected: Chain | None = None) -> Solution | None:
        """Returns the solver's solution within a limit, or None: of the chain, or of the corrected one.

        Raises:
          ArgumentError: it is none: it leaves stages out, or peaks above the limit.
        """
        chain, solver = (self.chain, self.solver) if corrected is None else (corrected, self.aiming)
        found = solver.solve(chain, limit)
        if isinstance(found, Infeasible):
            return None
        if not covers(chain, found) or cost(chain, found).peak > limit:
            rule = f"one whose solutions cover every stage once, in order, and peak at no more than {limit} bytes"
            raise ArgumentError("solver", rule, self.solver, f"{self.solver.name} returned {found!r:.200}.")
        return found

    def _as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step fits without one. Compiles it only where that can be."""
        problem = self.problem
        if problem.known_unplanned is None and not self._may_fit():
            return None
        return self._compiled_as_it_is()

    def _compiled_as_it_is(self) -> Plan | None:
        problem = self.problem
        self.report(0, self.most, "compiling the step as it is")
        if problem.known_unplanned is None:
            self.compiles += 1
        try:
            report = problem.unplanned
        except DoesNotFitError:
            return None
        if report.peak_bytes > self.budget:
            return None
        estimate = MemoryEstimate(report.peak_bytes, problem.argument_bytes, 0, 0)
        empty = Plan((), problem.graph.fingerprint, notes=("fits as it is",))
        self.report(self.most, self.most, "")
        return self._record(empty, estimate, report, problem.plain)

    def _may_fit(self) -> bool:
        return self._peak_as_it_is() - self.problem.merged_bytes <= 1.5 * self.budget

    def _peak_as_it_is(self) -> int:
        """Estimates the peak of the step without a plan."""
        problem = self.problem
        if not problem.divided:
            return problem.plain.peak_bytes
        cheapest = self.solver.solve(self.chain, EVERYTHING)
        kept = 0 if isinstance(cheapest, Infeasible) else cost(self.chain, cheapest).peak
        return problem.argument_bytes + problem.model.outside_bytes + kept

    def _predicted_as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step is predicted to fit without one."""
        peak = self._peak_as_it_is()
        if peak > self.budget:
            return None
        empty = Plan((), self.problem.graph.fingerprint, notes=("fits as it is",))
        return self._record(empty, MemoryEstimate(peak, self.problem.argument_bytes, 0, 0), None, self.problem.plain)

    def _standing(self, solution: Solution) -> int:
        """Estimates the bytes that the chain does not count: arguments, the optimiser's work, results."""
        problem = self.problem
        return max(problem.estimate(solution) - cost(self.chain, solution).peak, problem.argument_bytes)

    def _nested(self, solution: Solution) -> int:
        """Returns how many operations regions hold that others are in, those in several such once for each."""
        places = self.problem.model.places
        drops = (item for _, item in items(solution) if isinstance(item, Drop))
        return sum(places[item.stop] - places[item.start] for item in drops)

    def _offset(self, standing: int) -> int:
        """Returns the bytes to subtract from the budget before the chain is solved: compiled minus modelled bytes of
        the nearest plan that fits; of all plans at most, where none does. Before the first plan, those of the plan for
        another budget that is nearest.
        """
        if not self.tries:
            made = self._compiled()
            near = min(made, key=lambda t: abs(t.compiled - self.budget), default=None)
            return standing if near is None else near.compiled - near.modelled
        low, _ = self._nearest()
        nearest = self.tries if low is None else [low]
        return max(t.compiled - t.modelled for t in nearest) + self._spare()

    def _nearest(self) -> tuple[Try | None, Try | None]:
        """Returns the plan that fits and is modelled with the most bytes, and that which does not, with the fewest."""
        above = [t for t in self.tries if not t.fits(self.budget)]
        below = [t for t in self.tries if t.fits(self.budget)]
        return (
            max(below, key=lambda t: t.modelled, default=None),
            min(above, key=lambda t: t.modelled, default=None),
        )

    def _try(self, solution: Solution, standing: int, *, by_hand: bool = False, corrects: bool = True) -> Try:
        """Compiles a solution, unless it is compiled already. `corrects`: whether its bytes correct what the chain says
        of the next ones; those of a plan for another budget are too far from this one's.
        """
        problem = self.problem
        with problem.lock:
            known = problem.tries.get((solution, by_hand))
        if known is None:
            self.report(self.compiles, self.most, "compiling a plan")
            self.compiles += 1
            model, modelled = problem.model, cost(self.chain, solution).peak
            made = model.plan_by_hand(solution) if by_hand else model.plan(solution)
            # The chain does not know what is left to JAX.
            predicted = problem.estimate(solution, by_hand) if by_hand else self._predicted(solution, standing)
            traced, effort = problem.traced(solution, by_hand), problem.effort(solution, by_hand)
            try:
                report: MemoryReport | None = problem.measure_planned(made)
                assert report is not None
                compiled = report.peak_bytes
            except DoesNotFitError as error:
                report, compiled = None, error.needed_bytes or 2 * error.memory_bytes
            known = Try(solution, modelled, predicted, compiled, made, report, traced, effort)
            with problem.lock:
                problem.tries[solution, by_hand] = known
        estimate = self._estimate(solution, known.predicted)
        logger.info("plan: predicted %s, compiled %s", format_bytes(estimate.peak_bytes), format_bytes(known.compiled))
        finished = replace(known, plan=self._record(known.plan, estimate, known.report, known.traced))
        if corrects and not by_hand:
            self.tries.append(finished)
        return finished

    def _unverified(self, solution: Solution, standing: int) -> Plan:
        modelled = cost(self.chain, solution)
        self.effort = modelled.time
        estimate = self._estimate(solution, modelled.peak + standing)
        if estimate.peak_bytes > self.budget:
            raise self._infeasible(min(estimate.peak_bytes, self._peak_as_it_is()))
        return self._record(
            self.problem.model.plan(solution), estimate, None, None, self.problem.model.seconds(solution)
        )

    def _estimate(self, solution: Solution, peak: int) -> MemoryEstimate:
        kept = self.problem.model.kept_bytes(solution)
        arguments = self.problem.argument_bytes
        return MemoryEstimate(peak, arguments, kept, max(peak - arguments - kept, 0))

    def _record(
        self,
        made: Plan,
        estimate: MemoryEstimate,
        report: MemoryReport | None,
        traced: Traced | None,
        seconds: float = 0.0,
    ) -> Plan:
        """Returns the plan with its report. `seconds`: of recomputation by the chain, where the step is not traced."""
        problem = self.problem
        found = PlanReport(
            replace(made, respect_checkpoints=problem.asked.respect_checkpoints),
            budget=self.budget,
            target=problem.target.name,
            predicted=estimate,
            measured=report,
            measured_bytes=None if report is None else report.peak_bytes,
            unplanned_bytes=None if problem.known_unplanned is None else problem.known_unplanned.peak_bytes,
        )
        if traced is None:
            step = problem.model.step_seconds
            return replace(found, overhead=seconds / step if step else 0.0).plan
        plain = problem.plain
        found = replace(
            found,
            flops=traced.flops,
            seconds=traced.time.seconds,
            unplanned_flops=plain.flops,
            unplanned_seconds=plain.time.seconds,
        )
        return replace(found, overhead=found.slowdown).plan

    def _infeasible(self, needed: int | None = None) -> InfeasibleBudgetError:
        problem = self.problem
        with problem.lock:
            tried = [*problem.tries.values()] if self.free else self.tries
            peaks = [each.compiled for each in tried if each.report is not None]
            peaks += [] if problem.known_unplanned is None else [problem.known_unplanned.peak_bytes]
        least = needed or min(peaks, default=None)
        return refusal.no_plan(problem, self.budget, least, verified=self.verify, refused=bool(tried))
