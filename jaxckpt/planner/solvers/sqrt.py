"""Segments of equal length, each run again in the backward pass, but for the last: Chen et al. 2016 (arXiv:1604.06174),
fitted to the limit.

For every segment length, about sqrt(length) or not, two solutions are held against the model: one that keeps in a
segment what saves the most time, as Chen does, and one that keeps the fewest bytes. A rule to compare with; no
guarantee. It may find nothing where there is something.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxckpt.planner.chain import Chain, Drop, Solution
from jaxckpt.planner.preferences import fastest, leanest, single
from jaxckpt.planner.solvers.base import Infeasible, Solver, cheapest


class Sqrt(Solver):
    """The cheapest solution of equal segments."""

    name = "sqrt"

    def solve(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns the cheapest solution of segments that peaks at no more than `limit` bytes, if one does."""
        return cheapest(chain, segmented(chain), limit)


def segmented(chain: Chain) -> Iterator[Solution]:
    """Yields solutions of every segment length, from one (each stage with a candidate, nothing dropped) to the whole
    chain.
    """
    for preference in (fastest, leanest):
        keeps = single(chain, preference)
        yield keeps
        for size in range(2, chain.length):
            last = (chain.length - 1) // size * size
            yield (
                *(Drop(at, at + size, keeps[at : at + size]) for at in range(0, last, size)),
                *keeps[last:],
            )
