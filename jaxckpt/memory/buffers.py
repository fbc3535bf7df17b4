"""The buffers of a compiled program: which there are, where they are, and when they are alive. `dump` reads them.

Live bytes are counted as follows. An allocation of the program's interface (argument, output, constant) is alive for
the whole run, because the caller holds it. A temporary is alive from the instruction that defines it to the last
instruction that reads it. Values that reuse the place of an operand (SHARE_WITH in the trace) count once. Padding and
holes between buffers do not count. So the maximum of the timeline is at most the peak that the compiler reports;
`Timeline` says how close they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxckpt.core.units import format_bytes
from jaxckpt.memory.collectives import CompiledCollective


@dataclass(frozen=True)
class Buffer:
    """One buffer of a compiled program.

    Attributes:
      name: the HLO instruction that defines its content.
      bytes: its size.
      shape: element type and dimensions as XLA writes them, such as "f32[512,256]".
      operation: JAX's name of the operation, such as "jit(loss)/jvp()/dot_general"; for an argument, its name.
      source: "file.py:line" of the user's code that made it, or "" if the compiler made it.
      kind: "argument", "output", "temporary" or "constant". An argument whose buffer is donated to an output is an
        argument.
    """

    name: str
    bytes: int
    shape: str
    operation: str
    source: str
    kind: str

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{format_bytes(self.bytes):>10}  {self.kind:<9}  {self.shape}  {self.operation or self.name}{where}"


@dataclass(frozen=True)
class Timeline:
    """Live bytes of device memory over the schedule of a compiled program.

    `live_bytes[i]` bytes are live while the instruction at schedule position `positions[i]` runs; `labels[i]` is its
    operation. The body of a loop is in the schedule once, just before the loop.

    The end of a value is known up to the distance to the next allocation. Padding and holes between buffers do not
    count. The maximum is within 1% of the peak of the report on CPU, CUDA and TPU, for programs of at least a few MiB;
    tests check that.

    A TPU has two memories, the HBM and the vector memory on the chip (v4: common memory). The reported peak is that of
    the memory whose temporaries need more, and so is this timeline: HBM for any program that fills a chip, the vector
    memory for small programs.
    """

    positions: tuple[int, ...]
    live_bytes: tuple[int, ...]
    labels: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once."""
        return max(self.live_bytes, default=0)

    @property
    def peak_position(self) -> int:
        """The first index into `positions` at which the most bytes are live."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    def __str__(self) -> str:
        if not self.live_bytes:
            return "no instructions"
        bars, width = "▁▂▃▄▅▆▇█", min(72, len(self.live_bytes))
        edges = [len(self.live_bytes) * i // width for i in range(width + 1)]
        columns = [max(self.live_bytes[a:b]) for a, b in pairwise(edges)]
        line = "".join(bars[round(c / max(self.peak_bytes, 1) * (len(bars) - 1))] for c in columns)
        return f"{line}\npeak {format_bytes(self.peak_bytes)} at {self.labels[self.peak_position]}"


@dataclass(frozen=True)
class Lifetime:
    """A buffer, with the first and the last position of the schedule at which it is live, both included."""

    first: int
    last: int
    buffer: Buffer


def live_bytes(lifetimes: Iterable[Lifetime], length: int) -> list[int]:
    """Returns the live bytes at each of `length` positions."""
    change = [0] * (length + 1)
    for life in lifetimes:
        change[life.first] += life.buffer.bytes
        change[life.last + 1] -= life.buffer.bytes
    return list(accumulate(change))[:-1]


@dataclass(frozen=True)
class Space:
    """The buffers of one memory.

    Attributes:
      name: what is in it, in words.
      lifetimes: its buffers; those of the program's interface are live at every position.
    """

    name: str
    lifetimes: tuple[Lifetime, ...]


@dataclass(frozen=True)
class Assignment:
    """A buffer assignment: the buffers that are alive for the whole run, the temporaries, and the schedule.

    Attributes:
      standing: buffers of device memory that are alive for the whole run: arguments, outputs, constants.
      main: temporaries in the device's main memory.
      on_chip: temporaries in a TPU's vector memory (v4: common memory).
      labels: the operation at each position of the schedule.
      host_bytes: bytes of all allocations in host memory.
      argument_bytes, output_bytes: bytes of device memory for arguments and for results.
      alias_bytes: bytes of arguments that results are written to, counted in both.
      temp_bytes: bytes of device memory for temporaries, with the gaps between them.
      peak_bytes: XLA's own figure of the most device memory in use at once, of the memory whose temporaries need more.
        It is that of `timeline`, but for some programs with branches for a TPU, of which the order is not known.
      host: buffers in host memory.
      collectives: what devices send to one another.
    """

    standing: tuple[Buffer, ...]
    main: tuple[Lifetime, ...]
    on_chip: tuple[Lifetime, ...]
    labels: tuple[str, ...]
    host_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    host: tuple[Lifetime, ...] = ()
    collectives: tuple[CompiledCollective, ...] = ()

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The live bytes at each position of the schedule; for a TPU, in the memory whose temporaries need more."""
        return self._timeline(self.temporaries)

    @functools.cached_property
    def temporaries(self) -> tuple[Lifetime, ...]:
        """The temporaries that `timeline` counts."""
        return max(self.main, self.on_chip, key=lambda lifetimes: self._timeline(lifetimes).peak_bytes)

    @property
    def main_peak_bytes(self) -> int:
        """The most bytes live at once in the device's main memory."""
        return self._timeline(self.main).peak_bytes

    @property
    def on_chip_bytes(self) -> int:
        """The bytes of the timeline's peak that are in a TPU's vector memory: on the chip, not in HBM."""
        standing = sum(buffer.bytes for buffer in self.standing)
        return self.timeline.peak_bytes - standing if self.temporaries is self.on_chip else 0

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The buffers of each memory. First those that `timeline` counts; then a TPU's other memory, and the host's, if
        anything is in them.
        """
        whole = tuple(Lifetime(0, len(self.labels) - 1, buffer) for buffer in self.standing) if self.labels else ()
        main, chip = Space("main memory", (*whole, *self.main)), Space("memory on the chip", self.on_chip)
        if self.temporaries is not self.main:
            main, chip = Space("arguments, outputs and memory on the chip", (*whole, *self.on_chip)), main
        return (main, *(space for space in (chip, Space("host memory", self.host)) if space.lifetimes))

    def live(self, position: int) -> tuple[Buffer, ...]:
        """Returns the buffers live at a position of the schedule, largest first."""
        there = [life.buffer for life in self.temporaries if life.first <= position <= life.last]
        return tuple(sorted((*self.standing, *there), key=lambda buffer: -buffer.bytes))

    def largest(self, count: int) -> tuple[Buffer, ...]:
        """Returns the largest `count` buffers live at the peak, largest first."""
        return self.live(self.timeline.peak_position)[:count]

    def _timeline(self, lifetimes: tuple[Lifetime, ...]) -> Timeline:
        base = sum(buffer.bytes for buffer in self.standing)
        live = tuple(base + moving for moving in live_bytes(lifetimes, len(self.labels)))
        return Timeline(tuple(range(len(live))), live, self.labels)
