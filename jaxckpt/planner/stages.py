"""Stages: the function cut into a chain where few bytes are live.

A cut lies between two dear operations, where the least bytes cross, if no more cross there than between the neighbouring ones: in a
transformer between the halves of a block, where only the residual stream is live, not between attention's scores and its context. A scan is
a stage of its own. The stage that needs most at once is cut again where that makes it need less, whatever crosses there (`planner/model.py`).
What crosses several cuts (U-Net's skips, a mask that all blocks share) is carried; see `jaxckpt.planner.chain`.

Equal stretches have equal digests, so that 48 equal blocks are analysed once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxckpt import _compat
from jaxckpt.core.graph import Body, Graph, Op, stable
from jaxckpt.memory.residuals import is_inexact
from jaxckpt.planner.costs import is_dear

MOST = 52
"""So many stages are planned for one by one; of more, neighbours are joined."""


@dataclass(frozen=True)
class Stretch:
    """Some operations in a row, and what goes in and comes out (indices of values, in order of first use)."""

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def active_values(graph: Graph, differentiated: Collection[int]) -> frozenset[int]:
    """Returns the values that the derivative passes through: computed from differentiated arguments, and of an inexact dtype.

    Args:
      differentiated: the indices of values that are differentiated in.
    """
    active = set(differentiated)
    spread(graph, graph.body, active)
    return frozenset(active)


def spread(graph: Graph, body: Body, active: set[int]) -> None:
    """Adds to `active` what the operations of a body compute from it, and can be differentiated."""
    for op in body.ops:
        if op.primitive == "stop_gradient" or not active.intersection(op.inputs):
            continue
        active.update(index for index in op.outputs if is_inexact(graph.values[index]))


def last_uses(graph: Graph) -> dict[int, int]:
    """Returns for each value that is used the place of the last operation that uses it; len(graph.ops) for results."""
    last = {index: place for place, op in enumerate(graph.ops) for index in op.inputs}
    return last | {index: len(graph.ops) for index in graph.body.outputs if index is not None}


def stretch(graph: Graph, start: int, stop: int, last: Mapping[int, int]) -> Stretch:
    """Returns the operations start..stop with their inputs and outputs; `last` as of `last_uses`."""
    ops = graph.ops[start:stop]
    made = {index for op in ops for index in op.outputs}
    inputs = dict.fromkeys(index for op in ops for index in op.inputs if index not in made)
    return Stretch(ops, tuple(inputs), tuple(i for op in ops for i in op.outputs if last.get(i, -1) >= stop))


def crossing(graph: Graph) -> list[int]:
    """Returns for each cut 0..len(ops) the bytes of intermediate values that are live there."""
    last = last_uses(graph)
    change = [0] * (len(graph.ops) + 2)
    for place, op in enumerate(graph.ops):
        for index in op.outputs:
            if index in last:
                change[place + 1] += graph.values[index].bytes
                change[min(last[index], len(graph.ops)) + 1] -= graph.values[index].bytes
    live, at = [], 0
    for step in change[:-1]:
        at += step
        live.append(at)
    return live


def cuts(graph: Graph) -> list[int]:
    """Returns where the stages begin and end: 0, ..., len(graph.ops)."""
    live = crossing(graph)
    gaps = _gaps(graph, live)
    narrow = []
    for i, place in enumerate(gaps):
        around = [live[gaps[j]] for j in (i - 1, i + 1) if 0 <= j < len(gaps)]
        if all(live[place] <= other for other in around):
            narrow.append(place)
    loops = [p for place, op in enumerate(graph.ops) if is_scan(op) for p in (place, place + 1)]
    return sorted({0, *narrow, *loops, len(graph.ops)})


def within(graph: Graph, start: int, stop: int) -> list[int]:
    """Returns where a stage start..stop can be cut: between each two dear operations in it, where least crosses."""
    return [place for place in _gaps(graph, crossing(graph)) if start < place < stop]


def _gaps(graph: Graph, live: Sequence[int]) -> list[int]:
    """Returns for each two dear operations in a row the place between them where least crosses."""
    dear = [place for place, op in enumerate(graph.ops) if is_dear(op)]
    return [min(range(a + 1, b + 1), key=lambda p: (live[p], p)) for a, b in itertools.pairwise(dear)]


def is_scan(op: Op) -> bool:
    """Whether an operation is a loop that is planned for as a loop: a scan with something dear in it."""
    return op.primitive == "scan" and op.params["length"] > 1 and is_dear(op)


def join(graph: Graph, places: list[int], digest: Callable[[int, int], str], most: int = MOST) -> list[int]:
    """Returns fewer cuts where there are more than `most` stages: neighbours joined in pairs, in the way that leaves most of them equal."""
    while len(places) - 1 > most:
        stages = list(itertools.pairwise(places))
        alike = []
        for offset in (0, 1):
            joined = _pairs(graph, stages, offset)
            alike.append((len({digest(a, b) for a, b in joined}), offset, joined))
        best = min(alike)[2]
        if len(best) == len(stages):
            break
        places = [0, *(b for _, b in best)]
    return places


def _pairs(graph: Graph, stages: list[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
    joined, at = stages[:offset], offset
    while at < len(stages):
        start, stop = stages[at]
        if at + 1 < len(stages) and not any(is_scan(op) for op in graph.ops[start : stages[at + 1][1]]):
            joined.append((start, stages[at + 1][1]))
            at += 2
        else:
            joined.append((start, stop))
            at += 1
    return joined


def digest(graph: Graph, part: Stretch, active: Collection[int], numbers: dict[int, int]) -> str:
    """Returns a text that is equal for stretches that do the same to arrays of the same shapes, wherever they stand.

    Fills `numbers`, value -> number: values of equal stretches with the same number correspond.
    """

    def number(index: int) -> int:
        return numbers.setdefault(index, len(numbers))

    hashed = hashlib.sha256()

    def write(ops: Sequence[Op]) -> None:
        for op in ops:
            values = [graph.values[index] for index in (*op.inputs, *op.outputs)]
            kinds = [(number(v.index), v.shape, str(v.dtype), v.index in active) for v in values]
            params = {name: stable(param) for name, param in sorted(op.params.items())}
            literals = [isinstance(var, _compat.Literal) for var in op.equation.invars]
            hashed.update(f"{op.primitive}{kinds}{params}{literals};".encode())
            for body in op.bodies:
                write(body.ops)

    write(part.ops)
    hashed.update(repr([number(index) for index in part.outputs]).encode())
    return hashed.hexdigest()
