"""Estimates the compiled peak of a traced program in milliseconds, without compiling it.

It walks the operations of the whole training step (forward, backward, recomputation) in program order and adds up what
is live. These habits of XLA matter for bytes, and are in it:

  - *Fusion.* Elementwise operations and those that only move data are computed where they are used. Such a value takes
    memory only if a matmul, convolution, loop, checkpoint, or the caller wants it whole. Otherwise what lives on, also
    from the forward to the backward pass, is what it is computed from. That is why the sum of JAX's residuals predicts
    little. XLA for GPUs and TPUs computes such a value again for every use. XLA for the CPU does not where there is
    something to compute, and stores what is used more than once.
  - *Order.* What is computed cheaply of values that are there anyway is computed where it is first used; on the CPU
    only what is computed of arguments alone.
  - *In place.* A fused operation writes over an operand of the same size that dies there; so does a scatter, or an
    update of a slice. What an iteration makes of a carry is written over that carry, but on TPUs. XLA for GPUs adds the
    result of a matmul, such as a part of a weight's gradient, to what is there already as the matmul computes it.
  - *Rows.* What an iteration reads of an array that its loop goes along has memory of its own for a loop inside alone.
  - *Fills.* An array of one constant that all iterations of a loop read is made in the loop's body, but on TPUs.
  - *Outputs.* They have their buffers from the start; while one is not written yet, a value that is no larger may live
    in it.

What is offloaded to the host does not count. It knows no scheduler (a GPU's may undo offloading), no shardings, no
layouts, no library's scratch memory, no common subexpressions, and not that the CPU computes bfloat16 in float32. On
the models of benchmarks/ it is mostly within 10% on an H100 and 20% on the CPU in float32; where a policy keeps values
that XLA would rather fuse ("everything"), up to 70% above. For a decision take the compiled figure: `jaxckpt.compare`
shows both, and the error.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.constants import OPERANDS
from jaxckpt.core.graph import Body, Graph, Op, Value, constants_and_carries, walk
from jaxckpt.core.lift import trace
from jaxckpt.core.primitives import Holds, Kernel, Primitive, Result

_BARRIER = "optimization_barrier"


class Branches(enum.Enum):
    """Where results of a `cond` have memory of their own: what donated, compiled steps need says so."""

    IN_PLACE = "nowhere"
    HANDED_ON = "where a branch hands an operand on"
    NO_FLAG = "but where a boolean chooses, and a branch hands an operand on"

    def own(self, op: Op, place: int, graph: Graph) -> bool:
        """Returns whether a result of a `cond` of a graph, by its place, has."""
        handed_on = any(body.outputs[place] in body.inputs for body in op.bodies)
        if self is not Branches.NO_FLAG:
            return self is Branches.HANDED_ON and handed_on
        index: Any = graph.values[op.inputs[0]].equation if op.inputs else None
        of: list[Any] = [] if index is None else index.invars
        return not (handed_on and bool(of) and str(getattr(of[0].aval, "dtype", "")) == "bool")


@dataclass(frozen=True)
class Fusing:
    """How a platform's compiler fuses, and what else it does that takes memory.

    Attributes:
      stores_shared: whether what is computed and then used more than once is stored; else it is computed again for
        every use.
      delays: whether what is computed cheaply of any value that is there anyway is computed where it is first used;
        else what is computed of arguments alone.
      shares_zeros: whether equal arrays of zeros are stored once, from the first use to the last, if one of them is
        written over.
      accumulates: whether a matmul adds its result to an array in that array's place, and the result by itself takes no
        memory.
      copies_carries: whether what an iteration makes of a carry stands beside it; else it is written over it where that
        can be.
      sinks_fills: whether an array of one constant, which all iterations of a loop read, is made in the loop's body.
      branches: where results of a `cond` have memory of their own, and are not written to donated arguments.
      host_is_apart: whether the host has memory of its own; else what is moved there stays where it is.
      draws: while random bits are drawn, how many arrays as large as these there are besides.
      widens_floats: whether floats of fewer than four bytes are computed in float32.
      split_cores: the number of cores. If a matmul's result has fewer tiles, its contraction is split, and the parts
        are added up. 0 if no contraction is split.

    The last two count in `jaxckpt.schedules.budget` alone.
    """

    stores_shared: bool = False
    delays: bool = True
    shares_zeros: bool = False
    accumulates: bool = False
    copies_carries: bool = False
    sinks_fills: bool = False
    branches: Branches = Branches.IN_PLACE
    host_is_apart: bool = True
    draws: int = 0
    widens_floats: bool = False
    split_cores: int = 0


FUSING: dict[str, Fusing] = {}
"""Platform's name -> how its compiler fuses; `jaxckpt.memory.platforms` fills it."""

_PARTS = 512
"""Parts of the time that outputs' buffers are looked up by."""


