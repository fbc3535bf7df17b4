"""Slots: n carries are kept, freed and reused so that the fewest iterations run again, the binomial optimum of

    Griewank and Walther 2000, Algorithm 799: revolve, ACM Transactions on Mathematical Software 26(1), 19-45.

With s slots, the first of which always holds the initial carry, and r = min{r : C(s+r, s) >= l}, reversing l iterations
takes

    t(l, s) = r l - C(s+r, s+1)

runs of the body beyond the one in which each iteration is linearised; as a recursion t(l, s) = min over j of j + t(l-j,
s-1) + t(j, s), where a carry is kept after j iterations, the rest is reversed with one slot less, and then the first j
iterations with all of them. Pure Python, no JAX.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxckpt.core.constants import LONGEST_RUN


def repetitions(length: int, slots: int) -> int:
    """Returns r: no iteration is run more than r times before it is linearised. The least r with C(slots+r, slots) >=
    length.

    >>> repetitions(10, 3), repetitions(1000, 10)
    (2, 4)
    """
    if slots == 1:
        return max(length - 1, 0)
    high = 1
    while math.comb(slots + high, slots) < length:
        high *= 2
    return bisect.bisect_left(range(high), length, key=lambda r: math.comb(slots + r, slots))


def extra_iterations(length: int, slots: int) -> int:
    """Returns t(length, slots): runs of the body beyond the linearising ones, with the forward pass up to the last
    iteration counted.

    >>> [extra_iterations(l, s) for l, s in [(10, 3), (56, 3), (100, 5), (100, 10), (1000, 10), (1000, 50)]]
    [15, 210, 316, 222, 3636, 1948]
    """
    if length < 1:
        return 0
    r = repetitions(length, slots)
    return r * length - math.comb(slots + r, slots + 1)


extra_steps = extra_iterations
"""`extra_iterations`, by its older name."""


def split(length: int, slots: int) -> int:
    """Returns j: with a carry kept at iteration 0 of `length` and one or more free slots, the next is best kept at
    iteration j.

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
    """One move of a schedule: "store" or "restore" (carry of `iteration`, in `slot`), "advance" (from `iteration` to
    `stop`), "adjoint" (of `iteration`).
    """

    kind: str
    iteration: int
    slot: int = -1
    stop: int = -1

    @property
    def step(self) -> int:
        """`iteration`, by its older name."""
        return self.iteration


def revolve(length: int, slots: int) -> Iterator[Move]:
    """Yields the moves that reverse `length` iterations with at most `slots` kept carries, in the fewest advances:
    `extra_iterations(length, slots)`.

    Before the first move the carry of iteration 0 is at hand. An adjoint move takes the carry at hand through its
    iteration, linearises it there and pulls the cotangent back; the carry at hand is then gone.

    >>> [f"{m.kind} {m.iteration}" for m in revolve(3, 2)]
    ['store 0', 'advance 0', 'store 1', 'advance 1', 'adjoint 2', 'restore 1', 'adjoint 1', 'restore 0', 'adjoint 0']
    """
    if length < 1:
        return
    at = 0  # iteration of the carry at hand, -1 for none
    todo = [(0, length, 0)]  # (first iteration, iterations, slot of the first iteration's carry), depth first
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


# --------------------------------------------------------------------------------------------------- runs of iterations


