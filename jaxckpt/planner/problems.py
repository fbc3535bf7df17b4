"""plan: the cheapest plan that fits a budget in bytes. A problem is a function analysed for one step and target; the
plans for all budgets share it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, InfeasibleBudgetError, check_flags, explains
from jaxckpt.actions import RECOMPUTE, SAVE, Action
from jaxckpt.core import garbage, lift, shown
from jaxckpt.core.again import recomputing
from jaxckpt.core.bare import bare
from jaxckpt.core.constants import FEW_STAGES
from jaxckpt.core.graph import Graph
from jaxckpt.core.plan import Plan
from jaxckpt.core.shown import Progress, silent, tells
from jaxckpt.core.tiling.stretches import tiled
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.memory.targets import Target
from jaxckpt.planner import refusal, stages
from jaxckpt.planner.around_calls import AroundCalls, CallEnds, Likely
from jaxckpt.planner.budget import check_budget, check_device
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.inner_gradients import Again, InnerGradients
from jaxckpt.planner.inside import Inside
from jaxckpt.planner.measured import Asked
from jaxckpt.planner.model import Model
from jaxckpt.planner.search import Search
from jaxckpt.planner.settings import PlanSettings
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.subject import Subject
from jaxckpt.planner.tiled import Tileable, Tiled, Within

logger = logging.getLogger("jaxckpt")


@explains
@tells("analysing the function")
def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | str,
    target: Target | str | None = None,
    step: StepMaker = jax.value_and_grad,
    actions: Sequence[Action | str] = (RECOMPUTE, SAVE),
    host_budget: int | str | None = None,
    costs: str = "roofline",
    verify: bool = True,
    solver: str | Solver = "chain",
    reverse_only: bool = True,
    respect_checkpoints: bool = True,
    tile: bool = False,
    cache: str | os.PathLike[str] | bool | None = None,
    progress: Progress | bool | None = None,
) -> Plan:
    """Returns the plan that adds least time, by the target's rates, and whose step peaks within a budget of bytes.

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
        optimizer's update. The step must call and differentiate the loss.
      actions: the allowed actions: RECOMPUTE, SAVE, and any others. For each value that is kept, the planner takes the
        cheapest of them. One that changes gradients, such as `compress("int8")`, is used only if it is named here:
        `jaxckpt.verify` says by how much. `OFFLOAD` moves values to the host; transfers count as free until they take
        as long as the step computes, and no plan transfers more unless nothing else fits.
      host_budget: bytes of host memory that the plan may take of each device's host, or "200GiB"; None for no bound.
        Only a target with host memory of its own can have one.
      costs: "roofline": seconds from the target's rates; or "measured": each distinct stretch runs on the local device,
        which must be the target, and the measured times correct what candidates cost (the seconds of a verified plan
        stay those of the rates); or "compiler": each distinct stretch is compiled to the end, and the cost model of
        the compiler says what its operations take. Only XLA for TPUs has one that it tells.
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
      tile: whether stretches that need too much at once may run tile by tile, as of `jaxckpt.tile`, where no plan fits
        without, or where that takes less time: the logits of a large vocabulary, the scores of an attention, a block.
        Values and gradients are those of `fun`, up to the order in which sums over tiles are added. Not inside of
        loops and `jax.shard_map`; sharded arguments are tiled within their shards.
      cache: where compilers' results are stored, so that nothing is compiled twice: see `jaxckpt.measure`.
      progress: True shows a bar, or lines where there is no terminal; False nothing; None a bar in a terminal, after
        two seconds, and elsewhere a line each half minute. A function is called as `progress(done, total, what)` before
        each piece of work.

    Returns:
      The plan, with `predicted`, `measured` and `overhead`. It is empty if the step fits without a plan.

    Raises:
      ArgumentError: the budget, an action, the costs or another argument is invalid.
      InfeasibleBudgetError: no plan fits the budget. The error names the least budget that was found to fit; for a
        budget below the arguments, what these take.
      NotDifferentiableError: the step does not differentiate the function.
      EffectsError: the function has side effects, which a recomputation would repeat.
      UnknownTargetError, MissingTargetError, TargetError: see `jaxckpt.Target` and `jaxckpt.measure`.
      DoesNotFitError: the budget is a share of the peak, and the target's compiler refuses the step without a plan and
        does not say what it needs.

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
    assert not isinstance(progress, bool), "tells"
    check_budget(budget)
    check_device(budget, target)
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
        host_budget=host_budget,
        costs=costs,
        reverse_only=reverse_only,
        respect_checkpoints=respect_checkpoints,
        tile=tile,
        cache=cache,
        progress=progress,
        collectives=verify,
    )
    return problem.plan(budget, verify=verify, solver=solver, progress=progress)


