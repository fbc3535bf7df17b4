"""Which of the solver's solutions a search compiles next."""

from __future__ import annotations

import copy
from collections.abc import Collection

from jaxckpt.core.constants import AIMED, AIMS, BETWEEN, CLOSE, FAR_BELOW, OTHERS, QUICK_AIMS, STEEP, TINY, UNITS
from jaxckpt.planner.chain import Chain, Solution, cost
from jaxckpt.planner.corrections import Corrections
from jaxckpt.planner.host import Host
from jaxckpt.planner.measured import Try
from jaxckpt.planner.predictions import Predictions
from jaxckpt.planner.solvers import Solver


class _Bracket:
    """The search for the limit whose plan needs as many bytes as it may, and not more.

    Attributes:
      low: the last limit whose plan needs no more than it may; `high`: the last whose plan needs more. None before.
      step: by how many bytes the limit was moved the time before.
      over: how many bytes the plan before needs more than it may.
    """

    def __init__(self) -> None:
        self.low: int | None = None
        self.high: int | None = None
        self.step, self.over = 0, 0

    def next(self, limit: int, over: int) -> int:
        """Returns the limit to try next, after one whose plan needs `over` bytes more than it may.

        It goes down by these bytes, or up where the plan needs less. Where the step before brought the plan less than
        half way, it goes by at least twice that step. If that is not between `low` and `high`, it goes half way between
        the two.
        """
        self.low, self.high = (limit, self.high) if over <= 0 else (self.low, limit)
        self.step = max(abs(over), 2 * self.step if 2 * abs(over) > abs(self.over) else 0, 1)
        self.over = over
        limit -= self.step if over > 0 else -self.step
        if self.low is not None and self.high is not None and not self.low < limit < self.high:
            return (self.low + self.high) // 2
        return limit


