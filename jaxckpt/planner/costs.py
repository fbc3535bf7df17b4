"""Seconds of an operation, by the target's rates: a roofline in which fused operations are nearly free.

An operation that XLA gives a kernel of its own (matmul, convolution, reduction, sort, scatter, gather, custom call,
collective) takes what it computes over the rate of its type, and what it moves over the memory's bandwidth. S. Williams
et al. ("Roofline", 2009) take the larger of the two, which supposes that they overlap fully; the sum is never more than
twice that, and tells two plans apart that move as much and compute differently. What XLA computes where it is used
moves nothing, unless such a kernel wants its result in memory.

A collective that the program names (under `jax.shard_map`) takes the bytes that each device sends over the bandwidth of
its links, as rings of many devices send them. Those that the compiler puts in of its own are read from the compiled
program: see `jaxckpt.planner.collectives`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt import _compat
from jaxckpt.actions import Cost
from jaxckpt.core import primitives
from jaxckpt.core.constants import MATRIX, VECTOR, WEIGHT
from jaxckpt.core.graph import Body, Graph, Op, constants_and_carries
from jaxckpt.core.primitives import Holds, Kernel
from jaxckpt.memory.targets import Target
from jaxckpt.planner.cycles import Cycles
from jaxckpt.planner.shards import WHOLE, Shards


@dataclass(frozen=True)
class Time:
    """What an operation takes.

    Attributes:
      seconds: by the roofline.
      effort: seconds and `WEIGHT` times its FLOPs' seconds at the peak rate: what plans are chosen by.
    """

    seconds: float = 0.0
    effort: float = 0.0

    def __add__(self, other: Time) -> Time:
        return Time(self.seconds + other.seconds, self.effort + other.effort)

    def __rmul__(self, factor: float) -> Time:
        return Time(factor * self.seconds, factor * self.effort)


def total(times: Iterable[Time]) -> Time:
    """Returns the sum."""
    return sum(times, Time())


Seconds = Callable[[Op], float]
"""Seconds of one execution of an operation."""


def roofline(graph: Graph, target: Target, shards: Shards = WHOLE, cycles: Cycles | None = None) -> Seconds:
    """Returns the function that says how long an operation of the graph takes on the target.

    Args:
      graph: its values' bytes are those on one device.
      shards: how many devices share the computation, and what they send to one another.
      cycles: what the target's compiler says of operations, which goes before the rates; None where it is not asked.
    """
    rates, bandwidth, devices = target.flops, target.bandwidth, shards.devices
    ops = list(graph.walk())
    wanted = wanted_whole(graph)
    read = _read_bytes(graph, wanted)
    turned, in_place = _turned(graph, ops), _in_place(graph.body)

    def seconds(op: Op) -> float:
        if op.bodies:
            each = [float(sum(map(seconds, body.ops))) for body in op.bodies]
            return primitives.altogether(op.primitive, op.params, each)
        if cycles is not None and (said := cycles.seconds(graph, op)) is not None:
            return said
        waits = shards.sent.seconds(graph, op)
        if passes(graph, op) or op in turned:
            return waits
        rate = devices * _rate(graph, op, rates)
        facts = graph.facts(op)
        moved = sum(map(read, set(op.inputs))) + sum(graph.values[index].bytes for index in op.outputs)
        if op in in_place:  # what is new is read and written, not the rest
            moved = 2 * sum(map(read, set(op.inputs[1:])))
        if facts.collective:
            sizes = [sum(graph.values[index].bytes for index in ends) for ends in (op.inputs, op.outputs)]
            return facts.sends * max(sizes) / target.link_bandwidth + moved / bandwidth
        if facts.fused:
            return waits + max(
                op.flops / (rate * VECTOR), moved / bandwidth if any(index in wanted for index in op.outputs) else 0.0
            )
        return waits + op.flops / (rate * MATRIX) + moved / bandwidth

    return seconds


def timer(graph: Graph, target: Target, shards: Shards = WHOLE, cycles: Cycles | None = None) -> Callable[[Op], Time]:
    """Returns the function that says what an operation takes; arguments as of `roofline`."""
    seconds = roofline(graph, target, shards, cycles)

    def weight(op: Op) -> float:
        if op.bodies:
            each = [float(sum(map(weight, body.ops))) for body in op.bodies]
            return primitives.altogether(op.primitive, op.params, each)
        rate = shards.devices * _rate(graph, op, target.flops)
        return WEIGHT * op.flops / rate if primitives.of(op.primitive).dear else 0.0

    @functools.cache
    def time(op: Op) -> Time:
        each = seconds(op)
        return Time(each, each + weight(op))

    return time


def written(graph: Graph, target: Target) -> Callable[[int], Time]:
    """Returns the function that says what it takes to write a value to memory so that it can be kept: what is computed
    where it is used is not there otherwise; the rest is. What it is computed from is read in any case.
    """
    makers = _elsewhere(graph, wanted_whole(graph))

    def time(index: int) -> Time:
        seconds = graph.values[index].bytes / target.bandwidth if index in makers else 0.0
        return Time(seconds, seconds)

    return time


def behind_barrier(graph: Graph, target: Target) -> Callable[[int], Time]:
    """Returns the function that says what a barrier behind a value adds, as `roofline` counts it: what is computed
    where it is used is computed in front of the barrier instead, from what it reads, and written. The rest is in memory
    anyway.
    """
    wanted = wanted_whole(graph)
    makers, read = _elsewhere(graph, wanted), _read_bytes(graph, wanted)

    def time(index: int) -> Time:
        op = makers.get(index)
        while op is not None and op.inputs and passes(graph, op):
            op = makers.get(op.inputs[0])
        if op is None:
            return Time()
        moved = sum(map(read, set(op.inputs))) + sum(graph.values[each].bytes for each in op.outputs)
        return Time(moved / target.bandwidth, moved / target.bandwidth)

    return time


def _elsewhere(graph: Graph, wanted: Collection[int]) -> dict[int, Op]:
    """Returns value -> the operation that makes it, for those that are computed where they are used."""
    ops = (op for op in graph.walk() if graph.facts(op).fused)
    return {index: op for op in ops for index in op.outputs if index not in wanted}


def storing(cost: Cost, target: Target, devices: int = 1) -> Time:
    """Returns what it takes to store a value and to bring it back, one resource after the other, but for the host's
    link: see `link_seconds`.

    Args:
      cost: as of the value on all devices together.
      devices: how many share it.
    """
    seconds = (
        cost.flops / (target.flops["float32"] * VECTOR)
        + cost.memory_bytes / target.bandwidth
        + cost.link_bytes / target.link_bandwidth
    ) / devices
    return Time(seconds, seconds)


def link_seconds(cost: Cost, target: Target) -> float:
    """Returns the seconds of the link to the host that it takes to store a value and to bring it back; other work may
    hide them.
    """
    return cost.host_bytes / target.host_bandwidth


def scaled(time: Callable[[Op], Time], factor: float) -> Callable[[Op], Time]:
    """Returns the function with all its times multiplied."""
    return lambda op: factor * time(op)


def is_dear(op: Op) -> bool:
    """Whether an operation costs what it computes rather than what it moves, or holds one that does: see
    `Primitive.dear`.
    """
    if op.bodies:
        return any(is_dear(inner) for body in op.bodies for inner in body.ops)
    return primitives.of(op.primitive).dear


def passes(graph: Graph, op: Op) -> bool:
    """Whether an operation's results are its operands, or these under a shape with more or fewer axes of one element:
    see `primitives.is_same`.
    """
    return graph.reshapes_units(op) or primitives.is_same(
        op.primitive, op.params, graph.values[op.outputs[0]].dtype if op.outputs else None
    )


def wanted_whole(graph: Graph) -> Collection[int]:
    """Returns the values that some operation wants in memory. What passes a value on wants it if the result is wanted;
    no fusion reaches over a barrier. What a call's program results in is wanted where the call's results are, that of
    loops and branches always.
    """
    wanted: set[int] = set()

    def mark(body: Body) -> None:
        for op in reversed(body.ops):
            facts = graph.facts(op)
            for inner in op.bodies:
                ends = zip(inner.outputs, op.outputs)
                if facts.holds.returns:
                    wanted.update(index for index, outer in ends if index is not None and outer in wanted)
                else:
                    wanted.update(index for index, _ in ends if index is not None)
                mark(inner)
            whole = facts.kernel is Kernel.OWN
            if facts.holds is Holds.MAPPED:  # what its two programs compute is one program for the compiler
                wanted.update(outer for outer, own in _entering(op) if own in wanted)
                whole = False
            if not facts.barrier and passes(graph, op):
                whole = op.outputs[0] in wanted
            if whole:
                wanted.update(op.inputs)

    mark(graph.body)
    return wanted


def _entering(op: Op) -> list[tuple[int, int]]:
    """Returns the operands of a `jax.shard_map`, each with the value that it is in its body."""
    given = iter(op.inputs)
    passed = [None if isinstance(atom, _compat.Literal) else next(given) for atom in op.equation.invars]
    return [(outer, own) for outer, own in zip(passed, op.bodies[0].inputs, strict=True) if outer is not None]


def _in_place(body: Body, inside: bool = False, fixed: Collection[int] = ()) -> set[Op]:
    """Returns the operations in bodies of loops that write over their first operand: a loop's buffers stay where they
    are. Not so where that operand is read later, or is the same in all iterations.

    Args:
      inside: whether the body is that of a loop, or in one.
      fixed: values that are the same in all iterations.
    """
    found: set[Op] = set()
    last = {index: op for op in body.ops for index in op.inputs}
    stays = {*fixed, *body.outputs}
    for op in body.ops:
        over = inside and not op.bodies and primitives.of(op.primitive).writes_over and op.inputs
        if over and op.inputs[0] not in stays and last[op.inputs[0]] is op:
            found.add(op)
        for inner in op.bodies:
            loop = primitives.of(op.primitive).holds is Holds.LOOP
            found |= _in_place(inner, inside or loop, inner.inputs[: constants_and_carries(op, inner)[0]])
    return found


def _turned(graph: Graph, ops: Sequence[Op]) -> Collection[Op]:
    """Returns the transpositions that move nothing: a matmul writes its result in the order in which it is read, if all
    that reads it reads it so.
    """
    made = {index for op in ops if op.primitive == "dot_general" for index in op.outputs}
    readers = collections.Counter(index for op in ops for index in {*op.inputs})
    readers.update(
        i for body in [graph.body, *(b for op in ops for b in op.bodies)] for i in body.outputs if i is not None
    )
    turned = (op for op in ops if op.primitive == "transpose" and op.inputs)
    return {op for op in turned if op.inputs[0] in made and readers[op.inputs[0]] == 1}


def _read_bytes(graph: Graph, wanted: Collection[int]) -> Callable[[int], int]:
    """Returns the function that says how many bytes are read to read a value: those of what it is computed from, where
    it is fused.
    """
    read: dict[int, int] = {}

    def bytes_of(index: int) -> int:
        return read.get(index, graph.values[index].bytes)

    def passed_on(index: int, own: int) -> None:
        if own not in wanted:  # outside it is the array of all devices, inside the part of one
            share = graph.values[own].bytes / max(graph.values[index].bytes, 1)
            read[own] = round(share * bytes_of(index))

    def look(body: Body) -> None:
        for op in body.ops:
            facts = graph.facts(op)
            mapped = facts.holds is Holds.MAPPED
            for outer, own in _entering(op) if mapped else ():
                passed_on(outer, own)
            for inner in op.bodies:
                look(inner)
            for result, outer in zip(op.bodies[0].outputs, op.outputs) if mapped else ():
                if result is not None:
                    passed_on(result, outer)
            if facts.fused:
                sources = sum(map(bytes_of, set(op.inputs)))
                read.update((i, min(sources, graph.values[i].bytes)) for i in op.outputs if i not in wanted)

    look(graph.body)
    return bytes_of


def _rate(graph: Graph, op: Op, rates: Mapping[str, float]) -> float:
    types = [_type_name(graph.values[index].dtype) for index in op.inputs]
    return min((rates[name] for name in types if name in rates), default=rates["float32"])


@functools.lru_cache
def _type_name(dtype: Any) -> str:
    """Returns the name of a dtype; "" for what numpy has none for: typed keys, and tokens, which have none at all."""
    try:
        return "" if dtype is None else str(np.dtype(dtype).name)
    except TypeError:
        return ""
