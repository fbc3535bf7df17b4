"""One solver a file, all of one signature: see `Solver`. `SOLVERS` has their classes by the names that users give.

| name | finds | for |
|---|---|---|
| `chain` | the optimum (`optimal.STEPS` says to what) | everything; the default |
| `milp` | the optimum, or in a given time what it comes to, and a bound on all orders of runs | up to 60 stages |
| `exhaustive` | the optimum, by trying every solution | four or five stages; an oracle |
| `greedy` | something, often good | a comparison |
| `sqrt` | equal segments | a comparison: what is made by hand |

>>> from jaxckpt.planner.chain import Carried, Chain, Candidate, Segment
>>> stage = lambda candidates: Segment(forward_time=1.0, forward_work=4, gradient=0, candidates=candidates)
>>> first, second = stage((Candidate(0, 0.5, 4), Candidate(4, 0.0, 2))), stage((Candidate(4, 0.0, 2),))
>>> chain = Chain(2, {(0, 1): first, (1, 2): second, (0, 2): stage(())}, (Carried(4, 0, (1,)),))
>>> solver("chain").solve(chain, 14)
(Keep(start=0, stop=1, candidate=1), Keep(start=1, stop=2, candidate=0))
>>> solver("chain").solve(chain, 10)
(Keep(start=0, stop=1, candidate=0), Keep(start=1, stop=2, candidate=0))
>>> solver("chain").solve(chain, 9)
Infeasible(least_bytes=10, solution=(Keep(start=0, stop=1, candidate=0), Keep(start=1, stop=2, candidate=0)))
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxckpt._errors import ArgumentError, did_you_mean
from jaxckpt.planner.solvers.base import Infeasible, Solver
from jaxckpt.planner.solvers.exhaustive import Exhaustive
from jaxckpt.planner.solvers.greedy import Greedy
from jaxckpt.planner.solvers.milp import Milp
from jaxckpt.planner.solvers.optimal import Optimal
from jaxckpt.planner.solvers.sqrt import Sqrt

__all__ = ["SOLVERS", "Infeasible", "Solver", "solver"]

SOLVERS: Mapping[str, type[Solver]] = MappingProxyType(
    {kind.name: kind for kind in (Optimal, Milp, Greedy, Sqrt, Exhaustive)}
)
"""Every solver's class, by name."""


def solver(given: str | Solver) -> Solver:
    """Returns a new solver of that name, or the instance that was given.

    Raises:
      ArgumentError: it is neither; the nearest names are given.
    """
    if isinstance(given, Solver):
        return given
    if not isinstance(given, str):
        rule = "the name of a solver, or an instance of a subclass of jaxckpt.planner.solvers.Solver"
        raise ArgumentError("solver", rule, given, did_you_mean(str(given), SOLVERS))
    if given not in SOLVERS:
        raise ArgumentError("solver", "the name of a solver", given, did_you_mean(given, SOLVERS))
    return SOLVERS[given]()
