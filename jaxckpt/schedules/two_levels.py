"""Two levels of slots: `slots` carries in device memory and `host` carries in host memory, placed so that runs of the
body and transfers together cost least.

The recursion is that of

    Aupy, Herrmann, Hovland, Robert 2016, Optimal multistage algorithm for adjoint computation, SIAM Journal on
    Scientific Computing 38(3), C232-C255;
    Herrmann and Pallez 2020, H-Revolve: a framework for adjoint computation on synchronous hierarchical platforms, ACM
    Transactions on Mathematical Software 46(2), 1-25.

In runs of the body, with w and r the costs of a write to and a read from the host, and t(l, n) those of
`extra_iterations`, reversing l iterations whose first carry is at hand, with m free slots on the host, costs

    H(l, 0) = t(l, n),    H(l, m) = min(t(l, n), w + P(l, m)),
    P(l, m) = min(t(l, n), min over 1 <= j < l of  j + H(l-j, m-1) + r + P(j, m)),    P(1, m) = 0,

where in P the first carry lies in one of the m slots. A table of H has length x host entries, each a minimum over
length numbers: 10^11 operations for 10,007 iterations with 1,024 slots. So the solution's form is used instead.

*Form.* A solution is a tree of *groups*. A group of level p starts at a carry on the host; it is a row of groups of
level p + 1, and then a *leaf*, iterations that are reversed with the device's slots alone. Before the leaf of level p
is reversed, its iterations run p times to obtain carries on the host, so x iterations of it cost p x + t(x, n). Each
group but the root is read once. The root's carry is written, and each group's but the first of its row, which starts
where the row does. With a_p leaves of level p (a_0 = 1) the cost is

    sum over leaves of (p x + t(x, n))  +  r (a_1 + a_2 + ...)  +  w (a_1 + max(0, a_2 - a_1) + max(0, a_3 - a_2) + ...)

t is convex in x, with slope q over C(n+q-1, q) iterations. So for given a_p the iterations go to the leaves by slope
p + q, the cheapest first, and the first sum has a closed form. What is left is a convex function of a few whole
numbers, the a_p. It is minimised by a descent whose stride halves: O(log(length) p^2) evaluations, and O(p^2 + host p)
operations for each. The moves take O(length). That it is the recursion's minimum is tested for all small sizes, not
proved for all sizes.

Pure Python and NumPy, no JAX.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxckpt.core.constants import LONGEST_RUN, TRANSFER
from jaxckpt.schedules.optimum import Binomial, Move, TurnCosts, binomial, extra_iterations, repetitions, revolve

_STARTS = 6
"""Numbers of leaves that the search for the best ones starts from."""
_COSTS = TurnCosts()


@dataclass(frozen=True)
class Transfer:
    """What moving a carry costs, in runs of the body.

    Attributes:
      write: from the device to the host.
      read: from the host to the device.
    """

    write: float
    read: float


@dataclass(frozen=True)
class TwoLevels:
    """A solution.

    Attributes:
      length: iterations, at least 1.
      slots: carries in device memory at once.
      host: carries in host memory at once, the initial one counted where any is there.
      leaves: leaves of each level, 1 of level 0 first; (1,) leaves the host unused.
      lengths: for each level (iterations, leaves) pairs: how many leaves have so many iterations, the longest first.
    """

    length: int
    slots: int
    host: int
    leaves: tuple[int, ...]
    lengths: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def reads(self) -> int:
        """Carries read from the host."""
        return sum(self.leaves[1:])

    @property
    def writes(self) -> int:
        """Carries written to the host."""
        return _written(self.leaves)

    @property
    def extra_iterations(self) -> int:
        """Runs of the body beyond the linearising ones; the forward pass up to the last iteration is counted."""
        return sum(
            count * (level * iterations + extra_iterations(iterations, self.slots))
            for level, pairs in enumerate(self.lengths)
            for iterations, count in pairs
        )

    def cost(self, transfer: Transfer) -> float:
        """Returns runs of the body beyond the linearising ones, and transfers, in runs of the body."""
        return self.extra_iterations + transfer.write * self.writes + transfer.read * self.reads

    @property
    def extra_steps(self) -> int:
        """`extra_iterations`, by its older name."""
        return self.extra_iterations

    @property
    def host_rows(self) -> int:
        """Most carries that lie on the host at once."""
        return 0 if len(self.leaves) == 1 else 1 + max(slot for _, slot, _, _ in self._groups())

    @property
    def device_rows(self) -> int:
        """Most carries that lie in device slots at once."""
        return min(self.slots, max(pairs[0][0] for pairs in self.lengths if pairs) - 1)

    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Returns (level, host slot of its start, groups in its row, place of the row in this list) of each group,
        level by level.
        """
        found = [(0, 0, 0, 0)]
        first = 0
        for level, wanted in enumerate(self.leaves[1:], 1):
            above = found[first:]
            # The lowest slots leave most room for what comes after; first groups of rows cost no write.
            rows = _rows([slot for _, slot, _, _ in above], wanted, self.host)
            place = len(found)
            for i, (of_level, slot, _, _) in enumerate(above):
                found[first + i] = (of_level, slot, rows[i], place)
                found += [(level, slot + j, 0, 0) for j in range(rows[i])]
                place += rows[i]
            first = len(found) - wanted
        return found

    def moves(self) -> Iterator[Move]:
        """Yields the moves that reverse the iterations, in order: those of `revolve`, and "write" and "read" (carry of
        `iteration`, in host slot `slot`).

        Before the first move the carry of iteration 0 is at hand. After a "read", too, the carry that was read is at
        hand.
        """
        groups = self._groups()
        sizes = [[iterations for iterations, count in pairs for _ in range(count)] for pairs in self.lengths]
        own = [sizes[level].pop() for level, _, _, _ in groups]
        whole = list(own)
        for i in reversed(range(len(groups))):
            _, _, count, place = groups[i]
            whole[i] += sum(whole[place : place + count])
        # (group, its first iteration, whether its start is written)
        todo = [(0, 0, False)]
        while todo:
            i, at, stored = todo.pop()
            _, slot, count, place = groups[i]
            if stored:
                yield Move("read", at, slot)
            start, row = at, []
            for j in range(count):
                if j or i == 0:
                    yield Move("write", at, slot + j)
                row.append((place + j, at, True))
                yield Move("advance", at, stop=at + whole[place + j])
                at += whole[place + j]
            assert at + own[i] == start + whole[i]
            yield from _shifted(own[i], self.slots, at)
            todo += row


