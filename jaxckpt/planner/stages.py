"""Stages: the function cut into a chain where few bytes are live.

A cut lies between two dear operations, where the least bytes cross, if no more cross there than between the
neighbouring ones: in a transformer between the halves of a block, where only the residual stream is live, not between
attention's scores and its context. A scan is a stage of its own. Where operations follow one another that have no such
place between them, they are cut where least crosses in each `LONG` of them. The stage that needs most at once is cut
again where that makes it need less, whatever crosses there (`planner/model.py`). What crosses several cuts (U-Net's
skips, a mask that all blocks share) is carried; see `jaxckpt.planner.chain`.

Equal stretches have equal digests, so that 48 equal blocks are analysed once.
"""

from __future__ import annotations

import bisect
import collections
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.constants import (
    CHEAP,
    FEW_STAGES,
    HELD,
    LONG,
    LOOPS,
    MORE_BLOCKS,
    MORE_REPEATED,
    MOST_STAGES,
    NEARLY,
    NECKS,
    PERIODS,
    REPEATED,
    ROUGH,
    UNLIKE,
)
from jaxckpt.core.graph import Graph, Op, parameters_text
from jaxckpt.core.primitives import Holds
from jaxckpt.planner.costs import is_dear
from jaxckpt.planner.held import is_flat, spread


@dataclass(frozen=True)
class Stretch:
    """Consecutive operations, with their inputs and outputs (indices of values, in order of first use)."""

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def active_values(graph: Graph, differentiated: Collection[int], results: Collection[int]) -> frozenset[int]:
    """Returns the values that the derivative passes through: computed from differentiated arguments, of an inexact
    dtype, and used for what is differentiated.

    What is computed but not differentiated (an output beside the loss, what `stop_gradient` ends) may have no
    derivative at all, as a while loop has none in reverse.

    Args:
      differentiated: the indices of values that are differentiated in.
      results: of the values that are differentiated.
    """
    active = set(differentiated)
    spread(graph, graph.body, active)
    read = lambda op: () if is_flat(graph, op) else active.intersection(op.inputs)
    ending = surgery.live(graph.ops, results, lambda op: op.outputs, read)
    return frozenset(active.intersection(results).union(*map(read, ending)))


def last_uses(graph: Graph) -> dict[int, int]:
    """Returns for each value that is used the place of the last operation that uses it, or a view of it; len(graph.ops)
    for results.
    """
    last = {index: place for place, op in enumerate(graph.ops) for index in op.inputs}
    last |= {index: len(graph.ops) for index in graph.body.outputs if index is not None}
    for place in sorted(graph.body.views, reverse=True):
        op = graph.ops[place]
        for index in op.inputs:
            last[index] = max([last[index], *(last[shown] for shown in op.outputs if shown in last)])
    return last


def stretch(graph: Graph, start: int, stop: int, last: Mapping[int, int]) -> Stretch:
    """Returns the operations start..stop, but for views, with their inputs and outputs; `last` as of `last_uses`."""
    shown = graph.body.views
    ops = tuple(op for place, op in enumerate(graph.ops[start:stop], start) if place not in shown)
    made = {index for op in ops for index in op.outputs}
    inputs = dict.fromkeys(index for op in ops for index in op.inputs if index not in made)
    return Stretch(ops, tuple(inputs), tuple(i for op in ops for i in op.outputs if last.get(i, -1) >= stop))


def crossing(graph: Graph) -> list[int]:
    """Returns for each cut 0..len(ops) the bytes of intermediate values that are live there."""
    last, shown = last_uses(graph), graph.body.views
    change = [0] * (len(graph.ops) + 2)
    for place, op in enumerate(graph.ops):
        for index in op.outputs if place not in shown else ():
            if index in last:
                change[place + 1] += graph.values[index].bytes
                change[min(last[index], len(graph.ops)) + 1] -= graph.values[index].bytes
    live, at = [], 0
    for step in change[:-1]:
        at += step
        live.append(at)
    return live


