"""The engine of `Slots`: a scan whose backward pass runs revolve's schedule in one compiled loop.

The forward pass stores the carries that the schedule asks for in a buffer. The backward pass is a loop over *runs* of a
few steps, from the last to the first. Each time round it restores a carry, advances it to the start of the run and
stores carries on the way, where `schedules.Places` says. Then it goes through the run forward once more, keeping what
its backward pass needs, pulls the cotangents back step by step, and settles what could wait. Nothing in the compiled
program depends on the length or on the number of slots but a few integers a slot.

It is a custom_vjp, so it has no forward mode; `reverse_only` says so in words of ours. A custom_vjp gives a tangent to
all of its results. Those that do not depend on what is differentiated lose it again, as they have none from lax.scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt.actions import OFFLOAD, Action
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.scans import ScanBody, ScanRun, Values
from jaxckpt.schedules.alike import results_alike
from jaxckpt.schedules.body import perturbed, pick, reached, split, zeros
from jaxckpt.schedules.budget import SlotBudget
from jaxckpt.schedules.optimum import Binomial, binomial, places
from jaxckpt.schedules.pullback import Backward, Wanted, backward, dear_values
from jaxckpt.schedules.reverse_only import no_forward_mode, no_second_reverse
from jaxckpt.schedules.rows import read_row, write_row


def scan_with_slots(
    scan: ScanRun, slots: int | SlotBudget, *, run: int | None = None, kept: Sequence[Any] | None = None
) -> tuple[Values, Values]:
    """Runs a scan; differentiated in reverse it keeps no more than `slots` carries.

    Args:
      scan: what to run; its body with calls written out.
      slots: carries whose bytes may be kept, the initial one counted; or what chooses runs and slots by bytes.
      run: iterations that one turn of the backward loop takes; what is kept of them comes on top. None: as many as are
        best for the slots, what is kept of them being paid for in slots.
      kept: variables of the body to keep in a run; None for those that make its backward pass cheap.

    Returns:
      The carries after the last iteration and the ys.
    """
    engine = _Engine(scan.body, slots, run, kept, scan.carry)
    counts = (scan.body.consts, scan.body.carries, scan.body.xs)

    def alike(results: tuple[Values, Values], operands: Values) -> tuple[Values, Values]:
        found = results_alike(scan.body, [*results[0], *results[1]], operands)
        return found[: len(results[0])], found[len(results[0]) :]

    @jax.custom_vjp
    def call(operands: Values) -> tuple[Values, Values]:
        return alike(engine.plain(_Operands(*split(operands, counts))), operands)

    def forward(operands: Values) -> Any:
        flags = [operand.perturbed and is_inexact(jax.typeof(operand.value)) for operand in operands]
        values = _Operands(*split([operand.value for operand in operands], counts))
        chosen = engine.choose(_Operands(*split(flags, counts)))
        results, slots = engine.forward(chosen.plan, values)
        carry, ys = alike(results, [*values.consts, *values.init, *values.xs])
        return (no_second_reverse(carry), no_second_reverse(ys)), (_Static(chosen), values, slots)

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


class _Operands(NamedTuple):
    """Something of each operand of a scan, such as its value: of the constants, the initial carry and the xs."""

    consts: Values
    init: Values
    xs: Values


@dataclass(frozen=True)
class _Chosen:
    """The backward step and the schedule, for what is differentiated."""

    work: Backward
    plan: Binomial


class _Engine:
    """The loops of one scan."""

    def __init__(
        self, body: ScanBody, slots: int | SlotBudget, run: int | None, kept: Sequence[Any] | None, carry: Action
    ) -> None:
        self.body, self.slots, self.run, self.carry = body, slots, run, carry
        self.kept = dear_values(body) if kept is None else list(kept)

    def choose(self, flags: _Operands) -> _Chosen:
        """Returns the backward step and the schedule; `flags` say what is differentiated in."""
        body = self.body
        consts, init, xs = flags
        carry, ys = perturbed(body, consts, init, xs)
        wanted = Wanted(tuple(consts), tuple(init), tuple(carry), tuple(xs), tuple(ys))
        if isinstance(self.slots, SlotBudget):
            plan = self.slots.choose(wanted)
            return _Chosen(self._work(wanted, plan), plan)
        if self.run != 1 and (self.run is not None or self.kept is not None):
            work = backward(body, wanted, self.kept, defer=True)
            if self.run is not None:
                run = min(self.run, body.length)
                plan = Binomial(body.length, run, min(self.slots, -(-body.length // run)), work.again)
            else:
                row = work.bytes_a_step / max(body.carry_bytes, 1)
                plan = binomial(body.length, self.slots, row=row, again=work.again, costs=work.costs(body))
            if plan.run > 1:
                return _Chosen(work, plan)
        return _Chosen(backward(body, wanted, None, defer=False), binomial(body.length, self.slots))

    def _work(self, wanted: Wanted, plan: Binomial) -> Backward:
        """Returns the backward step of a schedule."""
        return backward(self.body, wanted, self.kept if plan.run > 1 else None, defer=plan.run > 1)

    # ---------------------------------------------------------------------------------------------------------- forward

    def plain(self, operands: _Operands) -> tuple[Values, Values]:
        """Runs the scan as lax.scan does, for when it is not differentiated."""
        body = self.body
        consts, init, xs = operands
        return lax.scan(lambda carry, x: body.run(consts, carry, x), init, xs, length=body.length, reverse=body.reverse)

    def forward(self, plan: Binomial, operands: _Operands) -> tuple[tuple[Values, Values], Values]:
        """Runs all steps; returns the results and the slots."""
        init = operands.init
        carries = _Carries(self.body, plan, self.carry, operands)
        ys = [zeros(aval, self.body.length) for aval in self.body.y_avals]
        slots = [carries.home.buffer(value, plan.slots) for value in init]
        if carries.home.away:  # only what is kept goes to the host
            whole = carries.parts_of(*carries.places.whole)
            carry, ys, slots, _ = carries.advance(plan.units - 1, 0, init, ys, slots, whole)
            slots = carries.home.write(slots, carry, carries.spare)
            return carries.steps(carry, (plan.units - 1) * plan.run, plan.last, ys), slots

        # In device memory it is cheaper to put every run's carry somewhere: what is not kept goes to the spare row. So
        # the number of turns is known, and if nobody uses the ys, JAX sees it.
        def turn(i: Any, state: tuple[Values, Values, Values, Any]) -> tuple[Values, Values, Values, Any]:
            carry, ys, slots, part = state
            kept = i == carries.parts.starts[part]
            slots = carries.home.write(slots, carry, jnp.where(kept, carries.row(part), carries.spare))
            carry, ys = carries.steps(carry, i * plan.run, plan.run, ys)
            return carry, ys, slots, part + kept

        turns, first = plan.units - (not carries.even), jnp.int32(0)
        carry, ys, slots, _ = lax.fori_loop(0, turns, turn, (init, ys, slots, first))
        if carries.even:
            return (carry, ys), slots
        slots = carries.home.write(slots, carry, carries.spare)
        return carries.steps(carry, (plan.units - 1) * plan.run, plan.last, ys), slots

    # --------------------------------------------------------------------------------------------------------- backward

    def backward(
        self, chosen: _Chosen, operands: _Operands, slots: Values, ct_carry: Sequence[Any], ct_ys: Sequence[Any]
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
        carries = _Carries(self.body, plan, self.carry, operands)
        turns = _Turns(carries, work, [ct for ct, flag in zip(ct_ys, some) if flag])

        state = _State(
            ct=[zeros(ct.aval) if isinstance(ct, zero) else ct for ct in pick(ct_carry, wanted.carry)],
            totals=[zeros(jax.typeof(value).to_ct_aval()) for value in pick(operands.consts, wanted.consts)],
            ct_xs=[zeros(jax.typeof(value).to_ct_aval()) for value in pick(operands.xs, wanted.xs)],
            stacks=[],
        )
        # Each of the two programs has stacks of its own length; the loop hands them on from turn to turn.
        rows = lambda count: [zeros(aval, count) for aval in work.stacks] if plan.run > 1 else []
        if not carries.even:
            state = state._replace(stacks=rows(plan.last))
            state = turns.adjoint(plan.units - 1, plan.last, carries.home.read(slots, carries.spare), state)

        def turn(i: Any, both: tuple[Values, _Unreversed, _State]) -> tuple[Values, _Unreversed, _State]:
            slots, parts, state = both
            carry, slots, parts = carries.restore(i, slots, parts)
            return slots, parts, turns.adjoint(plan.units - 1 - i, plan.run, carry, state)

        if carries.even or plan.units > 1:
            state = state._replace(stacks=rows(plan.run))
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


class _Unreversed(NamedTuple):
    """The parts of the scan that are still to be reversed, as of `schedules.Places`: JAX integers."""

    starts: Any
    left: Any
    top: Any


class _Carries:
    """Taking carries forward: by steps, by runs, and as the schedule places them."""

    def __init__(self, body: ScanBody, plan: Binomial, carry: Action, operands: _Operands) -> None:
        self.body, self.plan = body, plan
        self.consts, self.init, self.xs = operands
        self.home = _Home(carry, body.carry_avals)
        # A last run as long as the others is part of the backward loop. A shorter one is a program of its own, before
        # the loop.
        self.even = plan.last == plan.run
        # Slot 0 always holds the initial carry, which is there anyway. So the buffer has the others, and in the row
        # that is to spare the carry at the start of the last run; nothing is read from it later, so what need not be
        # kept may be written there.
        self.spare = plan.slots - 1
        self.places = places(plan.units, plan.slots)
        self.table = jnp.asarray(self.places.reach)
        self.parts = self.parts_of(self.places.starts, self.places.left, self.places.top)

    def parts_of(self, starts: Any, left: Any, top: int) -> _Unreversed:
        """Returns parts as arrays."""
        return _Unreversed(jnp.asarray(starts, jnp.int32), jnp.asarray(left, jnp.int32), jnp.int32(top))

    def row(self, slot: Any) -> Any:
        """Returns the row of the buffer for a slot."""
        return jnp.where(slot == 0, self.spare, slot - 1)

    def steps(self, carry: Values, start: Any, count: int, ys: Values) -> tuple[Values, Values]:
        """Takes a carry through `count` steps, a number known now; writes ys where there are any."""

        def one(j: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            carry, ys = state
            row = self.body.row(start + j)
            carry, y = self.body.run(self.consts, carry, read(self.xs, row))
            return carry, write(ys, y, row) if ys else []

        return loop(count, one, (carry, ys))

    def advance(
        self, to: Any, at: Any, carry: Values, ys: Values, slots: Values, parts: _Unreversed
    ) -> tuple[Values, Values, Values, _Unreversed]:
        """Takes the carry of run `at`, the start of the last part, to run `to`, storing carries of the parts that it
        makes on the way.
        """
        run = self.plan.run
        if self.plan.units == 1:
            return carry, ys, slots, parts

        def one(unit: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            return self.steps(state[0], unit * run, run, state[1])

        def to_next(
            state: tuple[Any, Values, Values, Values, _Unreversed],
        ) -> tuple[Any, Values, Values, Values, _Unreversed]:
            at, carry, ys, slots, parts = state
            left = parts.left[parts.top]
            end = at + self.places.cut(self.table, to + 1 - at, self.places.slots - parts.top, left)
            carry, ys = lax.fori_loop(at, end, one, (carry, ys))
            # What lies after `end` is a part of its own, unless it is run `to` alone, whose turn it is.
            more = end < to
            top = parts.top + more
            reduced = parts.left.at[parts.top].add(-1)
            parts = _Unreversed(
                parts.starts.at[top].set(jnp.where(more, end, parts.starts[top])),
                reduced.at[top].set(jnp.where(more, left, reduced[top])),
                top,
            )
            slots = self.home.write(slots, carry, jnp.where(more, self.row(top), self.spare))
            return end, carry, ys, slots, parts

        state = (jnp.asarray(at, jnp.int32), carry, ys, slots, parts)
        return lax.while_loop(lambda state: state[0] < to, to_next, state)[1:]

    def restore(self, i: Any, slots: Values, parts: _Unreversed) -> tuple[Values, Values, _Unreversed]:
        """Returns the carry at the start of adjoint i's run, and the slots and parts after obtaining it."""
        unit = self.plan.units - 1 - i
        last = i == 0  # the forward pass left its carry in the spare row
        kept = self.home.read(slots, jnp.where(last, self.spare, self.row(parts.top)))
        initial = (parts.top == 0) & ~last
        carry = [lax.select(initial, first, later) for first, later in zip(self.init, kept)]
        at = jnp.where(last, unit, parts.starts[parts.top])
        carry, _, slots, parts = self.advance(unit, at, carry, [], slots, parts)
        ended = parts.starts[parts.top] == unit
        return carry, slots, parts._replace(top=jnp.maximum(parts.top - ended, 0))


