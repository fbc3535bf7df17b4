"""The engine of `Slots`: a scan whose backward pass runs revolve's schedule in one compiled loop.

The forward pass stores the carries that the schedule asks for in a buffer. The backward pass is a loop over *runs* of a
few iterations, from the last to the first. Each time round it restores a carry, advances it to the start of the run and
stores carries on the way, where `schedules.Places` says. Then it goes through the run forward once more, keeping what
its backward pass needs, pulls the cotangents back iteration by iteration, and settles what could wait. Nothing in the
compiled program depends on the length or on the number of slots but a few integers a slot.

It is a custom_vjp, so it has no forward mode; `reverse_only` says so in words of ours. A custom_vjp gives a tangent to
all of its results. Those that do not depend on what is differentiated lose it again, as they have none from lax.scan.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.actions import Action
from jaxckpt.core.leaves import is_inexact, is_symbolic
from jaxckpt.core.scans import ScanBody, ScanRun, Values
from jaxckpt.core.tie import together
from jaxckpt.schedules.alike import results_alike
from jaxckpt.schedules.body import in_forward_pass, perturbed, pick, reached, split, zeros
from jaxckpt.schedules.budget import SlotBudget
from jaxckpt.schedules.carries import KeptCarries, Operands, loop, read, write
from jaxckpt.schedules.host_carries import carries_of
from jaxckpt.schedules.optimum import Binomial
from jaxckpt.schedules.pullback import Backward, Wanted, backward, dear_values
from jaxckpt.schedules.reverse_only import no_forward_mode, no_second_reverse
from jaxckpt.schedules.two_levels import LevelCounts, TwoLevelRuns, with_host


def scan_with_slots(
    scan: ScanRun, slots: LevelCounts | SlotBudget, *, run: int | None = None, kept: Sequence[Any] | None = None
) -> tuple[Values, Values]:
    """Runs a scan; differentiated in reverse it keeps no more than `slots` carries.

    Args:
      scan: what to run; its body with calls written out.
      slots: carries that may be kept, on the device and on the host; or what chooses runs and slots by bytes.
      run: iterations that one turn of the backward loop takes; what is kept of them comes on top. None: as many as are
        best for the slots, what is kept of them being paid for in slots.
      kept: variables of the body to keep in a run; None for those that make its backward pass cheap.

    Returns:
      The carries after the last iteration and the ys.
    """
    body = scan.body  # the functions here must not hold the scan's operands, which may be traced
    engine = _Engine(body, slots, run, kept, scan.carry)
    counts = (body.consts, body.carries, body.xs)

    def alike(results: tuple[Values, Values], operands: Values) -> tuple[Values, Values]:
        found = results_alike(body, [*results[0], *results[1]], operands)
        return found[: len(results[0])], found[len(results[0]) :]

    @jax.custom_vjp
    @_compat.usual_promotion()
    def call(operands: Values) -> tuple[Values, Values]:
        return alike(engine.plain(Operands(*split(operands, counts))), operands)

    @_compat.usual_promotion()
    def forward(operands: Values) -> Any:
        flags = [operand.perturbed and is_inexact(jax.typeof(operand.value)) for operand in operands]
        values = Operands(*split([operand.value for operand in operands], counts))
        chosen = engine.choose(Operands(*split(flags, counts)))
        results, slots = engine.forward(chosen.plan, values)
        carry, ys = alike(results, [*values.consts, *values.init, *values.xs])
        if isinstance(chosen.plan, TwoLevelRuns):  # the initial carry is on the host with the others
            values = values._replace(init=[])
        return (no_second_reverse(carry), no_second_reverse(ys)), (_Static(chosen), values, slots)

    @_compat.usual_promotion()
    def reverse(residuals: Any, cotangents: Any) -> tuple[Values]:
        chosen, values, slots = residuals
        return (no_second_reverse(engine.backward(chosen.value, values, slots, *cotangents)),)

    call.defvjp(forward, reverse, symbolic_zeros=True)
    operands = [*scan.consts, *scan.init, *scan.xs]
    last, ys = call(no_forward_mode(operands))
    results = _without_tangents(scan.body, [*last, *ys], operands)
    return results[: len(last)], results[len(last) :]


def _without_tangents(body: ScanBody, results: Values, operands: Values) -> Values:
    """Returns the results of a scan, without tangents where lax.scan would give them none."""

    @jax.custom_jvp
    def same(results: Values, operands: Values) -> Values:
        return results

    def tangents(primals: tuple[Values, Values], tangents: tuple[Values, Values]) -> tuple[Values, Values]:
        zero = jax.custom_derivatives.SymbolicZero
        results, operands = primals
        flags = [not isinstance(t, zero) and is_inexact(jax.typeof(x)) for x, t in zip(operands, tangents[1])]
        carry, ys = perturbed(body, *split(flags, (body.consts, body.carries, body.xs)))
        none = [zero(_compat.tangent_aval(value)) for value in results]
        return results, [t if flag else no for t, flag, no in zip(tangents[0], [*carry, *ys], none)]

    same.defjvp(tangents, symbolic_zeros=True)
    return same(results, operands)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A value that is part of a tree's structure."""

    value: Any


