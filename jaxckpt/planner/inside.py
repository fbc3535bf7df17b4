"""Which of a function's bodies is planned: its own, or that of a `jax.shard_map` that holds most of its memory.

A training step that is written for one device of many (its blocks gather their weights, its loss is a mean over
devices) is one operation, seen from outside. What it maps is a program like any other: what is planned is that one, in
bytes of one device, and the plan's regions and loops are given its address. So it is with a `jax.jit` that says how
arrays lie, which stays a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from jaxckpt import _compat
from jaxckpt.core import primitives
from jaxckpt.core.constants import INNERMOST_SHARE
from jaxckpt.core.graph import Graph, Op
from jaxckpt.core.primitives import Holds
from jaxckpt.core.regions import Address
from jaxckpt.planner import stages
from jaxckpt.planner.held import fed, program_of

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Inside:
    """A body that is planned.

    Attributes:
      graph: this body as a function: see `jaxckpt.planner.held.program_of`.
      differentiated: the values that go into it and are differentiated in.
      results: those that come out of it and are differentiated.
      address: where it lies in the function.
      around: the operations that it lies in, the outermost first.
      outside_bytes: of the values that the function computes around it, on one device.
      outer: the `jax.shard_map` of the step, in which the function is called; None for none.
    """

    graph: Graph
    differentiated: tuple[int, ...]
    results: tuple[int, ...]
    address: Address = ()
    around: tuple[Op, ...] = ()
    outside_bytes: int = 0
    outer: _compat.Mapped | None = None

    @property
    def mapped(self) -> bool:
        """Whether it is what one device of several runs."""
        return self.outer is not None or any(_is_mapped(op) for op in self.around)

    @property
    def active(self) -> frozenset[int]:
        """The values that the derivative passes through."""
        return stages.active_values(self.graph, self.differentiated, self.results)

    def run(self, fun: Callable[[], Returned]) -> Returned:
        """Returns what `fun()` returns, called where the body can be traced: its mapped axes are there."""
        for op in reversed(self.around):
            if _is_mapped(op):
                fun = _entered(op, fun)
        return fun() if self.outer is None else self.outer.run(fun)


def whole(
    graph: Graph,
    differentiated: Collection[int],
    results: Iterable[int | None] | None = None,
    outer: _compat.Mapped | None = None,
) -> Inside:
    """Returns a function, or a body as one, that is planned as it stands.

    Args:
      differentiated: as of `Inside`.
      results: as of `Inside`; None for all that comes out.
      outer: as of `Inside`.
    """
    out = graph.body.outputs if results is None else results
    return Inside(graph, tuple(differentiated), tuple(index for index in out if index is not None), outer=outer)


def innermost(found: Inside, share: float = INNERMOST_SHARE) -> Inside:
    """Returns the innermost body that holds most of what a function computes.

    Args:
      found: the function as traced.
      share: a body counts if it computes more than this share of the bytes.
    """
    while (op := _largest(found.graph)) is not None:
        held, rest = _computed(found.graph, op), _around(found.graph, op)
        if held <= share * (held + rest):
            break
        active = found.active
        body = op.bodies[0]
        ends = zip(body.outputs, op.outputs, strict=True)
        found = Inside(
            program_of(found.graph, op),
            fed(found.graph, found.graph.body, op, body, active),
            tuple(index for index, outer in ends if index is not None and outer in active),
            (*found.address, (op.index, 0)),
            (*found.around, op),
            found.outside_bytes + rest,
            found.outer,
        )
    return found


def _is_mapped(op: Op) -> bool:
    return primitives.of(op.primitive).holds is Holds.MAPPED


def _entered(op: Op, fun: Callable[[], Returned]) -> Callable[[], Returned]:
    return lambda: _compat.run_mapped(op.equation, fun)


def _largest(graph: Graph) -> Op | None:
    """Returns the mapped operation, or call, that holds most; None where there is none."""
    whole = [
        op for op in graph.ops if _is_mapped(op) or (primitives.of(op.primitive).holds is Holds.CALL and op.bodies)
    ]
    return max(whole, key=lambda op: _computed(graph, op), default=None)


def _around(graph: Graph, op: Op) -> int:
    """Returns the bytes of what is computed around an operation, on one device."""
    devices = math.prod(_compat.mapped_sizes(op.equation)) if _is_mapped(op) else 1
    others = [other for other in graph.ops if other is not op]
    mapped = sum(_computed(graph, other) for other in others if _is_mapped(other))  # is of one device as it stands
    return mapped + sum(_computed(graph, other) for other in others if not _is_mapped(other)) // devices


def _computed(graph: Graph, op: Op) -> int:
    """Returns the bytes that an operation computes, those inside of it counted in place of its results."""
    if op.bodies:
        return sum(_computed(graph, inner) for body in op.bodies for inner in body.ops)
    return sum(graph.values[index].bytes * graph.values[index].repeats for index in op.outputs)