@garbage.seldom()
def problem_of(
    fun: Callable[..., Any],
    *args: Any,
    progress: Progress | None = None,
    cycles: Cycles | None = None,
    collectives: bool = True,
    of: Subject | None = None,
    **settings: Any,
) -> Problem:
    """Returns the problem of a function: what plans for all budgets share.

    Args:
      fun, *args, progress: as of `plan`.
      cycles: what the compiler has said already, where `costs` is "compiler".
      collectives: whether those that the compiler puts in take time.
      of: as of `Subject`.
      **settings: as of `PlanSettings`.
    """
    if progress is not None and not callable(progress):
        raise ArgumentError("progress", "a function of (done, total, what), or None", progress)
    wanted = PlanSettings(**settings)
    subject = Subject(fun, args, wanted, progress, cycles, of)
    bodies = subject.bodies()

    def problem(inside: Inside, keeping: tuple[Action, ...] = wanted.keeping) -> Problem:
        shards = subject.shards(inside)
        first = Problem(subject.asked, *subject.model(inside, keeping, shards))
        if not shards.fractions or not collectives:
            return first
        if progress is not None:
            progress(0, 1, "reading what devices send to one another")
        sent = first.sent()
        if not sent.rates:
            return first
        counted = Problem(subject.asked, *subject.model(inside, keeping, shards, sent))
        counted.known_unplanned = first.known_unplanned
        return counted

    def cut_anew(finer: bool = False, calls: CallEnds = ()) -> Problem:
        shards = subject.shards(bodies.first)
        model = subject.model(bodies.first, wanted.keeping, shards, finer=finer, calls=calls)
        return Problem(subject.asked, *model)

    found, other = problem(bodies.first), bodies.other
    if found.model.quick and found.model.is_unlike:
        found.finer = functools.cache(lambda: cut_anew(finer=True))
    ways = stages.calls(found.model.graph, found.model.block_ends)
    found.around_calls = [AroundCalls(each, functools.cache(functools.partial(cut_anew, calls=each))) for each in ways]
    found.other = None if other is None else functools.cache(lambda: problem(other))
    made_of: Callable[[Callable[..., Any]], Callable[..., Any]]
    made_of = (lambda plain: plain) if wanted.respect_checkpoints else bare
    alike = replace(wanted, target=subject.asked.target, step=subject.asked.step, respect_checkpoints=True, tile=False)

    def changed(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Problem:
        """Returns the problem of the function with its own operations changed."""
        function = lift.transformed(lambda plain: change(made_of(plain)), fun)
        known = subject.asked.cycles
        problem = problem_of(function, *args, progress=progress, cycles=known, of=subject, **alike.keywords()).whole()
        problem.inner_gradients = None
        return problem

    def running_again(again: Again) -> Problem:
        problem = changed(lambda plain: recomputing(plain, again))
        problem.around_calls, problem.finer = [], None  # there are several such problems already
        return problem

    found.inner_gradients = InnerGradients(found, running_again)
    found.saving = None if wanted.keeping == (SAVE,) else functools.cache(lambda: problem(bodies.first, (SAVE,)))
    if wanted.tile and bodies.first.mapped:
        logger.warning(
            "most of %s is in a jax.shard_map, in which the planner tiles nothing: tile=True changes nothing. Use "
            "jaxckpt.tile in what it maps",
            lift.title(fun),
        )
    elif wanted.tile:
        found.tiled = Tiled(found, lambda tiles: changed(lambda plain: tiled(plain, tiles)))
    return found


class Problem(Tileable):
    """A function analysed for one step and target: `plan(budget)` gives plans.

    Attributes:
      other: makes the problem of another body, for budgets that no plan of this one fits: of the whole function, or of
        a `jax.shard_map` in it that does not hold most of it. None where there is none.
      finer: makes the problem of a small program with at most two equal blocks in finer stages, which is searched too.
        None of other programs.
      around_calls: the ways to cut a program whose blocks do not repeat where calls of the user's functions begin and
        end: see `stages.calls`.
      saving: makes the problem where SAVE alone keeps values; what the compiler makes of other actions is hard to
        predict. None where there are no others.
      inner_gradients: plans of the function that runs again what gradients that it takes itself read, for budgets that
        no other plan fits. None of a function whose operations were changed already.
      tiled: plans with tiles, where they are wanted.
    """

    def __init__(self, asked: Asked, graph: Graph, model: Model) -> None:
        super().__init__(asked, graph, model)
        self.other: Callable[[], Problem] | None = None
        self.finer: Callable[[], Problem] | None = None
        self.around_calls: list[AroundCalls[Problem]] = []
        self.saving: Callable[[], Problem] | None = None
        self.inner_gradients: InnerGradients[Problem] | None = None
        self.tiled: Tiled | None = None
        self._made: list[Problem] = []

    def whole(self) -> Problem:
        """Returns the problem of the function's own body."""
        return self._shared(self.other()) if self.model.address and self.other is not None else self

    @garbage.seldom()
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
        wanted = self.budget_bytes(budget)
        if wanted < self.argument_bytes and wanted < (needed := self.used_argument_bytes):
            raise refusal.below_arguments(budget, wanted, needed)
        within = Within(wanted, chosen, verify, progress or silent)
        found = (self.best(within) if self.tiled is None else self.tiled.or_tiled(within)).report
        assert found is not None, "the planner's plans have reports"
        asked = budget if isinstance(budget, str) else wanted
        return replace(found, asked=asked, tree=shown.text_of(found.plan, self.graph)).plan

    def best(self, within: Within) -> Plan:
        """Returns the cheapest plan of this problem, and of `other` where none fits. A plan that only saves and
        recomputes is allowed under every list of actions, so `saving` is searched too; so is `finer`. Of `around_calls`
        those are searched that may give a faster one. The fastest of these plans is returned.

        Where nothing fits at once, `around_calls` and `inner_gradients` go before the leanest plans of the function as
        it stands, which take long to find.
        """
        found: list[tuple[float, Plan]] = []
        errors: list[InfeasibleBudgetError] = []
        thorough = within.verify and within.thorough
        ways = self.around_calls if thorough and self.shares(within.solver) else []
        inner = self.inner_gradients if thorough and self.shares(within.solver) else None
        last = not ways and (inner is None or not inner.ways)  # whether there is nothing else to look at

        def look(problem: Problem, floors: bool = True) -> None:
            asked = within.budget, within.solver, within.verify, within.progress
            search = Search(problem, *asked, thorough=within.thorough, floors=floors)
            try:
                plan = search.run()
                found.append((search.effort, plan))
            except InfeasibleBudgetError as error:
                errors.append(error)

        def look_at_all(floors: bool) -> None:
            look(self, floors)
            if self.other is not None and not found:
                look(self._shared(self.other()), floors)
            if self.saving is not None and not any(effort == 0.0 for effort, _ in found):
                look(self._shared(self.saving()), floors)

        look_at_all(floors=last)
        recomputes = not any(effort == 0.0 for effort, _ in found)
        likely = Likely(self, within.budget, ways if recomputes else [])
        while (way := likely.next(min((effort for effort, _ in found), default=None))) is not None:
            look(self._shared(way.problem()))
        if inner is not None and not found:
            for again, problem in inner.problems(within.budget):
                try:
                    return inner.told(problem.best(within), again)
                except InfeasibleBudgetError as error:
                    errors.append(error)
        if not last and not found:
            look_at_all(floors=True)
        if self.finer is not None and thorough and recomputes:
            finer = self._shared(self.finer())
            if finer.model.places != self.model.places or (not found and finer.model.chain.length <= FEW_STAGES):
                look(finer)
        if not found:
            raise min(errors, key=lambda each: each.least_bytes or math.inf)
        if inner is not None and recomputes:  # more memory never costs more
            found += [(math.inf, plan) for plan in inner.recall(within)]
        times = [plan.overhead for _, plan in found]
        if all(time is not None for time in times):
            return min(zip(times, found), key=lambda each: (each[0], each[1][0]))[1][1]
        return min(found, key=lambda each: each[0])[1]

    def _shared(self, problem: Problem) -> Problem:
        """Returns a problem that knows what was compiled for this one."""
        problem.known_unplanned = problem.known_unplanned or self.known_unplanned
        if problem not in self._made:
            self._made.append(problem)
        return problem

    def recall(self, budget: int | str, solver: str | Solver = "chain") -> Plan | None:
        """Returns the cheapest of the plans that were compiled, for whatever budgets, that fits a budget; compiles
        nothing. None where none fits.
        """
        if not self.shares(solver):
            return None
        wanted = self.budget_bytes(budget)
        searches = [Search(each, wanted, self.solver(solver), True, silent) for each in (self, *self._made)]
        found = [known.plan for search in searches if (known := search.known()) is not None]
        within = Within(wanted, self.solver(solver), True, silent)
        for others in (self.inner_gradients, self.tiled):
            found += [] if others is None else others.recall(within)
        return min(found, key=lambda plan: plan.overhead or 0.0, default=None)
