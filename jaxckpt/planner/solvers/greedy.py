"""Bytes spent one change at a time where they save the most seconds.

It begins with the candidate of each stage that keeps the fewest bytes or, where that does not fit, with the lean
segments of the solver `sqrt` that peak lowest. Then it takes, as long as the limit holds, the change that saves the
most seconds for each byte: another candidate of a stage, or a segment that is not dropped any more. Knapsack's greedy
rule (Dantzig 1957): no guarantee, because a change never undoes another one, segments of several stages are never kept
as one, and nothing is nested twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxckpt.planner.chain import Chain, Drop, Keep, Solution, cost
from jaxckpt.planner.preferences import leanest, single
from jaxckpt.planner.solvers.base import Infeasible, Solver
from jaxckpt.planner.solvers.sqrt import segmented


class Greedy(Solver):
    """Knapsack's greedy rule."""

    name = "greedy"

    def solve(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns a solution that peaks at no more than `limit` bytes, if it finds one."""
        solution: Solution = single(chain, leanest)
        if cost(chain, solution).peak > limit:
            solution = min(segmented(chain), key=lambda each: cost(chain, each).peak)  # `single` is among them
            if (peak := cost(chain, solution).peak) > limit:
                return Infeasible(peak, solution)
        return _improved(chain, solution, limit)


def _improved(chain: Chain, solution: Solution, limit: int) -> Solution:
    """Returns a solution that fits with the changes that save time, as long as they fit too."""
    refused: set[tuple[Keep | Drop, Solution]] = set()  # what was over the limit once is not tried again: room shrinks
    while True:
        changes = [change for change in _changes(chain, solution) if (change[1], change[2]) not in refused]
        for _, old, new in sorted(changes, key=lambda change: -change[0]):
            changed = _replaced(solution, old, new)
            if cost(chain, changed).peak <= limit:
                solution = changed
                break
            refused.add((old, new))
        else:
            return solution


def _changes(chain: Chain, items: Solution) -> Iterator[tuple[float, Keep | Drop, Solution]]:
    """Yields (seconds saved for each byte, item, what takes its place) for every change that saves time."""
    for item in items:
        segment = chain.segment(item.start, item.stop)
        if isinstance(item, Drop):
            held = sum(
                chain.segment(each.start, each.stop).candidates[each.candidate].kept
                for each in item.again
                if isinstance(each, Keep)
            )
            held += sum(chain.output(each.start, each.stop, item.stop) for each in item.again)
            yield _rate(segment.forward_time, held), item, item.again
            yield from _changes(chain, item.again)
            continue
        now = segment.candidates[item.candidate]
        for number, candidate in enumerate(segment.candidates):
            if candidate.time < now.time:
                yield (
                    _rate(now.time - candidate.time, candidate.kept - now.kept),
                    item,
                    (Keep(item.start, item.stop, number),),
                )


def _rate(seconds: float, held: int) -> float:
    return seconds / held if held > 0 else float("inf")


def _replaced(items: Solution, old: Keep | Drop, new: Solution) -> Solution:
    """Returns the solution with `new` in the place of `old`, wherever it stands; stages stand in one place only as
    Keep.
    """
    found: list[Keep | Drop] = []
    for item in items:
        if item == old:
            found += new
        elif isinstance(item, Drop) and item.start <= old.start and old.stop <= item.stop:
            found.append(Drop(item.start, item.stop, _replaced(item.again, old, new)))
        else:
            found.append(item)
    return tuple(found)
