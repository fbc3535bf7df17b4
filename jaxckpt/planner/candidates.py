"""Within a stretch: what its backward pass needs, and the candidates of what to keep of it, each with its bytes,
seconds and working memory.

What the backward pass needs is JAX's own answer: the stretch is differentiated once, with a name at every value, and
what the backward half reads of the forward half is needed. So every rule of JAX's, every function with a derivative of
its own (its residuals too), every branch and inner loop is what it will be. Values that only the derivative computes
(`cos x`) can be computed again but not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.actions import SAVE, Action, asked_of, given
from jaxckpt.core import surgery
from jaxckpt.core.constants import LINK_PRICES
from jaxckpt.core.emit import Named
from jaxckpt.core.graph import Body, Graph, Op, Value, graph_of
from jaxckpt.core.inline import inline
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.liveness import passed_on, stretch_peak
from jaxckpt.core.reads import Flat
from jaxckpt.memory.targets import Target
from jaxckpt.planner import held, mincut
from jaxckpt.planner.chain import Candidate
from jaxckpt.planner.context import Context
from jaxckpt.planner.costs import (
    Time,
    behind_barrier,
    link_seconds,
    passes,
    roofline,
    scaled,
    storing,
    timer,
    total,
    wanted_whole,
    written,
)
from jaxckpt.planner.timing import run_seconds


@dataclass(frozen=True)
class Candidates:
    """A stretch: the candidates of what it keeps, and what it takes to run it.

    Attributes:
      candidates: those that no other beats, then those of policies, then those that have values on the host; `how` is
        the actions of the values that are kept.
        What later stretches use is among these where the backward pass needs it, but its bytes do not count.
      forward, backward: time of one run, recomputation not counted.
      forward_work: bytes that a forward run needs at once, results counted, what goes in not.
      residual_bytes, residual_time: what plain differentiation keeps of it, besides what goes in, and what it takes to
        write that.
      left_bytes, left_time: what is left of that where the compiler may fuse the forward with the backward pass,
        outputs not counted.
      plain_work: as `Candidate.work`, where nothing runs again.
      cotangents: input of the stretch -> what it takes to have its cotangent in memory, where the compiler computes it
        in what reads it unless a barrier is between the two.
      read_whole: the outputs of the stretch whose cotangents it reads from memory in any case.
      presets: name of a policy -> number of the candidate that keeps what it keeps.
    """

    candidates: tuple[Candidate, ...]
    forward: Time
    backward: Time
    forward_work: int
    residual_bytes: int
    residual_time: Time
    left_bytes: int
    left_time: Time
    plain_work: int
    cotangents: Mapping[int, Time]
    read_whole: frozenset[int]
    presets: Mapping[str, int] = field(default_factory=dict)


def candidates_of(
    named: Named,
    start: int,
    stop: int,
    outputs: Sequence[int],
    active: Collection[int],
    context: Context,
    carried: Collection[int] = (),
    presets: Mapping[str, Collection[int]] = {},
) -> Candidates:
    """Returns the candidates that there are for the operations start..stop of a body.

    Args:
      named: the body.
      outputs: values that something after the stretch uses.
      active: values that the derivative passes through.
      context: what the stretch is planned for.
      carried: those of the outputs that are kept anyway.
      presets: name of a policy -> the values that it keeps, for a candidate of each.
    """
    asked = _Asked(named, start, stop, outputs, active, carried)
    stretch = _timed(asked, context)
    joint, graph = stretch.joint, stretch.graph
    forward, backward = stretch.total(joint.forward), stretch.total(joint.backward)
    cuts = _cuts(stretch)
    inner = held.programs(named.graph, named.body, start, stop, active)
    numbers = {} if inner else _add_presets(cuts, stretch, presets)
    candidates = [_candidate(stretch, cut) for cut in cuts]
    if inner:  # what it takes to keep values within them, JAX says
        look = _remembered(functools.partial(_checkpointed, asked, forward + backward, stretch.factor, context))
        levels = _levels(named.graph, inner, _kept_around(stretch, inner), context)
        candidates = _cheapest_first([*candidates, *map(look, levels)])
        numbers = {name: len(candidates) + i for i, name in enumerate(presets)}
        own = {*joint.origin.values(), *held.values(inner)}
        candidates += [look({index: SAVE for index in values if index in own}) for values in presets.values()]
    candidates += [_candidate(stretch, cut) for cut in _cuts_on_host(stretch, cuts)]
    residuals = [index for index in joint.needed if index in joint.made]
    left_bytes, left_time = _left(stretch)
    plain_peak = stretch.peak([*joint.forward, *joint.backward], joint.results, joint.arriving)
    return Candidates(
        tuple(candidates),
        forward,
        backward,
        forward_work=stretch.peak(joint.forward, joint.outcome, ()),
        residual_bytes=sum(graph.values[index].bytes for index in residuals),
        residual_time=total(map(stretch.write, residuals)),
        left_bytes=left_bytes,
        left_time=left_time,
        plain_work=max(plain_peak - left_bytes, 0),
        cotangents=_cotangents(stretch),
        read_whole=_read_whole(stretch),
        presets=numbers,
    )


@dataclass(frozen=True)
class _Asked:
    """What `candidates_of` is asked about; its arguments."""

    named: Named
    start: int
    stop: int
    outputs: Sequence[int]
    active: Collection[int]
    carried: Collection[int]


@dataclass(frozen=True)
class _Timed:
    """A stretch, differentiated, with the times of its operations and the ways to keep its values.

    Its values are numbered as in `graph`; `joint.origin` says which values of the function they are.

    Attributes:
      joint: its forward and its backward pass.
      graph: that program, with the bytes of one device.
      context: what the stretch is planned for.
      time: operation -> time of one run.
      factor: what the target's rates are multiplied with in `time`: 1, or what a run on the local device says.
      write: value -> time to have it in memory.
      stores: value -> the ways to keep it.
      operations: the forward pass, as minimum cuts see it.
      anyway: the values that are kept anyway, because they go out.
    """

    joint: _Joint
    graph: Graph
    context: Context
    time: Callable[[Op], Time]
    factor: float
    write: Callable[[int], Time]
    stores: Callable[[int], Sequence[Store]]
    operations: Sequence[mincut.Node]
    anyway: frozenset[int]

    def total(self, ops: Sequence[Op]) -> Time:
        """Returns the time of one run of each operation."""
        return total(map(self.time, ops))

    def peak(self, ops: Sequence[Op], results: Sequence[int], there: Sequence[int]) -> int:
        """Returns the bytes that operations need at once; arguments as of `stretch_peak`."""
        return stretch_peak(self.graph, ops, results, there, self.joint.arguments, self.context.target.platform)

    def ways(self, price: float | None = None) -> dict[int, list[mincut.Storage]]:
        """Returns value -> the ways to keep it. A second of the host's link costs `price` seconds; without a price,
        these are the ways that have nothing on the host.
        """
        here = {index: _here(self.stores(index), price) for index in self.joint.origin}
        return {index: [each.at(price or 0.0) for each in stores] for index, stores in here.items()}


def _timed(asked: _Asked, context: Context) -> _Timed:
    """Differentiates a stretch, and finds what its operations take and how its values can be kept."""
    target, shards = context.target, context.shards
    jaxpr, inputs = asked.named.stretch(asked.start, asked.stop, asked.outputs)
    joint = _Joint(asked.named, None, jaxpr, inputs, asked.outputs, asked.active)
    graph = shards.applied(joint.graph)
    if context.cycles is not None:
        both = [*joint.forward, *joint.backward]
        context.cycles.learn(graph, both, graph.body, roofline(graph, target, shards))
    time, factor = timer(graph, target, shards, context.cycles), 1.0
    if context.timed and (expected := total(map(time, joint.forward)).seconds):
        factor = run_seconds(jaxpr) / expected
        time = scaled(time, factor)
    operations = [mincut.Node(op.inputs, op.outputs, time(op).effort) for op in joint.forward]
    write = written(graph, target)
    hidden = 1.0 if context.in_loop else target.hidden_transfers
    stores = functools.cache(
        lambda index: stores_of(graph.values[index], context.actions, target, write(index), hidden)
    )
    anyway = frozenset(index for index, original in joint.origin.items() if original in asked.carried)
    return _Timed(joint, graph, context, time, factor, write, stores, operations, anyway)


def _cuts(stretch: _Timed) -> list[mincut.Cut]:
    """Returns what can be kept on the device: the cuts that no other beats, the fewest bytes first."""
    operations, needed, anyway = stretch.operations, stretch.joint.needed, stretch.anyway
    cuts = mincut.cheapest_first(mincut.hull(operations, needed, stretch.ways(), anyway))
    if anyway.intersection(cuts[0].kept):  # a checkpoint without a policy: what goes out is not there for longer
        cuts.insert(0, mincut.of_values(operations, needed, {}, ()))
    return cuts


def _add_presets(cuts: list[mincut.Cut], stretch: _Timed, presets: Mapping[str, Collection[int]]) -> dict[str, int]:
    """Adds to `cuts` what each preset keeps, equal cuts once. Returns name of a preset -> number of its cut."""
    ways = stretch.ways()
    numbers: dict[str, int] = {}
    for name, values in presets.items():
        keys = {index for index, original in stretch.joint.origin.items() if original in values}
        cut = mincut.of_values(stretch.operations, stretch.joint.needed, ways, keys, stretch.anyway)
        if cut not in cuts:
            cuts.append(cut)
        numbers[name] = cuts.index(cut)
    return numbers


def _cuts_on_host(stretch: _Timed, known: Sequence[mincut.Cut]) -> list[mincut.Cut]:
    """Returns what can be kept with values on the host, at several prices of its link, without what is known."""
    away = [each for index in stretch.joint.origin for each in stretch.stores(index) if each.on_host]
    seen = [cut.kept for cut in known]
    found = []
    for price in LINK_PRICES if any(each.link for each in away) else (0.0,) if away else ():
        for cut in mincut.hull(stretch.operations, stretch.joint.needed, stretch.ways(price), stretch.anyway):
            if cut.kept not in seen:
                seen.append(cut.kept)
                found.append(cut)
    return found


def _candidate(stretch: _Timed, cut: mincut.Cut) -> Candidate:
    """Returns the candidate that keeps what a cut does."""
    joint = stretch.joint
    again = [joint.forward[place] for place in cut.again]
    own = [index for index in cut.kept if index not in stretch.anyway]
    # What is kept may be written over when it is used for the last time. What goes out is kept in any case, until the
    # stretches that use it are done; if this one needs it too, it is there for longer. See `QUICK`.
    there = [*joint.arriving, *(cut.kept if stretch.context.quick else own)]
    peak = stretch.peak([*again, *joint.backward], joint.results, there)
    # The region has to be told that it needs what goes out.
    kept = dict(sorted((joint.origin[index], action) for index, action in cut.kept.items()))
    own_ways = [next(each for each in stretch.stores(index) if each.action == cut.kept[index]) for index in own]
    spent = stretch.total(again) + total(each.time for each in own_ways)
    link, host, waits = (sum(getattr(each, name) for each in own_ways) for name in ("link", "host", "waits"))
    return Candidate(cut.bytes, spent.effort, max(peak - cut.bytes, 0), spent.seconds, kept, link, host, waits)


def _left(stretch: _Timed) -> tuple[int, Time]:
    """Returns `left_bytes` and `left_time`, as of `Candidates`."""
    joint = stretch.joint
    left = passed_on(stretch.graph, joint.forward, joint.backward, joint.results, stretch.context.target.platform)
    # Of the forms of a value one is written: that which is there anyway, if one is.
    forms_written = [min(map(stretch.write, forms), key=lambda time: time.effort) for _, forms in left if forms]
    return sum(size for size, _ in left), total(forms_written)


def _cotangents(stretch: _Timed) -> dict[int, Time]:
    """Returns `cotangents`, as of `Candidates`; none that take nothing."""
    added = behind_barrier(stretch.graph, stretch.context.target)
    times = {original: added(index) for original, index in stretch.joint.leaving.items()}
    return {original: time for original, time in times.items() if time.effort}


def _read_whole(stretch: _Timed) -> frozenset[int]:
    """Returns `read_whole`, as of `Candidates`."""
    wanted = wanted_whole(stretch.graph)
    return frozenset(original for original, index in stretch.joint.coming.items() if index in wanted)


def _kept_around(stretch: _Timed, inner: Sequence[held.Program]) -> list[Mapping[int, Action]]:
    """Returns what can be kept around the programs that a stretch's operations hold, the fewest bytes first.

    These operations run again for nothing here: what that takes is seen where the programs keep something.
    """
    joint = stretch.joint
    holds = {op.primitive for op, _, _ in inner}
    free = [replace(o, seconds=0.0) if op.primitive in holds else o for o, op in zip(stretch.operations, joint.forward)]
    around = mincut.cheapest_first(mincut.hull(free, joint.needed, stretch.ways(), stretch.anyway))
    return [{joint.origin[index]: action for index, action in cut.kept.items()} for cut in around]


def _levels(
    graph: Graph, inner: Sequence[held.Program], kept: Sequence[Mapping[int, Action]], context: Context
) -> Iterator[Mapping[int, Action]]:
    """Yields what a stretch keeps of the programs in it, and around them: from the fewest bytes to the least time.

    Args:
      graph: the function.
      inner: the programs.
      kept: what can be kept around them, the fewest bytes first.
      context: what the stretch is planned for.
    """
    alone = replace(context, timed=False)

    def look(body: Body, active: frozenset[int]) -> Sequence[Candidate]:
        _, known = context.programs.get((id(body), active), (body, None))
        if known is None:
            found = candidates_of(Named(graph, body), 0, len(body.ops), body.results, active, alone).candidates
            known = [candidate for candidate in found if not candidate.on_host]
            context.programs[id(body), active] = body, known
        return known

    levels = held.levels(inner, look)
    for number, actions in enumerate(levels):
        yield {**kept[round(number / max(len(levels) - 1, 1) * (len(kept) - 1))], **actions}


def _remembered(look: Callable[[Mapping[int, Action]], Candidate]) -> Callable[[Mapping[int, Action]], Candidate]:
    known: dict[frozenset[tuple[int, Action]], Candidate] = {}

    def remembered(actions: Mapping[int, Action]) -> Candidate:
        key = frozenset(actions.items())
        if key not in known:
            known[key] = look(actions)
        return known[key]

    return remembered


def _checkpointed(
    asked: _Asked, plain: Time, factor: float, context: Context, actions: Mapping[int, Action]
) -> Candidate:
    """Returns the candidate that keeps what `actions` say, values inside of operations too: the stretch is
    differentiated under a checkpoint.

    Args:
      asked: the stretch.
      plain: of its forward and its backward pass, nothing recomputed.
      factor: what the target's rates are multiplied with.
      context: what it is planned for.
      actions: what is kept.
    """
    named, outputs = asked.named, asked.outputs
    checkpointed = named.checkpointed(asked.start, asked.stop, outputs, actions)
    joint = _Joint(named, *checkpointed, outputs, asked.active)
    graph = context.shards.applied(joint.graph)
    time = scaled(timer(graph, context.target, context.shards, context.cycles), factor)
    write = written(graph, context.target)
    same = {op.outputs[0]: op.inputs[0] for op in joint.forward if op.inputs and passes(graph, op)}

    def source(index: int) -> int:
        while index in same:
            index = same[index]
        return index

    goes_out = {source(index) for index, original in zip(joint.outcome, outputs) if original in asked.carried}
    own = {source(index) for index in joint.needed if index in joint.made} - goes_out
    own = {index for index in own if index in joint.made}
    kept = sum(graph.values[index].bytes for index in own)
    there, platform = [*joint.arriving, *own], context.target.platform
    peak = stretch_peak(graph, joint.backward, joint.results, there, joint.arguments, platform)
    run = total(map(time, [*joint.forward, *joint.backward])) + total(map(write, own))
    more = [
        max(with_it - without, 0.0) for with_it, without in ((run.effort, plain.effort), (run.seconds, plain.seconds))
    ]
    return Candidate(kept, more[0], max(peak - kept, 0), more[1], dict(sorted(actions.items())))


def _cheapest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other beats in both bytes and time, the fewest bytes first."""
    best: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.kept, each.time, each.work)):
        if not best or each.time < best[-1].time:
            best.append(each)
    return best


