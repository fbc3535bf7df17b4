"""plan: find the cheapest plan that fits a budget in bytes, and check it with the compiler.

Solve, emit, compile the whole step, compare. The chain's bytes are a prediction. The compiled peak of one plan corrects
the prediction for the next plan. The returned plan is the cheapest whose compiled peak is within the budget, after at
most `COMPILES` compilations, `QUICK_COMPILES` of a small program, or where a plan that does not fit is much cheaper
than all that fit. Where none of these fits, the leanest plans are compiled as well.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxckpt._errors import (
    ArgumentError,
    DoesNotFitError,
    InfeasibleBudgetError,
    NotDifferentiableError,
    PlanMismatchError,
    check_flags,
)
from jaxckpt.actions import RECOMPUTE, SAVE, Action, action_from
from jaxckpt.core import lift, purity
from jaxckpt.core.bare import bare, has_checkpoints, without_checkpoints
from jaxckpt.core.constants import (
    ABOVE,
    BETWEEN,
    CLOSE,
    COMPILES,
    FLOORS,
    MARGIN,
    MORE,
    NESTED,
    OVERSTATED,
    QUICK,
    QUICK_COMPILES,
    STEEP,
)
from jaxckpt.core.graph import Graph, aval_bytes
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.lift import trace_call as trace
from jaxckpt.core.liveness import graph_peak
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.core.shown import Progress
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.gradient import PLAIN, StepMaker, not_a_loss, suited
from jaxckpt.memory.report import MemoryReport, measure
from jaxckpt.memory.targets import Target, target_of
from jaxckpt.planner import stages
from jaxckpt.planner.budget import budget_bytes, check_budget, resident_bytes
from jaxckpt.planner.calls import abstract as abstract_leaf
from jaxckpt.planner.chain import Drop, Solution, cost, covers, items
from jaxckpt.planner.context import Context
from jaxckpt.planner.inside import Inside, innermost
from jaxckpt.planner.model import Model, build
from jaxckpt.planner.shards import WHOLE, read
from jaxckpt.planner.solvers import Infeasible, Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.solvers.optimal import Optimal, Table
from jaxckpt.planner.solvers.sqrt import leanest, single

logger = logging.getLogger("jaxckpt")

COSTS = ("roofline", "measured")

EVERYTHING = 2**62
"""Bytes of a budget within which everything can be kept."""

_OPAQUE = {
    "shard_map": "A jax.shard_map that is not most of the function is kept or run again as a whole: checkpoint parts "
    "of what it maps with jaxckpt.checkpoint.",
    "while": "Nothing inside of a while loop is planned.",
}
"""Primitive -> a sentence, for operations that the planner does not look into."""


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
    plain, step = step in PLAIN, suited(step, args)
    try:
        seen = _observe(fun, step, args)
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

    def problem(inside: Inside, outer: Callable[[], Problem] | None) -> Problem:
        shards, whole = WHOLE, graph
        if inside.mapped:  # its bytes are those of one device
            if costs == "measured":
                rule, hint = "'roofline' for a function inside of jax.shard_map", "A part of it cannot be run alone."
                raise ArgumentError("costs", rule, costs, hint)
        elif _sharded(args):
            if progress is not None:
                progress(0, 1, "reading how the compiler shards")
            shards = read(inside.graph, lift.leaves(fun, args), jax.tree.leaves((seen.args, seen.kwargs)), resolved)
            whole, inside = shards.applied(graph), replace(inside, graph=shards.applied(inside.graph))
        context = Context(resolved, shards, costs == "measured", keeping, reverse_only and not seen.again)
        model = inside.run(lambda: build(inside.graph, inside.differentiated, context, progress))
        placed = replace(
            model, fingerprint=graph.fingerprint, address=inside.address, outside_bytes=inside.outside_bytes
        )
        return Problem(asked, whole, placed, outer)

    inner = innermost(graph, differentiated)
    if inner.address:
        purity.refuse_refs(fun, inner.graph)
    outermost = functools.cache(lambda: problem(Inside(graph, tuple(differentiated)), None))
    return problem(inner, outermost if inner.address else None)


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


@dataclass
class _Seen:
    """What a step does with its function: the arguments that it calls it with, and which of their leaves it
    differentiates in; `again` says whether it differentiates the gradient too.

    The function is one of arrays alone: see `jaxckpt.core.lift`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    differentiated: tuple[int, ...] = ()
    again: bool = False