class Aims:
    """Looks, with traces, for the cheapest solution that is predicted to fit.

    Args:
      predictions: of the search.
      solver: the caller's.
    """

    def __init__(self, predictions: Predictions, solver: Solver) -> None:
        self.predictions, self.problem, self.budget = predictions, predictions.problem, predictions.budget
        self._solver, self.host = solver, self.problem.host(solver)
        if predictions.chain is not self.problem.model.chain:
            self.host = self._host_of(predictions.chain)
        self._corrections = Corrections(predictions.chain)
        self._corrected: Host | None = None  # the host of the corrected chain
        self._others = self.host  # what solved the solution of `other`
        self._learned: set[Solution] = set()  # what the corrections are from

    def is_steep(self) -> bool:
        """Whether a plan that does not fit takes much less time than all that fit: then one between may be worth a
        compilation.
        """
        tries, chain = self.predictions.tries, self.predictions.chain
        above = [t.effort for t in tries if not t.fits(self.budget)]
        below = [t.effort for t in tries if t.fits(self.budget)]
        forward = sum(chain.segment(stage, stage + 1).forward_time for stage in range(chain.length))
        return bool(above and below) and min(below) - max(above) > STEEP * forward

    def next(self, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution to be compiled next, one that is not in `seen`; None where there is none. Between a plan
        that fits and one that does not, compiled peaks may come in steps, so several solutions are traced.
        """
        aimed = self._aimed(seen)
        low, high = self.predictions.nearest()
        if low is None or high is None:
            return aimed
        # The plan that did not fit, less what it needs too much; and plans between the two, if it is modelled so.
        limits = [high.modelled - (high.compiled - self.budget) - self.predictions.spare()]
        between = high.modelled > low.modelled
        if between:
            limits += [low.modelled + round(share * (high.modelled - low.modelled)) for share in BETWEEN]
        found = dict.fromkeys(s for s in (aimed, *map(self.host.solve, limits)) if s is not None and s not in seen)
        traced = [solution for solution in found if self.predictions.is_traced(solution)]
        over = {solution: self.predictions.predicted(solution) - self.budget for solution in traced}
        fitting = [solution for solution in traced if over[solution] <= 0]
        if fitting:
            return min(fitting, key=self.predictions.effort)
        if not between or not traced:
            return aimed
        far = low.compiled < self.budget * (1 - FAR_BELOW * CLOSE)
        return min(traced, key=lambda solution: over[solution]) if far or self.is_steep() else None

    def fullest(self) -> Solution | None:
        """Returns the solver's solution of the corrected chain that is predicted to fit; None where there is none, or
        where no trace corrects the chain.
        """
        return None if self.problem.divided else self._solve_corrected()

    def other(self, best: Try, saved: float, seen: Collection[Solution]) -> Solution | None:
        """Returns a solution that is predicted to fit, and takes less than the best plan by at least `saved`; None
        where none is found.

        What traces of a few solutions taught hides others, whose regions begin and end elsewhere. So here the chain is
        as it was, and another time each block is a region of its own: of those solutions that take less, the leanest
        ones are traced.
        """
        problem = self.problem
        blocks = problem.model.by_blocks()
        hosts = [self.host] if blocks is None else [self.host, self._host_of(blocks)]
        found: dict[Solution, Host] = {}
        for host in hosts:
            for solution in self._cheaper(host, best, saved):
                if solution not in seen and self.predictions.is_traced(solution):
                    found.setdefault(solution, host)
        fitting = [s for s in found if self._is_to_fit(s) and problem.effort(s) <= best.effort - saved]
        chosen = min(fitting, key=problem.effort, default=None)
        self._others = self.host if chosen is None else found[chosen]
        return chosen

    def _cheaper(self, host: Host, best: Try, saved: float) -> list[Solution]:
        """Returns a few solutions that take less than the best plan by at least `saved` by the chain, from the leanest
        one on.
        """
        chain = self.predictions.chain
        most = cost(chain, best.solution).time - saved

        def cheap(limit: int) -> Solution | None:
            solution = host.solve(limit)
            return solution if solution is not None and cost(chain, solution).time < most else None

        low, high = 0, best.modelled  # the leanest cheap solution needs a limit between the two
        while high - low > self.budget // UNITS:
            middle = (low + high) // 2
            low, high = (middle, high) if cheap(middle) is None else (low, middle)
        found = (cheap(high + place * self.budget // OTHERS) for place in range(AIMS))
        return [solution for solution in dict.fromkeys(found) if solution is not None]

    def more(self, best: Try, saved: float) -> Solution | None:
        """Returns a solution like one of `other`, the best plan, that needs as many bytes more as that leaves free, if
        it takes less by at least `saved`; else None. What the first plan with new regions is off by holds for the next.
        """
        solution = self._others.solve(best.modelled + self.budget - best.compiled - self.predictions.spare())
        if solution is None or not self.predictions.is_traced(solution):
            return None
        return solution if self.problem.effort(solution) <= best.effort - saved else None

    def leanest(self, least: Solution) -> list[Solution]:
        """Returns solutions that need less than the chain's leanest one, as traced: that one's trace corrects the
        chain, whose leanest solution is traced, and so on. They are the same for every budget, so that what an error
        says of one budget holds when it is asked for.
        """
        if self.problem.divided:
            return []
        corrections, unit = Corrections(self.predictions.chain), max(self.problem.plain.peak_bytes // UNITS, 1)
        found, solution = [least], least
        for _ in range(self._looks()):
            if not self._is_corrected_by(solution):
                break
            corrections.add(solution, self.problem.traced(solution).moments, unit)
            leaner = self._host_of(corrections.chain).least()
            if leaner is None or leaner in found:
                break
            solution = leaner
            found.append(solution)
        most = (1 - TINY) * self.problem.estimate(least)
        return [each for each in found if self.predictions.is_traced(each) and self.problem.estimate(each) < most]

    def _aimed(self, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution that takes least of those that are predicted to fit, or the last one where none is.

        Each is traced, and corrects the chain for the next one, until that is the same.
        """
        predictions = self.predictions
        if self.problem.divided:
            return self._bracketed(seen)
        found, cheapest, looked = None, None, set()
        compiled = sorted(predictions.compiled(), key=lambda t: -abs(t.compiled - self.budget))
        for made in compiled:  # the nearest counts most
            self._correct(made.solution)
        for _ in range(self._looks()):
            solution = self._solve_corrected()
            if solution is None or solution in looked or not self._is_corrected_by(solution):
                break
            looked.add(solution)
            self._correct(solution)
            if solution in seen:
                continue
            found = solution
            if self._is_to_fit(solution):
                cheapest = solution if cheapest is None else min(cheapest, solution, key=predictions.effort)
        return cheapest or found or self._bracketed(seen)

    def _is_to_fit(self, solution: Solution) -> bool:
        """Whether a solution is predicted to fit, with what is to be spared."""
        return self.predictions.predicted(solution) <= self.budget - self.predictions.spare()

    def _looks(self) -> int:
        return QUICK_AIMS if self.predictions.quick else AIMS

    def _is_corrected_by(self, solution: Solution) -> bool:
        """Whether a trace of a solution says when it needs what; not where the step has the function in a loop."""
        return self.predictions.is_traced(solution) and bool(self.problem.traced(solution).moments)

    def _correct(self, solution: Solution) -> None:
        if solution not in self._learned and self.predictions.is_traced(solution):
            self._learned.add(solution)
            self._corrections.add(solution, self.problem.traced(solution).moments, max(self.budget // UNITS, 1))

    def _solve_corrected(self) -> Solution | None:
        others = self.problem.argument_bytes + self.predictions.added()
        if self._corrected is None or self._corrected.chain is not self._corrections.chain:
            self._corrected = self._host_of(self._corrections.chain)
        return self._corrected.solve(self.budget - self.predictions.spare() - others)

    def _host_of(self, chain: Chain) -> Host:
        solver = copy.copy(self._solver)  # it may keep what it solved
        return Host(chain, solver, self.host.step_seconds, self.host.budget)

    def _bracketed(self, seen: Collection[Solution]) -> Solution | None:
        """Returns what `_aimed` does, by the chain as it is.

        The solver's limit counts the chain's bytes, and the budget counts compiled bytes. So the limit is searched at
        which the solver's plan is predicted to need all that it may. The first limit is the budget less the offset
        between the two, and what is predicted of each plan moves the limit (`_Bracket`).
        """
        predictions, quick = self.predictions, self.predictions.quick
        found, cheapest = None, None
        limit, aim = self.budget - predictions.offset(), self.budget - predictions.spare()
        bracket = _Bracket()
        for _ in range(self._looks()):
            solution = self.host.solve(limit)
            if solution is None or (solution in seen and not quick):
                break
            over = predictions.predicted(solution) - aim
            if solution not in seen:
                found = solution
                if over <= 0 and (cheapest is None or predictions.effort(solution) < predictions.effort(cheapest)):
                    cheapest = solution
            if -AIMED * CLOSE * self.budget <= over <= 0 and not quick:
                break
            limit = bracket.next(limit, over)
        return cheapest or found
