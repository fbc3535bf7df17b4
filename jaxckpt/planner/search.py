"""The search for a plan within a budget, held against the compiler.

Solve, emit, trace the whole step, correct the chain, solve again; then compile, compare. The chain's bytes are a
prediction. A trace corrects it stretch by stretch, and the compiled peak of one plan for the next plan. The returned
plan is the cheapest whose compiled peak is within the budget, after at most `COMPILES` compilations of the solver's
plans, `QUICK_COMPILES` of a small program, or where a plan that does not fit is much cheaper than all that fit. What
people write is compiled as well where it may be cheaper, and the leanest plans where none of these fits.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jaxckpt._errors import (
    DoesNotFitError,
    InfeasibleBudgetError,
)
from jaxckpt.core import purity
from jaxckpt.core.constants import (
    ABOVE,
    AIMED,
    AIMS,
    BETWEEN,
    CLOSE,
    COMPILES,
    FAR_BELOW,
    FILLED,
    FLOORS,
    HIT,
    LEANER,
    MARGIN,
    MISSED,
    MORE,
    NESTED,
    OUTLYING,
    OVERTIMED,
    QUICK_AIMS,
    QUICK_COMPILES,
    ROOM,
    STEEP,
    TINY,
    UNITS,
    WORTH,
)
from jaxckpt.core.plan import MemoryEstimate, Plan, PlanReport
from jaxckpt.core.shown import Progress
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.report import MemoryReport
from jaxckpt.memory.targets import compiler_options
from jaxckpt.planner import refusal
from jaxckpt.planner.chain import Chain, Drop, Solution, cost, items
from jaxckpt.planner.corrections import Corrections
from jaxckpt.planner.host import Host, HostUse, host_use
from jaxckpt.planner.measured import Measured, Traced, Try
from jaxckpt.planner.preferences import leanest, on_device, single
from jaxckpt.planner.solvers import Solver

logger = logging.getLogger("jaxckpt")

EVERYTHING = 2**62
"""Bytes of a budget within which everything can be kept."""


def _spread(errors: Sequence[int]) -> int:
    """Returns by how much errors differ, each from the next."""
    return sum(abs(second - first) for first, second in itertools.pairwise(errors))


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


class Search:
    """One search for one budget.

    Args:
      thorough: whether a plan is looked for that is leaner than all that were compiled, however far these are above the
        budget. Not where others are to be tried yet, of the function with other tiles.
    """

    def __init__(
        self,
        problem: Measured,
        budget: int,
        solver: Solver,
        verify: bool,
        progress: Progress,
        *,
        thorough: bool = True,
    ) -> None:
        self.problem, self.budget, self.solver, self.verify, self.progress = problem, budget, solver, verify, progress
        self.shares, self.thorough = problem.shares(solver), thorough
        self.chain = problem.model.chain
        self.host = problem.host(solver)
        self.corrections, self.aiming = Corrections(self.chain), copy.copy(solver)  # a solver may keep what it solved
        self._corrected: Host | None = None  # the host of the corrected chain
        self.learned: set[Solution] = set()  # what the corrections are from
        self.tries: list[Try] = []
        self.compiles = 0
        self.effort = 0.0  # of the plan that was found
        self.quick = problem.model.quick
        self.most = QUICK_COMPILES if self.quick else COMPILES
        self._most_overstated = PLATFORMS[problem.target.platform].overstated

    def run(self) -> Plan:
        """Returns the cheapest plan that was found.

        Raises:
          InfeasibleBudgetError: none fits.
        """
        if (found := self._as_it_is() if self.verify else self._predicted_as_it_is()) is not None:
            return found
        purity.refuse_effects(self.problem.asked.fun, self.problem.graph)
        least = self.host.least()
        traced = least if least is not None and self._is_traced(least) else single(self.chain, on_device(leanest))
        standing = self.standing(traced)
        if not self.verify:
            solution = self._solve(self.budget - standing) or least
            if solution is None:
                raise self._infeasible(self._peak_as_it_is())
            return self._unverified(solution, standing)
        best = self._search(least, standing)
        if best is None:
            best = self._floor(least, standing)
        if best is not None and self.shares:
            best = self._or_with_last_blocks_left(best, standing)
        self.progress(self.most, self.most, "")
        if best is None:
            raise self._infeasible()
        self.effort = best.effort
        return best.plan

    def known(self) -> Try | None:
        """Returns the cheapest plan that was compiled for another budget and fits this one."""
        least = self.host.least()
        return None if least is None else self._known(self.standing(least))

    def _search(self, least: Solution | None, standing: int) -> Try | None:
        """Returns the cheapest compiled plan that fits, or None: the solver's solutions, each corrected by what the
        compiler said of those before it, and what people do by hand where that is cheaper.
        """
        best = self._known(standing) if self.shares else None
        seen: set[Solution] = set()
        closed = False  # whether a plan was near the budget, and another one is compiled all the same
        while self.compiles < self.most or (self.compiles < QUICK_COMPILES and self._is_steep()):
            last = self.compiles == self.most - 1 and best is None
            solution = None if last else self._next(standing, seen)
            if solution is None and best is not None and not best.by_hand and not self.tries:
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
            if best is tried and tried.compiled >= self.budget * (1 - FILLED) and not self._is_steep():
                if not self._is_worth_another(tried):
                    break
                closed = not self.quick
        if best is None or not self.shares:
            return best
        best = self._or_estimated(best, standing, seen)
        best = self._or_by_hand(best, standing, self.problem.by_hand)
        best = self._or_by_hand(best, standing, self._first_blocks(standing))
        # What misses the budget may fit it where no region waits for the gradients of the one before.
        missed = {t.solution for t in self.tries if self.quick and not t.fits(self.budget)}
        return self._or_by_hand(best, standing, missed) if missed else best

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
        fullest = None if self.problem.divided else self._solve_corrected()
        fullest = fullest or self._solve(self.budget - close.compiled + close.modelled)
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
        far = low.compiled < self.budget * (1 - FAR_BELOW * CLOSE)
        return min(between, key=lambda solution: over[solution]) if far or self._is_steep() else None

    def _aimed(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns the solution that takes least of those that are predicted to fit, or the last one where none is.

        Each is traced, and corrects the chain for the next one, until that is the same.
        """
        if self.problem.divided:
            return self._bracketed(standing, seen)
        found, cheapest, looked = None, None, set()
        for made in sorted(self._compiled(), key=lambda t: -abs(t.compiled - self.budget)):  # the nearest counts most
            self._correct(made.solution)
        for _ in range(QUICK_AIMS if self.quick else AIMS):
            solution = self._solve_corrected()
            if solution is None or solution in looked or not self._is_traced(solution):
                break
            if not self.problem.traced(solution).moments:  # the step has the function in a loop of its own
                break
            looked.add(solution)
            self._correct(solution)
            if solution in seen:
                continue
            found = solution
            if self._predicted(solution, standing) <= self.budget - self._spare():
                cheapest = solution if cheapest is None else min(cheapest, solution, key=self._effort)
        return cheapest or found or self._bracketed(standing, seen)

    def _correct(self, solution: Solution) -> None:
        if solution not in self.learned and self._is_traced(solution):
            self.learned.add(solution)
            self.corrections.add(solution, self.problem.traced(solution).moments, max(self.budget // UNITS, 1))

    def _solve_corrected(self) -> Solution | None:
        """Returns the solver's solution of the corrected chain that is predicted to fit, or None."""
        others = self.problem.argument_bytes + self._added()
        return self._solve(self.budget - self._spare() - others, self.corrections.chain)

    def _added(self) -> int:
        """Returns the bytes that the compiler adds to what the trace says: those of the plan that is nearest."""
        near = min(self._compiled(), key=lambda t: abs(t.compiled - self.budget), default=None)
        if near is None or not self._is_traced(near.solution):
            return 0
        return near.compiled - self.problem.estimate(near.solution)

    def _bracketed(self, standing: int, seen: Collection[Solution]) -> Solution | None:
        """Returns what `_aimed` does, by the chain as it is.

        The solver's limit counts the chain's bytes, and the budget counts compiled bytes. So the limit is searched at
        which the solver's plan is predicted to need all that it may. The first limit is the budget less the offset
        between the two, and what is predicted of each plan moves the limit (`_Bracket`).
        """
        found, cheapest = None, None
        limit, aim = self.budget - self._offset(standing), self.budget - self._spare()
        bracket = _Bracket()
        for _ in range(QUICK_AIMS if self.quick else AIMS):
            solution = self._solve(limit)
            if solution is None or (solution in seen and not self.quick):
                break
            over = self._predicted(solution, standing) - aim
            if solution not in seen:
                found = solution
                if over <= 0 and (cheapest is None or self._effort(solution) < self._effort(cheapest)):
                    cheapest = solution
            if -AIMED * CLOSE * self.budget <= over <= 0 and not self.quick:
                break
            limit = bracket.next(limit, over)
        return cheapest or found

    def _spare(self) -> int:
        """Returns the bytes of the budget that the next plan leaves free, as what was compiled so far says that
        predictions are worth.
        """
        if self.quick and not self.tries:  # a compilation costs little, and a plan may need all of the budget
            return 0
        misses = sum(not each.fits(self.budget) for each in self.tries)
        factor = MISSED ** (misses - 1) if misses and misses == len(self.tries) else HIT
        return int(MARGIN * self.budget * factor)

    def _predicted(self, solution: Solution, standing: int) -> int:
        """Predicts the compiled peak: by the chain or by a trace of the step, whichever the compiled plans are more
        alike by, and by how far that was off in the nearest of these.
        """
        modelled, compiled = cost(self.chain, solution).peak, self._compiled()
        is_traced = all(self._is_traced(each) for each in (solution, *(t.solution for t in compiled)))
        if not compiled:
            return self.problem.estimate(solution) if is_traced else modelled + standing
        nearest = min(range(len(compiled)), key=lambda place: abs(compiled[place].modelled - modelled))
        chain = [t.compiled - t.modelled for t in compiled]
        traced = [t.compiled - self.problem.estimate(t.solution) for t in compiled] if is_traced else []
        if not is_traced or _spread(chain) < _spread(traced):
            return modelled + chain[nearest]
        return self.problem.estimate(solution) + traced[nearest]

    def _predicted_by_hand(self, solution: Solution) -> int:
        """Predicts the compiled peak of a solution as people write it: by a trace of the step, and by how far that was
        off in the one of these that is nearest. The chain does not know what is left to JAX.
        """
        problem, estimate = self.problem, self.problem.estimate(solution, by_hand=True)
        with problem.lock:
            tries = [t for t in problem.tries.values() if t.by_hand and t.report is not None]
        made = [(problem.estimate(t.solution, by_hand=True), t.compiled) for t in tries]
        near = min(made, key=lambda each: abs(each[0] - estimate), default=None)
        return estimate if near is None else estimate + near[1] - near[0]

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
        limit = int(self._modelled_limit(self.budget, standing))
        limits = dict.fromkeys(min(round(best.modelled * factor), limit) for factor in MORE)
        more = map(self._solve, limits)
        left = {solution: cost(self.chain, solution).time for solution in more if solution is not None}
        for solution in sorted(left, key=lambda each: left[each]):
            if self.compiles >= self.most or left[solution] >= self._chain_time(best):
                break
            if solution not in seen and problem.estimate(solution) * max(ratio, 1.0) <= self.budget:
                best = self._better(best, self._try(solution, standing)) or best
        return best

    def _modelled_limit(self, estimate: float, standing: int) -> float:
        """Returns the most bytes by the chain of a solution whose step may be estimated to need no more than this: a
        trace takes longer than what the chain says.
        """
        return OUTLYING * estimate - self._nearest_offset(standing)

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

    def _or_by_hand(self, best: Try, standing: int, solutions: Collection[Solution]) -> Try:
        """Returns the best plan, or one of other solutions, written as people write checkpoints, that fits and
        recomputes less.

        They are compiled one by one. Each may become the best plan, and then those that do not recompute less drop out.
        Each also says what estimates are worth.
        """
        tried = 0
        least = FLOORS if self.quick else 1  # tried at least, if there are so many
        times = {solution: cost(self.chain, solution).time for solution in solutions}
        while tried < least or self.compiles < self.most:
            chosen = self._likely_to_fit(self._cheaper_by_hand(times, best, standing))
            if chosen is None:
                break
            best = self._better(best, self._try(chosen, standing, by_hand=True)) or best
            tried += 1
        return best

    def _first_blocks(self, standing: int) -> Sequence[Solution]:
        """Returns checkpoints around the first blocks alone, each of which keeps nothing: the fewest blocks that the
        chain says may fit, and one more. None of a program whose traces take long.
        """
        if not self.quick or not self.problem.by_hand:
            return ()
        limit = self._modelled_limit(self.budget, standing)
        left = self.problem.model.with_last_blocks_left(self.problem.by_hand[0])
        return [solution for solution in left if cost(self.chain, solution).peak <= limit][-2:]

    def _or_with_last_blocks_left(self, best: Try, standing: int) -> Try:
        """Returns the best plan or, where it is as people write it, the same with as many of its last blocks left to
        JAX as fit: each more keeps more, by the trace too. Compiles at least one, if one is estimated to fit.
        """
        if not best.by_hand:
            return best
        problem, start = self.problem, self.compiles
        limit = self.budget * problem.estimate(best.solution, by_hand=True) // best.compiled
        left = problem.model.with_last_blocks_left(best.solution)
        fitting = bisect.bisect_right(left, limit, key=functools.partial(problem.estimate, by_hand=True))
        for solution in reversed(left[:fitting]):
            if self.compiles > start and self.compiles >= self.most:
                break
            if problem.effort(solution, by_hand=True) >= best.effort - TINY * problem.plain.time.effort:
                break
            if (made := self._try(solution, standing, by_hand=True)).fits(self.budget):
                return made
        return best

    def _cheaper_by_hand(self, times: Mapping[Solution, float], best: Try, standing: int) -> list[Solution]:
        """Returns the solutions that, written by hand, take less than the best plan and are not compiled yet, the
        cheapest first. Those that are far above it by the chain's `times`, or far above the budget by its bytes, are
        not traced.
        """
        problem = self.problem
        limit = self._modelled_limit(self._most_overstated * self.budget, standing)
        slowest, dearest = OVERTIMED * self._chain_time(best), best.effort - TINY * problem.plain.time.effort
        near = [s for s in times if times[s] < slowest and cost(self.chain, s).peak <= limit]
        near = [s for s in near if not problem.is_compiled(s, by_hand=True)]
        efforts = {solution: problem.effort(solution, by_hand=True) for solution in near}
        return sorted((s for s in near if efforts[s] < dearest), key=lambda solution: efforts[solution])

    def _likely_to_fit(self, solutions: Sequence[Solution]) -> Solution | None:
        """Returns the solution, written by hand, to be compiled next; None where none is likely to fit.

        Estimates may be above the compiled peak. The compiled plans say how many times, and the first solution is taken
        that fits if its estimate is too high by as much. If there is none, and the compiled plans do not say enough,
        the leanest one is taken, provided that it fits if its estimate is too high by as much as any on this platform.
        """
        learned = self._overstated()
        known = learned or self._overstated(by_hand=False) or 1.0
        estimate = functools.partial(self.problem.estimate, by_hand=True)  # a trace of the step
        slack = CLOSE if self.quick else TINY  # equal estimates may be 64 bytes apart
        chosen = next((s for s in solutions if estimate(s) <= (1 + slack) * max(known, 1.0) * self.budget), None)
        if chosen is None and (learned is None or self.quick):  # what one is worth another may not be
            near = [solution for solution in solutions if estimate(solution) <= self._most_overstated * self.budget]
            chosen = min(near, key=estimate, default=None)
        return chosen

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
        if self.shares:
            by_hand = sorted(problem.by_hand, key=lambda solution: cost(self.chain, solution).peak)
            lean += [(solution, True) for solution in by_hand[:FLOORS]]
        if self.shares and least is not None:
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
        return self._leaner(least, standing) if self.shares and self.quick else None

    def _leaner(self, least: Solution | None, standing: int) -> Try | None:
        """Asks for plans within less than the leanest one needs, as the caller may after an error that names it, until
        none is leaner. Returns one that fits, or None.
        """
        peaks = self.problem.compiled_peaks()
        if not peaks or not (self.thorough or min(peaks) <= ABOVE[-1] * self.budget):
            return None
        for _ in range(FLOORS):
            before = leanest = min(self.problem.compiled_peaks())
            for share in (None, *LEANER):  # at first for the leanest itself, as the caller will
                budget = leanest if share is None else int(leanest * share) - 1
                Search(self.problem, budget, self.solver, self.verify, self.progress)._search(least, standing)
                if (found := self._known(standing)) is not None:
                    return found
                leanest = min(self.problem.compiled_peaks())
            if leanest == before:
                return None
        return None

    def _solve(self, limit: int, corrected: Chain | None = None) -> Solution | None:
        """Returns the solver's solution within a limit, or None: of the chain, or of the corrected one."""
        if corrected is None:
            return self.host.solve(limit)
        if self._corrected is None or self._corrected.chain is not corrected:
            self._corrected = Host(corrected, self.aiming, self.host.step_seconds, self.host.budget)
        return self._corrected.solve(limit)

    def _as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step fits without one. Compiles it only where that can be."""
        problem = self.problem
        if problem.known_unplanned is None and not self._may_fit():
            return None
        return self._compiled_as_it_is()

    def _compiled_as_it_is(self) -> Plan | None:
        problem = self.problem
        self.progress(0, self.most, f"compiling the step as it is for {self.problem.target.name}")
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
        self.progress(self.most, self.most, "")
        return self._record(empty, estimate, report, problem.plain)

    def _may_fit(self) -> bool:
        return self._peak_as_it_is() - self.problem.merged_bytes <= ROOM * self.budget

    def _peak_as_it_is(self) -> int:
        """Estimates the peak of the step without a plan."""
        problem = self.problem
        if not problem.divided:
            return problem.plain.peak_bytes
        cheapest = self.host.without(EVERYTHING)
        kept = 0 if cheapest is None else cost(self.chain, cheapest).peak
        return problem.argument_bytes + problem.model.outside_bytes + kept

    def _predicted_as_it_is(self) -> Plan | None:
        """Returns the empty plan if the step is predicted to fit without one."""
        peak = self._peak_as_it_is()
        if peak > self.budget:
            return None
        empty = Plan((), self.problem.graph.fingerprint, notes=("fits as it is",))
        return self._record(empty, MemoryEstimate(peak, self.problem.argument_bytes, 0, 0), None, self.problem.plain)

    def standing(self, solution: Solution) -> int:
        """Estimates the bytes that the chain does not count: arguments, the optimizer's work, results."""
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
            return self._nearest_offset(standing)
        low, _ = self._nearest()
        nearest = self.tries if low is None else [low]
        return max(t.compiled - t.modelled for t in nearest) + self._spare()

    def _nearest_offset(self, standing: int) -> int:
        """Returns the same of the nearest of all plans that were compiled, for whatever budgets."""
        near = min(self._compiled(), key=lambda t: abs(t.compiled - self.budget), default=None)
        return standing if near is None else near.compiled - near.modelled

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
            most = max(self.most, self.compiles + 1)  # the leanest plans come after these
            self.progress(self.compiles, most, f"compiling plan {self.compiles + 1} for {self.problem.target.name}")
            self.compiles += 1
            model, modelled = problem.model, cost(self.chain, solution).peak
            made = model.plan_by_hand(solution) if by_hand else model.plan(solution)
            predicted = self._predicted_by_hand(solution) if by_hand else self._predicted(solution, standing)
            traced, effort = problem.traced(solution, by_hand), problem.effort(solution, by_hand)
            try:
                report: MemoryReport | None = problem.measure_planned(made)
                assert report is not None
                compiled = report.peak_bytes
            except DoesNotFitError as error:
                report, compiled = None, error.needed_bytes or 2 * error.memory_bytes
            known = Try(solution, modelled, predicted, compiled, made, report, traced, effort, by_hand)
            with problem.lock:
                problem.tries[solution, by_hand] = known
        estimate = self._estimate(solution, known.predicted)
        logger.info("plan: predicted %s, compiled %s", format_bytes(estimate.peak_bytes), format_bytes(known.compiled))
        there = host_use(self.chain, solution)
        finished = replace(known, plan=self._record(known.plan, estimate, known.report, known.traced, host=there))
        if corrects and not by_hand:
            self.tries.append(finished)
        return finished

    def _unverified(self, solution: Solution, standing: int) -> Plan:
        modelled = cost(self.chain, solution)
        hidden = self.problem.model.step_seconds + self.problem.model.seconds(solution)
        self.effort = modelled.time + max(host_use(self.chain, solution).link - hidden, 0.0)
        estimate = self._estimate(solution, modelled.peak + standing)
        if estimate.peak_bytes > self.budget:
            raise self._infeasible(min(estimate.peak_bytes, self._peak_as_it_is()))
        return self._record(
            self.problem.model.plan(solution),
            estimate,
            None,
            None,
            self.problem.model.seconds(solution),
            host_use(self.chain, solution),
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
        host: HostUse | None = None,
    ) -> Plan:
        """Returns the plan with its report.

        Args:
          seconds: of recomputation by the chain, where the step is not traced.
          host: what it takes of the host.
        """
        problem, host = self.problem, host or HostUse()
        found = PlanReport(
            replace(made, respect_checkpoints=problem.asked.respect_checkpoints),
            budget=self.budget,
            target=problem.target.name,
            predicted=estimate,
            measured=report,
            unplanned=problem.known_unplanned,
            measured_bytes=None if report is None else report.peak_bytes,
            unplanned_bytes=None if problem.known_unplanned is None else problem.known_unplanned.peak_bytes,
            host_bytes=host.bytes,
            measured_host_bytes=None if report is None else report.host_bytes,
            host_seconds=host.link + host.waits,
            host_waits=host.waits,
            costs=problem.asked.costs if traced is None else problem.asked.traced_costs,
            compiler_options=tuple(compiler_options(problem.target).items()),
        )
        if traced is None:
            step = problem.model.step_seconds
            computed = step + seconds
            found = replace(found, host_share=(host.link + host.waits) / computed if computed else 0.0)
            added = seconds + max(host.link - computed, 0.0)
            return replace(found, overhead=added / step if step else 0.0).plan
        plain = problem.plain
        seconds = traced.time.seconds + host.exposed(traced.time.seconds)
        found = replace(
            found,
            flops=traced.flops,
            seconds=seconds,
            host_share=(host.link + host.waits) / seconds if seconds else 0.0,
            unplanned_flops=plain.flops,
            unplanned_seconds=plain.time.seconds,
        )
        return replace(found, overhead=found.slowdown).plan

    def _infeasible(self, needed: int | None = None) -> InfeasibleBudgetError:
        problem = self.problem
        own = [each.compiled for each in self.tries if each.report is not None]
        peaks = problem.compiled_peaks() if self.shares else own
        peaks += [] if problem.known_unplanned is None else [problem.known_unplanned.peak_bytes]
        least = needed or min(peaks, default=None)
        return refusal.no_plan(problem, self.budget, least, verified=self.verify, refused=bool(problem.tries))
