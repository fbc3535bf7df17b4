"""Which values to keep at a price per byte: a minimum cut.

Every value that the backward pass needs must be there: kept, which costs its bytes times the price, or computed again,
which costs its operation's seconds and needs the operands to be there. Of several ways to keep a value (compressed, on
the host) the one that costs least at that price counts, its own seconds included, so that the problem stays a cut. With
a variable for "value is there" and one for "operation runs again" it is a cut of a graph with two nodes for each; D.
Greig et al. 1989 for such energies, A. Jain et al. 2020 (Checkmate, arXiv:1910.02653) for the problem, for which this
is the part without the order in time. All prices together give the convex hull of (bytes, seconds).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.actions import SAVE, Action
from jaxckpt.core.constants import CUTS

_SCALE = 2**30
"""The sum of all capacities: scipy's maximum flow is of 32-bit integers."""
_NEVER = 2**31 - 1
_CHEAPEST = 1e-6


@dataclass(frozen=True)
class Node:
    """An operation that could run again.

    Attributes:
      inputs, outputs: keys of values.
      seconds: of one run, weighed as `planner.costs.Time.effort`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Storage:
    """One way to keep a value.

    Attributes:
      action: by which it is kept.
      bytes: that it takes.
      seconds: of storing it and bringing it back.
    """

    action: Action
    bytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Cut:
    """What is kept and how, what runs again (places in the list of operations), and what that costs."""

    kept: Mapping[int, Action]
    again: tuple[int, ...]
    bytes: int
    seconds: float


def hull(
    operations: Sequence[Node],
    needed: Collection[int],
    ways: Mapping[int, Sequence[Storage]],
    free: Collection[int] = (),
    most: int = CUTS,
) -> list[Cut]:
    """Returns the convex hull of kept bytes and seconds of recomputation, the least bytes first.

    Args:
      operations: in an order in which they can run.
      needed: keys of the values that have to be there; what no operation makes is there.
      ways: of the values that can be kept, how.
      free: values that are saved anyway, at no cost.
      most: so many cuts at most.
    """
    problem = _Problem(operations, needed, _with_free(ways, free))
    least, fastest = problem.solve(float("inf")), problem.solve(0.0)
    found = [least]
    _between(problem, least, fastest, found, most)
    if (fastest.bytes, fastest.seconds) != (least.bytes, least.seconds):
        found.append(fastest)
    return found


def of_values(
    operations: Sequence[Node],
    needed: Collection[int],
    ways: Mapping[int, Sequence[Storage]],
    kept: Collection[int],
    free: Collection[int] = (),
) -> Cut:
    """Returns the cut that keeps those of some values that are of use, each in its fastest way, and no others.

    Args:
      operations, needed, ways, free: as of `hull`.
      kept: keys of the values; those that cannot be kept are computed again.
    """
    problem = _Problem(operations, needed, _with_free(ways, free))
    best = {key: min(each, key=lambda way: (way.seconds, way.bytes)) for key, each in problem.ways.items()}
    there = {*kept, *free}
    stays = lambda op: not there.isdisjoint(op.outputs) and all(key in best for key in op.outputs)
    return problem.cut([place for place, op in enumerate(operations) if not stays(op)], best)


def _with_free(ways: Mapping[int, Sequence[Storage]], free: Collection[int]) -> Mapping[int, Sequence[Storage]]:
    return {key: [Storage(SAVE, 0)] if key in free else each for key, each in ways.items()}


def _between(problem: _Problem, left: Cut, right: Cut, found: list[Cut], most: int) -> None:
    """Adds the cuts of the hull between two of them, in order."""
    stack: list[Cut | tuple[Cut, Cut]] = [(left, right)]
    solved = 0
    while stack:
        item = stack.pop()
        if isinstance(item, Cut):
            found.append(item)
            continue
        a, b = item
        more, less = b.bytes - a.bytes, a.seconds - b.seconds
        if more <= 0 or less <= 0 or solved >= most:
            continue
        solved += 1
        middle = problem.solve(less / more)
        line = a.seconds - less * (middle.bytes - a.bytes) / more
        if a.bytes < middle.bytes < b.bytes and middle.seconds < line * (1 - 1e-9):
            stack += [(middle, b), middle, (a, middle)]


class _Problem:
    """The cut for one price; nodes are values "there", then operations "again", then source and sink."""

    def __init__(
        self, operations: Sequence[Node], needed: Collection[int], ways: Mapping[int, Sequence[Storage]]
    ) -> None:
        self.operations, self.ways = operations, ways
        self.needed = list(dict.fromkeys(needed))
        maker = {key: place for place, op in enumerate(operations) for key in op.outputs}
        self.maker = maker
        self.keys = {key: node for node, key in enumerate(maker)}
        self.source = len(self.keys) + len(operations)
        self.sink = self.source + 1

    def solve(self, price: float) -> Cut:
        """Returns the cheapest cut: seconds + price x bytes. 0 asks for the fewest seconds, infinity for the fewest
        bytes.
        """
        times = np.array([op.seconds for op in self.operations] or [0.0])
        sizes = np.array([max((way.bytes for way in self.ways.get(key, ())), default=0) for key in self.keys] or [0])
        if price == 0.0:
            price = _CHEAPEST * (times.sum() or 1.0) / max(int(sizes.sum()), 1)
        elif price == float("inf"):
            price = (times.sum() or 1.0) / _CHEAPEST / max(int(sizes.sum()), 1)
        best = {key: min(self.ways[key], key=lambda way: _cost(way, price)) for key in self.keys if key in self.ways}
        costs = {key: _cost(way, price) for key, way in best.items()}
        total = times.sum() + sum(costs.values())
        scale = _SCALE / total if total else 0.0
        edges: dict[tuple[int, int], int] = {}
        for key, node in self.keys.items():
            again = len(self.keys) + self.maker[key]
            edges[node, again] = round(scale * costs[key]) if key in costs else _NEVER
        for place, op in enumerate(self.operations):
            again = len(self.keys) + place
            edges[again, self.sink] = round(scale * op.seconds) + 1
            for key in op.inputs:
                if key in self.keys:
                    edges[again, self.keys[key]] = _NEVER
        for key in self.needed:
            if key in self.keys:
                edges[self.source, self.keys[key]] = _NEVER
        return self.cut(self._runs_again(edges), best)

    def _runs_again(self, edges: Mapping[tuple[int, int], int]) -> set[int]:
        # Imported where it is used: it takes a third of what `import jaxckpt` takes beside JAX.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        rows, columns = np.array(list(edges), np.int32).reshape(-1, 2).T
        capacity = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape=(self.sink + 1,) * 2)
        flow = maximum_flow(capacity, self.source, self.sink).flow
        rest = capacity - flow
        rest.data = np.where(rest.data > 0, rest.data, 0)
        rest.eliminate_zeros()
        reached = breadth_first_order(rest, self.source, return_predecessors=False)
        return {int(node) - len(self.keys) for node in reached if len(self.keys) <= node < self.source}

    def cut(self, again: Collection[int], best: Mapping[int, Storage]) -> Cut:
        """Returns what has to be kept, in the best way, if these operations, where they are of use, run again."""
        kept, runs = set(), set()
        waiting = [key for key in self.needed if key in self.keys]
        seen = set(waiting)
        while waiting:
            key = waiting.pop()
            place = self.maker[key]
            if place not in again:
                kept.add(key)
                continue
            if place in runs:
                continue
            runs.add(place)
            more = [other for other in self.operations[place].inputs if other in self.keys and other not in seen]
            seen.update(more)
            waiting += more
        ways = {key: best[key] for key in sorted(kept)}
        return Cut(
            {key: way.action for key, way in ways.items()},
            tuple(sorted(runs)),
            sum(way.bytes for way in ways.values()),
            float(sum(self.operations[place].seconds for place in runs) + sum(way.seconds for way in ways.values())),
        )


def _cost(way: Storage, price: float) -> float:
    return price * way.bytes + way.seconds


def cheapest_first(cuts: Iterable[Cut]) -> list[Cut]:
    """Returns the cuts that no other beats in both bytes and seconds, the least bytes first."""
    best: list[Cut] = []
    for cut in sorted(cuts, key=lambda c: (c.bytes, c.seconds)):
        if not best or cut.seconds < best[-1].seconds:
            best.append(cut)
    return best
