"""Segments of equal length, each run again in the backward pass, but for the last: Chen et al. 2016 (arXiv:1604.06174),
fitted to the limit.

For every segment length, about sqrt(length) or not, two solutions are held against the model: one that keeps in a
segment what saves the most time, as Chen does, and one that keeps the fewest bytes. A rule to compare with; no
guarantee. It may find nothing where there is something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxckpt.planner.chain import Candidate, Chain, Drop, Keep, Solution
from jaxckpt.planner.solvers.base import Infeasible, Solver, cheapest

Preference = Callable[[Candidate], tuple[float, ...]]


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


def single(chain: Chain, preference: Preference) -> tuple[Keep, ...]:
    """Returns each stage with the candidate that `preference` puts first."""
    return tuple(
        Keep(stage, stage + 1, min(range(len(candidates)), key=lambda o: preference(candidates[o])))
        for stage in range(chain.length)
        for candidates in [chain.segment(stage, stage + 1).candidates]
    )


def fastest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that recomputes the least."""
    return candidate.time, candidate.kept


def tightest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that needs the fewest bytes at once."""
    return candidate.kept + candidate.work, candidate.time


def leanest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that keeps the fewest bytes."""
    return candidate.kept, candidate.time


def barest(candidate: Candidate) -> tuple[float, float]:
    """Puts the candidate first that keeps nothing, as a checkpoint without a policy does; then as `leanest`."""
    return candidate.kept + bool(candidate.how), candidate.time


def on_device(preference: Preference) -> Callable[[Candidate], tuple[float, ...]]:
    """Returns the preference with candidates that have something on the host put last."""
    return lambda candidate: (candidate.on_host, *preference(candidate))
