"""Reads XLA's dump of a compiled program: its buffer assignment.

The compiler can write its final program, an `HloProto`, to a folder (`report.measure` makes it do so). It has the
scheduled program and the buffer assignment: the allocations, the values in each allocation, and the trace of the heap
simulator, which says at which instructions the life of a value begins and ends. The timeline of live bytes and the
names of the largest buffers come from these messages, in the same way for CPU, CUDA and TPU.

They are not a public interface (see `hlo`), so the messages are checked against each other: see `_check`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jaxckpt._errors import UnreadableDumpError
from jaxckpt.core import garbage
from jaxckpt.core.argument_names import of_leaf
from jaxckpt.memory import collectives, hlo
from jaxckpt.memory.buffers import Assignment, Buffer, Lifetime
from jaxckpt.memory.platforms import PLATFORMS
from jaxckpt.memory.wire import Message

# Memory spaces, the "colours" of XLA's buffers. 5 is host memory on all platforms (xla/layout.h:
# Layout::kHostMemorySpace). On TPUs the others are on the chip: the vector memory (VMEM) or, on v4, the common memory
# (CMEM), and some with a few bytes of semaphores and scalars. On GPUs, 1 is main memory that collectives can reach.
_MAIN, _HOST = 0, 5

ENDING = "after_optimizations.hlo.pb"
"""How the name of a file ends that has a program with its buffer assignment."""


# The numbers of the fields of the assignment that are read, for each message; `hlo` has those of the program.


class _Hlo:  # HloProto
    module, assignment = 1, 3


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


def largest_dump(folder: str | os.PathLike[str]) -> bytes | None:
    """Returns the program that the compiler wrote to a folder, for `read_dump`; None if there is none.

    A GPU's compiler may write helper programs beside it. They are smaller.
    """
    files = sorted(pathlib.Path(folder).glob(f"*{ENDING}"), key=lambda path: path.stat().st_size)
    return files[-1].read_bytes() if files else None


@garbage.seldom()
def read_dump(dumped: bytes, platform: str) -> Assignment:
    """Reads a serialised xla.HloProto that holds a scheduled module and its buffer assignment.

    Args:
      dumped: the bytes, as XLA writes them ("...after_optimizations.hlo.pb").
      platform: name of the platform; memory spaces have different meanings on each.

    Raises:
      UnreadableDumpError: the bytes are something else, incomplete, or have another layout.
    """
    try:
        return _read(Message(dumped), platform)
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
    all_values = {value.number(_Value.id): value for value in assignment.messages(_Assignment.values)}
    values = {identity: v for identity, v in all_values.items() if program.instruction(v) not in program.hlo.left_out}
    left_out = all_values.keys() - values.keys()
    _check(program, assignment, values, left_out)
    traces = [
        [event for event in trace.messages(_Trace.events) if event.number(_Trace.value) not in left_out]
        for trace in assignment.messages(_Assignment.traces)
    ]
    places = _replay(traces, program, values)

    standing: list[Buffer] = []
    offloaded: list[Lifetime] = []
    spaces: dict[int, list[Lifetime]] = {_MAIN: []}
    host = argument = output = alias = temp = 0
    for allocation in assignment.messages(_Assignment.allocations):
        colour = allocation.number(_Allocation.colour)
        size, found = _members(allocation, left_out)
        members = [values[m.number(_Allocation.member_value)] for m in found]
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
            temp += size
            lifetimes = spaces.setdefault(PLATFORMS[platform].space(colour), [])
            lifetimes += _lives(program, inside, values, kind)
            simulated = bool(inside) or not size or bool(allocation.number(_Allocation.tuple))
            _agree(simulated, "the dump does not say when a temporary is live")
    main = spaces.pop(_MAIN)
    moving = max((_most(trace, values) for trace in traces), default=0)
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
        temp,
        sum(buffer.bytes for buffer in standing) + moving,
        tuple(offloaded),
        collectives.read(program.hlo),
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


def _members(allocation: Message, left_out: Set[int]) -> tuple[int, list[Message]]:
    """Returns the size of an allocation and its members, as they are without the values that are left out. These have
    no bytes, but XLA may begin one of them at the next multiple of its alignment, behind everything else.
    """
    size, members = allocation.number(_Allocation.size), allocation.messages(_Allocation.members)
    found = [member for member in members if member.number(_Allocation.member_value) not in left_out]
    if len(found) < len(members):
        size = max((m.number(_Allocation.member_offset) + m.number(_Allocation.member_size) for m in found), default=0)
    return size, found


def _most(trace: Sequence[Message], values: Mapping[int, Message]) -> int:
    """Returns the most bytes that are live at once by a trace of the heap simulator, as XLA counts them: in the order
    of its events, in which one branch comes after another. What is on the host counts nothing.
    """
    shares: dict[int, int] = {}  # value -> the one whose place it has
    users: dict[int, int] = {}
    held: dict[int, int] = {}
    live = most = 0
    for event in trace:
        kind, value = event.number(_Trace.kind), event.number(_Trace.value)
        owner = shares.get(value, value)
        if kind == _Trace.free:
            users[owner] = users.get(owner, 0) - 1
            live -= held[owner] if users[owner] == 0 else 0
            continue
        if kind == _Trace.share:
            other = event.number(_Trace.shares_with)
            owner = shares[value] = shares.get(other, other)
        if kind == _Trace.share and users.get(owner, 0) > 0:
            users[owner] += 1
            continue
        users[owner] = 1
        held[owner] = 0 if values[value].number(_Value.colour) == _HOST else values[value].number(_Value.size)
        live += held[owner]
        most = max(most, live)
    return most


def _check(program: _Program, assignment: Message, values: Mapping[int, Message], left_out: Set[int]) -> None:
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
        _, members = _members(allocation, left_out)
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


def _replay(traces: Sequence[Sequence[Message]], program: _Program, values: Mapping[int, Message]) -> dict[int, _Place]:
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
        for event in trace:
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
    """The scheduled program: order of its instructions, and what they say of buffers."""

    def __init__(self, module: Message) -> None:
        self.hlo = hlo.CompiledProgram(module)
        # HloScheduleProto is a map from a computation's id to a message with the ids of its instructions.
        schedule = {
            entry.number(1): [each for each in entry.message(2).numbers(1) if each not in self.hlo.left_out]
            for entry in module.message(hlo.ModuleFields.schedule).messages(1)
        }
        self._instructions: dict[int, Message] = {}
        for identity, found in self.hlo.computations.items():
            _agree(
                sorted(found) == sorted(schedule.get(identity, found)),
                "a schedule is not of its computation's instructions",
            )
            self._instructions |= found
        _agree(schedule.keys() <= self.hlo.computations.keys(), "a scheduled computation is missing")
        for instruction in self._instructions.values():
            shape = instruction.message(hlo.InstructionFields.shape)
            known = instruction.text(hlo.InstructionFields.name) and shape.number(hlo.ShapeFields.type)
            _agree(bool(known), "an instruction has no name or no shape")
        _agree(self.hlo.entry in schedule, "the entry computation has no schedule")
        entry = self.hlo.computations[self.hlo.entry]
        self.arguments = {
            identity
            for identity, instruction in entry.items()
            if instruction.text(hlo.InstructionFields.opcode) == "parameter"
        }
        root = self._instructions[self.hlo.roots[self.hlo.entry]]
        self.has_results = not hlo.is_empty(root.message(hlo.InstructionFields.shape))
        order = list(self._flatten(self.hlo.entry, schedule, set()))
        names = [self._instructions[i].text(hlo.InstructionFields.name) for i in order]
        self._order = {identity: position for position, identity in enumerate(order)}
        self.positions = {name: position for position, name in enumerate(names)}
        self.labels = tuple(self._operation(i) or name for i, name in zip(order, names))

    def _flatten(self, computation: int, schedule: dict[int, list[int]], seen: set[int]) -> Iterator[int]:
        # The order of XLA's HloLiveRange: what an instruction calls is just before it, a loop's condition (called after
        # the body) first.
        if computation in seen or computation not in schedule:
            return
        seen.add(computation)
        for identity in schedule[computation]:
            instruction = self._instructions[identity]
            called = instruction.numbers(hlo.InstructionFields.called_ids)
            if instruction.text(hlo.InstructionFields.opcode) == "while":
                called = called[::-1]
            for each in called:
                yield from self._flatten(each, schedule, seen)
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
        return self._instructions[self.instruction(value)].text(hlo.InstructionFields.name)

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
        shape = instruction.message(hlo.InstructionFields.shape)
        for index in place.numbers(_Value.place_index):
            parts = shape.messages(hlo.ShapeFields.parts)
            shape = parts[index] if index < len(parts) else Message()
        source = next((line for m in self._metadata(identity) if (line := self.hlo.line(m))), "")
        return Buffer(
            instruction.text(hlo.InstructionFields.name),
            size,
            hlo.shape_text(shape),
            self._operation(identity),
            source,
            kind,
        )

    def _operation(self, identity: int) -> str:
        named = (name for m in self._metadata(identity) if (name := m.text(hlo.MetadataFields.operation)))
        return of_leaf(next(named, ""))

    def _metadata(self, identity: int) -> Iterator[Message]:
        """Yields an instruction's metadata, then that of its fusion's root, then that of the instruction whose value it
        moves.
        """
        for _ in range(8):
            instruction = self._instructions.get(identity)
            if instruction is None:
                return
            yield instruction.message(hlo.InstructionFields.metadata)
            for called in instruction.numbers(hlo.InstructionFields.called_ids):
                yield self.hlo.root(called).message(hlo.InstructionFields.metadata)
            operands = instruction.numbers(hlo.InstructionFields.operand_ids)
            if not operands:
                return
            identity = operands[0]
