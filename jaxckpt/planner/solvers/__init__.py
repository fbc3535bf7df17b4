"""One solver a file, one signature: (chain, budget) -> schedule or None. `SOLVERS` has them by the names that users give.

| name | finds | for |
|---|---|---|
| `chain` | the optimum (`optimal.STEPS` says to what) | everything; the default |
| `milp` | the optimum, by integer programming | a dozen stages; an oracle |
| `exhaustive` | the optimum, by trying every schedule | four or five stages; an oracle |
| `greedy` | something, often good | a comparison |
| `sqrt` | equal segments | a comparison: what is made by hand |

>>> from jaxckpt.planner.chain import Carried, Chain, Option, Span
>>> stage = lambda options: Span(forward_time=1.0, forward_work=4, gradient=0, options=options)
>>> chain = Chain(2, {(0, 1): stage((Option(0, 0.5, 4), Option(4, 0.0, 2))), (1, 2): stage((Option(4, 0.0, 2),)), (0, 2): stage(())},
...               (Carried(4, 0, (1,)),))
>>> solver("chain")(chain, 14)
(Keep(start=0, stop=1, option=1), Keep(start=1, stop=2, option=0))
>>> solver("chain")(chain, 10)
(Keep(start=0, stop=1, option=0), Keep(start=1, stop=2, option=0))
>>> solver("chain")(chain, 9) is None
True
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxckpt._errors import ArgumentError, did_you_mean
from jaxckpt.planner.chain import Solver

# under other names here, for these ones are the modules'
from jaxckpt.planner.solvers.exhaustive import exhaustive as _exhaustive
from jaxckpt.planner.solvers.greedy import greedy as _greedy
from jaxckpt.planner.solvers.milp import milp as _milp
from jaxckpt.planner.solvers.optimal import optimal as _optimal
from jaxckpt.planner.solvers.sqrt import sqrt as _sqrt

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {"chain": _optimal, "milp": _milp, "greedy": _greedy, "sqrt": _sqrt, "exhaustive": _exhaustive}
)
"""Every solver, by name."""


def solver(name: str) -> Solver:
    """Returns the solver of that name.

    Raises:
      ArgumentError: there is none; the nearest names are given.
    """
    if name not in SOLVERS:
        raise ArgumentError("solver", "the name of a solver", name, did_you_mean(name, SOLVERS))
    return SOLVERS[name]