class _Home:
    """Where kept carries lie: in device memory, or in the host's."""

    def __init__(self, carry: Action, leaves: Sequence[Any]) -> None:
        self.away = carry == OFFLOAD
        self.leaves = leaves  # a carry's abstract values

    def buffer(self, value: Any, count: int) -> Any:
        """Returns room for `count` carries; made by broadcasting, which works for random keys too."""
        room = lax.broadcast(value, (count,))
        return jax.device_put(room, jax.memory.Space.Host) if self._goes(value) else room

    def read(self, slots: Values, i: Any) -> Values:
        """Returns the carry in slot i."""
        return [
            jax.device_put(read_row(slot, i), jax.memory.Space.Device) if self._goes(leaf) else read([slot], i)[0]
            for slot, leaf in zip(slots, self.leaves, strict=True)
        ]

    def write(self, slots: Values, carry: Values, i: Any) -> Values:
        """Returns the slots with a carry put into slot i."""
        return [
            write_row(slot, jax.device_put(leaf, jax.memory.Space.Host), i)
            if self._goes(leaf)
            else write([slot], [leaf], i)[0]
            for slot, leaf in zip(slots, carry, strict=True)
        ]

    def _goes(self, leaf: Any) -> bool:
        """Whether a leaf of the carry lies on the host: arrays of floats do; counters and keys are not worth the
        way.
        """
        return self.away and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


