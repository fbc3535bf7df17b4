"""Kept carries on two levels of slots: rows of a buffer in device memory and rows of a buffer in host memory, as the
tables of `two_levels.turns` say.

Loops whose numbers of turns come from the tables move carries over the host's link, so a carry moves only where the
schedule says so. The initial carry lies on the host with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxckpt.actions import OFFLOAD, SAVE, Action
from jaxckpt.core import turns
from jaxckpt.core.scans import ScanBody, Values
from jaxckpt.schedules.body import zeros
from jaxckpt.schedules.carries import Carries, Home, KeptCarries, Operands
from jaxckpt.schedules.optimum import Binomial
from jaxckpt.schedules.two_levels import HAND, TwoLevelRuns
from jaxckpt.schedules.two_levels import turns as tables


def carries_of(body: ScanBody, plan: Binomial, carry: Action, operands: Operands) -> KeptCarries:
    """Returns what keeps the carries of a scan."""
    if not isinstance(plan, TwoLevelRuns):
        return Carries(body, plan, carry, operands)
    return HostCarries(body, plan, operands)


class HostCarries(KeptCarries):
    """Carries in two buffers: on the device and on the host."""

    plan: TwoLevelRuns

    def __init__(self, body: ScanBody, plan: TwoLevelRuns, operands: Operands) -> None:
        super().__init__(body, plan, operands)
        self.here, self.there = Home(SAVE, body.carry_avals), Home(OFFLOAD, body.carry_avals)
        self.spare = plan.placed.device_rows  # the row of the carry that the forward pass ends with
        self.turns = tables(plan.placed)
        self.parts = ()

    def forward(self) -> tuple[tuple[Values, Values], Values]:
        """Runs all iterations; returns the results and the slots: buffers on the device, then those on the host."""
        plan = self.plan
        device = [self.here.buffer(value, self.spare + 1, self.operands) for value in self.init]
        host = [self.there.buffer(value, plan.placed.host_rows, self.operands) for value in self.init]
        ys = [zeros(aval, self.body.length) for aval in self.body.y_avals]
        begun = (0, int(self.turns.host[0])), (0, int(self.turns.device[0]))
        state = (self.init, ys, device, host)
        carry, ys, device, host = self._advance(jnp.int32(0), plan.units - 1, begun, state, mean=plan.units - 1)
        device = self.here.write(device, carry, self.spare)
        return self.iterate(carry, (plan.units - 1) * plan.run, plan.last, ys), [*device, *host]

    def last(self, slots: Values) -> Values:
        """Returns the carry at the start of the last run."""
        return self.here.read(slots[: self.body.carries], self.spare)

    def restore(self, i: Any, slots: Values, parts: Any) -> tuple[Values, Values, Any]:
        """Returns the carry at the start of adjoint i's run, and the slots after obtaining it."""
        device, host = slots[: self.body.carries], slots[self.body.carries :]
        source, at, of_host, of_device = (
            jnp.asarray(table) for table in (self.turns.source, self.turns.at, self.turns.host, self.turns.device)
        )
        place = source[i]
        away = place < 0
        carry = self.here.read(device, jnp.where(away | (place == HAND), self.spare, place))
        read_there = lambda _, carry: self.there.read(host, ~place)
        carry = lax.fori_loop(0, away.astype(jnp.int32), read_there, carry)
        begun = (of_host[i], of_host[i + 1]), (of_device[i], of_device[i + 1])
        to, mean = self.plan.units - 1 - i, self.plan.advances_a_turn
        carry, _, device, host = self._advance(at[i], to, begun, (carry, [], device, host), mean=mean)
        return carry, [*device, *host], parts

    def _advance(
        self,
        at: Any,
        to: Any,
        events: Sequence[tuple[Any, Any]],
        state: tuple[Values, Values, Values, Values],
        *,
        mean: float,
    ) -> tuple[Values, Values, Values, Values]:
        """Takes the carry of run `at` to run `to` and stores carries on the way.

        Args:
          at, to: runs.
          events: the first of the events that store on the host and the one after the last, and those for the device.
          state: the carry, the ys, the buffers on the device and those on the host.
          mean: how many runs it takes the carry through, on average.
        """
        to_host, to_device = jnp.asarray(self.turns.to_host), jnp.asarray(self.turns.to_device)
        carry, ys, device, host = state

        def one(unit: Any, both: tuple[Values, Values]) -> tuple[Values, Values]:
            return self.iterate(both[0], unit * self.plan.run, self.plan.run, both[1])

        def keep(home: Home, table: Any, event: Any, state: Any) -> Any:
            at, carry, ys, slots = state
            stop, slot = table[2 * event], table[2 * event + 1]
            carry, ys = turns.loop(at, stop, one, (carry, ys), 0.0)  # counted by the last loop
            return stop, carry, ys, home.write(slots, carry, slot)

        at = jnp.asarray(at, jnp.int32)
        for home, table, (first, end) in ((self.there, to_host, events[0]), (self.here, to_device, events[1])):
            slots = host if home is self.there else device
            event = lambda event, state, home=home, table=table: keep(home, table, event, state)
            at, carry, ys, slots = lax.fori_loop(first, end, event, (at, carry, ys, slots))
            host, device = (slots, device) if home is self.there else (host, slots)
        carry, ys = turns.loop(at, to, one, (carry, ys), mean)
        return carry, ys, device, host
