"""From a traced function to a chain with candidates, and from a chain's solution back to a plan."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jaxckpt.actions import Action
from jaxckpt.core import pooling
from jaxckpt.core.constants import FEW_STAGES, FINER, MOST_STAGES, OPERATIONS, SLIGHT, TINY, WIDEST
from jaxckpt.core.emit import Named
from jaxckpt.core.graph import Graph
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.liveness import FUSING
from jaxckpt.core.outline import iterations_around
from jaxckpt.core.plan import Loop, Plan, Region
from jaxckpt.core.regions import Address
from jaxckpt.core.shown import Progress, silent
from jaxckpt.core.sources import short_source
from jaxckpt.core.units import counted, format_bytes
from jaxckpt.planner import bodies, stages
from jaxckpt.planner.barriers import Barriers
from jaxckpt.planner.candidates import Candidates, Store, candidates_of, stores_of
from jaxckpt.planner.chain import Candidate, Carried, Chain, Drop, Keep, Segment, Solution, cost
from jaxckpt.planner.context import Context
from jaxckpt.planner.costs import Time, behind_barrier, is_dear, total
from jaxckpt.planner.host import Host, host_use
from jaxckpt.planner.inside import Inside, whole
from jaxckpt.planner.preferences import barest, fastest, leanest, on_device, tightest
from jaxckpt.planner.scans import InnerCandidates, InnerRegions, LoopCandidates, lean_loops, loop_candidates_of
from jaxckpt.planner.shards import WHOLE, Shards
from jaxckpt.planner.solvers.optimal import Optimal, Table
from jaxckpt.policies import PRESETS
from jaxckpt.schedules import schedule_of

BLOCK_PRESETS = ("dots", "dots_no_batch", "hybrid")
"""The presets that plans are held against; the others keep nothing, or everything."""


@dataclass(frozen=True)
class LeanLoops:
    """What a region keeps whose loops run one checkpointed iteration at a time: its `actions`, as of `Region`."""

    actions: Mapping[int, Action]


@dataclass(frozen=True)
class Model:
    """A function as a chain.

    Attributes:
      graph: the function.
      places: where its stages begin and end, places in `graph.ops`.
      chain: what solvers see; of each candidate, `how` is what a plan says of it.
      forward: seconds of each stage's forward run.
      step_seconds: forward and backward pass, nothing recomputed.
      distinct: how many stretches were analysed.
      fingerprint: of the whole function.
      shards: how arrays lie over the target's devices; bytes and seconds are those of one.
      loops: places of the operations that are planned for as loops.
      lean: loops inside of regions, as `LeanLoops` runs them: place of the operation -> those in it.
      address: of the body that is planned, whose view `graph` is: see `jaxckpt.planner.inside`.
      outside_bytes: of what the function computes around that body, on one device.
      mapped: whether that body is what one device of several runs.
      quick, finer: see `jaxckpt.planner.context.Context`.
      active: the values that a derivative goes through.
      series: the blocks of the function, in each series of equal ones the stages at which they begin, and the last
        ends; see `stages.series`.
      necks: as of `stages.necks`, those between which blocks are others than those of `series`, in a `quick` program.
      calls: the stages of each call of the user's functions, where the function is cut there: see `Context`.
      presets: (start, stop) of a block, or of what is between two necks -> name of a policy of `policies.PRESETS` ->
        number of the candidate that keeps what it keeps.
      pools_apart: as of `Plan`.
    """

    graph: Graph
    places: tuple[int, ...]
    chain: Chain
    forward: tuple[float, ...]
    step_seconds: float
    distinct: int
    fingerprint: str
    shards: Shards = WHOLE
    loops: frozenset[int] = frozenset()
    series: tuple[tuple[int, ...], ...] = ()
    necks: tuple[tuple[int, ...], ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    presets: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    lean: Mapping[int, tuple[Loop, ...]] = field(default_factory=dict)
    address: Address = ()
    outside_bytes: int = 0
    mapped: bool = False
    quick: bool = False
    finer: bool = False
    active: frozenset[int] = frozenset()
    pools_apart: bool = False

    def by_hand(self) -> Iterator[Solution]:
        """Yields what people do: a checkpoint around each block that keeps nothing, at first, and around several; the
        same with all that is before and after the blocks as lean as it can be, with one around each of the several
        too, and with what is before or after them as a block; around each call of the user's functions; and a preset's
        checkpoint around each block. Where there are loops, a checkpoint around their bodies, and all else left to JAX.
        """
        # Of other programs each takes the trace of a long step.
        insides = (barest, leanest, tightest) if self.quick else (leanest, tightest)
        for run in _runs(max(map(len, self.series), default=1) - 1):
            several = [pair for ends in self.series for pair in itertools.pairwise(_every(run, ends))]
            if not all(self.chain.segment(a, b).candidates for a, b in several):
                continue  # too many operations to look at
            for inside, outside in itertools.product(insides, (fastest, leanest)):
                yield self._around([self._kept(a, b, inside) for a, b in several], outside)
            if run > 1:
                yield self._around([self._nested(a, b) for a, b in several], leanest)
        between = [list(itertools.pairwise(ends)) for ends in self.necks]
        for pairs in (*between, *self._with_unlike_ends()):
            yield self._around([self._bare(a, b) for a, b in pairs], fastest)
        for pairs, name in itertools.product((self.blocks, *between), BLOCK_PRESETS):
            if pairs and (kept := self._preset(pairs, name)):
                yield self._around(kept, fastest)
        if self.calls:
            yield self.by_calls()
            yield from (self._or_left(kept) for name in BLOCK_PRESETS if (kept := self._preset(self.calls, name)))
        if bodies := [each for each in map(self._each_iteration, sorted(self.loops)) if each is not None]:
            yield self._or_left(bodies)

    def by_calls(self) -> Solution:
        """Returns what people do in any model: a checkpoint around each call of a function of theirs that keeps
        nothing, and all else left to JAX.
        """
        return self._or_left([self._bare(start, stop) for start, stop in self.calls])

    def _preset(self, pairs: Iterable[tuple[int, int]], name: str) -> list[Keep]:
        """Returns blocks, each with what a preset keeps; none where that is not known of all."""
        known = all(name in self.presets.get(pair, ()) for pair in pairs)
        return [Keep(a, b, self.presets[a, b][name]) for a, b in pairs] if known else []

    def _or_left(self, made: Sequence[Keep | Drop]) -> Solution:
        """Returns what is made of some stages, and all others left to JAX."""
        covered = {stage for item in made for stage in range(item.start, item.stop)}
        left = [item for item in self._left(0, self.chain.length) if item.start not in covered]
        return tuple(sorted([*made, *left], key=lambda item: item.start))

    def _with_unlike_ends(self) -> Iterator[list[tuple[int, int]]]:
        """Yields blocks, and every two, together with a first one that is no repetition of them, a last one, and both:
        all that is before the first series, or after the last one. The first step of a loop that is written out starts
        from arguments.
        """
        if not self.series:
            return
        first, last = self.series[0][0], self.series[-1][-1]
        before = [0] if self._is_dear(0, first) else []
        after = [self.chain.length] if self._is_dear(last, self.chain.length) else []
        for low, high in ((before, []), ([], after), (before, after)):
            if not low and not high:
                continue
            rows = [list(ends) for ends in self.series]
            rows[0] = [*low, *rows[0]]
            rows[-1] = [*rows[-1], *high]
            for run in (1, 2):
                yield [pair for ends in rows for pair in itertools.pairwise(_every(run, ends))]

    def _is_dear(self, start: int, stop: int) -> bool:
        """Whether some of the operations of stages are."""
        return any(map(is_dear, self.graph.ops[self.places[start] : self.places[stop]]))

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The stages of each block of all series: (first, one after the last)."""
        return [pair for ends in self.series for pair in itertools.pairwise(ends)]

    @property
    def block_ends(self) -> list[int]:
        """The operations at which blocks of all series begin, and the last ends."""
        return [self.places[stage] for ends in self.series for stage in ends]

    @property
    def is_unlike(self) -> bool:
        """Whether at most two blocks are repetitions of one another."""
        return max(map(len, self.series), default=0) <= 3

    def with_one_more(self, solution: Solution = ()) -> Iterator[Solution]:
        """Yields what people do where blocks are no repetitions of one another, in a program of few stages: a
        checkpoint that keeps nothing around some stages in a row, and all others left to JAX. With one of these,
        yields it with one more checkpoint.
        """
        if not self.is_unlike or self.chain.length > FEW_STAGES:
            return
        items = solution or tuple(self._left(0, self.chain.length))
        free = [isinstance(item, Keep) and item.left for item in items]
        for first, last in itertools.combinations_with_replacement(range(len(items)), 2):
            if all(free[first : last + 1]):
                around = self._bare(items[first].start, items[last].stop)
                yield (*items[:first], around, *items[last + 1 :])
        for place, item in enumerate(items):
            for number in self._in_branches(item.start) if free[place] else ():
                yield (*items[:place], Keep(item.start, item.stop, number), *items[place + 1 :])

    def _in_branches(self, stage: int) -> Iterator[int]:
        """Yields the candidates of a stage that have regions in its branches."""
        if self.places[stage] not in self.loops:
            for number, candidate in enumerate(self.chain.segment(stage, stage + 1).candidates):
                if isinstance(candidate.how, InnerRegions):
                    yield number

    def _left(self, start: int, stop: int) -> Iterator[Keep]:
        """Yields stages that are left to JAX."""
        return (replace(self._kept(stage, stage + 1, fastest), left=True) for stage in range(start, stop))

    def _bare(self, start: int, stop: int) -> Keep | Drop:
        """Returns stages with a checkpoint around all of them that keeps nothing, and nothing in it."""
        if self.chain.segment(start, stop).candidates and self.loops.isdisjoint(
            range(self.places[start], self.places[stop])
        ):
            return self._kept(start, stop, barest)
        return Drop(start, stop, tuple(self._left(start, stop)))

    def _nested(self, start: int, stop: int) -> Keep | Drop:
        """Returns blocks with a checkpoint around all of them, and one around each: nothing is kept."""
        ends = [end for each in self.series for end in each if each[0] <= start and stop <= each[-1]]
        ends = [end for end in ends if start <= end <= stop]
        within = tuple(self._kept(a, b, leanest) for a, b in itertools.pairwise(ends))
        return within[0] if len(within) == 1 else Drop(start, stop, within)

    def _each_iteration(self, place: int) -> Keep | None:
        """Returns a loop with each iteration checkpointed; None where that is not among its candidates."""
        stage, every = self.places.index(place), schedule_of(self.graph.ops[place].params["length"], "every")
        hows = [candidate.how for candidate in self.chain.segment(stage, stage + 1).candidates]
        return Keep(stage, stage + 1, hows.index(every)) if every in hows else None

    def checkpoints_loops(self, solution: Solution) -> bool:
        """Whether a solution checkpoints bodies of loops, and leaves all else to JAX."""
        made = [item for item in solution if not isinstance(item, Keep) or not item.left]
        return bool(made) and all(isinstance(item, Keep) and self.places[item.start] in self.loops for item in made)

    def _around(
        self, blocks: Sequence[Keep | Drop], preference: Callable[[Candidate], tuple[float, float]]
    ) -> Solution:
        """Returns blocks with what is before and after them, each stage with the candidate that is preferred."""
        covered = {stage for block in blocks for stage in range(block.start, block.stop)}
        outside = [self._kept(s, s + 1, preference) for s in range(self.chain.length) if s not in covered]
        return tuple(sorted([*outside, *blocks], key=lambda item: item.start))

    def by_blocks(self) -> Chain | None:
        """Returns the chain in which each block is a region of its own, as people place checkpoints; None where there
        are no blocks, or no candidates for them.
        """
        blocks = set(self.blocks)
        if not blocks or not all(self.chain.segment(*each).candidates for each in blocks):
            return None
        segments = dict(self.chain.segments)
        times = [max((each.time for each in segment.candidates), default=0.0) for segment in segments.values()]
        beyond = sum(times) + sum(segment.forward_time for segment in segments.values())  # more than solutions take
        # What is before a series may be in one region with its first block, and what is after it with its last.
        lasts = [(0, 0), *((ends[-2], ends[-1]) for ends in self.series)]
        firsts = [*((ends[0], ends[1]) for ends in self.series), (self.chain.length, self.chain.length)]
        between = [(*last, *first) for last, first in zip(lasts, firsts)]
        for (start, stop), segment in self.chain.segments.items():
            beside = any(low <= start < b and a < stop <= high for low, a, b, high in between)
            if (start, stop) not in blocks and not beside:
                left = segment.candidates if stop == start + 1 else ()  # solvers need a candidate for each stage
                not_taken = tuple(replace(each, time=beyond) for each in left)
                segments[start, stop] = replace(segment, candidates=not_taken)
        return replace(self.chain, segments=segments)

    def with_last_blocks_left(self, solution: Solution) -> list[Solution]:
        """Returns a solution with its last blocks left to JAX: the last one, the last two, up to all but the first.
        What a last block keeps is needed at once, so it may cost no memory.
        """
        blocks = [item for item in solution if self._is_block(item)]
        left = [replace(self._kept(item.start, item.stop, fastest), left=True) for item in blocks]
        others = [item for item in solution if not self._is_block(item)]
        found = [(*blocks[:count], *left[count:], *others) for count in reversed(range(1, len(blocks)))]
        return [tuple(sorted(each, key=lambda item: item.start)) for each in found]

    def plan_by_hand(self, solution: Solution) -> Plan:
        """Returns one of `by_hand`, or of these `with_last_blocks_left`, as people write it: what is before and after
        the blocks is left to JAX where hardly anything of it is computed again, and no region waits for the gradients
        of the one before.
        """
        made = self.plan(tuple(item for item in solution if self._is_made(item)))
        return replace(made, regions=tuple(map(_untied, made.regions)))

    def _is_made(self, item: Keep | Drop) -> bool:
        if not isinstance(item, Keep) or item.left or any(item.start in ends[:-1] for ends in self.series):
            return True
        slight = SLIGHT * self.chain.segment(item.start, item.stop).forward_time
        return self._is_block(item) or self.chain.candidate(item).time > slight

    def _is_block(self, item: Keep | Drop) -> bool:
        """Whether stages are a block of a series, a call, or several operations between two necks."""
        within = lambda rows: any({item.start, item.stop} <= set(ends) for ends in rows)
        if not isinstance(item, Keep) or item.left:
            return False
        if (item.start, item.stop) in self.calls:
            return True
        return within(self.series) or (within(self.necks) and self.places[item.stop] > self.places[item.start] + 1)

    def _kept(self, start: int, stop: int, preference: Callable[[Candidate], tuple[float, float]]) -> Keep:
        candidates = self.chain.segment(start, stop).candidates
        return Keep(start, stop, min(range(len(candidates)), key=lambda o: on_device(preference)(candidates[o])))

    def plan(self, solution: Solution) -> Plan:
        """Returns a solver's solution as a plan."""
        loops: list[Loop] = []
        inner: list[Region] = []
        regions = (*self._regions(solution, loops, inner), *inner)
        notes = tuple(self._note(region, iterations_around(region.body, loops, self.graph)) for region in regions)
        placed = tuple(self._placed(region) for region in regions)
        moved = tuple(replace(loop, body=(*self.address, *loop.body)) for loop in loops)
        return Plan(placed, self.fingerprint, notes=notes, loops=moved, pools_apart=self.pools_apart)

    def _placed(self, region: Region) -> Region:
        """Returns a region of the body that is planned as one of the function."""
        nested = tuple(self._placed(inner) for inner in region.regions)
        return replace(region, regions=nested, body=(*self.address, *region.body))

    def seconds(self, solution: Solution) -> float:
        """Returns the seconds of recomputation of a solution; the chain's times weigh FLOPs as well."""
        seconds = 0.0
        for item in solution:
            if isinstance(item, Keep):
                seconds += self.chain.candidate(item).seconds
            else:
                seconds += sum(self.forward[item.start : item.stop]) + self.seconds(item.again)
        return seconds

    def widest(self) -> tuple[int, int, int]:
        """Returns the stage that needs most memory at once when it keeps the least: (first operation, one after its
        last, bytes).
        """

        def least(stage: int) -> int:
            segment = self.chain.segment(stage, stage + 1)
            return max(
                segment.forward_work,
                min((candidate.kept + candidate.work for candidate in segment.candidates), default=0),
            )

        stage = max(range(self.chain.length), key=least)
        return self.places[stage], self.places[stage + 1], least(stage)

    def kept_bytes(self, solution: Solution) -> int:
        """Returns the bytes that a solution keeps from the forward to the backward pass."""
        at = 0
        for item in solution:
            kept = self.chain.candidate(item).kept if isinstance(item, Keep) else 0
            at += kept + self.chain.output(item.start, item.stop, self.chain.length)
        return at

    def _regions(self, solution: Solution, loops: list[Loop], inner: list[Region]) -> tuple[Region, ...]:
        """Returns the regions of a solution; fills in the loops, and the regions that lie in loops."""
        regions = []
        for item in solution:
            start, stop = self.places[item.start], self.places[item.stop]
            if not isinstance(item, Keep):
                regions.append(Region(start, stop, {}, self._regions(item.again, loops, inner), tied=True))
                continue
            if item.left:
                continue
            how = self.chain.candidate(item).how
            if isinstance(how, LeanLoops):
                loops += [loop for place in range(start, stop) for loop in self.lean.get(place, ())]
                how = how.actions
            if isinstance(how, InnerRegions):
                loops += how.loops if how.schedule is None else (Loop(start, how.schedule), *how.loops)
                inner += how.regions
            elif start not in self.loops or stop > start + 1:
                regions.append(Region(start, stop, how or {}, checkpoint=how is not None, tied=True))
            elif how is not None:
                loops.append(Loop(start, how))
        return tuple(regions)

    def _note(self, region: Region, around: int) -> str:
        """Returns what is printed beside a region; `around` as of `iterations_around`."""
        first = self.graph.at(region.body).ops[region.start]
        where = f"from {first.scope or short_source(first.source) or first.primitive}"
        values = [(action, self.graph.values[index]) for index, action in region.actions.items()]
        kept = sum(action.stored_bytes(value) * value.repeats for action, value in values)
        if not region.checkpoint:
            return f"({where})"
        if region.regions:
            return f"(runs again as {counted(len(region.regions), 'region')}, {where})"
        each = " of an iteration that runs again" if kept and around > 1 else ""
        return f"({format_bytes(kept // around)}{each}, {where})"


