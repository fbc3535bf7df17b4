"""What devices send to one another in a compiled program: its collectives, those that the compiler put in of its own
among them.

XLA partitions a program whose arguments are sharded, and puts collectives where an operation needs what other devices
have. Each carries the name and the source line of the operation that it serves. XLA for TPUs also runs a matmul in
windows: a loop in which parts of an operand go from one device to the next while others are multiplied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxckpt.memory import hlo
from jaxckpt.memory.wire import Message


@dataclass(frozen=True)
class CompiledCollective:
    """A collective of a compiled program.

    Attributes:
      kind: XLA's name, such as "all-gather".
      sent_bytes: what each device sends in one run, as rings of devices send it. S = what goes in: all-gather
        (n - 1) S, all-reduce 2 S (n - 1)/n, reduce-scatter and all-to-all S (n - 1)/n, collective-permute S.
      devices: how many of them exchange something; 0 where the program does not say.
      runs: how often it runs in one run of the program.
      operation: JAX's name of the operation that it serves, such as "jit(loss)/jvp()/dot_general"; "" where the
        compiler says none, as for most sums of gradients.
      source: "file.py:line" of the user's code, or "".
    """

    kind: str
    sent_bytes: float
    devices: int
    runs: int
    operation: str
    source: str


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def read(program: hlo.CompiledProgram) -> tuple[CompiledCollective, ...]:
    """Returns the collectives of a program, in the order of its computations."""
    return tuple(_Reader(program).walk(program.entry, 1))


class _Reader:
    def __init__(self, program: hlo.CompiledProgram) -> None:
        self.program, self.computations = program, program.computations

    def walk(
        self, computation: int, runs: int, chains: set[str] | None = None, caller: Message | None = None
    ) -> Iterator[CompiledCollective]:
        """Yields the collectives of a computation that runs so often, and of those that it calls.

        XLA for TPUs runs a collective beside matmuls: it then stands in the fusion that starts it, in those that go on
        with it, and in the one that ends it, each time as a member of the same chain.

        Args:
          chains: those that were met; None for an empty set.
          caller: the instruction that calls the computation.
        """
        known = self.computations.get(computation, {})
        chains = set() if chains is None else chains
        for instruction in known.values():
            opcode = instruction.text(hlo.InstructionFields.opcode)
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                chain = _chain(instruction)
                if chain in chains:
                    continue
                chains.update({chain} - {""})
                yield self._collective(kind, instruction, computation, runs, caller)
            elif not opcode.endswith(("-done", "-update")):  # these name what their start has called
                loop = opcode == "while"
                each = runs * self._trips(instruction) if loop else runs
                for called in instruction.numbers(hlo.InstructionFields.called_ids):
                    yield from self.walk(called, each, None if loop else chains, instruction)

    def _collective(
        self, kind: str, instruction: Message, computation: int, runs: int, caller: Message | None
    ) -> CompiledCollective:
        known = self.computations[computation]
        operands = [known[i] for i in instruction.numbers(hlo.InstructionFields.operand_ids) if i in known]
        given = sum(_bytes(operand) for operand in operands)
        made = _bytes(instruction)
        devices = _group_size(instruction)
        if not devices and kind == "all-gather" and given:
            # The shape of a start is that of its operands and its results together.
            started = instruction.text(hlo.InstructionFields.opcode).endswith("-start")
            devices = round((made - given * started) / given)
        if kind == "all-reduce" and caller is not None and _is(caller, "fusion"):
            # XLA for TPUs writes a reduce-scatter as a fusion of an all-reduce and the slice of this device.
            root = self.program.root(computation)
            if _is(root, "dynamic-slice") and _bytes(root) * devices == made:
                kind = "reduce-scatter"
        others = 1 - 1 / devices if devices else 1.0
        sent = {
            "all-gather": given * max(devices - 1, 0),
            "all-reduce": 2 * given * others,
            "collective-permute": given,
            "collective-broadcast": given,
        }.get(kind, given * others)
        metadata = instruction.message(hlo.InstructionFields.metadata)
        if caller is not None and not metadata.text(hlo.MetadataFields.operation):
            metadata = caller.message(hlo.InstructionFields.metadata)
        operation = metadata.text(hlo.MetadataFields.operation)
        return CompiledCollective(kind, float(sent), devices, runs, operation, self.program.line(metadata))

    def _trips(self, loop: Message) -> int:
        """Returns how often a loop runs: what the compiler says, or what is read from a condition `i < constant` and a
        body that adds a constant to i; 1 where neither is there.
        """
        said = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text(hlo.InstructionFields.backend_config))
        if said:
            return int(said[1])
        body, condition = [*loop.numbers(hlo.InstructionFields.called_ids), 0, 0][:2]
        test = self._inside(condition, self.program.root(condition))
        place = next((m.number(hlo.InstructionFields.tuple_index) for m in test if _is(m, "get-tuple-element")), None)
        limit = max((c for c in map(_constant, test) if c is not None), default=None)
        if place is None or limit is None:
            return 1
        carried = self.program.root(body).numbers(hlo.InstructionFields.operand_ids)
        step = 1
        if place < len(carried) and carried[place] in self.computations.get(body, {}):
            counter = self.computations[body][carried[place]]
            added = [c for c in map(_constant, self._inside(body, counter, depth=2)) if c]
            step = min(added, default=1)
        return max(math.ceil(limit / step), 1)

    def _inside(self, computation: int, instruction: Message, depth: int = 4) -> list[Message]:
        """Returns what an instruction is computed from in its computation, itself first, through fusions."""
        known, found = self.computations.get(computation, {}), [instruction]
        if depth:
            for identity in instruction.numbers(hlo.InstructionFields.operand_ids):
                if identity in known:
                    found += self._inside(computation, known[identity], depth - 1)
            for called in instruction.numbers(hlo.InstructionFields.called_ids):
                found += self._inside(called, self.program.root(called), depth - 1)
        return found


def _is(instruction: Message, opcode: str) -> bool:
    return instruction.text(hlo.InstructionFields.opcode) == opcode


def _bytes(instruction: Message) -> int:
    """Returns the bytes of an instruction's results."""
    return hlo.shape_bytes(instruction.message(hlo.InstructionFields.shape))


