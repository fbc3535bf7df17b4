"""What a solver is: an object that finds a schedule of a chain for a budget of bytes, or says what the least budget is that it has one for."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass

from jaxckpt.planner.chain import Chain, Schedule, cost

NOTHING = -1
"""A budget in bytes that no schedule fits: what a solver answers to it names its least."""


@dataclass(frozen=True)
class Infeasible:
    """A solver's answer where it found no schedule within the budget.

    Attributes:
      least_bytes: the least budget that it has a schedule for, besides arguments; None where it knows of none.
      schedule: the one that it has for that budget.
    """

    least_bytes: int | None = None
    schedule: Schedule | None = None


def cheapest(chain: Chain, schedules: Iterable[Schedule], budget: int) -> Schedule | Infeasible:
    """Returns the cheapest of these schedules that peaks at no more than `budget` bytes; if none does, the least that one does."""
    best: tuple[float, Schedule] | None = None
    least: tuple[int, Schedule] | None = None
    for schedule in schedules:
        result = cost(chain, schedule)
        if result.peak <= budget and (best is None or result.time < best[0]):
            best = result.time, schedule
        if least is None or result.peak < least[0]:
            least = result.peak, schedule
    if best is not None:
        return best[1]
    return Infeasible() if least is None else Infeasible(*least)


class Solver(abc.ABC):
    """Finds schedules of chains. `jaxckpt.plan(solver=...)` takes the name of one of `SOLVERS`, or an instance of any subclass.

    One instance is asked for many budgets, and for several chains one after the other, by several threads at a time. What budgets share is kept
    in the instance, for the last chain. A solver answers for itself: nothing is planned with another one where it finds nothing.

    Attributes:
      name: what to call it in messages; `jaxckpt.autocheckpoint(path=...)` also tells stored plans apart by it.

    >>> from jaxckpt.planner.chain import Keep
    >>> class Lean(Solver):
    ...     name = "lean"
    ...     def schedule(self, chain, budget):
    ...         leanest = tuple(Keep(i, i + 1, min(range(len(s.options)), key=lambda o: s.options[o].kept))
    ...                         for i in range(chain.length) for s in [chain.span(i, i + 1)])
    ...         return cheapest(chain, [leanest], budget)
    >>> Lean().schedule(Chain(0, {}), 0), Lean().least(Chain(0, {}))
    ((), ())
    """

    name: str
    _known: tuple[Chain, Schedule | None] | None = None

    @abc.abstractmethod
    def schedule(self, chain: Chain, budget: int) -> Schedule | Infeasible:
        """Returns the cheapest schedule that it finds within a budget.

        Args:
          chain: the program's stages with their options.
          budget: bytes besides arguments; may be less than any schedule needs, below 0 too.

        Returns:
          The schedule, which covers every stage once and peaks at no more than `budget` (`jaxckpt.planner.chain.cost`), or `Infeasible`.
        """

    def least(self, chain: Chain) -> Schedule | None:
        """Returns the schedule that it has for the least budget that it has one for; None where it knows of none."""
        known = self._known  # another thread may set it meanwhile, for another chain
        if known is None or known[0] is not chain:
            answer = self.schedule(chain, NOTHING)
            self._known = known = chain, answer.schedule if isinstance(answer, Infeasible) else answer
        return known[1]