@dataclass(frozen=True)
class Binomial:
    """Revolve over runs of iterations: the mixed schedule.

    The unit that revolve reverses is a run of `run` iterations. A run is gone through forward once more when its turn
    comes, keeping of each of its iterations what the backward pass needs, so that no iteration of it is run again. What
    a run keeps is paid for in slots. With one iteration to a run it is revolve itself.

    Attributes:
      length: iterations.
      run: iterations in a run; the last has what is left.
      slots: carries kept at once.
      again: whether a run keeps carries alone, so that its iterations are run again to be linearised.
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
        """Iterations in the last run."""
        return self.length - (self.units - 1) * self.run

    @property
    def body_runs(self) -> int:
        """Runs of the body over a forward and a backward pass.

        The forward pass takes `length`; the backward pass advances carries, t(units, slots) runs but for those that the
        forward pass made, and goes through every run.
        """
        if not self.length:
            return 0
        twice = self.length - self.units if self.again else 0
        return 2 * self.length + self.advances * self.run + twice

    @property
    def advances(self) -> int:
        """Runs that the backward pass takes a carry through to obtain another."""
        return extra_iterations(self.units, self.slots) - (self.units - 1)

    @property
    def advances_a_turn(self) -> float:
        """The mean of `advances` for one run of those whose carries the backward loop obtains: all of them, but for a
        last one that is shorter.
        """
        return self.advances / max(self.units - (self.last < self.run), 1)

    @property
    def steps(self) -> int:
        """`body_runs`, by its older name."""
        return self.body_runs

    def carries(self, row: float = 1.0) -> float:
        """Carries that are kept at once, in the backward pass; what a run keeps of an iteration counts as `row`
        carries.

        Of the first iteration it counts as none, for linearising a single iteration takes as much. A shorter last run
        has room of its own.
        """
        rows = self.run - 1 + (self.last if self.last < self.run else 0)
        return self.slots + (rows * row if rows else 0)


@dataclass(frozen=True)
class TurnCosts:
    """What the choice of runs weighs beside runs of the body, in units of one.

    Attributes:
      turn: a turn of the backward loop.
      kept: keeping an iteration's values in a run, and reading them again.
      waiting: adding to those cotangents that can wait, at every iteration or once a run; 0 where none can.
    """

    turn: float = 0.25
    kept: float = 0.0
    waiting: float = 0.0


def binomial(
    length: int, slots: int, *, row: float = math.inf, again: bool = False, costs: TurnCosts = TurnCosts()
) -> Binomial:
    """Returns the runs and slots that use `slots` carries' bytes best: never more runs of the body than revolve with
    `slots` carries.

    Args:
      length: iterations, at least 1.
      slots: carries whose bytes may be kept.
      row: bytes that a run keeps of an iteration, in carries. Infinite: only runs of one iteration.
      again: whether a run keeps carries alone.
      costs: what else is weighed.

    >>> binomial(1024, 32, row=3.0)
    Binomial(length=1024, run=4, slots=23, again=False)
    >>> binomial(1024, 32).body_runs == 1024 + 1 + extra_iterations(1024, 32)
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
    costs: TurnCosts = TurnCosts(),
) -> Binomial | None:
    """Returns the runs that take least time, and no more runs of the body than revolve where that fits; None where
    nothing fits.

    Args:
      length: iterations, at least 1.
      left: iterations in a run -> slots that there is room for then; 0 where such a run does not fit.
      row: what a run keeps of an iteration, in carries: of equally fast runs the one that keeps less is taken.
      again: whether a run keeps carries alone.
      costs: what else is weighed.
    """

    def score(plan: Binomial) -> tuple[float, float]:
        kept = length * costs.kept if plan.run > 1 else 0.0
        return plan.body_runs + plan.units * (costs.turn + costs.waiting) + kept, plan.carries(row)

    plans = [
        Binomial(length, run, min(slots, -(-length // run)), again and run > 1)
        for run in range(1, max(1, min(length, LONGEST_RUN)) + 1)
        if (slots := left(run)) >= 1
    ]
    if plans and plans[0].run == 1:
        plans = [plan for plan in plans if plan.body_runs <= plans[0].body_runs]
    return min(plans, key=score, default=None)


# ---------------------------------------------------------------------------------------------------- places for a loop


@dataclass(frozen=True)
class Places:
    """The table with which a compiled loop places carries as revolve does: a few integers for each slot, for any length
    of the scan.

    A slot holds the carry of the first iteration of a *part* that is still to be reversed; the parts lie one after the
    other, in the order of the slots. A part with s slots free, its own included, and r repetitions left has at most
    C(s+r, s) iterations. When it is reversed, the next carry is kept at its iteration `cut`: what lies after that has a
    slot less, what lies before it keeps its slot and has a repetition less. That is t(l, s) = j + t(l-j, s-1) + t(j,
    s), with a j for which both sides stay optimal.

    Attributes:
      length, slots: iterations, and slots that are used.
      reach: int32 of shape (slots + 1, repetitions): C(s+r, s), or the length where that is less. Of shape (1, 1) for
        one slot.
      starts: int32, one a slot: first iterations of the parts once the forward pass has placed its carries; the length
        where there is no part.
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

    def cut(self, reach: Any, iterations: Any, free: Any, left: Any) -> Any:
        """Returns the iteration of a part at which the next carry is kept; where only one slot is free, its last
        iteration, which needs no carry.

        Args:
          reach: the table, as an array of NumPy's or JAX's.
          iterations, free, left: of the part, ints or arrays.
        """
        if self.slots == 1:
            return iterations - 1
        most, rest = reach[free, left - 1], iterations - reach[free - 1, left - 1]
        return most + (rest - most) * (rest < most)


def places_bytes(length: int, slots: int) -> int:
    """Returns the bytes of the integers of `places(length, slots)`, as constants and as what a loop changes."""
    slots = min(slots, length)
    table = (slots + 1) * repetitions(length, slots) if slots > 1 else 1
    return 4 * (table + 4 * slots)


def places(length: int, slots: int) -> Places:
    """Returns how `slots` carries are placed over `length` iterations, both at least 1.

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
    while (iterations := length - int(starts[top])) > 1:
        to = int(starts[top]) + int(empty.cut(reach, iterations, slots - top, int(left[top])))
        left[top] -= 1
        if to == length - 1:
            break
        top += 1
        starts[top], left[top] = to, left[top - 1] + 1
    return replace(empty, starts=starts, left=left, top=top)
