"""Solutions for a loop's body: what iterations keep from the forward to the backward pass counts as often as there are
iterations, what one of them needs for its own backward pass counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxckpt.core.constants import PLANS
from jaxckpt.planner.chain import Candidate, Chain, Drop, Keep, Solution
from jaxckpt.planner.solvers.optimal import Table
from jaxckpt.planner.solvers.staircase import Staircase


def of_one(table: Table) -> list[Solution]:
    """Returns solutions of the chain of a body, from the leanest to the fastest, for one iteration alone."""
    limits: Sequence[int] = [limit for limit, _ in table.frontier()]
    chosen = {limits[round(i * (len(limits) - 1) / (PLANS - 1))] for i in range(PLANS)}
    return [solution for solution in map(table.solution, sorted(chosen)) if solution]


def of_all(table: Table, length: int) -> Iterator[Solution]:
    """Yields solutions of the chain of a body, from the leanest to the fastest, for so many iterations.

    In the chain that is solved for them, all that stages keep or hand on is that of all iterations. What a `Drop` keeps
    to run again is of one iteration, so a `Drop` of stages is one more candidate for these, which keeps nothing.
    """
    chain, segments = table.chain, {}
    beyond = sum(segment.forward_time for segment in chain.segments.values())  # more than solutions take
    for segment in chain.segments.values():
        beyond += max((each.time for each in segment.candidates), default=0.0)
    for (start, stop), segment in chain.segments.items():
        kept = [replace(each, kept=length * each.kept) for each in segment.candidates]
        dropped = [
            Candidate(
                0, segment.forward_time + time, limit, how=Drop(start, stop, table.solution_of(start, stop, limit))
            )
            for limit, time in _few(table.table[start, stop])
            if stop > start + 1
        ]
        segments[start, stop] = replace(segment, forward_time=beyond, candidates=(*kept, *dropped))
    carried = tuple(replace(each, bytes=length * each.bytes) for each in chain.carried)
    over = Chain(chain.length, segments, carried)
    for solution in of_one(Table(over)):
        yield tuple(_restored(over, item) for item in solution)


def _restored(over: Chain, item: Keep | Drop) -> Keep | Drop:
    assert isinstance(item, Keep), "running it forward takes more than all else"
    how = over.candidate(item).how
    return how if isinstance(how, Drop) else item


def _few(steps: Staircase) -> list[tuple[int, float]]:
    """Returns (bytes, seconds) of the leanest way of a stretch, the fastest, and two between."""
    count = len(steps.bytes)
    places = sorted({round(i * (count - 1) / 3) for i in range(4)})
    return [(int(steps.bytes[place]), float(steps.seconds[place])) for place in places]