def _shifted(length: int, slots: int, start: int) -> Iterator[Move]:
    for move in revolve(length, slots):
        yield Move(move.kind, move.iteration + start, move.slot, move.stop + start if move.kind == "advance" else -1)


@functools.lru_cache(maxsize=256)
def optimal_levels(length: int, slots: int, host: int, transfer: Transfer) -> TwoLevels:
    """Returns the solution that costs least.

    Args:
      length: iterations, at least 1.
      slots: carries in device memory, at least 1.
      host: carries in host memory, at least 0.
      transfer: the costs of the host.

    >>> best = optimal_levels(100, 3, 10, Transfer(2.0, 2.0))
    >>> best.extra_iterations, best.writes, best.reads, best.leaves
    (235, 10, 10, (1, 10))
    >>> [optimal_levels(10007, 32, host, Transfer(0.25, 0.25)).extra_iterations for host in (0, 256, 1024, 10007)]
    [32888, 19724, 18956, 10006]
    """
    costs = _Costs(length, slots, min(host, length), transfer)
    leaves = _minimum(costs)
    return TwoLevels(length, slots, costs.host, leaves, costs.lengths(leaves))


def _written(leaves: tuple[int, ...]) -> int:
    return sum(max(0, b - a) for a, b in itertools.pairwise((0, *leaves[1:])))


