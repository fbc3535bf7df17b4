"""Plans of a function that takes a gradient itself and runs blocks of that gradient's forward pass again: see
`jaxckpt.core.again`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from jaxckpt.core.graph import Graph
from jaxckpt.core.plan import Plan
from jaxckpt.core.regions import RecomputedStretch
from jaxckpt.planner import hand_written, stages
from jaxckpt.planner.solvers.optimal import Optimal
from jaxckpt.planner.tiled import Tileable, Within, of_function

Again = tuple[RecomputedStretch, ...]
"""What a function runs again."""
Recomputing = TypeVar("Recomputing", bound=Tileable)


def ways(graph: Graph) -> list[Again]:
    """Returns what can run again of a function that takes a gradient, in several ways: its blocks; the calls of the
    user's functions; what lies between places where little crosses. Each runs in front of the first operation of that
    gradient's backward pass that reads what it made. None of what has side effects, or lies in a body inside of the
    function.
    """
    forward = [place for place, op in enumerate(graph.ops) if op.index not in graph.backward]
    if len(forward) == len(graph.ops):
        return []
    # As if there were no backward pass: what it reads crosses every place in between.
    alone = replace(graph, body=replace(graph.body, ops=tuple(graph.ops[place] for place in forward), outputs=()))
    blocks = stages.series(alone)
    ends = sorted({end for each in blocks for end in each})
    cuts = [
        [pair for each in blocks for pair in itertools.pairwise(each)],
        *stages.calls(alone),
        list(itertools.pairwise(stages.cuts(alone, ends))),
    ]
    found = []
    for pairs in cuts:
        stretches = [(forward[start], forward[stop - 1] + 1, stop - start) for start, stop in pairs if start < stop]
        whole = [(start, stop) for start, stop, size in stretches if stop - start == size]  # all of it is forward
        found.append(tuple(_read_later(graph, whole)))
    return [each for each in dict.fromkeys(found) if each]


def _read_later(graph: Graph, stretches: Iterable[tuple[int, int]]) -> Iterator[RecomputedStretch]:
    backward = [place for place, op in enumerate(graph.ops) if op.index in graph.backward]
    for start, stop in stretches:
        ops = graph.ops[start:stop]
        if any(op.equation.effects for op in ops):
            continue
        own = {index for op in ops for index in op.outputs}
        later = (place for place in backward[bisect.bisect_left(backward, stop) :])
        at = next((place for place in later if not own.isdisjoint(graph.ops[place].inputs)), None)
        if at is not None:
            yield RecomputedStretch(start, stop, at)


class InnerGradients(Generic[Recomputing]):
    """The problems of a function that runs parts of it again, each made once.

    Args:
      problem: of the function.
      make: returns the problem of the function that runs these parts again.
    """

    def __init__(self, problem: Tileable, make: Callable[[Again], Recomputing]) -> None:
        self.problem, self._make = problem, make
        self.made: dict[Again, Recomputing] = {}

    @functools.cached_property
    def ways(self) -> list[Again]:
        """What can run again: see `ways`."""
        return [] if self.problem.model.address else ways(self.problem.graph)

    def problems(self, budget: int) -> Iterator[tuple[Again, Recomputing]]:
        """Yields what runs again, and the problem of the function that runs it again, the leanest by the estimates of
        their leanest plans first: those that are not far above a budget, and the first one in any case.
        """
        leanest: dict[Again, int] = {}
        for again in self.ways:
            if again not in self.made:
                self.made[again] = self._make(again)
            made = self.made[again]
            if (least := made.solver(Optimal.name).least(made.model.chain)) is not None:
                leanest[again] = made.estimate(least)
        for place, again in enumerate(sorted(leanest, key=lambda each: leanest[each])):
            if not place or leanest[again] <= hand_written.most_overstated(self.made[again]) * budget:
                yield again, self.made[again]

    def recall(self, within: Within) -> list[Plan]:
        """Returns, for each way, the cheapest plan that was compiled, for whatever budget, and fits."""
        plans = [(again, made.recall(within.budget, within.solver)) for again, made in list(self.made.items())]
        return [self.told(plan, again) for again, plan in plans if plan is not None]

    def told(self, plan: Plan, again: Again) -> Plan:
        """Returns a plan of the function that runs parts of it again as one of the function itself."""
        told = of_function(self.problem, plan, recomputed=again)
        return replace(told, overhead=told.slowdown).plan
