"""A plan with its report: what a search predicted, compiled and traced of it."""

from __future__ import annotations

from dataclasses import replace

from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.memory.report import MemoryReport
from jaxckpt.memory.targets import compiler_options
from jaxckpt.planner.chain import Solution
from jaxckpt.planner.host import HostUse, host_use
from jaxckpt.planner.measured import Measured, Traced


def memory_of(problem: Measured, solution: Solution, peak: int) -> MemoryEstimate:
    """Returns what a predicted peak consists of under a solution."""
    kept, arguments = problem.model.kept_bytes(solution), problem.argument_bytes
    return MemoryEstimate(peak, arguments, kept, max(peak - arguments - kept, 0))


def empty(problem: Measured, budget: int, peak: int, report: MemoryReport | None) -> Plan:
    """Returns the plan of a step that fits without one, with its report.

    Args:
      problem: the function.
      budget: bytes.
      peak: as compiled, or as predicted.
      report: what the compiler said; None where it was not asked.
    """
    made = Plan((), problem.graph.fingerprint, notes=("fits as it is",))
    return traced(problem, budget, made, MemoryEstimate(peak, problem.argument_bytes, 0, 0), report, problem.plain)


def traced(
    problem: Measured,
    budget: int,
    made: Plan,
    predicted: MemoryEstimate,
    report: MemoryReport | None,
    step: Traced,
    host: HostUse | None = None,
) -> Plan:
    """Returns a plan with its report, where the step under the plan was traced.

    Args:
      problem: the function.
      budget: bytes.
      made: the plan.
      predicted: before it was compiled.
      report: what the compiler said; None where it was not asked, or refused the plan.
      step: the step under the plan.
      host: what it takes of the host; None for nothing.
    """
    host, computed = host or HostUse(), step.time.seconds
    seconds = computed + host.exposed(computed)
    found = replace(
        _report(problem, budget, made, predicted, report, host),
        costs=problem.asked.traced_costs,
        flops=step.flops,
        seconds=seconds,
        host_share=(host.link + host.waits) / seconds if seconds else 0.0,
        unplanned_flops=problem.plain.flops,
        unplanned_seconds=problem.plain.time.seconds,
        donatable_bytes=problem.plain.renewed_bytes,
    )
    return replace(found, overhead=found.slowdown).plan


def modelled(problem: Measured, budget: int, solution: Solution, predicted: MemoryEstimate) -> Plan:
    """Returns the plan of a solution with its report, where the chain alone says what the plan costs."""
    host, step, added = (
        host_use(problem.model.chain, solution),
        problem.model.step_seconds,
        problem.model.seconds(solution),
    )
    computed = step + added
    found = replace(
        _report(problem, budget, problem.model.plan(solution), predicted, None, host),
        host_share=(host.link + host.waits) / computed if computed else 0.0,
    )
    added += max(host.link - computed, 0.0)
    return replace(found, overhead=added / step if step else 0.0).plan


def _report(
    problem: Measured, budget: int, made: Plan, predicted: MemoryEstimate, report: MemoryReport | None, host: HostUse
) -> PlanReport:
    unplanned = problem.known_unplanned
    return PlanReport(
        replace(made, respect_checkpoints=problem.asked.respect_checkpoints, arguments=problem.argument_names),
        budget=budget,
        target=problem.target.name,
        predicted=predicted,
        measured=report,
        unplanned=unplanned,
        measured_bytes=None if report is None else report.peak_bytes,
        unplanned_bytes=None if unplanned is None else unplanned.peak_bytes,
        host_bytes=host.bytes,
        measured_host_bytes=None if report is None else report.host_bytes,
        host_seconds=host.link + host.waits,
        host_waits=host.waits,
        costs=problem.asked.costs,
        compiler_options=tuple(compiler_options(problem.target).items()),
    )
