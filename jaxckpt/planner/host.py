"""The host's link and the host's memory: one resource of each for a whole step, which a plan's values share.

Where a compiler hides transfers (`Target.hidden_transfers`, and all in loops), they run beside other work until the
link is full: until it is at work for as long as the step computes. So they are free for a plan that leaves room, and
what they cost beyond that is found as a price: of all plans within a limit of device memory, one that is cheapest in
seconds of work plus the price times seconds of the link uses less of the link the higher the price is (H. Everett 1963,
"Generalized Lagrange multiplier method"). At a price a chain is a chain like any other, and every solver solves it.
Where nothing hides them, a candidate's own seconds have them.

At one price all equal layers move their values, or none does. So the last stages pay the least price at which the link
is not more than full, and the first ones the price before it; how many these are is found too. What the first stages
keep is fetched last, so it is there that values on the host free most.

The guarantee is that of the link: what comes out takes no more of it than there is, unless nothing else fits the limit.
That it is the cheapest such plan is not guaranteed: prices are those of a list, and a Lagrangian has gaps.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxckpt._errors import ArgumentError
from jaxckpt.core.constants import LINK_FULL, LINK_SHARES, PLAN_LINK_PRICES
from jaxckpt.core.units import parse_bytes
from jaxckpt.memory.targets import Target
from jaxckpt.planner.chain import Candidate, Chain, Drop, Keep, Segment, Solution, cost
from jaxckpt.planner.solvers import Solver
from jaxckpt.planner.solvers.base import NOTHING

RULE = "a number of bytes of at least 0, a size such as '200GiB', or None"


def host_budget_bytes(host_budget: int | str | None, target: Target) -> int | None:
    """Returns a budget of host memory in bytes; None for no bound.

    Raises:
      ArgumentError: it is none, or the target has no host memory beside its own.

    >>> from jaxckpt import Target
    >>> host_budget_bytes(None, Target("cpu"))
    """
    count = parse_host_budget(host_budget)
    if count is not None and not target.host_is_apart:
        hint = "A CPU's memory is the host's memory: leave host_budget out, or plan for another target."
        raise ArgumentError("host_budget", f"None for {target.name}, which has no other memory", host_budget, hint)
    return count


def parse_host_budget(host_budget: int | str | None) -> int | None:
    """Returns a budget of host memory in bytes, whatever the target is; None for no bound.

    Raises:
      ArgumentError: it is none.
    """
    if host_budget is None:
        return None
    try:
        return parse_bytes(host_budget)
    except ArgumentError:
        raise ArgumentError("host_budget", RULE, host_budget) from None


@dataclass(frozen=True)
class HostUse:
    """What a solution takes of the host.

    Attributes:
      link: seconds of its link, in both directions, that other work may hide.
      bytes: of its memory, at most.
      waits: seconds of its link that nothing hides.
    """

    link: float = 0.0
    bytes: int = 0
    waits: float = 0.0

    def __add__(self, other: HostUse) -> HostUse:
        return HostUse(self.link + other.link, self.bytes + other.bytes, self.waits + other.waits)

    def covers(self, candidate: Candidate) -> bool:
        """Whether a candidate takes no more of the link that is to be hidden, and of the memory."""
        return candidate.link <= self.link and candidate.host <= self.bytes

    def exposed(self, computed: float) -> float:
        """Returns the seconds that a step waits for the link, if it computes for so many."""
        return max(self.link - computed, 0.0) + self.waits


ANY = HostUse(math.inf, sys.maxsize)
"""More than any candidate takes."""


def host_use(chain: Chain, solution: Sequence[Keep | Drop]) -> HostUse:
    """Returns what a solution takes of the host."""
    total = HostUse()
    for item in solution:
        if isinstance(item, Keep):
            candidate = chain.candidate(item)
            total += HostUse(candidate.link, candidate.host, candidate.waits)
        else:
            total += host_use(chain, item.again)
    return total


class _Priced:
    """A chain where the host has a price.

    Args:
      chain: the chain.
      prices: of each stage, of a second of the link; None where nothing may be on the host.
      weight: seconds that a byte on the host counts as.
      solver: solves it, and keeps what it solved.
      most: what one candidate may take of the host.
    """

    def __init__(
        self,
        chain: Chain,
        prices: Sequence[float | None],
        weight: float,
        solver: Solver,
        most: HostUse = ANY,
    ) -> None:
        self.solver, self._most = copy.copy(solver), most
        self._numbers: dict[tuple[int, int], list[int]] = {}
        segments = {
            (start, stop): self._segment(start, stop, segment, prices[start], weight)
            for (start, stop), segment in chain.segments.items()
        }
        self.chain = replace(chain, segments=segments)

    def _segment(self, start: int, stop: int, segment: Segment, price: float | None, weight: float) -> Segment:
        chosen = [
            (number, each)
            for number, each in enumerate(segment.candidates)
            if not each.on_host or (price is not None and self._most.covers(each))
        ]
        self._numbers[start, stop] = [number for number, _ in chosen]
        charge = lambda each: replace(each, time=each.time + (price or 0.0) * (each.link + weight * each.host))
        return replace(segment, candidates=tuple(charge(each) if each.on_host else each for _, each in chosen))

    def solve(self, limit: int) -> Solution | None:
        """Returns the solver's solution in the numbers of the chain without prices; None where it finds none."""
        found = self.solver.least(self.chain) if limit == NOTHING else self.solver.answer(self.chain, limit)
        return None if found is None else self.original(found)

    def original(self, solution: Sequence[Keep | Drop]) -> Solution:
        """Returns a solution in the numbers of the chain without prices."""
        return tuple(
            replace(item, candidate=self._numbers[item.start, item.stop][item.candidate])
            if isinstance(item, Keep)
            else replace(item, again=self.original(item.again))
            for item in solution
        )