def necks(graph: Graph, places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns where blocks in a row may begin and end, equal or not, as stages from 0 on, in several ways: after each
    step of an optimizer; the stages at which less crosses than on either side, those at which least crosses, and those
    at which a little more does; each without and with all that follows as the last block. An argument crosses if it is
    used on both sides: in the first block the residual stream is one.

    Args:
      places: where stages begin and end.
    """
    live, inner = crossing(graph), range(1, len(places) - 1)
    across = [live[place] for place in places]
    for value in graph.values:
        if value.kind == "argument":
            uses = [place for place, op in enumerate(graph.ops) if value.index in op.inputs]
            for stage in inner if uses else ():
                if uses[0] < places[stage] <= uses[-1]:
                    across[stage] += value.bytes
    levels = [(size, list(level)) for size, level in itertools.groupby(inner, across.__getitem__)]
    sizes = [math.inf, *(size for size, _ in levels), math.inf]
    local = [level for i, (size, level) in enumerate(levels) if size < min(sizes[i], sizes[i + 2])]
    most = sorted({across[stage] for stage in inner})
    below = ([stage for stage in inner if across[stage] <= size] for size in most)
    number = {place: stage for stage, place in enumerate(places)}
    steps = sorted(number[end] for end in _after_steps(graph, [places[level[0]] for level in local]) if end in number)
    ways = dict.fromkeys((0, *ends) for ends in (steps, list(itertools.chain.from_iterable(local)), *below) if ends)
    several = [ends for ends in ways if len(ends) > 2][:NECKS]
    return tuple(each for ends in several for each in (ends, (*ends, len(places) - 1)))


def _call_paths(graph: Graph) -> list[tuple[tuple[Any, ...], ...]]:
    """Returns the path of calls to each operation, as of `_compat.call_path`. Before one that begins in a function
    under `jax.jit`, and so in another function than that of the last operation, stands this function, for its call.
    """
    paths = [_compat.call_path(op.equation) for op in graph.ops]
    last = next((path[0][:2] for path in reversed(paths) if path), ())
    return [path if not path or path[0][:2] == last else (path[0][:2], *path) for path in paths]


def calls(graph: Graph, blocks: Collection[int] = ()) -> list[tuple[tuple[int, int], ...]]:
    """Returns the calls of the user's functions that people put checkpoints around, in several ways: of each, in order,
    where each call begins and ends. At first the calls in the innermost function that runs most of the dear operations,
    of functions that run several of these; then the calls within those, and so on; then the same of functions that run
    one dear operation or more, beside others. A call in a loop begins anew where its first operation comes again. Of
    fewer than two calls there is no way, and none where most of what is dear is in blocks that are repetitions of one
    another.

    Args:
      blocks: where these begin, and the last ends.
    """
    paths = _call_paths(graph)
    dear = [place for place, op in enumerate(graph.ops) if is_dear(op)]
    covered = _among(dear, min(blocks), max(blocks)) if blocks else ()
    if 2 * len(covered) > len(dear):
        return []
    ways: dict[tuple[tuple[int, int], ...], None] = {}
    for fewest in (2, 1):
        level = list(_Calls(paths, dear, fewest).outer())
        while level:
            ends = tuple((call.start, call.stop) for call in level if call.stop > call.start + 1)
            if len(ends) > 1 and all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)):
                ways[ends] = None
            inner = [list(_Calls(paths, dear, fewest).within(call)) for call in level]
            if not any(inner):
                break
            level = [each for call, found in zip(level, inner) for each in found or [call]]
    return list(ways)


def _among(places: Sequence[int], start: int, stop: int) -> Sequence[int]:
    """Returns those of ordered places that are in start..stop."""
    return places[bisect.bisect_left(places, start) : bisect.bisect_left(places, stop)]


@dataclass(frozen=True)
class _Call:
    """A call of a function: its operations start..stop, and how many calls its own frame lies within."""

    start: int
    stop: int
    depth: int


@dataclass(frozen=True)
class _Calls:
    """Finds calls of functions that run at least so many dear operations.

    Attributes:
      paths: as of `_call_paths`.
      dear: the places of the dear operations.
      fewest: how many of these a call runs at least.
    """

    paths: Sequence[tuple[tuple[Any, ...], ...]]
    dear: Sequence[int]
    fewest: int

    def outer(self) -> Iterator[_Call]:
        """Yields the calls in the innermost function that runs most of the dear operations."""
        yield from self._innermost(_Call(0, len(self.paths), -1))

    def within(self, call: _Call) -> Iterator[_Call]:
        """Yields the calls that a call makes, or the call that is all that it makes."""
        yield from (each for each in self._made_by(call) if (each.start, each.stop) != (call.start, call.stop))

    def _innermost(self, around: _Call) -> Iterator[_Call]:
        for call in self._made_by(around):
            most = 2 * len(_among(self.dear, call.start, call.stop)) > len(self.dear)
            yield from (list(self._innermost(call)) if most else []) or [call]

    def _made_by(self, around: _Call) -> Iterator[_Call]:
        depth, paths = around.depth + 1, self.paths
        mine = _among(self.dear, around.start, around.stop)
        sides = [around.start - 1, *mine, around.stop]
        before, after = dict(zip(mine, sides)), dict(zip(mine, sides[2:]))
        for site, run in itertools.groupby(mine, lambda place: paths[place][: depth + 1]):
            here = list(run)
            beside = range(before[here[0]] + 1, after[here[-1]])
            inside = [place for place in beside if paths[place][: depth + 1] == site]
            if any(len(paths[place]) <= depth + 1 for place in inside):
                continue  # no call
            for one in self._anew(inside, depth):
                if len(_among(self.dear, one[0], one[-1] + 1)) >= self.fewest:
                    yield _Call(one[0], one[-1] + 1, depth)

    def _anew(self, inside: Sequence[int], depth: int) -> list[Sequence[int]]:
        """Returns the operations of each call of several at one site: it begins where an operation is at the place in
        the function at which the first one is, and the one before is not. One call, if some had too few dear
        operations: then the function has the loop.
        """
        at = [self.paths[place][depth + 1] for place in inside]
        starts = [k for k in range(len(at)) if at[k] == at[0] and (k == 0 or at[k - 1] != at[0])]
        found = [inside[start:stop] for start, stop in itertools.pairwise([*starts, len(at)])]
        few = any(len(_among(self.dear, one[0], one[-1] + 1)) < self.fewest for one in found)
        return [inside] if few else found


def cuts(graph: Graph, blocks: Sequence[int] = (), *, unlike: bool = False, finer: bool = False) -> list[int]:
    """Returns where the stages begin and end: 0, ..., len(graph.ops); `blocks` as of `repeats` are among them.

    If the blocks are `unlike`, nothing says where one ends, so there are cuts at either end of where least crosses, and
    where the last block ends; and if it is to be `finer`, where it may end besides, as long as there are few stages.
    """
    live = crossing(graph)
    narrow = _narrow(live, gaps(graph, live, blocks))
    if unlike and len(narrow) <= UNLIKE:
        narrow += [*_narrow(live, gaps(graph, live, last=True)), *_end_of_last(graph, live)]
    if unlike and finer:
        steps = _after_steps(graph, sorted({*narrow}))
        if len({*narrow, *(more := _finer(graph, live, narrow))}) < FEW_STAGES:
            narrow += more
        narrow += steps
    ends = [end for place in (*loops(graph), *_cheap_branches(graph)) for end in (place, place + 1)]
    places = sorted({0, *narrow, *ends, *blocks, len(graph.ops)})
    return sorted({*places, *(p for a, b in itertools.pairwise(places) for p in _equal_cuts(live, a, b))})


def _finer(graph: Graph, live: Sequence[int], narrow: Sequence[int]) -> list[int]:
    """Returns where blocks may end besides; `live` as of `crossing`."""
    most = max(1, *live)
    rough = [round(size * ROUGH / most) for size in live]  # a random key beside what is large does not count
    more = [*_narrow(rough, gaps(graph, rough, last=True)), *_after_last(graph, rough)]
    return more if len({*narrow, *more}) > 1 else [*more, *_valleys(rough)]


def _after_steps(graph: Graph, narrow: Sequence[int]) -> list[int]:
    """Returns where steps of an optimizer end, in a loss that trains: after a narrow place, in front of the next dear
    operation, where all that is made between the two, and read behind them, is read behind the last dear operation
    before the next narrow place too. It is handed on to the next step's update, so people take it into the block
    before. After the last of these the next narrow place, at which nothing more is updated.
    """
    last, found, end = last_uses(graph), [], None
    for place, following in itertools.pairwise([*narrow, len(graph.ops)]):
        dear = [i for i in range(place, following) if is_dear(graph.ops[i])] or [place]
        first = dear[0]
        made = [index for op in graph.ops[place:first] for index in op.outputs if last.get(index, -1) >= first]
        if made and all(last[index] > dear[-1] for index in made):
            found.append(first)
            end = following
    return found if end in (None, len(graph.ops)) else [*found, end]


def _end_of_last(graph: Graph, live: Sequence[int]) -> list[int]:
    """Returns the first place after the last dear operation where no more crosses than anywhere between two of them;
    none where there is no such place. `live` as of `crossing`.
    """
    dear = [place for place, op in enumerate(graph.ops) if is_dear(op)]
    between = live[dear[0] + 1 : dear[-1] + 1] if dear else ()
    least = min(filter(None, between), default=0)
    return (
        list(itertools.islice((p for p in range(dear[-1] + 1, len(graph.ops)) if live[p] <= least), 1)) if least else []
    )


def _after_last(graph: Graph, live: Sequence[int]) -> list[int]:
    """Returns the first place after the last dear operation where no more crosses than in front of it: the end of its
    block, if cheap ones follow in which as much crosses again. None where there is no such place; `live` as of
    `crossing`.
    """
    dear = [-1, *(place for place, op in enumerate(graph.ops) if is_dear(op))]
    if len(dear) < 2:
        return []
    before = min((size for size in live[dear[-2] + 1 : dear[-1] + 1] if size), default=0)
    found = next((place for place in range(dear[-1] + 1, len(graph.ops)) if live[place] <= before), None)
    return [found] if found is not None and 0 < live[found] <= max(live[found + 1 :], default=0) else []


def _valleys(live: Sequence[int]) -> list[int]:
    """Returns the first place of each valley of what crosses, at most two thirds as high as what is on either side of
    it, and the first place so low after the last of these sides. A program of cheap operations alone is cut there.
    `live` as of `crossing`.
    """
    bottoms, low, risen = [0], 0, False
    for place in range(1, len(live)):
        if live[place] < live[place - 1]:
            low = place
        elif live[place] > live[place - 1]:
            bottoms += [low] if low and risen else []
            low, risen = 0, True
    sides = [max(live[a:b]) for a, b in itertools.pairwise([*bottoms, len(live)])]
    found = [place for place, *both in zip(bottoms[1:], sides, sides[1:]) if 3 * live[place] <= 2 * min(both)]
    last = live.index(sides[-1], bottoms[-1])
    end = (place for place in range(last + 1, len(live)) if 0 < 3 * live[place] <= 2 * sides[-1])
    return [*found, *itertools.islice(end, 1)]


def _narrow(live: Sequence[int], between: Sequence[int]) -> list[int]:
    """Returns the gaps where no more bytes cross than in those beside them; arguments as of `crossing` and `gaps`."""
    narrow = []
    for i, place in enumerate(between):
        around = [live[between[j]] for j in (i - 1, i + 1) if 0 <= j < len(between)]
        if all(live[place] <= other for other in around):
            narrow.append(place)
    return narrow


def _equal_cuts(live: Sequence[int], start: int, stop: int) -> Iterator[int]:
    """Yields where a stage is cut that has more than `LONG` operations."""
    while stop - start > LONG:
        start = min(range(start + LONG // 2, start + LONG + 1), key=lambda place: (live[place], place))
        yield start


def gaps(graph: Graph, live: Sequence[int], preferred: Collection[int] = (), *, last: bool = False) -> list[int]:
    """Returns for each two dear operations in a row the place between them where least crosses, of several such places
    one that is preferred, or the first one, or the `last`; `live` as of `crossing`.
    """
    dear = [place for place, op in enumerate(graph.ops) if is_dear(op)]
    order = lambda place: (live[place], place not in preferred, -place if last else place)
    return [min(range(a + 1, b + 1), key=order) for a, b in itertools.pairwise(dear)]


def middle(graph: Graph, live: Sequence[int], start: int, stop: int) -> list[int]:
    """Returns where a stage with a long run of cheap operations is cut: in that run's middle half, where least crosses.
    None where it has no such run; `live` as of `crossing`.
    """
    dear = [place for place in range(start, stop) if is_dear(graph.ops[place])]
    first, last = max(itertools.pairwise([start - 1, *dear, stop]), key=lambda ends: ends[1] - ends[0])
    if last - first <= CHEAP:
        return []
    quarter, centre = (last - first) // 4, (first + last + 1) / 2
    return [min(range(first + 1 + quarter, last - quarter), key=lambda place: (live[place], abs(place - centre)))]


def loops(graph: Graph) -> frozenset[int]:
    """Returns the places of the operations that are planned for as loops: scans with something dear in them, and those
    whose iterations hold much of what the function makes; `LOOPS` at most.
    """
    held, much = _held(graph)
    scans = [place for place, op in enumerate(graph.ops) if op.primitive == "scan" and op.params["length"] > 1]
    scans = [place for place in scans if is_dear(graph.ops[place]) or held[place] > much]
    return frozenset(sorted(scans, key=held.__getitem__, reverse=True)[:LOOPS])


def _cheap_branches(graph: Graph) -> list[int]:
    """Returns the places of branches without anything dear in them that make much of what the function makes, as a
    simulation in each does. A stretch with two of these would run both again at once.
    """
    held, much = _held(graph)
    branches = [place for place, op in enumerate(graph.ops) if primitives.of(op.primitive).holds is Holds.BRANCHES]
    return [place for place in branches if held[place] > much and not is_dear(graph.ops[place])][:LOOPS]


def _held(graph: Graph) -> tuple[list[int], float]:
    """Returns the bytes of what each operation makes, as of `_held_bytes`, and the bytes that are much of all of it."""
    held = [_held_bytes(graph, op) for op in graph.ops]
    return held, HELD * sum(held)


def _held_bytes(graph: Graph, op: Op) -> int:
    """Returns the bytes of what an operation makes; of a scan, of what all its iterations make, and of branches, of
    what the one makes that makes most.
    """
    holds = primitives.of(op.primitive).holds
    if op.primitive != "scan" and holds is not Holds.BRANCHES:
        return sum(graph.values[index].bytes for index in op.outputs)
    times = int(op.params["length"]) if op.primitive == "scan" else 1
    return times * max((sum(_held_bytes(graph, inner) for inner in body.ops) for body in op.bodies), default=0)


def repeats(graph: Graph) -> list[int]:
    """Returns where the blocks of a model begin, and where the last ends: one stretch of operations that comes several
    times in a row, cut where the fewest bytes are live. Empty if there is none, or it is a small part of the function.

    This is what people put a checkpoint around. Of all stretches the one counts whose copies cover the most operations,
    and of those that cover nearly as many the shortest. The first block is equal to the others although the derivative
    may not pass through what goes into it.
    """
    return _repeats(graph, _kinds(graph), 0, len(graph.ops), REPEATED)


def series(graph: Graph) -> list[list[int]]:
    """Returns the blocks of a model, and of what is before and after them again blocks of another kind, in order: the
    encoder's of a decoder's, those of each resolution. Each series as `repeats` returns it; of fewer than three blocks
    only the first one that is found, since two may begin anywhere.
    """
    kinds, found = _kinds(graph), list[list[int]]()

    def look(start: int, stop: int, least: float) -> None:
        blocks = _repeats(graph, kinds, start, stop, least)
        if blocks and (not found or len(blocks) > MORE_BLOCKS):
            found.append(blocks)
            look(start, blocks[0], MORE_REPEATED)
            look(blocks[-1], stop, MORE_REPEATED)

    look(0, len(graph.ops), REPEATED)
    return sorted(found)


def _kinds(graph: Graph) -> np.ndarray:
    """Returns a number for each operation, the same for equal ones."""
    texts: dict[int, str] = {}
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(_whole_text(graph, op, texts), len(numbers)) for op in graph.ops])


def _repeats(graph: Graph, kinds: np.ndarray, begin: int, end: int, least: float) -> list[int]:
    """Returns what `repeats` does, of the operations begin..end; `least`: the part of all that blocks must cover."""
    here = kinds[begin:end]
    found = [(period, *_longest(here[period:] == here[:-period])) for period in _periods(graph, kinds, begin, end)]
    found = [(period, start + begin, run) for period, start, run in found if run >= period]
    covered = max((run + period for period, _, run in found), default=0)
    if covered < least * len(graph.ops) or not found:
        return []
    period, start, run = min(each for each in found if each[2] + each[0] >= NEARLY * covered)
    live = crossing(graph)
    middle = (run // period + 2) // 2 * period  # to a copy that does not read the function's arguments
    narrow = set(gaps(graph, live))
    begun = next(place for place, op in enumerate(graph.ops) if is_dear(op))
    # In front of the first dear operation is no gap, but the first block may begin there.
    firsts = [p for p in range(start, start + period) if p + middle in narrow or 0 < p <= begun]
    lost = lambda place: place - start > run % period  # whether one block fewer is left
    order = lambda place: (live[place + middle], lost(place), place + middle not in narrow, place)
    first = min(firsts, key=order, default=start)
    return list(range(first, start + run + period + 1, period))


def _periods(graph: Graph, kinds: np.ndarray, begin: int, end: int) -> list[int]:
    """Returns distances at which dear operations of one kind come again in begin..end, the most frequent ones."""
    places: dict[int, list[int]] = {}
    for place in range(begin, end):
        if is_dear(graph.ops[place]):
            places.setdefault(int(kinds[place]), []).append(place)
    apart = collections.Counter(
        later - place
        for each in places.values()
        for i, place in enumerate(each)
        for later in each[i + 1 : i + 1 + PERIODS]
    )
    return [period for period, _ in apart.most_common(PERIODS)]


def _longest(equal: np.ndarray) -> tuple[int, int]:
    """Returns (start, length) of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    starts, stops = edges[::2], edges[1::2]
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest] - starts[longest])


