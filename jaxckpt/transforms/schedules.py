"""Schedules of a scan: which carries are kept, in what order steps are run again, and how many runs that takes. Pure Python, no JAX.

Two families. Nested segments: keep the carry at the start of each segment, run a segment again when the backward pass reaches it, and treat
the segment in the same way inside; with one level of square-root length this is Chen et al. 2016 (arXiv:1604.06174). Slots: n carries are
kept, freed and reused so that the fewest steps are run again, the binomial optimum of

    Griewank and Walther 2000, Algorithm 799: revolve, ACM Transactions on Mathematical Software 26(1), 19-45.

With s slots, the first of which always holds the initial carry, and r = min{r : C(s+r, s) >= l}, reversing l steps takes

    t(l, s) = r l - C(s+r, s+1)

runs of the step beyond the one in which each step is linearised; as a recursion t(l, s) = min over j of j + t(l-j, s-1) + t(j, s), where a
carry is kept after j steps, the rest is reversed with one slot less, and then the first j steps with all of them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxckpt._errors import ArgumentError, did_you_mean

NAMES = ("none", "every", "sqrt", "log")
_RULE = "one of 'none', 'every', 'sqrt', 'log', an int, a tuple of ints or Slots(n)"
LOG_BASE = 4  # segments a level of "log": 2 and 4 keep equally many carries, 4 runs steps half as often


@dataclass(frozen=True)
class Slots:
    """A schedule: at most `count` carries are kept at once, placed by the binomial optimum.

    Attributes:
      count: kept carries, at least 1, the initial one counted. More than there are steps is fine: then no step is run twice to get at a carry.

    Raises:
      ArgumentError: the count is no int of at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        if not _is_int(self.count) or self.count < 1:
            raise ArgumentError("Slots", "an int of at least 1, the number of carries to keep", self.count)

    def __repr__(self) -> str:
        return f"Slots({self.count})"


Schedule = str | int | Sequence[int] | Slots

# --------------------------------------------------------------------------------------------------------- nested segments


@dataclass(frozen=True)
class Nested:
    """Steps in segments: `count` segments of `inner.length` steps, each checkpointed, then `rest` steps that are not.

    The rest is shorter than a segment, or than there are segments. It is last, its values are needed first in the backward pass, so
    checkpointing it would save nothing.

    Attributes:
      length: steps.
      count: checkpointed segments; 0 for plain steps.
      inner: what each segment is; None for plain steps.
      rest: steps after the last segment.
      remat: whether plain steps are checkpointed one by one ("every").
    """

    length: int
    count: int = 0
    inner: Nested | None = None
    rest: int = 0
    remat: bool = False

    @property
    def steps(self) -> int:
        """Runs of the step over a forward and a backward pass."""
        return self.length + self._again

    @property
    def _again(self) -> int:
        if self.inner is None:
            return self.length if self.remat else 0
        return self.count * self.inner.steps

    @property
    def levels(self) -> int:
        """Levels of checkpoints, one within the other."""
        return 1 + self.inner.levels if self.inner is not None else int(self.remat)

    @property
    def kept(self) -> int:
        """Carries kept from the forward to the backward pass."""
        return self.count if self.inner is not None else self.length if self.remat else 0

    @property
    def carries(self) -> int:
        """Most carries kept at once in the backward pass: the segments' starts of every level."""
        return self.kept + (self.inner.carries if self.inner is not None else 0)

    @property
    def residuals(self) -> int:
        """Most steps whose residuals are kept at once: those of the innermost segment, or of a rest."""
        if self.inner is None:
            return min(self.length, 1) if self.remat else self.length
        return max(self.inner.residuals, self.rest)


def plain(length: int, *, remat: bool = False) -> Nested:
    """Returns steps without segments; `remat`: each checkpointed by itself."""
    return Nested(length, rest=length, remat=remat)


def nested(length: int, lengths: Sequence[int]) -> Nested:
    """Returns `length` steps in nested segments.

    Args:
      length: steps.
      lengths: outermost first: so many segments, each of so many segments, ..., each of so many steps. Their product must be at least
        `length`; where it is more, segments are made equal and as long as need be, and what does not divide comes last.

    >>> nested(100, (10, 10))
    Nested(length=100, count=10, inner=Nested(length=10, count=0, inner=None, rest=10, remat=False), rest=0, remat=False)
    >>> nested(103, (10, 11)).rest
    3
    """
    if length == 0 or len(lengths) == 1:
        return plain(length)
    count = min(lengths[0], length)
    cover = math.prod(lengths[1:])
    shorter, longer = length // count, -(-length // count)
    # Segments rounded down leave a rest of fewer steps than there are segments; rounded up, of fewer than a segment has. The first
    # is better in a deep nest, where a long rest would want segments of its own.
    size = longer if longer * longer <= length and longer <= cover else shorter
    return _segments(length, min(size, cover), lengths[1:])