class Host:
    """The host of one chain: solves the chain such that its link is at most full, and its memory within a budget.

    Args:
      chain: where candidates say what they take of the host.
      solver: solves chains.
      step_seconds: that a step computes without recomputation.
      budget: bytes of host memory; None for no bound.
    """

    def __init__(self, chain: Chain, solver: Solver, step_seconds: float, budget: int | None = None) -> None:
        self.chain, self.solver, self.step_seconds, self.budget = chain, solver, step_seconds, budget
        self.used = any(each.on_host for segment in chain.segments.values() for each in segment.candidates)
        self._known: dict[tuple[int, int, HostUse], _Priced] = {}

    def solve(self, limit: int) -> Solution | None:
        """Returns a solution within a limit of device bytes, or None; see the module."""
        if not self.used:
            return self.solver.answer(self.chain, limit)
        last = len(PLAN_LINK_PRICES)  # nothing on the host
        looked: dict[int, Solution | None] = {}

        def look(number: int) -> bool:
            looked[number] = self._priced(number).solve(limit)
            solution = looked[number]
            return solution is not None and self.admits(solution)

        if look(0) or looked[0] is None:
            return looked[0]
        low, high = 0, last
        admitted = look(last)
        if not admitted and not look(last - 1):
            # Nothing else fits: as little of the link as can be, if the host has room.
            solution = looked[last - 1]
            return solution if solution is not None and self.has_room(solution) else None
        high = last if admitted else last - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if look(middle) else (middle, high)
        best = [looked[high]] + [each for each in looked.values() if each is not None and self.admits(each)]
        best += self._mixed(high, limit)
        for share in LINK_SHARES:
            best += self._shared(share, high, limit)
        return min((each for each in best if each is not None), key=self._time)

    def _mixed(self, number: int, limit: int, most: HostUse = ANY) -> Iterator[Solution]:
        """Yields admitted solutions in which the first stages pay the price before this number: ever more of them, as
        long as the host has room.
        """
        few, many = 0, self.chain.length
        while many - few > 1:
            middle = (few + many) // 2
            solution = self._priced(number, middle, most).solve(limit)
            if solution is not None and self.admits(solution):
                yield solution
                few = middle
            else:
                many = middle

    def _shared(self, share: float, number: int, limit: int) -> Iterator[Solution]:
        """Yields admitted solutions in which no candidate takes more than a share of the host; none where none would: a
        loop has many iterations, and a long stretch many values, which all move at one price, or none does.
        """
        most = HostUse(
            share * LINK_FULL * self.step_seconds, ANY.bytes if self.budget is None else int(share * self.budget)
        )
        if all(most.covers(each) for segment in self.chain.segments.values() for each in segment.candidates):
            return
        solution = self._priced(0, most=most).solve(limit)
        if solution is not None and self.admits(solution):
            yield solution
        else:
            yield from self._mixed(number, limit, most)

    def least(self) -> Solution | None:
        """Returns the solution with the least bytes that the solver knows of, within the budget of host memory."""
        if not self.used:
            return self.solver.least(self.chain)
        found = self._priced(len(PLAN_LINK_PRICES) - 1).solve(NOTHING)
        if found is not None and self.has_room(found):
            return found
        return self._priced(len(PLAN_LINK_PRICES)).solve(NOTHING)

    def without(self, limit: int) -> Solution | None:
        """Returns the solver's solution that has nothing on the host, or None."""
        return self._priced(len(PLAN_LINK_PRICES)).solve(limit) if self.used else self.solve(limit)

    def priced_chains(self) -> Iterator[tuple[Chain, Callable[[Solution], Solution]]]:
        """Yields the chain at some prices, each with the function from its solutions to those of the chain."""
        last = len(PLAN_LINK_PRICES)
        for number in (last, *range(0, last, 3)) if self.used else (last,):
            made = self._priced(number)
            yield made.chain, made.original

    def admits(self, solution: Solution) -> bool:
        """Whether a solution takes no more of the host than there is."""
        computed = self.step_seconds + self._seconds(solution)
        return self.has_room(solution) and host_use(self.chain, solution).link <= LINK_FULL * computed

    def has_room(self, solution: Solution) -> bool:
        """Whether a solution is within the budget of host memory."""
        return self.budget is None or host_use(self.chain, solution).bytes <= self.budget

    def _seconds(self, solution: Sequence[Keep | Drop]) -> float:
        """Returns the seconds of what a solution recomputes, less than all where it runs regions again."""
        return sum(
            self.chain.candidate(item).seconds if isinstance(item, Keep) else self._seconds(item.again)
            for item in solution
        )

    def _time(self, solution: Solution) -> float:
        return cost(self.chain, solution).time

    def _priced(self, number: int, first: int = 0, most: HostUse = ANY) -> _Priced:
        """Returns the chain whose stages pay the price of a number, its `first` ones the price before it; the number
        after the last is no price, and nothing on the host. No candidate takes more than `most` of the host.
        """
        if (number, first, most) not in self._known:
            prices = [self._price(number - (stage < first)) for stage in range(self.chain.length + 1)]
            self._known[number, first, most] = _Priced(self.chain, prices, self._weight, self.solver, most)
        return self._known[number, first, most]

    def _price(self, number: int) -> float | None:
        return PLAN_LINK_PRICES[number] if number < len(PLAN_LINK_PRICES) else None

    @functools.cached_property
    def _weight(self) -> float:
        """Seconds of the link that a byte of the host's memory counts as: it is full when the link is."""
        return self.step_seconds / self.budget if self.budget else 0.0