def _observe(fun: Callable[..., Any], step: StepMaker, args: tuple[Any, ...]) -> _Seen:
    """Traces the step around the function, each differentiable leaf behind an identity whose derivative says that it
    was asked for.
    """
    calls: list[tuple[_Seen, set[int], set[int]]] = []

    def watch(call: lift.Taken) -> Any:
        purity.refuse_ref_arguments(fun, call.paths())
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        abstract = [abstract_leaf(x) if hasattr(x, "shape") else x for x in leaves]
        abstract_args, abstract_kwargs = jax.tree.unflatten(tree, abstract)
        asked: set[int] = set()
        again: set[int] = set()
        calls.append((_Seen(call.fun, abstract_args, abstract_kwargs), asked, again))
        leaves = [_watch(asked, again, place)(leaf) if is_inexact(leaf) else leaf for place, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return call.fun(*args, **kwargs)

    watched = lift.through(purity.refusing(fun), lambda call: call.finish(watch(call)))
    lift.attempt(step(watched), args, {}, lambda call: jax.eval_shape(call.fun, *call.args))
    twice = any(again for _, _, again in calls)
    for seen, asked, _ in calls:
        if asked:
            return replace(seen, differentiated=tuple(sorted(asked)), again=twice)
    raise NotDifferentiableError(
        "step must differentiate the function that it is given, as jax.value_and_grad does; it "
        f"{'calls it without taking a gradient' if calls else 'does not call it'}. Then there is nothing to keep or "
        f"to recompute."
    )


def _watch(asked: set[int], again: set[int], place: int) -> Callable[[Any], Any]:
    """Returns an identity; differentiated it enters `place` into `asked`, and into `again` if its gradient is
    differentiated too.
    """

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        return x, None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        asked.add(place)
        return (gradient(cotangent),)

    @jax.custom_jvp
    def gradient(x: Any) -> Any:
        return x

    def tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        again.add(place)
        return gradient(*primals), tangents[0]

    gradient.defjvp(tangent)
    same.defvjp(forward, backward)
    return same


@dataclass
class _Try:
    """A compiled plan.

    Attributes:
      solution: the chain's.
      modelled: its bytes by the chain, arguments excluded.
      compiled: its compiled peak; where the compiler refused it, what that says that it needs.
      plan: the plan.
      report: what the compiler said; None where it refused the plan.
      effort: its recomputation by the chain.
    """

    solution: Solution
    modelled: int
    compiled: int
    plan: Plan
    report: MemoryReport | None
    effort: float

    def fits(self, budget: int) -> bool:
        """Returns whether the compiler took it, and its peak is within a budget."""
        return self.report is not None and self.compiled <= budget


@dataclass(frozen=True, eq=False)
class Asked:
    """What plans are asked for; see `plan`.

    Attributes:
      fun: the function as it was given.
      args: of the step.
      step: makes the step.
      target: what it would run on.
      respect_checkpoints, cache: as of `plan`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    step: StepMaker
    target: Target
    respect_checkpoints: bool = True
    cache: str | os.PathLike[str] | bool | None = None


class Problem:
    """A function analysed for one step and target; `plan(budget)` gives plans.

    Attributes:
      fun: the function without a plan: as it was given, or without the checkpoints in it, if they do not count.
      graph: the function as traced.
      model: its chain of stages with their candidates.
      target: what is planned for.
      outer: makes the problem of the whole function, where `model` is that of a body in it; else None.
    """

    def __init__(self, asked: Asked, graph: Graph, model: Model, outer: Callable[[], Problem] | None = None) -> None:
        self.asked, self.graph, self.model, self.outer = asked, graph, model, outer
        self.fun = asked.fun if asked.respect_checkpoints else without_checkpoints(asked.fun)
        self.args, self.step, self.target = asked.args, asked.step, asked.target
        self.argument_bytes = _per_device(lift.leaves(asked.fun, asked.args))
        self._lock = threading.Lock()
        self._unplanned: MemoryReport | None = None
        self._tries: dict[tuple[Solution, bool], _Try] = {}  # (solution, whether as people write it)
        self._estimates: dict[tuple[Solution, bool], int] = {}
        self._solvers: dict[str, Solver] = {}

    @property
    def table(self) -> Table:
        """The exact solution for every budget: that of the solver `chain`."""
        exact = self._solver(Optimal.name)
        assert isinstance(exact, Optimal)
        return exact.table(self.model.chain)

    def _solver(self, given: str | Solver) -> Solver:
        """Returns a solver, for equal names the same one: it keeps what budgets share."""
        if not isinstance(given, str):
            return solver_for(given)
        return self._solvers.get(given) or self._solvers.setdefault(given, solver_for(given))

    @functools.cached_property
    def by_hand(self) -> tuple[Solution, ...]:
        """What people would do: see `Model.by_hand`."""
        return tuple(dict.fromkeys(self.model.by_hand()))

    @functools.cached_property
    def used_argument_bytes(self) -> int:
        """Bytes of the arguments that the step uses, on one device: a compiled program is not given the others. Traces
        the step.
        """
        if _sharded(self.args):
            return self.argument_bytes
        graph = trace(self.step(self.fun), *self.args)
        used = {index for op in graph.ops for index in op.inputs} | set(graph.body.outputs)
        unused = (value for value in graph.values if value.kind == "argument" and value.index not in used)
        return self.argument_bytes - sum(value.bytes for value in unused)

    @functools.cached_property
    def traced_peak(self) -> int:
        """The peak that the traced step without a plan is estimated to have, for arguments on one device."""
        return graph_peak(trace(self.step(self.fun), *self.args), self.target.platform)

    @functools.cached_property
    def merged_bytes(self) -> int:
        """Bytes that the trace counts and the compiler does not keep: see `stages.merged_bytes`."""
        return stages.merged_bytes(self.graph)

    @property
    def unplanned(self) -> MemoryReport:
        """The compiled step without a plan; compiled at first use.

        Raises:
          DoesNotFitError: the target's compiler refuses it.
        """
        with self._lock:
            if self._unplanned is None:
                self._unplanned = self.measure(self.fun)
            return self._unplanned

    def measure(self, fun: Callable[..., Any]) -> MemoryReport:
        """Returns what the step of a function needs, compiled as far as its peak needs it."""
        return self._measured(self.step(fun))

    def _measured(self, step: Callable[..., Any]) -> MemoryReport:
        return measure(step, *self.args, target=self.target, generate_code=False, cache=self.asked.cache)

    def estimate(self, solution: Solution, by_hand: bool = False) -> int:
        """Returns the peak that the traced step is estimated to have under a solution; `by_hand`: as people write it.

        It knows nothing of what the compiler adds, so it is seldom far above the compiled peak.
        """
        known = self._estimates.get((solution, by_hand))
        if known is None:
            if _sharded(self.args):
                known = cost(self.model.chain, solution).peak + self.model.outside_bytes + self.argument_bytes
            else:
                made = self.model.plan_by_hand(solution) if by_hand else self.model.plan(solution)
                with self._one_signature():
                    known = graph_peak(trace(self.planned(made), *self.args), self.target.platform)
            self._estimates[solution, by_hand] = known
        return known

    def measure_planned(self, made: Plan) -> MemoryReport:
        """Returns what the step needs under a plan.

        Raises:
          DoesNotFitError: the target's compiler refuses it.
        """
        with self._one_signature():
            return self._measured(self.planned(made))

    def planned(self, made: Plan) -> Callable[..., Any]:
        """Returns the step under a plan."""
        return self.step(replace(made, respect_checkpoints=self.asked.respect_checkpoints).apply(self.asked.fun))

    @contextlib.contextmanager
    def _one_signature(self) -> Iterator[None]:
        """Raises ArgumentError where the step calls the function in several ways: a plan is for one program."""
        try:
            yield
        except PlanMismatchError as error:
            rule = "one that calls the function that it is given with one signature"
            hint = "It also calls it with other shapes, or other static arguments; call the plain function for those."
            raise ArgumentError("step", rule, self.step, hint) from error

    def budget_bytes(self, budget: int | str) -> int:
        """Returns a budget in bytes; see `jaxckpt.plan`."""

        def peak() -> int:
            try:
                return self.unplanned.peak_bytes
            except DoesNotFitError as error:
                if error.needed_bytes is None:
                    raise
                return error.needed_bytes

        return budget_bytes(
            budget,
            unplanned=peak,
            target=self.target,
            resident=resident_bytes(lift.leaves(self.fun, self.args), self.target),
        )

    def plan(
        self,
        budget: int | str,
        *,
        verify: bool = True,
        solver: str | Solver = "chain",
        progress: Progress | None = None,
    ) -> Plan:
        """Returns the cheapest plan within a budget; see `jaxckpt.plan`."""
        chosen = self._solver(solver)
        report = progress or (lambda done, total, what: None)
        wanted = self.budget_bytes(budget)
        if wanted < self.argument_bytes and wanted < (needed := self.used_argument_bytes):
            raise InfeasibleBudgetError(
                f"budget must be more than the arguments alone, {format_bytes(needed)} ({needed} bytes); got "
                f"{format_bytes(wanted)}. {_share_hint(budget)}"
                "Use fewer parameters, a smaller batch, or shard the arguments over more devices.",
                least_bytes=needed,
                budget_bytes=wanted,
            )
        found = self._best(wanted, chosen, verify, report).report
        assert found is not None, "the planner's plans have reports"
        return replace(found, asked=budget if isinstance(budget, str) else wanted).plan

    def _best(self, budget: int, solver: Solver, verify: bool, report: Progress) -> Plan:
        """Returns the plan of the body that is planned, or where none fits, of the whole function."""
        try:
            return _Search(self, budget, solver, verify, report).run()
        except InfeasibleBudgetError as error:
            if self.outer is None:
                raise
            outer = self.outer()
            outer._unplanned = self._unplanned
            try:
                return _Search(outer, budget, solver, verify, report).run()
            except InfeasibleBudgetError as other:
                least = min((error, other), key=lambda each: each.least_bytes or EVERYTHING)
                raise least from None

    def recall(self, budget: int | str, solver: str | Solver = "chain") -> Plan | None:
        """Returns the cheapest of the plans that were compiled, for whatever budgets, that fits a budget; compiles
        nothing. None where none fits.
        """
        wanted = self.budget_bytes(budget)
        search = _Search(self, wanted, self._solver(solver), True, lambda done, total, what: None)
        found = search.known() if self.shares(solver) else None
        return None if found is None else found.plan

    def shares(self, solver: str | Solver) -> bool:
        """Whether a solver's plans for one budget may be those for another; other solvers answer for what they find."""
        return isinstance(self._solver(solver), Optimal)


class _Search:
    """One search for one budget."""

    def __init__(self, problem: Problem, budget: int, solver: Solver, verify: bool, report: Progress) -> None:
        self.problem, self.budget, self.solver, self.verify, self.report = problem, budget, solver, verify, report
        self.free = problem.shares(solver)
        self.chain = problem.model.chain
        self.tries: list[_Try] = []
        self.compiles = 0
        self.quick = not _sharded(problem.args) and sum(1 for _ in problem.graph.walk()) <= QUICK
        self.most = QUICK_COMPILES if self.quick else COMPILES

    def run(self) -> Plan:
        if (found := self._as_it_is() if self.verify else self._predicted_as_it_is()) is not None:
            return found
        least = self.solver.least(self.chain)
        # JAX traces what a region holds once for each region around it: of a large program a plan without nested ones
        # is looked at.
        small = least is not None and self._nested(least) <= NESTED
        standing = self._standing(least if least is not None and small else single(self.chain, leanest))
        if not self.verify:
            solution = self._solve(self.budget - self._offset(standing)) or least
            if solution is None:
                raise self._infeasible(self._peak_as_it_is())
            return self._unverified(solution, standing)
        best = self._search(least, standing)
        if best is None:
            best = self._floor(least, standing)
        self.report(self.most, self.most, "")
        if best is None:
            raise self._infeasible()
        return best.plan

    def known(self) -> _Try | None:
        """Returns the cheapest plan that was compiled for another budget and fits this one."""
        least = self.solver.least(self.chain)
        return None if least is None else self._known(self._standing(least))

    def _search(self, least: Solution | None, standing: int) -> _Try | None:
        """Returns the cheapest compiled plan that fits, or None: the solver's solutions, each corrected by what the
        compiler said of those before it, and what people do by hand where that is cheaper.
        """
        best = self._known(standing) if self.free else None
        seen: set[Solution] = set()
        while self.compiles < self.most or (self.compiles < QUICK_COMPILES and self._is_steep()):
            last = self.compiles == self.most - 1 and best is None
            solution = (None if last else self._next(standing, seen)) or (least if best is None else None)
            if solution is None or solution in seen:
                break
            seen.add(solution)
            tried = self._try(solution, standing)
            best = self._better(best, tried)
            if best is tried and tried.compiled >= self.budget * (1 - CLOSE) and not self._is_steep():
                break
        if best is None or not self.free:
            return best
        return self._or_by_hand(self._or_estimated(best, standing, seen), standing)

    def _is_steep(self) -> bool:
        """Whether a plan that does not fit takes much less time than all that fit: then one between may be worth a
        compilation.
        """
        above = [t.effort for t in self.tries if not t.fits(self.budget)]
        below = [t.effort for t in self.tries if t.fits(self.budget)]
        forward = sum(self.chain.segment(s, s + 1).forward_time for s in range(self.chain.length))
        return bool(above and below) and min(below) - max(above) > STEEP * forward

    def _next(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution to be compiled next, one that was not; None where there is none."""
        for offset in self._offsets(standing):
            solution = self._solve(self.budget - offset)
            if solution is not None and solution not in seen:
                return solution
        return None

    def _or_estimated(self, best: _Try, standing: int, seen: Collection[Solution]) -> _Try:
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
            if self.compiles >= self.most or left[solution] >= best.effort:
                break
            if solution not in seen and problem.estimate(solution) * max(ratio, 1.0) <= self.budget:
                best = self._better(best, self._try(solution, standing)) or best
        return best

    def _better(self, best: _Try | None, tried: _Try) -> _Try | None:
        return tried if tried.fits(self.budget) and (best is None or tried.effort < best.effort) else best

    def _known(self, standing: int) -> _Try | None:
        """Returns the cheapest plan that was compiled for another budget and fits this one: more memory never costs
        more.
        """
        with self.problem._lock:
            fitting = [(t.effort, key) for key, t in self.problem._tries.items() if t.fits(self.budget)]
        found = min(fitting, key=lambda each: each[0], default=None)
        return None if found is None else self._try(found[1][0], standing, by_hand=found[1][1], corrects=False)

    def _or_by_hand(self, best: _Try, standing: int) -> _Try:
        """Returns the best plan, or checkpoints as people place them that fit and recompute less: of those that are
        estimated to fit, the cheapest first; of those that are not, the leanest, to learn what estimates are worth.
        """
        problem, tried = self.problem, 0
        times = {solution: cost(self.chain, solution).time for solution in problem.by_hand}
        while tried == 0 or self.compiles < self.most:
            left = [s for s in times if times[s] < best.effort and (s, True) not in problem._tries]
            estimates = {solution: problem.estimate(solution, by_hand=True) for solution in left}
            learned = self._overstated()
            fitting = [s for s in left if estimates[s] <= (learned or 1.0) * self.budget]
            if not fitting and learned is None:
                fitting = sorted(
                    (s for s in left if estimates[s] <= OVERSTATED * self.budget), key=lambda s: estimates[s]
                )[:1]
            if not fitting:
                break
            made = self._try(min(fitting, key=lambda solution: times[solution]), standing, by_hand=True)
            best = self._better(best, made) or best
            tried += 1
        return best

    def _overstated(self) -> float | None:
        """Returns by how much the estimate of a plan as people write it is above its compiled peak, at most, in those
        that were compiled; 1 at least. None where there is none.
        """
        problem = self.problem
        with problem._lock:
            compiled = {
                key: made.compiled for key, made in problem._tries.items() if key[1] and made.report is not None
            }
        return max((max(problem.estimate(*key) / peak, 1.0) for key, peak in compiled.items()), default=None)

    def _floor(self, least: Solution | None, standing: int) -> _Try | None:
        """Returns the leanest plan, if it fits. The model does not know which of lean plans is the leanest, so several
        of different cuts are compiled: the solver's, what people do by hand, and the next on the frontier. Not so those
        that are estimated to need more than what is compiled already.
        """
        lean = [] if least is None else [(least, False)]
        if self.free:
            by_hand = sorted(self.problem.by_hand, key=lambda solution: cost(self.chain, solution).peak)
            lean += [(solution, True) for solution in by_hand[:FLOORS]]
        if self.free and least is not None:
            peak = cost(self.chain, least).peak
            above = (self._solve(round(peak * more)) for more in (sorted({*ABOVE, *MORE}) if self.quick else ABOVE))
            lean += [(solution, False) for solution in above if solution is not None]
        compiled = [tried.compiled for tried in self.tries]
        estimates = {each: self.problem.estimate(*each) for each in lean}
        for solution, written in sorted(estimates, key=lambda each: estimates[each]):
            over = (self._overstated() or OVERSTATED) if written else 1 + CLOSE
            if compiled and estimates[solution, written] > over * min(compiled):
                continue
            made = self._try(solution, standing, by_hand=written)
            compiled.append(made.compiled)
            if made.fits(self.budget):
                return made
        return None

    def _solve(self, limit: int) -> Solution | None:
        """Returns the solver's solution within a limit, or None.

        Raises:
          ArgumentError: it is none: it leaves stages out, or peaks above the limit.
        """
        found = self.solver.solve(self.chain, limit)
        if isinstance(found, Infeasible):
            return None
        if not covers(self.chain, found) or cost(self.chain, found).peak > limit:
            rule = f"one whose solutions cover every stage once, in order, and peak at no more than {limit} bytes"
            raise ArgumentError("solver", rule, self.solver, f"{self.solver.name} returned {found!r:.200}.")
        return found

    def _as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step fits without one. Compiles it only where that can be."""
        problem = self.problem
        if problem._unplanned is None and not self._may_fit():
            return None
        return self._compiled_as_it_is()

    def _compiled_as_it_is(self) -> Plan | None:
        problem = self.problem
        self.report(0, self.most, "compiling the step as it is")
        if problem._unplanned is None:
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
        return self._record(empty, estimate, report, 0.0)

    def _may_fit(self) -> bool:
        return self._peak_as_it_is() - self.problem.merged_bytes <= 1.5 * self.budget

    def _peak_as_it_is(self) -> int:
        """Estimates the peak of the step without a plan."""
        problem = self.problem
        if not _sharded(problem.args):
            return problem.traced_peak
        cheapest = self.solver.solve(self.chain, EVERYTHING)
        kept = 0 if isinstance(cheapest, Infeasible) else cost(self.chain, cheapest).peak
        return problem.argument_bytes + problem.model.outside_bytes + kept

    def _predicted_as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step is predicted to fit without one."""
        peak = self._peak_as_it_is()
        if peak > self.budget:
            return None
        empty = Plan((), self.problem.graph.fingerprint, notes=("fits as it is",))
        return self._record(empty, MemoryEstimate(peak, self.problem.argument_bytes, 0, 0), None, 0.0)

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
        the nearest plans. No nearer to one that does not fit than the last of `BETWEEN`.
        """
        if not self.tries:
            return standing
        low, high = self._nearest()
        if low is None:
            above = [t for t in self.tries if not t.fits(self.budget)]
            off = max(t.compiled - t.modelled for t in above)
            return off + int(MARGIN * self.budget * 6 ** (len(above) - 1))
        off = low.compiled - low.modelled + int(MARGIN * self.budget) // 2
        return max([off, *self._between(low, high)[-1:]])

    def _offsets(self, standing: int) -> list[int]:
        """Returns the offsets to be tried, in order. Where a plan fits with much to spare and the next one was over the
        budget, what the chain says is far off, and where the latter is much cheaper, others between them are of use.
        """
        off = self._offset(standing)
        low, high = self._nearest() if self.tries else (None, None)
        if low is None or len(self.tries) < COMPILES:
            return [off]
        far = low.compiled < self.budget * (1 - 2 * CLOSE)
        return [*self._between(low, high), off] if far or self._is_steep() else [off]

    def _nearest(self) -> tuple[_Try | None, _Try | None]:
        """Returns the plan that fits and is modelled with the most bytes, and that which does not, with the fewest."""
        above = [t for t in self.tries if not t.fits(self.budget)]
        below = [t for t in self.tries if t.fits(self.budget)]
        return (
            max(below, key=lambda t: t.modelled, default=None),
            min(above, key=lambda t: t.modelled, default=None),
        )

    def _between(self, low: _Try, high: _Try | None) -> list[int]:
        """Returns the offsets of plans between one that fits and one that does not, by their modelled bytes."""
        if high is None or high.modelled <= low.modelled:
            return []
        return [self.budget - low.modelled - round(share * (high.modelled - low.modelled)) for share in BETWEEN]

    def _try(self, solution: Solution, standing: int, *, by_hand: bool = False, corrects: bool = True) -> _Try:
        """Compiles a solution, unless it is compiled already. `corrects`: whether its bytes correct what the chain says
        of the next ones; those of a plan for another budget are too far from this one's.
        """
        problem = self.problem
        modelled = cost(self.chain, solution)
        with problem._lock:
            known = problem._tries.get((solution, by_hand))
        if known is None:
            self.report(self.compiles, self.most, "compiling a plan")
            self.compiles += 1
            model = problem.model
            made = model.plan_by_hand(solution) if by_hand else model.plan(solution)
            try:
                report: MemoryReport | None = problem.measure_planned(made)
                assert report is not None
                compiled = report.peak_bytes
            except DoesNotFitError as error:
                report, compiled = None, error.needed_bytes or 2 * error.memory_bytes
            known = _Try(solution, modelled.peak, compiled, made, report, modelled.time)
            with problem._lock:
                problem._tries[solution, by_hand] = known
        peak = modelled.peak + self._offset(standing)
        if by_hand:  # the chain does not know what is left to JAX
            peak = problem.estimate(solution, by_hand)
        estimate = self._estimate(solution, peak)
        logger.info("plan: predicted %s, compiled %s", format_bytes(estimate.peak_bytes), format_bytes(known.compiled))
        finished = replace(
            known, plan=self._record(known.plan, estimate, known.report, problem.model.seconds(solution))
        )
        if corrects and not by_hand:
            self.tries.append(finished)
        return finished

    def _unverified(self, solution: Solution, standing: int) -> Plan:
        modelled = cost(self.chain, solution)
        estimate = self._estimate(solution, modelled.peak + standing)
        if estimate.peak_bytes > self.budget:
            raise self._infeasible(min(estimate.peak_bytes, self._peak_as_it_is()))
        return self._record(self.problem.model.plan(solution), estimate, None, self.problem.model.seconds(solution))

    def _estimate(self, solution: Solution, peak: int) -> MemoryEstimate:
        kept = self.problem.model.kept_bytes(solution)
        arguments = self.problem.argument_bytes
        return MemoryEstimate(peak, arguments, kept, max(peak - arguments - kept, 0))

    def _record(self, made: Plan, estimate: MemoryEstimate, report: MemoryReport | None, seconds: float) -> Plan:
        problem = self.problem
        found = PlanReport(
            replace(made, respect_checkpoints=problem.asked.respect_checkpoints),
            budget=self.budget,
            target=problem.target.name,
            predicted=estimate,
            measured=report,
            measured_bytes=None if report is None else report.peak_bytes,
            unplanned_bytes=None if problem._unplanned is None else problem._unplanned.peak_bytes,
            overhead=seconds / problem.model.step_seconds if problem.model.step_seconds else 0.0,
        )
        return found.plan

    def _infeasible(self, needed: int | None = None) -> InfeasibleBudgetError:
        problem = self.problem
        with problem._lock:
            tried = [*problem._tries.values()] if self.free else self.tries
            peaks = [each.compiled for each in tried if each.report is not None]
            peaks += [] if problem._unplanned is None else [problem._unplanned.peak_bytes]
        needed = needed or min(peaks, default=None)
        advice = "Use a smaller batch, or shard the arguments over more devices."
        if needed is not None:
            found = "found" if self.verify else "predicted"
            advice = (
                f"The least budget {found} to fit is {needed} bytes ({format_bytes(needed)}). Use that, a smaller "
                f"batch, or shard the arguments over more devices."
            )
        elif tried:
            advice = f"The compiler for {problem.target.name} refused every plan. {advice}"
        stretch, said = self._widest()
        return InfeasibleBudgetError(
            f"budget must be enough for the plan that keeps least; got {format_bytes(self.budget)} ({self.budget} "
            f"bytes). {advice} {said}",
            least_bytes=needed,
            budget_bytes=self.budget,
            stretch=stretch,
        )

    def _widest(self) -> tuple[str | None, str]:
        """Returns (which stretch needs most, what is said of it); None where the function has no operations."""
        graph, model = self.problem.graph, self.problem.model
        if not model.graph.ops:
            return None, "The function itself has no operations."
        start, stop, needed = model.widest()
        largest = max(model.graph.ops[start:stop], key=lambda op: op.bytes)
        place = pathlib.PurePath(largest.source).name or largest.scope
        stretch = f"operations {start}–{stop}"
        if model.address:  # numbers count in the body that is planned
            around = next(op for op in graph.at(model.address[:-1]).ops if op.index == model.address[-1][0])
            stretch += f" inside of {around.primitive}"
        where = f"{stretch}, {largest.primitive}{f' at {place}' if place else ''}"
        text = f"The stretch that needs most memory needs {format_bytes(needed)} at once: {where}."
        return where, f"{text} {_OPAQUE[largest.primitive]}" if largest.primitive in _OPAQUE else text


def _share_hint(budget: int | str) -> str:
    """Returns a sentence for a budget of very few bytes, which is probably meant as a share of the peak."""
    count = str(budget).strip()
    return f"A share of the peak is written '{count}%'. " if count.isdigit() and int(count) <= 100 else ""


def _per_device(args: Any) -> int:
    """Returns the bytes of arguments on one device."""
    total = 0
    for leaf in jax.tree.leaves(args):
        if lift.is_number(leaf):
            leaf = jax.typeof(leaf)
        sharding, shape = _layout(leaf), getattr(leaf, "shape", None)
        if shape is None:
            continue
        if sharding is not None:
            leaf = jax.ShapeDtypeStruct(sharding.shard_shape(tuple(shape)), leaf.dtype)
        total += aval_bytes(leaf)
    return total


def _sharded(args: Any) -> bool:
    return any(_layout(leaf) is not None for leaf in jax.tree.leaves(args))


def _layout(leaf: Any) -> Any:
    """Returns the sharding of a leaf that lies over several devices, else None.

    Within jax.shard_map a leaf is what one device has: its type names a mesh with manual axes, over which nothing lies.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.num_devices == 1:
        return None
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return None if jax.sharding.AxisType.Manual in kinds else sharding
