"""Plans of a function with stretches in tiles: which tiles are planned for a budget, and the cheapest of the plans.

What is tiled for a budget is the chain's word. Where no plan fits so, the compiler's counts: stretches are divided into
as many tiles as there can be, then into as few as still fit.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxckpt._errors import DoesNotFitError, InfeasibleBudgetError, TilingError
from jaxckpt.core.constants import (
    FAR,
    KEPT_SHARE,
    LEAN_SHARE,
    LEANER_SHARE,
    LEANER_TIMES,
    MOST_TILES,
    NEAR,
    OVERSTATED_TILES,
    QUICK_TILE_TRIES,
    TILE_ROUNDS,
    TILE_TRIES,
    WORTH,
)
from jaxckpt.core.plan import Plan, PlanReport
from jaxckpt.core.regions import TiledStretch
from jaxckpt.core.shown import Progress
from jaxckpt.planner import refusal
from jaxckpt.planner.chain import cost
from jaxckpt.planner.measured import Measured
from jaxckpt.planner.predictions import standing_bytes
from jaxckpt.planner.preferences import fastest, on_device, single
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.tiles import Tiler

TileSet = tuple[TiledStretch, ...]
"""The tiles of one plan, in the order of their rounds."""


@dataclass(frozen=True, eq=False)
class Within:
    """What a plan is asked for: the arguments of `Search`."""

    budget: int
    solver: Solver
    verify: bool
    progress: Progress
    thorough: bool = True


class Tileable(Measured, abc.ABC):
    """A problem, as plans with tiles need it: of the function, and of the function with tiles."""

    @abc.abstractmethod
    def whole(self) -> Tileable:
        """Returns the problem of the function's own body."""

    @abc.abstractmethod
    def best(self, within: Within) -> Plan:
        """Returns the cheapest plan without (more) tiles.

        Raises:
          InfeasibleBudgetError: none fits.
        """

    @abc.abstractmethod
    def recall(self, budget: int | str, solver: str | Solver = "chain") -> Plan | None:
        """Returns the cheapest of the plans that were compiled that fits a budget, or None."""


@dataclass(frozen=True)
class _Extent:
    """How much is to be tiled.

    Attributes:
      keep: whether such that everything can be kept; else such that the leanest plan fits.
      share: of the budget that the chain's moments may need.
      more: how many times as many tiles as the chain says.
      dearest: whether only the stretch that needs most is tiled, until it needs no more than the others: a head, and
        what a recomputing plan makes of the rest.
      tiles: of each stretch, whatever the chain says; None where the chain says how many. Then what was compiled says
        what the chain leaves out, and parts of a stretch are tiled where no axis goes through all of it.
      whole: whether the whole function is one stretch: microbatches.
    """

    keep: bool
    share: float
    more: float = 1.0
    dearest: bool = False
    tiles: int | None = None
    whole: bool = False

    def with_fewer(self, times: float) -> _Extent:
        """Returns this with so many times fewer tiles."""
        tiles = None if self.tiles is None else min(max(round(self.tiles / times), 2), MOST_TILES)
        return replace(self, more=self.more / times, tiles=tiles)


def _how_many_fewer(plan: Plan, budget: int) -> int:
    """Returns how many times fewer tiles, a power of two, a budget has room for, if all that a plan needs besides the
    arguments and the results is divided by the tiles.
    """
    said = plan.measured
    if said is None:  # not verified: there is nothing to go by
        return 1
    whole = said.argument_bytes + said.output_bytes - said.alias_bytes
    room = (budget - whole) // max(said.peak_bytes - whole, 1)
    most = max(tile.tiles for tile in plan.tiles) // 2
    return 1 << max(min(room, most), 1).bit_length() - 1