@dataclass(frozen=True)
class _Chosen:
    """The backward pass and the schedule, for what is differentiated."""

    work: Backward
    plan: Binomial


class _Engine:
    """The loops of one scan."""

    def __init__(
        self,
        body: ScanBody,
        slots: LevelCounts | SlotBudget,
        run: int | None,
        kept: Sequence[Any] | None,
        carry: Action,
    ) -> None:
        self.body, self.slots, self.run, self.carry = body, slots, run, carry
        self.kept = dear_values(body) if kept is None else list(kept)

    @functools.cached_property
    def moving(self) -> ScanBody:
        """The body as it runs where the scan is differentiated: forward mode may go through it."""
        return in_forward_pass(self.body)

    def choose(self, flags: Operands) -> _Chosen:
        """Returns the backward pass and the schedule; `flags` say what is differentiated in."""
        body = self.body
        consts, init, xs = flags
        carry, ys = perturbed(body, consts, init, xs)
        wanted = Wanted(tuple(consts), tuple(init), tuple(carry), tuple(xs), tuple(ys))
        if isinstance(self.slots, SlotBudget):
            plan = self.slots.choose(wanted)
            return _Chosen(self._work(wanted, plan), plan)
        if is_symbolic(body.jaxpr.invars):  # nothing says what is large, and what a run may keep
            if self.run is not None and self.run > 1:
                rule = "1, or left out, where the shapes of carries, xs or constants are symbolic"
                raise ArgumentError("run_length", rule, self.run)
        elif self.run != 1 and (self.run is not None or self.kept is not None):
            work = backward(body, wanted, self.kept, defer=True)
            if self.run is not None:
                run = min(self.run, body.length)
                plan = Binomial(body.length, run, min(self.slots.device, -(-body.length // run)), work.again)
                plan = with_host(plan, self.slots.host, self.slots.transfer)
            else:
                row = work.iteration_bytes / max(body.carry_bytes, 1)
                plan = self.slots.runs(body.length, row=row, again=work.again, costs=work.costs(body))
            if plan.run > 1:
                return _Chosen(work, plan)
        return _Chosen(backward(body, wanted, None, defer=False), self.slots.runs(body.length))

    def _work(self, wanted: Wanted, plan: Binomial) -> Backward:
        """Returns the backward pass of a schedule."""
        return backward(self.body, wanted, self.kept if plan.run > 1 else None, defer=plan.run > 1)

    # ---------------------------------------------------------------------------------------------------------- forward

    def plain(self, operands: Operands) -> tuple[Values, Values]:
        """Runs the scan as lax.scan does, for when it is not differentiated."""
        body = self.body
        consts, init, xs = operands
        return lax.scan(lambda carry, x: body.run(consts, carry, x), init, xs, length=body.length, reverse=body.reverse)

    def forward(self, plan: Binomial, operands: Operands) -> tuple[tuple[Values, Values], Values]:
        """Runs all iterations; returns the results and the slots."""
        return carries_of(self.moving, plan, self.carry, operands).forward()

    # --------------------------------------------------------------------------------------------------------- backward

    def backward(
        self, chosen: _Chosen, operands: Operands, slots: Values, ct_carry: Sequence[Any], ct_ys: Sequence[Any]
    ) -> Values:
        """Returns the cotangents of constants, initial carry and xs; None for those that are not asked for."""
        work, plan = chosen.work, chosen.plan
        wanted = work.wanted
        zero = jax.custom_derivatives.SymbolicZero
        there = lambda flags, cts: tuple(flag and not isinstance(ct, zero) for flag, ct in zip(flags, cts))
        some = there(wanted.ys, ct_ys)
        fewer = wanted.limited(*reached(self.body, there(wanted.carry, ct_carry), some), some)
        if fewer != wanted:  # results that nothing was made of
            wanted, work = fewer, self._work(fewer, plan)
        carries = carries_of(self.moving, plan, self.carry, operands)
        turns = _Turns(carries, work, [ct for ct, flag in zip(ct_ys, some) if flag])

        state = _State(
            ct=[zeros(ct.aval) if isinstance(ct, zero) else ct for ct in pick(ct_carry, wanted.carry)],
            totals=[zeros(_compat.cotangent_aval(jax.typeof(value))) for value in pick(operands.consts, wanted.consts)],
            ct_xs=[zeros(_compat.cotangent_aval(jax.typeof(value))) for value in pick(operands.xs, wanted.xs)],
            stacks=[zeros(aval, plan.run) for aval in work.stacks] if plan.run > 1 else [],
        )
        if not carries.even:
            state = turns.adjoint(plan.units - 1, plan.last, carries.last(slots), state)

        def turn(i: Any, both: tuple[Values, Any, _State]) -> tuple[Values, Any, _State]:
            slots, parts, state = both
            carry, slots, parts = carries.restore(i, slots, parts)
            return slots, parts, turns.adjoint(plan.units - 1 - i, plan.run, carry, state)

        if carries.even or plan.units > 1:
            first = 0 if carries.even else 1
            _, _, state = lax.fori_loop(first, plan.units, turn, (slots, carries.parts, state))
        ct_init = [ct if asked else None for ct, asked in zip(_spread(state.ct, wanted.carry), wanted.init)]
        return [*_spread(state.totals, wanted.consts), *ct_init, *_spread(state.ct_xs, wanted.xs)]


def _spread(values: Values, flags: Sequence[bool]) -> Values:
    rest = iter(values)
    return [next(rest) if flag else None for flag in flags]


class _State(NamedTuple):
    """What the backward loop carries: cotangents of the carry, of the constants so far, of xs so far, and the stacks of
    a run.
    """

    ct: Values
    totals: Values
    ct_xs: Values
    stacks: Values


class _Turns:
    """Taking cotangents back through a run."""

    def __init__(self, carries: KeptCarries, work: Backward, ct_ys: Values) -> None:
        self.carries, self.work, self.ct_ys = carries, work, ct_ys
        self.body, self.consts, self.xs = carries.body, carries.consts, carries.xs

    def adjoint(self, unit: Any, count: int, carry: Values, state: _State) -> _State:
        """Takes the cotangents back through the `count` iterations of run `unit`, from the carry at its start."""
        start = unit * self.carries.plan.run
        if self.carries.plan.run == 1:
            rows = [carry[i] for i in self.work.carry_rows]
            return self._pull(start, rows, state)[0]
        state = state._replace(stacks=self._again(start, count, carry, state.stacks))

        def one(i: Any, state: _State) -> _State:
            j = count - 1 - i
            place = self._place(j, count)
            state, factors = self._pull(start + j, read(state.stacks[: self.work.rows], place), state)
            stacks = list(state.stacks)
            for factor, taken in zip(factors, self.work.takes):
                (stacks[taken],) = write([stacks[taken]], [factor], place)
            return state._replace(stacks=stacks)

        state = loop(count, one, state)
        if self.work.settle is None:
            return state
        first = jnp.asarray(self.body.row(start + count - 1) if self.body.reverse else start)
        stacks, totals = state.stacks, state.totals
        # A last run that is shorter than the others has the first rows of the same stacks.
        for begin, end in self.work.parts(count):
            if begin:  # what comes before is added first
                held = together([first, *stacks, *totals])
                (first,), stacks, totals = split(held, (1, len(stacks), len(totals)))
            rows = [lax.slice_in_dim(stack, begin, end) for stack in stacks]
            x = [lax.dynamic_slice_in_dim(value, first + begin, end - begin) for value in self.xs]
            totals = self.work.settle(self.consts, rows, x, totals)
        return state._replace(totals=totals)

    def _again(self, start: Any, count: int, carry: Values, stacks: Values) -> Values:
        """Goes through a run forward once more, stacking what its backward pass needs."""
        work = self.work

        def note(stacks: Values, carry: Values, kept: Values, j: Any) -> Values:
            rows = [*(carry[i] for i in work.carry_rows), *kept]
            return [*write(stacks[: work.rows], rows, self._place(j, count)), *stacks[work.rows :]]

        def one(j: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            carry, stacks = state
            x = read(self.xs, self.body.row(start + j))
            if work.keep is None:
                return self.body.run(self.consts, carry, x)[0], note(stacks, carry, [], j)
            following, kept = work.keep(self.consts, carry, x)
            return following, note(stacks, carry, kept, j)

        if work.keep is not None:
            return loop(count, one, (carry, stacks))[1]
        carry, stacks = loop(count - 1, one, (carry, stacks))  # nothing waits for the carry after the last iteration
        return note(stacks, carry, [], count - 1)

    def _place(self, j: Any, count: int) -> Any:
        """Returns the row of the stacks for iteration j of a run: they lie as the rows of xs do."""
        return count - 1 - j if self.body.reverse else j

    def _pull(self, i: Any, rows: Values, state: _State) -> tuple[_State, Values]:
        row = self.body.row(i)
        cts = [*state.ct, *read(self.ct_ys, row)]
        ct, ct_x, totals, factors = self.work.pull(self.consts, rows, read(self.xs, row), cts, state.totals)
        return state._replace(ct=ct, totals=totals, ct_xs=write(state.ct_xs, ct_x, row)), factors
