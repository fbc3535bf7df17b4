"""Bytes spent one step at a time where they save the most seconds.

It begins with the option of each stage that keeps the fewest bytes or, where that does not fit, with the lean segments of the solver `sqrt` that
peak lowest. Then it takes, as long as the budget holds, the change that saves the most seconds for each byte: another option of a stage, or a
segment that is not dropped any more. Knapsack's greedy rule (Dantzig 1957): no guarantee, for a change never undoes another one, spans of
several stages are never kept as one, and nothing is nested twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxckpt.planner.chain import Chain, Drop, Keep, Schedule, cost
from jaxckpt.planner.solvers.base import Infeasible, Solver
from jaxckpt.planner.solvers.sqrt import leanest, segmented, single


class Greedy(Solver):
    """Knapsack's greedy rule."""

    name = "greedy"

    def schedule(self, chain: Chain, budget: int) -> Schedule | Infeasible:
        """Returns a schedule that peaks at no more than `budget` bytes, if it finds one."""
        schedule: Schedule = single(chain, leanest)
        if cost(chain, schedule).peak > budget:
            schedule = min(segmented(chain), key=lambda each: cost(chain, each).peak)  # `single` is among them
            if (peak := cost(chain, schedule).peak) > budget:
                return Infeasible(peak, schedule)
        return _improved(chain, schedule, budget)


def _improved(chain: Chain, schedule: Schedule, budget: int) -> Schedule:
    """Returns a schedule that fits with the changes that save time, as long as they fit too."""
    refused: set[tuple[Keep | Drop, Schedule]] = set()  # what was over the budget once is not tried again: room shrinks
    while True:
        changes = [change for change in _changes(chain, schedule) if (change[1], change[2]) not in refused]
        for _, old, new in sorted(changes, key=lambda change: -change[0]):
            changed = _replaced(schedule, old, new)
            if cost(chain, changed).peak <= budget:
                schedule = changed
                break
            refused.add((old, new))
        else:
            return schedule


def _changes(chain: Chain, items: Schedule) -> Iterator[tuple[float, Keep | Drop, Schedule]]:
    """Yields (seconds saved for each byte, item, what takes its place) for every change that saves time."""
    for item in items:
        span = chain.span(item.start, item.stop)
        if isinstance(item, Drop):
            held = sum(
                chain.span(each.start, each.stop).options[each.option].kept
                for each in item.again
                if isinstance(each, Keep)
            )
            held += sum(chain.output(each.start, each.stop, item.stop) for each in item.again)
            yield _rate(span.forward_time, held), item, item.again
            yield from _changes(chain, item.again)
            continue
        now = span.options[item.option]
        for number, option in enumerate(span.options):
            if option.time < now.time:
                yield (
                    _rate(now.time - option.time, option.kept - now.kept),
                    item,
                    (Keep(item.start, item.stop, number),),
                )


def _rate(seconds: float, held: int) -> float:
    return seconds / held if held > 0 else float("inf")


def _replaced(items: Schedule, old: Keep | Drop, new: Schedule) -> Schedule:
    """Returns the schedule with `new` in the place of `old`, wherever it stands; stages stand in one place only as Keep."""
    found: list[Keep | Drop] = []
    for item in items:
        if item == old:
            found += new
        elif isinstance(item, Drop) and item.start <= old.start and old.stop <= item.stop:
            found.append(Drop(item.start, item.stop, _replaced(item.again, old, new)))
        else:
            found.append(item)
    return tuple(found)
