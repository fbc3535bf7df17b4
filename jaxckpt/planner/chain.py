"""The planner's model of a program: a chain of stages, the candidates of each, and what a solution costs.

A solution is a list of items that cover the stages in order. A `Keep` runs a segment (consecutive stages) once, and
keeps what one of the segment's candidates says and what later stages use. A `Drop` runs a segment and keeps only what
later stages use; when the backward pass comes to it, the segment runs again under a solution of its own. `Drop` is
the nested checkpoint of Rotor's recursion (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains",
arXiv:1911.13214, case C1), `Keep` with several candidates that of Rockmate (Zhao et al. 2023, arXiv:2307.01236).

Memory is counted as XLA lays it out: temporaries live in the buffers of gradients that are not written yet, so a
gradient counts from the time that it is written.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Candidate:
    """One way to run a stage, a segment or a loop: what it keeps for its backward pass, and what that costs.

    Solvers read `kept`, `time` and `work` alone.

    Attributes:
      kept: bytes kept, besides the segment's inputs and what later stages use of it. Less than 0 where some of the
        inputs are kept in another form, or on the host.
      time: seconds of the recomputation that its backward pass begins with, weighed as `planner.costs.Time.effort`.
        Solvers minimise it. All times of a chain are weighed in this way.
      work: bytes that its recomputation and backward pass need at once; `kept`, the inputs, and gradients that later
        stages have written are not counted. Less than 0 where what is counted so is no longer there by then.
      seconds: the same seconds by the target's rates, not weighed.
      how: what a plan says of it: the actions of values, or the schedule of a loop; None where it is left to JAX as it
        is.
      link: seconds of the link to the host, in both directions; not counted in `time` and `seconds`, for other work
        hides them.
      waits: seconds of the link that nothing hides, in both directions; counted in `time` and `seconds`.
      host: bytes kept in host memory.
      unseen: seconds that a trace of the step does not show; counted in `time` and `seconds`.
    """

    kept: int
    time: float
    work: int
    seconds: float = 0.0
    how: Any = field(default=None, hash=False)
    link: float = 0.0
    host: int = 0
    waits: float = 0.0
    unseen: float = 0.0

    @property
    def on_host(self) -> bool:
        """Whether it has something in host memory, or moves something there."""
        return self.link > 0 or self.host > 0


@dataclass(frozen=True)
class Segment:
    """Stages start..stop taken as one.

    Attributes:
      forward_time: seconds of one forward run, weighed as `Candidate.time`.
      forward_work: bytes that one forward run needs at once, its outputs included, its inputs not.
      gradient: bytes of gradients that its backward pass writes, of arguments that no later stage has written one of.
      candidates: ways to run it, by what they keep.
    """

    forward_time: float
    forward_work: int
    gradient: int
    candidates: tuple[Candidate, ...]


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
      segments: (start, stop) -> Segment, one for each (start, stop). Single stages have candidates. Longer segments may
        have some: those can drop the inputs of inner stages too. A segment without candidates says what it takes to run
        it.
      carried: the values between stages, those that skip some among them.
    """

    length: int
    segments: Mapping[tuple[int, int], Segment] = field(hash=False)
    carried: tuple[Carried, ...] = ()

    def segment(self, start: int, stop: int) -> Segment:
        """Returns the stages start..stop as one."""
        return self.segments[start, stop]

    def candidate(self, item: Keep) -> Candidate:
        """Returns the candidate that a solution's item takes."""
        return self.segments[item.start, item.stop].candidates[item.candidate]

    def output(self, start: int, j: int, stop: int) -> int:
        """Returns the bytes that the stages start..j make and j..stop use: what is kept of start..j while start..stop
        runs.
        """
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
    def keepable(self) -> tuple[tuple[tuple[int, Segment], ...], ...]:
        """For each start the (stop, segment) that have candidates."""
        found: list[list[tuple[int, Segment]]] = [[] for _ in range(self.length)]
        for (start, stop), segment in sorted(self.segments.items()):
            if segment.candidates:
                found[start].append((stop, segment))
        return tuple(tuple(each) for each in found)


@dataclass(frozen=True)
class Keep:
    """Stages start..stop, run once, with what candidate number `candidate` keeps.

    Attributes:
      left: whether no region is made of them: what they keep is left to JAX. No solver says so.
    """

    start: int
    stop: int
    candidate: int
    left: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class Drop:
    """Stages start..stop, run, dropped, and run again under `again` when the backward pass comes to them."""

    start: int
    stop: int
    again: tuple[Keep | Drop, ...]


