"""Slots: carries are kept, freed and reused as `jaxckpt.schedules.optimum` says, so that the fewest iterations run
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxckpt._errors import ArgumentError, PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core.regions import checked_actions, set_fields
from jaxckpt.core.scans import ScanRun, Values
from jaxckpt.core.schedule import Iterations, LoopCost, LoopSchedule
from jaxckpt.schedules.engine import scan_with_slots
from jaxckpt.schedules.optimum import Binomial, binomial


@dataclass(frozen=True)
class Slots(LoopSchedule):
    """A schedule: at most `count` carries are kept at once, placed by the binomial optimum.

    It is differentiated in reverse mode alone, and once; see `jaxckpt.ForwardModeError`.

    Attributes:
      count: kept carries, at least 1, the initial one counted. It may be more than there are iterations: then none is
        run twice to obtain a carry.
      run_length: iterations that one turn of the backward loop takes; what is kept of them comes on top of the slots.
        None: as many as are best for the slots' bytes, what is kept of them included.
      actions: index of a value that the body computes -> SAVE, for what is kept of each iteration in a run. None: what
        makes the backward pass cheap. For plans; `jaxckpt.scan` has a policy.

    Raises:
      ArgumentError: the count or the run is no int of at least 1.
    """

    kind: ClassVar[str] = "slots"

    count: int
    run_length: int | None = None
    actions: Mapping[int, Action] | None = None

    __hash__ = LoopSchedule.__hash__

    def __post_init__(self) -> None:
        if not is_int(self.count) or self.count < 1:
            raise ArgumentError("Slots", "an int of at least 1, the number of carries to keep", self.count)
        if self.run_length is not None and (not is_int(self.run_length) or self.run_length < 1):
            raise ArgumentError("run_length", "an int of at least 1, the iterations in a run, or None", self.run_length)
        if self.actions is None:
            return
        set_fields(self, actions=checked_actions(self.actions))
        for action in self.actions.values():
            if action.changes or action.on_host or not action.keeps:
                raise PlanMismatchError(
                    f"What a run of Slots keeps of its iterations must be SAVE: it is needed at once; got "
                    f"{action!r}. Plan anew."
                )

    def __repr__(self) -> str:
        run = "" if self.run_length is None else f", run_length={self.run_length}"
        return f"Slots({self.count}{run}{'' if self.actions is None else f', actions={dict(self.actions)}'})"

    def cost(self, length: int, *, row: float = float("inf")) -> LoopCost:
        """Returns what running so many iterations costs.

        Args:
          row: bytes that a run keeps of each iteration, in carries. Infinite: runs of one iteration where it is left to
            the schedule.
        """
        if length == 0:
            return LoopCost(0, 0, 0, 0)
        if self.run_length is None:
            mixed = binomial(length, self.count, row=row)
        else:
            run = min(self.run_length, length)
            mixed = Binomial(length, run, min(self.count, -(-length // run)))
        return LoopCost(mixed.slots, mixed.slots, min(mixed.run, length), mixed.steps)

    def iterations(self, length: int) -> tuple[Iterations, ...]:
        """Returns what is told of its iterations."""
        runs = "" if self.run_length in (None, 1) else f", in runs of {self.run_length}"
        how = f", at most {self.count} of their carries kept at once{runs}"
        unsaid = "what is needed of them runs again"
        return (Iterations(length, how, self.actions or None, False, unsaid),)

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs the iterations."""
        scan, kept = scan.keeping(self.actions)
        run = scan.body.length if scan.unroll is True else max(int(scan.unroll), 1)
        return scan_with_slots(scan, self.count, run=self.run_length or (run if run > 1 else None), kept=kept)


def is_int(value: Any) -> bool:
    """Whether a value is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
