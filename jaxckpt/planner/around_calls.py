"""Checkpoints around the calls of the user's functions, which people put there in any model: where its blocks do not
repeat, nothing else says what a block is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxckpt.actions import SAVE
from jaxckpt.core.constants import OVERSTATED, TINIEST, TINY
from jaxckpt.core.graph import Op
from jaxckpt.core.plan import Plan
from jaxckpt.core.regions import Region
from jaxckpt.planner import hand_written
from jaxckpt.planner.measured import Measured, Traced
from jaxckpt.planner.model import BLOCK_PRESETS
from jaxckpt.policies import PRESETS

CallEnds = tuple[tuple[int, int], ...]
"""Where each of some calls begins and ends: one of the ways of `stages.calls`."""


Called = TypeVar("Called", bound=Measured)


@dataclass(frozen=True)
class AroundCalls(Generic[Called]):
    """The program cut at calls.

    Attributes:
      calls: these.
      problem: makes its problem, once.
      traced: preset, "" for none -> the step with checkpoints around them, as traced; filled in.
    """

    calls: CallEnds
    problem: Callable[[], Called]
    traced: dict[str, Traced] = field(default_factory=dict, compare=False)


class Likely(Generic[Called]):
    """Which calls to put checkpoints around, by traces of the step with these.

    Args:
      problem: of the program as it was cut at first; its budget.
      ways: the calls of each way.
    """

    def __init__(self, problem: Measured, budget: int, ways: Sequence[AroundCalls[Called]]) -> None:
        self.problem, self.budget, self.left = problem, budget, list(ways)

    def next(self, best: float | None) -> AroundCalls[Called] | None:
        """Returns the way to be searched next, each once; None where none is likely to give a plan that takes less.

        Args:
          best: what the best plan so far adds to the step; None where nothing fits, and so the leanest way is next.
        """
        if not self.left:
            return None
        if self.problem.divided:  # a trace of several devices does not say what one holds
            return self.left.pop(0) if best is None else None
        order = self._leanness if best is None else self._least
        likely = {place: order(way) for place, way in enumerate(self.left)}
        place = min(likely, key=lambda each: likely[each])
        margin = (TINIEST if self.problem.model.quick else TINY) * self.problem.plain.time.effort
        if likely[place] >= (math.inf if best is None else best - margin):
            return None
        return self.left.pop(place)

    def _leanness(self, way: AroundCalls[Called]) -> float:
        """Returns the estimated peak with checkpoints that keep nothing; infinity where it is far above the budget, on
        any platform: nothing else fits, and what is called infeasible is to be compiled.
        """
        peak = self._look(way).peak_bytes
        return peak if peak <= OVERSTATED * self.budget else math.inf

    def _least(self, way: AroundCalls[Called]) -> float:
        """Returns the least that checkpoints which may fit add to the step; infinity where none may. Where each trace
        takes time, only those that keep nothing are looked at.
        """
        limit = hand_written.most_overstated(self.problem) * self.budget
        if self._look(way).peak_bytes > limit:
            return math.inf
        presets = BLOCK_PRESETS if self.problem.model.quick else ()
        traced = [self._look(way), *(self._look(way, name) for name in presets)]
        added = [each.time.effort - self.problem.plain.time.effort for each in traced if each.peak_bytes <= limit]
        return min(added)

    def _look(self, way: AroundCalls[Called], preset: str = "") -> Traced:
        """Returns the step with a checkpoint around each call, as traced; a `preset` says what they keep."""
        if preset not in way.traced:
            way.traced[preset] = self.problem.look(around(self.problem, way.calls, preset))
        return way.traced[preset]


def around(problem: Measured, calls: CallEnds, preset: str = "") -> Plan:
    """Returns the plan with a checkpoint around each call, as people write it; a `preset` says what they keep."""
    model = problem.model
    kept = PRESETS[preset].decide(model.graph) if preset else {}
    made = []
    for start, stop in calls:
        within = set(_values(model.graph.ops[start:stop]))
        made.append(Region(start, stop, {index: SAVE for index in kept if index in within}, body=model.address))
    return Plan(tuple(made), model.fingerprint, pools_apart=model.pools_apart)


def _values(ops: Sequence[Op]) -> Iterator[int]:
    for op in ops:
        yield from op.outputs
        for body in op.bodies:
            yield from _values(body.ops)
