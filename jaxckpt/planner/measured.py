"""A function analysed for one step and target, with what compilers and traces said of it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, DoesNotFitError, NotDifferentiableError, PlanMismatchError
from jaxckpt.actions import RECOMPUTE, SAVE, Action
from jaxckpt.core import lift
from jaxckpt.core.bare import without_checkpoints
from jaxckpt.core.graph import Graph, graph_of
from jaxckpt.core.lift import trace
from jaxckpt.core.liveness import donated_arguments, graph_peak, graph_profile, loses_gradients, renewed_bytes
from jaxckpt.core.plan import Plan, arguments_of
from jaxckpt.core.shared_traces import SharedTraces
from jaxckpt.core.units import counted
from jaxckpt.memory.cache import folder_of
from jaxckpt.memory.gradient import StepMaker
from jaxckpt.memory.report import MemoryReport, measure, measure_traced, traced_for
from jaxckpt.memory.targets import Target
from jaxckpt.planner import stages
from jaxckpt.planner.budget import budget_bytes, resident_bytes
from jaxckpt.planner.chain import Moment, Solution, cost, unseen_seconds
from jaxckpt.planner.collectives import NOTHING, Sent, sent
from jaxckpt.planner.corrections import traced_moments
from jaxckpt.planner.costs import Time, timer, total
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.host import Host, host_use
from jaxckpt.planner.model import Model
from jaxckpt.planner.remembered import Remembered
from jaxckpt.planner.shards import device_bytes, is_sharded
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers import solver as solver_for
from jaxckpt.planner.solvers.optimal import Optimal, Table


@dataclass(frozen=True, eq=False)
class Asked:
    """What plans are asked for; see `plan`.

    Attributes:
      fun: the function as it was given.
      args: of the step.
      step: makes the step.
      target: what it would run on.
      respect_checkpoints, cache: as of `plan`.
      costs: as of `plan`.
      cycles: what the target's compiler says that operations take; None where it is not asked.
      host_budget: bytes of host memory that plans may take; None for no bound.
      actions: what values may have.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    step: StepMaker
    target: Target
    respect_checkpoints: bool = True
    cache: str | os.PathLike[str] | bool | None = None
    costs: str = "roofline"
    cycles: Cycles | None = None
    host_budget: int | None = None
    actions: tuple[Action, ...] = (RECOMPUTE, SAVE)

    @property
    def traced_costs(self) -> str:
        """Whose seconds traced steps have. What was measured is of the chain's candidates alone."""
        return "roofline" if self.cycles is None else "compiler"


@dataclass(frozen=True)
class Traced:
    """A step as traced.

    Attributes:
      peak_bytes: as estimated; where several devices share the work, that of all of them together.
      flops: with sharded arguments, of all devices.
      time: by the target's rates, on one device.
      moments: what it needs at each moment of a solution, arguments excluded; none of a step without a plan.
      renewed_bytes: of a step without a plan, bytes of arguments that it returns the next values of and could donate;
        None of others, and of steps on several devices.
    """

    peak_bytes: int
    flops: int
    time: Time
    moments: Mapping[Moment, int] = field(default_factory=dict)
    renewed_bytes: int | None = None


@dataclass
class Try:
    """A compiled plan.

    Attributes:
      solution: the chain's.
      modelled: its bytes by the chain, arguments excluded.
      predicted: the peak that was predicted before it was compiled.
      compiled: its compiled peak; where the compiler refused it, what that says that it needs.
      plan: the plan.
      report: what the compiler said; None where it refused the plan.
      traced: its step as traced.
      effort: what that adds to the step without a plan.
      by_hand: whether the plan is as people write it.
    """

    solution: Solution
    modelled: int
    predicted: int
    compiled: int
    plan: Plan
    report: MemoryReport | None
    traced: Traced
    effort: float
    by_hand: bool

    def fits(self, budget: int) -> bool:
        """Returns whether the compiler took it, and its peak is within a budget."""
        return self.report is not None and self.compiled <= budget