def _rows(slots: list[int], wanted: int, host: int) -> list[int]:
    """Returns how many groups each row has where so many are wanted of one level: first one for each of the lowest
    slots, then those in the lowest slots.

    Args:
      slots: of the groups above.
      wanted: groups, at most as many as there is room for.
      host: slots.
    """
    counts = [0] * len(slots)
    order = sorted(range(len(slots)), key=lambda i: slots[i])
    for i in order[:wanted]:
        counts[i] = 1
    wanted -= min(wanted, len(slots))
    beginning = 0  # groups of `order` whose slot is below the next one
    for slot in range(1, host):
        while beginning < len(order) and slots[order[beginning]] < slot:
            beginning += 1
        more = min(wanted, beginning)
        for i in order[:more]:
            counts[i] += 1
        wanted -= more
        if not wanted:
            break
    assert not wanted
    return counts


class _Costs:
    """What a number of leaves for each level costs."""

    def __init__(self, length: int, slots: int, host: int, transfer: Transfer) -> None:
        self.length, self.slots, self.host, self.transfer = length, slots, host, transfer
        self.most = repetitions(length, slots)  # an iteration of level p runs at least p times
        self.widths = [1]  # iterations of a leaf at each slope, the first iteration at slope 0
        reached = 1
        while reached < length:
            self.widths.append(math.comb(slots + len(self.widths) - 1, len(self.widths)))
            reached += self.widths[-1]
        self._known: dict[tuple[int, ...], tuple[float, int]] = {}

    def of(self, leaves: tuple[int, ...]) -> tuple[float, int]:
        """Returns the cost and, to choose among equals, the transfers; infinite for what cannot be."""
        if leaves not in self._known:
            self._known[leaves] = self._of(leaves)
        return self._known[leaves]

    def _of(self, leaves: tuple[int, ...]) -> tuple[float, int]:
        if min(leaves) < 0 or sum(leaves) > self.length or not self._room(leaves):
            return math.inf, 0
        left = self.length - sum(leaves)
        runs = sum(level * count for level, count in enumerate(leaves))
        slope = 1
        while left:
            taken = min(left, self._width(leaves, slope))
            runs, left, slope = runs + taken * slope, left - taken, slope + 1
        writes, reads = _written(leaves), sum(leaves[1:])
        return runs + self.transfer.write * writes + self.transfer.read * reads, writes + reads

    def _width(self, leaves: tuple[int, ...], slope: int) -> int:
        """Returns the iterations beyond the first of each leaf that cost `slope` runs."""
        return sum(
            count * self.widths[slope - level]
            for level, count in enumerate(leaves[:slope])
            if slope - level < len(self.widths)
        )

    def _room(self, leaves: tuple[int, ...]) -> bool:
        """Whether there are host slots for so many."""
        if len(leaves) == 1:
            return True
        if leaves[1] > self.host:
            return False
        if all(a >= b for a, b in itertools.pairwise(leaves[1:])):
            return True  # a row has one group, in the slot of the row itself
        slots = np.zeros(self.host, np.int64)  # groups of the level that start in each slot
        slots[: leaves[1]] = 1
        for above, count in itertools.pairwise(leaves[1:]):
            if count <= above:
                slots = np.diff(np.minimum(np.cumsum(slots), count), prepend=0)
                continue
            later = np.concatenate([[0], np.cumsum(slots)[:-1]])
            more = np.minimum(np.cumsum(later), count - above)
            if more[-1] < count - above:
                return False
            slots = slots + np.diff(more, prepend=0)
        return True

    def lengths(self, leaves: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Returns the iterations of the leaves, as of `TwoLevels.lengths`."""
        left, slope = self.length - sum(leaves), 0
        while left > 0 and left >= (wide := self._width(leaves, slope + 1)):
            left, slope = left - wide, slope + 1
        found = []
        for level, count in enumerate(leaves):
            full = sum(self.widths[: max(slope - level, 0) + 1])
            wide = self.widths[slope + 1 - level] if 0 <= slope - level < len(self.widths) - 1 else 0
            more = min(left, count * wide)
            left -= more
            longer, part = divmod(more, wide) if wide else (0, 0)
            pairs = [(full + wide, longer), (full + part, int(part > 0)), (full, count - longer - (part > 0))]
            found.append(tuple((iterations, some) for iterations, some in pairs if some))
        assert not left
        return tuple(found)


def _minimum(costs: _Costs) -> tuple[int, ...]:
    """Returns the leaves of each level that cost least."""
    best = (1,)
    if costs.host < 1 or costs.length < 3:
        return best
    # From several sides, for a descent in whole numbers may stop short: one leaf at each of so many levels, too.
    starts = [best, (1, min(costs.host, costs.length - 1)), *((1,) * (deep + 1) for deep in range(2, costs.most + 1))]
    return min((_descend(costs, start) for start in starts[:_STARTS]), key=costs.of)


def _descend(costs: _Costs, leaves: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leaves of each level that no direction improves."""
    size = 1 << max(costs.length.bit_length() - 1, 0)
    while size:
        levels = min(len(leaves), costs.most) + 1
        padded = leaves + (0,) * (levels - len(leaves))
        tries = (_toward(padded, direction, size) for direction in _directions(levels))
        found = min(tries, key=costs.of)
        if costs.of(found) < costs.of(leaves):
            leaves = _short(found)
        else:
            size //= 2
    return leaves


def _toward(leaves: tuple[int, ...], direction: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (1, *(count + size * sign for count, sign in zip(leaves[1:], direction)))


def _short(leaves: tuple[int, ...]) -> tuple[int, ...]:
    end = len(leaves)
    while end > 1 and not leaves[end - 1]:
        end -= 1
    return leaves[:end]


@functools.cache
def _directions(levels: int) -> list[tuple[int, ...]]:
    """Returns the directions of the descent, one number of -1, 0 and 1 for each level but level 0: all where there are
    few levels; else neighbouring levels up or down together, from the one before or to the one after too.
    """
    count = levels - 1
    if count <= 5:
        return list(itertools.product((0, 1, -1), repeat=count))
    near = lambda a, b: b - a < 3 or b == count - 1 or a == 0
    rows = [tuple(int(a <= i <= b) for i in range(count)) for a in range(count) for b in range(a, count) if near(a, b)]
    moved = [tuple((i == a) - (i == a + 1) for i in range(count)) for a in range(count - 1)]
    return [tuple(sign * x for x in row) for row in (*rows, *moved) for sign in (1, -1)]


# --------------------------------------------------------------------------------------------------- runs of iterations


@dataclass(frozen=True)
class TwoLevelRuns(Binomial):
    """Runs of iterations over two levels of slots: `slots` counts carries on the device.

    Attributes:
      levels: the solution for as many iterations as there are runs; its leaves are never (1,).
    """

    levels: TwoLevels | None = None

    @property
    def placed(self) -> TwoLevels:
        """The solution."""
        assert self.levels is not None
        return self.levels

    @property
    def body_runs(self) -> int:
        """Runs of the body over a forward and a backward pass."""
        twice = self.length - self.units if self.again else 0
        return 2 * self.length + self.advances * self.run + twice

    @property
    def advances(self) -> int:
        """Runs that the backward pass takes a carry through to obtain another."""
        return self.placed.extra_iterations - (self.units - 1)

    @property
    def transfers(self) -> int:
        """Carries moved over the host's link, either way."""
        return self.placed.writes + self.placed.reads


def with_host(plan: Binomial, host: int, cost: float) -> Binomial:
    """Returns the same runs with so many host slots besides; the plan itself where they are of no use.

    Args:
      plan: runs of iterations, and slots on the device.
      host: carries in host memory.
      cost: of moving a carry, one way, in runs of the body.
    """
    if not host:
        return plan
    levels = optimal_levels(plan.units, plan.slots, host, Transfer(cost / plan.run, cost / plan.run))
    if len(levels.leaves) == 1:
        return plan
    return TwoLevelRuns(plan.length, plan.run, levels.device_rows, plan.again, levels)


def two_level_runs(
    length: int,
    slots: int,
    host: int,
    cost: float,
    *,
    row: float = math.inf,
    again: bool = False,
    costs: TurnCosts = _COSTS,
) -> Binomial:
    """Returns the runs that use the bytes of `slots` carries on the device, and `host` carries on the host, best: never
    more runs of the body than with runs of one iteration.

    Args:
      length, slots, row, again, costs: as of `binomial`.
      host, cost: as of `with_host`.

    >>> best = two_level_runs(10_007, 32, 1024, 0.25, row=3.0)
    >>> best.run, best.units, best.body_runs
    (6, 1668, 23860)
    """
    enough = -(-length // (host + slots))
    tried = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, enough, enough + 1, -(-length // host) if host else 1, LONGEST_RUN}

    plans = []
    for run in sorted(run for run in tried if run <= min(length, LONGEST_RUN)):
        beside = Binomial(length, run, 1, again).carries(row) - 1
        left = math.floor(slots - beside) if beside < slots else 0
        if left >= 1:
            plans.append(with_host(Binomial(length, run, min(left, -(-length // run)), again and run > 1), host, cost))

    def score(plan: Binomial) -> tuple[float, float]:
        kept = length * costs.kept if plan.run > 1 else 0.0
        moved = plan.transfers * cost if isinstance(plan, TwoLevelRuns) else 0.0
        return plan.body_runs + plan.units * (costs.turn + costs.waiting) + kept + moved, plan.carries(row)

    return min((plan for plan in plans if plan.body_runs <= plans[0].body_runs), key=score)


@dataclass(frozen=True)
class LevelCounts:
    """Where carries may be kept.

    Attributes:
      device: carries whose bytes may be kept in device memory.
      host: carries in host memory.
      transfer: as `cost` of `with_host`.
    """

    device: int
    host: int = 0
    transfer: float = TRANSFER

    def runs(self, length: int, *, row: float = math.inf, again: bool = False, costs: TurnCosts = _COSTS) -> Binomial:
        """Returns the runs that use it best; the arguments are those of `binomial`."""
        if not self.host:
            return binomial(length, self.device, row=row, again=again, costs=costs)
        found = two_level_runs(length, self.device, self.host, self.transfer, row=row, again=again, costs=costs)
        if isinstance(found, TwoLevelRuns):
            return found
        return binomial(length, self.device, row=row, again=again, costs=costs)


# --------------------------------------------------------------------------------------------------- tables for a loop


@dataclass(frozen=True)
class Turns:
    """The tables with which a compiled loop follows a solution: int32 arrays.

    A turn takes one iteration back, the last iteration first. It takes a carry from its source, advances it to each of
    its events, stores it there, and advances it to its iteration. Events that store on the host come first.

    Attributes:
      source: one a turn: HAND for the carry that the forward pass ended with, or a slot: i >= 0 on the device, ~i on
        the host.
      at: one a turn: the iteration of that carry.
      host, device: one a turn and one more: where its events begin among `to_host` and `to_device`.
      to_host, to_device: iteration and slot of each event in turn; flat, since a TPU pads rows.
    """

    source: np.ndarray
    at: np.ndarray
    host: np.ndarray
    device: np.ndarray
    to_host: np.ndarray
    to_device: np.ndarray


HAND = np.iinfo(np.int32).max
"""The source of the turn that begins with the carry at hand."""


@functools.lru_cache(maxsize=16)
def turns(levels: TwoLevels) -> Turns:
    """Returns the tables of a solution."""
    rows: list[tuple[int, int, int, int]] = []
    to_host: list[tuple[int, int]] = []
    to_device: list[tuple[int, int]] = []
    source, at = HAND, levels.length - 1
    for move in levels.moves():
        if move.kind in ("read", "restore"):
            source, at = (~move.slot if move.kind == "read" else move.slot), move.iteration
            begun = len(to_host), len(to_device)
        elif move.kind == "write":
            to_host.append((move.iteration, move.slot))
        elif move.kind == "store":
            to_device.append((move.iteration, move.slot))
        elif move.kind == "adjoint":
            # The forward pass makes the events before the first turn.
            begun = begun if rows else (len(to_host), len(to_device))
            rows.append((source, at, *begun))
    ints = lambda values: np.asarray(values, np.int32)
    columns = [ints(column) for column in zip(*rows)]
    pairs = [ints(events or [(0, 0)]).ravel() for events in (to_host, to_device)]
    return Turns(
        columns[0],
        columns[1],
        np.append(columns[2], ints(len(to_host))),
        np.append(columns[3], ints(len(to_device))),
        *pairs,
    )