def _chain(instruction: Message) -> str:
    """Returns the chain of fusions that run a collective of a TPU together; "" for a collective that is in none.

    The channel does not say it: all collectives of a function that is mapped over devices have channel 1.
    """
    fields = hlo.AttributesFields
    entries = instruction.message(hlo.InstructionFields.attributes).messages(fields.entries)
    return next((e.text(fields.value) for e in entries if e.text(fields.key) == "chain_id"), "")


def _constant(instruction: Message) -> int | None:
    """Returns the value of a constant that is one integer; None for anything else."""
    if not _is(instruction, "constant"):
        return None
    literal = instruction.message(hlo.InstructionFields.literal)
    for field in (hlo.LiteralFields.s32, hlo.LiteralFields.u32, hlo.LiteralFields.s64, hlo.LiteralFields.u64):
        numbers = literal.numbers(field)
        if len(numbers) == 1:
            return numbers[0]
    return None


def _group_size(instruction: Message) -> int:
    """Returns how many devices a collective joins; 0 where the program does not say."""
    for group in instruction.messages(hlo.InstructionFields.groups):
        return len(group.numbers(hlo.GroupsFields.members))
    if size := instruction.message(hlo.InstructionFields.group_iota).number(hlo.GroupsFields.iota_size):
        return size
    listed = instruction.message(hlo.InstructionFields.group_list)
    for group in listed.messages(hlo.GroupsFields.list):
        return len(group.numbers(hlo.GroupsFields.members))
    if size := listed.message(hlo.GroupsFields.iota).number(hlo.GroupsFields.iota_size):
        return size
    return _joined(instruction.message(hlo.InstructionFields.group_mesh))


def _joined(groups: Message) -> int:
    """Returns how many devices of a mesh the axes join, or parts of axes; 0 where nothing is joined."""
    fields = hlo.GroupMeshFields
    axes = groups.message(fields.mesh).messages(fields.axes)
    size = 0
    for joined in groups.messages(fields.joined):
        axis = joined.number(fields.axis)
        if axis >= len(axes):
            return 0
        part = joined.message(fields.part).number(fields.part_size)
        size = max(size, 1) * (part or axes[axis].number(fields.axis_size))
    return size


def by_kind(found: Iterable[CompiledCollective]) -> dict[str, tuple[int, float]]:
    """Returns kind -> (runs, bytes that each device sends) in one run of the program, the most bytes first."""
    summed: dict[str, tuple[int, float]] = {}
    for each in found:
        runs, sent = summed.get(each.kind, (0, 0.0))
        summed[each.kind] = runs + each.runs, sent + each.runs * each.sent_bytes
    return dict(sorted(summed.items(), key=lambda item: -item[1][1]))


def total(found: Iterable[CompiledCollective]) -> float:
    """Returns the bytes that each device sends in one run of a program."""
    return float(sum(each.runs * each.sent_bytes for each in found))
