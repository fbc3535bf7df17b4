"""The cheapest solution of a small chain as an integer linear programme, solved by HiGHS: exact, and nothing in common
with the recursion.

A solution is a set of runs that nest: the forward pass, 0..length, and one run of s..t for each Drop of s..t. No two
runs of a solution are of the same stages, for a Drop of a whole run would only add a forward run. So with binary
variables

    keep[p, q, a, b, o]   the run of p..q has Keep(a, b, o)
    drop[p, q, a, b]      the run of p..q has Drop(a, b), b < q: then there is a run of a..b

a solution of any depth is a unit of flow from p to q through the items of each run that there is. The bytes held before
stage a in the run of p..q are those of the items that end at or before a, in this run and in every run that contains
p..q:

    held[p, q, a] = sum of kept over the items (p', q', a', b') with p' <= p, q <= q', b' <= a

because the runs that contain p..q and are in the solution are the ones around it. Where the run of p..q is not in the
solution, held is what is held at that place in the innermost run that is, so the limit may bound it everywhere and
nothing needs a large constant:

    held[p, q, a] + sum over the items of p..q that start at a of the bytes that the item needs   <=   limit

The formulation is ours; the idea of an exact integer programme for rematerialisation is Checkmate's (Jain et al. 2020,
arXiv:1910.02653), whose matrices over operations have no candidates and no segments.

Guarantee: the optimum of the model of `jaxckpt.planner.chain`, to HiGHS's tolerances: about a millionth of the limit in
bytes, and 1e-6 of the time. There are O(length^4) variables for each candidate: up to some ten seconds for ten stages,
half a minute for twelve or fourteen; hence `STAGES`.

A longer chain is given to the programme of `jaxckpt.planner.solvers.bound`, which knows more orders of runs with fewer
variables, but not each of its orders is a nested solution. So the answer is its order where that is nested, fits and is
cheaper, and else what `chain` finds; `Milp.proved` says what no order can be below.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._errors import ArgumentError
from jaxckpt.core.units import as_number
from jaxckpt.planner.chain import Chain, Drop, Keep, Solution, cost
from jaxckpt.planner.preferences import leanest, single
from jaxckpt.planner.solvers.base import Infeasible, Solver
from jaxckpt.planner.solvers.bound import NONE, Bound, bound
from jaxckpt.planner.solvers.optimal import Optimal

logger = logging.getLogger("jaxckpt")

STAGES = 16
"""Up to so many stages the programme of nested solutions is solved to the end."""

SECONDS = 20.0
"""Of HiGHS for one limit of a longer chain."""

_TRIES = 4

Interval = tuple[int, int]


@dataclass(frozen=True)
class _Item:
    """A binary variable: in the run `run`, stages start..stop are kept with candidate `candidate`, or dropped if that
    is None.

    Attributes:
      time: seconds of recomputation that it adds.
      kept: bytes held while the rest of the run goes on.
      need: bytes that it needs besides those held before it.
    """

    run: Interval
    start: int
    stop: int
    candidate: int | None
    time: float
    kept: int
    need: int


class Milp(Solver):
    """The cheapest solution, by HiGHS.

    Args:
      seconds: how long HiGHS may take for one limit of a chain of more than `STAGES` stages; shorter ones are solved to
        the end.

    Attributes:
      proved: what was proved of the last chain and limit; None for one of up to `STAGES` stages, whose solution is the
        optimum.

    Raises:
      ArgumentError: `seconds` is not a number above 0.
    """

    name = "milp"

    def __init__(self, seconds: float = SECONDS) -> None:
        count = as_number(seconds)
        if count is None or not 0 < count < NONE:
            raise ArgumentError("seconds", "a number of seconds above 0", seconds)
        self.seconds = count
        self.proved: Bound | None = None
        self._nested = Optimal()

    def parameters(self) -> Mapping[str, Any]:
        """Returns how long it may search."""
        return {"seconds": self.seconds}

    def solve(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns the cheapest solution that peaks at no more than `limit` bytes; there is none where it says so. For a
        chain of more than `STAGES` stages it is the cheapest that was found in the time.
        """
        self.proved = None
        if chain.length > STAGES:
            return self._found(chain, limit)
        if not chain.length:
            return () if limit >= 0 else Infeasible(0, ())
        items = [item for item in _items(chain) if item.need <= limit]
        tight = 1.0
        for _ in range(_TRIES):
            chosen = _solve(chain.length, items, limit, tight)
            if chosen is None:
                break
            solution = _solution((0, chain.length), chosen)
            # HiGHS may exceed a bound by its tolerance: then ask for that much less
            if cost(chain, solution).peak <= limit:
                return solution
            tight -= 2e-6
        least = self.least(chain) or ()
        return Infeasible(cost(chain, least).peak, least)

    def _found(self, chain: Chain, limit: int) -> Solution | Infeasible:
        """Returns the solution of a long chain: the better one of two."""
        nested = self._nested.solve(chain, limit)
        if isinstance(nested, Infeasible):
            return nested
        known = cost(chain, nested).time
        self.proved = proved = bound(chain, limit, self.seconds, known)
        logger.info(
            "milp: %d stages, %d bytes: %.3g s of recomputation, and no order of runs takes less than %.3g s",
            chain.length,
            limit,
            known,
            proved.least_time,
        )
        if proved.solution is not None:
            other = cost(chain, proved.solution)
            if other.peak <= limit and other.time < known:
                return proved.solution
        return nested

    def least(self, chain: Chain) -> Solution | None:
        """Returns the solution that peaks lowest: another programme, which minimises the bytes at the peak."""
        if chain.length > STAGES:
            return self._nested.least(chain)
        known = self._known
        if known is not None and known[0] is chain and known[1] is not None:
            return known[1]
        least: Solution = single(chain, leanest)
        enough = cost(chain, least).peak
        chosen = _solve(chain.length, [item for item in _items(chain) if item.need <= enough], enough, None)
        if chosen is not None:
            least = _solution((0, chain.length), chosen)
        self._known = chain, least
        return least


