"""The bytes that schedules of a scan take when they are compiled.

`jaxckpt.scan` is called while a program is traced, when nothing can be compiled. So bytes are counted:

  - what is kept: carries, residuals of plain iterations, what a run of `Slots` keeps, integers that place the slots;
  - copies: rows of xs that a segment reads as a block, and xs and ys cut and put together where a length does not
    divide;
  - sums of constants' cotangents that an inner loop has beside the outer one's;
  - what one iteration and its backward pass work with: the liveness of that program, by the compiler that takes more.

A compiler may compute 16-bit floats in float32 (`Fusing.widens_floats`): while an iteration works with them they have 4
bytes an element there, and bfloat16 that a loop writes row by row may have (`stacked_bytes`). It may split a matmul
over its cores and add up the parts (`Fusing.split_cores`).

What is there anyway does not count: operands and results of the scan, their cotangents, and copies in float32 that the
scan without a gradient makes too. One program is traced for all targets, so where compilers differ the count is of the
one that takes more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt.core import liveness
from jaxckpt.core.constants import ITERATION, LONGEST_RUN, SPLIT_CONTRACTED, SPLIT_TILE, TURN
from jaxckpt.core.graph import Graph, Op, aval_bytes, graph_of
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.liveness import FUSING
from jaxckpt.core.scans import ScanBody, Values
from jaxckpt.schedules.body import perturbed
from jaxckpt.schedules.optimum import (
    Binomial,
    TurnCosts,
    best_runs,
    places_bytes,
)
from jaxckpt.schedules.pullback import Backward, Wanted, backward, dear_values


def everything(body: ScanBody) -> Wanted:
    """Returns the cotangents of all that can be differentiated."""
    inexact = [is_inexact(var.aval) for var in body.jaxpr.invars]
    carries = body.consts + body.carries
    consts, init, xs = inexact[: body.consts], inexact[body.consts : carries], inexact[carries:]
    carry, ys = perturbed(body, consts, init, xs)
    return Wanted(tuple(consts), tuple(init), tuple(carry), tuple(xs), tuple(ys))


def residual_bytes(body: ScanBody) -> int:
    """Returns the bytes that a loop keeps of an iteration, if all that can be is differentiated; constants and xs not
    counted.
    """
    inputs = [var.aval for var in body.jaxpr.invars]

    def residuals(*flat: Any) -> Values:
        moving = [is_inexact(aval) for aval in inputs]

        def run(*values: Any) -> Values:
            rest = iter(values)
            out = _compat.eval_jaxpr(
                body.jaxpr, [], *(next(rest) if flag else value for flag, value in zip(moving, flat))
            )
            return [value for value in out if is_inexact(jax.typeof(value))]

        return jax.tree.leaves(jax.vjp(run, *(value for value, flag in zip(flat, moving) if flag))[1])

    traced = _compat.open_jaxpr(jax.make_jaxpr(residuals)(*inputs))
    there = {*traced.constvars, *traced.invars[: body.consts], *traced.invars[body.consts + body.carries :]}
    kept = {var for var in traced.outvars if isinstance(var, _compat.Var) and var not in there}
    return sum(stacked_bytes(var.aval) for var in kept)


# -------------------------------------------------------------------------------------------------------- runs of slots


class SlotBudget:
    """Which runs of several iterations, and how many slots, take at most so many bytes.

    Args:
      body: of the scan.
      limit: bytes.
      kept: variables of the body to keep in a run; None for those that make its backward pass cheap.
    """

    def __init__(self, body: ScanBody, limit: int, kept: Sequence[Any] | None = None) -> None:
        self.body, self.limit = body, limit
        self.kept = dear_values(body) if kept is None else list(kept)
        self._counted: dict[Wanted, Callable[[int], float]] = {}
        self._works: dict[Wanted, Backward | None] = {}

    def choose(self, wanted: Wanted) -> Binomial:
        """Returns the runs and slots that fit and take the least time; those that take the fewest bytes where none
        fit.
        """
        return self.within(wanted, self.limit)

    def within(self, wanted: Wanted, limit: float) -> Binomial:
        """Returns the runs and slots that take at most `limit` bytes and the least time; those that take the fewest
        bytes where none fit.
        """
        body, beside, work = self.body, self._beside(wanted), self._work(wanted)

        def left(run: int) -> int:
            if run > 1 and work is None:
                return 0
            return self._slots(limit - beside(run), -(-body.length // run))

        again = work is not None and work.again
        costs = TurnCosts() if work is None else work.costs(body)
        chosen = best_runs(body.length, left, again=again, costs=costs)
        if chosen is not None:
            return chosen
        longest = 1 if work is None else min(body.length, LONGEST_RUN)
        single = (Binomial(body.length, run, 1, again and run > 1) for run in range(1, longest + 1))
        return min(single, key=lambda plan: self.bytes(wanted, plan))

    def bytes(self, wanted: Wanted, plan: Binomial) -> int:
        """Returns the bytes that a plan takes."""
        return self.kept_bytes(plan) + self.work_bytes(wanted, plan)

    def kept_bytes(self, plan: Binomial) -> int:
        """Returns the bytes that a plan keeps from the forward to the backward pass: slots, and the integers that place
        them.
        """
        return plan.slots * self.body.carry_bytes + places_bytes(plan.units, plan.slots)

    def work_bytes(self, wanted: Wanted, plan: Binomial) -> int:
        """Returns the bytes that a plan needs beside the slots, in the backward pass."""
        return math.ceil(self._beside(wanted)(plan.run))

    def turn_flops(self, plan: Binomial) -> float:
        """Returns what a plan's backward loop takes beside runs of the body, in FLOPs that take as long."""
        return plan.units * TURN + plan.length * ITERATION

    def _work(self, wanted: Wanted) -> Backward | None:
        """Returns the backward pass of a run; None where keeping values makes none cheap."""
        if wanted not in self._works:
            self._works[wanted] = None if self.kept is None else backward(self.body, wanted, self.kept, defer=True)
        return self._works[wanted]

    def _slots(self, room: float, units: int) -> int:
        """Returns how many slots there is room for, at most `units`."""
        low, high = 0, min(max(int(room // max(self.body.carry_bytes, 1)), 0), units)
        while low < high:
            middle = (low + high + 1) // 2
            fits = middle * self.body.carry_bytes + places_bytes(units, middle) <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _beside(self, wanted: Wanted) -> Callable[[int], float]:
        """Returns the function from iterations in a run to what is needed beside the slots, in bytes."""
        if wanted in self._counted:
            return self._counted[wanted]
        body = self.body
        alone = working_bytes(body, backward(body, wanted, None, defer=False))
        work = self._work(wanted)
        longest = min(body.length, LONGEST_RUN)

        def beside(run: int) -> float:
            if run == 1 or work is None:
                return alone
            row = sum(stacked_bytes(aval, twice=True) for aval in work.stacks)
            # What is added up at once is copied from the stacks, unless it is all of them.
            ends = [end - begin for count in {run, body.length % run} - {0} for begin, end in work.parts(count)]
            return run * row + max(pulling, *(settling(rows) + row * rows * (rows < run) for rows in set(ends)))

        if work is not None and longest > 1:
            pulling = working_bytes(body, work)
            two, most = (settling_bytes(body, work, rows) for rows in (2, longest))
            # The bytes that live at once are the largest of several sums, so between two lengths they are at most on
            # the line.
            settling = lambda rows: two + (most - two) / max(longest - 2, 1) * (rows - 2)
        self._counted[wanted] = beside
        return beside


# ------------------------------------------------------------------------------------------------------- working memory


def working_bytes(body: ScanBody, work: Backward) -> int:
    """Returns the bytes that taking the cotangents back through one iteration works with, a carry and its cotangents
    among them.
    """
    consts, carry, xs = _inputs(body)
    cts = [_compat.cotangent_aval(aval) for aval in (*body.carry_avals, *body.y_avals)]
    flags = [*work.wanted.carry, *work.wanted.ys]
    sums = [_compat.cotangent_aval(aval) for aval, flag in zip(consts, work.wanted.consts) if flag]
    rows = list(work.stacks[: work.rows]) if work.defers else [carry[i] for i in work.carry_rows]
    args = consts, rows, xs, [ct for ct, flag in zip(cts, flags) if flag], sums
    forward = graph_of(_compat.close_jaxpr(body.jaxpr, ()))
    back = graph_of(jax.make_jaxpr(work.pull)(*args))
    # The scan without a gradient has the xs in float32 where the compiler widens them, but not the cotangents of the
    # ys.
    wide = body.length * sum(stacked_bytes(aval, twice=True) - aval_bytes(aval) for aval in body.y_avals)
    one = sum(stacked_bytes(aval, twice=True) for aval in body.carry_avals)
    return max(_live(forward), _live(back)) + one + wide


def settling_bytes(body: ScanBody, work: Backward, run: int) -> int:
    """Returns the bytes that adding what waited at the end of a run works with, rows of xs that it reads among them."""
    if work.settle is None:
        return 0
    consts, _, xs = _inputs(body)
    rows = lambda avals: [jax.ShapeDtypeStruct((run, *aval.shape), aval.dtype) for aval in avals]
    sums = [_compat.cotangent_aval(aval) for aval, flag in zip(consts, work.wanted.consts) if flag]
    graph = graph_of(jax.make_jaxpr(work.settle)(consts, rows(work.stacks), rows(xs), sums))
    return _live(graph) + run * sum(map(aval_bytes, work.gathered))


def _inputs(body: ScanBody) -> tuple[list[Any], list[Any], list[Any]]:
    avals = [var.aval for var in body.jaxpr.invars]
    carries = body.consts + body.carries
    return avals[: body.consts], avals[body.consts : carries], avals[carries:]


def stacked_bytes(aval: Any, *, twice: bool = False) -> int:
    """Returns the bytes of a row of an array that a loop writes row by row, or of a carry, by the compiler that takes
    more.

    Args:
      aval: the abstract value of the row or carry.
      twice: whether it is there in its own type too, for another loop.
    """
    widened = _compat.CPU_WIDENS_BFLOAT16_LOOPS and aval.dtype == jax.numpy.bfloat16
    return aval_bytes(aval) * ((3 if twice else 2) if widened else 1)


def _live(graph: Graph) -> int:
    """Returns the most bytes that live at once beside what is given, by the compiler that takes more.

    The compilers that are asked are those that take more than the liveness model says: those that widen floats or split
    matmuls.
    """
    asked = (name for name, fusing in FUSING.items() if fusing.widens_floats or fusing.split_cores)
    return max(_beside(graph, name) for name in asked)


def _beside(graph: Graph, platform: str) -> int:
    """Returns the most bytes that live at once beside what is given, by one platform's compiler."""
    fusing = FUSING[platform]
    if fusing.widens_floats:
        graph = _widened(graph)
    parts = max((_parts(op, graph, fusing.split_cores) for op in graph.walk()), default=0)
    return liveness.working_bytes(graph, platform) + parts


def _widened(graph: Graph) -> Graph:
    """Returns the graph with four bytes for each element of what is computed in float32: all floats that have fewer."""
    narrow = lambda dtype: jax.dtypes.issubdtype(dtype, jax.numpy.floating) and dtype.itemsize < 4
    values = tuple(
        replace(value, bytes=4 * math.prod(value.shape)) if narrow(value.dtype) else value for value in graph.values
    )
    return replace(graph, values=values)


def _parts(op: Op, graph: Graph, cores: int) -> int:
    """Returns the bytes of the parts of a matmul's result where its contraction is split over so many cores, the result
    not counted.
    """
    if op.primitive != "dot_general":
        return 0
    (left_axes, _), (batch, _) = op.params["dimension_numbers"]
    left, right = (graph.values[index] for index in op.inputs[:2])
    result = graph.values[op.outputs[0]]
    contracted = math.prod(left.shape[axis] for axis in left_axes)
    batches = math.prod(left.shape[axis] for axis in batch)
    rows = math.prod(left.shape) // max(contracted * batches, 1)
    columns = math.prod(right.shape) // max(contracted * batches, 1)
    tiles = batches * -(-rows // SPLIT_TILE) * -(-columns // SPLIT_TILE)
    split = min(contracted // SPLIT_CONTRACTED, cores // max(tiles, 1))
    split = 2 ** (split.bit_length() - 1) if split > 0 else 1
    return (split - 1) * result.bytes