def of_function(whole: Measured, plan: Plan, **changes: Any) -> PlanReport:
    """Returns the report of a plan of a changed function, as that of a plan of the function itself: against its step
    without a plan.

    Args:
      whole: the problem of the function itself.
      plan: of the changed function.
      **changes: fields of `Plan` that say how it was changed.
    """
    said = plan.report
    assert said is not None, "the planner's plans have reports"
    made = replace(
        plan,
        fingerprint=whole.model.fingerprint,
        tiled_fingerprint=plan.fingerprint,
        respect_checkpoints=whole.asked.respect_checkpoints,
        report=None,
        **changes,
    )
    return replace(
        said,
        plan=made,
        unplanned=whole.known_unplanned,
        unplanned_bytes=None if whole.known_unplanned is None else whole.known_unplanned.peak_bytes,
        unplanned_flops=whole.plain.flops,
        unplanned_seconds=whole.plain.time.seconds,
    )


class Tiled:
    """Plans of a function with stretches of it in tiles.

    Args:
      problem: of the function.
      make: returns the problem of the function with tiles.
    """

    def __init__(self, problem: Tileable, make: Callable[[TileSet], Tileable]) -> None:
        self.problem, self._make = problem, make
        self.made: dict[TileSet, Tileable] = {}

    def with_tiles(self, tiles: TileSet) -> Tileable:
        """Returns the problem of the function with tiles, for equal tiles the same."""
        if tiles not in self.made:
            self.made[tiles] = self._make(tiles)
        return self.made[tiles]

    def or_tiled(self, within: Within) -> Plan:
        """Returns the cheapest plan within a budget, with tiles or without.

        Raises:
          InfeasibleBudgetError: none fits.
        """
        return _TiledSearch(self, within).run()

    def recall(self, within: Within) -> list[Plan]:
        """Returns, for each set of tiles, the cheapest plan that was compiled, for whatever budget, and fits."""
        found = []
        for tiles, problem in list(self.made.items()):
            as_it_is = problem.known_unplanned
            if as_it_is is not None and as_it_is.peak_bytes <= within.budget:
                found.append(self.told(problem.best(within), tiles))
            elif (plan := problem.recall(within.budget, within.solver)) is not None:
                found.append(self.told(plan, tiles))
        return found

    def told(self, plan: Plan, tiles: TileSet) -> Plan:
        """Returns a plan of the function with tiles as one of the function itself."""
        whole, told = self.problem, of_function(self.problem, plan, tiles=tiles)
        if told.seconds is not None:
            return replace(told, overhead=told.slowdown).plan
        with_tiles = self.with_tiles(tiles)  # it is not verified: what it recomputes is the chain's word
        seconds = with_tiles.plain.time.seconds + (plan.overhead or 0.0) * with_tiles.model.step_seconds
        return replace(told, overhead=seconds / whole.plain.time.seconds - 1).plan