def _items(chain: Chain) -> Iterator[_Item]:
    length = chain.length
    written = [chain.segment(at, length).gradient if at < length else 0 for at in range(length + 1)]
    for p, q in _intervals(0, length):
        for a, b in _intervals(p, q):
            segment, output = chain.segment(a, b), chain.output(a, b, q)
            run = max(segment.forward_work, output) + written[q]
            for number, candidate in enumerate(segment.candidates):
                need = max(
                    run, output + candidate.kept + written[q], candidate.kept + candidate.work + written[b], written[a]
                )
                yield _Item((p, q), a, b, number, candidate.time, output + candidate.kept, need)
            if b < q:  # at the end of a run its own items in its place need no more bytes, and a forward run less
                yield _Item((p, q), a, b, None, segment.forward_time, output, max(run, written[a]))


def _solve(length: int, items: list[_Item], limit: int, tight: float | None) -> list[_Item] | None:
    """Returns the items of the cheapest solution in which no place takes more than `tight` of the limit, or None.

    With None for `tight` it is the solution whose places take least, within the limit.
    """
    from scipy import optimize, sparse

    places = [(p, q, a) for p, q in _intervals(0, length) for a in range(p, q)]
    held = {place: len(items) + i for i, place in enumerate(places)}
    top = len(items) + len(places)  # the variable that is the bytes at the peak, where they are what is minimised
    rows = _Rows()
    unit = max(limit, 1)
    by_start: dict[tuple[int, int, int], list[int]] = {}
    by_stop: dict[tuple[int, int, int], list[int]] = {}
    dropped: dict[Interval, list[int]] = {}
    for i, item in enumerate(items):
        by_start.setdefault((*item.run, item.start), []).append(i)
        by_stop.setdefault((*item.run, item.stop), []).append(i)
        if item.candidate is None:
            dropped.setdefault((item.start, item.stop), []).append(i)
    ended: dict[tuple[int, int, int], list[int]] = {}
    for p, q, a in places:
        begin, end = by_start.get((p, q, a), []), by_stop.get((p, q, a), [])
        flow = [(i, 1.0) for i in begin]
        if a > p:
            rows.add(flow + [(i, -1.0) for i in end], 0, 0)
        elif (p, q) == (0, length):
            rows.add(flow, 1, 1)
        else:
            rows.add(flow + [(i, -1.0) for i in dropped.get((p, q), [])], 0, 0)
        ended[p, q, a] = end if a == p else ended[p, q, a - 1] + end
        terms = [(held[p, q, a], -1.0)] + [(i, items[i].kept / unit) for i in ended[p, q, a]]
        for around, sign in (((p - 1, q, a), 1.0), ((p, q + 1, a), 1.0), ((p - 1, q + 1, a), -1.0)):
            if around in held:
                terms.append((held[around], sign))
        rows.add(terms, 0, 0)
        room = [(top, -1.0)] if tight is None else []
        needs = [(held[p, q, a], 1.0)] + [(i, items[i].need / unit) for i in begin]
        rows.add(needs + room, -np.inf, 0.0 if tight is None else tight)
    count = top + (tight is None)
    time = np.zeros(count)
    if tight is None:
        time[top] = 1.0
    else:
        time[: len(items)] = [item.time for item in items]
    binary = np.arange(count) < len(items)
    matrix = sparse.csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.low), count))
    result = optimize.milp(
        time / max(float(time.max()), 1e-300),
        integrality=binary.astype(int),
        bounds=optimize.Bounds(0, np.where(binary, 1.0, np.inf)),
        constraints=optimize.LinearConstraint(matrix, rows.low, rows.high),
        options={"mip_rel_gap": 1e-6},
    )
    if result.x is None:
        return None
    return [item for item, value in zip(items, result.x) if value > 0.5]


class _Rows:
    """Rows of a sparse matrix, with their bounds."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        """Adds low <= sum of value * column <= high."""
        self.rows += [len(self.low)] * len(terms)
        self.columns += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.low.append(low)
        self.high.append(high)


def _solution(run: Interval, chosen: list[_Item]) -> Solution:
    """Returns the solution of a run out of the items of all runs."""
    return tuple(
        Drop(item.start, item.stop, _solution((item.start, item.stop), chosen))
        if item.candidate is None
        else Keep(item.start, item.stop, item.candidate)
        for item in sorted((item for item in chosen if item.run == run), key=lambda item: item.start)
    )


def _intervals(start: int, stop: int) -> Iterator[Interval]:
    """Yields every (a, b) with start <= a < b <= stop."""
    for a in range(start, stop):
        for b in range(a + 1, stop + 1):
            yield a, b