def build(inside: Inside, context: Context, progress: Progress | None = None, *, looped: bool = False) -> Model:
    """Returns the chain of a function, every stretch of it analysed.

    Args:
      inside: the function as traced, or a body of it.
      context: what it is planned for.
      progress: called as `progress(done, total, what)`.
      looped: whether it is a loop's body. All iterations run forward before the last one's backward pass begins, so
        the compiler moves nothing between the two.
    """
    return _Builder(inside, context, progress or silent, looped).build()


def _untied(region: Region) -> Region:
    return replace(region, tied=False, regions=tuple(map(_untied, region.regions)))


def _planned(
    context: Context, length: int, body: Graph, differentiated: Collection[int], address: Address, heavy: bool
) -> InnerCandidates | None:
    """Returns the plans of a loop's body in which there is more to plan than what one region keeps: a loop, several
    blocks, or much work. See `loop_candidates_of`.
    """
    if not heavy and not stages.loops(body) and len(stages.repeats(body)) < 3:
        return None
    inner = replace(
        build(
            whole(body, differentiated),
            replace(context, timed=False, in_loop=True, finer=False, calls=()),
            looped=True,
        ),
        address=address,
    )
    host = Host(inner.chain, Optimal(), inner.step_seconds)
    solutions: list[Solution] = []
    for chain, original in host.priced_chains():
        table = Table(chain)
        solutions += map(original, (*bodies.of_one(table), *bodies.of_all(table, length)))
    candidates, again = [], []
    for solution in dict.fromkeys((*solutions, *inner.by_hand())):
        dropped = solution[0].again if len(solution) == 1 and isinstance(solution[0], Drop) else None
        if dropped is None:
            candidates.append(_of_all(inner, solution))
        if len(dropped or solution) > 1 and not host_use(inner.chain, solution).bytes:
            again.append(_of_one(inner, dropped or solution))
    return InnerCandidates(
        tuple(candidates), tuple(dict.fromkeys(again)), inner.chain.segment(0, inner.chain.length).forward_work
    )