def segmented(length: int, size: int) -> Nested:
    """Returns `length` steps in segments of `size` steps; the last takes what is left and is not checkpointed.

    >>> segmented(10, 4).count, segmented(10, 4).rest
    (2, 2)
    """
    return plain(length) if size >= length else _segments(length, size, (size,))


def _segments(length: int, size: int, lengths: Sequence[int]) -> Nested:
    inner = nested(size, lengths)
    count, rest = divmod(length, size)
    return Nested(length, count, inner, rest)


def sqrt_size(length: int) -> int:
    """Returns steps in a segment of "sqrt": about the square root; a divisor of the length if one is near, since a rest costs a copy of xs.

    >>> sqrt_size(10000), sqrt_size(1000), sqrt_size(10007)
    (100, 25, 100)
    """
    root = math.isqrt(max(length, 1))
    far = min(root // 2, 2**16)  # of a scan that long nobody minds the rest
    near = [size for size in range(max(1, root - far), root + far + 1) if length % size == 0]
    near = [size for size in near if length <= 2.25 * size * size and size * size <= 2.25 * length]
    # Residuals of a step are larger than a carry, so of two divisors as near, the shorter segment.
    closest = min(near, key=lambda size: (max(size * size, length) / min(size * size, length), size), default=None)
    return root + (length > root * (root + 1)) if closest is None else closest


def nearest_divisors(length: int, size: int) -> list[int]:
    """Returns the largest divisor of a length that is at most `size`, and the smallest that is more; the length's own if there is no other.

    >>> nearest_divisors(20_000, 141), nearest_divisors(10_007, 100)
    ([125, 160], [1, 10007])
    """
    small = [d for d in range(1, min(math.isqrt(length), 2**20) + 1) if length % d == 0]
    divisors = sorted({*small, *(length // d for d in small)})
    below = [d for d in divisors if d <= max(size, 1)][-1:]
    return below + [d for d in divisors if d > max(size, 1)][:1]


def log_lengths(length: int) -> tuple[int, ...]:
    """Returns the nested lengths of "log": 4 at every level but the innermost, which has 2 to 8 steps.

    >>> log_lengths(256), log_lengths(10007)
    ((4, 4, 4, 4), (4, 4, 4, 4, 4, 4, 3))
    """
    levels = max(1, round(math.log(max(length, 1), LOG_BASE)))
    outer = LOG_BASE ** (levels - 1)
    return (LOG_BASE,) * (levels - 1) + (max(1, -(-length // outer)),)


def resolve(length: int, schedule: Schedule, argument: str = "schedule") -> Nested | Slots:
    """Returns the nest, or the slots, that a schedule means for so many steps.

    Args:
      length: steps, at least 0.
      schedule: "none" (lax.scan as it is), "every" (each step checkpointed), "sqrt" (segments of square-root length), "log" (segments of
        segments, 4 at every level), an int (steps in a segment), a tuple of ints (nested lengths, outermost first; the product at least the
        length), or `Slots`.
      argument: the name that an error gives to the schedule.

    Raises:
      ArgumentError: the schedule is none of these, an int is below 1, or a product too small.
    """
    if isinstance(schedule, Slots):
        return schedule
    if isinstance(schedule, str):
        if schedule not in NAMES:
            raise ArgumentError(argument, _RULE, schedule, did_you_mean(schedule, NAMES))
        if schedule == "sqrt":
            return segmented(length, sqrt_size(length))
        return nested(length, log_lengths(length)) if schedule == "log" else plain(length, remat=schedule == "every")
    if _is_int(schedule):
        if schedule < 1:  # type: ignore[operator]
            raise ArgumentError(argument, "at least 1 where it is an int, the steps in a segment", schedule)
        return segmented(length, schedule)  # type: ignore[arg-type]
    if not isinstance(schedule, (tuple, list)) or not schedule or not all(_is_int(n) for n in schedule):
        raise ArgumentError(argument, _RULE, schedule)
    if any(n < 1 for n in schedule):
        raise ArgumentError(argument, "of ints of at least 1 where it is a tuple of nested lengths", tuple(schedule))
    if math.prod(schedule) < length:
        raise ArgumentError(
            argument,
            f"of nested lengths whose product is at least the length, {length}",
            tuple(schedule),
            f"Their product is {math.prod(schedule)}.",
        )
    return nested(length, tuple(schedule))


# -------------------------------------------------------------------------------------------------------------- the optimum


def repetitions(length: int, slots: int) -> int:
    """Returns r: no step is run more than r times before it is linearised. The least r with C(slots+r, slots) >= length.

    >>> repetitions(10, 3), repetitions(1000, 10)
    (2, 4)
    """
    if slots == 1:
        return max(length - 1, 0)
    high = 1
    while math.comb(slots + high, slots) < length:
        high *= 2
    return bisect.bisect_left(range(high), length, key=lambda r: math.comb(slots + r, slots))


def extra_steps(length: int, slots: int) -> int:
    """Returns t(length, slots): runs of the step beyond the linearising ones, with the forward pass up to the last step counted.

    >>> [extra_steps(l, s) for l, s in [(10, 3), (56, 3), (100, 5), (100, 10), (1000, 10), (1000, 50)]]
    [15, 210, 316, 222, 3636, 1948]
    """
    if length < 1:
        return 0
    r = repetitions(length, slots)
    return r * length - math.comb(slots + r, slots + 1)


def split(length: int, slots: int) -> int:
    """Returns j: with a carry kept at step 0 of `length` and one or more free slots, the next is best kept at step j.

    Griewank and Walther's rule; any j with t = j + t(length-j, slots-1) + t(j, slots) would do.
    """
    if slots >= length:
        return 1
    r = repetitions(length, slots)

    def beta(s: int, r: int) -> int:
        return math.comb(s + r, s) if s >= 0 and r >= 0 else 0

    if length <= beta(slots, r - 1) + beta(slots - 2, r - 1):
        return beta(slots, r - 2)
    if length >= beta(slots, r) - beta(slots - 3, r):
        return beta(slots, r - 1)
    return length - beta(slots - 1, r - 1) - beta(slots - 2, r - 1)


@dataclass(frozen=True)
class Move:
    """One move of a schedule: "store" or "restore" (carry of `step`, in `slot`), "advance" (from `step` to `stop`), "adjoint" (of `step`)."""

    kind: str
    step: int
    slot: int = -1
    stop: int = -1


def revolve(length: int, slots: int) -> Iterator[Move]:
    """Yields the moves that reverse `length` steps with at most `slots` kept carries, in the fewest advances: `extra_steps(length, slots)`.

    Before the first move the carry of step 0 is at hand. An adjoint move takes the carry at hand through its step, linearises it there and
    pulls the cotangent back; the carry at hand is then gone.

    >>> [f"{m.kind} {m.step}" for m in revolve(3, 2)]
    ['store 0', 'advance 0', 'store 1', 'advance 1', 'adjoint 2', 'restore 1', 'adjoint 1', 'restore 0', 'adjoint 0']
    """
    if length < 1:
        return
    at = 0  # step of the carry at hand, -1 for none
    todo = [(0, length, 0)]  # (first step, steps, slot of the first step's carry), depth first
    stored: dict[int, int] = {}
    while todo:
        start, count, slot = todo.pop()
        if at != start:
            yield Move("restore", start, slot)
        elif count > 1 and stored.get(slot) != start:
            yield Move("store", start, slot)
            stored[slot] = start
        free = slots - slot
        if count == 1:
            yield Move("adjoint", start)
            at = -1
        elif free == 1:
            yield Move("advance", start, stop=start + count - 1)
            yield Move("adjoint", start + count - 1)
            at = -1
            todo.append((start, count - 1, slot))
        else:
            j = split(count, free)
            yield Move("advance", start, stop=start + j)
            at = start + j
            todo += [(start, j, slot), (start + j, count - j, slot + 1)]


# ---------------------------------------------------------------------------------------------------------- runs of steps


@dataclass(frozen=True)
class Binomial:
    """Revolve over runs of steps: the mixed schedule.

    The unit that revolve reverses is a run of `run` steps. A run is gone through forward once more when its turn comes, keeping of each of its
    steps what the backward pass needs, so that no step of it is run again. What a run keeps is paid for in slots. With one step to a run it
    is revolve itself.

    Attributes:
      length: steps.
      run: steps in a run; the last has what is left.
      slots: carries kept at once.
      again: whether a run keeps carries alone, so that its steps are run again to be linearised.
    """

    length: int
    run: int
    slots: int
    again: bool = False

    @property
    def units(self) -> int:
        """Runs."""
        return -(-self.length // self.run)

    @property
    def last(self) -> int:
        """Steps in the last run."""
        return self.length - (self.units - 1) * self.run

    @property
    def steps(self) -> int:
        """Runs of the step over a forward and a backward pass.

        The forward pass takes `length`; the backward pass advances carries, t(units, slots) runs but for those that the forward pass made,
        and goes through every run.
        """
        if not self.length:
            return 0
        advances = extra_steps(self.units, self.slots) - (self.units - 1)
        twice = self.length - self.units if self.again else 0
        return 2 * self.length + advances * self.run + twice

    def carries(self, row: float = 1.0) -> float:
        """Carries that are kept at once, in the backward pass; what a run keeps of a step counts as `row` carries.

        Of the first step it counts as none, for linearising a single step takes as much. A shorter last run has room of its own.
        """
        rows = self.run - 1 + (self.last if self.last < self.run else 0)
        return self.slots + (rows * row if rows else 0)


@dataclass(frozen=True)
class RunCosts:
    """What the choice of runs weighs beside runs of the step, in units of one.

    Attributes:
      turn: a turn of the backward loop.
      kept: keeping a step's values in a run, and reading them again.
      waiting: adding to those cotangents that can wait, at every step or once a run; 0 where none can.
    """

    turn: float = 0.25
    kept: float = 0.0
    waiting: float = 0.0


LONGEST_RUN = 64


def binomial(
    length: int, slots: int, *, row: float = math.inf, again: bool = False, costs: RunCosts = RunCosts()
) -> Binomial:
    """Returns the runs and slots that use `slots` carries' bytes best: never more runs of the step than revolve with `slots` carries.

    Args:
      length: steps, at least 1.
      slots: carries whose bytes may be kept.
      row: bytes that a run keeps of a step, in carries. Infinite: only runs of one step.
      again: whether a run keeps carries alone.
      costs: what else is weighed.

    >>> binomial(1024, 32, row=3.0)
    Binomial(length=1024, run=4, slots=23, again=False)
    >>> binomial(1024, 32).steps == 1024 + 1 + extra_steps(1024, 32)
    True
    """

    def left(run: int) -> int:
        beside = Binomial(length, run, 1, again).carries(row) - 1
        return math.floor(slots - beside) if beside < slots else 0

    best = best_runs(length, left, row=row, again=again, costs=costs)
    assert best is not None  # revolve itself always fits
    return best


def best_runs(
    length: int,
    left: Callable[[int], int],
    *,
    row: float = 1.0,
    again: bool = False,
    costs: RunCosts = RunCosts(),
) -> Binomial | None:
    """Returns the runs that take least time, and no more runs of the step than revolve where that fits; None where nothing fits.

    Args:
      length: steps, at least 1.
      left: steps in a run -> slots that there is room for then; 0 where such a run does not fit.
      row: what a run keeps of a step, in carries: of equally fast runs the one that keeps less is taken.
      again: whether a run keeps carries alone.
      costs: what else is weighed.
    """

    def score(plan: Binomial) -> tuple[float, float]:
        kept = length * costs.kept if plan.run > 1 else 0.0
        return plan.steps + plan.units * (costs.turn + costs.waiting) + kept, plan.carries(row)

    plans = [
        Binomial(length, run, min(slots, -(-length // run)), again and run > 1)
        for run in range(1, max(1, min(length, LONGEST_RUN)) + 1)
        if (slots := left(run)) >= 1
    ]
    if plans and plans[0].run == 1:
        plans = [plan for plan in plans if plan.steps <= plans[0].steps]
    return min(plans, key=score, default=None)


# ------------------------------------------------------------------------------------------------------- places for a loop


@dataclass(frozen=True)
class Places:
    """What a compiled loop has to know to place carries as revolve does: a few integers for each slot, however long the scan is.

    A slot holds the carry of the first step of a *part* that is still to be reversed; the parts lie one after the other, in the order of the
    slots. A part with s slots free, its own included, and r repetitions left has at most C(s+r, s) steps. When it is reversed, the next carry
    is kept at its step `cut`: what lies after that has a slot less, what lies before it keeps its slot and has a repetition less. That is
    t(l, s) = j + t(l-j, s-1) + t(j, s), with a j for which both sides stay optimal.

    Attributes:
      length, slots: steps, and slots that are used.
      reach: int32 of shape (slots + 1, repetitions): C(s+r, s), or the length where that is less. Of shape (1, 1) for one slot.
      starts: int32, one a slot: first steps of the parts once the forward pass has placed its carries; the length where there is no part.
      left: int32, one a slot: repetitions that the parts have left then.
      top: the slot of the last part then.
    """

    length: int
    slots: int
    reach: np.ndarray
    starts: np.ndarray
    left: np.ndarray
    top: int

    @property
    def whole(self) -> tuple[np.ndarray, np.ndarray, int]:
        """`starts`, `left` and `top` before the forward pass: one part."""
        starts, left = np.full(self.slots, self.length, np.int32), np.zeros(self.slots, np.int32)
        starts[0], left[0] = 0, repetitions(self.length, self.slots)
        return starts, left, 0

    def cut(self, reach: Any, steps: Any, free: Any, left: Any) -> Any:
        """Returns the step of a part at which the next carry is kept; where only one slot is free, its last step, which needs no carry.

        Args:
          reach: the table, as an array of NumPy's or JAX's.
          steps, free, left: of the part, ints or arrays.
        """
        if self.slots == 1:
            return steps - 1
        most, rest = reach[free, left - 1], steps - reach[free - 1, left - 1]
        return most + (rest - most) * (rest < most)


def places_bytes(length: int, slots: int) -> int:
    """Returns the bytes of the integers of `places(length, slots)`, as constants and as what a loop changes."""
    slots = min(slots, length)
    table = (slots + 1) * repetitions(length, slots) if slots > 1 else 1
    return 4 * (table + 4 * slots)


def places(length: int, slots: int) -> Places:
    """Returns how `slots` carries are placed over `length` steps, both at least 1.

    >>> places(10, 3).starts, places(10, 3).left
    (array([0, 4, 7], dtype=int32), array([1, 1, 1], dtype=int32))
    """
    slots = min(slots, length)
    total = repetitions(length, slots)
    columns = [np.ones(slots + 1, np.int64)]
    for _ in range(1, total if slots > 1 else 0):
        columns.append(np.minimum(np.cumsum(columns[-1]), length))
    reach = np.stack(columns, axis=1).astype(np.int32) if slots > 1 else np.ones((1, 1), np.int32)
    empty = Places(length, slots, reach, np.empty(0), np.empty(0), 0)
    starts, left, top = empty.whole
    while (steps := length - int(starts[top])) > 1:
        to = int(starts[top]) + int(empty.cut(reach, steps, slots - top, int(left[top])))
        left[top] -= 1
        if to == length - 1:
            break
        top += 1
        starts[top], left[top] = to, left[top - 1] + 1
    return replace(empty, starts=starts, left=left, top=top)


# -------------------------------------------------------------------------------------------------------------- description


@dataclass(frozen=True)
class Description:
    """What a schedule costs.

    Attributes:
      length: steps of the scan.
      schedule: what was described, as text.
      kept_carries: carries kept from the forward to the backward pass.
      peak_carries: most carries kept at once, in the backward pass.
      residual_steps: most steps whose residuals are kept at once.
      forward_steps: runs of the step over a forward and a backward pass; `length` of them are the forward pass.
    """

    length: int
    schedule: str
    kept_carries: int
    peak_carries: int
    residual_steps: int
    forward_steps: int

    @property
    def overhead(self) -> float:
        """Runs of the step beyond the forward pass, for each step."""
        return (self.forward_steps - self.length) / self.length if self.length else 0.0

    def __str__(self) -> str:
        return (
            f"{self.schedule} over {_counted(self.length, 'step')}: keeps {_counted(self.kept_carries, 'carry', 'carries')}, at most "
            f"{self.peak_carries} at once and the residuals of {_counted(self.residual_steps, 'step')}; runs the step "
            f"{_counted(self.forward_steps, 'time')}, {self.overhead:.2f} again for each."
        )


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def describe(length: int, schedule: Schedule, *, row: float = math.inf) -> Description:
    """Returns what a schedule costs, without tracing or compiling anything.

    Args:
      length: steps, at least 0.
      schedule: as of `jaxckpt.scan`.
      row: for `Slots`: bytes that a run of several steps keeps of each, in carries (3 for an LSTM). Infinite: runs of one step, revolve
        itself; `jaxckpt.scan` knows the step and so may do better, never worse.

    Raises:
      ArgumentError: the length or the schedule is none.

    >>> print(describe(100, "sqrt"))
    'sqrt' over 100 steps: keeps 10 carries, at most 10 at once and the residuals of 10 steps; runs the step 200 times, 1.00 again for each.
    >>> describe(1000, Slots(10)).forward_steps
    4637
    """
    if not _is_int(length) or length < 0:
        raise ArgumentError("length", "an int of at least 0", length)
    plan = resolve(length, schedule)
    name = repr(schedule)
    if isinstance(plan, Nested):
        return Description(length, name, plan.kept, plan.carries, plan.residuals, plan.steps)
    if length == 0:
        return Description(0, name, 0, 0, 0, 0)
    mixed = binomial(length, plan.count, row=row)
    return Description(length, name, mixed.slots, mixed.slots, min(mixed.run, length), mixed.steps)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