@dataclass(eq=False)
class _Memory:
    """What may take memory. `last`: the event after which nobody needs it, -1 if nobody ever does. `fill`: whether it
    is an array of one constant.
    """

    bytes: int
    fill: bool = False
    stored: bool = False
    counted: bool = True
    last: int = -1
    sources: tuple[_Memory, ...] = ()
    inside: _Memory | None = None  # shares the memory of that one

    def owner(self) -> _Memory:
        owner = self
        while owner.inside is not None:
            owner = owner.inside
        slot = self
        while slot.inside is not None:  # a later call has one link to follow
            slot.inside, slot = owner, slot.inside
        return owner


@dataclass(eq=False)
class _Event:
    primitive: str
    inputs: list[_Memory]
    outputs: list[_Memory]
    workspace: int = 0
    path: tuple[Op, ...] = ()  # the operation, behind those that it lies in
    carried: list[_Memory] | None = None  # of a scan, what its carries begin with: it writes over nothing else
    facts: Primitive = field(init=False)

    def __post_init__(self) -> None:
        self.facts = primitives.of(self.primitive)


def estimate_peak(fun: Callable[..., Any], *args: Any, platform: str = "cuda") -> int:
    """Estimates the peak bytes of `fun(*args)`, with arguments and outputs. Nothing is compiled.

    Args:
      fun: a function of pytrees, usually a whole training step such as `jax.value_and_grad(loss)`.
      *args: arrays, or anything with a shape and a dtype.
      platform: whose compiler to expect: "cuda", "tpu" or "cpu" (`Target.platform`), one of `FUSING`.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)  # 1 MiB
    >>> estimate_peak(lambda x: jnp.sum(jnp.tanh(jnp.sin(x) + 1)), x)  # one fused loop: the argument and a scalar
    1048580
    """
    graph = trace(fun, *args)
    return graph_peak(graph, platform, donated_arguments(graph))


def donated_arguments(graph: Graph, traced: Any = None) -> list[int]:
    """Returns the arguments that a jitted function gives away, as indices of values; those of a function that is
    nothing but a call of one, too. Within a larger program JAX donates none.

    Args:
      graph: of its one call, as `jaxckpt.trace` returns it; or of what is in that, if `traced` is given.
      traced: the `jax.stages.Traced` whose program the graph is of.
    """
    read: Sequence[int | None]
    if traced is not None:
        flags = [leaf.donated for leaf in jax.tree.leaves(traced.args_info)]
        read = graph.body.inputs[len(graph.body.inputs) - len(flags) :]
    elif len(graph.ops) == 1:
        (call,) = graph.ops
        inputs = iter(call.inputs)
        flags = call.params.get("donated_invars", ())
        read = [None if isinstance(atom, _compat.Literal) else next(inputs) for atom in call.equation.invars]
    else:
        return []
    return [index for index, flag in zip(read, flags) if flag and index is not None]


def graph_peak(graph: Graph, platform: str = "cuda", donated: Sequence[int] = ()) -> int:
    """Estimates the peak bytes of a traced program: see `estimate_peak`. `donated`: the arguments, as indices of
    values, that results are written to.
    """
    given, _, live = _program(graph, platform, donated)
    return given + max(live, default=0)


def working_bytes(graph: Graph, platform: str) -> int:
    """Estimates the most bytes that are live at once beside the arguments of a program that runs within another one:
    what it hands on is not copied.
    """
    _, _, live = _program(graph, platform, inner=True)
    return max(live, default=0)


def loses_gradients(graph: Graph) -> bool:
    """Returns whether a program computes gradients in reverse, and no result depends on any of them."""
    backward = lambda op: "transpose(" in op.scope
    if not any(map(backward, graph.walk())) or graph.jaxpr.effects:
        return False
    outside = _given(graph, (value.index for value in graph.values if value.kind in ("argument", "constant")))
    events, _ = _needed_events(graph, graph.body, outside, "cpu")
    around = (op for event in events for op in event.path)
    within = (op for event in events for body in event.path[-1].bodies for op in walk(body))
    return not any(map(backward, itertools.chain(around, within)))


def renewed_bytes(graph: Graph, donated: Sequence[int] = ()) -> int:
    """Returns the bytes of arguments that a program returns the next values of, and that it does not donate: a training
    step's parameters and optimizer state. A next value has the shape and the type of its argument, and is computed from
    it element by element; so a gradient is none.

    Args:
      graph: of the program.
      donated: the arguments, as indices of values, that results are written to.
    """
    outside = _given(graph, (value.index for value in graph.values if value.kind in ("argument", "constant")))
    events, results = _needed_events(graph, graph.body, outside, "cuda")
    made = {id(slot): event for event in events for slot in event.outputs}
    arguments = {id(slot): index for index, slot in outside.items() if graph.values[index].kind == "argument"}
    paired = _in_place(graph, donated)
    left = set(arguments.values()) - set(paired.values())
    renewed = 0
    for place, index in enumerate(index for index in graph.body.outputs if index is not None):
        if place in paired or id(results[place]) in arguments or _is_gradient(made.get(id(results[place]))):
            continue
        value, seen, todo = graph.values[index], set[int](), [results[place]]
        while todo:
            slot = todo.pop()
            if id(slot) in seen or slot.bytes != value.bytes:
                continue
            seen.add(id(slot))
            if (event := made.get(id(slot))) is not None and not event.facts.barrier and event.facts.fused:
                todo += event.inputs
        like = (arguments[slot] for slot in seen if arguments.get(slot) in left)
        same = [each for each in like if _like(graph.values[each]) == _like(value)]
        if same:
            left.remove(min(same))
            renewed += value.bytes
    return renewed


