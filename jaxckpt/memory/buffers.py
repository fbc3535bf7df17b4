"""Reads XLA's buffer assignment: which buffers a program has, where they are, and when they are alive.

The compiler can write its final program, an `HloProto`, to a folder (`report.measure` makes it do so). It has the
scheduled program and the buffer assignment: the allocations, the values in each allocation, and the trace of the heap
simulator, which says at which instructions the life of a value begins and ends. The timeline of live bytes and the
names of the largest buffers come from these messages, in the same way for CPU, CUDA and TPU.

The messages are defined in xla/service/hlo.proto and xla/xla_data.proto of https://github.com/openxla/xla; `wire` reads
them. They are not a public interface: the number of a field may change, and a missing field reads as 0. So the messages
are checked against each other: see `_check`.

Live bytes are counted as follows. An allocation of the program's interface (argument, output, constant) is alive for
the whole run, because the caller holds it. A temporary is alive from the instruction that defines it to the last
instruction that reads it. Values that reuse the place of an operand (SHARE_WITH in the trace) count once. Padding and
holes between buffers do not count. So the maximum of the timeline is at most the peak that the compiler reports;
`Timeline` says how close they are.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from jaxckpt import _compat
from jaxckpt._errors import UnreadableDumpError
from jaxckpt.core.units import format_bytes
from jaxckpt.memory import collectives
from jaxckpt.memory.collectives import CompiledCollective
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.wire import Message

# Memory spaces, the "colours" of XLA's buffers. 5 is host memory on all platforms (xla/layout.h:
# Layout::kHostMemorySpace). On TPUs the others are on the chip: the vector memory (VMEM) or, on v4, the common memory
# (CMEM), and some with a few bytes of semaphores and scalars. On GPUs, 1 is main memory that collectives can reach.
_MAIN, _HOST = 0, 5


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
        change = [0] * (len(self.labels) + 1)
        for life in lifetimes:
            change[life.first] += life.buffer.bytes
            change[life.last + 1] -= life.buffer.bytes
        base = sum(buffer.bytes for buffer in self.standing)
        live = [base + moving for moving in accumulate(change)][:-1]
        return Timeline(tuple(range(len(live))), tuple(live), self.labels)


# -------------------------------------------------------------------------------------------------------------- reading
# The numbers of the fields that are read, for each message.


class _Hlo:  # HloProto
    module, assignment = 1, 3


class _Module:  # HloModuleProto
    computations, entry_id, schedule, frames = 3, 6, 7, 17


class _Computation:  # HloComputationProto
    instructions, id, root_id = 2, 5, 6


class _Instruction:  # HloInstructionProto
    name, opcode, shape, metadata, id, operand_ids, called_ids = 1, 2, 3, 7, 35, 36, 38


class _Metadata:  # OpMetadata
    operation, file, line, frame = 2, 3, 4, 15


class _Frames:  # StackFrameIndexProto, its FileLocation and StackFrame
    files, locations, frames = 1, 3, 4
    location_file, location_line = 1, 3
    frame_location, frame_parent = 1, 2


class _Assignment:  # BufferAssignmentProto
    values, allocations, traces = 1, 3, 4


class _Value:  # LogicalBufferProto and its Location
    id, size, place, colour = 1, 2, 3, 4
    place_index, place_instruction = 3, 4


class _Allocation:  # BufferAllocationProto and its Assigned
    index, size, thread_local, argument, output, colour, members, tuple, constant = 1, 2, 3, 5, 7, 8, 9, 11, 12
    member_value, member_offset, member_size = 1, 2, 3


class _Trace:  # HeapSimulatorTrace and its Event
    events = 1
    kind, value, instruction, shares_with = 1, 2, 4, 5
    alloc, free, share = 0, 1, 2


class _Shape:  # ShapeProto
    type, dimensions, parts = 2, 3, 4


def read(hlo: bytes, platform: str) -> Assignment:
    """Reads a serialised xla.HloProto that holds a scheduled module and its buffer assignment.

    Args:
      hlo: the bytes, as XLA dumps them ("...after_optimizations.hlo.pb").
      platform: name of the platform; memory spaces have different meanings on each.

    Raises:
      UnreadableDumpError: the bytes are something else, incomplete, or have another layout.
    """
    try:
        return _read(Message(hlo), platform)
    except (ValueError, LookupError, RecursionError) as error:
        raise UnreadableDumpError(
            f"The buffer assignment that XLA for {platform} dumped must be of the layout that this version of "
            f"jaxckpt reads. It is not: "
            f"{error if isinstance(error, ValueError) else repr(error)}. Install versions of jax that jaxckpt is "
            f"tested with."
        ) from error


def _read(proto: Message, platform: str) -> Assignment:
    program = _Program(proto.message(_Hlo.module))
    assignment = proto.message(_Hlo.assignment)
    values = {value.number(_Value.id): value for value in assignment.messages(_Assignment.values)}
    _check(program, assignment, values)
    places = _replay(assignment.messages(_Assignment.traces), program, values)

    standing: list[Buffer] = []
    offloaded: list[Lifetime] = []
    spaces: dict[int, list[Lifetime]] = {_MAIN: []}
    host = argument = output = alias = 0
    for allocation in assignment.messages(_Assignment.allocations):
        size, colour = allocation.number(_Allocation.size), allocation.number(_Allocation.colour)
        members = [values[m.number(_Allocation.member_value)] for m in allocation.messages(_Allocation.members)]
        if allocation.number(_Allocation.thread_local) or not members:  # scalars inside a kernel
            continue
        kind = _kind(allocation)
        inside = list({id(place): place for m in members if (place := places.get(m.number(_Value.id)))}.values())
        if colour == _HOST:
            host += size
            lives = _lives(program, inside, values, kind) if kind == "temporary" else []
            offloaded += lives or [Lifetime(0, len(program.labels) - 1, program.buffer(members[0], kind, size))]
            continue
        given, result = bool(allocation.number(_Allocation.argument)), bool(allocation.number(_Allocation.output))
        argument, output, alias = argument + size * given, output + size * result, alias + size * (given and result)
        if kind != "temporary":
            # Temporaries may be in the place of an output; the output itself is the value that is defined last.
            last = members[0] if kind == "argument" else max(members, key=program.position_of)
            standing.append(program.buffer(last, kind, size))
        else:
            lifetimes = spaces.setdefault(PLATFORMS[platform].space(colour), [])
            lifetimes += _lives(program, inside, values, kind)
            simulated = bool(inside) or not size or bool(allocation.number(_Allocation.tuple))
            _agree(simulated, "the dump does not say when a temporary is live")
    main = spaces.pop(_MAIN)
    on_chip = max(spaces.values(), key=lambda space: sum(life.buffer.bytes for life in space), default=[])
    return Assignment(
        tuple(standing),
        tuple(main),
        tuple(on_chip),
        program.labels,
        host,
        argument,
        output,
        alias,
        tuple(offloaded),
        collectives.read(proto.message(_Hlo.module), program.line),
    )


def _lives(program: _Program, places: list[_Place], values: Mapping[int, Message], kind: str) -> list[Lifetime]:
    """Returns the lifetimes of what is in some places: each is named after the widest value in it."""
    lives = []
    for place in places:
        values_there = (values[identity] for identity in place.values)
        widest = max(values_there, key=lambda v: (v.number(_Value.size), program.position_of(v)))
        buffer = program.buffer(widest, kind, widest.number(_Value.size))
        lives += [Lifetime(first, last, buffer) for first, last in place.intervals]
    return lives


def _check(program: _Program, assignment: Message, values: Mapping[int, Message]) -> None:
    """Raises ValueError if a buffer assignment contradicts itself or its program, so that it cannot have been read
    correctly.
    """
    for value in values.values():
        _agree(program.defines(value), "a value is defined by no instruction")
    _agree(program.arguments <= {program.instruction(value) for value in values.values()}, "a parameter has no value")
    held: set[int] = set()
    results = False
    for number, allocation in enumerate(assignment.messages(_Assignment.allocations)):
        _agree(allocation.number(_Allocation.index) == number, "allocations are not in order")
        size, colour = allocation.number(_Allocation.size), allocation.number(_Allocation.colour)
        given = False
        members = allocation.messages(_Allocation.members)
        _agree(bool(members) or not size, "an allocation holds nothing")
        for member in members:
            identity = member.number(_Allocation.member_value)
            value = values[identity]
            _agree(identity not in held, "a value is in two allocations")
            held.add(identity)
            _agree(value.number(_Value.colour) == colour, "a value is in another memory than its allocation")
            _agree(value.number(_Value.size) == member.number(_Allocation.member_size), "a value has two sizes")
            end = member.number(_Allocation.member_offset) + value.number(_Value.size)
            _agree(end <= size, "a value is larger than its allocation")
            given = given or program.is_argument(value)
        _agree(given == bool(allocation.number(_Allocation.argument)), "allocations and parameters do not agree")
        results = results or bool(allocation.number(_Allocation.output))
    _agree(held == values.keys(), "a value is in no allocation")
    _agree(results or not program.has_results, "no allocation is for the results")


def _agree(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _kind(allocation: Message) -> str:
    for number, kind in (
        (_Allocation.argument, "argument"),
        (_Allocation.constant, "constant"),
        (_Allocation.output, "output"),
    ):
        if allocation.number(number):
            return kind
    return "temporary"


@dataclass
class _Place:
    """Values that share a place, each in the place of an operand, with the first and last position at which any of them
    is live.
    """

    values: list[int] = field(default_factory=list)
    live: int = 0
    intervals: list[tuple[int, int]] = field(default_factory=list)


def _replay(traces: list[Message], program: _Program, values: Mapping[int, Message]) -> dict[int, _Place]:
    """Replays the heap simulator's events and returns the place of each value by the value's id.

    ALLOC and SHARE_WITH begin a value's life, and FREE ends it. The simulator goes through the schedule. At each
    instruction it first allocates, then frees. An event names the instruction that defines its value. So the time of an
    ALLOC is known, and the time of a FREE is between the two ALLOCs around it. The earlier time is taken, which changes
    no maximum.
    """
    places: dict[int, _Place] = {}
    for trace in traces:
        position = 0
        begun: set[int] = set()
        freed: set[int] = set()
        for event in trace.messages(_Trace.events):
            kind, value = event.number(_Trace.kind), event.number(_Trace.value)
            name = event.text(_Trace.instruction)
            _agree(name == program.definer(values[value]), "an event is of another instruction than its value")
            if kind == _Trace.free:
                _agree(value in begun, "a value is freed that was not live")
                freed.add(value)
                place = places[value]
                if place.live:  # a value from before a branch is freed in each branch
                    place.live -= 1
                    place.intervals[-1] = (place.intervals[-1][0], position)
                continue
            _agree(kind in (_Trace.alloc, _Trace.share), "an event is of an unknown kind")
            _agree(name in program.positions, "an event is of an instruction that never runs")
            position = program.positions[name]
            owner = value
            if kind == _Trace.share:
                owner = event.number(_Trace.shares_with)
                _agree(owner in begun, "a value shares a place that no value has")
            begun.add(value)
            place = places[value] = places.setdefault(owner, _Place())
            place.values.append(value)
            if not place.live:
                first = place.intervals.pop()[0] if place.intervals and place.intervals[-1][1] == position else position
                place.intervals.append((first, len(program.labels) - 1))  # until it is freed
            place.live += 1
        _agree(freed == begun, "a value is never freed")
    return places


class _Program:
    """The scheduled program: order, names, shapes and source lines of its instructions."""

    def __init__(self, module: Message) -> None:
        self._sources = _Sources(module.message(_Module.frames))
        self._computations = {c.number(_Computation.id): c for c in module.messages(_Module.computations)}
        # HloScheduleProto is a map from a computation's id to a message with the ids of its instructions.
        schedule = {
            entry.number(1): entry.message(2).numbers(1) for entry in module.message(_Module.schedule).messages(1)
        }
        self._instructions: dict[int, Message] = {}
        for identity, computation in self._computations.items():
            found = {i.number(_Instruction.id): i for i in computation.messages(_Computation.instructions)}
            _agree(
                sorted(found) == sorted(schedule.get(identity, found)),
                "a schedule is not of its computation's instructions",
            )
            self._instructions |= found
        _agree(schedule.keys() <= self._computations.keys(), "a scheduled computation is missing")
        for instruction in self._instructions.values():
            known = instruction.text(_Instruction.name) and instruction.message(_Instruction.shape).number(_Shape.type)
            _agree(bool(known), "an instruction has no name or no shape")
        _agree(module.number(_Module.entry_id) in schedule, "the entry computation has no schedule")
        entry = self._computations[module.number(_Module.entry_id)]
        self.arguments = {
            i.number(_Instruction.id)
            for i in entry.messages(_Computation.instructions)
            if i.text(_Instruction.opcode) == "parameter"
        }
        root = self._instructions[entry.number(_Computation.root_id)].message(_Instruction.shape)
        self.has_results = root.number(_Shape.type) != _TUPLE or bool(root.messages(_Shape.parts))
        order = list(self._flatten(module.number(_Module.entry_id), schedule, set()))
        names = [self._instructions[i].text(_Instruction.name) for i in order]
        self._order = {identity: position for position, identity in enumerate(order)}
        self.positions = {name: position for position, name in enumerate(names)}
        self.labels = tuple(self._operation(i) or name for i, name in zip(order, names))

    def _flatten(self, computation: int, schedule: dict[int, list[int]], seen: set[int]) -> Iterator[int]:
        # The order of XLA's HloLiveRange: what an instruction calls (a loop's condition, then its body) is just before
        # it.
        if computation in seen or computation not in schedule:
            return
        seen.add(computation)
        for identity in schedule[computation]:
            for called in reversed(self._instructions[identity].numbers(_Instruction.called_ids)):
                yield from self._flatten(called, schedule, seen)
            yield identity

    @staticmethod
    def instruction(value: Message) -> int:
        """Returns the id of the instruction that defines a value."""
        return value.message(_Value.place).number(_Value.place_instruction)

    def defines(self, value: Message) -> bool:
        """Returns whether an instruction of the program defines a value."""
        return self.instruction(value) in self._instructions

    def definer(self, value: Message) -> str:
        """Returns the name of the instruction that defines a value."""
        return self._instructions[self.instruction(value)].text(_Instruction.name)

    def is_argument(self, value: Message) -> bool:
        """Returns whether a value is an argument of the program, or a part of one."""
        return self.instruction(value) in self.arguments

    def position_of(self, value: Message) -> int:
        """Returns the position at which a value is defined, or -1 if that is outside the schedule."""
        return self._order.get(self.instruction(value), -1)

    def buffer(self, value: Message, kind: str, size: int) -> Buffer:
        """Returns the buffer that holds a value."""
        place = value.message(_Value.place)
        identity = place.number(_Value.place_instruction)
        instruction = self._instructions.get(identity, Message())
        shape = instruction.message(_Instruction.shape)
        for index in place.numbers(_Value.place_index):
            parts = shape.messages(_Shape.parts)
            shape = parts[index] if index < len(parts) else Message()
        source = next((line for m in self._metadata(identity) if (line := self._sources.line(m))), "")
        return Buffer(instruction.text(_Instruction.name), size, _shape(shape), self._operation(identity), source, kind)

    def line(self, metadata: Message) -> str:
        """Returns the source line, "file.py:12", that an instruction's metadata names; "" if they name none."""
        return self._sources.line(metadata)

    def _operation(self, identity: int) -> str:
        return next((name for m in self._metadata(identity) if (name := m.text(_Metadata.operation))), "")

    def _metadata(self, identity: int) -> Iterator[Message]:
        """Yields an instruction's metadata, then that of its fusion's root, then that of the instruction whose value it
        moves.
        """
        for _ in range(8):
            instruction = self._instructions.get(identity)
            if instruction is None:
                return
            yield instruction.message(_Instruction.metadata)
            for called in instruction.numbers(_Instruction.called_ids):
                computation = self._computations.get(called, Message())
                root = computation.number(_Computation.root_id)
                for inner in computation.messages(_Computation.instructions):
                    if inner.number(_Instruction.id) == root:
                        yield inner.message(_Instruction.metadata)
            operands = instruction.numbers(_Instruction.operand_ids)
            if not operands:
                return
            identity = operands[0]