def _of_all(body: Model, solution: Solution) -> Candidate:
    """Returns what an iteration takes whose plan keeps what it keeps from the forward pass on."""
    spent, kept, there = cost(body.chain, solution), body.kept_bytes(solution), host_use(body.chain, solution)
    work = max(spent.peak - kept, 0)
    return Candidate(
        kept, spent.time, work, body.seconds(solution), _regions_in(body, solution), there.link, there.bytes
    )


def _of_one(body: Model, solution: Solution) -> Candidate:
    """Returns what an iteration takes that runs again, with a plan, before its own backward pass. What the last region
    computes is not wanted then, unless that keeps some of it.
    """
    last, spent = solution[-1], cost(body.chain, solution)
    stop = last.start if isinstance(last, Drop) or not body.chain.candidate(last).kept else last.stop
    forward = body.chain.segment(0, stop).forward_time if stop else 0.0
    seconds = sum(body.forward[:stop]) + body.seconds(solution)
    return Candidate(0, forward + spent.time, spent.peak, seconds, _regions_in(body, solution))


def _regions_in(body: Model, solution: Solution) -> InnerRegions:
    made = body.plan(solution)
    # Behind a barrier, what all iterations read is a value of each: JAX would keep a copy for every one.
    return InnerRegions(tuple(map(_untied, made.regions)), made.loops)