def _is_gradient(event: _Event | None) -> bool:
    """Returns whether JAX's reverse mode makes what an operation returns."""
    return event is not None and any("transpose(" in op.scope for op in event.path)


def _like(value: Value) -> tuple[Any, Any]:
    return value.shape, value.dtype


def graph_profile(
    graph: Graph, platform: str = "cuda", donated: Sequence[int] = ()
) -> tuple[int, list[tuple[str, int]]]:
    """Estimates the bytes that are live at each operation of a traced program: see `estimate_peak`.

    Args:
      graph, platform, donated: as of `graph_peak`.

    Returns:
      The bytes of arguments and constants that are used. For each operation, in the order that is estimated, the scopes
      that it lies in, the outermost first and joined by "/", and the bytes beside these.
    """
    given, events, live = _program(graph, platform, donated)
    return given, [("/".join(op.scope for op in event.path), each) for event, each in zip(events, live)]


def _program(
    graph: Graph, platform: str, donated: Sequence[int] = (), *, inner: bool = False
) -> tuple[int, list[_Event], list[int]]:
    """Returns the bytes of the arguments and constants that are used, what the program does, and the bytes live at each
    event besides. `inner`: as of `working_bytes`.
    """
    outside = _given(graph, (value.index for value in graph.values if value.kind in ("argument", "constant")))
    events, results = _needed_events(graph, graph.body, outside, platform)
    alive = {id(slot) for event in events for slot in event.inputs} | set(map(id, results))
    given = sum(slot.bytes for slot in outside.values() if id(slot) in alive)  # `jax.jit` leaves out the others
    pairs = _in_place(graph, [index for index in donated if id(outside[index]) in alive])
    events = _ordered(events, outside.values(), results, platform, [results[place] for place in pairs])
    results = [slot.owner() for slot in results]
    outputs, copies = _written(graph, outside, events, results, pairs, platform)
    return given, events, _live(events, outputs, () if inner else copies)


def _in_place(graph: Graph, donated: Sequence[int]) -> dict[int, int]:
    """Returns the results that are written to donated arguments, as JAX pairs them: each result with the first argument
    of its shape and type that is left.

    Returns:
      The place of a result, those that are literals left out -> the argument.
    """
    left: dict[tuple[Any, Any], list[int]] = {}
    for index in donated:
        value = graph.values[index]
        left.setdefault(_like(value), []).append(index)
    pairs = {}
    for place, index in enumerate(index for index in graph.body.outputs if index is not None):
        value = graph.values[index]
        if left.get(key := _like(value)):
            pairs[place] = left[key].pop(0)
    return pairs


_Copy = tuple[int, int, int]
"""Bytes of a copy, the first and the last event at which it is there."""


def _written(
    graph: Graph,
    outside: Mapping[int, _Memory],
    events: list[_Event],
    results: list[_Memory],
    pairs: Mapping[int, int],
    platform: str,
) -> tuple[list[_Memory], list[_Copy]]:
    """Returns the results that have buffers of their own, and the copies that XLA makes: of an argument that is a
    result in no place of its own, of what is a result twice, and of a donated argument that is still read when a result
    takes its place.
    """
    made = {id(slot): (time, event) for time, event in enumerate(events) for slot in event.outputs}
    owners = dict(zip((id(slot) for slot in outside.values()), outside))
    outputs: dict[int, _Memory] = {}
    copies: list[_Copy] = []
    seen: set[int] = set()
    returned = set(map(id, results))
    for place, slot in enumerate(results):
        argument, pair, again = owners.get(id(slot)), pairs.get(place), id(slot) in seen
        seen.add(id(slot))
        if argument is not None:
            if pair != argument:
                copies.append((slot.bytes, 0, len(events)))
        elif again:
            if pair is None:
                copies.append((slot.bytes, len(events) - 1, len(events)))
        elif pair is None:
            if _takes_memory(slot):
                outputs[id(slot)] = slot
        elif id(slot) in made:
            time, event = made[id(slot)]
            if event.primitive == "cond":
                op, at = event.path[-1], next(i for i, each in enumerate(event.outputs) if each is slot)
                if FUSING[platform].branches.own(op, at, graph):
                    continue
            slot.counted = False
            if id(outside[pair]) not in returned and (last := outside[pair].last) > time:
                copies.append((slot.bytes, time, last))
    return list(outputs.values()), copies


