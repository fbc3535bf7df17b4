"""The planner's model of a program: a chain of stages, each with choices of what it keeps, and what a schedule of them costs.

A schedule is a list of items that cover the stages in order. A `Keep` runs a span of stages once and keeps what one of the span's options
says, besides what later stages use. A `Drop` runs a span and keeps nothing of it but that; when the backward pass comes to it, the span runs
again under a schedule of its own. `Drop` is the nested checkpoint of Rotor's recursion (Beaumont et al. 2019, "Optimal checkpointing for
heterogeneous chains", arXiv:1911.13214, case C1), `Keep` with several options a stage that of Rockmate (Zhao et al. 2023, arXiv:2307.01236).

Memory is counted as XLA lays it out: temporaries live in the buffers of gradients that are not written yet, so a gradient counts from the time
that it is written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Option:
    """One choice of what a span keeps for its backward pass.

    Attributes:
      kept: bytes kept, besides the span's inputs and what later stages use of it.
      time: seconds of recomputation that its backward pass begins with.
      work: bytes that its recomputation and backward pass need at once, besides `kept`, inputs and gradients written before.
      label: what the caller knows it by.
    """

    kept: int
    time: float
    work: int
    label: int = 0


@dataclass(frozen=True)
class Span:
    """Stages start..stop taken as one.

    Attributes:
      forward_time: seconds of one forward run.
      forward_work: bytes that one forward run needs at once, its outputs included, its inputs not.
      gradient: bytes of gradients that its backward pass writes, of arguments that no later stage has written one of.
      options: choices of what it keeps.
    """

    forward_time: float
    forward_work: int
    gradient: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Carried:
    """A value that a stage makes and later stages use.

    Attributes:
      bytes: its size.
      made: the stage that makes it.
      uses: the stages that use it, all later, rising.
    """

    bytes: int
    made: int
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A program as stages 0..length.

    Attributes:
      length: how many stages.
      spans: (start, stop) -> Span. Every single stage is there; longer ones may be, with options: there inputs of inner stages may be dropped
        too. Those without options say what it takes to run them; there is one for each (start, stop).
      carried: the values between stages, those that skip some among them.
    """

    length: int
    spans: Mapping[tuple[int, int], Span] = field(hash=False)
    carried: tuple[Carried, ...] = ()

    def span(self, start: int, stop: int) -> Span:
        """Returns the stages start..stop as one."""
        return self.spans[start, stop]

    def output(self, start: int, j: int, stop: int) -> int:
        """Returns the bytes that the stages start..j make and j..stop use: what is kept of start..j while start..stop runs."""
        return int(self.outputs[j, start, stop])

    @functools.cached_property
    def outputs(self) -> np.ndarray:
        """`output` of every (j, start, stop), int64[length + 1, length + 1, length + 1]."""
        tables = np.zeros((self.length + 1, self.length + 1, self.length + 1), np.int64)
        for value in self.carried:
            at = value.made + 1
            for use in value.uses:
                tables[at : use + 1, value.made, use + 1] += value.bytes  # for these j `use` is the next one
                at = use + 1
        # start <= made, stop > use
        return np.cumsum(np.cumsum(tables[:, ::-1], axis=1)[:, ::-1], axis=2)

    @functools.cached_property
    def keepable(self) -> tuple[tuple[tuple[int, Span], ...], ...]:
        """For each start the (stop, span) that have options."""
        found: list[list[tuple[int, Span]]] = [[] for _ in range(self.length)]
        for (start, stop), span in sorted(self.spans.items()):
            if span.options:
                found[start].append((stop, span))
        return tuple(tuple(each) for each in found)


@dataclass(frozen=True)
class Keep:
    """Stages start..stop, run once, with what option number `option` keeps."""

    start: int
    stop: int
    option: int


@dataclass(frozen=True)
class Drop:
    """Stages start..stop, run, dropped, and run again under `again` when the backward pass comes to them."""

    start: int
    stop: int
    again: tuple[Keep | Drop, ...]


Schedule = tuple[Keep | Drop, ...]


@dataclass(frozen=True)
class Cost:
    """What a schedule costs: seconds of recomputation, and bytes at the peak besides the program's arguments."""

    time: float
    peak: int


def cost(chain: Chain, schedule: Sequence[Keep | Drop]) -> Cost:
    """Simulates a schedule: the forward pass, then the backward pass from the last item to the first. Solvers are held against this."""
    return _run(chain, tuple(schedule), chain.length, 0, 0)


def _run(chain: Chain, items: Schedule, stop: int, live: int, written: int) -> Cost:
    """Cost of `items`, which end at stage `stop`, with `live` bytes kept before them and `written` bytes of gradients of later stages."""
    peak, time = live + written, 0.0
    held = []
    for item in items:
        span = chain.span(item.start, item.stop)
        kept = chain.output(item.start, item.stop, stop) + (
            span.options[item.option].kept if isinstance(item, Keep) else 0
        )
        peak = max(peak, live + span.forward_work + written, live + kept + written)
        held.append(live)
        live += kept
    for item, before in zip(reversed(items), reversed(held)):
        span = chain.span(item.start, item.stop)
        if isinstance(item, Keep):
            option = span.options[item.option]
            time += option.time
            peak = max(peak, before + option.kept + option.work + written)
        else:
            inner = _run(chain, item.again, item.stop, before, written)
            time += span.forward_time + inner.time
            peak = max(peak, inner.peak)
        written += span.gradient
        peak = max(peak, before + written)
    return Cost(time, peak)


def covers(chain: Chain, schedule: Sequence[Keep | Drop]) -> bool:
    """Whether a schedule covers every stage once, in order, also inside each Drop."""
    return _covers(tuple(schedule), 0, chain.length)


def _covers(items: Schedule, start: int, stop: int) -> bool:
    at = start
    for item in items:
        if item.start != at or (isinstance(item, Drop) and not _covers(item.again, item.start, item.stop)):
            return False
        at = item.stop
    return at == stop


def items(schedule: Sequence[Keep | Drop], depth: int = 0) -> Iterator[tuple[int, Keep | Drop]]:
    """Yields (depth, item) for every item, those inside a Drop after it."""
    for item in schedule:
        yield depth, item
        if isinstance(item, Drop):
            yield from items(item.again, depth + 1)
