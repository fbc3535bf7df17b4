"""What a stretch can keep of the programs that its operations hold: branches and short loops.

A region's checkpoint runs such an operation again, but for what is kept of its programs. Each program has candidates as
a stretch has. At a price per byte each program keeps what costs it least, and several prices give several levels, from
nothing to all that spares time. What a level takes together with what is around it, JAX says itself: see
`jaxckpt.planner.candidates`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from jaxckpt import _compat
from jaxckpt.actions import Action
from jaxckpt.core import primitives
from jaxckpt.core.constants import LEVELS
from jaxckpt.core.graph import Body, Graph, Op
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.primitives import Holds
from jaxckpt.planner.chain import Candidate

Program = tuple[Op, Body, frozenset[int]]
"""An operation, a program that it holds, and that program's values that the derivative passes through."""


def programs(graph: Graph, body: Body, start: int, stop: int, active: Collection[int]) -> list[Program]:
    """Returns the programs that the operations start..stop of a body hold, those that are differentiated and in which
    values can be kept.

    Args:
      active: values of the body that the derivative passes through.
    """
    found = []
    for op in body.ops[start:stop]:
        facts = primitives.of(op.primitive)
        if facts.holds not in (Holds.BRANCHES, Holds.LOOP) or facts.opaque:
            continue
        if not any(index in active for index in op.outputs):
            continue
        found += [(op, inner, active_in(graph, body, op, inner, active)) for inner in op.bodies]
    return found


def active_in(graph: Graph, around: Body, op: Op, body: Body, active: Collection[int]) -> frozenset[int]:
    """Returns the values of a program that the derivative passes through. What one iteration of a loop makes so, the
    next one starts with.

    Args:
      around: the body that the operation lies in.
      op: the operation.
      body: the program, one of those it holds.
      active: values of `around` that the derivative passes through.
    """
    operands = op.equation.invars[len(op.equation.invars) - len(body.inputs) :]
    outer = [None if isinstance(v, _compat.Literal) else around.values.get(v) for v in operands]
    inside = {inner for inner, index in zip(body.inputs, outer) if index in active}
    spread(graph, body, inside)
    if primitives.of(op.primitive).holds is not Holds.LOOP:
        return frozenset(inside)
    consts, carries = _compat.num_scan_consts_carry(dict(op.params))
    starts = body.inputs[consts : consts + carries]
    while more := {start for start, end in zip(starts, body.outputs) if end in inside and start not in inside}:
        inside |= more
        spread(graph, body, inside)
    return frozenset(inside)


def is_flat(graph: Graph, op: Op) -> bool:
    """Returns whether no derivative passes through an operation; see `primitives.is_flat`."""
    return any(primitives.is_flat(op.primitive, graph.values[index].dtype) for index in op.inputs[:1])


def spread(graph: Graph, body: Body, active: set[int]) -> None:
    """Adds to `active` what the operations of a body compute from it, and can be differentiated."""
    for op in body.ops:
        if is_flat(graph, op) or not active.intersection(op.inputs):
            continue
        active.update(index for index in op.outputs if is_inexact(graph.values[index]))


def fed(graph: Graph, around: Body, op: Op, body: Body, active: Collection[int]) -> tuple[int, ...]:
    """Returns the inputs of a program that it is differentiated in; arguments as of `active_in`."""
    inside = active_in(graph, around, op, body, active)
    return tuple(index for index in body.inputs if index in inside and is_inexact(graph.values[index]))


def program_of(graph: Graph, op: Op) -> Graph:
    """Returns the program that an operation holds as a function: its operations are the graph's, its values are
    numbered as before.
    """
    body = op.bodies[0]
    parameter, place = body.param
    program = op.params[parameter] if place is None else op.params[parameter][place]
    closed = _compat.close_jaxpr(body.jaxpr, _compat.jaxpr_consts(program))
    return replace(graph, body=body, jaxpr=closed, in_tree=None, out_tree=None)


def values(found: Sequence[Program]) -> Iterator[int]:
    """Yields the values of programs, and of those inside of them, that can be kept."""
    for _, body, _ in found:
        yield from _made(body)


def _made(body: Body) -> Iterator[int]:
    for op in body.ops:
        yield from op.outputs
        for inner in op.bodies:
            yield from _made(inner)


def levels(
    found: Sequence[Program], candidates: Callable[[Body, frozenset[int]], Sequence[Candidate]]
) -> list[Mapping[int, Action]]:
    """Returns what programs keep, from nothing to all that spares time.

    Args:
      found: as of `programs`.
      candidates: returns the candidates of a program that no other beats, the fewest bytes first, given the values
        that the derivative passes through.
    """
    hulls = [candidates(body, active) for _, body, active in found]
    prices = sorted(
        {(a.time - b.time) / (b.kept - a.kept) for each in hulls for a, b in pairwise(each) if b.kept > a.kept},
        reverse=True,
    )
    if len(prices) > LEVELS:
        prices = [prices[round(i * (len(prices) - 1) / (LEVELS - 1))] for i in range(LEVELS)]
    made: list[Mapping[int, Action]] = [{}]
    for price in prices:
        cost = functools.partial(_cost, price)
        made.append({index: action for each in hulls for index, action in min(each, key=cost).how.items()})
    return [level for place, level in enumerate(made) if level not in made[:place]]


def _cost(price: float, way: Candidate) -> tuple[float, int]:
    return way.time + 0.999 * price * way.kept, way.kept  # at the price itself, the one that keeps more
