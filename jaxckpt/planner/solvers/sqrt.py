"""Segments of equal length, each run again in the backward pass, but for the last: Chen et al. 2016 (arXiv:1604.06174), fitted to the budget.

For every segment length, about sqrt(length) or not, two schedules are held against the model: one that keeps in a segment what saves the most
time, as Chen does, and one that keeps the fewest bytes. A rule to compare with; no guarantee. It may find nothing where there is something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxckpt.planner.chain import Chain, Drop, Keep, Option, Schedule
from jaxckpt.planner.solvers.base import Infeasible, Solver, cheapest

Choice = Callable[[Option], tuple[float, float]]


class Sqrt(Solver):
    """The cheapest schedule of equal segments."""

    name = "sqrt"

    def schedule(self, chain: Chain, budget: int) -> Schedule | Infeasible:
        """Returns the cheapest schedule of segments that peaks at no more than `budget` bytes, if one does."""
        return cheapest(chain, segmented(chain), budget)


def segmented(chain: Chain) -> Iterator[Schedule]:
    """Yields schedules of every segment length, from one (each stage with an option, nothing dropped) to the whole chain."""
    for choice in (fastest, leanest):
        keeps = single(chain, choice)
        yield keeps
        for size in range(2, chain.length):
            last = (chain.length - 1) // size * size
            yield (
                *(Drop(at, at + size, keeps[at : at + size]) for at in range(0, last, size)),
                *keeps[last:],
            )


def single(chain: Chain, choice: Choice) -> tuple[Keep, ...]:
    """Returns each stage with the option that `choice` puts first."""
    return tuple(
        Keep(stage, stage + 1, min(range(len(options)), key=lambda o: choice(options[o])))
        for stage in range(chain.length)
        for options in [chain.span(stage, stage + 1).options]
    )


def fastest(option: Option) -> tuple[float, float]:
    """Puts the option first that recomputes the least."""
    return option.time, option.kept


def leanest(option: Option) -> tuple[float, float]:
    """Puts the option first that keeps the fewest bytes."""
    return option.kept, option.time
