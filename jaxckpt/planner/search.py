"""The search for a plan within a budget, held against the compiler.

Solve, emit, trace the whole step, correct the chain, solve again; then compile, compare. The chain's bytes are a
prediction. A trace corrects it stretch by stretch, and the compiled peak of one plan for the next plan. The returned
plan is the cheapest whose compiled peak is within the budget, after at most `COMPILES` compilations of the solver's
plans, `QUICK_COMPILES` of a small program, or where a plan that does not fit is much cheaper than all that fit. What
people write is compiled as well where it may be cheaper, and the leanest plans where none of these fits.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Collection
from dataclasses import replace

from jaxckpt._errors import DoesNotFitError, InfeasibleBudgetError
from jaxckpt.core import purity
from jaxckpt.core.constants import (
    ABOVE,
    CLOSE,
    COMPILES,
    FILLED,
    FLOORS,
    LEANER,
    MORE,
    OVERSTATED,
    OVERSTATED_LOOP,
    QUICK_COMPILES,
    ROOM,
    TINIEST,
    TINY,
    WORTH,
)
from jaxckpt.core.plan import Plan
from jaxckpt.core.shown import Progress
from jaxckpt.core.units import format_bytes
from jaxckpt.memory.report import MemoryReport
from jaxckpt.planner import findings, hand_written, refusal
from jaxckpt.planner.aims import Aims
from jaxckpt.planner.chain import Solution, cost
from jaxckpt.planner.host import host_use
from jaxckpt.planner.measured import Measured, Try
from jaxckpt.planner.no_worse import NoWorse
from jaxckpt.planner.predictions import Predictions
from jaxckpt.planner.remembered import Found, Remembered
from jaxckpt.planner.solvers import Solver

logger = logging.getLogger("jaxckpt")

EVERYTHING = 2**62
"""Bytes of a budget within which everything can be kept."""


class Search:
    """One search for one budget.

    Args:
      thorough: whether a plan is looked for that is leaner than all that were compiled, however far these are above the
        budget. Not where others are to be tried yet, of the function with other tiles.
      floors: whether the leanest plans are looked for where nothing else fits, which takes long.
      alone: whether it searches as if nothing had been compiled before it. What was is not compiled again.
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
        floors: bool = True,
        alone: bool = False,
    ) -> None:
        self.problem, self.budget, self.solver, self.verify, self.progress = problem, budget, solver, verify, progress
        self.shares, self.alone = problem.shares(solver), alone
        self.thorough, self.floors = thorough, floors
        self.chain = problem.model.chain
        self.host = problem.host(solver)
        self.predictions = Predictions(problem, budget, solver, alone)
        self.aims, self.tries = Aims(self.predictions, solver), self.predictions.tries
        self.compiles = 0
        self.effort = 0.0  # of the plan that was found
        self.quick = problem.model.quick
        self.most = QUICK_COMPILES if self.quick else COMPILES

    def run(self) -> Plan:
        """Returns the cheapest plan that was found.

        Raises:
          InfeasibleBudgetError: none fits.
        """
        if (found := self._as_it_is() if self.verify else self._predicted_as_it_is()) is not None:
            return found
        purity.refuse_effects(self.problem.asked.fun, self.problem.graph)
        least = self.predictions.least
        if not self.verify:
            solution = self.host.solve(self.budget - self.predictions.standing) or least
            if solution is None:
                raise self._infeasible(self._peak_as_it_is())
            return self._unverified(solution)
        if self._is_remembered and (best := self.known()) is not None:
            return self._returned(best)
        if self.problem.model.calls and not self._fits_by_calls():
            raise self._infeasible()
        best = self._search(least)
        if best is None and self.floors:
            best = self._floor(least)
            if best is not None and self.shares:  # it may take far more time than the budget asks for
                best = self._or_by_hand(best, self.problem.by_hand)
        if best is not None and self.shares:
            best = self._or_no_worse(self._or_with_last_blocks_left(best))
        if (best is None or best.effort > 0.0) and (found := self._as_it_is_after_all()) is not None:
            return found
        if best is None:
            self.progress(self.most, self.most, "")
            self._remember_leanest()
            raise self._infeasible()
        self.remembered.add(Found(self.budget, best.compiled, best.effort, best.solution, best.by_hand))
        return self._returned(best)

    def _fits_by_calls(self) -> bool:
        """Whether checkpoints around the calls of the user's functions fit; they are compiled if that is likely. The
        last ones are left to JAX if the others do not: where they need as much, people put none around them.
        """
        every = self.problem.model.by_calls()
        estimate = functools.partial(self.problem.estimate, by_hand=True)
        if estimate(every) > OVERSTATED * self.budget:
            return False
        left = (each for each in self.problem.model.with_last_blocks_left(every) if estimate(each) <= estimate(every))
        tried = itertools.islice(itertools.chain([every], left), FLOORS)
        return any(self._try(each, by_hand=True).fits(self.budget) for each in tried)

    def _remember_leanest(self) -> None:
        """Keeps the leanest plan though it does not fit: the error names what it needs, the caller may ask for that,
        and a search for it may compile others.
        """
        with self.problem.lock:
            compiled = [each for each in self.problem.tries.values() if each.report is not None]
        if self.shares and compiled:
            lean = min(compiled, key=lambda each: each.compiled)
            self.remembered.add(Found(self.budget, lean.compiled, lean.effort, lean.solution, lean.by_hand))

    def _returned(self, best: Try) -> Plan:
        self.progress(self.most, self.most, "")
        self.effort = best.effort
        return best.plan

    @functools.cached_property
    def remembered(self) -> Remembered:
        """The plans that were returned for this problem before; none for a solver whose plans are its own."""
        return self.problem.remembered(self.solver) if self.shares else Remembered(None, self.chain, ())

    @property
    def _is_remembered(self) -> bool:
        """Whether a plan for this very budget is remembered: what a search would find."""
        return self.shares and any(each.budget == self.budget for each in self.remembered.plans())

    def known(self) -> Try | None:
        """Returns the cheapest plan that was found for another budget and fits this one: more memory never costs more.
        Those that other calls returned are compiled, which takes no time where the compilers' results are at hand.
        """
        with self.problem.lock:
            known = {key: t.effort for key, t in self.problem.tries.items() if t.fits(self.budget)}
            made = set(self.problem.tries)
        for each in self.remembered.plans():
            if each.compiled <= self.budget and (each.solution, each.by_hand) not in made:
                known[each.solution, each.by_hand] = each.effort
        compiles = self.compiles
        for solution, by_hand in sorted(known, key=lambda key: known[key]):
            found = self._try(solution, by_hand=by_hand, corrects=False)
            self.compiles = compiles
            if found.fits(self.budget):
                return found
        return None

    def _search(self, least: Solution | None) -> Try | None:
        """Returns the cheapest compiled plan that fits, or None: the solver's solutions, each corrected by what the
        compiler said of those before it, and what people do by hand where that is cheaper.
        """
        best = self.known() if self.shares and not self.alone else None
        seen: set[Solution] = set()
        closed = False  # whether a plan was near the budget, and another one is compiled all the same
        other: Solution | None = None
        while self.compiles < self.most or (
            self.compiles < QUICK_COMPILES and (other is not None or self.aims.is_steep())
        ):
            last = self.compiles == self.most - 1 and best is None
            solution = None if last else other or self.aims.next(seen)
            if solution is None and best is not None and not best.by_hand and not self.tries:
                self.tries.append(best)  # made for another budget, it corrects what the chain says
                solution = self.aims.next({*seen, best.solution})
            solution = solution or (least if best is None else None)
            if solution is None or solution in seen or (best is not None and not self._is_cheaper(solution, best)):
                break
            after_miss = closed and not self.tries[-1].fits(self.budget)
            if after_miss and self.predictions.predicted(solution) > self.budget:
                break
            seen.add(solution)
            tried, other = self._try(solution), None
            best = self._better(best, tried)
            if closed and tried.fits(self.budget):
                other = self._more(tried) if best is tried else None
                if other is None:
                    break
                continue
            if best is tried and tried.compiled >= self.budget * (1 - FILLED) and not self.aims.is_steep():
                if not self._is_worth_another(tried):
                    other = self._other(tried, seen)
                    if other is None:
                        break
                closed = not self.quick
        if not self.shares:
            return best
        if best is None and (best := self._near_miss_by_hand()) is None:
            return None
        best = self._or_estimated(best, seen)
        best = self._or_by_hand(best, self.problem.by_hand)
        best = self._or_by_hand(best, hand_written.first_blocks(self.predictions))
        # What misses the budget may fit it where no region waits for the gradients of the one before.
        missed = {t.solution for t in self.tries if self.quick and not t.fits(self.budget)}
        return self._or_by_hand(best, missed) if missed else best

    def _near_miss_by_hand(self) -> Try | None:
        """Returns a plan of this search that hardly missed the budget, written as people write it, if that fits: the
        barriers between regions take a few bytes.
        """
        near = [
            t for t in self.tries if self.quick and t.report is not None and t.compiled <= (1 + CLOSE) * self.budget
        ]
        made = (self._try(t.solution, by_hand=True) for t in sorted(near, key=lambda t: t.compiled)[:FLOORS])
        return next((each for each in made if each.fits(self.budget)), None)

    def _is_cheaper(self, solution: Solution, best: Try) -> bool:
        """Whether a solution takes less than a plan that was compiled, as its step is traced."""
        tiny = TINY * self.problem.plain.time.effort
        is_traced = self.predictions.is_traced(solution)
        return not is_traced or self.problem.effort(solution) < best.effort - tiny

    def _is_worth_another(self, close: Try) -> bool:
        """Whether a plan that needs all of the budget would take less time than one that is close to it."""
        fullest = self.aims.fullest() or self.host.solve(self.budget - close.compiled + close.modelled)
        saved = 0.0 if fullest is None else self._chain_time(close) - cost(self.chain, fullest).time
        return saved > (TINY if self.quick else WORTH) * self.problem.model.step_seconds

    @property
    def _has_others(self) -> bool:
        """Whether plans with other regions are looked for."""
        return self.shares and not self.quick and not self.problem.divided

    def _other(self, close: Try, seen: Collection[Solution]) -> Solution | None:
        """Returns what `Aims.other` does, for a plan that is close to the budget; None where the solver's own plan is
        asked for.
        """
        if not self._has_others:
            return None
        return self.aims.other(close, WORTH * self.problem.model.step_seconds, seen)

    def _more(self, found: Try) -> Solution | None:
        """Returns what `Aims.more` does, for a plan with other regions that is not close to the budget."""
        if not self._has_others or found.compiled >= self.budget * (1 - FILLED):
            return None
        return self.aims.more(found, WORTH * self.problem.model.step_seconds)

    def _or_estimated(self, best: Try, seen: Collection[Solution]) -> Try:
        """Returns the best plan, or one that the chain says needs more, and the estimate of its step that it fits: the
        cheapest of these first.
        """
        problem = self.problem
        if not self.quick:  # each estimate takes a trace of the whole step
            return best
        ratio = min(
            (t.compiled / problem.estimate(t.solution) for t in self.tries if t.report is not None), default=1.0
        )
        limit = int(self.predictions.modelled_limit(self.budget))
        limits = dict.fromkeys(min(round(best.modelled * factor), limit) for factor in MORE)
        more = map(self.host.solve, limits)
        left = {solution: cost(self.chain, solution).time for solution in more if solution is not None}
        for solution in sorted(left, key=lambda each: left[each]):
            if self.compiles >= self.most or left[solution] >= self._chain_time(best):
                break
            if solution not in seen and problem.estimate(solution) * max(ratio, 1.0) <= self.budget:
                best = self._better(best, self._try(solution)) or best
        return best

    def _chain_time(self, tried: Try) -> float:
        return cost(self.chain, tried.solution).time

    def _better(self, best: Try | None, tried: Try) -> Try | None:
        return tried if tried.fits(self.budget) and (best is None or tried.effort < best.effort) else best

    def _or_by_hand(self, best: Try, solutions: Collection[Solution]) -> Try:
        """Returns the best plan, or one of other solutions, written as people write checkpoints, that fits and
        recomputes less.

        They are compiled one by one. Each may become the best plan, and then those that do not recompute less drop out.
        Each also says what estimates are worth: after the first one, those that are predicted to fit are compiled too.
        """
        tried = 0
        least = len(solutions) if self.quick else 1  # tried however many plans are compiled
        times = {solution: cost(self.chain, solution).time for solution in solutions}
        while tried < least or self.compiles < QUICK_COMPILES:
            chosen = hand_written.next_by_hand(self.predictions, times, best)
            if chosen is None:
                break
            if tried >= least and self.compiles >= self.most and not self._is_predicted_by_hand(chosen):
                break
            best = self._better(best, self._try(chosen, by_hand=True)) or best
            tried += 1
        return best

    def _is_predicted_by_hand(self, solution: Solution) -> bool:
        """Whether a solution, written by hand, is predicted to fit, by another one that was compiled."""
        known = self.predictions.overstated(by_hand=True) is not None
        return known and self.predictions.predicted_by_hand(solution) <= self.budget

    def _or_with_last_blocks_left(self, best: Try) -> Try:
        """Returns the best plan or, where it is as people write it, the same with as many of its last blocks left to
        JAX as fit. Compiles at least one, if one is estimated to fit.
        """
        if not best.by_hand:
            return best
        start = self.compiles
        for solution in hand_written.with_last_blocks_left(self.predictions, best):
            if self.compiles > start and self.compiles >= self.most:
                break
            if (made := self._try(solution, by_hand=True)).fits(self.budget):
                return made
        return best

    def _or_no_worse(self, best: Try) -> Try:
        """Returns the best plan or, where others that fit compute less or take less time, one that is no worse than
        any of these; see `no_worse`. It counts as cheaper than the best one from then on.
        """
        less = max(
            (each for each in self.remembered.plans() if each.budget < self.budget and each.compiled <= self.budget),
            key=lambda each: each.budget,
            default=None,
        )
        compiled = lambda solution, by_hand: self._try(solution, by_hand=by_hand, corrects=False)
        looked = NoWorse(self.predictions, self.solver, best, compiled)
        found = looked.find([] if less is None else [(less.solution, less.by_hand)])
        if found is None:
            return best
        ranked = replace(found, effort=min(found.effort, best.effort - TINIEST * self.problem.plain.time.effort))
        with self.problem.lock:
            self.problem.tries[found.solution, found.by_hand] = ranked
        return ranked

    def _floor(self, least: Solution | None) -> Try | None:
        """Returns the leanest plan, if it fits. The model does not know which of lean plans is the leanest, so several
        of different cuts are compiled: the solver's, what people do by hand, the next on the frontier, and what traces
        of these say is leaner. Not so those that are estimated to need more than what is compiled already, unless a
        compilation takes no time, or a person's are estimated to fit.
        """
        problem, lean = self.problem, [] if least is None else [(least, False)]
        leaner: list[Solution] = []
        if self.shares:
            lean += [(solution, True) for solution in hand_written.leanest(problem, FLOORS)]
        if self.shares and least is not None:
            peak = cost(self.chain, least).peak
            above = (self.host.solve(round(peak * more)) for more in (sorted({*ABOVE, *MORE}) if self.quick else ABOVE))
            lean += [(solution, False) for solution in above if solution is not None]
            leaner = self.aims.leanest(least)
            lean += [(solution, False) for solution in leaner]
        compiled = [tried.compiled for tried in self.tries]
        estimates = {each: problem.estimate(*each) for each in lean}
        for solution, written in sorted(estimates, key=lambda each: estimates[each]):
            far = bool(compiled) and self._is_far(solution, written, min(compiled))
            # What one estimate of a person's checkpoints is off by says little of others: one such plan of a model of
            # many operations needed 34 MiB more than its estimate, the next 5 MiB.
            limit = self.predictions.most_estimated(min(compiled)) if self.quick and compiled else self.budget
            loops = problem.model.checkpoints_loops(solution)
            hopeful = written and estimates[solution, written] <= (OVERSTATED_LOOP * self.budget if loops else limit)
            if far and not hopeful and solution not in leaner:
                continue
            made = self._try(solution, by_hand=written)
            compiled.append(made.compiled)
            if made.fits(self.budget):
                return made
        if not (self.shares and self.quick):
            return None
        single = self._by_single_checkpoints() if self.problem.model.finer else None
        return single or self._leaner(least)

    def _by_single_checkpoints(self) -> Try | None:
        """Compiles a checkpoint as people write it around each run of stages, all else left to JAX, and adds another
        to the leanest, as long as that needs less. Returns one that fits, or None. Not compiled is what, by its
        estimate, is not the leanest.
        """
        problem, best = self.problem, None
        while True:
            distinct: dict[tuple[int, float], Solution] = {}
            for solution in problem.model.with_one_more(best.solution if best is not None else ()):
                traced = problem.traced(solution, by_hand=True)
                distinct.setdefault((traced.peak_bytes, traced.time.effort), solution)
            made = []
            for key in sorted(distinct):
                peaks = problem.compiled_peaks()
                if peaks and problem.estimate(distinct[key], True) > self.predictions.most_estimated(min(peaks)):
                    continue
                made.append(self._try(distinct[key], by_hand=True))
                if made[-1].fits(self.budget):
                    return made[-1]
            leaner = min(made, key=lambda each: each.compiled, default=None)
            if leaner is None or (best is not None and leaner.compiled >= best.compiled):
                return None
            best = leaner

    def _is_far(self, solution: Solution, by_hand: bool, least: int) -> bool:
        """Whether a solution is estimated to need more than the fewest bytes that were compiled. What estimates of
        checkpoints by hand are off by is about the same for all of them, once one is compiled.
        """
        likely, over = self.problem.estimate(solution, by_hand), self.predictions.overstated(by_hand=False) or 1.0
        if by_hand and self.predictions.overstated(by_hand=True) is None:
            over = max(over, hand_written.most_overstated(self.problem))
        elif by_hand:
            likely, over = self.predictions.predicted_by_hand(solution), 1.0
        return likely > max(1 + CLOSE, over) * least

    def _leaner(self, least: Solution | None) -> Try | None:
        """Asks for plans within less than the leanest one needs, as the caller may after an error that names it, until
        none is leaner. Returns one that fits, or None.
        """
        peaks = self.problem.compiled_peaks()
        if not peaks or not (self.thorough or min(peaks) <= ABOVE[-1] * self.budget):
            return None
        for _ in range(FLOORS):
            before = leanest = min(self.problem.compiled_peaks())
            # At first for the leanest itself, as the caller will, who may not have what was compiled here.
            for share, alone in itertools.product((None, *LEANER), (False, True)):
                budget = leanest if share is None else int(leanest * share) - 1
                Search(self.problem, budget, self.solver, self.verify, self.progress, alone=alone)._search(least)
                if (found := self.known()) is not None:
                    return found
                leanest = min(self.problem.compiled_peaks())
            # The barriers between regions take a few bytes.
            lean = min(self.predictions.compiled(), key=lambda t: t.compiled, default=None)
            if lean is not None and (made := self._try(lean.solution, by_hand=True)).fits(self.budget):
                return made
            if min(self.problem.compiled_peaks()) == before:
                return None
        return None

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
        self.progress(self.most, self.most, "")
        return findings.empty(problem, self.budget, report.peak_bytes, report)

    def _as_it_is_after_all(self) -> Plan | None:
        """Returns the empty plan if the step fits without one, though its estimate was too far above the budget to
        compile it: the estimates of plans that were compiled may be too high by as much.
        """
        problem = self.problem
        if problem.known_unplanned is not None:
            return None
        tries = [t for t in self.tries if t.report is not None]
        ratio = min((t.compiled / problem.estimate(t.solution) for t in tries), default=1.0)
        return self._compiled_as_it_is() if ratio * self._peak_as_it_is() <= ROOM * self.budget else None

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
        known = self.problem.known_unplanned  # a share of the peak is of the compiled one
        peak = self._peak_as_it_is() if known is None else known.peak_bytes
        return None if peak > self.budget else findings.empty(self.problem, self.budget, peak, None)

    def _try(self, solution: Solution, *, by_hand: bool = False, corrects: bool = True) -> Try:
        """Compiles a solution, unless it is compiled already. `corrects`: whether its bytes correct what the chain says
        of the next ones; those of a plan for another budget are too far from this one's.
        """
        problem = self.problem
        self.predictions.asked.add((solution, by_hand))
        with problem.lock:
            known = problem.tries.get((solution, by_hand))
        if known is None:
            most = max(self.most, self.compiles + 1)  # the leanest plans come after these
            self.progress(self.compiles, most, f"compiling plan {self.compiles + 1} for {self.problem.target.name}")
            self.compiles += 1
            made, modelled = problem.plan_of(solution, by_hand), cost(self.chain, solution).peak
            predicted = (
                self.predictions.predicted_by_hand(solution) if by_hand else self.predictions.predicted(solution)
            )
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
        logger.info("plan: predicted %s, compiled %s", format_bytes(known.predicted), format_bytes(known.compiled))
        memory, there = findings.memory_of(problem, solution, known.predicted), host_use(self.chain, solution)
        found = findings.traced(problem, self.budget, known.plan, memory, known.report, known.traced, there)
        finished = replace(known, plan=found)
        if corrects and not by_hand:
            self.tries.append(finished)
        return finished

    def _unverified(self, solution: Solution) -> Plan:
        problem, modelled = self.problem, cost(self.chain, solution)
        hidden = problem.model.step_seconds + problem.model.seconds(solution)
        self.effort = modelled.time + max(host_use(self.chain, solution).link - hidden, 0.0)
        predicted = modelled.peak + self.predictions.standing
        if predicted > self.budget:
            raise self._infeasible(min(predicted, self._peak_as_it_is()))
        return findings.modelled(problem, self.budget, solution, findings.memory_of(problem, solution, predicted))

    def _infeasible(self, needed: int | None = None) -> InfeasibleBudgetError:
        problem = self.problem
        own = [each.compiled for each in self.tries if each.report is not None]
        peaks = problem.compiled_peaks() if self.shares else own
        peaks += [] if problem.known_unplanned is None else [problem.known_unplanned.peak_bytes]
        least = needed or min(peaks, default=None)
        alone = "" if self.shares else self.solver.name
        return refusal.no_plan(
            problem, self.budget, least, verified=self.verify, refused=bool(problem.tries), solver=alone
        )
