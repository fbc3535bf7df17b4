"""Kept carries of `Slots` in a compiled loop: where they lie, how they get there, and how those that were not kept are
obtained again.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt.actions import Action
from jaxckpt.core import turns
from jaxckpt.core.leaves import is_inexact
from jaxckpt.core.scans import ScanBody, Values
from jaxckpt.schedules.body import zeros
from jaxckpt.schedules.optimum import Binomial, places
from jaxckpt.schedules.rows import goes_to_host, host_rows, read_row, write_row


class Operands(NamedTuple):
    """Something of each operand of a scan, such as its value: of the constants, the initial carry and the xs."""

    consts: Values
    init: Values
    xs: Values


class Unreversed(NamedTuple):
    """The parts of the scan that are still to be reversed, as of `schedules.Places`: JAX integers."""

    starts: Any
    left: Any
    top: Any


class KeptCarries(abc.ABC):
    """Taking carries forward, and keeping them as a schedule places them.

    Attributes:
      body, plan: the scan's body, and its runs and slots.
      operands: of the scan: `consts`, `init`, `xs`.
      even: whether the last run is as long as the others; it is part of the backward loop then. A shorter one is a
        program of its own, before the loop.
      parts: what the backward loop hands on from turn to turn beside the slots.
    """

    parts: Any

    def __init__(self, body: ScanBody, plan: Binomial, operands: Operands) -> None:
        self.body, self.plan = body, plan
        self.operands = operands
        self.consts, self.init, self.xs = operands
        self.even = plan.last == plan.run

    @abc.abstractmethod
    def forward(self) -> tuple[tuple[Values, Values], Values]:
        """Runs all iterations; returns the results and the slots."""

    @abc.abstractmethod
    def last(self, slots: Values) -> Values:
        """Returns the carry at the start of the last run."""

    @abc.abstractmethod
    def restore(self, i: Any, slots: Values, parts: Any) -> tuple[Values, Values, Any]:
        """Returns the carry at the start of adjoint i's run, and the slots and parts after obtaining it."""

    def iterate(self, carry: Values, start: Any, count: int, ys: Values) -> tuple[Values, Values]:
        """Takes a carry through `count` iterations, a number known now; writes ys where there are any."""

        def one(j: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            carry, ys = state
            row = self.body.row(start + j)
            carry, y = self.body.run(self.consts, carry, read(self.xs, row))
            return carry, write(ys, y, row) if ys else []

        return loop(count, one, (carry, ys))


class Carries(KeptCarries):
    """Carries in one buffer: in device memory, or in the host's."""

    def __init__(self, body: ScanBody, plan: Binomial, carry: Action, operands: Operands) -> None:
        super().__init__(body, plan, operands)
        self.home = Home(carry, body.carry_avals)
        # Slot 0 always holds the initial carry, which is there anyway. So the buffer has the others, and in the row
        # that is to spare the carry at the start of the last run; nothing is read from it later, so what need not be
        # kept may be written there.
        self.spare = plan.slots - 1
        self.places = places(plan.units, plan.slots)
        self.table = jnp.asarray(self.places.reach)
        self.parts = self.parts_of(self.places.starts, self.places.left, self.places.top)

    def parts_of(self, starts: Any, left: Any, top: int) -> Unreversed:
        """Returns parts as arrays."""
        return Unreversed(jnp.asarray(starts, jnp.int32), jnp.asarray(left, jnp.int32), jnp.int32(top))

    def forward(self) -> tuple[tuple[Values, Values], Values]:
        """Runs all iterations; returns the results and the slots."""
        plan, init = self.plan, self.init
        ys = [zeros(aval, self.body.length) for aval in self.body.y_avals]
        slots = [self.home.buffer(value, plan.slots, self.operands) for value in init]
        if self.home.away:  # only what is kept goes to the host
            whole = self.parts_of(*self.places.whole)
            carry, ys, slots, _ = self.advance(plan.units - 1, 0, init, ys, slots, whole, mean=plan.units - 1)
            slots = self.home.write(slots, carry, self.spare)
            return self.iterate(carry, (plan.units - 1) * plan.run, plan.last, ys), slots

        # In device memory it is cheaper to put every run's carry somewhere: what is not kept goes to the spare row. So
        # the number of turns is known, and if nobody uses the ys, JAX sees it.
        def turn(i: Any, state: tuple[Values, Values, Values, Any]) -> tuple[Values, Values, Values, Any]:
            carry, ys, slots, part = state
            kept = i == self.parts.starts[part]
            slots = self.home.write(slots, carry, jnp.where(kept, self.row(part), self.spare))
            carry, ys = self.iterate(carry, i * plan.run, plan.run, ys)
            return carry, ys, slots, part + kept

        turns, first = plan.units - (not self.even), jnp.int32(0)
        carry, ys, slots, _ = lax.fori_loop(0, turns, turn, (init, ys, slots, first))
        if self.even:
            return (carry, ys), slots
        slots = self.home.write(slots, carry, self.spare)
        return self.iterate(carry, (plan.units - 1) * plan.run, plan.last, ys), slots

    def last(self, slots: Values) -> Values:
        """Returns the carry at the start of the last run."""
        return self.home.read(slots, self.spare)

    def row(self, slot: Any) -> Any:
        """Returns the row of the buffer for a slot."""
        return jnp.where(slot == 0, self.spare, slot - 1)

    def advance(
        self, to: Any, at: Any, carry: Values, ys: Values, slots: Values, parts: Unreversed, *, mean: float
    ) -> tuple[Values, Values, Values, Unreversed]:
        """Takes the carry of run `at`, the start of the last part, to run `to`, storing carries of the parts that it
        makes on the way. `mean`: through how many runs, on average.
        """
        run = self.plan.run
        if self.plan.units == 1:
            return carry, ys, slots, parts

        def one(unit: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            return self.iterate(state[0], unit * run, run, state[1])

        def to_next(
            state: tuple[Any, Values, Values, Values, Unreversed],
        ) -> tuple[Any, Values, Values, Values, Unreversed]:
            at, carry, ys, slots, parts = state
            left = parts.left[parts.top]
            end = at + self.places.cut(self.table, to + 1 - at, self.places.slots - parts.top, left)
            carry, ys = turns.loop(at, end, one, (carry, ys), mean)  # the loop around this one is counted once
            # What lies after `end` is a part of its own, unless it is run `to` alone, whose turn it is.
            more = end < to
            top = parts.top + more
            reduced = parts.left.at[parts.top].add(-1)
            parts = Unreversed(
                parts.starts.at[top].set(jnp.where(more, end, parts.starts[top])),
                reduced.at[top].set(jnp.where(more, left, reduced[top])),
                top,
            )
            slots = self.home.write(slots, carry, jnp.where(more, self.row(top), self.spare))
            return end, carry, ys, slots, parts

        state = (jnp.asarray(at, jnp.int32), carry, ys, slots, parts)
        return lax.while_loop(lambda state: state[0] < to, to_next, state)[1:]

    def restore(self, i: Any, slots: Values, parts: Unreversed) -> tuple[Values, Values, Unreversed]:
        """Returns the carry at the start of adjoint i's run, and the slots and parts after obtaining it."""
        unit = self.plan.units - 1 - i
        last = i == 0  # the forward pass left its carry in the spare row
        kept = self.home.read(slots, jnp.where(last, self.spare, self.row(parts.top)))
        initial = (parts.top == 0) & ~last
        carry = [lax.select(initial, first, later) for first, later in zip(self.init, kept)]
        at = jnp.where(last, unit, parts.starts[parts.top])
        mean = self.plan.advances_a_turn
        carry, _, slots, parts = self.advance(unit, at, carry, [], slots, parts, mean=mean)
        ended = parts.starts[parts.top] == unit
        return carry, slots, parts._replace(top=jnp.maximum(parts.top - ended, 0))


class Home:
    """Where kept carries lie: in device memory, or in the host's."""

    def __init__(self, carry: Action, leaves: Sequence[Any]) -> None:
        self.away = carry.on_host
        self.leaves = leaves  # a carry's abstract values

    def buffer(self, value: Any, count: int, operands: Operands) -> Any:
        """Returns room for `count` carries like one of a scan's; made by broadcasting, which works for random keys
        too.
        """
        if not self._goes(value):
            return lax.broadcast(value, (count,))
        return host_rows(value, count, [x for x in itertools.chain(*operands) if is_inexact(x)])

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
        """Whether a leaf of the carry lies on the host."""
        return self.away and goes_to_host(leaf)


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
