"""Several schedules one after the other: the first iterations of a scan run in one way, the next ones in another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxckpt._errors import PlanMismatchError
from jaxckpt.core.regions import set_fields, whole
from jaxckpt.core.scans import ScanRun, Values
from jaxckpt.core.schedule import Iterations, LoopCost, LoopSchedule
from jaxckpt.core.units import counted
from jaxckpt.schedules.segments import Nested


@dataclass(frozen=True)
class Mixed(LoopSchedule):
    """Schedules one after the other.

    Attributes:
      parts: (iterations, schedule) of each, in the order in which the iterations run.
    """

    kind: ClassVar[str] = "mixed"

    parts: tuple[tuple[int, LoopSchedule], ...]

    def __post_init__(self) -> None:
        parts = tuple(map(_part, self.parts))
        set_fields(self, parts=parts)
        if refusals := [why for count, part in parts if (why := part.refusal(count))]:
            raise PlanMismatchError(
                f"Each part must be able to run the iterations that it is given; got {parts!r:.200}. {refusals[0]} "
                f"Plan anew."
            )

    @property
    def length(self) -> int:
        """Iterations."""
        return sum(count for count, _ in self.parts)

    def refusal(self, length: int) -> str:
        """Returns why it cannot run so many iterations; "" where it can."""
        return "" if length == self.length else f"Its parts are of {self.length} iterations."

    def cost(self, length: int) -> LoopCost:
        """Returns what running it costs: the parts' backward passes come one after the other, the last one first."""
        costs = [part.cost(count) for count, part in self.parts]
        before = [0, *itertools.accumulate(cost.kept_carries for cost in costs)]
        return LoopCost(
            before[-1],
            max((kept + cost.peak_carries for kept, cost in zip(before, costs)), default=0),
            max((cost.residual_iterations for cost in costs), default=0),
            sum(cost.runs for cost in costs),
            sum(cost.host_carries for cost in costs),
            sum(cost.transfers for cost in costs),
        )

    def iterations(self, length: int) -> tuple[Iterations, ...]:
        """Returns what is told of its parts."""
        return tuple(each for count, part in self.parts for each in part.iterations(count))

    def __str__(self) -> str:
        return ", then ".join(
            str(part) if isinstance(part, Nested) else f"{counted(count, 'iteration')} by {part}"
            for count, part in self.parts
        )

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs the parts."""
        state, stacked = scan.init, []
        for (count, part), rows in zip(self.parts, scan.rows([count for count, _ in self.parts])):
            state, ys = part.run(scan.over(count, state, rows))
            stacked.append(ys)
        return state, scan.joined(stacked)


def _part(part: Any) -> tuple[int, LoopSchedule]:
    if not isinstance(part, (tuple, list)) or len(part) != 2 or not isinstance(part[1], LoopSchedule):
        raise PlanMismatchError(f"parts must each be (iterations, schedule); got {part!r:.80}. Plan anew.")
    return whole(part[0], "iterations"), part[1]


def in_turn(*parts: Nested) -> LoopSchedule:
    """Returns nested schedules one after the other as one schedule.

    >>> from jaxckpt.schedules.segments import checkpointed
    >>> in_turn(checkpointed(8, (4,)), checkpointed(4)).length
    12
    """
    return parts[0] if len(parts) == 1 else Mixed(tuple((part.length, part) for part in parts))