Solution = tuple[Keep | Drop, ...]


@dataclass(frozen=True)
class SolutionCost:
    """What a solution costs.

    Attributes:
      time: seconds of recomputation, weighed as `Candidate.time`.
      peak: bytes at the peak, besides the program's arguments.
    """

    time: float
    peak: int


class Phase(enum.Enum):
    """When an item of a solution runs: forward; forward again, within a `Drop`; backward, what it recomputes first. Or
    it is done, and its gradients are written.
    """

    FORWARD = "forward"
    AGAIN = "again"
    BACKWARD = "backward"
    DONE = "done"


Moment = tuple[int, int, Phase]
"""The run of an item: its first stage, the one after its last, and when."""


def cost(chain: Chain, solution: Sequence[Keep | Drop]) -> SolutionCost:
    """Simulates a solution: the forward pass, then the backward pass from the last item to the first. Solvers are held
    against this.
    """
    peak = max((size for _, _, size in _walk(chain, solution, chain.length, 0, 0, Phase.FORWARD)), default=0)
    return SolutionCost(_time(chain, solution), peak)


def moments(chain: Chain, solution: Sequence[Keep | Drop]) -> dict[Moment, int]:
    """Returns the most bytes that a solution needs at each moment, besides the program's arguments; those of a `Drop`'s
    backward run are those of its items.
    """
    found: dict[Moment, int] = {}
    for item, phase, size in _walk(chain, solution, chain.length, 0, 0, Phase.FORWARD):
        key = item.start, item.stop, phase
        found[key] = max(found.get(key, 0), size)
    return {key: size for key, size in found.items() if key[2] is not Phase.DONE}


def _walk(
    chain: Chain, items: Sequence[Keep | Drop], stop: int, live: int, written: int, phase: Phase
) -> Iterator[tuple[Keep | Drop, Phase, int]]:
    """Yields (item, phase, bytes) for `items`, which end at stage `stop`, in the order in which they run, with `live`
    bytes kept before them and `written` bytes of gradients of later stages.
    """
    held = []
    for item in items:
        kept = chain.output(item.start, item.stop, stop)
        kept += chain.candidate(item).kept if isinstance(item, Keep) else 0
        yield item, phase, live + max(chain.segment(item.start, item.stop).forward_work, kept) + written
        held.append(live)
        live += kept
    for item, before in zip(reversed(items), reversed(held)):
        if isinstance(item, Keep):
            candidate = chain.candidate(item)
            yield item, Phase.BACKWARD, before + candidate.kept + candidate.work + written
        else:
            yield from _walk(chain, item.again, item.stop, before, written, Phase.AGAIN)
        written += chain.segment(item.start, item.stop).gradient
        yield item, Phase.DONE, before + written


def _time(chain: Chain, items: Sequence[Keep | Drop]) -> float:
    """Returns the seconds of recomputation, weighed as `Candidate.time`."""
    time = 0.0
    for item in reversed(items):
        if isinstance(item, Keep):
            time += chain.candidate(item).time
        else:
            time += chain.segment(item.start, item.stop).forward_time + _time(chain, item.again)
    return time


def covers(chain: Chain, solution: Sequence[Keep | Drop]) -> bool:
    """Whether a solution covers every stage once, in order, also inside each Drop, with candidates that there are.
    Takes anything: a solver may be the user's.
    """
    return isinstance(solution, Sequence) and _covers(chain, solution, 0, chain.length)


def _covers(chain: Chain, items: Sequence[Keep | Drop], start: int, stop: int) -> bool:
    at = start
    for item in items:
        if not isinstance(item, Keep | Drop) or item.start != at or (item.start, item.stop) not in chain.segments:
            return False
        if isinstance(item, Drop):
            if not _covers(chain, item.again, item.start, item.stop):
                return False
        elif item.candidate not in range(len(chain.segment(item.start, item.stop).candidates)):
            return False
        at = item.stop
    return at == stop


def unseen_seconds(chain: Chain, solution: Sequence[Keep | Drop]) -> float:
    """Returns the seconds of a solution that a trace of the step does not show."""
    return sum(chain.candidate(item).unseen for _, item in items(solution) if isinstance(item, Keep))


def items(solution: Sequence[Keep | Drop], depth: int = 0) -> Iterator[tuple[int, Keep | Drop]]:
    """Yields (depth, item) for every item, those inside a Drop after it."""
    for item in solution:
        yield depth, item
        if isinstance(item, Drop):
            yield from items(item.again, depth + 1)
