"""Every schedule of a chain, one by one: the oracle that the other solvers are tested against. Exponential; for a handful of stages."""

from __future__ import annotations

from collections.abc import Iterator

from jaxckpt.planner.chain import Chain, Drop, Keep, Schedule
from jaxckpt.planner.solvers.base import Infeasible, Solver, cheapest


class Exhaustive(Solver):
    """The cheapest of all schedules."""

    name = "exhaustive"

    def schedule(self, chain: Chain, budget: int) -> Schedule | Infeasible:
        """Returns the cheapest schedule that peaks at no more than `budget` bytes; there is none where it says so."""
        return cheapest(chain, schedules(chain, 0, chain.length), budget)


def schedules(chain: Chain, start: int, stop: int) -> Iterator[Schedule]:
    """Yields every schedule of the stages start..stop. A Drop of all of them would only add a forward run, so there is none."""
    if start == stop:
        yield ()
        return
    for j in range(start + 1, stop + 1):
        firsts: list[Keep | Drop] = [Keep(start, j, o) for o in range(len(chain.span(start, j).options))]
        if j < stop:
            firsts += [Drop(start, j, again) for again in schedules(chain, start, j)]
        for rest in schedules(chain, j, stop):
            for first in firsts:
                yield (first, *rest)