@dataclass(frozen=True)
class Store:
    """A way to keep a value.

    Attributes:
      action: by which it is kept.
      bytes, host: on the device and on the host.
      time: of storing it and bringing it back, but for the host's link, of which that takes `link` seconds that other
        work may hide; `waits`, in `time`, are those that nothing hides.
    """

    action: Action
    bytes: int
    host: int
    time: Time
    link: float
    waits: float = 0.0

    @property
    def on_host(self) -> bool:
        """Whether something of it is on the host, or moves there."""
        return self.link > 0 or self.host > 0

    def at(self, price: float) -> mincut.Storage:
        """Returns the way where a second of the host's link costs `price` seconds."""
        return mincut.Storage(self.action, self.bytes, self.time.effort + price * self.link)


def stores_of(value: Value, actions: Sequence[Action], target: Target, write: Time, hidden: float) -> Sequence[Store]:
    """Returns the ways to keep a value, which takes `write` to have in memory; one that no action admits is saved as it
    is. `hidden`: which part of the transfers runs beside other work.
    """
    found = []
    for action in dict.fromkeys(given(action, value) for action in actions):
        cost, device, host = asked_of(action, value)
        seconds = link_seconds(cost, target)
        link, waits = seconds * hidden, seconds * (1 - hidden)
        time = storing(cost, target) + write + Time(waits, waits)
        found.append(Store(action, device, host, time, link, waits))
    return found