def _whole_text(graph: Graph, op: Op, texts: dict[int, str]) -> str:
    """Returns what an operation does, with what its bodies do; of a slice not which: a block may read its own of
    weights that are stacked.
    """
    if op.index not in texts:
        texts[op.index] = _text(graph, op, (), parameters=op.primitive != "slice")
    inside = "".join(_whole_text(graph, inner, texts) for body in op.bodies for inner in body.ops)
    return f"{texts[op.index]}{inside}"


def merged_bytes(graph: Graph) -> int:
    """Returns the bytes of intermediate values that are equal to earlier ones because they are computed in the same way
    from the same values: a compiler computes them once.
    """
    same: dict[int, int] = {}
    known: dict[tuple[str, str, tuple[object, ...]], tuple[int, ...]] = {}
    merged = 0
    for op in graph.ops:
        if op.bodies or op.equation.effects:
            continue
        literals = [str(var) for var in op.equation.invars if isinstance(var, _compat.Literal)]
        key = op.primitive, parameters_text(op), (*literals, *(same.get(index, index) for index in op.inputs))
        first = known.setdefault(key, op.outputs)
        if first is not op.outputs and len(first) == len(op.outputs):
            same.update(zip(op.outputs, first))
            merged += sum(graph.values[index].bytes for index in op.outputs)
    return merged


