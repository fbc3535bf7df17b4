"""How cheap can any order of runs be? A lower bound on the recomputation of a stage graph, proved by HiGHS.

The solvers of chains find nested solutions: a `Drop` runs a stretch of stages again from its start, and what is held
between stages is held for all of that stretch. Where many values skip stages (several towers, a decoder that reads
every level of an encoder) another order may be cheaper: any subset of the values that cross may be held, and any subset
of the stages may run again. This programme knows all of those orders. The stages stay in their order, and keep what
their candidates say.

The backward pass visits the stages from the last to the first. Turn t is what runs for the backward pass of stage t:
some of the stages 0..t, in order, and then that backward pass. The first forward pass belongs to turn `length - 1`.
With binary variables

    again[t, i]     stage i runs in turn t, and keeps nothing
    kept[t, g, o]   segment g runs in turn t, and keeps what its candidate o says until its own backward pass
    held[t, v]      the carried value v is held from before turn t into it

each segment is kept once, all segments that are kept cover each stage once, a stage runs where its inputs are held or
made in the same turn, and a value is held where it was held, or made, in the turn before. In every turn the bytes are
counted as each stage begins and as the backward pass runs: values that are held, or made and still needed in this turn
or in the next; what segments keep; gradients that later stages have written; and what the stage itself needs. A value
that is held into a turn stays until the turn ends; that is the one freedom which the programme does not have.

So there are O(length^2) binary variables for each candidate, where an exact programme of nested solutions
(`jaxckpt.planner.solvers.milp`) has O(length^4). The formulation is ours, for backward passes that each run once; the
idea of an integer programme over turns is Checkmate's (Jain et al. 2020, arXiv:1910.02653).

Guarantee: `Bound.least_time` is at most the time of every solution of the chain that peaks within the limit, if running
a stretch forward needs no less than its stages need one by one. That holds of every chain that
`jaxckpt.planner.model` makes, until a trace corrects it.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.planner.chain import Carried, Chain, Drop, Keep, Solution
from jaxckpt.planner.solvers.optimal import undominated

SAFE = 1e-6
"""By what share a bound of the relaxation is lowered: more than the interior point method's tolerance."""

NONE = float("inf")
"""The time of what there is not."""

ROOM = 1e-5
"""What the programme allows above the limit, as a share of it: more than HiGHS's tolerance, so that the bound holds for
solutions that need all of the limit."""


@dataclass(frozen=True)
class Bound:
    """What was proved of a chain within a limit.

    Attributes:
      least_time: seconds of recomputation that no order of runs can be below; infinite where nothing fits the limit.
      time: seconds of recomputation of the best order that was found within the time; infinite where none was.
      solution: that order as a nested solution, as near as one comes; None where none was found. It may peak higher
        than the limit or take more time, so hold it against `jaxckpt.planner.chain.cost`.
    """

    least_time: float
    time: float
    solution: Solution | None


def bound(chain: Chain, limit: int, seconds: float, known: float = NONE) -> Bound:
    """Returns what HiGHS proves, in `seconds` of time, of all orders of runs that peak at no more than `limit` bytes
    besides the program's arguments.

    Args:
      chain: the stages, with their candidates.
      limit: bytes.
      seconds: of real time, at the most.
      known: seconds of recomputation of a solution that is known to fit. Only orders that take less are looked for,
        which makes the proof faster; where there are none, `known` is the bound.
    """
    if not chain.length:
        return Bound(0.0, 0.0, ()) if limit >= 0 else Bound(NONE, NONE, None)
    return _Turns(chain, limit, known).solve(seconds)


@dataclass(frozen=True)
class _Way:
    """A way to keep a segment: stages start..stop, with candidate `number`; bytes kept, bytes needed in the backward
    pass, seconds of recomputation.
    """

    start: int
    stop: int
    number: int
    kept: int
    need: int
    time: float