class _Builder:
    def __init__(self, inside: Inside, context: Context, progress: Progress, looped: bool) -> None:
        self.graph, self.context, self.progress, self.looped = inside.graph, context, progress, looped
        graph = inside.graph
        self.differentiated = frozenset(inside.differentiated)
        self.active = inside.active
        self.last = stages.last_uses(graph)
        self.loops = stages.loops(graph)
        self.named = Named(graph, graph.body)
        number = {op.index: place for place, op in enumerate(graph.ops)}
        lean = [(number[loop.body[0][0]] if loop.body else loop.op, loop) for loop in lean_loops(graph)]
        self.lean = {place: tuple(loop for _, loop in each) for place, each in itertools.groupby(lean, lambda x: x[0])}
        self.analyses: dict[str, tuple[Candidates, dict[int, int]]] = {}
        self.scans: dict[str, LoopCandidates] = {}
        self.digests: dict[tuple[int, int], tuple[str, stages.Stretch, dict[int, int]]] = {}
        self.texts: dict[int, str] = {}
        self.blocks: Collection[tuple[int, int]] = ()
        self.calls: tuple[tuple[int, int], ...] = ()

    def build(self) -> Model:
        """Cuts the function into stages, finds the candidates of each stretch that may be a region, and makes the chain
        of these.
        """
        graph = self.graph
        series = stages.series(graph)
        places = self._cut_places(series)
        handed = self._handed(places)
        found_series = (_block_ends(places, blocks) for blocks in series)
        self.series = tuple(ends for ends in found_series if len(ends) > 1)
        self.necks = self._necks(places)
        number = {place: stage for stage, place in enumerate(places)}
        called = [each for each in self.context.calls if number.keys() >= {*each}]  # some stages were joined
        self.calls = tuple((number[a], number[b]) for a, b in called)
        self.blocks = {
            (places[s], places[t]) for ends in (*self.series, *self.necks) for s, t in itertools.pairwise(ends)
        } | {*called}
        found = self._all_found(places)
        singles = [found[s, s + 1] for s in range(len(places) - 1)]
        segments = self._segments(places, found, singles, handed)
        if self.context.finer:
            segments = {each: self._with_branches(places, each, segment) for each, segment in segments.items()}
        forwards = tuple(single.forward.seconds for single in singles)
        return Model(
            graph,
            tuple(places),
            Chain(len(singles), segments, tuple(each.carried for each in handed)),
            forward=forwards,
            step_seconds=sum(forwards) + sum(single.backward.seconds for single in singles),
            distinct=len(self.analyses) + len(self.scans),
            fingerprint=graph.fingerprint,
            shards=self.context.shards,
            loops=self.loops,
            series=self.series,
            necks=self.necks,
            calls=self.calls,
            presets={each: one.presets for each, one in found.items() if isinstance(one, Candidates)},
            lean=self.lean,
            quick=self.context.quick,
            finer=self.context.finer,
            active=frozenset(self.active),
            pools_apart=FUSING[self.context.target.platform].shares_zeros and pooling.is_in(graph),
        )

    def _necks(self, places: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the necks of a quick program, those that are the ends of other blocks than `series` has."""
        found = stages.necks(self.graph, places) if self.context.quick else ()
        known = {pair for ends in self.series for pair in itertools.pairwise(ends)}
        return tuple(ends for ends in found if set(itertools.pairwise(ends)) != known)

    def _with_branches(self, places: Sequence[int], stages: tuple[int, int], segment: Segment) -> Segment:
        """Returns a stage that has branches with one more candidate: a checkpoint around each branch that has something
        dear, and all else left to JAX. What it needs is not known: it is said to take a little more time than the
        candidate that keeps nothing, so that no solver takes it.
        """
        start, stop = stages
        held = [op for op in self.graph.ops[places[start] : places[stop]] if op.primitive == "cond"]
        regions = tuple(
            Region(0, len(body.ops), {}, body=((op.index, number),))
            for op in held
            for number, body in enumerate(op.bodies)
            if any(map(is_dear, body.ops))
        )
        if stop > start + 1 or not regions or not segment.candidates:
            return segment
        bare = min(segment.candidates, key=on_device(barest))
        more = replace(bare, time=bare.time * (1 + TINY), how=InnerRegions(regions, ()))
        return replace(segment, candidates=(*segment.candidates, more))

    def _cut_places(self, series: Sequence[Sequence[int]]) -> list[int]:
        """Returns where stages begin and end; `series` as of `stages.series`."""
        blocks = sorted({place for each in series for place in each})
        if self.context.cycles is not None:
            # What the compiler says of an operation in a block is kept for its stages: it fuses there as in the step.
            for start, stop in (pair for each in series for pair in itertools.pairwise(each)):
                if self.loops.isdisjoint(range(start, stop)):
                    self._found(start, stop)
        finer = self.context.finer
        cuts = stages.cuts(self.graph, blocks, unlike=finer or not blocks, finer=finer)
        cuts = sorted({*cuts, *itertools.chain(*self.context.calls)})
        return self._finer(stages.join(self.graph, cuts, lambda a, b: self._stretch(a, b)[0]), blocks)

    def _all_found(self, places: Sequence[int]) -> dict[tuple[int, int], Candidates | LoopCandidates]:
        """Returns (start, stop) of a segment -> what was found for it, for all segments that have candidates."""
        ends = self._segments_with_candidates(places)
        found: dict[tuple[int, int], Candidates | LoopCandidates] = {}
        for done, (s, t) in enumerate(ends):
            self.progress(done, len(ends), "analysing stages")
            found[s, t] = self._found(places[s], places[t])
        self.progress(len(ends), len(ends), "")
        return found

    def _segments(
        self,
        places: Sequence[int],
        found: Mapping[tuple[int, int], Candidates | LoopCandidates],
        singles: Sequence[Candidates | LoopCandidates],
        handed: Sequence[_Handed],
    ) -> dict[tuple[int, int], Segment]:
        """Returns all segments of the chain.

        Args:
          places: where stages begin and end.
          found: as of `_all_found`; `singles`: of each stage.
          handed: as of `_handed`.
        """
        length = len(singles)
        gradients = self._gradients(places)
        here = self.context.shards.applied(self.graph)
        barriers = Barriers(self.graph, places, behind_barrier(here, self.context.target))
        read_whole = functools.cache(lambda stage: self._read_whole(singles[stage], *places[stage : stage + 2]))
        made = _made_before([each.carried for each in handed], length)
        passing = _passing([each.carried for each in handed if each.moving], length)
        otherwise = self._otherwise(places, found, handed)
        segments: dict[tuple[int, int], Segment] = {}
        for s in range(length):
            work = 0
            for t in range(s + 1, length + 1):
                candidates: list[Candidate] = []
                if (s, t) in found:
                    candidates = self._candidates(found[s, t], places[s], places[t])
                    more = int(passing[s, t]) - self._written_before(places[s], places[t])
                    crossing = self._crossing(found[s, t], places[s], places[t])
                    apart = Time() if crossing is None else barriers.time(s, t, *crossing, read_whole)
                    if isinstance(found[s, t], Candidates):
                        candidates += self._inputs_otherwise(tuple(candidates), s, t, otherwise)
                    candidates = [_more(each, apart, more) for each in candidates]
                    if (s, t) == (length - 1, length):
                        candidates += [_more(each, Time(), more) for each in self._left_to_jax(found[s, t])]
                forward = sum(single.forward.effort for single in singles[s:t])
                work = max(work, singles[t - 1].forward_work + int(made[s, t - 1]))
                segments[s, t] = Segment(forward, work, sum(gradients[s:t]), tuple(candidates))
        return segments

    def _otherwise(
        self,
        places: Sequence[int],
        found: Mapping[tuple[int, int], Candidates | LoopCandidates],
        handed: Sequence[_Handed],
    ) -> list[tuple[_Handed, tuple[Store, ...]]]:
        """Returns the values between stages that can be kept otherwise than as they are, each with the ways: those that
        the backward pass of their own stage does not read.
        """
        context, target = self.context, self.context.target
        actions = [action for action in context.actions if action.keeps and not action.saves]
        ways = []
        for each in handed if actions and not self.looped else ():
            made, value = each.carried.made, self.graph.values[each.value]
            maker = self._candidates(found[made, made + 1], *places[made : made + 2])
            is_read = any(not isinstance(c.how, Mapping) or each.value in c.how for c in maker)
            if value.shape and is_inexact(value) and not is_read:
                stores = stores_of(value, actions, target, Time(), target.hidden_transfers)
                ways.append((each, tuple(store for store in stores if not store.action.saves)))
        return ways

    def _inputs_otherwise(
        self, candidates: Sequence[Candidate], s: int, t: int, otherwise: Sequence[tuple[_Handed, tuple[Store, ...]]]
    ) -> Iterator[Candidate]:
        """Yields candidates of the stages s..t that keep what goes in by an action, if no other stage uses it.
        As they are, these count in any case, so what such a candidate keeps may be less than nothing.
        """
        here = [(each, ways) for each, ways in otherwise if s <= each.carried.uses[0] and each.carried.uses[-1] < t]
        here = [(each, ways) for each, ways in here if each.carried.made < s]
        for number in range(max((len(ways) for _, ways in here), default=0)):
            chosen = {each.value: (each.carried.bytes, ways[number]) for each, ways in here if number < len(ways)}
            stores = [store for _, store in chosen.values()]
            saved = sum(size for size, _ in chosen.values())
            time = total(store.time for store in stores)
            actions = {index: store.action for index, (_, store) in chosen.items()}
            for each in candidates:
                if isinstance(each.how, Mapping) and all(action in actions.values() for action in each.how.values()):
                    yield replace(
                        each,
                        kept=each.kept + sum(store.bytes for store in stores) - saved,
                        time=each.time + time.effort,
                        work=each.work + saved,
                        seconds=each.seconds + time.seconds,
                        how={**each.how, **actions},
                        link=each.link + sum(store.link for store in stores),
                        host=each.host + sum(store.host for store in stores),
                        waits=each.waits + sum(store.waits for store in stores),
                    )

    def _crossing(
        self, found: Candidates | LoopCandidates, start: int, stop: int
    ) -> tuple[Collection[int], Mapping[int, Time]] | None:
        """Returns the values that go into a region, and what it takes to have their cotangents in memory; None where
        there is no barrier in front of the region: a loop is none, and in a loop's body regions are not tied.
        """
        if self.looped or isinstance(found, LoopCandidates):
            return None
        here = self._here(start, stop)
        # A result that is an older value by another name goes into the last stretch, and nothing there reads it.
        cotangents = {here[index]: time for index, time in found.cotangents.items() if index in here}
        return self._stretch(start, stop)[1].inputs, cotangents

    def _read_whole(self, found: Candidates | LoopCandidates, start: int, stop: int) -> Collection[int]:
        """Returns the values of a stage whose cotangents it reads from memory in any case; a loop reads all."""
        if isinstance(found, LoopCandidates):
            return self.graph.ops[start].outputs
        here = self._here(start, stop)
        return {here[index] for index in found.read_whole}

    def _left_to_jax(self, last: Candidates | LoopCandidates) -> list[Candidate]:
        """Returns the candidate of the last stage that leaves to JAX what is kept, if there is one.

        The backward pass of this stage follows its forward pass at once, unless it is in a loop's body. Elsewhere the
        compiler moves work of the backward pass into the forward pass, and keeps what comes out.
        """
        if not isinstance(last, Candidates) or self.looped:
            return []
        left = last.left_time
        return [Candidate(last.left_bytes, left.effort, last.plain_work, left.seconds)]

    def _finer(self, places: list[int], blocks: Collection[int]) -> list[int]:
        """Returns the cuts with further ones in the stage that needs most, as long as each lowers that: it bounds what
        the step can do with.

        Ends also when `OPERATIONS` operations have been differentiated for it, or would be: a stage of many operations
        has many places to cut.
        """
        operations = 0
        live = stages.crossing(self.graph)
        gaps = stages.gaps(self.graph, live, blocks)
        while 1 < len(places) <= MOST_STAGES:
            needs = [self._least_work(*ends) for ends in itertools.pairwise(places)]
            widest = needs.index(max(needs))
            start, stop = places[widest : widest + 2]
            for between in (
                [place for place in gaps if start < place < stop],
                stages.middle(self.graph, live, start, stop),
            ):
                operations += len(between) * (stop - start)
                if operations > OPERATIONS:
                    return places
                halves = {p: max(self._least_work(start, p), self._least_work(p, stop)) for p in between}
                place = min(halves, key=lambda place: halves[place], default=None)
                if place is not None and halves[place] <= (1 - FINER) * needs[widest]:
                    places = sorted([*places, place])
                    break
            else:
                break
        return places

    def _least_work(self, start: int, stop: int) -> int:
        """Returns the bytes that a stage needs at once when it keeps the least."""
        found = self._found(start, stop)
        return max(found.forward_work, min((each.kept + each.work for each in _listed(found)), default=0))

    def _segments_with_candidates(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (start, stop) of the stages, and of as many longer segments as `OPERATIONS` allows, equal ones
        counted once.
        """
        ends: list[tuple[int, int]] = []
        known: set[str] = set()
        operations = 0
        for width in range(1, WIDEST + 1):
            here = [(s, t) for s, t in _of_width(len(places) - 1, width) if self._may_join(places, s, t)]
            new = {self._stretch(places[s], places[t])[0]: places[t] - places[s] for s, t in here}
            operations += sum(size for text, size in new.items() if text not in known)
            if width > 1 and operations > OPERATIONS:
                break
            known |= new.keys()
            ends += here
        for run in _runs(max(map(len, self.series), default=1) - 1):
            several = [pair for each in self.series for pair in zip(each, each[run:])]
            here = [(s, t) for s, t in several if t - s > 1 and (s, t) not in ends]
            new = {self._stretch(places[s], places[t])[0]: places[t] - places[s] for s, t in here}
            operations += sum(size for text, size in new.items() if text not in known)
            if operations > 2 * OPERATIONS:
                break
            known |= new.keys()
            ends += here
        pairs = dict.fromkeys([*(pair for each in self.necks for pair in itertools.pairwise(each)), *self.calls])
        between = [pair for pair in pairs if pair not in ends]
        return [*ends, *(pair for pair in between if self._may_join(places, *pair))]

    def _may_join(self, places: Sequence[int], s: int, t: int) -> bool:
        """Whether stages may be one region: a scan stays alone."""
        return t == s + 1 or self.loops.isdisjoint(places[s:t])

    def _stretch(self, start: int, stop: int) -> tuple[str, stages.Stretch, dict[int, int]]:
        key = (start, stop)
        if key not in self.digests:
            part = stages.stretch(self.graph, start, stop, self.last)
            numbers: dict[int, int] = {}
            text = stages.digest(self.graph, part, self.active, numbers, self.texts)
            self.digests[key] = text, part, {number: index for index, number in numbers.items()}
        return self.digests[key]

    def _candidates(self, found: Candidates | LoopCandidates, start: int, stop: int) -> list[Candidate]:
        """Returns the candidates of start..stop, of what was found for it or for a stretch that is equal to it."""
        if isinstance(found, LoopCandidates):
            return _listed(found)
        here = self._here(start, stop)
        moved = lambda actions: {here[index]: action for index, action in actions.items()}
        return [
            replace(c, how=LeanLoops(moved(c.how.actions)) if isinstance(c.how, LeanLoops) else moved(c.how))
            for c in found.candidates
        ]

    def _here(self, start: int, stop: int) -> dict[int, int]:
        """Returns value of the stretch that was analysed -> value of start..stop, which is equal to it."""
        _, _, numbers = self._stretch(start, stop)
        return {index: numbers[number] for index, number in self.analyses[self._key(start, stop)][1].items()}

    def _found(self, start: int, stop: int) -> Candidates | LoopCandidates:
        text, part, numbers = self._stretch(start, stop)
        if start in self.loops and stop == start + 1:
            loop = f"{text}:{start}"  # its schedules name values of its own body
            if loop not in self.scans:
                op = self.graph.ops[start]
                planned = functools.partial(_planned, self.context, op.params["length"])
                self.scans[loop] = loop_candidates_of(self.graph, op, self.active, self.context, planned)
            return self.scans[loop]
        key = self._key(start, stop)
        known = key, self.context.in_loop, self.context.quick
        if key not in self.analyses and known in self.context.stretches:
            self.analyses[key] = self.context.stretches[known]
        if key not in self.analyses:
            look = functools.partial(
                candidates_of, start=start, stop=stop, outputs=part.outputs, active=self.active, context=self.context
            )
            found = look(self.named, carried=part.outputs, presets=self.presets if self._is_block(start, stop) else {})
            if any(
                self.active.intersection(self.graph.ops[place].outputs) for place in self.lean if start <= place < stop
            ):
                found = _with_lean(found, look(self.named_lean, carried=part.outputs))
            self.analyses[key] = found, {index: number for number, index in numbers.items()}
            if not self.context.timed:
                self.context.stretches[known] = self.analyses[key]
        return self.analyses[key][0]

    def _key(self, start: int, stop: int) -> str:
        """Returns the key of a stretch's analysis: blocks have candidates of their own, and arguments are there for the
        whole step.
        """
        text, _, numbers = self._stretch(start, stop)
        outside = [n for n, index in numbers.items() if self.graph.values[index].kind in ("argument", "constant")]
        return f"{text}{':block' if self._is_block(start, stop) else ''}{outside}"

    def _is_block(self, start: int, stop: int) -> bool:
        return (start, stop) in self.blocks

    @functools.cached_property
    def presets(self) -> dict[str, frozenset[int]]:
        """Name of a preset -> the values that it keeps."""
        return {name: frozenset(PRESETS[name].decide(self.graph)) for name in BLOCK_PRESETS}

    @functools.cached_property
    def named_lean(self) -> Named:
        """The function with its loops run as of `LeanLoops`."""
        return Named(self.graph, self.graph.body, [loop for each in self.lean.values() for loop in each])

    def _handed(self, places: Sequence[int]) -> list[_Handed]:
        """Returns the values between stages."""
        stage_of = {}
        for j in range(len(places) - 1):
            for place in range(places[j], places[j + 1]):
                stage_of[place] = j
        uses: dict[int, set[int]] = {}
        for place, op in enumerate(self.graph.ops):
            for index in op.inputs:
                uses.setdefault(index, set()).add(stage_of[place])
        found = []
        shown = self.graph.body.views
        for place, op in enumerate(self.graph.ops):
            for index in op.outputs if place not in shown else ():
                later = tuple(sorted(stage for stage in uses.get(index, ()) if stage > stage_of[place]))
                if later:
                    value = self.graph.values[index]
                    moving = index in self.active and is_inexact(value)
                    found.append(_Handed(index, Carried(value.bytes, stage_of[place], later), moving))
        return found

    def _gradients(self, places: Sequence[int]) -> list[int]:
        """Returns for each stage the bytes of gradients that no later stage has written: those of arguments last used
        here.
        """
        bytes_ = [0] * (len(places) - 1)
        for index in self.differentiated:
            stage = _stage_of(places, self.last.get(index))
            if stage is not None:
                bytes_[stage] += self.graph.values[index].bytes
        return bytes_

    def _written_before(self, start: int, stop: int) -> int:
        """Returns the bytes of gradients of a stretch's inputs that are there when the backward pass comes to it."""
        return sum(
            self.graph.values[index].bytes
            for index in self._stretch(start, stop)[1].inputs
            if index in self.differentiated and stop <= self.last[index] < len(self.graph.ops)
        )


class _Handed(NamedTuple):
    """A value that a stage makes and later stages use.

    Attributes:
      value: its index.
      carried: as the chain has it.
      moving: whether a cotangent of it comes back.
    """

    value: int
    carried: Carried
    moving: bool


def _more(candidate: Candidate, time: Time, work: int) -> Candidate:
    """Returns a candidate that takes more time, and needs more bytes at once."""
    return replace(
        candidate,
        time=candidate.time + time.effort,
        seconds=candidate.seconds + time.seconds,
        work=max(candidate.work + work, 0),
    )


def _with_lean(found: Candidates, lean: Candidates) -> Candidates:
    """Returns the candidates of a stretch, with those of the same stretch whose loops run lean: they recompute within
    the backward pass.
    """
    more = lean.backward.seconds - found.backward.seconds, lean.backward.effort - found.backward.effort
    seconds, effort = (max(each, 0.0) for each in more)
    added = [
        replace(c, time=c.time + effort, seconds=c.seconds + seconds, how=LeanLoops(c.how)) for c in lean.candidates
    ]
    return replace(found, candidates=(*found.candidates, *added))


def _listed(found: Candidates | LoopCandidates) -> list[Candidate]:
    """Returns the candidates of a stretch or of a loop."""
    if isinstance(found, Candidates):
        return list(found.candidates)
    return [
        Candidate(
            *(way.bytes, way.time.effort, way.work, way.time.seconds, way.schedule),
            link=way.link,
            host=way.host,
            unseen=way.unseen,
        )
        for way in found.candidates
    ]


def _block_ends(places: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the stages at which blocks begin, and the last ends. Where stages were joined to be fewer,
    a unit is several blocks.
    """
    number = {place: stage for stage, place in enumerate(places)}
    found = [(place, number[place]) for place in blocks if place in number]
    widths = collections.Counter(later - place for (place, _), (later, _) in itertools.pairwise(found))
    if not widths:
        return ()
    width = widths.most_common(1)[0][0]
    runs: list[list[int]] = [[]]
    for (place, stage), (later, next_stage) in itertools.pairwise(found):
        if later - place != width:
            runs.append([])
        else:
            runs[-1] = [*(runs[-1] or [stage]), next_stage]
    longest = max(runs, key=len)
    return tuple(longest)


def _every(run: int, ends: Sequence[int]) -> list[int]:
    """Returns the ends of every so many blocks, and those of what is left over, one by one."""
    whole = (len(ends) - 1) // run * run
    return [*ends[:whole:run], *ends[whole:]]


def _runs(blocks: int) -> list[int]:
    """Returns how many blocks one checkpoint is put around: each, every two, every root; none where there are none."""
    if blocks < 1:
        return []
    return sorted({1, 2, round(blocks**0.5)} & set(range(1, blocks + 1)))


def _stage_of(places: Sequence[int], place: int | None) -> int | None:
    if place is None or place >= places[-1]:
        return None
    return bisect.bisect_right(places, place) - 1


def _of_width(length: int, width: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of every segment of so many stages."""
    yield from ((s, s + width) for s in range(length - width + 1))


def _passing(carried: Sequence[Carried], length: int) -> np.ndarray:
    """Returns for every (start, stop) the bytes of cotangents that wait for an earlier stage while start..stop are at
    work.

    Args:
      carried: values whose cotangents come back.

    Returns:
      int64[length + 1, length + 1].
    """
    tables = np.zeros((length + 1, length + 1), np.int64)
    for value in carried:
        for before, after in itertools.pairwise((value.made, *value.uses)):
            tables[before + 1, after] += value.bytes  # it waits from `after` to `before`, which neither ends
    return np.cumsum(np.cumsum(tables[:, ::-1], axis=1)[:, ::-1], axis=0)  # start > before, stop <= after


def _made_before(carried: Sequence[Carried], length: int) -> np.ndarray:
    """Returns for every (start, j) the bytes made in start..j that j or a later stage uses, int64[length + 1, length +
    1].
    """
    tables = np.zeros((length + 1, length + 1), np.int64)
    for value in carried:
        tables[value.made, value.made + 1 : value.uses[-1] + 1] += value.bytes
    return np.cumsum(tables[::-1], axis=0)[::-1]  # start <= made