def join(graph: Graph, places: list[int], digest: Callable[[int, int], str], most: int = MOST_STAGES) -> list[int]:
    """Returns fewer cuts where there are more than `most` stages: neighbours joined in pairs, in the way that leaves
    most of them equal.
    """
    scans = loops(graph)
    while len(places) - 1 > most:
        stages = list(itertools.pairwise(places))
        alike = []
        for offset in (0, 1):
            joined = _pairs(stages, scans, offset)
            alike.append((len({digest(a, b) for a, b in joined}), offset, joined))
        best = min(alike)[2]
        if len(best) == len(stages):
            break
        places = [0, *(b for _, b in best)]
    return places


def _pairs(stages: list[tuple[int, int]], scans: frozenset[int], offset: int) -> list[tuple[int, int]]:
    joined, at = stages[:offset], offset
    while at < len(stages):
        start, stop = stages[at]
        if at + 1 < len(stages) and scans.isdisjoint((start, stages[at + 1][0])):
            joined.append((start, stages[at + 1][1]))
            at += 2
        else:
            joined.append((start, stop))
            at += 1
    return joined


def digest(
    graph: Graph, part: Stretch, active: Collection[int], numbers: dict[int, int], texts: dict[int, str] | None = None
) -> str:
    """Returns a text that is equal for stretches that do the same to arrays of the same shapes, wherever they stand.

    Fills `numbers`, value -> number: values of equal stretches with the same number correspond. `texts` (operation ->
    what it does) is filled too; with one for all stretches of a graph, no operation is described twice.
    """
    known = {} if texts is None else texts

    def number(index: int) -> int:
        return numbers.setdefault(index, len(numbers))

    hashed = hashlib.sha256()

    def write(ops: Sequence[Op]) -> None:
        for op in ops:
            if op.index not in known:
                known[op.index] = _text(graph, op, active)
            wires = [number(index) for index in (*op.inputs, *op.outputs)]
            hashed.update(f"{known[op.index]}{wires};".encode())
            for body in op.bodies:
                hashed.update(f"{[number(index) for index in body.inputs]}:".encode())
                write(body.ops)
                ends = [None if index is None else number(index) for index in body.outputs]
                hashed.update(f"{ends};".encode())

    write(part.ops)
    hashed.update(repr([number(index) for index in part.outputs]).encode())
    return hashed.hexdigest()


def _text(graph: Graph, op: Op, active: Collection[int], *, parameters: bool = True) -> str:
    values = [graph.values[index] for index in (*op.inputs, *op.outputs)]
    kinds = [(value.shape, str(value.dtype), value.index in active) for value in values]
    literals = [isinstance(var, _compat.Literal) for var in op.equation.invars]
    return f"{op.primitive}{kinds}{parameters_text(op) if parameters else ''}{literals}"