class _TiledSearch:
    """One look for the cheapest plan within a budget, with tiles or without."""

    def __init__(self, tiled: Tiled, within: Within) -> None:
        self.tiled, self.within = tiled, within
        self.problem = tiled.problem
        self.whole = self.problem.whole()
        self.quick = self.whole.model.quick and within.verify
        self.plans: list[Plan] = []
        self.errors: list[tuple[InfeasibleBudgetError, TileSet]] = []
        self.refused: list[TilingError] = []
        self.seen: dict[TileSet, bool] = {}  # whether a plan with these tiles fits

    def run(self) -> Plan:
        """Returns the plan.

        Raises:
          InfeasibleBudgetError: none fits.
        """
        hopeless = self._is_hopeless()
        if not hopeless:
            self._look(())
            if self.plans and (self.plans[0].overhead or 0.0) < WORTH:
                return self.plans[0]
        fits = bool(self.plans)  # without tiles
        lean = [] if fits else [_Extent(False, LEAN_SHARE), _Extent(False, LEANER_SHARE, LEANER_TIMES)]
        self._by_extents([_Extent(False, 1.0, dearest=True), _Extent(True, KEPT_SHARE), *lean])
        if self.within.verify and self.whole.shares(self.within.solver):
            self.plans += self.tiled.recall(self.within)
        if not self.plans:
            most = _Extent(False, LEAN_SHARE, tiles=MOST_TILES)
            self._by_extents([most, replace(most, whole=True)])
        if self.quick and not fits:
            self._by_ways()
        if not self.plans and (self.quick or not self.errors):
            self._look(())
        if not self.plans:
            raise self._infeasible()
        return min(self.plans, key=lambda plan: plan.overhead or 0.0)

    def _look(self, tiles: TileSet) -> bool:
        """Plans the function with tiles; returns whether a plan fits."""
        if tiles not in self.seen:
            try:
                if tiles:
                    problem = self.tiled.with_tiles(tiles)
                    if self.quick:  # estimates of tiles are above what the compiler makes of them
                        with contextlib.suppress(DoesNotFitError):
                            _ = problem.unplanned
                    self.plans.append(self.tiled.told(problem.best(replace(self.within, thorough=False)), tiles))
                else:
                    self.plans.append(self.problem.best(self.within))
                self.seen[tiles] = True
            except InfeasibleBudgetError as error:
                self.errors.append((error, tiles))
                self.seen[tiles] = False
        return self.seen[tiles]

    def _by_extents(self, extents: list[_Extent]) -> None:
        """Plans with the tiles of each extent, until a plan fits; then with fewer."""
        enough = False  # whether a plan fits with as many tiles as the last extent but one asked for
        while extents and sum(map(bool, self.seen)) < TILE_TRIES:
            extent = extents.pop(0)
            tiles = self._tiles(extent)
            if not tiles or tiles in self.seen:
                continue
            fits = self._look(tiles)
            if extent.dearest:
                extents = [each for each in extents if each.keep] if fits else extents
            elif fits:
                enough = True
                fewer = _how_many_fewer(self.plans[-1], self.within.budget)
                extents = [extent.with_fewer(fewer)] if fewer > 1 else []
            elif enough:  # of so few no plan fits
                extents = [extent.with_fewer(0.5)]

    def _by_ways(self) -> None:
        """Plans with each way in which the stretches that need most can be divided: with as many tiles as there can be,
        and with the fewest that fit. Looks at no way that takes more time than the best plan.

        Where as many tiles as there can be miss the budget by little, the next two smaller numbers are tried: compiled,
        the step may need less with them.
        """
        chain = self.whole.model.chain
        most = len(self.seen) + (TILE_TRIES if self.plans else QUICK_TILE_TRIES)
        solutions = [single(chain, on_device(fastest)), self.whole.host(self.within.solver).least()]
        tiler = _tiler(self.whole)
        self.within.progress(0, 1, "looking for what can be tiled")
        ways = tiler.ways([solution for solution in solutions if solution is not None])
        for way in sorted(ways, key=lambda way: self._overhead((way,))):
            if len(self.seen) >= most:
                break
            fewer = self._with_fewer_tiles(way)
            if self._may_fit(way):
                self._look_for_fewest(fewer)
            elif min(_compiled(self.tiled.with_tiles((way,))), default=math.inf) <= NEAR * self.within.budget:
                for each in reversed(fewer[-2:]):
                    if self._may_fit(each):
                        break

    def _with_fewer_tiles(self, way: TiledStretch) -> list[TiledStretch]:
        """Returns a tiled stretch with 2, 4, 8, ... tiles, as long as these are fewer than it has; where the last tiles
        would have no rows, with as many as have some.
        """
        size = self.whole.graph.values[way.value].shape[way.axis]
        counts = [1 << power for power in range(1, MOST_TILES.bit_length()) if 1 << power < way.tiles]
        return [replace(way, tiles=-(-size // -(-size // count))) for count in counts]

    def _look_for_fewest(self, ways: list[TiledStretch]) -> None:
        """Plans with the fewest tiles that fit, as far as bisection finds them.

        Args:
          ways: a tiled stretch with more and more tiles, each with fewer than one that fits.
        """
        low, high = 0, len(ways)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._may_fit(ways[middle]) else (middle + 1, high)

    def _may_fit(self, way: TiledStretch) -> bool:
        """Plans with one stretch in tiles, and returns whether a plan fits.

        For tiles that were not planned yet, two estimates may spare it. Where the leanest plan is estimated to be far
        above the budget, none fits. Where the tiles alone cost more than the best plan does, the answer is True
        although nothing was planned: plans with fewer tiles may be cheaper, so the search is to go on with these.
        """
        problem, budget = self.tiled.with_tiles((way,)), self.within.budget
        least = problem.host(self.within.solver).least()
        if least is not None and (way,) not in self.seen:
            if problem.estimate(least) > OVERSTATED_TILES * budget:
                return False
            best = min((plan.overhead or 0.0 for plan in self.plans), default=math.inf)
            if self._overhead((way,)) >= best:
                return True
        return self._look((way,))

    def _overhead(self, tiles: TileSet) -> float:
        """Returns what tiles alone add to the time of the step."""
        return self.tiled.with_tiles(tiles).plain.time.seconds / self.problem.plain.time.seconds - 1

    def _is_hopeless(self) -> bool:
        """Whether the leanest plan without tiles is estimated to be far above a budget."""
        least = self.whole.host(self.within.solver).least()
        if least is None:
            return False
        peak = cost(self.whole.model.chain, least).peak + standing_bytes(self.whole, least)
        return peak > FAR * self.within.budget

    def _tiles(self, extent: _Extent) -> TileSet:
        """Returns the tiles that a budget asks for. What stands in the way of the most tiles is in `refused`."""
        tiles: TileSet = ()
        problem = self.whole
        for place in range(TILE_ROUNDS):
            chain = problem.model.chain
            solution = single(chain, on_device(fastest)) if extent.keep else problem.host(self.within.solver).least()
            if solution is None:
                break
            standing = standing_bytes(problem, solution)
            self.within.progress(0, 1, "looking for what can be tiled")
            tiler = _tiler(problem, place)
            if extent.tiles is not None:
                standing += _left_out(problem, cost(chain, solution).peak + standing)
            limit = round((self.within.budget - standing) * extent.share)
            look = functools.partial(tiler.tiles, limit=limit, more=extent.more, alone=extent.keep, count=extent.tiles)
            if extent.dearest:
                found = tiler.dearest(solution)
            else:
                found = tiler.microbatches(extent.tiles or MOST_TILES) if extent.whole else look(solution)
            if not found:
                if not extent.whole:
                    self.refused = tiler.refused
                break
            tiles = (*tiles, *found)
            problem = self.tiled.with_tiles(tiles)
            if extent.dearest or extent.whole:
                break
        return tiles

    def _infeasible(self) -> InfeasibleBudgetError:
        """Returns the error that names the least budget: what was compiled for other budgets counts."""
        peaks = {tiles: _compiled(problem) for tiles, problem in self.tiled.made.items()}
        known = {tiles: min(sizes) for tiles, sizes in peaks.items() if sizes}
        leanest = min(known, key=lambda tiles: known[tiles], default=())
        if self.within.verify and leanest:
            self._look(leanest)
        error, tiles = min(self.errors, key=lambda each: each[0].least_bytes or math.inf)
        values = self.whole.graph.values
        first = [tile for tile in tiles if tile.round == 0]  # later ones are of a function with tiles
        if first and not self.refused and all(t.tiles * t.parts == values[t.value].shape[t.axis] for t in first):
            tiler = _tiler(self.whole)
            self.refused = tiler.couplings(first[0].tiles)
        return refusal.no_plan_with_tiles(error, tiles, self.refused, self.whole.model.places[-1])


def _tiler(problem: Measured, round: int = 0) -> Tiler:
    devices = len(problem.target.devices) if problem.divided else 1
    return Tiler(problem.graph, problem.model, problem.target.platform, round, devices)


def _compiled(problem: Measured) -> list[int]:
    """Returns the compiled peaks of a problem's plans, for whatever budgets."""
    unplanned = problem.known_unplanned
    return problem.compiled_peaks() + ([] if unplanned is None else [unplanned.peak_bytes])


def _left_out(problem: Measured, said: int) -> int:
    """Returns the bytes by which the leanest compiled plan is above what the chain says of its leanest one."""
    return max(min(_compiled(problem), default=said) - said, 0)