def step_graph(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Graph:
    """Returns a training step as traced for a target: JAX traces one that is jitted with compiler options in no other
    way.
    """
    return _graph_of(_traced(step, args, target), step, args)


def step_peak(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> int:
    """Returns the peak that a training step is estimated to have on a target, from its trace alone."""
    traced = _traced(step, args, target)
    graph = _graph_of(traced, step, args)
    return graph_peak(graph, target.platform, donated_arguments(graph, _with_program(traced)))


def step_and_settings(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> tuple[Graph, str]:
    """Returns what `step_graph` does, and what the step's `jax.jit` was given beside the function, as text; "" for a
    step that is not jitted.
    """
    traced = _traced(step, args, target)
    return _graph_of(traced, step, args), "" if traced is None else _compat.jit_settings(traced)


def _traced(step: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Any:
    return traced_for(step, args, target) if lift.is_jitted(step) else None


def _graph_of(traced: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> Graph:
    traced = _with_program(traced)
    return trace(step, *args) if traced is None else graph_of(traced.jaxpr, rules=True)


def _with_program(traced: Any) -> Any:
    """Returns what `jax.jit` traced; None where a wrapper of it, such as nnx's, does not show its program."""
    return traced if hasattr(traced, "jaxpr") else None


def _lost_gradients(count: int) -> NotDifferentiableError:
    """Returns the error for a step that computes gradients and returns `count` arrays that depend on none: the compiler
    drops the backward pass.
    """
    return NotDifferentiableError(
        "step must return what depends on the gradients, such as the new parameters. The step that it makes computes "
        f"gradients and returns {counted(count, 'array')} without them, so the compiler drops the backward pass. Return "
        "the new state; a step that changes modules of nnx is jitted with nnx.jit, not with jax.jit."
    )


class Measured:
    """A function analysed for one step and target. What is compiled or traced of it once is at hand from then on.

    Attributes:
      fun: the function without a plan: as it was given, or without the checkpoints in it, if they do not count.
      graph: the function as traced.
      model: its chain of stages with their candidates.
      target: what is planned for.
      known_unplanned: what `unplanned` returned; None where nobody asked.
      tries: the plans that were compiled, for whatever budgets: (solution, whether as people write it) -> plan.
      lock: to be held while `tries` is read or written, and while the step without a plan is compiled.
    """

    def __init__(self, asked: Asked, graph: Graph, model: Model) -> None:
        self.asked, self.graph, self.model = asked, graph, model
        self.fun = asked.fun if asked.respect_checkpoints else without_checkpoints(asked.fun)
        self.args, self.step, self.target = asked.args, asked.step, asked.target
        self.lock = threading.Lock()
        self.known_unplanned: MemoryReport | None = None
        self.tries: dict[tuple[Solution, bool], Try] = {}
        self._traced: dict[tuple[Solution, bool], Traced] = {}
        self._steps: dict[Plan | None, tuple[Callable[..., Any], Any]] = {}  # traced and not compiled yet
        self._solvers: dict[str, Solver] = {}

    @property
    def table(self) -> Table:
        """The exact solution for every budget: that of the solver `chain`."""
        exact = self.solver(Optimal.name)
        assert isinstance(exact, Optimal)
        return exact.table(self.model.chain)

    def solver(self, given: str | Solver) -> Solver:
        """Returns a solver, for equal names the same one: it keeps what budgets share."""
        if not isinstance(given, str):
            return solver_for(given)
        return self._solvers.get(given) or self._solvers.setdefault(given, solver_for(given))

    @functools.cached_property
    def by_hand(self) -> tuple[Solution, ...]:
        """What people would do: see `Model.by_hand`."""
        return tuple(dict.fromkeys(self.model.by_hand()))

    @functools.cached_property
    def argument_bytes(self) -> int:
        """Bytes of the step's arguments, on one device. Where a mapped step, and not its arguments, says how these lie,
        the compiled step is asked.
        """
        if self.model.mapped and not is_sharded(self.args):
            with contextlib.suppress(DoesNotFitError):
                return self.unplanned.argument_bytes
        return device_bytes(lift.leaves(self.asked.fun, self.args))

    @functools.cached_property
    def used_argument_bytes(self) -> int:
        """Bytes of the arguments that the step uses, on one device: a compiled program is not given the others. Traces
        the step.
        """
        if self.divided:
            return self.argument_bytes
        graph = step_graph(self.step(self.fun), self.args, self.target)
        used = {index for op in graph.ops for index in op.inputs} | set(graph.body.outputs)
        unused = (value for value in graph.values if value.kind == "argument" and value.index not in used)
        return self.argument_bytes - sum(value.bytes for value in unused)

    @functools.cached_property
    def argument_names(self) -> tuple[str, ...]:
        """The function's arguments, with types and shapes."""
        return tuple(arguments_of(self.graph))

    @functools.cached_property
    def divided(self) -> bool:
        """Whether several devices share the work: a trace says what all of them hold, and the chain what one does."""
        return self.model.mapped or is_sharded(self.args)

    @functools.cached_property
    def _shared_traces(self) -> SharedTraces:
        return SharedTraces(self.asked.fun, self.model.fingerprint, self.model.address)

    @functools.cached_property
    def plain(self) -> Traced:
        """The step without a plan, as traced.

        Raises:
          NotDifferentiableError: what it returns does not depend on the gradients.
        """
        return self.look(None)

    def look(self, made: Plan | None) -> Traced:
        """Returns the step under a plan, or without one, as traced. `_compile` goes on from that trace, unless regions
        are in scopes in it.
        """
        step, shards = self.step(self.fun) if made is None else self.planned(made), self.model.shards
        scoped = made is not None and not self.divided  # of several devices a trace does not say what one holds
        with self._shared_traces.another(scoped):
            graph, traced = self._graph_of(step)
        if not scoped:
            self._steps[made] = step, traced
        time = timer(shards.applied(graph), self.target, shards, self.asked.cycles)
        if made is None and loses_gradients(graph):
            raise _lost_gradients(len(graph.body.outputs))
        donated = donated_arguments(graph, traced)
        given, profile = graph_profile(graph, self.target.platform, donated)
        peak = given + max((size for _, size in profile), default=0)
        moments: dict[Moment, int] = {}
        if scoped:
            constants = max(given - self.argument_bytes, 0)
            found = traced_moments(profile, self.model.places)
            moments = {moment: size + constants for moment, size in found.items()}
        elsewhere = Time(shards.sent.elsewhere, shards.sent.elsewhere)
        renewed = renewed_bytes(graph, donated) if made is None and not self.divided else None
        return Traced(peak, graph.flops, total(map(time, graph.ops)) + elsewhere, moments, renewed)

    def cost_of(self, step: Callable[..., Any]) -> tuple[int, float]:
        """Returns (FLOPs, seconds) of any step with the same arguments, traced as those of plans are."""
        shards, (graph, _) = self.model.shards, self._graph_of(step)
        time = timer(shards.applied(graph), self.target, shards, self.asked.cycles)
        return graph.flops, total(map(time, graph.ops)).seconds + shards.sent.elsewhere

    def _graph_of(self, step: Callable[..., Any]) -> tuple[Graph, Any]:
        """Returns a step's graph, and what `_traced_step` returns."""
        traced = self._traced_step(step)
        with self._one_signature():
            return trace(step, *self.args) if traced is None else graph_of(traced.jaxpr, rules=True), traced

    def _traced_step(self, step: Callable[..., Any]) -> Any:
        """Returns a step as `jax.jit` traces it; None where that is another program than the one that was planned, as
        within a mapped function, where types say how arrays vary over its mesh.
        """
        try:
            traced = traced_for(step, self.args, self.target)
        except PlanMismatchError:
            return None
        return _with_program(traced)

    def _compile(self, made: Plan | None) -> MemoryReport:
        step, traced = self._steps.pop(made, (None, None))
        self._steps.clear()  # the others were only looked at
        if step is not None and traced is not None:
            return measure_traced(traced, step, self.args, self.target, generate_code=False, cache=self.asked.cache)
        with self._one_signature(), self._shared_traces.another():
            step = self.step(self.fun) if made is None else self.planned(made)
            return measure(step, *self.args, target=self.target, generate_code=False, cache=self.asked.cache)

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
        with self.lock:
            if self.known_unplanned is None:
                _ = self.plain  # the compilation goes on from its trace
                self.known_unplanned = self._compile(None)
            return self.known_unplanned

    def sent(self) -> Sent:
        """Returns what operations wait for other devices. Compiles the step, or, where that does not fit the target,
        the leanest plan of it; what fits in neither way waits for nothing.
        """
        compiled, planned = None, False
        with contextlib.suppress(DoesNotFitError):
            compiled = self.unplanned
        if compiled is None and (least := self.solver(Optimal.name).least(self.model.chain)) is not None:
            planned = True
            with contextlib.suppress(DoesNotFitError):
                compiled = self.measure_planned(self.model.plan(least))
        if compiled is None or not compiled.collectives:
            return NOTHING
        graph = self.model.shards.applied(step_graph(self.step(self.fun), self.args, self.target))
        return sent(compiled.collectives, graph, self.target, planned)

    def is_compiled(self, solution: Solution, by_hand: bool = False) -> bool:
        """Returns whether a solution was compiled; `by_hand`: as people write it."""
        with self.lock:
            return (solution, by_hand) in self.tries

    def compiled_peaks(self) -> list[int]:
        """Returns the compiled peaks of all plans, for whatever budgets; of those that the compiler refused none."""
        with self.lock:
            return [each.compiled for each in self.tries.values() if each.report is not None]

    def plan_of(self, solution: Solution, by_hand: bool = False) -> Plan:
        """Returns the plan of a solution; `by_hand`: as people write it."""
        return self.model.plan_by_hand(solution) if by_hand else self.model.plan(solution)

    def estimate(self, solution: Solution, by_hand: bool = False) -> int:
        """Returns the peak that the traced step is estimated to have under a solution; `by_hand`: as people write it.

        It knows nothing of what the compiler adds, so it is seldom far above the compiled peak.
        """
        if self.divided:
            return cost(self.model.chain, solution).peak + self.model.outside_bytes + self.argument_bytes
        return self.traced(solution, by_hand).peak_bytes

    def traced(self, solution: Solution, by_hand: bool = False) -> Traced:
        """Returns the step under a solution, as traced; `by_hand`: as people write it."""
        if (solution, by_hand) not in self._traced:
            self._traced[solution, by_hand] = self.look(self.plan_of(solution, by_hand))
        return self._traced[solution, by_hand]

    def effort(self, solution: Solution, by_hand: bool = False) -> float:
        """Returns what a solution adds to the traced step, with transfers that nothing hides, and what is known of it
        that no trace shows: what plans are chosen by.
        """
        time = self.traced(solution, by_hand).time
        return self.seconds(solution, by_hand) + (time.effort - time.seconds) - self.plain.time.effort

    def seconds(self, solution: Solution, by_hand: bool = False) -> float:
        """Returns the seconds of the traced step under a solution, with what `effort` counts beside the trace."""
        traced, chain = self.traced(solution, by_hand).time.seconds, self.model.chain
        return traced + host_use(chain, solution).exposed(traced) + unseen_seconds(chain, solution)

    def remembered(self, solver: Solver) -> Remembered:
        """Returns the plans that were returned for it, in whatever process, from what a solver found."""
        plain = self.plain
        facts = [
            self.target.name,
            self.model.fingerprint,
            repr((plain.peak_bytes, plain.flops, f"{plain.time.seconds:.6e}")),  # of the whole step
            repr((self.asked.host_budget, self.asked.costs, self.asked.respect_checkpoints, self.model.places)),
            repr((type(solver).__qualname__, solver.name, dict(solver.parameters()))),
        ]
        return Remembered(folder_of(self.asked.cache), self.model.chain, facts)

    @functools.cached_property
    def host(self) -> Callable[[Solver], Host]:
        """Returns the function that says how a solver solves the chain with its host; for equal solvers the same."""
        seconds = min(self.model.step_seconds, self.plain.time.seconds)
        return functools.cache(lambda solver: Host(self.model.chain, solver, seconds, self.asked.host_budget))

    def measure_planned(self, made: Plan) -> MemoryReport:
        """Returns what the step needs under a plan.

        Raises:
          DoesNotFitError: the target's compiler refuses it.
        """
        return self._compile(made)

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

    def shares(self, solver: str | Solver) -> bool:
        """Whether a plan that is asked of a solver may be another one: see `Solver.own_only`."""
        return not self.solver(solver).own_only
