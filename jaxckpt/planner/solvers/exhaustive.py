"""Every solution of a chain, one by one: the oracle that the other solvers are tested against. Exponential; for a
handful of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jaxckpt._errors import ArgumentError
from jaxckpt.planner.chain import Chain, Drop, Keep, Solution
from jaxckpt.planner.solvers.base import Infeasible, Solver, cheapest

MOST = 10**7
"""Most solutions that are tried: minutes."""


class Exhaustive(Solver):
    """The cheapest of all solutions."""

    name = "exhaustive"

    def solve(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns the cheapest solution that peaks at no more than `limit` bytes; there is none where it says so.

        Raises:
          ArgumentError: the chain has more than `MOST` solutions.
        """
        if (number := count(chain)) > MOST:
            rule = f"another one for this function: 'exhaustive' tries at most {MOST:.0e} solutions"
            raise ArgumentError("solver", rule, self.name, f"{chain.length} stages have {number:.0e} of them.")
        return cheapest(chain, solutions(chain, 0, chain.length), limit)


def count(chain: Chain) -> int:
    """Returns the number of solutions of a chain."""

    @functools.cache
    def of(start: int, stop: int) -> int:
        if start == stop:
            return 1
        firsts = lambda j: len(chain.segment(start, j).candidates) + (of(start, j) if j < stop else 0)
        return sum(firsts(j) * of(j, stop) for j in range(start + 1, stop + 1))

    return of(0, chain.length)


def solutions(chain: Chain, start: int, stop: int) -> Iterator[Solution]:
    """Yields every solution of the stages start..stop. A Drop of all of them would only add a forward run, so there is
    none.
    """
    if start == stop:
        yield ()
        return
    for j in range(start + 1, stop + 1):
        firsts: list[Keep | Drop] = [Keep(start, j, o) for o in range(len(chain.segment(start, j).candidates))]
        if j < stop:
            firsts += [Drop(start, j, again) for again in solutions(chain, start, j)]
        for rest in solutions(chain, j, stop):
            for first in firsts:
                yield (first, *rest)
