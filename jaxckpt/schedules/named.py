"""What users write for a schedule, and what it means and costs for so many iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt._errors import ArgumentError, nearest
from jaxckpt.core.schedule import LoopCost, LoopSchedule
from jaxckpt.core.units import as_int, as_number, counted
from jaxckpt.schedules.segments import log_lengths, nested, plain, segmented, sqrt_size
from jaxckpt.schedules.slots import Slots

NAMES = ("none", "every", "sqrt", "log")
_RULE = "one of 'none', 'every', 'sqrt', 'log', an int, a tuple of ints, Slots(n) or another LoopSchedule"

Schedule = str | int | Sequence[int] | LoopSchedule


def schedule_of(length: int, schedule: Schedule, argument: str = "schedule") -> LoopSchedule:
    """Returns the object that a schedule means for so many iterations; for a length of 0 it is only looked at whether
    it is a schedule.

    Args:
      length: iterations, at least 0.
      schedule: "none" (lax.scan as it is), "every" (each iteration checkpointed), "sqrt" (segments of square-root
        length), "log" (segments of segments, 4 at every level), an int (iterations in a segment), a tuple of ints
        (nested lengths, outermost first; the product at least the length), or an object: `Slots`, or any other
        `LoopSchedule`.
      argument: the name that an error gives to the schedule.

    Raises:
      ArgumentError: there is no such schedule, an int is below 1, a product too small, or the object cannot run so many
        iterations.
    """
    if isinstance(schedule, LoopSchedule):
        if length and (why := schedule.refusal(length)):
            raise ArgumentError(argument, f"one that can run the scan's {counted(length, 'iteration')}", schedule, why)
        return schedule
    if isinstance(schedule, str):
        if schedule not in NAMES:
            hint = f"Iterations in a segment are an int: {schedule}." if schedule.isdecimal() else ""
            hint = hint or ("Write Slots(n) for n carries." if "slot" in schedule.lower() else "")
            raise ArgumentError(argument, _RULE, schedule, hint or nearest(schedule, NAMES))
        if schedule == "sqrt":
            return segmented(length, sqrt_size(length))
        return nested(length, log_lengths(length)) if schedule == "log" else plain(length, remat=schedule == "every")
    if (size := as_int(schedule)) is not None:
        if size < 1:
            raise ArgumentError(argument, "at least 1 where it is an int, the iterations in a segment", schedule)
        return segmented(length, size)
    given = schedule if isinstance(schedule, (tuple, list)) else ()
    lengths = tuple(n for n in map(as_int, given) if n is not None)
    if not lengths or len(lengths) < len(given):
        kind: Any = schedule
        hint = "lax.scan as it is has the schedule 'none'." if kind is None else ""
        hint = "Write Slots(n) for n carries." if kind is Slots else hint
        raise ArgumentError(argument, _RULE, schedule, hint)
    if any(n < 1 for n in lengths):
        raise ArgumentError(argument, "of ints of at least 1 where it is a tuple of nested lengths", lengths)
    if math.prod(lengths) < length:
        raise ArgumentError(
            argument,
            f"of nested lengths whose product is at least the length, {length}",
            lengths,
            f"Their product is {math.prod(lengths)}.",
        )
    return nested(length, lengths)


@dataclass(frozen=True, kw_only=True)
class Description(LoopCost):
    """What running a scan by a schedule costs: a `LoopCost` that says what it is of.

    Attributes:
      length: iterations of the scan.
      schedule: what was described, as text.
    """

    length: int
    schedule: str

    @property
    def residual_steps(self) -> int:
        """`residual_iterations`, by its older name."""
        return self.residual_iterations

    @property
    def forward_steps(self) -> int:
        """`runs`, by its older name."""
        return self.runs

    @property
    def overhead(self) -> float:
        """Iterations that run beyond the forward pass, for each iteration."""
        return (self.runs - self.length) / self.length if self.length else 0.0

    def __str__(self) -> str:
        carries = f"{self.kept_carries} {'carry' if self.kept_carries == 1 else 'carries'}"
        host = ""
        if self.host_carries:
            moved = counted(self.transfers, "transfer")
            host = f"; besides, at most {self.host_carries} at once on the host, in {moved}"
        return (
            f"{self.schedule} over {counted(self.length, 'iteration')}: keeps {carries}, at most {self.peak_carries} "
            f"at once and the residuals of {counted(self.residual_iterations, 'iteration')}; runs "
            f"{counted(self.runs, 'iteration')}, {self.overhead:.2f} again for each{host}."
        )


def describe(length: int, schedule: Schedule, *, row: float = math.inf) -> Description:
    """Returns what a schedule costs, without tracing or compiling anything.

    Args:
      length: iterations, at least 0.
      schedule: as of `jaxckpt.scan`.
      row: for `Slots`: bytes that a run of several iterations keeps of each, in carries (3 for an LSTM). Infinite: runs
        of one iteration, revolve itself; `jaxckpt.scan` knows the scan body and so may do better, never worse.

    Raises:
      ArgumentError: the length, the schedule or `row` is invalid.

    >>> print(describe(100, "sqrt"))
    'sqrt' over 100 iterations: keeps 10 carries, at most 10 at once and the residuals of 10 iterations; runs 200
    iterations, 1.00 again for each.
    >>> describe(1000, Slots(10)).runs
    4637
    >>> print(describe(10_007, Slots(32, host=1024), row=3.0))
    Slots(32, host=1024) over 10007 iterations: keeps 2 carries, at most 2 at once and the residuals of 6 iterations;
    runs 23860 iterations, 1.38 again for each; besides, at most 1024 at once on the host, in 2048 transfers.
    """
    iterations = as_int(length)
    if iterations is None or iterations < 0:
        raise ArgumentError("length", "an int of at least 0", length)
    carries = as_number(row)
    if carries is None or not carries > 0:  # NaN is not either
        raise ArgumentError("row", "a number above 0: bytes of an iteration, in carries", row)
    found = schedule_of(iterations, schedule)
    cost = found.cost(iterations, row=carries) if isinstance(found, Slots) else found.cost(iterations)
    if not isinstance(cost, LoopCost):
        raise ArgumentError("schedule", f"one whose `cost` returns a LoopCost; {type(found).__name__}'s did not", cost)
    return Description(**vars(cost), length=iterations, schedule=repr(schedule))
