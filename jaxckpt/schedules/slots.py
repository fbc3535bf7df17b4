"""Slots: carries are kept, freed and reused as `jaxckpt.schedules.optimum` says, so that the fewest iterations run
again; on two levels of storage as `jaxckpt.schedules.two_levels` says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxckpt._errors import ArgumentError, PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core.constants import TRANSFER
from jaxckpt.core.regions import checked_actions, set_fields
from jaxckpt.core.scans import ScanRun, Values
from jaxckpt.core.schedule import Iterations, LoopCost, LoopSchedule
from jaxckpt.core.units import as_int, as_number
from jaxckpt.schedules.budget import SlotBudget
from jaxckpt.schedules.engine import scan_with_slots
from jaxckpt.schedules.optimum import Binomial
from jaxckpt.schedules.two_levels import LevelCounts, TwoLevelRuns, with_host


@dataclass(frozen=True)
class Slots(LoopSchedule):
    """A schedule: at most `count` carries are kept at once, and `host` more in host memory, placed by the optimum.

    It is differentiated in reverse mode alone, and once; see `jaxckpt.ForwardModeError`.

    Attributes:
      count: kept carries on the device, at least 1, the initial one counted. It may be more than there are iterations:
        then none is run twice to obtain a carry.
      host: kept carries in host memory, at least 0. Where they are used, the initial carry is one of them, and the
        device has `count` others besides the one that the forward pass ends with. Arrays of floats go to the host;
        scalars, integers and random keys stay on the device. A CPU has one memory: there nothing moves.
      transfer: what moving a carry to or from the host costs, in iterations: a number of at least 0. The schedule has
        the least sum of iterations and transfers. By default two transfers cost half an iteration, so a host slot is
        used wherever it spares one.
      run_length: iterations that one turn of the backward loop takes; what is kept of them comes on top of the slots.
        None: as many as are best for the slots' bytes, what is kept of them included.
      actions: index of a value that the body computes -> SAVE, for what is kept of each iteration in a run. None: what
        makes the backward pass cheap. For plans; `jaxckpt.scan` has a policy.

    Raises:
      ArgumentError: the count or the run is no int of at least 1, the host's count no int of at least 0, or the cost
        of a transfer no finite number of at least 0.

    >>> Slots(32, host=1024).cost(10_007).transfers
    2048
    """

    kind: ClassVar[str] = "slots"

    count: int
    run_length: int | None = None
    actions: Mapping[int, Action] | None = None
    host: int = 0
    transfer: float = TRANSFER

    __hash__ = LoopSchedule.__hash__

    def __post_init__(self) -> None:
        count, host, run_length = map(as_int, (self.count, self.host, self.run_length))
        if count is None or count < 1:
            raise ArgumentError("count", "an int of at least 1, the number of carries to keep", self.count)
        if host is None or host < 0:
            raise ArgumentError("host", "an int of at least 0, the number of carries to keep in host memory", self.host)
        transfer = as_number(self.transfer)
        if transfer is None or not 0 <= transfer < float("inf"):
            rule = "a finite number of at least 0, what moving a carry one way costs in iterations"
            raise ArgumentError("transfer", rule, self.transfer)
        if self.run_length is not None and (run_length is None or run_length < 1):
            raise ArgumentError("run_length", "an int of at least 1, the iterations in a run, or None", self.run_length)
        if self.actions is not None and not isinstance(self.actions, Mapping):
            raise ArgumentError("actions", "a mapping from the index of a value to SAVE, or None", self.actions)
        set_fields(self, count=count, host=host, run_length=run_length, transfer=transfer)
        if self.actions is None:
            return
        set_fields(self, actions=checked_actions(self.actions))
        for action in self.actions.values():
            if not action.saves:
                raise PlanMismatchError(
                    "Slots can only SAVE values, because its backward pass reads them at once; "
                    f"got {action!r}. Plan anew."
                )

    def __repr__(self) -> str:
        run = "" if self.run_length is None else f", run_length={self.run_length}"
        host = f", host={self.host}" if self.host else ""
        host += f", transfer={self.transfer}" if self.transfer != TRANSFER else ""
        return f"Slots({self.count}{host}{run}{'' if self.actions is None else f', actions={dict(self.actions)}'})"

    def cost(self, length: int, *, row: float = float("inf")) -> LoopCost:
        """Returns what running so many iterations costs.

        Args:
          row: bytes that a run keeps of each iteration, in carries. Infinite: runs of one iteration where it is left to
            the schedule.
        """
        length = operator.index(length)
        if length == 0:
            return LoopCost(0, 0, 0, 0)
        if self.run_length is None:
            mixed = self._storage.runs(length, row=row)
        else:
            run = min(self.run_length, length)
            mixed = with_host(Binomial(length, run, min(self.count, -(-length // run))), self.host, self.transfer)
        if not isinstance(mixed, TwoLevelRuns):
            return LoopCost(mixed.slots, mixed.slots, min(mixed.run, length), mixed.body_runs)
        levels = mixed.placed
        rows = levels.device_rows
        return LoopCost(rows, rows, min(mixed.run, length), mixed.body_runs, levels.host_rows, mixed.transfers)

    @property
    def _storage(self) -> LevelCounts:
        return LevelCounts(self.count, self.host, self.transfer)

    def iterations(self, length: int) -> tuple[Iterations, ...]:
        """Returns what is told of its iterations."""
        runs = "" if self.run_length in (None, 1) else f", in runs of {self.run_length}"
        host = f" on the device and {self.host} on the host" if self.host else ""
        how = f", at most {self.count} of their carries kept at once{host}{runs}"
        unsaid = "what is needed of them runs again"
        return (Iterations(length, how, self.actions or None, False, unsaid),)

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs the iterations.

        Raises:
          ArgumentError: carries are to be offloaded as a whole, and there are host slots.
        """
        if self.host and not scan.carry.saves:
            rule = "SAVE where the schedule has host slots, which say what is kept on the host"
            raise ArgumentError("carry", rule, scan.carry, "Leave it out, or use Slots(n) without host.")
        scan, kept = scan.keeping(self.actions)
        run = scan.body.length if scan.unroll is True else max(int(scan.unroll), 1)
        return scan_with_slots(scan, self._storage, run=self.run_length or (run if run > 1 else None), kept=kept)


@dataclass(frozen=True)
class SlotsWithin(LoopSchedule):
    """As many slots, and runs of as many iterations, as take at most so many bytes and the least time. How many they
    are is decided where the scan is differentiated, by what is differentiated.

    Attributes:
      limit: bytes, with what an iteration and its backward pass work with.
    """

    limit: int

    def run(self, scan: ScanRun) -> tuple[Values, Values]:
        """Runs the iterations."""
        scan, kept = scan.keeping(None)
        return scan_with_slots(scan, SlotBudget(scan.body, self.limit, kept), kept=kept)