def _here(ways: Sequence[Store], price: float | None) -> Sequence[Store]:
    """Returns the ways, without a price those that have nothing on the host."""
    return [way for way in ways if price is not None or not way.on_host]


class _Joint:
    """A stretch, forward and backward, as one program.

    Attributes:
      graph: the program.
      forward, backward: its operations, and those that depend on cotangents.
      arguments: what goes in that is an argument or a constant of the function.
      needed: forward values that the backward half uses.
      made: values that forward operations make.
      origin: forward value -> the value of the function that it is.
      results: the cotangents that come out; `arriving`: those that go in. `outcome`: the stretch's outputs.
      coming: output of the stretch, by the function's number -> its cotangent; `leaving`: input -> its cotangent.

    Args:
      named: the body.
      run: the stretch as a function; None for its jaxpr as it is.
      jaxpr, inputs: the stretch, as of `Named.stretch`.
      outputs, active: as of `candidates_of`.
    """

    def __init__(
        self,
        named: Named,
        run: Flat | None,
        jaxpr: Any,
        inputs: Sequence[int],
        outputs: Sequence[int],
        active: Collection[int],
    ) -> None:
        stretch = run or functools.partial(_compat.eval_jaxpr, jaxpr, [])
        values = named.graph.values
        moving = [index in active and is_inexact(values[index]) for index in inputs]
        through = [i for i, index in enumerate(outputs) if index in active and is_inexact(values[index])]
        out_avals = [var.aval for var in jaxpr.outvars]

        def both(ins: list[Any], cotangents: list[Any]) -> Any:
            def run(*operands: Any) -> tuple[list[Any], list[Any]]:
                out = stretch(*operands)
                return [out[i] for i in through], out

            of_moving, given = surgery.with_holes(run, ins, moving)
            _, pullback, out = jax.vjp(of_moving, *given, has_aux=True)
            return out, pullback(cotangents)

        with _compat.working_checkpoints():
            closed = jax.make_jaxpr(both)([var.aval for var in jaxpr.invars], [out_avals[i] for i in through])
        origins: dict[Any, int] = {}
        self.graph = graph = graph_of(_without_names(inline(closed), named, origins))
        opened = graph.body.jaxpr
        place = graph.body.values
        arriving = [place[var] for var in opened.invars[len(inputs) :]]
        outside = [values[index].kind in ("argument", "constant") for index in inputs]
        self.arguments = [place[var] for var, is_outside in zip(opened.invars, outside) if is_outside]
        late = set(arriving)
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        for op in graph.ops:
            # A rule of the user's may compute something in its backward half that no cotangent goes into: flash
            # attention its scores.
            if late.intersection(op.inputs) or op.scope.startswith("transpose("):
                late.update(op.outputs)
                self.backward.append(op)
            else:
                self.forward.append(op)
        results = [place[var] for var in opened.outvars if not isinstance(var, _compat.Literal)]
        self.outcome = [place[v] for v in opened.outvars[: len(outputs)] if not isinstance(v, _compat.Literal)]
        self.results = results[len(self.outcome) :]
        self.arriving = arriving
        self.coming = {outputs[i]: index for i, index in zip(through, arriving)}
        moved = (index for index, moves in zip(inputs, moving) if moves)
        last = zip(moved, opened.outvars[len(outputs) :])
        self.leaving = {i: place[var] for i, var in last if not isinstance(var, _compat.Literal)}
        self.backward, used = _wanted(self.backward, self.results)
        self.made = {index for op in self.forward for index in op.outputs}
        self.needed = [index for index in dict.fromkeys(used) if index not in late]
        self.origin = {place[var]: original for var, original in origins.items() if place[var] in self.made}


def _without_names(closed: Any, named: Named, origins: dict[Any, int]) -> Any:
    """Returns the program without the names, and fills `origins`: variable -> the value that it was named as.

    A value and its name are one: what reads the value, its own operation's derivative too, reads it behind the name in
    what is emitted.
    """
    seen: set[int] = set()

    def value(eqn: Any, operands: Sequence[Any]) -> Any:
        original = named.value(eqn)
        if original is None:
            return None
        if original not in seen and not isinstance(operands[0], _compat.Literal):
            seen.add(original)
            origins.setdefault(operands[0], original)
        return operands[0]

    return surgery.without(closed, value)


def _wanted(ops: list[Op], results: Sequence[int]) -> tuple[list[Op], list[int]]:
    """Returns the operations that the results depend on, in order, and all that they use, the results too."""
    live = surgery.live(ops, results, lambda op: op.outputs, lambda op: op.inputs)
    return live, [*results, *(index for op in reversed(live) for index in op.inputs)]