class _Turns:
    """The programme of one chain and one limit; arguments as of `bound`.

    Columns are numbered as they are made; `_column` and `_row` fill it in.
    """

    def __init__(self, chain: Chain, limit: int, known: float) -> None:
        self.chain, self.known, self.unit = chain, known, max(limit, 1)
        self.costs: list[float] = []
        self.binary: list[bool] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.low: list[float] = []
        self.high: list[float] = []
        self.length = chain.length
        self.values = [value for value in chain.carried if value.bytes]
        self.forward = [chain.segment(i, i + 1).forward_time for i in range(self.length)]
        self.needs = [chain.segment(i, i + 1).forward_work for i in range(self.length)]
        gradients = [chain.segment(i, i + 1).gradient for i in range(self.length)]
        self.written = [sum(gradients[i:]) for i in range(self.length + 1)]
        self.ways = [
            _Way(start, stop, number, each.kept, each.kept + each.work, each.time)
            for start, choices in enumerate(chain.keepable)
            for stop, segment in choices
            for number, each in ((number, segment.candidates[number]) for number in undominated(segment))
            if each.time <= known and each.kept + each.work <= limit
        ]
        self.segments = sorted({(way.start, way.stop) for way in self.ways})
        self._columns()
        self._runs()
        self._values()
        self._bytes()

    def solve(self, seconds: float) -> Bound:
        """Returns what HiGHS proves in so much time: by the relaxation, in which shares of runs may be taken, and from
        there by the whole programme.
        """
        from scipy import optimize, sparse

        start = time.perf_counter()
        rows, columns, numbers = self.entries
        matrix = sparse.csr_array((numbers, (rows, columns)), shape=(len(self.low), len(self.costs)))
        low, high, cost = np.array(self.low), np.array(self.high), np.array(self.costs)
        most = np.where(self.binary, 1.0, np.inf)
        scale, once = max(float(cost.max()), 1e-300), sum(self.forward)
        equal = low == high
        below, above = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
        relaxed = optimize.linprog(
            cost / scale,
            A_ub=sparse.vstack([matrix[below], -matrix[above]]),
            b_ub=np.concatenate([high[below], -low[above]]),
            A_eq=matrix[equal],
            b_eq=high[equal],
            bounds=np.stack([np.zeros(len(cost)), most], axis=1),
            method="highs-ipm",
            options={"time_limit": seconds},
        )
        if relaxed.status == 2:  # infeasible
            return Bound(self.known, NONE, None)
        least = max(relaxed.fun * scale - once, 0.0) * (1 - SAFE) if relaxed.status == 0 else 0.0
        left = seconds - (time.perf_counter() - start)
        if left <= 0:
            return Bound(min(least, self.known), NONE, None)
        result = optimize.milp(
            cost / scale,
            integrality=np.array(self.binary, int),
            bounds=optimize.Bounds(0, most),
            constraints=optimize.LinearConstraint(matrix, low, high),
            options={"time_limit": left, "mip_rel_gap": 1e-6},
        )
        if result.status == 2:
            return Bound(self.known, NONE, None)
        proved = result.mip_dual_bound
        if proved is not None and np.isfinite(proved):
            least = max(least, proved * scale - once)
        if result.x is None:
            return Bound(min(least, self.known), NONE, None)
        found = max(result.fun * scale - once, 0.0)
        return Bound(min(least, self.known, found), found, self._solution(result.x, 0, self.length, None))

    # ---------------------------------------------------------------------------------------------------- the programme

    def _column(self, cost: float = 0.0, binary: bool = False) -> int:
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def _row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        rows, columns, numbers = self.entries
        for column, number in terms:
            rows.append(len(self.low))
            columns.append(column)
            numbers.append(number)
        self.low.append(low)
        self.high.append(high)

    def _columns(self) -> None:
        turns = range(self.length)
        self.again = {(t, i): self._column(self.forward[i], True) for t in turns for i in range(t + 1)}
        self.kept: dict[tuple[int, int], int] = {}
        for number, way in enumerate(self.ways):
            for t in range(way.stop - 1, self.length):
                cost = sum(self.forward[way.start : way.stop]) + way.time
                self.kept[t, number] = self._column(cost, True)
        # what is held into turn t is made before it, and used by a stage whose backward pass is still to come
        self.held = {
            (t, v): self._column(0.0, True)
            for t in range(self.length - 1)
            for v, value in enumerate(self.values)
            if value.uses[0] <= t
        }
        # the segment has been kept before turn t
        self.before = {
            (t, s): self._column() for s, (_, stop) in enumerate(self.segments) for t in range(stop - 1, self.length)
        }

    def _runs(self) -> None:
        of = {
            segment: [n for n, way in enumerate(self.ways) if (way.start, way.stop) == segment]
            for segment in self.segments
        }
        self.keeping = {
            (t, s): [self.kept[t, n] for n in of[segment]]
            for s, segment in enumerate(self.segments)
            for t in range(segment[1] - 1, self.length)
        }
        around = {i: [s for s, (a, b) in enumerate(self.segments) if a <= i < b] for i in range(self.length)}
        self.ran: dict[tuple[int, int], list[int]] = {}
        for t in range(self.length):
            for i in range(t + 1):
                kept = [each for s in around[i] if self.segments[s][1] <= t + 1 for each in self.keeping[t, s]]
                self.ran[t, i] = [self.again[t, i], *kept]
                first = t == self.length - 1
                self._row([(each, 1.0) for each in self.ran[t, i]], 1.0 if first else 0.0, 1.0)
        for i in range(self.length):
            every = [
                each
                for s in around[i]
                for t in range(self.segments[s][1] - 1, self.length)
                for each in self.keeping[t, s]
            ]
            self._row([(each, 1.0) for each in every], 1.0, 1.0)
        for (t, s), column in self.before.items():
            if t == self.length - 1:
                self._row([(column, 1.0)], 0.0, 0.0)
            else:
                later = [(self.before[t + 1, s], -1.0), *((each, -1.0) for each in self.keeping[t + 1, s])]
                self._row([(column, 1.0), *later], 0.0, 0.0)

    def _running(self, t: int, i: int, value: Carried) -> list[int]:
        """Returns the columns of turn t that run stage i and read `value` from outside of what they run."""
        found = [self.again[t, i]]
        for s, (start, stop) in enumerate(self.segments):
            if value.made < start <= i < stop <= t + 1:
                found += self.keeping[t, s]
        return found

    def _values(self) -> None:
        for (t, v), column in self.held.items():
            made = self.values[v].made
            before = [self.held[t + 1, v]] if (t + 1, v) in self.held else []
            self._row([(column, 1.0), *((each, -1.0) for each in (*before, *self.ran[t + 1, made]))], -np.inf, 0.0)
        for v, value in enumerate(self.values):
            for use in value.uses:
                for t in range(use, self.length):
                    there = [*([self.held[t, v]] if (t, v) in self.held else []), *self.ran[t, value.made]]
                    terms = collections.Counter(self.ran[t, use])
                    terms.subtract(there)  # a segment that makes and uses it is on both sides
                    self._row([(each, sign) for each, sign in terms.items() if sign], -np.inf, 0.0)
            for s, (start, stop) in enumerate(self.segments):
                if value.made < start and any(start <= use < stop for use in value.uses):
                    for t in range(stop - 1, self.length - 1):  # its inputs are there until its backward pass
                        self._row([(self.before[t, s], 1.0), (self.held[t, v], -1.0)], -np.inf, 0.0)

    def _bytes(self) -> None:
        """Fills in the bytes of every turn: as each stage begins, and in the backward pass.

        Each of these moments has a row: carried values, what segments keep, and what runs need together no more than
        the limit less the gradients that are written. What segments keep has a column of its own before and after each
        stage, and a row says what the stage adds to it. So what was kept in earlier turns need not be added up again.
        """
        keeps: int | None = None
        for t in reversed(range(self.length)):
            free = 1.0 + ROOM - self._share(self.written[t + 1])
            alive = [self._alive(t, v) for v in range(len(self.values))]
            keeps = self._kept_before(t, keeps)
            for i in range(t + 1):
                self._as_stage_begins(t, i, alive, keeps, free)
                keeps = self._kept_after(t, i, keeps)
            self._as_it_runs_back(t, keeps, free)

    def _share(self, size: int) -> float:
        """Returns bytes as a share of the limit, the unit of all rows of bytes."""
        return size / self.unit

    def _kept_before(self, t: int, keeps: int | None) -> int:
        """Returns the column of what segments keep as turn t begins: that of the turn before, less what the segments
        kept whose backward pass is done.

        Args:
          t: the turn.
          keeps: the column at the end of the turn before; None in the first turn.
        """
        column = self._column()
        ended = [n for n, way in enumerate(self.ways) if way.stop == t + 2]
        gone = [(self.kept[u, n], self._share(self.ways[n].kept)) for n in ended for u in range(t + 1, self.length)]
        known = {} if keeps is None else {keeps: -1.0}
        self._row([(column, 1.0), *known.items(), *gone], 0.0, 0.0)
        return column

    def _kept_after(self, t: int, i: int, keeps: int) -> int:
        """Returns the column of what segments keep after stage i of turn t: `keeps`, and what those keep that end
        there.
        """
        column = self._column()
        kept = [(self.kept[t, n], -self._share(way.kept)) for n, way in enumerate(self.ways) if way.stop == i + 1]
        self._row([(column, 1.0), (keeps, -1.0), *kept], 0.0, 0.0)
        return column

    def _as_stage_begins(
        self, t: int, i: int, alive: Sequence[list[tuple[int, list[int]]]], keeps: int, free: float
    ) -> None:
        """Limits the bytes of turn t as stage i begins: values, what segments keep, and what a run from there needs.

        Args:
          t, i: the turn and the stage.
          alive: of each value, as of `_alive`.
          keeps: the column of what segments keep.
          free: share of the limit that there is.
        """
        there = [(keeps, 1.0)]
        for v, value in enumerate(self.values):
            size = self._share(value.bytes)
            there += [(each, size) for each in self._there(t, i, v, alive[v])]
        runs = [(self.again[t, i], self._share(self.needs[i]))]
        for n, way in enumerate(self.ways):
            if way.start == i and way.stop <= t + 1:
                need = max(self.chain.segment(way.start, way.stop).forward_work, way.kept)
                runs.append((self.kept[t, n], self._share(need)))
        self._row([*there, *runs], -np.inf, free)

    def _as_it_runs_back(self, t: int, keeps: int, free: float) -> None:
        """Limits the bytes of turn t in the backward pass of the segments that end with stage t: values that they read
        or that the next turn is to have, what segments keep, and what these segments need besides.

        Args:
          t: the turn.
          keeps: the column of what segments keep, these segments too.
          free: share of the limit that there is.
        """
        work = [
            (self.kept[u, n], self._share(way.need - way.kept))
            for n, way in enumerate(self.ways)
            if way.stop == t + 1
            for u in range(t, self.length)
        ]
        there = [(keeps, 1.0)]
        for v, value in enumerate(self.values):
            if value.made <= t:
                read = [
                    each
                    for s, (start, stop) in enumerate(self.segments)
                    if stop == t + 1 and value.made < start and any(start <= use < stop for use in value.uses)
                    for u in range(t, self.length)
                    for each in self.keeping[u, s]
                ]
                there += [(each, self._share(value.bytes)) for each in self._most([self._next(t, v), read])]
        self._row([*there, *work], -np.inf, free)

    def _next(self, t: int, v: int) -> list[int]:
        """Returns the columns that say that a value is held into the turn after t."""
        return [self.held[t - 1, v]] if (t - 1, v) in self.held else []

    def _most(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Returns columns whose sum is at least that of each group."""
        groups = [group for group in groups if group]
        if len(groups) < 2:
            return list(groups[0]) if groups else []
        column = self._column()
        for group in groups:
            self._row([(column, 1.0), *((each, -1.0) for each in group)], 0.0, np.inf)
        return [column]

    def _alive(self, t: int, v: int) -> list[tuple[int, list[int]]]:
        """Returns (stage, columns) from the last to the first: from the stage before on, up to that stage, the columns
        whose sum says that value v is there in turn t once it is made.
        """
        value = self.values[v]
        held = [self.held[t, v]] if (t, v) in self.held else []
        there = self._most([held, self._next(t, v)])
        found = [(self.length, there)]
        for use in reversed([use for use in value.uses if use <= t]):
            there = self._most([there, self._running(t, use, value)])
            found.append((use, there))
        return found

    def _there(self, t: int, i: int, v: int, alive: list[tuple[int, list[int]]]) -> list[int]:
        """Returns the columns whose sum says that value v is there as stage i begins in turn t."""
        if self.values[v].made >= i:
            return [self.held[t, v]] if (t, v) in self.held else []
        return next(columns for use, columns in reversed(alive) if i <= use)

    # ------------------------------------------------------------------------------------------- from it to a solution

    def _solution(self, x: np.ndarray, start: int, stop: int, turn: int | None) -> Solution:
        """Returns the runs of start..stop in a turn as a nested solution: what is not kept there is dropped, up to
        where all that crosses is held.
        """
        t = stop - 1 if turn is None else turn
        kept = {self.ways[n].start: self.ways[n] for (u, n), each in self.kept.items() if u == t and x[each] > 0.5}
        items: list[Keep | Drop] = []
        at = start
        while at < stop:
            way = kept.get(at)
            if way is not None and way.stop <= stop:
                items.append(Keep(way.start, way.stop, way.number))
                at = way.stop
                continue
            end = next((p for p in range(at + 1, stop) if p in kept or self._is_held(x, t, at, p, stop)), stop)
            if (at, end) == (start, stop):  # nothing is kept of it in this turn: in its last one it must be
                return self._single(start, stop)
            items.append(Drop(at, end, self._solution(x, at, end, end - 1)))
            at = end
        return tuple(items)

    def _is_held(self, x: np.ndarray, t: int, start: int, place: int, stop: int) -> bool:
        """Whether all that start..place make and place..stop use is held after turn t."""
        crossing = [
            v
            for v, value in enumerate(self.values)
            if start <= value.made < place and any(place <= use < stop for use in value.uses)
        ]
        return all((t - 1, v) in self.held and x[self.held[t - 1, v]] > 0.5 for v in crossing)

    def _single(self, start: int, stop: int) -> Solution:
        """Returns each stage kept with the candidate that keeps least."""
        items = []
        for i in range(start, stop):
            ways = [way for way in self.ways if (way.start, way.stop) == (i, i + 1)]
            items.append(Keep(i, i + 1, min(ways, key=lambda way: (way.need, way.kept)).number))
        return tuple(items)
