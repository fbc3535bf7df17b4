"""Seconds of the collectives that the compiler puts into a program of its own, given to the operations that they serve.

They are read from the first program that is compiled: the step without a plan, or, where that does not fit the target,
the step under the leanest plan. A collective carries the name and the source line of its operation. So it is known
whether it runs in the forward pass, where a region that runs again runs it again, or in the backward pass, where each
plan runs it once.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxckpt.core import primitives
from jaxckpt.core.graph import Graph, Op
from jaxckpt.memory.collectives import CompiledCollective
from jaxckpt.memory.targets import Target

Served = tuple[str, str, bool]
"""How a compiled program names an operation: primitive, "file.py:line", whether it is of a backward pass."""

_RECOMPUTED = "rematted_computation"
_BACKWARD = "transpose("
_NAMED = frozenset(name for name, facts in primitives.TABLE.items() if facts.collective)
_LINE = re.compile(r"[^/\\]+:\d+")


@dataclass(frozen=True)
class Sent:
    """What devices wait for one another, by the link's rate; collectives that the program names do not count.

    Attributes:
      rates: place of an operation -> seconds of one execution for each byte of it (see `_size`).
      elsewhere: seconds, in one run of the step, of collectives of which the compiler does not say what they serve:
        sums of gradients, as a rule.
    """

    rates: Mapping[Served, float] = field(default_factory=dict)
    elsewhere: float = 0.0

    def seconds(self, graph: Graph, op: Op) -> float:
        """Returns the seconds of one execution of an operation."""
        rate = self.rates.get(place_of(graph, op), 0.0) if self.rates else 0.0
        return rate * _size(graph, op) if rate else 0.0


NOTHING = Sent()
"""On one device, or where nothing was compiled yet."""


def sent(found: Iterable[CompiledCollective], graph: Graph, target: Target, planned: bool) -> Sent:
    """Returns what operations wait for other devices.

    Args:
      found: the collectives of a compiled step.
      graph: the step as traced, without a plan; its values' bytes are those on one device.
      target: its link's rate makes seconds of bytes.
      planned: whether the compiled step has a plan: what its regions run again is none of the step without one.
    """
    sizes: collections.Counter[Served] = collections.Counter()
    for op in graph.walk():
        if not op.bodies:
            sizes[place_of(graph, op)] += op.repeats * _size(graph, op)
    rates: dict[Served, float] = collections.defaultdict(float)
    elsewhere = 0.0
    for each in found:
        if planned and _RECOMPUTED in each.operation:
            continue
        line = _LINE.search(each.source)
        place = (
            each.operation.rpartition("/")[2],
            line[0] if line else "",
            _BACKWARD in each.operation,
        )
        taken = each.runs * each.sent_bytes / target.link_bandwidth
        if place[0] in _NAMED:
            continue  # the program names it, and the rates count it
        if place in sizes:
            rates[place] += taken / sizes[place]
        else:
            elsewhere += taken
    return Sent(dict(rates), elsewhere)


def place_of(graph: Graph, op: Op) -> Served:
    """Returns how a compiled program names an operation."""
    line = _LINE.search(op.source)
    return op.primitive, line[0] if line else "", op.index in graph.backward


def _size(graph: Graph, op: Op) -> int:
    """Returns what operations of one line share its collectives by: the bytes of operands and results; of a value that
    is laid out anew, the bytes that a device gains.
    """
    given, made = (sum(graph.values[index].bytes for index in ends) for ends in (op.inputs, op.outputs))
    return max(made - given, 1) if primitives.of(op.primitive).lays_out else max(given + made, 1)