class _Turns:
    """Taking cotangents back through a run."""

    def __init__(self, carries: _Carries, work: Backward, ct_ys: Values) -> None:
        self.carries, self.work, self.ct_ys = carries, work, ct_ys
        self.body, self.consts, self.xs = carries.body, carries.consts, carries.xs

    def adjoint(self, unit: Any, count: int, carry: Values, state: _State) -> _State:
        """Takes the cotangents back through the `count` steps of run `unit`, from the carry at its start."""
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
        first = self.body.row(start + count - 1) if self.body.reverse else start
        x = [lax.dynamic_slice_in_dim(value, first, count) for value in self.xs]
        return state._replace(totals=self.work.settle(self.consts, state.stacks, x, state.totals))

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
        carry, stacks = loop(count - 1, one, (carry, stacks))  # nothing waits for the carry after the last step
        return note(stacks, carry, [], count - 1)

    def _place(self, j: Any, count: int) -> Any:
        """Returns the row of the stacks for step j of a run: they lie as the rows of xs do."""
        return count - 1 - j if self.body.reverse else j

    def _pull(self, i: Any, rows: Values, state: _State) -> tuple[_State, Values]:
        row = self.body.row(i)
        cts = [*state.ct, *read(self.ct_ys, row)]
        ct, ct_x, totals, factors = self.work.pull(self.consts, rows, read(self.xs, row), cts, state.totals)
        return state._replace(ct=ct, totals=totals, ct_xs=write(state.ct_xs, ct_x, row)), factors


def loop(count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """Runs `body(i, state)` for i of 0 .. count-1, a number known now."""
    return body(0, state) if count == 1 else lax.fori_loop(0, count, body, state) if count else state


def read(buffers: Values, i: Any) -> Values:
    """Returns row i of each buffer."""
    return [lax.dynamic_index_in_dim(buffer, i, keepdims=False, allow_negative_indices=False) for buffer in buffers]


def write(buffers: Values, rows: Values, i: Any) -> Values:
    """Returns each buffer with row i replaced."""
    return [
        lax.dynamic_update_index_in_dim(buffer, row, i, 0, allow_negative_indices=False)
        for buffer, row in zip(buffers, rows, strict=True)
    ]
