"""The candidates for a scan: what each iteration keeps, in which segments, and from which iteration on another way; or
slots for carries.

Nothing fuses across a loop's iterations, so what is kept of a body is what it says, times the iterations. Kept on top
are the carries that segments start from. Segments inside segments cost one more run of every iteration a level; T. Chen
et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxckpt import _compat
from jaxckpt.actions import Action
from jaxckpt.core import primitives
from jaxckpt.core.constants import (
    CLOSE,
    DEAR_LOOP,
    INNER,
    KEPT_FOR_LESS,
    LENGTHS,
    MOST_LOOP_CANDIDATES,
    PART,
    SAME_TIME,
    SHORTEST,
    SLOT_FACTOR,
    SLOT_LIMITS,
    SPLITS,
    TURNS_A_SECOND,
)
from jaxckpt.core.emit import Named
from jaxckpt.core.graph import Body, Graph, Op
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.loops import can_be_rewritten, carries_of
from jaxckpt.core.primitives import Holds
from jaxckpt.core.regions import Address, Loop, Region
from jaxckpt.core.scans import ScanBody
from jaxckpt.core.schedule import LoopSchedule
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.planner.candidates import Candidates, Store, candidates_of, stores_of
from jaxckpt.planner.chain import Candidate
from jaxckpt.planner.context import Context
from jaxckpt.planner.costs import Time, total
from jaxckpt.planner.held import active_in, fed, program_of
from jaxckpt.schedules import Binomial, Nested, Slots, checkpointed, in_turn
from jaxckpt.schedules.body import perturbed, written_out
from jaxckpt.schedules.budget import SlotBudget
from jaxckpt.schedules.pullback import Wanted


@dataclass(frozen=True)
class InnerRegions:
    """A scan with a plan of its body.

    Attributes:
      regions, loops: of its body, as of a plan.
      schedule: of the scan; None where it runs as it stands, and what regions keep is kept of all iterations.
    """

    regions: tuple[Region, ...]
    loops: tuple[Loop, ...]
    schedule: LoopSchedule | None = None


@dataclass(frozen=True)
class InnerCandidates:
    """A loop's body as planned.

    Attributes:
      candidates: what each takes of one iteration; `how` is `InnerRegions`.
      again: the same where an iteration runs again from its carry, before its backward pass begins: nothing is kept.
      forward_work: bytes that a forward run of an iteration needs at once.
    """

    candidates: tuple[Candidate, ...]
    again: tuple[Candidate, ...]
    forward_work: int


@dataclass(frozen=True)
class LoopCandidate:
    """One way to run a scan.

    Attributes:
      schedule: of the loop, or what lies in its body; None for the scan as it stands.
      bytes, time, work, link, host, unseen: as of `jaxckpt.planner.chain.Candidate`, `bytes` as `kept` there.
    """

    schedule: LoopSchedule | InnerRegions | None
    bytes: int
    time: Time
    work: int
    link: float = 0.0
    host: int = 0
    unseen: float = 0.0


@dataclass(frozen=True)
class LoopCandidates:
    """A scan: its candidates, and what it takes to run it; attributes as of `jaxckpt.planner.candidates.Candidates`."""

    candidates: tuple[LoopCandidate, ...]
    forward: Time
    backward: Time
    forward_work: int


@dataclass(frozen=True)
class _Sizes:
    """Bytes: of one carry, of the rows that iterations read, of cotangents of rows and constants, of stacked results,
    of their cotangents. And what each segment takes: its carry is stored and read back, and its cotangents of constants
    are added to those of the segments behind it.
    """

    carry: int
    rows: int
    gradients: int
    results: int
    arriving: int
    segment: Time


def lean_loops(graph: Graph, body: Body | None = None, address: Address = ()) -> Iterator[Loop]:
    """Yields the scans of a function, those in branches too, each run one checkpointed iteration at a time: the fewest
    bytes for one in a region that keeps nothing.
    """
    for place, op in enumerate((body or graph.body).ops):
        if can_be_rewritten(op) and op.params["length"] > 1:
            if not _compat.open_jaxpr(op.params["jaxpr"]).effects:
                yield Loop(place, checkpointed(op.params["length"]), address)
        elif primitives.of(op.primitive).holds is Holds.BRANCHES:
            for number, inner in enumerate(op.bodies):
                yield from lean_loops(graph, inner, (*address, (op.index, number)))


def loop_candidates_of(
    graph: Graph,
    op: Op,
    active: Collection[int],
    context: Context,
    planned: Callable[[Graph, Collection[int], Address, bool], InnerCandidates | None] | None = None,
) -> LoopCandidates:
    """Returns the candidates for a scan of a graph.

    Args:
      active: values that the derivative passes through.
      context: what the scan is planned for.
      planned: returns the plans of a body, given it as a function, the values that are differentiated in, the body's
        address, and whether an iteration's own work is much of what the loop needs. None for none.
    """
    body = op.bodies[0]
    consts, carries = _compat.num_scan_consts_carry(dict(op.params))
    inside = active_in(graph, graph.body, op, body, active)
    named, outputs = Named(graph, body), body.results
    found = candidates_of(named, 0, len(body.ops), outputs, inside, replace(context, in_loop=True))
    length = op.params["length"]

    def bytes_of(indices: Collection[int], moving: bool = False) -> int:
        values = [graph.values[i] for i in indices]
        return sum(v.bytes for v in values if not moving or (v.index in inside and is_inexact(v)))

    inputs, results = body.inputs, [index for index in body.outputs[carries:] if index is not None]
    passed = 2 * bytes_of(inputs[consts : consts + carries]) + 3 * bytes_of(inputs[:consts], True)
    sizes = _Sizes(
        carry=bytes_of(inputs[consts : consts + carries]),
        rows=length * bytes_of(inputs[consts + carries :]),
        gradients=length * bytes_of(inputs[consts + carries :], True) + bytes_of(inputs[:consts], True),
        results=length * bytes_of(results),
        arriving=length * bytes_of(results, True),
        segment=Time(*2 * [passed / context.target.bandwidth]),
    )
    ways = [_as_it_stands(found, sizes, length)]
    if can_be_rewritten(op):
        ways += _ways(found, sizes, length)
        ways += _carries_otherwise(graph, op, found, sizes, context)
        if context.once:
            ways += _slots(op, inside, found, sizes, context)
    forward_work, within = found.forward_work, []
    if planned is not None:
        moving = fed(graph, graph.body, op, body, active)
        # Segments of the best length keep about as many carries as twice the root of the iterations.
        heavy = found.candidates[0].work > 2 * math.sqrt(length) * sizes.carry
        inner = planned(program_of(graph, op), moving, ((op.index, 0),), heavy)
        if inner is not None:
            forward_work = min(forward_work, inner.forward_work)
            within = [
                way for way in _within(inner, op, found, sizes) if not any(_is_nearly(each, way) for each in ways)
            ]
    # What a plan of the body is said to take is of another model of it: it says nothing against the other ways.
    same = SAME_TIME * length * (found.forward + found.backward).effort
    best = (
        _best([way for way in some if bool(way.host) is away], same)
        for away in (False, True)
        for some in (ways, within)
    )
    return LoopCandidates(
        tuple(itertools.chain.from_iterable(best)),
        length * found.forward,
        length * found.backward,
        forward_work + sizes.carry + sizes.results,
    )


def _within(inner: InnerCandidates, op: Op, found: Candidates, sizes: _Sizes) -> Iterator[LoopCandidate]:
    """Yields the ways of a loop whose body has a plan of its own: as it stands, and with iterations that run again."""
    length = op.params["length"]
    for each in inner.candidates:
        kept, work = length * (each.kept + sizes.carry), each.work + sizes.gradients + sizes.arriving
        yield LoopCandidate(each.how, kept, length * _time(each), work, length * each.link, length * each.host)
    for each in inner.again if can_be_rewritten(op) else ():
        for way in _alike(replace(each, how={}), found, sizes, length):
            yield replace(way, schedule=replace(each.how, schedule=way.schedule))


def _as_it_stands(found: Candidates, sizes: _Sizes, length: int) -> LoopCandidate:
    kept = length * (found.residual_bytes + sizes.carry)
    return LoopCandidate(None, kept, length * found.residual_time, found.plain_work + sizes.gradients + sizes.arriving)


def _ways(found: Candidates, sizes: _Sizes, length: int) -> Iterator[LoopCandidate]:
    """Yields the ways of a loop whose iterations keep what candidates say; those that have values on the host as one
    stretch of it alone, and together with the leanest of the others.
    """
    choices = [each for each in found.candidates if not each.on_host]
    if choices[-1].seconds > DEAR_LOOP * found.forward.seconds and found.residual_bytes > choices[-1].kept:
        time = found.residual_time
        choices.append(Candidate(found.residual_bytes, time.effort, found.plain_work, time.seconds))
    loop = sizes.gradients + sizes.arriving
    copies = sizes.rows + sizes.gradients  # where rows are cut in pieces, and the gradients' pieces put together
    for choice in (each for each in found.candidates if each.on_host):
        for n in {length, *_splits(length)}:
            kept = length * sizes.carry + n * choice.kept + (length - n) * choices[0].kept
            time = n * _time(choice) + (length - n) * _time(choices[0])
            parts = [_nested(n, (), choice)]
            if n < length:  # the last iterations' values are fetched at once
                parts.append(_nested(length - n, (), choices[0]))
            work = max(choice.work, choices[0].work) + loop + (copies if n < length else 0)
            yield LoopCandidate(in_turn(*parts), kept, time, work, n * choice.link, n * choice.host)
    for less, more in itertools.pairwise(choices):
        for n in _splits(length):
            kept = length * sizes.carry + n * more.kept + (length - n) * less.kept
            time = n * _time(more) + (length - n) * _time(less)
            schedule = in_turn(_nested(length - n, (), less), _nested(n, (), more))
            yield LoopCandidate(schedule, kept, time, max(less.work, more.work) + loop + copies)
    for number, choice in enumerate(choices):
        yield from _alike(choice, found, sizes, length, deeper=number < 2)
    if choices[0].how:  # what people write keeps nothing, where a few bytes more are worth it too
        yield LoopCandidate(checkpointed(length), length * sizes.carry, length * found.forward, choices[0].work + loop)


def _splits(length: int) -> list[int]:
    """Returns after how many iterations a loop is divided in two; no part is shorter than `PART`, if both can be so."""
    least = PART if length >= 2 * PART else 1
    return _spaced(least, length - least, SPLITS)


def _alike(
    choice: Candidate, found: Candidates, sizes: _Sizes, length: int, deeper: bool = True
) -> Iterator[LoopCandidate]:
    """Yields a candidate for all iterations alike: each from its own carry, then in segments, and in segments inside
    segments if asked for those that are `deeper`.
    """
    loop = sizes.gradients + sizes.arriving
    copies = sizes.rows + sizes.gradients  # where rows are cut in pieces, and the gradients' pieces put together
    kept = length * (choice.kept + sizes.carry)
    yield LoopCandidate(_nested(length, (), choice), kept, length * _time(choice), choice.work + loop)
    forward = length * found.forward
    for size in _lengths(length):
        rest = copies if length % size else 0
        segments, apart = -(-length // size), copies * size // length  # an inner loop's rows stand by themselves
        yield LoopCandidate(
            _nested(length, (size,), choice),
            segments * sizes.carry,
            forward + length * _time(choice) + segments * sizes.segment,
            size * (sizes.carry + choice.kept) + choice.work + loop + rest + apart,
        )
        within = round(math.sqrt(size))
        if not deeper or within < 2 or size < 4:
            continue
        inner = -(-size // within) * sizes.carry + within * (sizes.carry + choice.kept)
        again = rest + apart + (apart if size % within else copies * within // length)
        yield LoopCandidate(
            _nested(length, (size, within), choice),
            segments * sizes.carry,
            2 * forward + length * _time(choice) + segments * (1 + -(-size // within)) * sizes.segment,
            inner + choice.work + loop + again,
        )


def _nested(
    count: int, segments: tuple[int, ...], choice: Candidate, carries: Mapping[int, Action] | None = None
) -> Nested:
    return checkpointed(count, segments, choice.how, remat=choice.how is not None, carries=carries)


def _carries_otherwise(
    graph: Graph, op: Op, found: Candidates, sizes: _Sizes, context: Context
) -> Iterator[LoopCandidate]:
    """Yields the ways of a loop whose carries are kept in another form or on the host: of each iteration, and of
    segments. The other ways keep them as they are.
    """
    length, loop = op.params["length"], sizes.gradients + sizes.arriving
    copies = sizes.rows + sizes.gradients  # as of `_alike`
    forward = length * found.forward
    for stores in _carry_stores(graph, op, context):
        actions = {index: each.action for index, each in stores.items()}
        saved = sizes.carry - sum(graph.values[index].bytes for index in stores)
        kept = saved + sum(each.bytes for each in stores.values())
        host, link = (sum(getattr(each, name) for each in stores.values()) for name in ("host", "link"))
        spent = total(each.time for each in stores.values())
        for choice in found.candidates:
            schedule = _nested(length, (), choice, actions)
            time, work = length * (_time(choice) + spent), choice.work + sizes.carry + loop
            away = length * (choice.link + link), length * (choice.host + host)
            yield LoopCandidate(schedule, length * (choice.kept + kept), time, work, *away)
        for choice in [each for each in found.candidates if not each.on_host][:2]:
            for size in _lengths(length):
                segments, apart = -(-length // size), copies * size // length
                work = (
                    size * (sizes.carry + choice.kept) + choice.work + loop + apart + (copies if length % size else 0)
                )
                time = forward + length * _time(choice) + segments * (sizes.segment + spent)
                schedule = _nested(length, (size,), choice, actions)
                yield LoopCandidate(schedule, segments * kept, time, work, segments * link, segments * host)


def _carry_stores(graph: Graph, op: Op, context: Context) -> Iterator[dict[int, Store]]:
    """Yields how the carry of a loop can be kept otherwise than as it is: value of the body -> the way; leaves that are
    left out are saved.
    """
    values = [value for value in map(graph.values.__getitem__, carries_of(op)) if value.shape and is_inexact(value)]
    for action in context.actions:
        if not action.keeps or action.saves:
            continue
        ways = {
            value.index: way
            for value in values
            for way in stores_of(value, (action,), context.target, Time(0.0, 0.0), hidden=1.0)
            if not way.action.saves
        }
        if ways:
            yield ways


def _slots(
    op: Op, inside: Collection[int], found: Candidates, sizes: _Sizes, context: Context
) -> Iterator[LoopCandidate]:
    """Yields schedules of slots, for fewer and fewer bytes; none for a scan that is short, has side effects or is not
    differentiated.
    """
    body = op.bodies[0]
    consts, carries = _compat.num_scan_consts_carry(dict(op.params))
    length, effects = op.params["length"], _compat.open_jaxpr(op.params["jaxpr"]).effects
    moving = [index in inside and is_inexact(var.aval) for index, var in zip(body.inputs, body.jaxpr.invars)]
    if length < SHORTEST or effects or context.shards.devices > 1 or not any(moving) or not sizes.carry:
        return
    scan, extra = written_out(op.params["jaxpr"], consts, carries, length, op.params["reverse"])
    fixed, init, rows = moving[:consts], moving[consts : consts + carries], moving[consts + carries :]
    fixed = [*(False for _ in extra), *fixed]
    wanted = Wanted(tuple(fixed), tuple(init), *map(tuple, _moving(scan, fixed, init, rows)))
    budget = SlotBudget(scan, 0)
    most = budget.kept_bytes(Binomial(length, 1, length)) + budget.work_bytes(wanted, Binomial(length, 1, length))
    loop = sizes.gradients + sizes.arriving
    unseen = PLATFORMS[context.target.platform].slots_slower * length * (found.forward + found.backward).seconds
    for i in range(SLOT_LIMITS + 1):
        plan = budget.within(wanted, most / SLOT_FACTOR**i)
        turns = budget.turn_flops(plan) / TURNS_A_SECOND
        again = (plan.body_runs - length) * found.forward + Time(turns + unseen, turns + unseen)
        schedule, work = Slots(plan.slots, run_length=plan.run), budget.work_bytes(wanted, plan) + loop
        yield LoopCandidate(schedule, budget.kept_bytes(plan), again, work, unseen=unseen)
        if plan.slots == 1:
            return


def _moving(
    scan: ScanBody, consts: Sequence[bool], init: Sequence[bool], xs: Sequence[bool]
) -> Iterator[Sequence[bool]]:
    """Yields which carries, xs and ys have tangents."""
    carry, ys = perturbed(scan, consts, init, xs)
    yield from (carry, xs, ys)


def _time(choice: Candidate) -> Time:
    return Time(choice.seconds, choice.time)


def _lengths(length: int) -> list[int]:
    """Returns segment lengths to look at: all of a short loop, of a long one those that divide it and some in
    between.
    """
    if length <= 2 * LENGTHS:
        return list(range(2, length))
    spaced = {round(length ** (i / LENGTHS)) for i in range(1, LENGTHS)}
    divisors = {d for d in range(2, min(length, 2000)) if length % d == 0}
    return sorted(size for size in spaced | divisors if 1 < size < length)


def _spaced(first: int, last: int, most: int) -> list[int]:
    if last < first:
        return []
    return sorted({round(first + (last - first) * i / max(most - 1, 1)) for i in range(most)})


def _best(ways: Sequence[LoopCandidate], same: float) -> list[LoopCandidate]:
    """Returns the ways that no other beats in bytes, seconds, work and the host's link, at most `MOST_LOOP_CANDIDATES`
    of them. Times that differ by no more than `same` seconds are the same.
    """
    best: list[LoopCandidate] = []
    for way in sorted(ways, key=lambda w: (w.time.effort, w.bytes + w.work, w.bytes)):
        if not any(
            b.bytes <= way.bytes and b.bytes + b.work <= way.bytes + way.work and b.link <= way.link for b in best
        ):
            best.append(way)
    best = _leaner(best, same)
    while len(best) > MOST_LOOP_CANDIDATES:  # every second of those in the middle
        best = [best[0], *best[1:-1:2], best[-1]]
    return best


def _leaner(best: Sequence[LoopCandidate], same: float) -> list[LoopCandidate]:
    """Returns ways without those for which another one needs fewer bytes and takes no more than `same` seconds longer;
    the loop as it stands stays, and as people checkpoint it. What waits for the loop's turn may be a little more, where
    the loop needs far less in all: large stacks in turn take a CPU's caches more time than rates say.
    """
    kept: dict[int, LoopCandidate] = {}
    for way in sorted(best, key=lambda w: (w.bytes + w.work, w.bytes)):
        leaner = (
            each.bytes - way.bytes <= KEPT_FOR_LESS * (way.bytes + way.work - each.bytes - each.work)
            and each.link <= way.link
            and each.time.effort <= way.time.effort + same
            for each in kept.values()
        )
        if _is_written(way) or not any(leaner):
            kept[id(way)] = way
    return [way for way in best if id(way) in kept]


def _is_written(way: LoopCandidate) -> bool:
    """Whether a loop runs as people write it: as it stands, or each iteration under a checkpoint that keeps nothing."""
    plain = way.schedule is None
    return plain or (isinstance(way.schedule, Nested) and way.schedule == checkpointed(way.schedule.length))


def _is_nearly(known: LoopCandidate, way: LoopCandidate) -> bool:
    """Whether a way takes hardly more time, and hardly more bytes, than one with a plan of the body: less than what
    estimates by two models differ by. That is less for iterations that run again.
    """
    if known.host or way.host:
        return False
    more = INNER if isinstance(way.schedule, InnerRegions) and way.schedule.schedule is None else 1 + CLOSE
    is_as_lean = known.bytes + known.work <= more * (way.bytes + way.work)
    return is_as_lean and known.time.effort <= more * way.time.effort
