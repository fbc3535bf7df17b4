"""A scan to be run: its body, its operands, and how iterations and segments of it are checkpointed. What schedules of
loops work on.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.actions import SAVE, Action
from jaxckpt.core.graph import aval_bytes, graph_of

Values = list[Any]
Iteration = Callable[[Values, Values], tuple[Values, Values]]
"""(carry, x) -> (carry, y), lists of arrays: one iteration, or a segment of them."""


@dataclass(frozen=True, eq=False)
class ScanBody:
    """The body of a scan.

    Attributes:
      jaxpr: open, without constants of its own; inputs are constants, carries and xs, results are carries and ys.
      consts, carries, xs: how many inputs of each kind.
      length: iterations of the scan.
      reverse: whether the last row of xs comes first.
    """

    jaxpr: Any
    consts: int
    carries: int
    xs: int
    length: int
    reverse: bool

    @property
    def carry_avals(self) -> list[Any]:
        """The carries' abstract values."""
        return [var.aval for var in self.jaxpr.invars[self.consts : self.consts + self.carries]]

    @property
    def y_avals(self) -> list[Any]:
        """One row of each of the ys."""
        return [var.aval for var in self.jaxpr.outvars[self.carries :]]

    @property
    def carry_bytes(self) -> int:
        """Bytes of one carry, all leaves."""
        return sum(map(aval_bytes, self.carry_avals))

    @property
    def flops(self) -> int:
        """FLOPs of one iteration."""
        return graph_of(_compat.close_jaxpr(self.jaxpr, ())).flops

    def run(self, consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        """Runs the body once: the next carry and the row of ys."""
        out = _compat.eval_jaxpr(self.jaxpr, [], *consts, *carry, *x)
        return out[: self.carries], out[self.carries :]

    def row(self, i: Any) -> Any:
        """Returns the row of xs and ys that iteration i reads and writes."""
        return self.length - 1 - i if self.reverse else i


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanRun(abc.ABC):
    """A scan with its operands, to be run by a schedule.

    Attributes:
      body: its body.
      consts, init, xs: its operands: what all iterations read, the carry before the first, the rows.
      unroll: as of `lax.scan`, for loops over single iterations.
      carry: what becomes of the carries that are kept: SAVE, OFFLOAD or an action that changes their form.
      depth: how many segments it lies in.
    """

    body: ScanBody
    consts: Values
    init: Values
    xs: Values
    unroll: int | bool = 1
    carry: Action = SAVE
    depth: int = 0

    @abc.abstractmethod
    def iteration(self, actions: Mapping[int, Action] | None, *, alone: bool = False) -> Iteration:
        """Returns one iteration: under a checkpoint that keeps what the actions say, or with None left to JAX as it
        stands.

        Args:
          actions: index of a value that the body computes -> its action.
          alone: whether no loop is around it, so that the compiler has to be kept from merging forward and backward
            pass.
        """

    @abc.abstractmethod
    def segment(self, run: Iteration, *, alone: bool = False) -> Iteration:
        """Returns several iterations under a checkpoint of which only the carry that they start from is kept; `alone`
        as of `iteration`.
        """

    def segment_from(
        self, within: Callable[[Self], Iteration], actions: Mapping[int, Action], *, alone: bool = False
    ) -> Iteration:
        """Returns several iterations under a checkpoint, of which the carry that they start from is kept as the actions
        say.

        Args:
          within: returns these iterations of a scan.
          actions: index of a carry, as an input of the body -> its action.
          alone: as of `iteration`.

        Raises:
          ArgumentError: the scan knows no values by their numbers.
        """
        hint = "Actions by the numbers of values are for plans; in jaxckpt.scan, use carry=."
        raise ArgumentError("schedule", "one without actions", dict(actions), hint)

    @abc.abstractmethod
    def keeping(self, actions: Mapping[int, Action] | None) -> tuple[Self, list[Any] | None]:
        """Returns the scan with a body in which calls are written out, and the body's variables that the actions keep;
        None for no wish.

        Raises:
          ArgumentError, PlanMismatchError: an action keeps a value as something else, or elsewhere.
        """

    def loop(self, f: Iteration) -> tuple[Values, Values]:
        """Runs all iterations in one loop, `f` being one of them."""
        body = self.body
        out = lax.scan(f, self.init, self.xs, length=body.length, reverse=body.reverse, unroll=self.unroll)
        return out  # type: ignore[no-any-return]

    def over(self, length: int, init: Values, xs: Values, *, deeper: bool = False) -> Self:
        """Returns the scan over so many iterations with another carry and other rows; `deeper` for those of a
        segment.
        """
        return replace(self, body=replace(self.body, length=length), init=init, xs=xs, depth=self.depth + deeper)

    def rows(self, counts: Sequence[int]) -> list[Values]:
        """Returns the rows of consecutive iterations, so many each; the counts add up to the length."""
        if len(counts) == 1:
            return [self.xs]
        found, done, length = [], 0, self.body.length
        for count in counts:
            start = length - done - count if self.body.reverse else done
            found.append([lax.slice_in_dim(x, start, start + count) for x in self.xs])
            done += count
        return found

    def joined(self, stacked: Sequence[Values]) -> Values:
        """Returns ys of consecutive iterations as those of all."""
        if len(stacked) == 1:
            return stacked[0]
        order = stacked[::-1] if self.body.reverse else stacked
        return [_joined(each) for each in zip(*order)]


def _joined(parts: Sequence[Any]) -> Any:
    """Returns the rows of several arrays in one, of their type: to join arrays makes a weak type strong."""
    whole, aval = jax.numpy.concatenate(parts), jax.typeof(parts[0])
    return _compat.typed(whole, aval) if aval.weak_type else whole
