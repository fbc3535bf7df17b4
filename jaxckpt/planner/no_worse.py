"""Plans that are no worse than others that fit, in FLOPs and in seconds alike.

A search minimises one sum of both (`costs.Time.effort`). So its plan may compute a little more than a checkpoint by
hand of the same memory, in less time; or take a little longer, with fewer FLOPs. Mostly there is a plan that does
neither, and its sum is hardly larger. A solver finds it where FLOPs weigh more, or less.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxckpt.core.constants import AROUND, CLOSE, EVEN, HEAVIER, LIGHTER, RIVALS, TINIEST, TINY
from jaxckpt.planner import hand_written
from jaxckpt.planner.aims import Aims
from jaxckpt.planner.chain import Chain, Segment, Solution, cost
from jaxckpt.planner.measured import Measured, Try
from jaxckpt.planner.model import Model
from jaxckpt.planner.predictions import Predictions
from jaxckpt.planner.solvers import Solver


@dataclass(frozen=True)
class Rival:
    """A plan that fits the budget, or may.

    Attributes:
      solution, by_hand: what it is.
      flops, seconds: of its step.
    """

    solution: Solution
    by_hand: bool
    flops: float
    seconds: float


class NoWorse:
    """Looks for a plan that computes no more, and takes no longer, than any rival.

    Args:
      predictions: of the search.
      solver: the caller's.
      best: the plan of the least sum.
      compiled: compiles a solution, written by hand or not.
    """

    def __init__(
        self, predictions: Predictions, solver: Solver, best: Try, compiled: Callable[[Solution, bool], Try]
    ) -> None:
        self.predictions, self.problem, self.solver = predictions, predictions.problem, solver
        self.best, self.compiled = best, compiled
        self.plan = self._rival(best.solution, best.by_hand)
        share = TINIEST if predictions.quick else TINY
        plain = self.problem.plain
        self._more = share * plain.flops, share * plain.time.seconds  # that do not count

    def find(self, less: Sequence[tuple[Solution, bool]]) -> Try | None:
        """Returns such a plan, if the best one is none.

        Args:
          less: plans that were returned for less memory.
        """
        known = [*self._by_hand(), *(self._rival(*each) for each in less)]
        if not (rivals := self._verified(known)):
            return None
        computes_more = any(self._computes_more(self.plan, each) for each in rivals)
        for solution in self._solved(HEAVIER if computes_more else LIGHTER, rivals)[:RIVALS]:
            if (made := self.compiled(solution, False)).fits(self.predictions.budget):
                return made
        taken = (self.compiled(each.solution, each.by_hand) for each in rivals if self._is_no_worse(each, rivals))
        return min((t for t in taken if t.fits(self.predictions.budget)), key=lambda t: t.effort, default=None)

    def _rival(self, solution: Solution, by_hand: bool) -> Rival:
        problem = self.problem
        return Rival(solution, by_hand, problem.traced(solution, by_hand).flops, problem.seconds(solution, by_hand))

    def _computes_more(self, one: Rival, other: Rival) -> bool:
        return one.flops > other.flops + self._more[0]

    def _takes_longer(self, one: Rival, other: Rival) -> bool:
        return one.seconds > other.seconds + self._more[1]

    def _is_worse(self, one: Rival, other: Rival) -> bool:
        return self._computes_more(one, other) or self._takes_longer(one, other)

    def _is_no_worse(self, one: Rival, rivals: Sequence[Rival]) -> bool:
        """Whether a plan is no worse than any rival, and by the sum hardly worse than the best plan."""
        effort = self.problem.effort(one.solution, one.by_hand)
        even = effort <= self.best.effort + EVEN * self.problem.plain.time.effort
        return even and not any(self._is_worse(one, each) for each in rivals)

    def _by_hand(self) -> Iterator[Rival]:
        """Yields the checkpoints as people write them that may fit, and may take less by the chain in FLOPs or in
        seconds.
        """
        problem, model = self.problem, self.problem.model
        most = [(1 + EVEN) * each for each in chain_costs(model, self.best.solution)]
        for solution in problem.by_hand:
            takes_less = any(less <= limit for less, limit in zip(chain_costs(model, solution), most))
            if takes_less and self._may_fit(solution):
                yield self._rival(solution, True)

    def _may_fit(self, solution: Solution) -> bool:
        """Whether a solution, written by hand, fits, or is predicted to."""
        predictions, budget = self.predictions, self.predictions.budget
        with self.problem.lock:
            made = self.problem.tries.get((solution, True))
        if made is not None:
            return made.fits(budget)
        if not hand_written.is_worth_a_trace(predictions, solution):
            return False
        if predictions.overstated(by_hand=True) is None:
            return hand_written.may_fit(predictions, solution)
        return predictions.predicted_by_hand(solution) <= (1 + CLOSE) * budget

    def _verified(self, known: Sequence[Rival]) -> list[Rival]:
        """Returns the rivals, without those that need more than the budget; none if the best plan is no worse than any
        of the others. Of those that take less, by each measure, the `RIVALS` that take least are compiled, up to the
        first that fits; the others drop out if none does.
        """
        rivals, better = list(known), False
        for is_worse, by in ((self._computes_more, "flops"), (self._takes_longer, "seconds")):
            less = sorted((each for each in rivals if is_worse(self.plan, each)), key=operator.attrgetter(by))
            fits = (self.compiled(r.solution, r.by_hand).fits(self.predictions.budget) for r in less[:RIVALS])
            first = next((place for place, each in enumerate(fits) if each), len(less))
            rivals = [each for each in rivals if each not in less[:first]]
            better = better or first < len(less)
        return rivals if better else []

    def _solved(self, factors: Sequence[float], rivals: Sequence[Rival]) -> list[Solution]:
        """Returns the solver's solutions with FLOPs of another weight that are no worse than any rival and predicted to
        fit, or nearly, the cheapest first. Of each weight a few are traced: what a search would aim at, and those of
        the chain within more and less than the best plan needs by it.
        """
        predictions, budget = self.predictions, self.predictions.budget
        with self.problem.lock:
            tries = [t for t in self.problem.tries.values() if not t.by_hand]
        missed = {t.solution for t in tries if not t.fits(budget)}
        found: dict[Solution, None] = {}
        near = cost(self.problem.model.chain, self.best.solution).peak
        for factor in factors:
            aims = Aims(Reweighed(self.problem, budget, self.solver, factor), self.solver)
            for solution in (aims.next(missed), *(aims.host.solve(round(share * near)) for share in AROUND)):
                if solution is not None and solution not in missed and predictions.is_traced(solution):
                    found[solution] = None
        fitting = [s for s in found if self._is_no_worse(self._rival(s, False), rivals)]
        fitting = [s for s in fitting if predictions.predicted(s) <= (1 + CLOSE) * budget]
        return sorted(fitting, key=self.problem.effort)


class Reweighed(Predictions):
    """Predictions where FLOPs weigh `factor` times as much as in `costs.Time.effort`."""

    def __init__(self, problem: Measured, budget: int, solver: Solver, factor: float) -> None:
        super().__init__(problem, budget, solver)
        self.chain, self._factor = reweighed(problem.model, factor), factor

    def effort(self, solution: Solution) -> float:
        """Returns what a solution adds to the step, so weighed."""
        if not self.is_traced(solution):
            return cost(self.chain, solution).time
        time = self.problem.traced(solution).time
        return self.problem.effort(solution) + (self._factor - 1) * (time.effort - time.seconds)


def reweighed(model: Model, factor: float) -> Chain:
    """Returns a model's chain with times in which FLOPs weigh `factor` times as much."""

    def time(effort: float, seconds: float) -> float:
        return seconds + factor * max(effort - seconds, 0.0)

    def anew(start: int, stop: int, segment: Segment) -> Segment:
        forward = time(segment.forward_time, sum(model.forward[start:stop]))
        ways = tuple(replace(each, time=time(each.time, each.seconds)) for each in segment.candidates)
        return replace(segment, forward_time=forward, candidates=ways)

    segments = {place: anew(*place, segment) for place, segment in model.chain.segments.items()}
    return replace(model.chain, segments=segments)


def chain_costs(model: Model, solution: Solution) -> tuple[float, float]:
    """Returns what a solution computes again, in weighed seconds, and the seconds that this takes, by the chain."""
    seconds = model.seconds(solution)
    return cost(model.chain, solution).time - seconds, seconds
