"""What compiled plans say of those that are not compiled yet.

A plan's peak has four figures, in bytes:

- modelled: what the chain says, without what is outside of the chain, such as arguments;
- estimated: what a trace of the whole step says;
- predicted: one of these two, and what it was off by for the compiled plan that is nearest;
- compiled: what the compiler says.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from jaxckpt.core.constants import HIT, KNOWN, MARGIN, MISSED, NESTED, OUTLYING, SPREAD, UNEQUAL
from jaxckpt.planner.chain import Drop, Solution, cost, items
from jaxckpt.planner.measured import Measured, Try
from jaxckpt.planner.preferences import leanest, on_device, single
from jaxckpt.planner.solvers import Solver


def standing_bytes(problem: Measured, solution: Solution) -> int:
    """Estimates the bytes that the chain does not count: arguments, the optimizer's work, results."""
    return max(problem.estimate(solution) - cost(problem.model.chain, solution).peak, problem.argument_bytes)


class Predictions:
    """Predicts the compiled peaks of solutions, in one search for one budget.

    Attributes:
      problem: the function, with all plans of it that were compiled.
      budget: bytes.
      tries: the solver's plans of this search, in the order in which they were compiled.
      asked: the solutions that this search had compiled, or found compiled: (solution, whether as people write it).
      quick: whether a trace and a compilation take little time.

    Args:
      alone: whether predictions are corrected by the plans of this search alone, as if nothing had been compiled before
        it.
    """

    def __init__(self, problem: Measured, budget: int, solver: Solver, alone: bool = False) -> None:
        self.problem, self.budget, self._solver, self._alone = problem, budget, solver, alone
        self.chain, self.quick = problem.model.chain, problem.model.quick
        self.tries: list[Try] = []
        self.asked: set[tuple[Solution, bool]] = set()

    @functools.cached_property
    def standing(self) -> int:
        """Bytes that the chain does not count, by the leanest solution that is traced."""
        least = self.least
        if least is None or not self.is_traced(least):
            least = single(self.chain, on_device(leanest))
        return standing_bytes(self.problem, least)

    @functools.cached_property
    def least(self) -> Solution | None:
        """The leanest solution that the solver knows of, by the chain. Of a large program it is the cheapest of those
        that the chain hardly tells from it, if a trace says no more of it, and unless the solver's own plan is asked
        for.
        """
        host = self.problem.host(self._solver)
        least = host.least()
        if least is None or self.quick or self.problem.divided or not self.problem.shares(self._solver):
            return least
        near = host.solve(int((1 + UNEQUAL) * cost(self.chain, least).peak))
        if near in (None, least) or not all(map(self.is_traced, (near, least))):
            return least
        return near if self.problem.estimate(near) <= (1 + UNEQUAL) * self.problem.estimate(least) else least

    def compiled(self) -> list[Try]:
        """Returns the solver's plans that were compiled, for whatever budgets, by their modelled bytes."""
        return sorted(self._compiled(by_hand=False), key=lambda t: t.modelled)

    def _compiled(self, by_hand: bool) -> list[Try]:
        with self.problem.lock:
            made = [(key, t) for key, t in self.problem.tries.items() if t.report is not None and t.by_hand is by_hand]
        return [t for key, t in made if not self._alone or key in self.asked]

    def nearest(self) -> tuple[Try | None, Try | None]:
        """Returns the plan of this search that fits and is modelled with the most bytes, and that which does not, with
        the fewest.
        """
        above = [t for t in self.tries if not t.fits(self.budget)]
        below = [t for t in self.tries if t.fits(self.budget)]
        return (
            max(below, key=lambda t: t.modelled, default=None),
            min(above, key=lambda t: t.modelled, default=None),
        )

    def is_traced(self, solution: Solution) -> bool:
        """Whether the step of a solution is to be traced: JAX traces what a region holds once for each region around
        it.
        """
        places = self.problem.model.places
        drops = (item for _, item in items(solution) if isinstance(item, Drop))
        return sum(places[item.stop] - places[item.start] for item in drops) <= NESTED

    def effort(self, solution: Solution) -> float:
        """Returns what a solution adds to the step: by a trace, or by the chain where its step is not traced."""
        return self.problem.effort(solution) if self.is_traced(solution) else cost(self.chain, solution).time

    def predicted(self, solution: Solution) -> int:
        """Predicts the compiled peak by the chain or by a trace of the step, whichever the compiled plans are more
        alike by.
        """
        modelled, compiled = cost(self.chain, solution).peak, self.compiled()
        is_traced = all(self.is_traced(each) for each in (solution, *(t.solution for t in compiled)))
        if not compiled:
            return self.problem.estimate(solution) if is_traced else modelled + self.standing
        said, known = modelled, [(t.modelled, t.compiled - t.modelled) for t in compiled]
        if is_traced:
            estimates = [self.problem.estimate(t.solution) for t in compiled]
            traced = [(each, t.compiled - each) for each, t in zip(estimates, compiled)]
            if _spread([off for _, off in known]) >= _spread([off for _, off in traced]):
                said, known = self.problem.estimate(solution), traced
        return said + min(known, key=lambda each: abs(each[0] - said))[1]

    def predicted_by_hand(self, solution: Solution) -> int:
        """Predicts the compiled peak of a solution as people write it. The chain does not know what is left to JAX."""
        problem, estimate = self.problem, self.problem.estimate(solution, by_hand=True)
        made = [(problem.estimate(t.solution, by_hand=True), t.compiled) for t in self._compiled(by_hand=True)]
        near = min(made, key=lambda each: abs(each[0] - estimate), default=None)
        return estimate if near is None else estimate + near[1] - near[0]

    def overstated(self, by_hand: bool) -> float | None:
        """Returns the most that an estimate was over the compiled peak, as a ratio: of plans as people write them, or
        of the solver's. None where none was compiled.
        """
        estimate = functools.partial(self.problem.estimate, by_hand=by_hand)
        return max((estimate(t.solution) / t.compiled for t in self._compiled(by_hand)), default=None)

    def most_estimated(self, compiled: int) -> float:
        """Returns the highest estimate of a step, with checkpoints as people write them, that may compile to no more
        than some bytes; infinite as long as `KNOWN` such plans are not compiled.
        """
        estimate = functools.partial(self.problem.estimate, by_hand=True)
        ratios = [estimate(t.solution) / t.compiled for t in self._compiled(by_hand=True)]
        return (1 + SPREAD) * max(ratios) * compiled if len(ratios) >= KNOWN else math.inf

    def added(self) -> int:
        """Returns the bytes that the compiler adds to an estimate, by the plan that is nearest to the budget."""
        near = self._nearest_of_all()
        if near is None or not self.is_traced(near.solution):
            return 0
        return near.compiled - self.problem.estimate(near.solution)

    def offset(self) -> int:
        """Returns the bytes to subtract from the budget before the chain is solved: compiled minus modelled bytes of
        the nearest plan that fits; of all plans at most, where none does. Before the first plan of this search, those
        of the plan for another budget that is nearest.
        """
        if not self.tries:
            return self._nearest_offset()
        low, _ = self.nearest()
        nearest = self.tries if low is None else [low]
        return max(t.compiled - t.modelled for t in nearest) + self.spare()

    def _nearest_offset(self) -> int:
        near = self._nearest_of_all()
        return self.standing if near is None else near.compiled - near.modelled

    def _nearest_of_all(self) -> Try | None:
        return min(self.compiled(), key=lambda t: abs(t.compiled - self.budget), default=None)

    def modelled_limit(self, estimate: float) -> float:
        """Returns the most modelled bytes of a solution whose step may be estimated to need no more than this: a trace
        takes longer than what the chain says.
        """
        return OUTLYING * estimate - self._nearest_offset()

    def modelled_limit_by_hand(self, estimate: float) -> float:
        """Returns the same of plans as people write them: at least what those that were compiled say."""
        chain, compiled = self.chain, self._compiled(by_hand=True)
        overstated = max((cost(chain, t.solution).peak / t.compiled for t in compiled), default=0.0)
        return max(self.modelled_limit(estimate), OUTLYING * overstated * self.budget)

    def spare(self) -> int:
        """Returns the bytes of the budget that the next plan leaves free, as the plans of this search say that
        predictions are worth.
        """
        if self.quick and not self.tries:  # a compilation costs little, and a plan may need all of the budget
            return 0
        misses = sum(not each.fits(self.budget) for each in self.tries)
        factor = MISSED ** (misses - 1) if misses and misses == len(self.tries) else HIT
        return int(MARGIN * self.budget * factor)


def _spread(errors: Sequence[int]) -> int:
    """Returns by how much errors differ, each from the next."""
    return sum(abs(second - first) for first, second in itertools.pairwise(errors))
