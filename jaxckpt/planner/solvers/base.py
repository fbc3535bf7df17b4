"""What a solver is: it finds a solution of a chain within a limit of bytes, or says what the least limit is that it can
keep to.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxckpt._errors import ArgumentError
from jaxckpt.planner.chain import Chain, Solution, cost, covers

NOTHING = -1
"""A limit in bytes that no solution fits: what a solver answers to it names its least."""


@dataclass(frozen=True)
class Infeasible:
    """A solver's answer where it found no solution within the limit.

    Attributes:
      least_bytes: the least limit that it has a solution for, besides arguments; None where it knows of none.
      solution: the one that it has for that limit.
    """

    least_bytes: int | None = None
    solution: Solution | None = None


def cheapest(chain: Chain, solutions: Iterable[Solution], limit: int) -> Solution | Infeasible:
    """Returns the cheapest of these solutions that peaks at no more than `limit` bytes; if none does, the least that
    one does.
    """
    best: tuple[float, Solution] | None = None
    least: tuple[int, Solution] | None = None
    for solution in solutions:
        result = cost(chain, solution)
        if result.peak <= limit and (best is None or result.time < best[0]):
            best = result.time, solution
        if least is None or result.peak < least[0]:
            least = result.peak, solution
    if best is not None:
        return best[1]
    return Infeasible() if least is None else Infeasible(*least)


class Solver(abc.ABC):
    """Finds solutions of chains. `jaxckpt.plan(solver=...)` takes the name of one of `SOLVERS`, or an instance of any
    subclass.

    One instance is asked for many limits, and for several chains one after the other, by several threads at a time.
    What limits share is kept in the instance, for the last chain. If a solver finds nothing, no other solver is tried.

    Attributes:
      name: what to call it in messages; `jaxckpt.autocheckpoint(path=...)` also tells stored plans apart by it, and by
        `parameters()`.
      own_only: whether a plan must be one that this solver found for its budget. If not, the search may also return
        what was found for another budget, or what people do by hand, if that fits and is cheaper.

    >>> from jaxckpt.planner.chain import Chain, Keep
    >>> from jaxckpt.planner.solvers.base import Solver, cheapest
    >>> class Lean(Solver):
    ...     name = "lean"
    ...     def solve(self, chain, limit):
    ...         leanest = tuple(Keep(i, i + 1, min(range(len(s.candidates)), key=lambda o: s.candidates[o].kept))
    ...                         for i in range(chain.length) for s in [chain.segment(i, i + 1)])
    ...         return cheapest(chain, [leanest], limit)
    >>> Lean().solve(Chain(0, {}), 0), Lean().least(Chain(0, {}))
    ((), ())
    """

    name: str
    own_only: ClassVar[bool] = True
    _known: tuple[Chain, Solution | None] | None = None

    def parameters(self) -> Mapping[str, Any]:
        """Returns what tells this instance from others of its class, by name: numbers and text."""
        return {}

    @abc.abstractmethod
    def solve(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns the cheapest solution that it finds within a limit.

        Args:
          chain: the program's stages with their candidates.
          limit: bytes besides arguments; may be less than any solution needs, below 0 too.

        Returns:
          The solution, which covers every stage once and peaks at no more than `limit` (`jaxckpt.planner.chain.cost`),
          or `Infeasible`.
        """

    def answer(self, chain: Chain, limit: int) -> Solution | None:
        """Returns the solution that `solve` finds, or None.

        Raises:
          ArgumentError: it is no solution of the chain, or peaks above the limit.
        """
        found = self.solve(chain, limit)
        return None if isinstance(found, Infeasible) else self._checked(chain, found, limit)

    def least(self, chain: Chain) -> Solution | None:
        """Returns the solution that it has for the least limit that it has one for; None where it knows of none.

        Raises:
          ArgumentError: it is no solution of the chain.
        """
        known = self._known  # another thread may set it meanwhile, for another chain
        if known is None or known[0] is not chain:
            answer = self.solve(chain, NOTHING)
            found = answer.solution if isinstance(answer, Infeasible) else self._checked(chain, answer, NOTHING)
            self._known = known = chain, None if found is None else self._checked(chain, found, None)
        return known[1]

    def _checked(self, chain: Chain, found: Solution, limit: int | None) -> Solution:
        if not covers(chain, found):
            rule = "one whose solutions are tuples of Keep and Drop that cover every stage once, in order"
        elif limit is not None and cost(chain, found).peak > limit:
            rule = f"one whose solutions peak at no more than the limit, {limit} bytes"
        else:
            return found
        raise ArgumentError("solver", rule, self, f"{self.name} returned {found!r:.200}.")