class _Sources:
    """The source lines of a program, which has them in one table of stack frames."""

    def __init__(self, index: Message) -> None:
        self._files = index.texts(_Frames.files)
        self._locations = index.messages(_Frames.locations)
        self._frames = index.messages(_Frames.frames)

    def line(self, metadata: Message) -> str:
        """Returns "file.py:12": the innermost frame of the user's code, or the innermost of all frames if there is
        none.
        """
        if metadata.text(_Metadata.file):  # without a table, the names are in the metadata
            return f"{metadata.text(_Metadata.file)}:{metadata.number(_Metadata.line)}"
        stack: list[tuple[str, int]] = []
        frame = metadata.number(_Metadata.frame)  # ids begin at 1; 0 means none
        while 0 < frame <= len(self._frames):
            location = self._locations[self._frames[frame - 1].number(_Frames.frame_location) - 1]
            stack.append(
                (self._files[location.number(_Frames.location_file) - 1], location.number(_Frames.location_line))
            )
            outer = self._frames[frame - 1].number(_Frames.frame_parent)
            frame = outer if outer < frame else 0
        own = [place for place in stack if not _is_library(place[0])] or stack
        return f"{own[0][0]}:{own[0][1]}" if own else ""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return _compat.is_own_file(file)
    return file.startswith(_STDLIB) or re.search(r"[/\\](site|dist)-packages[/\\]", file) is not None


# xla.PrimitiveType
_TYPES = re.findall(
    r"\w+",
    """invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4
    f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu""",
)


_TUPLE = _TYPES.index("tuple")


def _shape(shape: Message) -> str:
    parts = shape.messages(_Shape.parts)
    if parts:
        return f"({', '.join(map(_shape, parts))})"
    number = shape.number(_Shape.type)
    name = _TYPES[number] if number < len(_TYPES) else f"type{number}"
    return f"{name}[{','.join(map(str, shape.numbers(_Shape.dimensions)))}]"