def _events(
    graph: Graph,
    body: Body,
    outside: Mapping[int, _Memory],
    platform: str,
    carried: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> tuple[list[_Event], list[_Memory]]:
    """Returns what a body of an operation does, and the slots of its results.

    Args:
      outside: value -> slot, of what is the caller's.
      carried: of a loop's body, its inputs that the first results take the places of.
      rows: of a loop's body, its inputs that are parts of the loop's operands.
    """
    events, results = _needed_events(graph, body, outside, platform)
    events = [*_cut_out([outside[index] for index in rows], events), *events]
    events = _ordered(events, outside.values(), results, platform, carried=[outside[index] for index in carried])
    return events, [slot.owner() for slot in results]


def _needed_events(
    graph: Graph, body: Body, outside: Mapping[int, _Memory], platform: str
) -> tuple[list[_Event], list[_Memory]]:
    """Returns what a body does for its results, and their slots; `outside` as of `_events`."""
    slots = dict(outside)
    events = list(_flatten(graph, body, slots, platform))
    results = [_slot(graph, slots, index) for index in body.outputs if index is not None]
    return _needed(events, results), results


def _cut_out(rows: Sequence[_Memory], events: list[_Event]) -> Iterator[_Event]:
    """Yields what cuts rows out of a loop's operands for the loops that read them: these want a row whole, in memory of
    its own. Others read it where it lies.
    """
    whole: set[int] = set()
    for event in reversed(events):
        if event.facts.barrier:
            whole.update(id(before) for before, after in zip(event.inputs, event.outputs) if id(after) in whole)
        elif event.facts.holds is Holds.LOOP:
            whole.update(map(id, event.inputs))
    for row in rows:
        if id(row) in whole:
            row.counted = True
            yield _Event("dynamic_slice", [_Memory(0, stored=True, counted=False)], [row])


def _ordered(
    events: list[_Event],
    given: Iterable[_Memory],
    results: list[_Memory],
    platform: str,
    in_place: list[_Memory] | None = None,
    carried: Sequence[_Memory] = (),
) -> list[_Event]:
    """Returns the events in the order of compilers, and decides what is stored.

    Args:
      given: what is there from the start.
      results: what is there at the end.
      in_place: the results that are written to donated arguments.
      carried: as of `_settle`.
    """
    made = {id(slot) for event in events for slot in event.outputs}
    read = {id(slot): slot for event in events for slot in event.inputs if id(slot) not in made}
    read |= {id(slot): slot for slot in given}
    events = _at_first_use(events, read.values(), results, FUSING[platform].delays)
    if in_place:
        events = _updates_at_once(events, in_place)
    _settle(events, results, FUSING[platform], carried)
    return events


def _flatten(
    graph: Graph, body: Body, slots: dict[int, _Memory], platform: str, around: tuple[Op, ...] = ()
) -> Iterator[_Event]:
    """Yields the events of a body, what it calls written out; fills `slots`, index of a value -> its slot. `around`:
    the operations that the body lies in.
    """
    for op in body.ops:
        inputs = [_slot(graph, slots, index) for index in op.inputs]
        if op.bodies and primitives.of(op.primitive).holds.in_line:
            yield from _call(graph, op, slots, inputs, platform, around)
            continue
        made = [var.aval for var in op.equation.outvars if not isinstance(var, _compat.DropVar)]
        here = (
            [not FUSING[platform].host_is_apart or not _compat.is_on_host(aval) for aval in made]
            if len(made) == len(op.outputs)
            else [True] * len(op.outputs)
        )
        facts = graph.facts(op)
        one = len(inputs) <= 1 and all(slot.fill for slot in inputs)  # or a literal
        fill = one and facts.linear and facts.kernel is Kernel.AT_USES
        outputs = [
            _Memory(graph.values[index].bytes, fill=fill, counted=counted) for index, counted in zip(op.outputs, here)
        ]
        slots.update(zip(op.outputs, outputs))
        carried = _carried_in(op, inputs) if op.primitive == "scan" else None
        if op.primitive == "scan" and FUSING[platform].sinks_fills:
            inputs = _without_fills(op, inputs)
        inside = [
            _events(graph, inner, _given(graph, inner.inputs), platform, *_carried_and_rows(op, inner))
            for inner in op.bodies
        ]
        workspace = max((_workspace(op, *each) for each in inside), default=0)
        if op.primitive in ("random_bits", "threefry2x32"):
            workspace += FUSING[platform].draws * sum(graph.values[index].bytes for index in op.outputs)
        primitive = "reshape" if graph.reshapes_units(op) else op.primitive
        yield _Event(primitive, inputs, outputs, workspace, (*around, op), carried)


def _given(graph: Graph, indices: Iterable[int]) -> dict[int, _Memory]:
    """Returns slots of values that are there already."""
    return {index: _Memory(graph.values[index].bytes, stored=True, counted=False) for index in indices}


def _workspace(op: Op, events: list[_Event], results: list[_Memory]) -> int:
    """Returns the bytes that a body of an operation needs beside the operation's results. Those of a branch are written
    into them.
    """
    own = list({id(slot): slot for slot in results if _takes_memory(slot)}.values()) if op.primitive == "cond" else []
    return _peak(events, own) - sum(slot.bytes for slot in own)


def _carried_and_rows(op: Op, inner: Body) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the inputs of a loop's body that are carried, and those that are parts of the loop's operands."""
    consts, carry = constants_and_carries(op, inner)
    return inner.inputs[consts : consts + carry], inner.inputs[consts + carry :] if op.primitive == "scan" else ()


def _carried_in(op: Op, inputs: list[_Memory]) -> list[_Memory]:
    """Returns what the carries of a scan begin with; `inputs`: of the scan, as of an event."""
    consts, carries = _compat.num_scan_consts_carry(op.params)
    return [slot for slot in _operands(op, inputs)[consts : consts + carries] if slot is not None]


def _without_fills(op: Op, inputs: list[_Memory]) -> list[_Memory]:
    """Returns what a scan reads, without the arrays of one constant that all of its iterations read."""
    consts, _ = _compat.num_scan_consts_carry(op.params)
    slots = enumerate(_operands(op, inputs))
    return [slot for place, slot in slots if slot is not None and not (place < consts and slot.fill)]


def _operands(op: Op, inputs: list[_Memory]) -> list[_Memory | None]:
    """Returns the slots of an operation's operands, None for literals."""
    given = iter(inputs)
    return [None if isinstance(atom, _compat.Literal) else next(given) for atom in op.equation.invars]


def _slot(graph: Graph, slots: dict[int, _Memory], index: int) -> _Memory:
    """Returns the slot of a value; what no event has made (a constant of an inner program) is its caller's."""
    if index not in slots:
        slots[index] = _Memory(graph.values[index].bytes, stored=True, counted=False)
    return slots[index]


def _call(
    graph: Graph, op: Op, slots: dict[int, _Memory], inputs: list[_Memory], platform: str, around: tuple[Op, ...]
) -> Iterator[_Event]:
    inner = op.bodies[0]
    barrier = (
        primitives.of(op.primitive).holds is Holds.CHECKPOINT
        and op.params.get("differentiated")
        and op.params.get("prevent_cse", True)
    )
    operands = dict(zip(op.inputs, inputs))
    if barrier:
        behind = {index: _Memory(entry.bytes) for index, entry in operands.items()}
        yield _Event(_BARRIER, list(operands.values()), list(behind.values()), 0, (*around, op))
        slots.update(behind)
        operands = behind
    # A body's inputs are the operands themselves, or values of their own; a literal operand takes no memory.
    given = iter(op.inputs)
    passed = [None if isinstance(atom, _compat.Literal) else next(given) for atom in op.equation.invars]
    if len(passed) == len(inner.inputs):
        slots.update((own, operands[index]) for own, index in zip(inner.inputs, passed) if index not in (None, own))
    yield from _flatten(graph, inner, slots, platform, (*around, op))
    results = [
        _slot(graph, slots, index) if index is not None else _Memory(graph.values[outer].bytes)
        for outer, index in zip(op.outputs, inner.outputs, strict=True)
    ]
    slots.update(zip(op.inputs, inputs))  # what comes later reads them from before the barrier
    slots.update(zip(op.outputs, results))


def _needed(events: list[_Event], results: Iterable[_Memory]) -> list[_Event]:
    """Returns the events that the results depend on: XLA drops the others."""
    return surgery.live(events, results, lambda event: event.outputs, lambda event: event.inputs)


def _at_first_use(
    events: list[_Event], arguments: Iterable[_Memory], results: Iterable[_Memory], delays: bool
) -> list[_Event]:
    """Returns the events with those that compute cheaply of what is there anyway, such as a weight's cast, where they
    are first used: compilers order them so.

    Args:
      events: in the order of the program.
      arguments: slots that are there all the time.
      results: slots that are there at the end.
      delays: as of `Fusing`.
    """
    outside = {id(slot): (len(events), -1, -1) for slot in arguments}
    needs = _last_needs(events, results) if delays else {}
    there = _there_until(events, {**needs, **outside})
    first: dict[int, int] = {}  # slot -> the place of the first event that uses it
    order = []
    for time, event in reversed(list(enumerate(events))):
        place = time
        if not event.facts.barrier and event.facts.fused and event.inputs and event.outputs:
            use = min(first.get(id(slot), len(events)) for slot in event.outputs)
            if time < use <= there[time]:
                place = use
                event.path = events[use].path if use < len(events) else event.path
        first.update((id(slot), min(place, first.get(id(slot), place))) for slot in event.inputs)
        order.append((place, time))
    return [events[time] for _, time in sorted(order)]


def _updates_at_once(events: list[_Event], in_place: list[_Memory]) -> list[_Event]:
    """Returns the events with those that only lead to results in the place of donated arguments as soon as what they
    read is there: an optimizer's update of a weight needs no more memory, and frees its gradient. What is written to
    an argument waits until nothing else reads that.
    """
    leads = {id(slot) for slot in in_place}
    others: set[int] = set()  # slots that lead elsewhere, too
    updates = set()
    for time, event in reversed(list(enumerate(events))):
        made = {id(slot) for slot in event.outputs}
        if not event.facts.barrier and event.facts.fused and made & leads and not made & others:
            updates.add(time)
            leads.update(id(slot) for slot in event.inputs)
        else:
            others.update(id(slot) for slot in event.inputs)
    read: dict[int, int] = {}  # slot -> the last event, no update, that reads or makes it
    for time, event in enumerate(events):
        if time not in updates:
            read.update((id(slot), time) for slot in (*event.inputs, *event.outputs))
    there: dict[int, int] = {}  # what an update makes -> after which event it is there
    order = []
    for time, event in enumerate(events):
        place = time
        if time in updates:
            place = max((there.get(id(slot), read.get(id(slot), -1)) for slot in event.inputs), default=-1)
            there.update((id(slot), place) for slot in event.outputs)
        order.append((place, time))
    return [events[time] for _, time in sorted(order)]


def _last_needs(events: list[_Event], results: Iterable[_Memory]) -> dict[int, tuple[int, int, int]]:
    """Returns for each slot when it is needed last. What a fused event makes may not be stored: then what the event
    reads is needed for as long as that. `results` as of `_at_first_use`.

    Returns:
      slot -> (when it is needed last, the event that needs it then, when another event needs it last). The event is -1
      where it is none, and the time where there is no other.
    """
    needs = {id(slot): (len(events), -1, -1) for slot in results}
    for time, event in reversed(list(enumerate(events))):
        last = time
        if event.facts.fused:
            last = max((needs[id(slot)][0] for slot in event.outputs if id(slot) in needs), default=time)
        after = event.outputs if event.facts.barrier else ()  # each is an operand
        for slot, made in itertools.zip_longest(event.inputs, after[: len(event.inputs)]):
            if event.facts.barrier:
                last = time if made is None else needs.get(id(made), (time, time, time))[0]
            before, by, other = needs.get(id(slot), (-1, time, -1))
            if by == time:
                needs[id(slot)] = max(before, last), time, other
            elif last > before:
                needs[id(slot)] = last, time, before
            elif last > other:
                needs[id(slot)] = before, by, last
    return needs


def _there_until(events: list[_Event], needs: Mapping[int, tuple[int, int, int]]) -> list[int]:
    """Returns for each event until when all that it reads is there or can be computed cheaply, if the event itself does
    not need it; `needs` as of `_last_needs`.
    """
    through: dict[int, int] = {}  # slot -> until when it can be computed cheaply
    there = []
    for time, event in enumerate(events):
        until = []
        for slot in event.inputs:
            last, by, other = needs.get(id(slot), (-1, -1, -1))
            until.append(max(through.get(id(slot), -1), other if by == time else last))
        there.append(min(until, default=-1))
        if event.facts.barrier:
            through.update((id(after), last) for after, last in zip(event.outputs, until))
        elif event.facts.fused:
            through.update((id(slot), there[time]) for slot in event.outputs)
    return there


def _store_shared(events: list[_Event]) -> None:
    """Stores what is computed and then used more than once."""
    uses = Counter(id(slot) for event in events for slot in event.inputs)
    for event in events:
        if event.facts.kernel is Kernel.FUSED:
            for slot in event.outputs:
                slot.stored = uses[id(slot)] > 1


def _settle(events: list[_Event], results: list[_Memory], fusing: Fusing, carried: Sequence[_Memory] = ()) -> None:
    """Decides what is stored, which slots share memory, and when each is needed for the last time. `carried` as of
    `_events`.
    """
    if fusing.stores_shared:
        _store_shared(events)
    _decide(events, results)
    if fusing.accumulates:
        _accumulate(events, carried)
    if carried and not fusing.copies_carries:
        _write_over_carries(events, results, carried)


def _accumulate(events: list[_Event], carried: Sequence[_Memory]) -> None:
    """Puts the result of a matmul, where nothing but a sum reads it, into the memory of what it is added to."""
    uses = Counter(id(slot) for event in events for slot in event.inputs)
    made = {id(slot): (time, event) for time, event in enumerate(events) for slot in event.outputs}
    changed = {id(slot) for slot in carried}

    def matmul(slot: _Memory) -> _Memory | None:
        """Returns the result of a matmul that this is an elementwise function of, if nobody else reads it."""
        while uses[id(slot)] == 1 and id(slot) in made:
            _, event = made[id(slot)]
            if event.primitive == "dot_general":
                return slot if slot.inside is None else None
            if not event.facts.fused or [slot.bytes] != [each.bytes for each in event.inputs]:
                return None
            slot = event.inputs[0]
        return None

    for time, event in enumerate(events):
        if event.primitive not in ("add", "add_any") or len(event.inputs) != 2 or not event.outputs[0].stored:
            continue
        found = []
        for product, other in (event.inputs, event.inputs[::-1]):
            slot, place = matmul(product), other.owner() if other.stored else None
            if slot is None or place is None or not slot.bytes == place.bytes == event.outputs[0].bytes:
                continue
            there = made[id(place)][0] if id(place) in made else -1
            if place.last == time and (place.counted or id(place) in changed) and there < made[id(slot)][0]:
                found.append((made[id(slot)][0], slot, place))
        if found:
            _, slot, place = max(found, key=lambda each: each[0])
            slot.inside = place


def _write_over_carries(events: list[_Event], results: list[_Memory], carried: Sequence[_Memory]) -> None:
    """Puts what an iteration makes of a carry into that carry's memory, where it is not needed any more."""
    made = {id(slot): (time, event) for time, event in enumerate(events) for slot in event.outputs}
    for carry, result in zip(carried, results):
        slot = result.owner()
        if id(slot) not in made or slot.bytes != carry.bytes:
            continue
        time, event = made[id(slot)]
        if carry.last < time or (carry.last == time and (event.facts.fused or event.facts.writes_over)):
            slot.inside = carry


def _decide(events: list[_Event], results: list[_Memory]) -> None:
    """Decides what is stored, which slots share memory, and when each is needed for the last time."""
    for slot in results:
        slot.stored = True
    for event in reversed(events):
        if event.facts.barrier:
            for before, after in zip(event.inputs, event.outputs):
                before.stored = after.stored = True
                after.inside = before
        elif not event.facts.fused:
            for slot in event.outputs:
                slot.stored = True
            if event.facts.kernel is Kernel.OWN:
                for slot in event.inputs:
                    slot.stored = True
    for time, event in enumerate(events):
        read: dict[int, _Memory] = {}
        for slot in event.inputs:
            for source in (slot.owner(),) if slot.stored else slot.sources:
                read[id(source)] = source
        for slot in event.outputs:
            slot.sources = tuple(read.values())
            slot.stored |= len(read) > OPERANDS
        if (
            event.facts.result >= Result.RESHAPED and event.inputs and event.inputs[0].stored
        ):  # of a literal, there is no operand
            event.outputs[0].inside = event.inputs[0]
        # A fused operation reads where what it makes is stored, or else where that is used.
        if not event.facts.fused or any(slot.stored for slot in event.outputs):
            for source in read.values():
                source.last = time
        for slot in event.outputs:
            slot.last = max(slot.last, time)
    for slot in results:
        slot.owner().last = len(events)


def _peak(events: list[_Event], outputs: list[_Memory]) -> int:
    """Returns the most bytes that are live at once: see `_live`."""
    return max(_live(events, outputs), default=0)


def _live(events: list[_Event], outputs: list[_Memory], copies: Sequence[_Copy] = ()) -> list[int]:
    """Returns the bytes that are live at each event.

    The outputs have buffers of their own from the start. Until one is written, something else may live in it, if that
    is no larger. `copies` are there besides.
    """
    lives: dict[_Memory, tuple[int, int]] = {}
    for time, event in enumerate(events):
        made = [slot for slot in event.outputs if _takes_memory(slot)]
        if event.facts.fused or event.facts.writes_over:
            _write_over(made, event.inputs if event.carried is None else event.carried, lives, time)
        lives.update((slot, (time, slot.last)) for slot in made)
    waiting = _Buffers({slot: lives[slot][0] if slot in lives else 0 for slot in outputs}, len(events))
    change = [0] * (len(events) + 1)
    for slot, (first, last) in sorted(lives.items(), key=lambda item: -item[0].bytes):
        if slot not in waiting.written and not waiting.take(slot.bytes, first, last):
            change[first] += slot.bytes
            change[min(last + 1, len(events))] -= slot.bytes
    for size, first, last in copies:
        change[first] += size
        change[min(last + 1, len(events))] -= size
    standing = sum(slot.bytes for slot in waiting.written)
    moving = itertools.accumulate(change[:-1])
    return [standing + live + event.workspace for live, event in zip(moving, events)]


def _write_over(made: list[_Memory], read: list[_Memory], lives: dict[_Memory, tuple[int, int]], time: int) -> None:
    """Ends the lives of operands an event early where a result of the same size takes their place."""
    # In the order of the operands: a set's order would make the estimate another one from run to run.
    dying = dict.fromkeys(source for slot in read for source in ((slot.owner(),) if slot.stored else slot.sources))
    sizes = Counter(slot.bytes for slot in made)
    for slot in dying:
        if slot.last == time and slot in lives and sizes[slot.bytes]:
            sizes[slot.bytes] -= 1
            lives[slot] = (lives[slot][0], time - 1)


class _Buffers:
    """The buffers of outputs, each free until its output is written; a value goes into the first one, the largest
    first, that is free for all of its life.

    Not every buffer is asked: time is cut into `_PARTS` parts, and a binary tree over the buffers knows of each group
    of them in which parts all of the group are taken, wholly or somewhere.

    Args:
      written: output -> the event that writes it.
      events: how many events there are.
    """

    def __init__(self, written: dict[_Memory, int], events: int) -> None:
        self.written = written
        order = sorted(written, key=lambda slot: -slot.bytes)
        self.sizes = [-slot.bytes for slot in order]
        self.taken: list[list[tuple[int, int]]] = [[] for _ in order]
        self.part = events // _PARTS + 1  # events in one
        self.leaves = 1 << max(len(order) - 1, 0).bit_length()
        self.somewhere, self.wholly = ([0] * self.leaves + [-1] * self.leaves for _ in range(2))
        for place, slot in enumerate(order):
            self.somewhere[self.leaves + place] = self.wholly[self.leaves + place] = 0
            self._note(place, written[slot], events)
        for node in range(self.leaves - 1, 0, -1):
            self._join(node)

    def take(self, size: int, first: int, last: int) -> bool:
        """Takes a buffer of so many bytes or more for the events first..last; says whether one was free."""
        end = bisect.bisect_right(self.sizes, -size)
        touched, covered = self._parts(first, last)
        waiting = [(1, 0, self.leaves)]  # nodes with their first leaf and how many leaves they have
        while waiting:
            node, place, width = waiting.pop()
            if place >= end:
                return False
            if touched & self.wholly[node] or covered & self.somewhere[node]:
                continue
            if width > 1:
                half = width // 2
                waiting += [(2 * node + 1, place + half, half), (2 * node, place, half)]
            elif self._is_free(place, first, last):
                self._note(place, first, last)
                while (node := node // 2) > 0:
                    self._join(node)
                return True
        return False

    def _is_free(self, place: int, first: int, last: int) -> bool:
        taken = self.taken[place]
        at = bisect.bisect_left(taken, (first,))
        return (at == len(taken) or last < taken[at][0]) and (at == 0 or taken[at - 1][1] < first)

    def _note(self, place: int, first: int, last: int) -> None:
        """Notes that a buffer is taken; what follows without a gap becomes one."""
        taken = self.taken[place]
        begin = end = bisect.bisect_left(taken, (first,))
        if begin > 0 and taken[begin - 1][1] == first - 1:
            begin -= 1
            first = taken[begin][0]
        if end < len(taken) and taken[end][0] == last + 1:
            last = taken[end][1]
            end += 1
        taken[begin:end] = [(first, last)]
        touched, covered = self._parts(first, last)
        self.somewhere[self.leaves + place] |= touched
        self.wholly[self.leaves + place] |= covered

    def _parts(self, first: int, last: int) -> tuple[int, int]:
        """Returns the parts of the time, as bits, that some of the events first..last are in, and those that have no
        other events.
        """
        touched = (2 << last // self.part) - (1 << first // self.part)
        begin, end = -(-first // self.part), (last + 1) // self.part
        return touched, (1 << end) - (1 << begin) if begin < end else 0

    def _join(self, node: int) -> None:
        self.somewhere[node] = self.somewhere[2 * node] & self.somewhere[2 * node + 1]
        self.wholly[node] = self.wholly[2 * node] & self.wholly[2 * node + 1]


def _takes_memory(slot: _Memory) -> bool:
    return slot.stored and slot.counted and slot.inside is None


def stretch_peak(
    graph: Graph,
    ops: Iterable[Op],
    results: Iterable[int],
    arriving: Iterable[int],
    arguments: Iterable[int],
    platform: str,
) -> int:
    """Estimates the bytes that some operations of a graph need at once, without their inputs.

    Args:
      graph: a traced program.
      ops: some of its operations, in an order in which they can run.
      results: values (indices) that have to be there at the end; they have buffers of their own, and count.
      arriving: values that are there at the start and count too, until they are used for the last time; what else is
        used is given.
      arguments: of what is given, the values that are there for the whole step.
      platform: as of `estimate_peak`.
    """
    slots = {index: _Memory(graph.values[index].bytes, stored=True) for index in arriving}
    given = {index: _slot(graph, slots, index) for index in arguments}
    body = Body(tuple(ops), (), (), None, {})
    events = [_Event("arrive", [], list(slots.values())), *_flatten(graph, body, slots, platform)]
    outcome = [slots[index] for index in results if index in slots]
    events = _at_first_use(_needed(events, outcome), given.values(), outcome, FUSING[platform].delays)
    _settle(events, outcome, FUSING[platform])
    owners = {id(slot.owner()): slot.owner() for slot in outcome}
    return _peak(events, [slot for slot in owners.values() if _takes_memory(slot)])


def passed_on(
    graph: Graph, first: Sequence[Op], second: Sequence[Op], results: Iterable[int], platform: str
) -> list[tuple[int, list[int]]]:
    """Estimates what some operations leave in memory for others that come later, nothing between them holding the
    compiler back.

    Args:
      graph: a traced program.
      first, second: its operations, in an order in which they can run.
      results: values (indices) that have to be there at the end.
      platform: as of `estimate_peak`.

    Returns:
      For each buffer its bytes, and the values (indices) that are in it: the same one, in several forms.
    """
    slots: dict[int, _Memory] = {}
    events = list(_flatten(graph, Body(tuple(first), (), (), None, {}), slots, platform))
    made = {id(slot): slot for event in events for slot in event.outputs}
    start = len(events)
    events += _flatten(graph, Body(tuple(second), (), (), None, {}), slots, platform)
    later = {id(event) for event in events[start:]}
    outcome = [slots[index] for index in results if index in slots]
    events = _needed(events, outcome)
    _settle(events, outcome, FUSING[platform])
    border = next((time for time, event in enumerate(events) if id(event) in later), len(events))
    owners = {id(slot.owner()): slot.owner() for slot in made.values() if slot.stored}
    left = {key: slot.bytes for key, slot in owners.items() if _takes_memory(slot) and slot.last >= border}
    held: dict[int, list[int]] = {key: [] for key in left}
    for index, slot in slots.items():
        if id(slot) in made and id(slot.owner()) in held:
            held[id(slot.owner())].append(index)
    return [(left[key], values) for key, values in held.items()]
